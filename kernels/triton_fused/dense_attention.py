# SPDX-License-Identifier: Apache-2.0
"""Attention of few heads where no list of ids is given, in plain Triton: the window, and every visible entry or none.

One program: the heads of several consecutive query rows stacked to the rows of a matrix instruction, which 16 heads alone leave three quarters empty.
The rows share every key tile, and in the backward every addition to the gradient of the keys, which limit the gathering form. A row under a selection
would share little and pay for entries that it did not choose: such rows are left to the gathering form (MEASURED.md has the times of both).

What stands where nobody may read must not reach those who share a tile with it: 0 times NaN is NaN in a matrix product. So rows without any key
and keys that no row of the tile reads are 0 from the load on. A key that one row of the tile reads and another does not is data of a document: if it
is not finite, all rows of the tile show it (in the gathering form those that read it).

Legend: R query rows, H heads, D head dim, C entries; M = rows of the tile: query by query, PAD_H heads each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rows import RowBounds, RowPlan

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_rows(BOUNDS, rows, first_row, H: tl.constexpr, PAD_H: tl.constexpr, QUERIES: tl.constexpr):
    """Per row of the tile: its head, its cell (query, head), whether there is one, and what it reads: [begin, end) of tokens and of entries."""
    m = tl.arange(0, QUERIES * PAD_H)
    head = m % PAD_H
    query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES + m // PAD_H  # long rows first
    inside = (head < H) & (query < rows)
    at = BOUNDS + query.to(tl.int64) * 4
    window_begin = tl.load(at, mask=inside, other=2147483647)
    entry_begin = tl.load(at + 1, mask=inside, other=0)
    entry_end = tl.load(at + 2, mask=inside, other=0)
    return head, query.to(tl.int64) * H + head, inside, window_begin, query + first_row + 1, entry_begin, entry_end


@triton.jit
def union(begin, end):
    """[first, last) of all rows together, (0, 0) where none reads. It has no gap: the rows are neighbours, and so are the keys of two documents."""
    last = tl.max(tl.where(end > begin, end, 0), 0)
    return tl.min(tl.where(end > begin, begin, last), 0), last


@triton.jit
def forward_over(
    KEYS,
    begin,
    end,
    q,
    top,
    total,
    acc,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys [begin, end) of each row."""
    dim = tl.arange(0, BLOCK_D)
    first, last = union(begin, end)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = tl.load(KEYS + key[:, None].to(tl.int64) * D + dim[None, :], mask=(key < last)[:, None] & (dim < D)[None, :], other=0.0)
        reads = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        s = tl.where(reads, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return top, total, acc


@triton.jit
def dense_forward_kernel(
    Q,
    WINDOW_KV,
    COMPRESSED_KV,
    SINK,
    BOUNDS,
    OUT,
    LSE,
    rows,
    first_row,
    scale_log2,
    H: tl.constexpr,
    PAD_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, cell, inside, window_begin, window_end, entry_begin, entry_end = tile_rows(BOUNDS, rows, first_row, H, PAD_H, QUERIES)
    dim = tl.arange(0, BLOCK_D)
    offset = cell[:, None] * D + dim[None, :]
    real = inside[:, None] & (dim < D)[None, :]
    q = tl.load(Q + offset, mask=real, other=0.0)  # what stands in a row stays in it: here a row without keys needs no care
    top = tl.full([QUERIES * PAD_H], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES * PAD_H], tl.float32)
    acc = tl.zeros([QUERIES * PAD_H, BLOCK_D], tl.float32)
    top, total, acc = forward_over(WINDOW_KV, window_begin, window_end, q, top, total, acc, scale_log2, D, BLOCK_D, BLOCK_N, PRECISION)
    top, total, acc = forward_over(COMPRESSED_KV, entry_begin, entry_end, q, top, total, acc, scale_log2, D, BLOCK_D, BLOCK_N, PRECISION)
    sink = tl.load(SINK + head, mask=head < H, other=0.0) * LOG2_E
    # a row without keys: 0 over 0 with a sink of -inf
    weight = tl.where(total > 0.0, 1.0 / (total + tl.exp2(sink - top)), 0.0)
    tl.store(OUT + offset, (acc * weight[:, None]).to(OUT.dtype.element_ty), mask=real)
    tl.store(LSE + cell, (top + tl.log2(total)) * LN_2, mask=inside)


@triton.jit
def backward_over(
    KEYS,
    D_KEYS,
    begin,
    end,
    q,
    g,
    z,
    delta,
    dq,
    scale_log2,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the gradient of the keys [begin, end) of each row to fp32 D_KEYS; returns dq with their part."""
    dim = tl.arange(0, BLOCK_D)
    first, last = union(begin, end)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        offset = key[:, None].to(tl.int64) * D + dim[None, :]
        mask = (key < last)[:, None] & (dim < D)[None, :]
        k = tl.load(KEYS + offset, mask=mask, other=0.0)
        reads = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(g, tl.trans(k), input_precision=PRECISION)
        p = tl.where(reads, tl.exp2(s * scale_log2 - z[:, None]), 0.0)
        ds = (p * (dp - delta[:, None]) * scale).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(p.to(k.dtype)), g, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
        tl.atomic_add(D_KEYS + offset, dk, mask=mask, sem="relaxed")
    return dq


@triton.jit
def dense_backward_kernel(
    Q,
    GRAD_OUT,
    WINDOW_KV,
    COMPRESSED_KV,
    Z_LOG2,
    DELTA,
    BOUNDS,
    DQ,
    D_WINDOW,
    D_ENTRIES,
    rows,
    first_row,
    scale_log2,
    scale,
    H: tl.constexpr,
    PAD_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    _, cell, inside, window_begin, window_end, entry_begin, entry_end = tile_rows(BOUNDS, rows, first_row, H, PAD_H, QUERIES)
    dim = tl.arange(0, BLOCK_D)
    offset = cell[:, None] * D + dim[None, :]
    # the gradient of a key sums over the rows: one without keys must not bring a NaN into it, neither from q nor from its gradient nor from delta
    has_keys = inside & ((window_end > window_begin) | (entry_end > entry_begin))
    real = has_keys[:, None] & (dim < D)[None, :]
    q = tl.load(Q + offset, mask=real, other=0.0)
    g = tl.load(GRAD_OUT + offset, mask=real, other=0.0)
    z = tl.load(Z_LOG2 + cell, mask=has_keys, other=0.0)
    delta = tl.load(DELTA + cell, mask=has_keys, other=0.0)
    dq = tl.zeros([QUERIES * PAD_H, BLOCK_D], tl.float32)
    dq = backward_over(WINDOW_KV, D_WINDOW, window_begin, window_end, q, g, z, delta, dq, scale_log2, scale, D, BLOCK_D, BLOCK_N, PRECISION)
    dq = backward_over(COMPRESSED_KV, D_ENTRIES, entry_begin, entry_end, q, g, z, delta, dq, scale_log2, scale, D, BLOCK_D, BLOCK_N, PRECISION)
    tl.store(DQ + offset, dq.to(DQ.dtype.element_ty), mask=inside[:, None] & (dim < D)[None, :])


def prefers_dense(heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether this form is the faster one where no ids are given: few heads, of a dtype whose matrix instructions they would leave empty."""
    return heads <= 32 and head_dim <= 128 and dtype != torch.float32


def _launch(heads: int, dim: int, dtype: torch.dtype, keys: int, stages: int) -> dict[str, Any]:
    """Constants and options of a launch: 64 stacked rows, whose warp group of four warps holds every product of the tile."""
    pad = triton.next_power_of_2(heads)
    return {
        "H": heads,
        "PAD_H": pad,
        "D": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_N": keys,
        "QUERIES": max(1, 64 // pad),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # tf32 keeps 10 bits of a float32
        "num_warps": 4,
        "num_stages": stages,
    }


def dense_forward(
    q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, sink: Tensor, bounds: RowBounds, plan: RowPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """As portable_forward without ids."""
    rows, heads, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    launch = _launch(heads, dim, q.dtype, keys=32, stages=3)
    dense_forward_kernel[(triton.cdiv(rows, launch["QUERIES"]),)](
        q,
        window_kv,
        window_kv if compressed_kv is None else compressed_kv,
        sink,
        plan.bounds,
        out,
        lse,
        rows,
        bounds.first_row,
        scale * LOG2_E.value,
        **launch,
    )
    return out, lse


def dense_backward(
    grad_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    z_log2: Tensor,
    delta: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
    emit_teacher: bool,
) -> tuple[Tensor, Tensor, None]:
    """As portable_backward without ids, and so without a teacher. Not deterministic: the additions to the gradient of a key have no fixed order."""
    assert selected is None
    assert not emit_teacher
    rows, heads, dim = q.shape
    tokens, entries = window_kv.shape[0], 0 if compressed_kv is None else compressed_kv.shape[0]
    dq = torch.empty_like(q)
    dkv = torch.zeros(tokens + entries, dim, dtype=torch.float32, device=q.device)
    if rows == 0:
        return dq, dkv, None
    launch = _launch(heads, dim, q.dtype, keys=64, stages=2)
    dense_backward_kernel[(triton.cdiv(rows, launch["QUERIES"]),)](
        q,
        grad_out,
        window_kv,
        window_kv if compressed_kv is None else compressed_kv,
        z_log2,
        delta,
        plan.bounds,
        dq,
        dkv,
        dkv[tokens:] if entries else dkv,
        rows,
        bounds.first_row,
        scale * LOG2_E.value,
        scale,
        **launch,
    )
    return dq, dkv, None
