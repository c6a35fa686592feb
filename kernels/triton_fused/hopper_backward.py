# SPDX-License-Identifier: Apache-2.0
"""Attention backward for SM90 in Gluon: 64 or 128 heads of 512 columns.

Three warp groups of one persistent program share the work on a tile of 64 keys:

    scores      gathers K (and, per item, Q and dO), S = Q K^T, dP = dO K^T, P and dS to smem, the teacher to memory
    gradients   two groups, each for half of the columns: dQ += dS K in registers, then per 64 columns X = P^T dO + dS^T Q, added to dkv

P and dS have two buffers, so that the scores of the next tile are under way while the gradients of this one are added: the additions (`red`, 16
bytes per lane) hold their registers for a long time, and nothing in `scores` waits for them. K has one buffer; it is free as soon as both dQ
are done, which comes first.

Legend: R query rows, T tokens, C entries, H heads, D head dim, K slots.
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

LOG2_E = 1.4426950408889634
GRADIENT_REGISTERS = 200  # per thread of a gradients group; the scores group gets what is left of the register file: 112


@gluon.jit
def scores_partition(
    Q, GRAD_OUT, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, Z_LOG2, DELTA, BOUNDS, TEACHER,
    items, first_row, K, word_count, window_tiles, scale_log2, scale, qs, gs, kv, ps, ds, full, empty, key_free, query_free,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr, EMIT_TEACHER: gl.constexpr,
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
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    low: gl.constexpr = Q.dtype.element_ty
    count = 0
    item_count = 0
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
            item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        z = gl.load(Z_LOG2 + item * 64 + head)
        delta = gl.load(DELTA + item * 64 + head)
        key = tile_keys(first_tile, row, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, key_n, BLOCK_N, ALL_VISIBLE)
        for tile in range(first_tile, last_tile):
            buffer = count & 1
            zero = (tile + j) >> 28
            base = gl.where(tile < window_tiles, WINDOW_KV, COMPRESSED_KV)
            pointer = base + (key.to(gl.int64) * D)[:, None] + dim[None, :]
            mask = (key >= 0)[:, None]
            mbarrier.wait(key_free.index(0), (count & 1) ^ 1)
            copy_to_shared(kv.index(0), pointer, mask)
            async_copy.commit_group()
            mbarrier.wait(key_free.index(1), (count & 1) ^ 1)
            copy_to_shared(kv.index(1), pointer + HALF, mask)
            if tile == first_tile:
                # + zero: loop-invariant pointers would be kept in registers through the loop
                offset = (item + zero).to(gl.int64) * (64 * D) + load_head[:, None] * D + dim[None, :]
                always = (load_head >= 0)[:, None]
                mbarrier.wait(query_free, (item_count & 1) ^ 1)
                copy_to_shared(qs.index(0), Q + offset, always)
                copy_to_shared(gs.index(0), GRAD_OUT + offset, always)
                copy_to_shared(qs.index(1), Q + offset + HALF, always)
                copy_to_shared(gs.index(1), GRAD_OUT + offset + HALF, always)
                async_copy.commit_group()
                async_copy.wait_group(0)
            async_copy.commit_group()
            key = tile_keys(tile + 1, row + zero, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, key_n, BLOCK_N, ALL_VISIBLE)
            word = tile_word(tile, row + zero, token, window_start, entry_start, entry_end, WORDS, word_count, window_tiles, BLOCK_N, ALL_VISIBLE)
            async_copy.wait_group(1)
            fence_async_shared()
            sync_warps()
            s = warpgroup_mma(qs.index(0 + zero), kv.index(0 + zero).permute((1, 0)), nothing, use_acc=False, is_async=True)
            dp = warpgroup_mma(gs.index(0 + zero), kv.index(0 + zero).permute((1, 0)), nothing, use_acc=False, is_async=True)
            async_copy.wait_group(0)
            fence_async_shared()
            sync_warps()
            s = warpgroup_mma(qs.index(1 + zero), kv.index(1 + zero).permute((1, 0)), s, is_async=True)
            dp = warpgroup_mma(gs.index(1 + zero), kv.index(1 + zero).permute((1, 0)), dp, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            p = gl.where(has_bit(word, n)[None, :], gl.exp2(s * scale_log2 - z[:, None]), 0.0)
            mbarrier.wait(empty.index(buffer), ((count >> 1) & 1) ^ 1)
            ps.index(buffer).store(p.to(low))
            dp = warpgroup_mma_wait(0, [dp])
            ds.index(buffer).store((p * ((dp - delta[:, None]) * scale)).to(low))
            fence_async_shared()
            mbarrier.arrive(full.index(buffer))
            if EMIT_TEACHER:
                column = gl.arange(0, BLOCK_N, layout=COLUMNS)
                slot = (tile - window_tiles) * BLOCK_N + column
                target = TEACHER + (row + zero).to(gl.int64) * K + slot
                head_sum = gl.convert_layout(gl.sum(p, 0), COLUMNS)
                if HEAD_BLOCKS == 1:
                    gl.store(target, head_sum, mask=(slot >= 0) & (slot < K))
                else:  # two terms on top of 0: their order does not matter
                    gl.atomic_add(target, head_sum, mask=(slot >= 0) & (slot < K), sem="relaxed")
            count += 1
        item_count += 1  # noqa: SIM113


@gluon.constexpr_function
def add_layout(width):
    """[64 keys, width] fp32 with 16 consecutive bytes per lane and 128 bytes per row in every instruction."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [1, 0], [0, 32]], [[0, 8], [0, 4], [0, 16], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, width]
    )


@gluon.jit
def add_rows(DKV, x, key, valid, column, nil, D: gl.constexpr, WIDTH: gl.constexpr):
    """x [64 keys, WIDTH] in the layout of the matrix instruction, added to rows of DKV: 16 bytes per lane, 128 per row.

    What the L2 cache takes in additions limits the whole kernel, and it takes rows of 128 bytes a fifth faster than rows of 64. Two exchanges
    between neighbours lead to them, each of one lane bit with one register bit, which costs half the shuffles of a layout that also renumbers the
    lanes. Adding `nil`, a 0 that the compiler does not know, keeps it from merging both exchanges into one through smem.
    """
    QUADS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, WIDTH]
    )
    ADD: gl.constexpr = add_layout(WIDTH)
    y = gl.convert_layout(gl.convert_layout(x, QUADS) + nil, ADD)
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ADD))
    target = DKV + (key.to(gl.int64) * D)[:, None] + (column + dim)[None, :]
    gl.atomic_add(target, y, mask=valid[:, None] & (dim >= 0)[None, :], sem="relaxed")


@gluon.jit
def gradients_partition(
    SELECTED, BOUNDS, DQ, DKV, items, first_row, tokens, K, window_tiles,
    qs, gs, kv, ps, ds, full, empty, key_free, query_free,
    SIDE: gl.constexpr, HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, ALL_VISIBLE: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ADD: gl.constexpr = add_layout(WIDTH)
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ADD))
    nothing = gl.zeros([BLOCK_N, WIDTH], gl.float32, X_LAYOUT)
    pieces: gl.constexpr = HALF // WIDTH
    count = 0
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
            item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        dq = gl.zeros([64, HALF], gl.float32, DQ_LAYOUT)
        for tile in range(first_tile, last_tile):
            buffer = count & 1
            zero = (tile + j) >> 28
            key = tile_keys(tile, row, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, n, BLOCK_N, ALL_VISIBLE)
            valid = key >= 0
            key = key + gl.where(tile < window_tiles, 0, tokens)
            mbarrier.wait(full.index(buffer), (count >> 1) & 1)
            dq = warpgroup_mma(ds.index(buffer), kv.index(SIDE + zero), dq, is_async=True)
            x = warpgroup_mma(ps.index(buffer).permute((1, 0)), gs.index(SIDE + zero).slice(0, WIDTH, dim=1), nothing, use_acc=False, is_async=True)
            x = warpgroup_mma(ds.index(buffer).permute((1, 0)), qs.index(SIDE + zero).slice(0, WIDTH, dim=1), x, is_async=True)
            dq = warpgroup_mma_wait(2, [dq])
            mbarrier.arrive(key_free.index(SIDE))
            x = warpgroup_mma_wait(0, [x])
            add_rows(DKV, x, key, valid, SIDE * HALF, gl.to_tensor(zero).to(gl.float32), D, WIDTH)
            for c in gl.static_range(1, pieces):
                x = warpgroup_mma(
                    ps.index(buffer).permute((1, 0)), gs.index(SIDE + zero).slice(c * WIDTH, WIDTH, dim=1), nothing, use_acc=False, is_async=True
                )
                x = warpgroup_mma(ds.index(buffer).permute((1, 0)), qs.index(SIDE + zero).slice(c * WIDTH, WIDTH, dim=1), x, is_async=True)
                x = warpgroup_mma_wait(0, [x])
                if c == pieces - 1:
                    mbarrier.arrive(empty.index(buffer))
                    mbarrier.arrive(query_free, pred=tile + 1 == last_tile)
                add_rows(DKV, x, key, valid, SIDE * HALF + c * WIDTH, gl.to_tensor(zero).to(gl.float32), D, WIDTH)
            count += 1
        store_half(DQ, dq, item, SIDE * HALF, D)


@gluon.jit
def hopper_backward_kernel(
    Q, GRAD_OUT, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, Z_LOG2, DELTA, BOUNDS, DQ, DKV, TEACHER,
    items, first_row, tokens, K, word_count, window_tiles, scale_log2, scale,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, ALL_VISIBLE: gl.constexpr,
    EMIT_TEACHER: gl.constexpr, R_GRADIENTS: gl.constexpr,
):  # fmt: skip
    low: gl.constexpr = Q.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    qs = gl.allocate_shared_memory(low, [2, 64, D // 2], TILE)
    gs = gl.allocate_shared_memory(low, [2, 64, D // 2], TILE)
    kv = gl.allocate_shared_memory(low, [2, BLOCK_N, D // 2], TILE)
    ps = gl.allocate_shared_memory(low, [2, 64, BLOCK_N], TILE)
    ds = gl.allocate_shared_memory(low, [2, 64, BLOCK_N], TILE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(key_free.index(i), count=1)
    mbarrier.init(query_free, count=2)
    fence_async_shared()
    sync_warps()
    gl.warp_specialize(
        [
            (scores_partition, (
                Q, GRAD_OUT, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, Z_LOG2, DELTA, BOUNDS, TEACHER,
                items, first_row, K, word_count, window_tiles, scale_log2, scale,
                qs, gs, kv, ps, ds, full, empty, key_free, query_free, HEAD_BLOCKS, D, BLOCK_N, ALL_VISIBLE, EMIT_TEACHER,
            )),
            (gradients_partition, (
                SELECTED, BOUNDS, DQ, DKV, items, first_row, tokens, K, window_tiles,
                qs, gs, kv, ps, ds, full, empty, key_free, query_free, 0, HEAD_BLOCKS, D, BLOCK_N, WIDTH, ALL_VISIBLE,
            )),
            (gradients_partition, (
                SELECTED, BOUNDS, DQ, DKV, items, first_row, tokens, K, window_tiles,
                qs, gs, kv, ps, ds, full, empty, key_free, query_free, 1, HEAD_BLOCKS, D, BLOCK_N, WIDTH, ALL_VISIBLE,
            )),
        ],
        [4, 4],
        [R_GRADIENTS, R_GRADIENTS],
    )  # fmt: skip


def hopper_backward(
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
    """As portable_backward: dq [R, H, D], dkv fp32 [T + C, D] (windows first), teacher_sum fp32 [R, K] or None."""
    rows, heads, dim = q.shape
    tokens, entries = window_kv.shape[0], 0 if compressed_kv is None else compressed_kv.shape[0]
    slots = 0 if selected is None else selected.shape[1]
    dq = torch.empty_like(q)
    dkv = torch.zeros(tokens + entries, dim, dtype=torch.float32, device=q.device)
    teacher = torch.zeros(rows, slots, dtype=torch.float32, device=q.device) if emit_teacher else None
    if rows == 0:
        return dq, dkv, teacher
    items = rows * (heads // 64)
    programs = min(items, multiprocessors(q.device))
    hopper_backward_kernel[(programs,)](
        q,
        grad_out,
        window_kv,
        window_kv if compressed_kv is None else compressed_kv,
        bounds.visible if selected is None else selected,
        plan.words,
        z_log2,
        delta,
        plan.bounds,
        dq,
        dkv,
        delta if teacher is None else teacher,
        items,
        bounds.first_row,
        tokens,
        slots,
        plan.words.shape[-1],
        triton.cdiv(bounds.window, 64),
        scale * LOG2_E,
        scale,
        HEAD_BLOCKS=heads // 64,
        D=dim,
        BLOCK_N=64,
        WIDTH=64,
        ALL_VISIBLE=selected is None,
        EMIT_TEACHER=emit_teacher and slots > 0,
        R_GRADIENTS=GRADIENT_REGISTERS,
        num_warps=4,
    )
    return dq, dkv, teacher
