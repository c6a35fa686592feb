# SPDX-License-Identifier: Apache-2.0
"""Attention backward for SM90 in Gluon: 64 or 128 heads of 512 columns.

Three warp groups of one persistent program share the work on a tile of 64 keys:

    scores      gathers K (and, per item, Q and dO), S = Q K^T, dP = dO K^T, P and dS to smem, the teacher to memory
    gradients   two groups, each for half of the columns: dQ += dS K in registers, then per 64 columns X = P^T dO + dS^T Q, added to dkv

P and dS have two buffers, so that the scores of the next tile are under way while the gradients of this one are added: the additions (`red`, 16
bytes per lane) hold their registers for a long time, and nothing in `scores` waits for them. K has one buffer; it is free as soon as both dQ
are done, which comes first. Q and dO have one buffer too; the last tile of an item frees it 64 columns at a time, and those of the next item follow.

What the softmax needs of a row beforehand, `scores` finds out itself, in the time in which it waits for the two others:

    delta[r, h] = sum_d out * grad_out            during the tiles of the item before, 64 columns per tile
    z[r, h]     = logaddexp(lse, sink)            the full log denominator
    d_sink[h]   = - sum_r exp(sink - z) * delta   one partial sum per program, in a fixed order: bit-equal from run to run

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

from kernels.triton_fused.gradient_prepare import prepare_gradient
from kernels.triton_fused.hopper_common import copy_to_shared, has_bit, item_bounds, multiprocessors, store_half, sync_warps, tile_keys, tile_word
from kernels.triton_fused.rows import RowBounds, RowPlan

LOG2_E = gl.constexpr(1.4426950408889634)
PIECE = gl.constexpr(64)  # columns of out and its gradient that are multiplied at once: 16 bytes from 8 places are under way per thread
FOLD = True  # False: delta, z and d_sink from a pass of their own, gradient_prepare.py
GRADIENT_REGISTERS = 200  # per thread of a gradients group; the scores group gets what is left of three times 168: 104


@gluon.constexpr_function
def product_layout(width):
    """[64 heads, width >= 64]: 16 bytes per lane and 64 per row in every load of 16-bit values; a lane has the same rows as in the scores."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, width]
    )


@gluon.jit
def add_products(total, OUT, GRAD_OUT, item, first, last, D: gl.constexpr, WIDTH: gl.constexpr):
    """fp32 total [64 heads] + the sum of out * grad_out over the columns first * WIDTH to last * WIDTH of an item.

    The sum over the columns stays inside groups of four lanes: no smem, no barrier.
    """
    L: gl.constexpr = product_layout(WIDTH)
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    for piece in range(first, last):
        # + (piece >> 28), a 0 that the compiler does not know: loop-invariant offsets would be kept in registers through the loop over the tiles
        head = gl.arange(0, 64, layout=gl.SliceLayout(1, L)) + (piece >> 28)
        offset = head[:, None] * D + dim[None, :]
        start = item.to(gl.int64) * (64 * D) + piece * WIDTH
        out = gl.load(OUT + start + offset, eviction_policy="evict_first")  # nothing reads it again; its gradient goes to smem soon
        grad = gl.load(GRAD_OUT + start + offset)
        total += gl.convert_layout(gl.sum(out.to(gl.float32) * grad.to(gl.float32), 1), total.type.layout)
    return total


@gluon.jit
def scores_partition(
    Q, GRAD_OUT, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, LSE, OUT, SINK, BOUNDS, TEACHER, D_SINK,
    items, first_row, K, word_count, window_tiles, scale_log2, scale, qs, gs, kv, ps, ds, full, empty, key_free, query_free,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr, EMIT_TEACHER: gl.constexpr,
    PREPARED: gl.constexpr, WIDTH: gl.constexpr,
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
    part = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOAD))
    nothing = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    low: gl.constexpr = Q.dtype.element_ty
    d_sink = gl.zeros([64], gl.float32, ROWS)
    d_sink_2 = d_sink  # of the second block of heads
    next_delta = d_sink
    if not PREPARED:
        next_delta = add_products(d_sink, OUT, GRAD_OUT, items - 1 - gl.program_id(0), 0, D // PIECE, D, PIECE)
    count = 0
    item_count = 0
    for j in range(gl.program_id(0), items, gl.num_programs(0)):
        item = items - 1 - j
        row, token, window_start, entry_start, entry_end, first_tile, last_tile = item_bounds(
            item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS, BLOCK_N
        )
        if PREPARED:
            z = gl.load(LSE + item * 64 + head)
            delta = gl.load(OUT + item * 64 + head)
        else:
            delta = next_delta
            next_delta = gl.zeros([64], gl.float32, ROWS)
            lse = gl.load(LSE + item * 64 + head) * LOG2_E
            sink = gl.load(SINK + (item % HEAD_BLOCKS) * 64 + head) * LOG2_E
            top = gl.maximum(lse, sink)
            # equal infinities have no difference
            z = top + gl.log2(1.0 + gl.exp2(gl.where(lse == sink, 0.0, gl.minimum(lse, sink) - top)))
            # a row without keys has no part in it, whatever stands in the gradient of its out
            share = gl.where(lse == float("-inf"), 0.0, gl.where(sink == z, 1.0, gl.exp2(sink - z)) * delta)
            if HEAD_BLOCKS == 1:
                d_sink -= share
            else:
                d_sink -= gl.where(item % 2 == 0, share, 0.0)
                d_sink_2 -= gl.where(item % 2 == 0, 0.0, share)
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
                offset = (item + zero).to(gl.int64) * (64 * D) + load_head[:, None] * D + part[None, :]
                always = (load_head >= 0)[:, None]
                for c in gl.static_range(HALF // WIDTH):  # the order in which the gradients groups finish the last tile of the item before
                    mbarrier.wait(query_free.index(c), (item_count & 1) ^ 1)
                    for side in gl.static_range(2):
                        copy_to_shared(qs.index(side).slice(c * WIDTH, WIDTH, dim=1), Q + offset + (side * HALF + c * WIDTH), always)
                        copy_to_shared(gs.index(side).slice(c * WIDTH, WIDTH, dim=1), GRAD_OUT + offset + (side * HALF + c * WIDTH), always)
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
            if not PREPARED:
                # one piece of the next item per tile, on the last tile all that is left: there `scores` waits longest
                pieces = gl.where(j + gl.num_programs(0) < items, D // PIECE, 0)
                first = gl.minimum(tile - first_tile, pieces)
                last = gl.where(tile + 1 == last_tile, pieces, gl.minimum(first + 1, pieces))
                next_delta = add_products(next_delta, OUT, GRAD_OUT, item + zero - gl.num_programs(0), first, last, D, PIECE)
            count += 1
        item_count += 1  # noqa: SIM113
    if not PREPARED:
        gl.store(D_SINK + gl.program_id(0) * (64 * HEAD_BLOCKS) + head, d_sink)
        if HEAD_BLOCKS == 2:
            gl.store(D_SINK + gl.program_id(0) * (64 * HEAD_BLOCKS) + 64 + head, d_sink_2)


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
            if tile + 1 == last_tile:
                mbarrier.arrive(query_free.index(0))
            add_rows(DKV, x, key, valid, SIDE * HALF, gl.to_tensor(zero).to(gl.float32), D, WIDTH)
            for c in gl.static_range(1, pieces):
                x = warpgroup_mma(
                    ps.index(buffer).permute((1, 0)), gs.index(SIDE + zero).slice(c * WIDTH, WIDTH, dim=1), nothing, use_acc=False, is_async=True
                )
                x = warpgroup_mma(ds.index(buffer).permute((1, 0)), qs.index(SIDE + zero).slice(c * WIDTH, WIDTH, dim=1), x, is_async=True)
                x = warpgroup_mma_wait(0, [x])
                if c == pieces - 1:
                    mbarrier.arrive(empty.index(buffer))
                if tile + 1 == last_tile:
                    mbarrier.arrive(query_free.index(c))
                add_rows(DKV, x, key, valid, SIDE * HALF + c * WIDTH, gl.to_tensor(zero).to(gl.float32), D, WIDTH)
            count += 1
        store_half(DQ, dq, item, SIDE * HALF, D)


@gluon.jit
def hopper_backward_kernel(
    Q, GRAD_OUT, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, LSE, OUT, SINK, BOUNDS, DQ, DKV, TEACHER, D_SINK,
    items, first_row, tokens, K, word_count, window_tiles, scale_log2, scale,
    HEAD_BLOCKS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, ALL_VISIBLE: gl.constexpr,
    EMIT_TEACHER: gl.constexpr, R_GRADIENTS: gl.constexpr, PREPARED: gl.constexpr,
):  # fmt: skip
    """PREPARED: LSE and OUT are z times log2(e) and delta, fp32 [R, H]; SINK and D_SINK are not touched."""
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
    query_free = gl.allocate_shared_memory(gl.int64, [D // 2 // WIDTH, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(key_free.index(i), count=1)
    for i in gl.static_range(D // 2 // WIDTH):
        mbarrier.init(query_free.index(i), count=2)
    fence_async_shared()
    sync_warps()
    gl.warp_specialize(
        [
            (scores_partition, (
                Q, GRAD_OUT, WINDOW_KV, COMPRESSED_KV, SELECTED, WORDS, LSE, OUT, SINK, BOUNDS, TEACHER, D_SINK,
                items, first_row, K, word_count, window_tiles, scale_log2, scale,
                qs, gs, kv, ps, ds, full, empty, key_free, query_free, HEAD_BLOCKS, D, BLOCK_N, ALL_VISIBLE, EMIT_TEACHER,
                PREPARED, WIDTH,
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
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
    emit_teacher: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq [R, H, D], dkv fp32 [T + C, D] (windows first), d_sink fp32 [H], teacher_sum fp32 [R, K] or None.

    sink: fp32 [H]; out [R, H, D], lse fp32 [R, H]: what the forward returned.
    """
    rows, heads, dim = q.shape
    tokens, entries = window_kv.shape[0], 0 if compressed_kv is None else compressed_kv.shape[0]
    slots = 0 if selected is None else selected.shape[1]
    dq = torch.empty_like(q)
    dkv = torch.zeros(tokens + entries, dim, dtype=torch.float32, device=q.device)
    teacher = torch.zeros(rows, slots, dtype=torch.float32, device=q.device) if emit_teacher else None
    if rows == 0:
        return dq, dkv, sink.new_zeros(heads), teacher
    items = rows * (heads // 64)
    programs = min(items, multiprocessors(q.device))
    d_sink = torch.empty(programs, heads, dtype=torch.float32, device=q.device)
    z_or_lse, delta_or_out = lse, out
    if not FOLD:
        z_or_lse, delta_or_out, d_sink = prepare_gradient(grad_out, out, lse, sink)
    hopper_backward_kernel[(programs,)](
        q,
        grad_out,
        window_kv,
        window_kv if compressed_kv is None else compressed_kv,
        bounds.visible if selected is None else selected,
        plan.words,
        z_or_lse,
        delta_or_out,
        sink,
        plan.bounds,
        dq,
        dkv,
        lse if teacher is None else teacher,
        d_sink,
        items,
        bounds.first_row,
        tokens,
        slots,
        plan.words.shape[-1],
        triton.cdiv(bounds.window, 64),
        scale * LOG2_E.value,
        scale,
        HEAD_BLOCKS=heads // 64,
        D=dim,
        BLOCK_N=64,
        WIDTH=64,
        ALL_VISIBLE=selected is None,
        EMIT_TEACHER=emit_teacher and slots > 0,
        R_GRADIENTS=GRADIENT_REGISTERS,
        PREPARED=not FOLD,
        num_warps=4,
    )
    return dq, dkv, d_sink.sum(0) if FOLD else d_sink, teacher
