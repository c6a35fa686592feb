# SPDX-License-Identifier: Apache-2.0
"""Pooling of the compressor: windows of m tokens to one entry each, with a softmax over their slots in every channel; one kernel each way.

    out[c, d] = sum over slots s of p * v          p = softmax over s of g, all in fp32; g = gate + position bias
    dv = p * dy                                    dg = dv * (v - out)                       d_bias = sum over entries of dg

Without overlap the slots of an entry are the m tokens of its window. With overlap they are 2m: the first half of the channels of the window before
it, unless it is the first of its document, then the second half of its own. So each element of the projections belongs to one slot of one entry at
most, whose program writes its gradient; for the first window of a document these are zeros, in the window before it in the row, and the last window
of the row counts as the one before the first. The backward reads the projections again and keeps nothing else.

A tile holds ROWS x BLOCK_D numbers a slot; a row is one entry, or one of LANES shares of the slots of an entry: step * LANES + lane of a window.
Sums over steps stay within a thread. More than STEPS * LANES slots come in chunks; each rescales what the chunks before it added up.

Legend: C entries, D dims of an entry, m = M tokens in a window, width = D, or 2D with overlap; HALVES = width / D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.column_sum import column_sum
from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two

TILE = 512  # numbers a slot: 2 a thread
PROGRAMS = 1056  # of a backward at most: each sums d_bias over its entries; eight a multiprocessor of an H100, two or three of them at a time
ENTRIES = 4  # of a program of the backward at least: what it writes for d_bias is then an eighth of what it reads and writes besides


@triton.jit
def _windows(POINTER, entry, entries, slot, dim, M: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [ROWS, BLOCK_D] to a slot's value in the window of each row's entry, and in the window before it; its gate stands WIDTH further."""
    own = POINTER + ((entry * M + slot) * (2 * WIDTH))[:, None] + dim[None, :]
    before = tl.where(entry == 0, entries, entry) - 1
    return own, POINTER + ((before * M + slot) * (2 * WIDTH))[:, None] + dim[None, :]


@triton.jit
def _slots(
    own,
    before,
    BIAS,
    slot,
    dim,
    mask,
    starts,
    M: tl.constexpr,
    D: tl.constexpr,
    HALVES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Gates and values of the slots of all steps, for each half of the channels, in fp32. What counts for nothing has gate -inf, value 0."""
    WIDTH: tl.constexpr = HALVES * D
    bias = BIAS + (slot * WIDTH)[:, None] + dim[None, :]
    gates = ()
    values = ()
    for half in tl.static_range(HALVES):
        for step in tl.static_range(0, STEPS * LANES, LANES):
            pooled = slot + step < M
            if half + 1 < HALVES:
                pooled = pooled & ~starts
            there = mask & pooled[:, None]
            at = (before if half + 1 < HALVES else own) + (step * 2 * WIDTH + half * D)
            value = tl.load(at, mask=there, other=0.0).to(tl.float32)
            gate = tl.load(at + WIDTH, mask=there, other=0.0).to(tl.float32)
            gate += tl.load(bias + (step * WIDTH + half * D), mask=there, other=0.0).to(tl.float32)
            gate = tl.where(pooled[:, None], gate, -float("inf"))
            gates = gates + (gate,)  # type: ignore[assignment]  # noqa: RUF005 - the kernel language has no unpacking
            values = values + (tl.where(gate == -float("inf"), 0.0, value),)  # type: ignore[assignment]  # noqa: RUF005
    return gates, values


@triton.jit
def _finite(top):
    """A maximum to subtract: 0 where every gate is -inf."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _absorbed(top, total, pooled, gates, values, COUNT: tl.constexpr):
    """Maximum, sum of exp(gate - maximum), and that sum weighted by the values, with COUNT more slots."""
    before = top
    for i in tl.static_range(COUNT):
        top = tl.maximum(top, gates[i])
    decay = tl.exp(before - _finite(top))
    total *= decay
    pooled *= decay
    for i in tl.static_range(COUNT):
        weight = tl.exp(gates[i] - _finite(top))
        total += weight
        pooled += weight * values[i]
    return top, total, pooled


@triton.jit
def _over_lanes(x, LARGEST: tl.constexpr, LANES: tl.constexpr):
    """Largest or sum of the LANES rows of an entry, in each of them."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    shares = tl.reshape(x, [ROWS // LANES, LANES, BLOCK_D])
    result = tl.max(shares, 1, keep_dims=True) if LARGEST else tl.sum(shares, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(result, [ROWS // LANES, LANES, BLOCK_D]), [ROWS, BLOCK_D])


@triton.jit
def _settled(top, total, pooled, LANES: tl.constexpr):
    """Finite maximum, total and pooled value of whole entries from those of their lanes."""
    if LANES == 1:
        return _finite(top), total, pooled / total
    largest = _finite(_over_lanes(top, True, LANES))
    share = tl.exp(top - largest)
    total = _over_lanes(total * share, False, LANES)
    return largest, total, _over_lanes(pooled * share, False, LANES) / total


@triton.jit
def _starts(STARTS, entry, here, HALVES: tl.constexpr):
    """Whether nothing stands before an entry; read only where that matters."""
    first = entry == 0
    return first | tl.load(STARTS + entry, mask=here, other=False) if HALVES > 1 else first


@triton.jit(do_not_specialize=["entries"])  # it changes from row to row
def compress_pool_kernel(
    PROJECTED,
    BIAS,
    STARTS,
    OUT,
    entries,
    M: tl.constexpr,
    D: tl.constexpr,
    HALVES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (tile of entries, block of dims), the dims first: programs that run at the same time read whole rows."""
    row = tl.arange(0, ROWS)
    lane = row % LANES
    entry = (tl.program_id(0) // COLUMNS).to(tl.int64) * (ROWS // LANES) + row // LANES
    dim = tl.program_id(0) % COLUMNS * BLOCK_D + tl.arange(0, BLOCK_D)
    here = entry < entries
    mask = here[:, None] & (dim < D)[None, :]
    starts = _starts(STARTS, entry, here, HALVES)
    top = tl.full([ROWS, BLOCK_D], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    pooled = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for chunk in range(CHUNKS):
        slot = lane + chunk * (STEPS * LANES)
        own, before = _windows(PROJECTED, entry, entries, slot, dim, M, HALVES * D)
        gates, values = _slots(own, before, BIAS, slot, dim, mask, starts, M, D, HALVES, STEPS, LANES)
        top, total, pooled = _absorbed(top, total, pooled, gates, values, HALVES * STEPS)
    top, total, pooled = _settled(top, total, pooled, LANES)
    tl.store(OUT + entry[:, None] * D + dim[None, :], pooled.to(OUT.dtype.element_ty), mask=mask & (lane == 0)[:, None])


@triton.jit(do_not_specialize=["entries", "blocks"])
def compress_pool_backward_kernel(
    PROJECTED,
    BIAS,
    STARTS,
    GRAD,
    GRAD_PROJECTED,
    PARTIAL_BIAS,
    entries,
    blocks,
    M: tl.constexpr,
    D: tl.constexpr,
    HALVES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (p, k, b): dims of block b of the slots of chunk k, of every p-th tile of entries. PARTIAL_BIAS [programs, m, width]: their d_bias."""
    WIDTH: tl.constexpr = HALVES * D
    row = tl.arange(0, ROWS)
    lane = row % LANES
    dim = tl.program_id(0) % COLUMNS * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(0) // COLUMNS % CHUNKS * (STEPS * LANES) if CHUNKS > 1 else 0
    program = tl.program_id(0) // (COLUMNS * CHUNKS)
    programs = tl.num_programs(0) // (COLUMNS * CHUNKS)
    d_bias = (tl.zeros([ROWS, BLOCK_D], tl.float32),) * (HALVES * STEPS)
    for block in range(program, blocks, programs):
        entry = block * (ROWS // LANES) + (row // LANES).to(tl.int64)
        here = entry < entries
        mask = here[:, None] & (dim < D)[None, :]
        starts = _starts(STARTS, entry, here, HALVES)
        top = tl.full([ROWS, BLOCK_D], -float("inf"), tl.float32)
        total = tl.zeros([ROWS, BLOCK_D], tl.float32)
        pooled = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if CHUNKS > 1:
            for chunk in range(CHUNKS):
                slot = lane + chunk * (STEPS * LANES)
                own, before = _windows(PROJECTED, entry, entries, slot, dim, M, WIDTH)
                gates, values = _slots(own, before, BIAS, slot, dim, mask, starts, M, D, HALVES, STEPS, LANES)
                top, total, pooled = _absorbed(top, total, pooled, gates, values, HALVES * STEPS)
        slot = lane + first
        own, before = _windows(PROJECTED, entry, entries, slot, dim, M, WIDTH)
        gates, values = _slots(own, before, BIAS, slot, dim, mask, starts, M, D, HALVES, STEPS, LANES)
        if CHUNKS == 1:
            top, total, pooled = _absorbed(top, total, pooled, gates, values, HALVES * STEPS)
        top, total, pooled = _settled(top, total, pooled, LANES)
        grad = tl.load(GRAD + entry[:, None] * D + dim[None, :], mask=mask, other=0.0).to(tl.float32) / total
        own, before = _windows(GRAD_PROJECTED, entry, entries, slot, dim, M, WIDTH)
        sums = ()
        for half in tl.static_range(HALVES):
            for step in tl.static_range(0, STEPS * LANES, LANES):
                d_value = tl.exp(gates[half * STEPS + step // LANES] - top) * grad
                d_gate = d_value * (values[half * STEPS + step // LANES] - pooled)
                at = (before if half + 1 < HALVES else own) + (step * 2 * WIDTH + half * D)
                written = mask & (slot + step < M)[:, None]
                tl.store(at, d_value.to(GRAD_PROJECTED.dtype.element_ty), mask=written)
                tl.store(at + WIDTH, d_gate.to(GRAD_PROJECTED.dtype.element_ty), mask=written)
                sums = sums + (d_bias[half * STEPS + step // LANES] + d_gate,)  # type: ignore[assignment]  # noqa: RUF005
        d_bias = sums
    slot = tl.arange(0, LANES) + first
    at = PARTIAL_BIAS + program.to(tl.int64) * (M * WIDTH) + (slot * WIDTH)[:, None] + dim[None, :]
    for half in tl.static_range(HALVES):
        for step in tl.static_range(0, STEPS * LANES, LANES):
            summed = tl.sum(tl.reshape(d_bias[half * STEPS + step // LANES], [ROWS // LANES, LANES, BLOCK_D]), 0)
            tl.store(at + (step * WIDTH + half * D), summed, mask=(slot + step < M)[:, None] & (dim < D)[None, :])


def _tiles(ape: Tensor, overlap: bool) -> dict[str, int]:
    """Compile-time sizes for a position bias [m, width]."""
    m, halves = ape.shape[0], 2 if overlap else 1
    dim = ape.shape[1] // halves
    steps = min(8 // halves, power_of_two(m))
    lanes = min(16, power_of_two(ceil_div(m, steps)))
    block_d = min(TILE // 16, max(16, power_of_two(dim)))
    sizes = {"M": m, "D": dim, "HALVES": halves, "STEPS": steps, "LANES": lanes, "CHUNKS": ceil_div(m, steps * lanes)}
    return sizes | {"ROWS": TILE // block_d, "BLOCK_D": block_d, "COLUMNS": ceil_div(dim, block_d), "num_warps": 8}


def _forward(projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
    tiles, entries = _tiles(ape, overlap), starts_document.shape[0]
    out = torch.empty(entries, tiles["D"], dtype=projected.dtype, device=projected.device)
    if entries:
        grid = (ceil_div(entries, tiles["ROWS"] // tiles["LANES"]) * tiles["COLUMNS"],)
        with on_device_of(projected):
            compress_pool_kernel[grid](projected, ape, starts_document, out, entries, **tiles)
    return out


def _backward(projected: Tensor, ape: Tensor, starts_document: Tensor, grad: Tensor, overlap: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the projections and of the position bias."""
    grad_projected, entries = torch.empty_like(projected), starts_document.shape[0]
    if not entries:
        return grad_projected, torch.zeros_like(ape)
    tiles = _tiles(ape, overlap)
    blocks, parts = ceil_div(entries, tiles["ROWS"] // tiles["LANES"]), tiles["CHUNKS"] * tiles["COLUMNS"]
    programs = max(1, min(blocks, PROGRAMS // parts, entries // ENTRIES))
    partial = torch.empty(programs, *ape.shape, dtype=torch.float32, device=ape.device)
    operands = (projected, ape, starts_document, grad.contiguous(), grad_projected, partial, entries, blocks)
    with on_device_of(projected):
        compress_pool_backward_kernel[(programs * parts,)](*operands, **tiles)
        return grad_projected, column_sum(partial, ape.dtype)


class _CompressPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
        projected, ape, starts_document = projected.contiguous(), ape.contiguous(), starts_document.contiguous()
        ctx.save_for_backward(projected, ape, starts_document)
        ctx.overlap = overlap
        return _forward(projected, ape, starts_document, overlap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        projected, ape, starts_document = ctx.saved_tensors
        return *_backward(projected, ape, starts_document, grad, ctx.overlap), None, None


def compress_pool(projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
    """Entries [C, D], in the dtype of the projections, from the values and gates of their windows.

    Args:
        projected: [C * m, 2 * width] in bfloat16, float16 or float32: values, then gates, of every token of every window.
        ape: [m, width], the position bias of the gates; width is D, or 2D with overlap. starts_document: bool [C], no gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if projected.dtype not in DTYPES or not ape.is_floating_point() or starts_document.dtype != torch.bool:
        raise ValueError(
            f"projections must be in {', '.join(map(str, DTYPES))}, ape floating and starts_document bool, got {projected.dtype}, {ape.dtype} and "
            f"{starts_document.dtype}"
        )
    if ape.dim() != 2 or starts_document.dim() != 1 or not ape.shape[0] or not ape.shape[1] or (overlap and ape.shape[1] % 2):
        raise ValueError(
            f"ape must be [m, {'2D' if overlap else 'D'}] and starts_document [C], got {list(ape.shape)} and {list(starts_document.shape)}"
        )
    expected = (starts_document.shape[0] * ape.shape[0], 2 * ape.shape[1])
    if projected.shape != expected:
        raise ValueError(f"projections must be [C * m, 2 * width] = {list(expected)}, got {list(projected.shape)}")
    out: Tensor = _CompressPool.apply(projected, ape, starts_document, overlap)
    return out
