# SPDX-License-Identifier: Apache-2.0
"""The maps of a hyper-connection from the projected streams, and their gradient in one kernel (arXiv 2512.24880; fp32 throughout).

    z     = mix * scale[read | write | comb] + base                       [T, n + n + n * n]
    read  = sigmoid(z[:n]) + eps          write = 2 sigmoid(z[n : 2n])
    comb  = softmax over the last index of z[2n:] viewed [n, n], + eps, then alternately divided by (its sum over the first index + eps) and by
            (its sum over the last + eps): 2 * iterations - 1 times, so the first index (source stream) comes last

Every matrix on the way is u[i] * v[j] * start[i, j], start the one before the first division. So the backward repeats the divisions on the vectors u
and v alone, keeps those, and goes back without a division: with h the gradient of a matrix times u * v, a division of columns takes from it u * v
times the sums of h * start over the columns, and one of rows likewise.

Legend: T tokens, n streams.
"""

from __future__ import annotations

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import ceil_div
from kernels.triton_fused.tuples import appended

STREAMS: tuple[int, ...] = (1, 2, 4, 8)
PARTIALS = 1024  # sums of programs of the backward that are added at once


@triton.jit
def _probabilities(z):
    """Softmax over the last axis of [B, n, n]."""
    z = tl.exp(z - tl.max(z, 2, keep_dims=True))
    return z / tl.sum(z, 2, keep_dims=True)


@triton.jit
def _before_divisions(start, grad, eps, STEPS: tl.constexpr):
    """The gradient of `start` [B, n, n] from that of what STEPS divisions make of it."""
    u, v = tl.full([start.shape[0], start.shape[1], 1], 1.0, tl.float32), tl.full([start.shape[0], 1, start.shape[1]], 1.0, tl.float32)
    us = (u,)
    vs = (v,)
    for step in tl.static_range(STEPS):
        if step % 2 == 0:
            v = v / (v * tl.sum(start * u, 1, keep_dims=True) + eps)
            vs = appended(vs, v)
        else:
            u = u / (u * tl.sum(start * v, 2, keep_dims=True) + eps)
            us = appended(us, u)
    grad = grad * (u * v)
    for step in tl.static_range(STEPS - 1, -1, -1):
        u, v = us[(step + 1) // 2], vs[step // 2 + 1]
        if step % 2 == 0:
            grad -= u * (v * tl.sum(grad * start, 1, keep_dims=True))
        else:
            grad -= (u * tl.sum(grad * start, 2, keep_dims=True)) * v
    return grad


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
    MIX, SCALE, BASE, D_READ, D_WRITE, D_COMB, D_MIX, PARTIAL, tokens, eps, N: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Program: BLOCK_T tokens. PARTIAL [programs, 2, n (2 + n)]: sums over its tokens of d_z, and of d_z * mix."""
    R: tl.constexpr = N * (2 + N)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    stream = tl.arange(0, N)[None, :]
    cell = tl.arange(0, N)[None, :, None] * N + tl.arange(0, N)[None, None, :]
    one = (stream >= 0) & (token < tokens)[:, None]
    square = (cell >= 0) & (token < tokens)[:, None, None]
    read_scale, write_scale, comb_scale = tl.load(SCALE), tl.load(SCALE + 1), tl.load(SCALE + 2)
    sums = PARTIAL + tl.program_id(0) * (2 * R)

    offset = token[:, None, None] * R + 2 * N + cell
    mix = tl.load(MIX + offset, mask=square, other=0.0)
    grad = tl.load(D_COMB + token[:, None, None] * (N * N) + cell, mask=square, other=0.0)
    probabilities = _probabilities(mix * comb_scale + tl.load(BASE + 2 * N + cell))
    grad = _before_divisions(probabilities + eps, grad, eps, STEPS)
    grad = probabilities * (grad - tl.sum(grad * probabilities, 2, keep_dims=True))
    tl.store(D_MIX + offset, grad * comb_scale, mask=square)
    at = sums + 2 * N + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(at, tl.sum(grad, 0))
    tl.store(at + R, tl.sum(grad * mix, 0))

    offset = token[:, None] * R + stream
    mix = tl.load(MIX + offset, mask=one, other=0.0)
    s = tl.sigmoid(mix * read_scale + tl.load(BASE + stream))
    grad = tl.load(D_READ + token[:, None] * N + stream, mask=one, other=0.0) * s * (1 - s)
    tl.store(D_MIX + offset, grad * read_scale, mask=one)
    at = sums + tl.arange(0, N)
    tl.store(at, tl.sum(grad, 0))
    tl.store(at + R, tl.sum(grad * mix, 0))

    mix = tl.load(MIX + offset + N, mask=one, other=0.0)
    s = tl.sigmoid(mix * write_scale + tl.load(BASE + N + stream))
    grad = tl.load(D_WRITE + token[:, None] * N + stream, mask=one, other=0.0) * 2 * s * (1 - s)
    tl.store(D_MIX + offset + N, grad * write_scale, mask=one)
    tl.store(at + N, tl.sum(grad, 0))
    tl.store(at + N + R, tl.sum(grad * mix, 0))


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
    """One warp takes many tokens, so that a thread has whole rows or columns and adds up alone; of 8 streams as many as its registers hold."""
    return {"N": streams, "STEPS": 2 * iterations - 1, "BLOCK_T": 16 if streams <= 4 else 2, "num_warps": 1}


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
    programs = ceil_div(tokens, sizes["BLOCK_T"])
    partial = torch.empty(programs, 2, mix.shape[1], dtype=mix.dtype, device=mix.device)
    hyper_maps_backward_kernel[(programs,)](mix, scale, base, d_read, d_write, d_comb, d_mix, partial, tokens, eps, **sizes)
    add_partials_kernel[(3, 2)](partial, d_scale, d_base, programs, N=n, BLOCK_P=min(PARTIALS, 16384 // n**2), num_warps=8)
    return d_mix, d_scale, d_base


def _streams(mix: Tensor) -> int:
    """n of n (2 + n) columns."""
    return isqrt(mix.shape[1] + 1) - 1
