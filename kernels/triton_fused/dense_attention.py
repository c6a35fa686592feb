# SPDX-License-Identifier: Apache-2.0
"""Attention of few heads over a short row, in plain Triton: all visible entries under a bit mask.

One program: the heads of several consecutive query rows stacked to the 64 rows of a matrix instruction. They share every key tile, which the
gathering form cannot; it pays for that with entries that nobody chose. Where every visible entry is read, nothing is wasted at any length.
In the backward the stacked rows also share the additions to the gradient of the keys, which limit the gathering form.

Legend: R query rows, H heads, D head dim, K slots, C entries; M = rows of the tile: query by query, PAD_H heads each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.dense_mask import EntryBits, entry_bits, ranks_to_slots
from kernels.triton_fused.rows import RowBounds, RowPlan

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
TILE = 64


@triton.jit
def tile_rows(BOUNDS, query, rows):
    """Bounds of the queries of a tile, empty beyond the last row: window start, first entry, end of the entries."""
    inside = query < rows
    at = BOUNDS + query.to(tl.int64) * 4
    window_start = tl.load(at, mask=inside, other=2147483647)
    return window_start, tl.load(at + 1, mask=inside, other=0), tl.load(at + 2, mask=inside, other=0)


@triton.jit
def window_valid(key, token, window_start):
    return (key[None, :] >= window_start[:, None]) & (key[None, :] <= token[:, None])


@triton.jit
def entry_valid(entry, query, rows, first, end, BITS, words, SELECTED: tl.constexpr):
    """bool [queries, keys]; `entry` begins at a multiple of 32."""
    valid = (entry[None, :] >= first[:, None]) & (entry[None, :] < end[:, None])
    if SELECTED:
        at = query[:, None].to(tl.int64) * words + (entry // 32)[None, :]
        word = tl.load(BITS + at, mask=valid & (query < rows)[:, None], other=0)
        valid = valid & (((word >> (entry & 31)[None, :]) & 1) != 0)
    return valid


@triton.jit
def per_head(flags, QUERIES: tl.constexpr, PAD_H: tl.constexpr, BLOCK_N: tl.constexpr):
    """[queries, keys] -> [M, keys]: the heads of a query share its keys."""
    return tl.reshape(tl.broadcast_to(flags[:, None, :], (QUERIES, PAD_H, BLOCK_N)), (QUERIES * PAD_H, BLOCK_N))


@triton.jit
def forward_step(q, k, valid, top, total, acc, scale_log2, PRECISION: tl.constexpr):
    s = tl.where(valid, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[:, None])
    acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def dense_forward_kernel(
    Q,
    WINDOW_KV,
    COMPRESSED_KV,
    SINK,
    BOUNDS,
    BITS,
    OUT,
    LSE,
    rows,
    first_row,
    words,
    scale_log2,
    H: tl.constexpr,
    PAD_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    SELECTED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    M: tl.constexpr = QUERIES * PAD_H
    query0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # long rows first
    query = query0 + tl.arange(0, QUERIES)
    token = query + first_row
    m = tl.arange(0, M)
    head = m % PAD_H
    dim = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (head < H) & (query0 + m // PAD_H < rows)
    cell = (query0 + m // PAD_H).to(tl.int64) * H + head
    real = inside[:, None] & (dim < D)[None, :]
    q = tl.load(Q + cell[:, None] * D + dim[None, :], mask=real, other=0.0)
    window_start, first, end = tile_rows(BOUNDS, query, rows)
    top = tl.full([M], -1.0e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    last_token = tl.minimum(query0 + QUERIES, rows) + first_row
    for start in range(tl.min(window_start, 0), last_token, BLOCK_N):
        key = start + n
        offset = key[:, None].to(tl.int64) * D + dim[None, :]
        k = tl.load(WINDOW_KV + offset, mask=(key < last_token)[:, None] & (dim < D)[None, :], other=0.0)
        valid = per_head(window_valid(key, token, window_start), QUERIES, PAD_H, BLOCK_N)
        top, total, acc = forward_step(q, k, valid, top, total, acc, scale_log2, PRECISION)
    last_entry = tl.max(end, 0)
    # never beyond the end: a pipelined loop looks some steps ahead of its start, which must not overflow
    first_entry = tl.minimum(tl.min(tl.where(end > first, first, 2147483647), 0), last_entry)
    for start in range(first_entry // BLOCK_N * BLOCK_N, last_entry, BLOCK_N):
        entry = start + n
        offset = entry[:, None].to(tl.int64) * D + dim[None, :]
        k = tl.load(COMPRESSED_KV + offset, mask=(entry < last_entry)[:, None] & (dim < D)[None, :], other=0.0)
        valid = per_head(entry_valid(entry, query, rows, first, end, BITS, words, SELECTED), QUERIES, PAD_H, BLOCK_N)
        top, total, acc = forward_step(q, k, valid, top, total, acc, scale_log2, PRECISION)
    sink = tl.load(SINK + head, mask=head < H, other=0.0) * LOG2_E
    # a row without keys: 0 over 0 with a sink of -inf
    weight = tl.where(total > 0.0, 1.0 / (total + tl.exp2(sink - top)), 0.0)
    tl.store(OUT + cell[:, None] * D + dim[None, :], (acc * weight[:, None]).to(OUT.dtype.element_ty), mask=real)
    tl.store(LSE + cell, (top + tl.log2(total)) * LN_2, mask=inside)


@triton.jit
def backward_step(q, g, k, valid, z, delta, dq, scale_log2, scale, PRECISION: tl.constexpr):
    """P in fp32, dq, and the gradient of the tile's keys [keys, D] in fp32."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(g, tl.trans(k), input_precision=PRECISION)
    p = tl.where(valid, tl.exp2(s * scale_log2 - z[:, None]), 0.0)
    ds = (p * (dp - delta[:, None]) * scale).to(k.dtype)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    dk = tl.dot(tl.trans(p.to(k.dtype)), g, input_precision=PRECISION)
    return p, dq, tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)


@triton.jit
def dense_backward_kernel(
    Q,
    GRAD_OUT,
    WINDOW_KV,
    COMPRESSED_KV,
    Z_LOG2,
    DELTA,
    BOUNDS,
    BITS,
    BELOW,
    DQ,
    DKV,
    RANKED,
    rows,
    first_row,
    tokens,
    K,
    words,
    scale_log2,
    scale,
    H: tl.constexpr,
    PAD_H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    SELECTED: tl.constexpr,
    EMIT_TEACHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    M: tl.constexpr = QUERIES * PAD_H
    query0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    query = query0 + tl.arange(0, QUERIES)
    token = query + first_row
    m = tl.arange(0, M)
    head = m % PAD_H
    dim = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    inside = (head < H) & (query0 + m // PAD_H < rows)
    cell = (query0 + m // PAD_H).to(tl.int64) * H + head
    real = inside[:, None] & (dim < D)[None, :]
    q = tl.load(Q + cell[:, None] * D + dim[None, :], mask=real, other=0.0)
    g = tl.load(GRAD_OUT + cell[:, None] * D + dim[None, :], mask=real, other=0.0)
    # padded heads: a denominator of +inf makes their P exactly 0
    z = tl.load(Z_LOG2 + cell, mask=inside, other=float("inf"))
    delta = tl.load(DELTA + cell, mask=inside, other=0.0)
    window_start, first, end = tile_rows(BOUNDS, query, rows)
    dq = tl.zeros([M, BLOCK_D], tl.float32)
    last_token = tl.minimum(query0 + QUERIES, rows) + first_row
    for start in range(tl.min(window_start, 0), last_token, BLOCK_N):
        key = start + n
        offset = key[:, None].to(tl.int64) * D + dim[None, :]
        chosen = window_valid(key, token, window_start)
        k = tl.load(WINDOW_KV + offset, mask=(key < last_token)[:, None] & (dim < D)[None, :], other=0.0)
        p, dq, dk = backward_step(q, g, k, per_head(chosen, QUERIES, PAD_H, BLOCK_N), z, delta, dq, scale_log2, scale, PRECISION)
        used = tl.max(chosen.to(tl.int32), 0) > 0
        tl.atomic_add(DKV + offset, dk, mask=used[:, None] & (dim < D)[None, :], sem="relaxed")
    last_entry = tl.max(end, 0)
    # never beyond the end: a pipelined loop looks some steps ahead of its start, which must not overflow
    first_entry = tl.minimum(tl.min(tl.where(end > first, first, 2147483647), 0), last_entry)
    for start in range(first_entry // BLOCK_N * BLOCK_N, last_entry, BLOCK_N):
        entry = start + n
        offset = entry[:, None].to(tl.int64) * D + dim[None, :]
        chosen = entry_valid(entry, query, rows, first, end, BITS, words, SELECTED)
        k = tl.load(COMPRESSED_KV + offset, mask=(entry < last_entry)[:, None] & (dim < D)[None, :], other=0.0)
        p, dq, dk = backward_step(q, g, k, per_head(chosen, QUERIES, PAD_H, BLOCK_N), z, delta, dq, scale_log2, scale, PRECISION)
        if EMIT_TEACHER:
            before = tl.load(BELOW + query.to(tl.int64) * words + start // 32, mask=query < rows, other=0)
            flags = chosen.to(tl.int32)
            rank = before[:, None] + tl.cumsum(flags, 1) - flags
            head_sum = tl.sum(tl.reshape(p, (QUERIES, PAD_H, BLOCK_N)), 1)
            tl.store(RANKED + query[:, None].to(tl.int64) * K + rank, head_sum, mask=chosen)
        used = tl.max(chosen.to(tl.int32), 0) > 0
        shifted = offset + tl.where(entry >= 0, tokens, 0)[:, None].to(tl.int64) * D  # a tensor also where `tokens` is specialised to 1
        tl.atomic_add(DKV + shifted, dk, mask=used[:, None] & (dim < D)[None, :], sem="relaxed")
    tl.store(DQ + cell[:, None] * D + dim[None, :], dq.to(DQ.dtype.element_ty), mask=real)


# Off: the interpreter has checked the mathematics of this form, no GPU its speed. The GPU tests of the attention switch it on by themselves.
CHOSEN_BY_ITSELF = False


def prefers_dense(heads: int, head_dim: int, dtype: torch.dtype, slots: int | None, entries: int) -> bool:
    """Whether this form is the faster one: few heads, and no more entries than a few times the slots of a row (slots None: all are read)."""
    return CHOSEN_BY_ITSELF and heads <= 32 and head_dim <= 128 and dtype != torch.float32 and (slots is None or entries <= 4 * slots)


def _shape(heads: int, dim: int) -> dict[str, int]:
    pad = triton.next_power_of_2(heads)
    return {"H": heads, "PAD_H": pad, "D": dim, "BLOCK_D": max(16, triton.next_power_of_2(dim)), "BLOCK_N": TILE, "QUERIES": max(1, TILE // pad)}


def dense_forward(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As portable_forward."""
    rows, heads, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    bits = None if selected is None or compressed_kv is None else entry_bits(selected, plan, compressed_kv.shape[0], False).bits
    shape = _shape(heads, dim)
    dense_forward_kernel[(triton.cdiv(rows, shape["QUERIES"]),)](
        q,
        window_kv,
        window_kv if compressed_kv is None else compressed_kv,
        sink,
        plan.bounds,
        plan.bounds if bits is None else bits,
        out,
        lse,
        rows,
        bounds.first_row,
        0 if bits is None else bits.shape[1],
        scale * LOG2_E.value,
        **shape,
        SELECTED=bits is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As portable_backward, not deterministic."""
    rows, heads, dim = q.shape
    tokens, entries = window_kv.shape[0], 0 if compressed_kv is None else compressed_kv.shape[0]
    dq = torch.empty_like(q)
    dkv = torch.zeros(tokens + entries, dim, dtype=torch.float32, device=q.device)
    emit = emit_teacher and selected is not None
    bits: EntryBits | None = None if selected is None or entries == 0 else entry_bits(selected, plan, entries, emit)
    ranked = torch.empty(selected.shape, dtype=torch.float32, device=q.device) if emit and selected is not None else None
    shape = _shape(heads, dim)
    if rows:
        dense_backward_kernel[(triton.cdiv(rows, shape["QUERIES"]),)](
            q,
            grad_out,
            window_kv,
            window_kv if compressed_kv is None else compressed_kv,
            z_log2,
            delta,
            plan.bounds,
            plan.bounds if bits is None else bits.bits,
            plan.bounds if bits is None else bits.below,
            dq,
            dkv,
            delta if ranked is None else ranked,
            rows,
            bounds.first_row,
            tokens,
            0 if selected is None else selected.shape[1],
            0 if bits is None else bits.bits.shape[1],
            scale * LOG2_E.value,
            scale,
            **shape,
            SELECTED=bits is not None,
            EMIT_TEACHER=ranked is not None and bits is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4 if shape["BLOCK_D"] <= 64 else 8,
            num_stages=2,
        )
    if ranked is None or selected is None or bits is None:
        return dq, dkv, None if ranked is None else torch.zeros_like(ranked)
    return dq, dkv, ranks_to_slots(ranked, selected, plan, bits)
