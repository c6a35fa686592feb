# SPDX-License-Identifier: Apache-2.0
"""Index scores of a chunk of query rows, in fp32, each row against the entries of its own document.

score[t, j] = sum over index heads h of w[t, h] * relu(q[t, h] . k[j]). A tile of keys stays while the queries that see it pass by: the head sum is
then a sum inside one row of the product.

Legend: R query rows, C compressed entries of the whole row, HI index heads, DI index head dim, S columns of the chunk buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import ceil_div, power_of_two


@dataclass(frozen=True)
class ScoreTiling:
    """Keys x queries of one program, queries multiplied at once, heads of one product."""

    keys: int
    rows: int
    together: int
    heads: int
    warps: int
    stages: int


def score_tiling(heads: int, head_dim: int, dtype: torch.dtype, columns: int) -> ScoreTiling:
    """Measured on an H200 with Triton 3.6.0: wide tiles for long documents, small ones where they would leave multiprocessors idle."""
    padded = power_of_two(heads)
    dim = max(16, power_of_two(head_dim))
    if dtype == torch.float32:
        # plain fused multiply-adds: a larger product does not fit registers
        block = max(16, min(padded, 16))
        return ScoreTiling(32 if dim > 128 else 64, 16, max(1, 16 // padded), min(block, padded), 4, 1)
    together = max(1, 32 // padded)
    block = min(padded, 64)
    if columns >= 2048 and dim <= 128:
        return ScoreTiling(256, 32, together, block, 8, 3)
    return ScoreTiling(128, 16, together, block, 4 if dim <= 128 else 8, 2)


@triton.jit
def scores_kernel(
    Q,
    KEYS,
    WEIGHTS,
    ENTRY_START,
    VISIBLE,
    SCORES,
    first_row,
    stop_row,
    skip_up_to,
    columns,
    C,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    slot = tl.arange(0, BLOCK_T)
    rows = first_row + tl.program_id(1) * BLOCK_T + slot
    start = tl.load(ENTRY_START + rows, mask=rows < stop_row, other=0)
    seen = tl.load(VISIBLE + rows, mask=rows < stop_row, other=0)
    wanted = seen > skip_up_to
    highest = tl.max(tl.where(wanted, start + seen, 0), 0)
    lowest = tl.minimum(tl.min(tl.where(wanted, start, 2147483647), 0), highest)
    tile = (lowest // BLOCK_N + tl.program_id(0)) * BLOCK_N
    hit = wanted & (start < tile + BLOCK_N) & (start + seen > tile)
    begin = tl.min(tl.where(hit, slot, BLOCK_T), 0)
    end = tl.max(tl.where(hit, slot + 1, 0), 0)
    if begin < end:
        key = tile + tl.arange(0, BLOCK_N)
        dim = tl.arange(0, BLOCK_D)
        k = tl.load(KEYS + key.to(tl.int64)[:, None] * DI + dim[None, :], mask=(key < C)[:, None] & (dim < DI)[None, :], other=0.0)
        base = first_row + tl.program_id(1) * BLOCK_T
        lane = tl.arange(0, TOGETHER * BLOCK_H)
        for i in range(begin, end, TOGETHER):
            query = base + i + lane // BLOCK_H
            total = tl.zeros([BLOCK_N, TOGETHER], tl.float32)
            for h0 in tl.static_range(0, HI, BLOCK_H):
                head = h0 + lane % BLOCK_H
                real = (query < stop_row) & (head < HI)
                line = query.to(tl.int64) * HI + head
                q = tl.load(Q + line[:, None] * DI + dim[None, :], mask=real[:, None] & (dim < DI)[None, :], other=0.0)
                w = tl.load(WEIGHTS + line, mask=real, other=0.0).to(tl.float32)
                s = tl.maximum(tl.dot(k, tl.trans(q), input_precision=PRECISION), 0.0) * w[None, :]
                if TOGETHER == 1:
                    total += tl.sum(s, 1)[:, None]
                else:
                    total += tl.sum(tl.reshape(s, (BLOCK_N, TOGETHER, BLOCK_H)), 2)
            target = base + i + tl.arange(0, TOGETHER)
            inside = target < stop_row
            first = tl.load(ENTRY_START + target, mask=inside, other=0)
            count = tl.load(VISIBLE + target, mask=inside, other=0)
            column = key[:, None] - first[None, :]
            address = SCORES + (target - first_row).to(tl.int64)[None, :] * columns + column
            tl.store(address, total, mask=(column >= 0) & (column < count[None, :]) & inside[None, :])


def write_scores(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    buffer: Tensor,
    first_row: int,
    stop_row: int,
    skip_up_to: int = 0,
    tiling: ScoreTiling | None = None,
) -> None:
    """Fill `buffer` fp32 [>= stop_row - first_row, S] with the scores of the rows [first_row, stop_row).

    Column c of a row is entry `entry_start + c`. Columns at or behind `visible` are not written; rows with at most `skip_up_to` visible entries
    need not be. S must be at least the largest `visible` of these rows.
    """
    heads, dim = index_q.shape[1:]
    columns = buffer.shape[1]
    entries = index_k.shape[0]
    tiles = tiling or score_tiling(heads, dim, index_q.dtype, columns)
    # the rows of one program may end one document, hold short ones and begin another, whose entries lie side by side
    key_tiles = ceil_div(min(entries, 2 * columns + tiles.rows), tiles.keys) + 1
    scores_kernel[(key_tiles, ceil_div(stop_row - first_row, tiles.rows))](
        index_q,
        index_k,
        index_w,
        entry_start,
        visible,
        buffer,
        first_row,
        stop_row,
        skip_up_to,
        columns,
        entries,
        HI=heads,
        DI=dim,
        BLOCK_H=tiles.heads,
        BLOCK_D=max(16, power_of_two(dim)),
        BLOCK_N=tiles.keys,
        BLOCK_T=tiles.rows,
        TOGETHER=tiles.together,
        PRECISION="ieee" if index_q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
