# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM90 in Gluon: 64 or 128 heads of 512 columns.

Three warp groups of one persistent program work on pairs of tiles of 64 keys, as in a seesaw (the schedule that FlashMLA describes):

    producer   gathers the pair as four buffers of one tile and one column half each; loads Q once per item; runs ahead over item boundaries
    left       S and softmax of the even tile, and O of the left 256 columns over both tiles
    right      S and softmax of the odd tile, and O of the right 256 columns over both tiles

Each group multiplies its own P from registers and the other's from smem; only row maxima, row sums and P cross between them. 64 x 512 fp32 of O are
half of the register file, so that no group could hold all of it.

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

from kernels.triton_fused.hopper_common import copy_to_shared, has_bit, item_bounds, multiprocessors, store_half, sync_warps, tile_keys, tile_word
from kernels.triton_fused.rows import RowBounds, RowPlan

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
RIGHT_REGISTERS = 216  # per thread; the left group gets what is left of the register file: 224
PRODUCER_REGISTERS = 64


@gluon.jit
def pairs_end(first_tile, last_tile):
    """End of the tiles rounded up to whole pairs; a tile behind the last slot is empty."""
    return last_tile + ((last_tile - first_tile) & 1)


@gluon.jit
def producer_partition(
    Q, WINDOW_KV, COMPRESSED_KV, SELECTED, BOUNDS, items, first_row, K, window_tiles, qs, kv, ready, free, query_ready, query_free,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LOAD))
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    dim = gl.arange(0, HALF, layout=gl.SliceLayout(0, LOAD))
    count = 0
    item_count = 0
    row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
        items - 1 - gl.program_id(0), BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
    )
    even = tile_keys(first_tile, row, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, n, BLOCK_N, ALL_VISIBLE)
    odd = tile_keys(first_tile + 1, row, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, n, BLOCK_N, ALL_VISIBLE)
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        row2, token2, window_start2, entry_start2, entry_end2, first_tile2, last_tile2 = item_bounds(
            gl.maximum(item - gl.num_programs(0), 0), BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        query = Q + item.to(gl.int64) * (64 * D) + head[:, None] * D + dim[None, :]
        always = (head >= 0)[:, None]
        mbarrier.wait(query_free, (item_count & 1) ^ 1)
        copy_to_shared(qs.index(0), query, always)
        copy_to_shared(qs.index(1), query + HALF, always)
        async_copy.mbarrier_arrive(query_ready, increment_count=False)
        end = pairs_end(first_tile, last_tile)
        for tile in range(first_tile, end, 2):
            phase = (count & 1) ^ 1
            even_pointer = gl.where(tile < window_tiles, WINDOW_KV, COMPRESSED_KV) + (even.to(gl.int64) * D)[:, None] + dim[None, :]
            odd_pointer = gl.where(tile + 1 < window_tiles, WINDOW_KV, COMPRESSED_KV) + (odd.to(gl.int64) * D)[:, None] + dim[None, :]
            even_mask = (even >= 0)[:, None]
            odd_mask = (odd >= 0)[:, None]
            # the ids of the next pair, over the border of the item
            done = tile + 2 >= end
            row_a = gl.where(done, row2, row)
            token_a = gl.where(done, token2, token)
            window_a = gl.where(done, window_start2, window_start)
            start_a = gl.where(done, entry_start2, entry_start)
            end_a = gl.where(done, entry_end2, entry_end)
            tile_a = gl.where(done, first_tile2, tile + 2)
            even = tile_keys(tile_a, row_a, token_a, window_a, start_a, end_a, SELECTED, K, window_tiles, n, BLOCK_N, ALL_VISIBLE)
            odd = tile_keys(tile_a + 1, row_a, token_a, window_a, start_a, end_a, SELECTED, K, window_tiles, n, BLOCK_N, ALL_VISIBLE)
            mbarrier.wait(free.index(0), phase)
            copy_to_shared(kv.index(0), even_pointer, even_mask)
            async_copy.mbarrier_arrive(ready.index(0), increment_count=False)
            mbarrier.wait(free.index(3), phase)
            copy_to_shared(kv.index(3), odd_pointer + HALF, odd_mask)
            async_copy.mbarrier_arrive(ready.index(3), increment_count=False)
            mbarrier.wait(free.index(1), phase)
            copy_to_shared(kv.index(1), even_pointer + HALF, even_mask)
            async_copy.mbarrier_arrive(ready.index(1), increment_count=False)
            mbarrier.wait(free.index(2), phase)
            copy_to_shared(kv.index(2), odd_pointer, odd_mask)
            async_copy.mbarrier_arrive(ready.index(2), increment_count=False)
            count += 1
        row = row2
        token = token2
        window_start = window_start2
        entry_start = entry_start2
        entry_end = entry_end2
        first_tile = first_tile2
        last_tile = last_tile2
        item_count += 1  # noqa: SIM113


@gluon.jit
def left_step(s, word, n, top, total, acc, phase, zero, scale_log2, kv, p_even, p_odd, rows, free, top_even, top_odd, full_even, full_odd):
    """Softmax of the even tile, O of the left columns over both; the last product is left under way."""
    low: gl.constexpr = kv.dtype
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    s = gl.where(has_bit(word, n)[None, :], s * scale_log2, float("-inf"))
    own_top = gl.maximum(top, gl.max(s, 1))
    factor = gl.exp2(top - own_top)
    p = gl.exp2(s - own_top[:, None])
    total = total * factor + gl.sum(p, 1)
    rows.index(0).store(own_top)
    mbarrier.arrive(top_even)
    acc = acc * gl.convert_layout(factor, O_ROWS)[:, None]
    acc = warpgroup_mma(gl.convert_layout(p.to(low), P_LAYOUT), kv.index(0 + zero), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(free.index(0))
    mbarrier.wait(top_odd, phase)
    top = rows.index(1).load(ROWS)
    factor = gl.exp2(own_top - top)
    total = total * factor
    p_even.store((p * factor[:, None]).to(low))
    fence_async_shared()
    mbarrier.arrive(full_even)
    acc = acc * gl.convert_layout(factor, O_ROWS)[:, None]
    mbarrier.wait(full_odd, phase)
    acc = warpgroup_mma(p_odd, kv.index(2 + zero), acc, is_async=True)
    return acc, top, total


@gluon.jit
def left_partition(
    WORDS, BOUNDS, SINK, OUT, LSE, items, first_row, word_count, window_tiles, scale_log2,
    qs, kv, ps, rows, ready, free, query_ready, query_free, tops, fulls, totals,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    head = gl.arange(0, 64, layout=ROWS)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    count = 0
    item_count = 0
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        zero = j >> 28
        row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
            item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        top = gl.full([64], -1.0e30, gl.float32, ROWS)
        total = gl.zeros([64], gl.float32, ROWS)
        acc = gl.zeros([64, D // 2], gl.float32, O_LAYOUT)
        word = tile_word(first_tile, row, token, window_start, entry_start, entry_end, WORDS, word_count, window_tiles, BLOCK_N, ALL_VISIBLE)
        mbarrier.wait(query_ready, item_count & 1)
        mbarrier.wait(ready.index(0), count & 1)
        fence_async_shared()
        s = warpgroup_mma(qs.index(0 + zero), kv.index(0 + zero).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(1), count & 1)
        fence_async_shared()
        s = warpgroup_mma(qs.index(1 + zero), kv.index(1 + zero).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        for tile in range(first_tile, pairs_end(first_tile, last_tile) - 2, 2):
            phase = count & 1
            zero = (tile + j) >> 28
            acc, top, total = left_step(
                s, word, n, top, total, acc, phase, zero, scale_log2, kv, ps.index(0 + zero), ps.index(1 + zero), rows, free,
                tops.index(0), tops.index(1), fulls.index(0), fulls.index(1),
            )  # fmt: skip
            word = tile_word(tile + 2, row, token, window_start, entry_start, entry_end, WORDS, word_count, window_tiles, BLOCK_N, ALL_VISIBLE)
            mbarrier.wait(ready.index(0), phase ^ 1)
            fence_async_shared()
            s = warpgroup_mma(qs.index(0 + zero), kv.index(0 + zero).permute((1, 0)), nothing, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(free.index(2))
            mbarrier.wait(ready.index(1), phase ^ 1)
            fence_async_shared()
            s = warpgroup_mma(qs.index(1 + zero), kv.index(1 + zero).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            count += 1
        mbarrier.arrive(query_free)
        zero = j >> 28
        acc, top, total = left_step(
            s, word, n, top, total, acc, count & 1, zero, scale_log2, kv, ps.index(0 + zero), ps.index(1 + zero), rows, free,
            tops.index(0), tops.index(1), fulls.index(0), fulls.index(1),
        )  # fmt: skip
        sink = gl.load(SINK + (item % HEAD_BLOCKS) * 64 + head) * LOG2_E
        rows.index(2).store(total)
        mbarrier.arrive(totals.index(0))
        mbarrier.wait(totals.index(1), item_count & 1)
        total = total + rows.index(3).load(ROWS)
        # a row without keys: 0 over 0 with a sink of -inf
        weight = gl.where(total > 0.0, 1.0 / (total + gl.exp2(sink - top)), 0.0)
        gl.store(LSE + item.to(gl.int64) * 64 + head, (top + gl.log2(total)) * LN_2)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(free.index(2))
        count += 1
        item_count += 1  # noqa: SIM113
        store_half(OUT, acc * gl.convert_layout(weight, gl.SliceLayout(1, O_LAYOUT))[:, None], item, 0, D)


@gluon.jit
def right_partition(
    WORDS, BOUNDS, SINK, OUT, items, first_row, word_count, window_tiles, scale_log2,
    qs, kv, ps, rows, ready, free, query_ready, query_free, tops, fulls, totals,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr,
):  # fmt: skip
    low: gl.constexpr = kv.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
    head = gl.arange(0, 64, layout=ROWS)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    count = 0
    item_count = 0
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
            item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        top = gl.full([64], -1.0e30, gl.float32, ROWS)
        total = gl.zeros([64], gl.float32, ROWS)
        acc = gl.zeros([64, D // 2], gl.float32, O_LAYOUT)
        end = pairs_end(first_tile, last_tile)
        mbarrier.wait(query_ready, item_count & 1)
        for tile in range(first_tile, end, 2):
            phase = count & 1
            zero = (tile + j) >> 28
            word = tile_word(tile + 1, row + zero, token, window_start, entry_start, entry_end, WORDS, word_count, window_tiles, BLOCK_N, ALL_VISIBLE)
            mbarrier.wait(ready.index(3), phase)
            fence_async_shared()
            s = warpgroup_mma(qs.index(1 + zero), kv.index(3 + zero).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(2), phase)
            fence_async_shared()
            s = warpgroup_mma(qs.index(0 + zero), kv.index(2 + zero).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(query_free, pred=tile + 2 >= end)
            s = gl.where(has_bit(word, n)[None, :], s * scale_log2, float("-inf"))
            own_top = gl.max(s, 1)
            mbarrier.wait(tops.index(0), phase)
            new_top = gl.maximum(rows.index(0).load(ROWS), own_top)
            factor = gl.exp2(top - new_top)
            p = gl.exp2(s - new_top[:, None])
            total = total * factor + gl.sum(p, 1)
            top = new_top
            rows.index(1).store(new_top)
            mbarrier.arrive(tops.index(1))
            acc = acc * gl.convert_layout(factor, O_ROWS)[:, None]
            p_low = p.to(low)
            acc = warpgroup_mma(gl.convert_layout(p_low, P_LAYOUT), kv.index(3 + zero), acc, is_async=True)
            ps.index(1 + zero).store(p_low)
            fence_async_shared()
            mbarrier.arrive(fulls.index(1))
            mbarrier.wait(fulls.index(0), phase)
            acc = warpgroup_mma(ps.index(0 + zero), kv.index(1 + zero), acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(free.index(3))
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(free.index(1))
            count += 1
        sink = gl.load(SINK + (item % HEAD_BLOCKS) * 64 + head) * LOG2_E
        rows.index(3).store(total)
        mbarrier.arrive(totals.index(1))
        mbarrier.wait(totals.index(0), item_count & 1)
        total = total + rows.index(2).load(ROWS)
        weight = gl.where(total > 0.0, 1.0 / (total + gl.exp2(sink - top)), 0.0)
        item_count += 1  # noqa: SIM113
        store_half(OUT, acc * gl.convert_layout(weight, O_ROWS)[:, None], item, D // 2, D)


@gluon.jit
def hopper_forward_kernel(
    Q, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, SINK, BOUNDS, OUT, LSE, items, first_row, K, word_count, window_tiles, scale_log2,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr,
    R_RIGHT: gl.constexpr, R_PRODUCER: gl.constexpr,
):  # fmt: skip
    low: gl.constexpr = Q.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    qs = gl.allocate_shared_memory(low, [2, 64, D // 2], TILE)
    kv = gl.allocate_shared_memory(low, [4, BLOCK_N, D // 2], TILE)
    ps = gl.allocate_shared_memory(low, [2, 64, BLOCK_N], TILE)
    rows = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    tops = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    fulls = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    totals = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    query_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=128)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(tops.index(i), count=1)
        mbarrier.init(fulls.index(i), count=1)
        mbarrier.init(totals.index(i), count=1)
    mbarrier.init(query_ready, count=128)
    mbarrier.init(query_free, count=2)
    fence_async_shared()
    sync_warps()
    gl.warp_specialize(
        [
            (left_partition, (
                WORDS, BOUNDS, SINK, OUT, LSE, items, first_row, word_count, window_tiles, scale_log2,
                qs, kv, ps, rows, ready, free, query_ready, query_free, tops, fulls, totals, HEAD_BLOCKS, D, BLOCK_N, ALL_VISIBLE,
            )),
            (right_partition, (
                WORDS, BOUNDS, SINK, OUT, items, first_row, word_count, window_tiles, scale_log2,
                qs, kv, ps, rows, ready, free, query_ready, query_free, tops, fulls, totals, HEAD_BLOCKS, D, BLOCK_N, ALL_VISIBLE,
            )),
            (producer_partition, (
                Q, WINDOW_KV, COMPRESSED_KV, SELECTED, BOUNDS, items, first_row, K, window_tiles,
                qs, kv, ready, free, query_ready, query_free, HEAD_BLOCKS, D, BLOCK_N, ALL_VISIBLE,
            )),
        ],
        [4, 4],
        [R_RIGHT, R_PRODUCER],
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
    programs = min(items, multiprocessors(q.device))
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
        R_RIGHT=RIGHT_REGISTERS,
        R_PRODUCER=PRODUCER_REGISTERS,
        num_warps=4,
    )
    return out, lse
