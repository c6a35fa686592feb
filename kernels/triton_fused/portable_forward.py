# SPDX-License-Identifier: Apache-2.0
"""Attention forward in plain Triton: any head count, any head dim up to 512, bf16, fp16 and fp32.

One program: one query row and a block of its heads, which share every key. The window and the compressed entries form one list of key tiles, so
that one pipelined loop gathers both. Keys are the values. Invalid slots are masked in the load and never clamped to a row: a row that every
program reads would be served by one slice of the L2 cache.

Legend: R query rows, H heads, D head dim, K slots, C entries, W window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rows import RowBounds, RowPlan
from kernels.triton_fused.tiling import Tiling, forward_tiling

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def key_slots(tile, token, row, window_start, entry_start, entry_end, SELECTED, K, window_tiles, BLOCK_N: tl.constexpr, ALL_VISIBLE: tl.constexpr):
    """Key tile -> per key: is it of the window, its row in its own tensor, its slot, is it valid. The last window key is the query's own token."""
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_window = n < window_tiles * BLOCK_N
    key_token = token + 1 - window_tiles * BLOCK_N + n
    slot = n - window_tiles * BLOCK_N
    if ALL_VISIBLE:
        entry = entry_start + slot
        valid_entry = (slot >= 0) & (entry < entry_end)
    else:
        entry = tl.load(SELECTED + row * K + slot, mask=(slot >= 0) & (slot < K), other=-1)
        valid_entry = (entry >= entry_start) & (entry < entry_end)
    valid = (in_window & (key_token >= window_start)) | (~in_window & valid_entry)
    return in_window, tl.where(in_window, key_token, entry), slot, valid


@triton.jit
def tile_range(token, window_start, extent, window_tiles, BLOCK_N: tl.constexpr):
    """Tiles that can hold a valid key: empty ones lie before the first token of a document and behind the last valid slot."""
    in_window = tl.maximum(token + 1 - window_start, 0)
    return window_tiles - (in_window + BLOCK_N - 1) // BLOCK_N, window_tiles + (extent + BLOCK_N - 1) // BLOCK_N


@triton.jit
def forward_kernel(
    Q,
    WINDOW_KV,
    COMPRESSED_KV,
    SELECTED,
    SINK,
    BOUNDS,
    OUT,
    LSE,
    rows,
    first_row,
    K,
    window_tiles,
    scale_log2,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    head_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    row = (rows - 1 - pid // head_blocks).to(tl.int64)  # long rows first
    token = (row + first_row).to(tl.int32)
    head = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    real = (head < H)[:, None] & (dim < D)[None, :]
    window_start = tl.load(BOUNDS + row * 4)
    entry_start = tl.load(BOUNDS + row * 4 + 1)
    entry_end = tl.load(BOUNDS + row * 4 + 2)
    extent = tl.load(BOUNDS + row * 4 + 3)
    q = tl.load(Q + row * (H * D) + head[:, None] * D + dim[None, :], mask=real, other=0.0)
    top = tl.full([BLOCK_H], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    first_tile, last_tile = tile_range(token, window_start, extent, window_tiles, BLOCK_N)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        in_window, key_row, _, valid = key_slots(
            tile, token, row, window_start, entry_start, entry_end, SELECTED, K, window_tiles, BLOCK_N, ALL_VISIBLE
        )
        offset = key_row.to(tl.int64) * D
        address = tl.where(in_window, WINDOW_KV + offset, COMPRESSED_KV + offset)
        k = tl.load(address[:, None] + dim[None, :], mask=valid[:, None] & (dim < D)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(valid[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(s - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    sink = tl.load(SINK + head, mask=head < H, other=0.0) * LOG2_E
    # a row without keys: 0 over 0 with a sink of -inf
    weight = tl.where(total > 0.0, 1.0 / (total + tl.exp2(sink - top)), 0.0)
    out = acc * weight[:, None]
    tl.store(OUT + row * (H * D) + head[:, None] * D + dim[None, :], out.to(OUT.dtype.element_ty), mask=real)
    tl.store(LSE + row * H + head, (top + tl.log2(total)) * LN_2, mask=head < H)


def portable_forward(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """out [R, H, D] in the dtype of q and lse fp32 [R, H]; `selected` None reads the whole visible range."""
    rows, heads, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    tiles = tiling or forward_tiling(heads, dim, q.dtype)
    entries = window_kv if compressed_kv is None else compressed_kv
    grid = (rows * triton.cdiv(heads, tiles.heads),)
    forward_kernel[grid](
        q,
        window_kv,
        entries,
        bounds.visible if selected is None else selected,
        sink,
        plan.bounds,
        out,
        lse,
        rows,
        bounds.first_row,
        0 if selected is None else selected.shape[1],
        triton.cdiv(bounds.window, tiles.keys),
        scale * LOG2_E.value,
        H=heads,
        D=dim,
        BLOCK_H=tiles.heads,
        BLOCK_D=tiles.dim,
        BLOCK_N=tiles.keys,
        ALL_VISIBLE=selected is None,
        PRECISION=tiles.precision,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out, lse
