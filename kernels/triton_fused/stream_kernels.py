# SPDX-License-Identifier: Apache-2.0
"""Kernels around one sublayer with n residual streams: project them, read the sublayer's input, write its output back; and their gradients.

What goes over single features runs one warp a token, so that the sums over the features (n * n + n of them in the backward) stay within it: each
thread first adds the 8 neighbours that it holds.

What multiplies by the projection runs on tiles of tokens and on the tensor cores: streams of 16 bits are tf32 numbers as they are, so two tf32
products, of the leading and of the remaining bits of the fp32 operand, have the accuracy of fp32 (WIDE, streams in fp32: three). A long sum is taken
in fp32 outside of the tensor cores, whose accumulator truncates, and as a difference, since the compiler would fold an addition into it.

Legend: T tokens, n = N streams, d = D features, K = n * d, R = rows of the projection, J source stream, S target stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_fused.hyper_maps import write_maps
from kernels.triton_fused.tuples import appended


@triton.jit
def _product(a, b, WIDE: tl.constexpr, SPLIT_LEFT: tl.constexpr):
    """a @ b with the accuracy of fp32. Without WIDE one operand has at most 11 significant bits, so is a tf32 number; SPLIT_LEFT: that is b."""
    if WIDE:
        return tl.dot(a, b, input_precision="tf32x3")
    if SPLIT_LEFT:
        head = _tf32(a)
        return tl.dot(head, b, tl.dot(a - head, b, input_precision="tf32"), input_precision="tf32")
    head = _tf32(b)
    return tl.dot(a, head, tl.dot(a, b - head, input_precision="tf32"), input_precision="tf32")


@triton.jit
def _tf32(x):
    """x rounded to the 11 significant bits of tf32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def open_kernel(
    STREAMS,
    FN,
    SCALE,
    BASE,
    MIX,
    NORM,
    READ,
    WRITE,
    COMB,
    X,
    tokens,
    eps,
    norm_eps,
    WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """All in front of a sublayer: mix [T, R] = (streams @ fn^T) * norm, norm [T] = rsqrt(mean(streams^2) + norm_eps), the maps of mix, and
    x [T, d] = sum over streams of read * streams. STEPS 0, the closing head: of the maps there is only read = sigmoid(mix * scale + base) + eps.
    """
    K: tl.constexpr = N * D
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = token < tokens
    row = tl.arange(0, BLOCK_R)
    negative = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    # The squares take a tile of their own, one step behind: were the tile of the product used twice, its rows would share banks of shared memory.
    column = tl.arange(0, BLOCK_K)
    tile = tl.load(STREAMS + token[:, None] * K + column[None, :], mask=here[:, None] & (column < K)[None, :], other=0.0)
    for first in range(0, K, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        at = STREAMS + token[:, None] * K + column[None, :]
        following = tl.load(at + BLOCK_K, mask=here[:, None] & (column + BLOCK_K < K)[None, :], other=0.0)
        x = tl.load(at, mask=here[:, None] & (column < K)[None, :], other=0.0).to(tl.float32)
        fn = tl.load(FN + row[None, :] * K + column[:, None], mask=(row < R)[None, :] & (column < K)[:, None], other=0.0).to(tl.float32)
        negative = negative - _product(x, fn, WIDE, False)
        squares += tile.to(tl.float32) * tile.to(tl.float32)
        tile = following
    norm = tl.rsqrt(tl.sum(squares, 1) / K + norm_eps)
    mix = -negative * norm[:, None]
    tl.store(NORM + token, norm, mask=here)
    tl.store(MIX + token[:, None] * R + row[None, :], mix, mask=here[:, None] & (row < R)[None, :])
    if STEPS > 0:
        tl.debug_barrier()  # mix was written by other threads of this program
        write_maps(MIX, SCALE, BASE, READ, WRITE, COMB, token, tokens, eps, N, STEPS)
    else:
        z = mix * tl.load(SCALE) + tl.load(BASE + row, mask=row < R, other=0.0)[None, :]
        tl.store(READ + token[:, None] * R + row[None, :], tl.sigmoid(z) + eps, mask=here[:, None] & (row < R)[None, :])
    tl.debug_barrier()  # read likewise
    for first in range(0, D, BLOCK_D):
        dim = first + tl.arange(0, BLOCK_D)
        real = here[:, None] & (dim < D)[None, :]
        out = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for j in tl.static_range(N):
            read = tl.load(READ + token * N + j, mask=here, other=0.0)[:, None]
            out += read * tl.load(STREAMS + token[:, None] * K + (j * D + dim)[None, :], mask=real, other=0.0).to(tl.float32)
        tl.store(X + token[:, None] * D + dim[None, :], out.to(X.dtype.element_ty), mask=real)


@triton.jit
def write_kernel(STREAMS, Y, WRITE, COMB, OUT, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[:, s] = write[:, s] * y + sum over j of comb[:, j, s] * streams[:, j]."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    write = tl.load(WRITE + token * N + stream)[:, None]
    comb = tl.load(COMB + token * (N * N) + stream[:, None] * N + stream[None, :])[:, :, None]  # [J, S, 1]
    for first in range(0, D, BLOCK_D):
        dim = first + tl.arange(0, BLOCK_D)
        offset = token * (N * D) + stream[:, None] * D + dim[None, :]
        real = (stream >= 0)[:, None] & (dim < D)[None, :]
        x = tl.load(STREAMS + offset[:, None, :], mask=real[:, None, :], other=0.0).to(tl.float32)  # [J, 1, D]
        y = tl.load(Y + token * D + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        out = tl.sum(comb * x, 0) + write * y
        tl.store(OUT + offset, out.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def write_backward_kernel(GRAD, Y, WRITE, D_Y, D_WRITE, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """d_y = sum over streams of write * grad; d_write [T, n] = grad . y."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    write = tl.load(WRITE + token * N + stream)[:, None]
    products = tl.zeros([N, BLOCK_D // 8], tl.float32)
    for first in range(0, D, BLOCK_D):
        dim = first + tl.arange(0, BLOCK_D)
        real = (stream >= 0)[:, None] & (dim < D)[None, :]
        grad = tl.load(GRAD + token * (N * D) + stream[:, None] * D + dim[None, :], mask=real, other=0.0).to(tl.float32)
        y = tl.load(Y + token * D + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        tl.store(D_Y + token * D + dim, tl.sum(write * grad, 0).to(D_Y.dtype.element_ty), mask=dim < D)
        products += tl.sum(tl.reshape(grad * y, [N, BLOCK_D // 8, 8]), 2)
    tl.store(D_WRITE + token * N + stream, tl.sum(products, 1))


@triton.jit
def products_kernel(STREAMS, GRAD, D_X, D_READ, D_COMB, MIXED: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """d_read [T, n] = streams . d_x; with MIXED, d_comb [T, n, n] = streams[j] . grad[s]."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, N)
    read_products = tl.zeros([N, 1, BLOCK_D // 8], tl.float32)
    comb_products = tl.zeros([N, N, BLOCK_D // 8], tl.float32)
    for first in range(0, D, BLOCK_D):
        dim = first + tl.arange(0, BLOCK_D)
        offset = token * (N * D) + stream[:, None] * D + dim[None, :]
        real = (stream >= 0)[:, None] & (dim < D)[None, :]
        x = tl.load(STREAMS + offset[:, None, :], mask=real[:, None, :], other=0.0).to(tl.float32)  # [J, 1, D]
        d_x = tl.load(D_X + token * D + dim, mask=dim < D, other=0.0).to(tl.float32)[None, None, :]
        read_products += tl.sum(tl.reshape(x * d_x, [N, 1, BLOCK_D // 8, 8]), 3)
        if MIXED:
            grad = tl.load(GRAD + offset[None, :, :], mask=real[None, :, :], other=0.0).to(tl.float32)  # [1, S, D]
            comb_products += tl.sum(tl.reshape(x * grad, [N, N, BLOCK_D // 8, 8]), 3)
    tl.store(D_READ + token * N + stream[:, None], tl.sum(read_products, 2))
    if MIXED:
        tl.store(D_COMB + token * (N * N) + stream[:, None] * N + stream[None, :], tl.sum(comb_products, 2))


@triton.jit
def _in_tiles(x, WARPS: tl.constexpr, LANE: tl.constexpr):
    """A product [16 * WARPS, 4 * LANE] of rows and columns in the order of `streams_backward_kernel`, as a tile [8, WARPS, 2, 4 * LANE] of it."""
    x = tl.reshape(x, [WARPS, 2, 8, LANE // 2, 4, 2])
    return tl.reshape(tl.permute(x, (2, 0, 1, 4, 3, 5)), [8, WARPS, 2, 4 * LANE])


@triton.jit
def streams_backward_kernel(
    STREAMS,
    FN,
    GRAD,
    D_X,
    READ,
    COMB,
    MIX,
    D_MIX,
    NORM,
    D_STREAMS,
    tokens,
    WIDE: tl.constexpr,
    MIXED: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WARPS: tl.constexpr,
):
    """d_streams[:, j] = read[j] * d_x + d_mix through the projection and its norm + (MIXED) sum over s of comb[j, s] * grad[:, s].

    Program: 16 * WARPS tokens and COLUMNS features, 4 * LANE at a time. Rows and columns go into the product in such an order that a thread gets LANE
    neighbouring features of two tokens: those that it loads and stores anyway, so that (with Triton 3.6) no tile goes through shared memory. AHEAD:
    the streams are loaded before the first product, not one by one.
    """
    BLOCK_D: tl.constexpr = 4 * LANE
    SHARES: tl.constexpr = (D + COLUMNS - 1) // COLUMNS  # in one dimension with the tiles of tokens: the others of a grid end at 65,535
    first = (tl.program_id(0) // SHARES).to(tl.int64) * (16 * WARPS)
    start = tl.program_id(0) % SHARES * COLUMNS
    # the token of a row of the product: row 16 w + 8 h + q is token 8 (WARPS h + w) + q
    index = tl.arange(0, 16 * WARPS)
    of_row = first + index // 8 % 2 * (8 * WARPS) + index // 16 * 8 + index % 8
    # the feature of a column of it: column 8 k + 2 p + b is feature LANE p + 2 k + b
    index = tl.arange(0, BLOCK_D)
    of_column = tl.max_contiguous(tl.multiple_of(index % 8 // 2 * LANE + index // 8 * 2 + index % 2, 2), 2)
    row = tl.arange(0, BLOCK_R)
    inside = (of_row < tokens)[:, None] & (row < R)[None, :]
    cell = of_row[:, None] * R + row[None, :]
    d_mix = tl.load(D_MIX + cell, mask=inside, other=0.0)
    norm = tl.load(NORM + of_row, mask=of_row < tokens, other=0.0)
    through_norm = tl.sum(d_mix * tl.load(MIX + cell, mask=inside, other=0.0), 1) * norm * norm / (-N * D)
    through_norm = tl.reshape(tl.permute(tl.reshape(through_norm, [WARPS, 2, 8]), (2, 0, 1)), [8, WARPS, 2, 1])
    d_mix = d_mix * norm[:, None]
    # the tiles: q, w, h, feature
    of_group = tl.arange(0, 2)[None, None, :, None] * WARPS + tl.arange(0, WARPS)[None, :, None, None]
    token = first + of_group * 8 + tl.arange(0, 8)[:, None, None, None]
    here = token < tokens
    for begin in range(start, tl.minimum(start + COLUMNS, D), BLOCK_D):
        dim = begin + tl.arange(0, BLOCK_D)[None, None, None, :]
        real = here & (dim < D)
        offset = token * (N * D) + dim
        d_x = tl.load(D_X + token * D + dim, mask=real, other=0.0).to(tl.float32)
        if MIXED:
            grads = (tl.load(GRAD + offset, mask=real, other=0.0).to(tl.float32),)
            for s in tl.static_range(1, N):
                grads = appended(grads, tl.load(GRAD + offset + s * D, mask=real, other=0.0).to(tl.float32))
        if AHEAD:
            streams = (tl.load(STREAMS + offset, mask=real, other=0.0),)
            for j in tl.static_range(1, N):
                streams = appended(streams, tl.load(STREAMS + offset + j * D, mask=real, other=0.0))
        for j in tl.static_range(N):
            column = begin + of_column
            fn = tl.load(FN + row[:, None] * (N * D) + (j * D + column)[None, :], mask=(row < R)[:, None] & (column < D)[None, :], other=0.0)
            # narrow: the sum is rounded to 11 bits or fewer in the end
            total = _in_tiles(tl.dot(d_mix, fn.to(tl.float32), input_precision="tf32x3" if WIDE else "tf32"), WARPS, LANE)
            stream = streams[j] if AHEAD else tl.load(STREAMS + offset + j * D, mask=real, other=0.0)
            total += stream.to(tl.float32) * through_norm
            total += tl.load(READ + token * N + j, mask=here, other=0.0) * d_x
            if MIXED:
                for s in tl.static_range(N):
                    total += tl.load(COMB + token * (N * N) + (j * N + s), mask=here, other=0.0) * grads[s]
            tl.store(D_STREAMS + offset + j * D, total.to(D_STREAMS.dtype.element_ty), mask=real)


@triton.jit
def fn_backward_kernel(
    STREAMS,
    D_MIX,
    NORM,
    PARTIAL,
    tokens,
    share,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """partial [programs, R, K]: the sum of (d_mix * norm)^T @ streams over the `share` tokens (a multiple of BLOCK_T) of a program."""
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_R)
    negative = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    start = tl.program_id(1) * share
    for first in range(start, tl.minimum(start + share, tokens), BLOCK_T):
        token = first + tl.arange(0, BLOCK_T).to(tl.int64)
        here = token < tokens
        d_mix = tl.load(D_MIX + token[None, :] * R + row[:, None], mask=here[None, :] & (row < R)[:, None], other=0.0)
        d_mix = d_mix * tl.load(NORM + token, mask=here, other=0.0)[None, :]
        x = tl.load(STREAMS + token[:, None] * K + column[None, :], mask=here[:, None] & (column < K)[None, :], other=0.0).to(tl.float32)
        negative = negative - _product(d_mix, x, WIDE, True)
    at = PARTIAL + (tl.program_id(1) * R + row[:, None]) * K + column[None, :]
    tl.store(at, -negative, mask=(row < R)[:, None] & (column < K)[None, :])
