# SPDX-License-Identifier: Apache-2.0
"""Tokens to experts and back in one pass each way: rows are copied to their places by expert, and the results at those places summed per token.

Copying to places and summing over them are each other's adjoint, so each is the other's backward. Sums are in fp32, over k in order, and are rounded
once; every place belongs to one (token, expert) pair, so nothing is added atomically and a repetition gives the same bits.

The places come from a stable counting sort: pairs per expert of each block of pairs, a running sum over experts and within an expert over blocks,
and then each pair goes to where its expert's pairs of its block begin, plus how many of these stand before it.

Legend: N tokens, K experts per token, P = N * K pairs, E experts, D features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two

_BLOCK_P = 128  # pairs of one program of the sort, which compares each of them with each
_BLOCK_E = 32  # experts of one program that counts


@triton.jit
def count_kernel(EXPERTS, COUNTS, pairs, blocks, E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    """COUNTS [E, blocks]: pairs of each expert in each block."""
    block = tl.program_id(0)
    pair = block.to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    chosen = tl.load(EXPERTS + pair, mask=pair < pairs, other=-1).to(tl.int32)
    count = tl.sum((chosen[None, :] == expert[:, None]).to(tl.int32), 1)
    tl.store(COUNTS + expert.to(tl.int64) * blocks + block, count, mask=expert < E)


@triton.jit
def place_kernel(
    EXPERTS,
    COUNTS,
    STOPS,
    PAIR,
    PLACE,
    END,
    pairs,
    blocks,
    E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """STOPS [E, blocks]: running sum of COUNTS, where the places of each expert's pairs of each block end."""
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK_P
    pair = start + tl.arange(0, BLOCK_P)
    chosen = tl.load(EXPERTS + pair, mask=pair < pairs, other=-1).to(tl.int32)
    before = tl.zeros([BLOCK_P], tl.int32)
    for first in range(0, BLOCK_P, CHUNK):
        other = start + first + tl.arange(0, CHUNK)
        theirs = tl.load(EXPERTS + other, mask=other < pairs, other=-1).to(tl.int32)
        before += tl.sum(((theirs[None, :] == chosen[:, None]) & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    cell = chosen.to(tl.int64) * blocks + block
    stop, count = tl.load(STOPS + cell, mask=pair < pairs, other=0), tl.load(COUNTS + cell, mask=pair < pairs, other=0)
    place = (stop - count + before).to(tl.int64)
    tl.store(PLACE + pair, place, mask=pair < pairs)
    tl.store(PAIR + place, pair, mask=pair < pairs)
    if block == 0:
        expert = tl.arange(0, BLOCK_E)
        tl.store(END + expert, tl.load(STOPS + expert.to(tl.int64) * blocks + blocks - 1, mask=expert < E, other=0), mask=expert < E)


@triton.jit
def spread_kernel(X, PLACES, OUT, rows, D: tl.constexpr, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = row < rows
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        real = here[:, None] & (dim < D)[None, :]
        x = tl.load(X + row[:, None] * D + dim[None, :], mask=real, other=0.0)
        for k in tl.static_range(K):
            place = tl.load(PLACES + row * K + k, mask=here, other=0)
            tl.store(OUT + place[:, None] * D + dim[None, :], x, mask=real)


@triton.jit
def sum_kernel(
    X,
    ALSO,
    PLUS,
    PLACES,
    OUT,
    rows,
    TWICE: tl.constexpr,
    ADDED: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = row < rows
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        real = here[:, None] & (dim < D)[None, :]
        total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for k in tl.static_range(K):
            offset = tl.load(PLACES + row * K + k, mask=here, other=0)[:, None] * D + dim[None, :]
            total += tl.load(X + offset, mask=real, other=0.0).to(tl.float32)
            if TWICE:
                total += tl.load(ALSO + offset, mask=real, other=0.0).to(tl.float32)
        offset = row[:, None] * D + dim[None, :]
        if ADDED:
            total += tl.load(PLUS + offset, mask=real, other=0.0).to(tl.float32)
        tl.store(OUT + offset, total.to(OUT.dtype.element_ty), mask=real)


def _tiles(width: int, topk: int) -> dict[str, int]:
    """Compile-time sizes for rows of `width`: 1,024 numbers a program and pass, 8 a thread: 16 bytes of bf16 of each of the K rows in flight."""
    block_d = min(1024, power_of_two(width))
    return {"D": width, "K": topk, "BLOCK_R": 1024 // block_d, "BLOCK_D": block_d, "num_warps": 4}


def _spread(x: Tensor, places: Tensor) -> Tensor:
    """out [P, D] with out[places[n, k]] = x[n]."""
    rows, topk = places.shape
    x = x.contiguous()
    out = torch.empty(rows * topk, x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        tiles = _tiles(x.shape[1], topk)
        with on_device_of(x):
            spread_kernel[(ceil_div(rows, tiles["BLOCK_R"]),)](x, places, out, rows, **tiles)
    return out


def _sum(x: Tensor, also: Tensor | None, places: Tensor, plus: Tensor | None) -> Tensor:
    """out [N, D]: sum over k of (x + also)[places[n, k]], plus `plus` [N, D]."""
    rows, topk = places.shape
    x, also, plus = x.contiguous(), None if also is None else also.contiguous(), None if plus is None else plus.contiguous()
    out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        tiles = _tiles(x.shape[1], topk)
        operands = (x, x if also is None else also, x if plus is None else plus, places, out, rows)
        with on_device_of(x):
            sum_kernel[(ceil_div(rows, tiles["BLOCK_R"]),)](*operands, TWICE=also is not None, ADDED=plus is not None, **tiles)
    return out


class _SpreadRows(torch.autograd.Function):
    """The rows twice, as one memory under two names: the gradients of two readers arrive apart, and their sum costs no pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        places = places.contiguous()
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)
        out = _spread(x, places)
        return out, out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (places,) = ctx.saved_tensors
        given = [grad for grad in gradients if grad is not None]
        return (_sum(given[0], given[1] if len(given) == 2 else None, places, None) if given else None), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, plus: Tensor | None) -> Tensor:
        places = places.contiguous()
        ctx.save_for_backward(places)
        ctx.added = plus is not None
        return _sum(x, None, places, plus)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (places,) = ctx.saved_tensors
        return (_spread(grad, places) if ctx.needs_input_grad[0] else None), None, (grad if ctx.added else None)


def spread_rows(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Row n of x at places[n, k] of the result, for every k; the result [P, D] under two names, for two readers, neither of which may write to it.

    Args:
        x: [N, D] in one of bfloat16, float16 and float32. places: int64 [N, K] with N * K = P, every number from 0 to P - 1 once.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, places, places.shape[0])
    one, other = _SpreadRows.apply(x, places)
    return one, other


def sum_rows(x: Tensor, places: Tensor, plus: Tensor | None = None) -> Tensor:
    """[N, D] in the dtype of x: row n is the sum over k of x[places[n, k]], plus row n of `plus`; in fp32, rounded once.

    Args:
        x: [P, D] in one of bfloat16, float16 and float32. places: int64 [N, K] with N * K = P, every number from 0 to P - 1 once.
        plus: [N, D] in the dtype of x, or None.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, places, places.numel())
    if plus is not None and (plus.shape != (places.shape[0], x.shape[1]) or plus.dtype != x.dtype):
        raise ValueError(f"plus must be {x.dtype} [{places.shape[0]}, {x.shape[1]}], got {list(plus.shape)} in {plus.dtype}")
    out: Tensor = _SumRows.apply(x, places, plus)
    return out


def _check(x: Tensor, places: Tensor, rows: int) -> None:
    if places.dim() != 2 or places.dtype != torch.int64 or not places.shape[1]:
        raise ValueError(f"places must be int64 [N, K] with K >= 1, got {list(places.shape)} in {places.dtype}")
    if x.dim() != 2 or x.dtype not in DTYPES or x.shape[0] != rows:
        raise ValueError(
            f"x must be [{rows}, D] for places {list(places.shape)}, in one of {', '.join(map(str, DTYPES))}, got {list(x.shape)} in {x.dtype}"
        )


def order_pairs(experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of experts int64 [N, K], numbered row by row, sorted by expert and within one by number. No gradient; the host waits for nothing.

    Args:
        experts: ids from 0 to `number` - 1, which is not checked.

    Returns:
        pair int64 [P], the number of the pair at each place; place int64 [N, K], the place of each pair; end int32 [E], where the places of each
        expert end.
    """
    if experts.dim() != 2 or experts.dtype != torch.int64:
        raise ValueError(f"experts must be int64 [N, K], got {list(experts.shape)} in {experts.dtype}")
    experts, pairs, device = experts.contiguous(), experts.numel(), experts.device
    pair, place = torch.empty(pairs, dtype=torch.int64, device=device), torch.empty_like(experts)
    if not pairs:
        return pair, place, torch.zeros(number, dtype=torch.int32, device=device)
    blocks, end = ceil_div(pairs, _BLOCK_P), torch.empty(number, dtype=torch.int32, device=device)
    counts = torch.empty(number, blocks, dtype=torch.int32, device=device)
    sizes = {"E": number, "BLOCK_P": _BLOCK_P, "num_warps": 4}
    block_e = min(_BLOCK_E, power_of_two(number))
    with on_device_of(experts):
        count_kernel[(blocks, ceil_div(number, block_e))](experts, counts, pairs, blocks, BLOCK_E=block_e, **sizes)
        stops = counts.flatten().cumsum(0, dtype=torch.int32)
        operands = (experts, counts, stops, pair, place, end, pairs, blocks)
        place_kernel[(blocks,)](*operands, CHUNK=32, BLOCK_E=power_of_two(number), **sizes)
    return pair, place, end
