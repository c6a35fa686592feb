# SPDX-License-Identifier: Apache-2.0
"""The maps of a hyper-connection from the projected streams, and their gradient in one kernel (arXiv 2512.24880; fp32 throughout).

    z     = mix * scale[read | write | comb] + base                       [T, n + n + n * n]
    read  = sigmoid(z[:n]) + eps          write = 2 sigmoid(z[n : 2n])
    comb  = softmax over the last index of z[2n:] viewed [n, n], + eps, then alternately divided by (its sum over the first index + eps) and by
            (its sum over the last + eps): 2 * iterations - 1 times, so the first index (source stream) comes last

The backward repeats the divisions and keeps their totals in registers; from the result and the totals it rebuilds each matrix in between.

Legend: T tokens, n streams.
"""

from __future__ import annotations

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import ceil_div

STREAMS: tuple[int, ...] = (1, 2, 4, 8)
PROGRAMS = 1024  # of the backward: each sums d_scale and d_base over its tokens


@triton.jit
def _probabilities(z):
    """Softmax over the last axis of [B, n, n]."""
    z = tl.exp(z - tl.max(z, 2, keep_dims=True))
    return z / tl.sum(z, 2, keep_dims=True)


@triton.jit
def _normalised(matrix, eps, STEPS: tl.constexpr):
    """The matrix after all divisions, and the totals it was divided by, first to last."""
    total = tl.sum(matrix, 1, keep_dims=True) + eps
    matrix = matrix / total
    totals = (total,)
    for step in tl.static_range(1, STEPS):
        total = tl.sum(matrix, 1 + step % 2, keep_dims=True) + eps
        matrix = matrix / total
        totals = totals + (total,)  # type: ignore[assignment]  # noqa: RUF005 - the kernel language has no unpacking
    return matrix, totals


@triton.jit
def write_maps(MIX, SCALE, BASE, READ, WRITE, COMB, token, tokens, eps, N: tl.constexpr, STEPS: tl.constexpr):
    """The maps of some tokens, from what this program knows to be written of MIX."""
    stream = tl.arange(0, N)
    cell = stream[:, None] * N + stream[None, :]
    one = (token < tokens)[:, None] & (stream >= 0)[None, :]
    square = (token < tokens)[:, None, None] & (cell >= 0)[None, :, :]
    at = MIX + token * (N * (2 + N))
    z = tl.load(at[:, None] + stream[None, :], mask=one, other=0.0) * tl.load(SCALE) + tl.load(BASE + stream)[None, :]
    tl.store(READ + token[:, None] * N + stream[None, :], tl.sigmoid(z) + eps, mask=one)
    z = tl.load(at[:, None] + N + stream[None, :], mask=one, other=0.0) * tl.load(SCALE + 1) + tl.load(BASE + N + stream)[None, :]
    tl.store(WRITE + token[:, None] * N + stream[None, :], 2 * tl.sigmoid(z), mask=one)
    z = tl.load(at[:, None, None] + 2 * N + cell[None, :, :], mask=square, other=0.0) * tl.load(SCALE + 2) + tl.load(BASE + 2 * N + cell)[None, :, :]
    comb = _probabilities(z) + eps
    comb = comb / (tl.sum(comb, 1, keep_dims=True) + eps)
    for _ in range(STEPS // 2):
        comb = comb / (tl.sum(comb, 2, keep_dims=True) + eps)
        comb = comb / (tl.sum(comb, 1, keep_dims=True) + eps)
    tl.store(COMB + token[:, None, None] * (N * N) + cell[None, :, :], comb, mask=square)


@triton.jit
def hyper_maps_backward_kernel(
    MIX,
    SCALE,
    BASE,
    D_READ,
    D_WRITE,
    D_COMB,
    D_MIX,
    PARTIAL,
    tokens,
    blocks,
    eps,
    N: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """PARTIAL [programs, 2, n (2 + n)]: sums over the tokens of a program of d_z, and of d_z * mix."""
    R: tl.constexpr = N * (2 + N)
    stream = tl.arange(0, N)
    cell = stream[:, None] * N + stream[None, :]
    read_scale, write_scale, comb_scale = tl.load(SCALE), tl.load(SCALE + 1), tl.load(SCALE + 2)
    read_base, write_base, comb_base = tl.load(BASE + stream), tl.load(BASE + N + stream), tl.load(BASE + 2 * N + cell)
    read_sum, read_through = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    write_sum, write_through = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    comb_sum, comb_through = tl.zeros([N, N], tl.float32), tl.zeros([N, N], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
        one = (token < tokens)[:, None] & (stream >= 0)[None, :]
        square = (token < tokens)[:, None, None] & (cell >= 0)[None, :, :]
        offset = token[:, None] * R + stream[None, :]

        mix = tl.load(MIX + offset, mask=one, other=0.0)
        s = tl.sigmoid(mix * read_scale + read_base[None, :])
        grad = tl.load(D_READ + token[:, None] * N + stream[None, :], mask=one, other=0.0) * s * (1 - s)
        tl.store(D_MIX + offset, grad * read_scale, mask=one)
        read_sum += tl.sum(grad, 0)
        read_through += tl.sum(grad * mix, 0)

        mix = tl.load(MIX + offset + N, mask=one, other=0.0)
        s = tl.sigmoid(mix * write_scale + write_base[None, :])
        grad = tl.load(D_WRITE + token[:, None] * N + stream[None, :], mask=one, other=0.0) * 2 * s * (1 - s)
        tl.store(D_MIX + offset + N, grad * write_scale, mask=one)
        write_sum += tl.sum(grad, 0)
        write_through += tl.sum(grad * mix, 0)

        offset = token[:, None, None] * R + 2 * N + cell[None, :, :]
        mix = tl.load(MIX + offset, mask=square, other=0.0)
        probabilities = _probabilities(mix * comb_scale + comb_base[None, :, :])
        matrix, totals = _normalised(probabilities + eps, eps, STEPS)
        grad = tl.load(D_COMB + token[:, None, None] * (N * N) + cell[None, :, :], mask=square, other=0.0)
        for step in tl.static_range(STEPS - 1, -1, -1):
            grad = (grad - tl.sum(grad * matrix, 1 + step % 2, keep_dims=True)) / totals[step]
            matrix = matrix * totals[step]
        grad = probabilities * (grad - tl.sum(grad * probabilities, 2, keep_dims=True))
        tl.store(D_MIX + offset, grad * comb_scale, mask=square)
        comb_sum += tl.sum(grad, 0)
        comb_through += tl.sum(grad * mix, 0)
    at = PARTIAL + tl.program_id(0) * (2 * R)
    tl.store(at + stream, read_sum)
    tl.store(at + N + stream, write_sum)
    tl.store(at + 2 * N + cell, comb_sum)
    tl.store(at + R + stream, read_through)
    tl.store(at + R + N + stream, write_through)
    tl.store(at + R + 2 * N + cell, comb_through)


@triton.jit(do_not_specialize=["programs"])
def add_partials_kernel(PARTIAL, D_SCALE, D_BASE, programs, N: tl.constexpr, BLOCK_P: tl.constexpr):
    """d_base [n (2 + n)] and d_scale [3] from the sums of all programs, in a fixed order. Program (group, half): d_base of read, write or comb, or
    their d_scale."""
    R: tl.constexpr = N * (2 + N)
    group, half = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, N * N)
    inside = column < tl.where(group == 2, N * N, N)
    total = tl.zeros([BLOCK_P, N * N], tl.float32)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P)
        at = PARTIAL + (2 * program[:, None] + half) * R + group * N + column[None, :]
        total += tl.load(at, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    sums = tl.sum(total, 0)
    if half == 0:
        tl.store(D_BASE + group * N + column, sums, mask=inside)
    else:
        tl.store(D_SCALE + group, tl.sum(sums, 0))


def _sizes(streams: int, iterations: int) -> dict[str, int]:
    """A warp takes 32 cells, one a thread, so that every sum stays within it (64 cells of one token for 8 streams)."""
    return {"N": streams, "STEPS": 2 * iterations - 1, "BLOCK_T": max(1, 32 // streams**2), "num_warps": 1}


def maps_backward(
    mix: Tensor, scale: Tensor, base: Tensor, d_read: Tensor, d_write: Tensor, d_comb: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """d_mix, d_scale and d_base from the gradients of the maps. Sums in a fixed order. Launches on the current device.

    Args, all fp32 and contiguous:
        mix: [T, n (2 + n)], n one of 1, 2, 4, 8. scale: [3]. base: [n (2 + n)]. d_read, d_write: [T, n]. d_comb: [T, n, n] (source stream first).
        iterations: row and column normalisations, 1 or more; the softmax is the first one's rows.
    """
    d_mix, d_scale, d_base = torch.empty_like(mix), torch.empty_like(scale), torch.empty_like(base)
    tokens, n = mix.shape[0], _streams(mix)
    if tokens == 0:
        return d_mix, d_scale.zero_(), d_base.zero_()
    sizes = _sizes(n, iterations)
    blocks = ceil_div(tokens, sizes["BLOCK_T"])
    programs = min(blocks, PROGRAMS)
    partial = torch.empty(programs, 2, mix.shape[1], dtype=mix.dtype, device=mix.device)
    hyper_maps_backward_kernel[(programs,)](mix, scale, base, d_read, d_write, d_comb, d_mix, partial, tokens, blocks, eps, **sizes)
    add_partials_kernel[(3, 2)](partial, d_scale, d_base, programs, N=n, BLOCK_P=min(PROGRAMS, 16384 // n**2), num_warps=8)
    return d_mix, d_scale, d_base


def _streams(mix: Tensor) -> int:
    """n of n (2 + n) columns."""
    return isqrt(mix.shape[1] + 1) - 1
