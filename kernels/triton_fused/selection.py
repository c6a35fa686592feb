# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of the index scores per row, ids ascending, ties to the lower id, without a [rows, entries] matrix.

Scores of a chunk of rows go into one bounded buffer that is used again. A row of up to 16,384 entries is held in registers and its k-th value is
found by bisection; a longer one is read five times, 8 bits of the k-th value at a time. Rows that see at most k entries need no score.

Legend: R query rows, C compressed entries of the whole row, K top-k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.index_scores import write_scores
from kernels.triton_fused.rounding import ceil_div, power_of_two
from kernels.triton_fused.row_select import parts_kernel

BUFFER_BYTES = 128 << 20  # at 16,384 tokens 7 % faster than half of it
MOST_ROWS = 1 << 19  # blocks of 16 of them fill the second dimension of a grid, which ends at 65,535, to the half
LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32
REGISTER_SPANS = ((1024, 2), (4096, 4), (8192, 8), (16384, 16))  # entries that a row program holds, its warps
PART_SPANS = ((1024, 1), (4096, 1), (8192, 2), (16384, 4))  # the same for rows held in parts
PASS_WIDTH = 512  # entries a warp takes at once when it writes the ids
IN_PARTS = False  # which of the two register kernels runs


@triton.jit
def take_top(SCORES, IDS, CHOSEN, count, start, K: tl.constexpr, SPAN: tl.constexpr, EMIT: tl.constexpr):
    """One row in registers: the K best of `count` > K scores. Bisection between minimum and maximum ends as soon as it parts off exactly K."""
    column = tl.arange(0, SPAN)
    inside = column < count
    score = tl.load(SCORES + column, mask=inside, other=float("-inf"))
    # nothing lies in the middle of infinities: they count as the largest magnitude, NaN as the largest score, so that every row gives K ids
    x = tl.where(score < LARGEST, tl.where(score > -LARGEST, score, -LARGEST), LARGEST)
    x = tl.where(inside, x, float("-inf"))
    low = tl.min(tl.where(inside, x, float("inf")), 0)
    high = tl.max(x, 0)
    at_low = count
    go = low < high
    while go:
        middle = low * 0.5 + high * 0.5
        at_middle = tl.sum((x >= middle).to(tl.int32), 0)
        adjacent = (middle <= low) | (middle >= high)
        rise = (at_middle >= K) & (adjacent == 0)
        high = tl.where(rise | adjacent, high, middle)
        low = tl.where(rise, middle, low)
        at_low = tl.where(rise, at_middle, at_low)
        go = (at_low != K) & (adjacent == 0)
    threshold = tl.where(tl.sum((x >= high).to(tl.int32), 0) >= K, high, low)
    above = (x > threshold).to(tl.int32)
    equal = ((x == threshold) & inside).to(tl.int32)
    needed = K - tl.sum(above, 0)
    # both counts in one scan: at most 2,048 above, at most 16,384 equal
    scan = tl.cumsum(above * 65536 + equal, 0)
    equal_so_far = scan & 65535
    position = (scan >> 16) + tl.minimum(equal_so_far, needed) - 1
    chosen = (above > 0) | ((equal > 0) & (equal_so_far <= needed))
    tl.store(IDS + position, column + start, mask=chosen & (position < K))
    if EMIT:
        tl.store(CHOSEN + position, score, mask=chosen & (position < K))


@triton.jit
def register_kernel(
    SCORES,
    IDS,
    CHOSEN,
    ENTRY_START,
    VISIBLE,
    first_row,
    columns,
    more_than,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    SHORT: tl.constexpr,
    EMIT: tl.constexpr,
):
    """Rows of a chunk that see more than `more_than` and at most SPAN entries; with SHORT also those that see at most K."""
    line = tl.program_id(0)
    row = first_row + line
    count = tl.load(VISIBLE + row)
    start = tl.load(ENTRY_START + row)
    ids = IDS + row.to(tl.int64) * K
    chosen = CHOSEN + row.to(tl.int64) * K
    scores = SCORES + line.to(tl.int64) * columns
    if count <= K:
        if SHORT:
            slot = tl.arange(0, BLOCK_K)
            tl.store(ids + slot, tl.where(slot < count, slot + start, -1), mask=slot < K)
            if EMIT:
                tl.store(chosen + slot, tl.load(scores + slot, mask=slot < count, other=float("-inf")), mask=slot < K)
    elif (count > more_than) & (count <= SPAN):
        if count <= SPAN // 2:
            take_top(scores, ids, chosen, count, start, K, SPAN // 2, EMIT)
        else:
            take_top(scores, ids, chosen, count, start, K, SPAN, EMIT)


@triton.jit
def ordered_key(x):
    """int32 that sorts as the float does; both zeros become one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def long_row_kernel(
    SCORES, IDS, CHOSEN, ENTRY_START, VISIBLE, first_row, columns, more_than, K: tl.constexpr, BLOCK: tl.constexpr, EMIT: tl.constexpr
):
    """Rows of a chunk that see more than `more_than` entries, read in blocks."""
    line = tl.program_id(0)
    row = first_row + line
    count = tl.load(VISIBLE + row)
    if count > more_than:
        start = tl.load(ENTRY_START + row)
        scores = SCORES + line.to(tl.int64) * columns
        bucket = tl.arange(0, 256)
        lane = tl.arange(0, BLOCK)
        needed = K + tl.zeros([], tl.int32)
        prefix = tl.zeros([], tl.int32)
        for digit in tl.static_range(4):
            histogram = tl.zeros([256], tl.int32)
            for first in range(0, count, BLOCK):
                inside = first + lane < count
                # flipping the sign bit makes the order that of unsigned numbers
                key = ordered_key(tl.load(scores + first + lane, mask=inside, other=0.0)) ^ -2147483648
                if digit > 0:
                    # in two steps: a shift by 32 would be undefined
                    inside = inside & (((key >> (24 - 8 * digit)) >> 8) & ((1 << (8 * digit)) - 1) == prefix)
                histogram += tl.histogram((key >> (24 - 8 * digit)) & 255, 256, mask=inside)
            at_or_above = tl.cumsum(histogram, 0, reverse=True)
            chosen = tl.sum((at_or_above >= needed).to(tl.int32), 0) - 1
            needed -= tl.sum(tl.where(bucket > chosen, histogram, 0), 0)
            prefix = prefix * 256 + chosen
        threshold = prefix ^ -2147483648
        equal_before = tl.zeros([], tl.int32)
        taken = tl.zeros([], tl.int32)
        ids = IDS + row.to(tl.int64) * K
        for first in range(0, count, BLOCK):
            inside = first + lane < count
            score = tl.load(scores + first + lane, mask=inside, other=0.0)
            key = ordered_key(score)
            equal = (inside & (key == threshold)).to(tl.int32)
            rank = equal_before + tl.cumsum(equal, 0)
            take = (inside & (key > threshold)) | ((equal > 0) & (rank <= needed))
            position = taken + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(ids + position, first + lane + start, mask=take & (position < K))
            if EMIT:
                tl.store(CHOSEN + row.to(tl.int64) * K + position, score, mask=take & (position < K))
            equal_before += tl.sum(equal, 0)
            taken += tl.sum(take.to(tl.int32), 0)


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

    for number, (span, warps) in enumerate(PART_SPANS if IN_PARTS else REGISTER_SPANS):
        if number == 0:
            span = max(32, min(span, power_of_two(max(1, most))))
        if number == 0 or (most > lower and span > topk):
            # the rows before see no more than the previous launches took
            begin = first if number == 0 else _first_to_see(lower + 1, first, ratio, first_token)
            if IN_PARTS:
                warps = max(warps, block_k // 1024)
                part = min(span, 1024 * warps)
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
                    BLOCK=min(part, PASS_WIDTH * warps),
                    SHORT=number == 0,
                    EMIT=emit,
                    num_warps=warps,
                )
            else:
                register_kernel[(stop - begin,)](
                    *tensors(begin), begin, columns, lower, K=topk, BLOCK_K=block_k, SPAN=span, SHORT=number == 0, EMIT=emit, num_warps=warps
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
