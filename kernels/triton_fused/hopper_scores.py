# SPDX-License-Identifier: Apache-2.0
"""Index scores for SM90 in Gluon: 64 index heads of 64 or 128 columns, bf16 or fp16.

As in index_scores.py a tile of keys stays while queries pass by. Here the keys stay in registers: with both operands in shared memory a product of
64 heads reads 128 bytes a clock, all that shared memory gives. The product of the next query is under way while the ReLU, the weights and the head
sum of this one are worked off.

Legend: R query rows, C compressed entries of the whole row, HI index heads, DI index head dim.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.triton_fused.hopper_common import copy_to_shared, sync_warps

HEADS = 64
BUFFERS = gl.constexpr(4)  # queries in shared memory


@gluon.jit
def fetch_query(i, end, base, Q, queries, begin, HI: gl.constexpr, DI: gl.constexpr):
    """Start the copy of query base + i; beyond `end` nothing is copied, but the group still counts."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DI, DI // 8], [8, 1], [1, 0])
    head = gl.arange(0, HI, layout=gl.SliceLayout(1, LOAD))
    dim = gl.arange(0, DI, layout=gl.SliceLayout(0, LOAD))
    pointer = Q + (base + i).to(gl.int64) * (HI * DI) + head[:, None] * DI + dim[None, :]
    copy_to_shared(queries.index((i - begin) & (BUFFERS - 1)), pointer, ((head >= 0) & (i < end))[:, None])
    async_copy.commit_group()


@gluon.jit
def begin_product(i, end, base, Q, k, queries, begin, HI: gl.constexpr, DI: gl.constexpr, nothing):
    """Keys times query base + i, under way; starts the copy of the query after the next."""
    async_copy.wait_group(1)
    sync_warps()  # the query has landed for all warps, and all have waited for the product that read the buffer filled next
    fetch_query(i + 2, end, base, Q, queries, begin, HI, DI)
    fence_async_shared()
    return warpgroup_mma(k, queries.index((i - begin) & (BUFFERS - 1)).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def store_scores(
    acc, WEIGHTS, i, end, base, first_row, tile, ENTRY_START, VISIBLE, SCORES, columns, BLOCK_N: gl.constexpr, HI: gl.constexpr, MMA: gl.constexpr
):
    """Head sum of one product and its store into the row's own columns."""
    key = tile + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
    head = gl.arange(0, HI, layout=gl.SliceLayout(0, MMA))
    row = base + gl.minimum(i, end - 1)
    start = gl.load(ENTRY_START + row)
    count = gl.load(VISIBLE + row)
    w = gl.load(WEIGHTS + row.to(gl.int64) * HI + head).to(gl.float32)
    score = gl.sum(gl.maximum(acc, 0.0) * w[None, :], 1)
    column = key - start
    gl.store(SCORES + (row - first_row).to(gl.int64) * columns + column, score, mask=(column >= 0) & (column < count) & (i < end))


@gluon.jit
def hopper_scores_kernel(
    Q, KEYS, WEIGHTS, ENTRY_START, VISIBLE, SCORES, first_row, stop_row, skip_up_to, columns, C,
    HI: gl.constexpr, DI: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HI, 16])
    KEY: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HI, DI], KEYS.dtype.element_ty)
    base = first_row + gl.program_id(1) * BLOCK_T
    slot = gl.arange(0, BLOCK_T, layout=ROWS)
    inside = base + slot < stop_row
    start = gl.load(ENTRY_START + base + slot, mask=inside, other=0)
    seen = gl.load(VISIBLE + base + slot, mask=inside, other=0)
    wanted = seen > skip_up_to
    highest = gl.max(gl.where(wanted, start + seen, 0), 0)
    lowest = gl.minimum(gl.min(gl.where(wanted, start, 2147483647), 0), highest)
    tile = (lowest // BLOCK_N + gl.program_id(0)) * BLOCK_N
    hit = wanted & (start < tile + BLOCK_N) & (start + seen > tile)
    begin = gl.min(gl.where(hit, slot, BLOCK_T), 0)
    end = gl.max(gl.where(hit, slot + 1, 0), 0)
    if begin < end:
        queries = gl.allocate_shared_memory(KEYS.dtype.element_ty, [BUFFERS, HI, DI], SHARED)
        for ahead in gl.static_range(2):
            fetch_query(begin + ahead, end, base, Q, queries, begin, HI, DI)
        key = tile + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, KEY))
        dim = gl.arange(0, DI, layout=gl.SliceLayout(0, KEY))
        k = gl.load(KEYS + (key * DI)[:, None] + dim[None, :], mask=(key < C)[:, None], other=0.0)
        nothing = gl.zeros([BLOCK_N, HI], gl.float32, MMA)
        # a product under way must not cross the end of the loop body: the compiler would wait for every single instruction
        for i in range(begin, end, 4):
            even = begin_product(i, end, base, Q, k, queries, begin, HI, DI, nothing)
            odd = begin_product(i + 1, end, base, Q, k, queries, begin, HI, DI, nothing)
            even = warpgroup_mma_wait(1, [even])
            store_scores(even, WEIGHTS, i, end, base, first_row, tile, ENTRY_START, VISIBLE, SCORES, columns, BLOCK_N, HI, MMA)
            even = begin_product(i + 2, end, base, Q, k, queries, begin, HI, DI, nothing)
            odd = warpgroup_mma_wait(1, [odd])
            store_scores(odd, WEIGHTS, i + 1, end, base, first_row, tile, ENTRY_START, VISIBLE, SCORES, columns, BLOCK_N, HI, MMA)
            odd = begin_product(i + 3, end, base, Q, k, queries, begin, HI, DI, nothing)
            even = warpgroup_mma_wait(1, [even])
            store_scores(even, WEIGHTS, i + 2, end, base, first_row, tile, ENTRY_START, VISIBLE, SCORES, columns, BLOCK_N, HI, MMA)
            odd = warpgroup_mma_wait(0, [odd])
            store_scores(odd, WEIGHTS, i + 3, end, base, first_row, tile, ENTRY_START, VISIBLE, SCORES, columns, BLOCK_N, HI, MMA)
        async_copy.wait_group(0)


def hopper_scores(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    buffer: Tensor,
    first_row: int,
    stop_row: int,
    skip_up_to: int,
    keys: int = 256,
    rows: int = 64,
) -> None:
    """As index_scores.write_scores; `keys` and `rows` are the tile of one program."""
    heads, dim = index_q.shape[1:]
    columns, entries = buffer.shape[1], index_k.shape[0]
    key_tiles = triton.cdiv(min(entries, 2 * columns + rows), keys) + 1
    hopper_scores_kernel[(key_tiles, triton.cdiv(stop_row - first_row, rows))](
        index_q, index_k, index_w, entry_start, visible, buffer, first_row, stop_row, skip_up_to, columns, entries,
        HI=heads, DI=dim, BLOCK_N=keys, BLOCK_T=rows, num_warps=8,
    )  # fmt: skip


def takes(index_q: Tensor) -> bool:
    """Whether this kernel serves these index queries [R, HI, DI] on their device."""
    _, heads, dim = index_q.shape
    fits = heads == HEADS and dim in (64, 128) and index_q.dtype in (torch.bfloat16, torch.float16)
    return fits and index_q.is_cuda and torch.cuda.get_device_capability(index_q.device) == (9, 0)
