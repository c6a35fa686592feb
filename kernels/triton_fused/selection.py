# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of the index scores per row, ids ascending, ties to the lower id, without a [rows, entries] matrix.

Scores of a chunk of rows go into one bounded buffer that is used again. Rows of up to 16,384 entries are held in registers, longer ones read several
times. Rows that see at most k entries need no score.

Legend: R query rows, C compressed entries of the whole row, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton_fused.index_scores import write_scores
from kernels.triton_fused.rounding import ceil_div, power_of_two
from kernels.triton_fused.row_select import long_row_kernel, parts_kernel

BUFFER_BYTES = 128 << 20  # at 16,384 tokens 9 % faster than half of it
MOST_ROWS = 1 << 19  # blocks of 16 of them fill the second dimension of a grid, which ends at 65,535, to the half
SPANS = ((1024, 1), (4096, 2), (8192, 4), (16384, 8))  # entries that a row program holds, its warps
PART = 1024  # entries of a part a warp
PASS = 512  # entries a warp takes at once when it writes the ids


def chunk_rows(rows_left: int, columns: int, budget: int = BUFFER_BYTES) -> int:
    """Rows of the next chunk: as many as the buffer holds, a multiple of 32 unless all are left."""
    fitting = max(32, budget // (4 * _padded(columns)) // 32 * 32)
    return min(rows_left, fitting, MOST_ROWS)


def select_entries(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    topk: int,
    ratio: int,
    longest: int,
    first_token: int = 0,
    with_scores: bool = False,
    budget: int = BUFFER_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """int32 [R, K]: the K best visible entries of every row, ascending, then -1; and their scores fp32 [R, K], -inf behind them, if asked for.

    Args:
        index_q: [R, HI, DI]; index_k: [C, DI]; index_w: [R, HI].
        entry_start, visible: int32 [R]; a row sees the entries [entry_start, entry_start + visible).
        longest: host bound on `visible`; together with `ratio` and the token id of row 0 it bounds what a chunk of rows can see.
        budget: bytes of the score buffer.
    """
    rows = index_q.shape[0]
    widest = min(longest, index_k.shape[0])
    ids = torch.empty(rows, topk, dtype=torch.int32, device=index_q.device)
    chosen = torch.empty(rows, topk, dtype=torch.float32, device=index_q.device) if with_scores else None
    if rows == 0 or topk == 0 or widest == 0:
        return ids.fill_(-1), None if chosen is None else chosen.fill_(-torch.inf)
    needless = 0 if with_scores else topk  # rows that see no more than this need no score
    size = chunk_rows(rows, widest, budget)
    buffer = torch.empty(16 if widest <= needless else size * _padded(widest), dtype=torch.float32, device=index_q.device)
    for first in range(0, rows, size):
        stop = min(rows, first + size)
        most = min(widest, (first_token + stop) // ratio)
        scores = buffer[:16].view(1, 16)  # not read where no row needs a score
        if most > needless:
            columns = _padded(most)
            scores = buffer[: (stop - first) * columns].view(-1, columns)
            begin = _first_to_see(needless + 1, first, ratio, first_token)  # the rows before need no score
            write_scores(index_q, index_k, index_w, entry_start, visible, scores[begin - first :], begin, stop, skip_up_to=needless)
        _take_chunk(scores, ids, chosen, entry_start, visible, first, stop, most, ratio, first_token)
    return ids, chosen


def _take_chunk(
    scores: Tensor,
    ids: Tensor,
    chosen: Tensor | None,
    entry_start: Tensor,
    visible: Tensor,
    first: int,
    stop: int,
    most: int,
    ratio: int = 0,
    first_token: int = 0,
) -> None:
    """Ids of the rows [first, stop), which see at most `most` entries: one launch per span of registers, each taking the rows that fit.

    A row sees at most a `ratio`-th of the tokens up to its own; 0 if nothing is known about that.
    """
    topk = ids.shape[1]
    block_k = power_of_two(topk)
    columns, lower = scores.shape[1], topk
    emit = chosen is not None
    kept = scores if chosen is None else chosen

    def tensors(begin: int) -> tuple[Tensor, ...]:
        return scores if begin == first else scores[begin - first :], ids, kept, entry_start, visible

    for number, (span, warps) in enumerate(SPANS):
        if number == 0:
            span = max(32, min(span, power_of_two(max(1, most))))
        if number == 0 or (most > lower and span > topk):
            # the rows before see no more than the previous launches took
            begin = first if number == 0 else _first_to_see(lower + 1, first, ratio, first_token)
            part = min(span, PART * warps)
            parts_kernel[(stop - begin,)](
                *tensors(begin),
                begin,
                columns,
                lower,
                K=topk,
                BLOCK_K=block_k,
                PART=part,
                FEWEST=lower // part + 1 if number else 1,
                MOST=span // part,
                BLOCK=min(part, PASS * warps),
                SHORT=number == 0,
                EMIT=emit,
                num_warps=warps,
            )
            lower = max(lower, span)
    if most > lower:
        begin = _first_to_see(lower + 1, first, ratio, first_token)
        long_row_kernel[(stop - begin,)](*tensors(begin), begin, columns, lower, K=topk, BLOCK=4096, EMIT=emit, num_warps=8)


def _first_to_see(entries: int, first: int, ratio: int, first_token: int) -> int:
    """A row from `first` on before which none sees as many `entries`: like a chunk it begins at a multiple of 16, else kernels were compiled anew."""
    return max(first, (ratio * entries - 1 - first_token) // 16 * 16)


def _padded(columns: int) -> int:
    """Row pitch of the buffer: rows begin on 64 bytes."""
    return max(16, ceil_div(columns, 16) * 16)
