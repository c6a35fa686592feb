# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM90 in Gluon: 64 or 128 heads of 512 columns.

Three warp groups of one persistent program share the work on a tile of 64 keys:

    scores     gathers the next K (and, at the end of an item, the next Q), S = Q K^T, softmax; P and the factor for the old sum go to smem
    values     two groups, each for half of the columns: O = O * factor + P V, and the store of O

S of the next tile is under way while the values of this one are added up. No group holds both S and O: 64 x 512 fp32 of O are half of the register
file. A fourth group, for the gather alone, would leave 128 registers per thread at entry, too few for a matrix instruction of 256 columns.

Legend: R query rows, C entries, H heads, D head dim, K slots.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.triton_fused.hopper_common import copy_to_shared, has_bit, item_bounds, store_half, sync_warps, tile_keys, tile_word
from kernels.triton_fused.rows import RowBounds, RowPlan

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
VALUE_REGISTERS = 192  # per thread of a values group; the scores group gets what is left of the register file: 120


@gluon.jit
def scores_partition(
    Q, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, SINK, BOUNDS, LSE, items, first_row, K, word_count, window_tiles, scale_log2,
    qs, kv, ps, factors, weights, key_free, full, empty, weight_full, weight_empty,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    head = gl.arange(0, 64, layout=ROWS)
    key_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LOAD))
    load_head = gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, LOAD))
    nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    low: gl.constexpr = Q.dtype.element_ty
    count = 0
    item_count = 0
    row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
        items - 1 - gl.program_id(0), BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
    )
    load_query(Q, qs, items - 1 - gl.program_id(0), load_head, dim, D)
    key = tile_keys(first_tile, row, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, key_n, BLOCK_N, ALL_VISIBLE)
    gather(gl.where(first_tile < window_tiles, WINDOW_KV, COMPRESSED_KV), kv, key, 0, dim, D)
    async_copy.commit_group()
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        after = item - gl.num_programs(0)
        row2, token2, window_start2, entry_start2, entry_end2, first_tile2, last_tile2 = item_bounds(
            gl.maximum(after, 0), BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        top = gl.full([64], -1.0e30, gl.float32, ROWS)
        total = gl.zeros([64], gl.float32, ROWS)
        for tile in range(first_tile, last_tile):
            zero = (tile + j) >> 28
            buffer = count & 1
            done = tile + 1 == last_tile
            ahead = gl.where(done, first_tile2, tile + 1)
            key = tile_keys(
                ahead, gl.where(done, row2, row) + zero, gl.where(done, token2, token), gl.where(done, window_start2, window_start),
                gl.where(done, entry_start2, entry_start), gl.where(done, entry_end2, entry_end),
                SELECTED, K, window_tiles, key_n, BLOCK_N, ALL_VISIBLE,
            )  # fmt: skip
            word = tile_word(tile, row + zero, token, window_start, entry_start, entry_end, WORDS, word_count, window_tiles, BLOCK_N, ALL_VISIBLE)
            async_copy.wait_group(0)
            fence_async_shared()
            sync_warps()
            s = warpgroup_mma(qs.index(0 + zero), kv.index(buffer * 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma(qs.index(1 + zero), kv.index(buffer * 2 + 1).permute((1, 0)), s, is_async=True)
            # the other buffer is free once both values groups are done with the tile before this one
            mbarrier.wait(key_free.index(buffer ^ 1), ((count >> 1) & 1) ^ (buffer ^ 1))
            gather(gl.where(ahead < window_tiles, WINDOW_KV, COMPRESSED_KV), kv, key, buffer ^ 1, dim, D)
            s = warpgroup_mma_wait(0, [s])
            if done & (after >= 0):
                load_query(Q, qs, after + zero, load_head, dim, D)
            async_copy.commit_group()
            s = gl.where(has_bit(word, n)[None, :], s * scale_log2, float("-inf"))
            new_top = gl.maximum(top, gl.max(s, 1))
            factor = gl.exp2(top - new_top)
            p = gl.exp2(s - new_top[:, None])
            mbarrier.wait(empty.index(buffer), ((count >> 1) & 1) ^ 1)
            ps.index(buffer).store(p.to(low))
            factors.index(buffer).store(factor)
            fence_async_shared()
            mbarrier.arrive(full.index(buffer))
            total = total * factor + gl.sum(p, 1)
            top = new_top
            count += 1
        sink = gl.load(SINK + (item % HEAD_BLOCKS) * 64 + head) * LOG2_E
        # a row without keys: 0 over 0 with a sink of -inf
        weight = gl.where(total > 0.0, 1.0 / (total + gl.exp2(sink - top)), 0.0)
        mbarrier.wait(weight_empty, (item_count & 1) ^ 1)
        weights.store(weight)
        mbarrier.arrive(weight_full)
        gl.store(LSE + item.to(gl.int64) * 64 + head, (top + gl.log2(total)) * LN_2)
        row = row2
        token = token2
        window_start = window_start2
        entry_start = entry_start2
        entry_end = entry_end2
        first_tile = first_tile2
        last_tile = last_tile2
        item_count += 1
    async_copy.wait_group(0)


@gluon.jit
def load_query(Q, qs, item, head, dim, D: gl.constexpr):
    pointer = Q + item.to(gl.int64) * (64 * D) + head[:, None] * D + dim[None, :]
    copy_to_shared(qs.index(0), pointer, (head >= 0)[:, None])
    copy_to_shared(qs.index(1), pointer + D // 2, (head >= 0)[:, None])


@gluon.jit
def gather(KV, kv, key, buffer, dim, D: gl.constexpr):
    """Rows of KV into a buffer of two column halves; zeros where key is -1."""
    pointer = KV + (key.to(gl.int64) * D)[:, None] + dim[None, :]
    copy_to_shared(kv.index(buffer * 2), pointer, (key >= 0)[:, None])
    copy_to_shared(kv.index(buffer * 2 + 1), pointer + D // 2, (key >= 0)[:, None])


@gluon.jit
def values_partition(
    BOUNDS, OUT, items, first_row, window_tiles, kv, ps, factors, weights, key_free, full, empty, weight_full, weight_empty,
    SIDE: gl.constexpr, HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    count = 0
    item_count = 0
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
            item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        acc = gl.zeros([64, HALF], gl.float32, O_LAYOUT)
        for _tile in range(first_tile, last_tile):
            buffer = count & 1
            mbarrier.wait(full.index(buffer), (count >> 1) & 1)
            fence_async_shared()
            acc = acc * factors.index(buffer).load(ROWS)[:, None]
            acc = warpgroup_mma(ps.index(buffer), kv.index(buffer * 2 + SIDE), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(key_free.index(buffer))
            mbarrier.arrive(empty.index(buffer))
            count += 1
        mbarrier.wait(weight_full, item_count & 1)
        weight = weights.load(ROWS)
        mbarrier.arrive(weight_empty)
        store_half(OUT, acc * weight[:, None], item, SIDE * HALF, D)
        item_count += 1


@gluon.jit
def hopper_forward_kernel(
    Q, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, SINK, BOUNDS, OUT, LSE, items, first_row, K, word_count, window_tiles, scale_log2,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr, R_VALUES: gl.constexpr,
):  # fmt: skip
    low: gl.constexpr = Q.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    qs = gl.allocate_shared_memory(low, [2, 64, D // 2], TILE)
    kv = gl.allocate_shared_memory(low, [4, BLOCK_N, D // 2], TILE)
    ps = gl.allocate_shared_memory(low, [2, 64, BLOCK_N], TILE)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    key_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weight_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weight_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(key_free.index(i), count=2)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(weight_full, count=1)
    mbarrier.init(weight_empty, count=2)
    fence_async_shared()
    sync_warps()
    gl.warp_specialize(
        [
            (scores_partition, (
                Q, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, SINK, BOUNDS, LSE, items, first_row, K, word_count, window_tiles, scale_log2,
                qs, kv, ps, factors, weights, key_free, full, empty, weight_full, weight_empty, HEAD_BLOCKS, D, BLOCK_N, ALL_VISIBLE,
            )),
            (values_partition, (
                BOUNDS, OUT, items, first_row, window_tiles, kv, ps, factors, weights, key_free, full, empty, weight_full, weight_empty,
                0, HEAD_BLOCKS, D, BLOCK_N,
            )),
            (values_partition, (
                BOUNDS, OUT, items, first_row, window_tiles, kv, ps, factors, weights, key_free, full, empty, weight_full, weight_empty,
                1, HEAD_BLOCKS, D, BLOCK_N,
            )),
        ],
        [4, 4],
        [R_VALUES, R_VALUES],
    )  # fmt: skip


def hopper_forward(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As portable_forward: out [R, H, D] in the dtype of q and lse fp32 [R, H]."""
    rows, heads, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    items = rows * (heads // 64)
    programs = min(items, torch.cuda.get_device_properties(q.device).multi_processor_count)
    hopper_forward_kernel[(programs,)](
        q,
        window_kv,
        window_kv if compressed_kv is None else compressed_kv,
        bounds.visible if selected is None else selected,
        plan.words,
        sink,
        plan.bounds,
        out,
        lse,
        items,
        bounds.first_row,
        0 if selected is None else selected.shape[1],
        plan.words.shape[-1],
        triton.cdiv(bounds.window, 64),
        scale * LOG2_E.value,
        HEAD_BLOCKS=heads // 64,
        D=dim,
        BLOCK_N=64,
        ALL_VISIBLE=selected is None,
        R_VALUES=VALUE_REGISTERS,
        num_warps=4,
    )
    return out, lse
