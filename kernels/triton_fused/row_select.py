# SPDX-License-Identifier: Apache-2.0
"""Exact top-k of one row per program: ids ascending, ties to the lower id.

A row of up to 16,384 entries lies in the registers of one to eight warps, in one or two parts of 1,024 entries a warp. The k-th value is found by
bisection between a bound that at least k scores reach and the largest score. Counting is one comparison and one addition of floats per score: counts
are exact in fp32, and integers would take three instructions. Nothing is exchanged through shared memory but sums. A longer row is read five times, 8
bits of the k-th value at a time.

Legend: K top-k, P entries of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_fused.tuples import appended

LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32


@triton.jit
def finite(score):
    """Nothing lies in the middle of infinities: they count as the largest magnitude, NaN as the largest score, so that every row gives K ids."""
    return tl.where(score < LARGEST, tl.maximum(score, -LARGEST), LARGEST)


@triton.jit
def reached_by(parts, bound, PARTS: tl.constexpr):
    """How many scores of a row are at least `bound`."""
    total = tl.where(parts[0] >= bound, 1.0, 0.0)
    for i in tl.static_range(1, PARTS):
        total += tl.where(parts[i] >= bound, 1.0, 0.0)
    return tl.sum(total, 0)


@triton.jit
def find_threshold(SCORES, count, K: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """The K-th largest of `count` > K scores or a value between it and the next one, and whether exactly K scores reach it."""
    column = tl.arange(0, PART)
    pitch = (count + 15) // 16 * 16  # a bound that is a multiple of 16 lets 16 bytes be loaded at once
    parts = ()
    best = tl.full([BLOCK_K], float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        place = i * PART + column
        x = finite(tl.load(SCORES + place, mask=place < pitch, other=0.0))
        x = tl.where(place < count, x, float("-inf"))
        best = tl.maximum(best, tl.max(tl.reshape(x, (PART // BLOCK_K, BLOCK_K)), 0))
        parts = appended(parts, x)
    # the entries fall into at least K groups, and the largest of each reaches the smallest of these largest
    low = tl.min(tl.where(best == float("-inf"), float("inf"), best), 0)
    high = tl.max(best, 0)
    at_low = reached_by(parts, low, PARTS)
    go = (low < high) & (at_low != K)
    while go:
        middle = low * 0.5 + high * 0.5
        at_middle = reached_by(parts, middle, PARTS)
        adjacent = (middle <= low) | (middle >= high)
        rise = (at_middle >= K) & (adjacent == 0)
        high = tl.where(rise | adjacent, high, middle)
        low = tl.where(rise, middle, low)
        at_low = tl.where(rise, at_middle, at_low)
        go = (at_low != K) & (adjacent == 0)
    exact = at_low == K
    if not exact:
        at_high = reached_by(parts, high, PARTS)
        low = tl.where(at_high >= K, high, low)
    return low, exact


@triton.jit
def last_of_equals(SCORES, count, threshold, K: tl.constexpr, BLOCK: tl.constexpr):
    """The column of the last score equal to `threshold` that still belongs to the K best."""
    column = tl.arange(0, BLOCK)
    seen = 0
    for n in range(0, count, BLOCK):
        x = finite(tl.load(SCORES + n + column, mask=n + column < count, other=float("-inf")))
        seen += tl.sum(((x > threshold) & (n + column < count)).to(tl.int32), 0)
    last = 0
    for n in range(0, count, BLOCK):
        x = finite(tl.load(SCORES + n + column, mask=n + column < count, other=0.0))
        equal = ((x == threshold) & (n + column < count)).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        last += tl.sum(tl.where((equal > 0) & (rank == K), n + column, 0), 0)
        seen += tl.sum(equal, 0)
    return last


@triton.jit
def write_chosen(SCORES, IDS, count, start, threshold, last, BLOCK: tl.constexpr):
    """Ids of the scores above the threshold, and of those equal to it up to column `last`. A thread has four neighbours: only a scan is exchanged."""
    column = tl.arange(0, BLOCK)
    four = 4 * tl.arange(0, BLOCK // 4)
    pitch = (count + 15) // 16 * 16
    taken = 0
    for n in range(0, count, BLOCK):
        place = n + column
        x = finite(tl.load(SCORES + place, mask=place < pitch, other=0.0))
        take = (((x > threshold) & (place < count)) | ((x == threshold) & (place <= last))).to(tl.int32)
        even, odd = tl.split(tl.reshape(take, (BLOCK // 2, 2)))
        a, c = tl.split(tl.reshape(even, (BLOCK // 4, 2)))
        b, d = tl.split(tl.reshape(odd, (BLOCK // 4, 2)))
        two = a + b
        total = two + c + d
        slot = IDS + (taken + tl.cumsum(total, 0) - total)
        taken += tl.sum(total, 0)
        id = start + n + four
        tl.store(slot, id, mask=a > 0)
        tl.store(slot + a, id + 1, mask=b > 0)
        tl.store(slot + two, id + 2, mask=c > 0)
        tl.store(slot + (two + c), id + 3, mask=d > 0)


@triton.jit
def choose_row(
    SCORES,
    IDS,
    CHOSEN,
    count,
    start,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EMIT: tl.constexpr,
):
    """Ids, and with EMIT the scores, of the K best of K < `count` <= PART * PARTS."""
    threshold, exact = find_threshold(SCORES, count, K, BLOCK_K, PART, PARTS)
    last = count - 1
    if not exact:
        last = last_of_equals(SCORES, count, threshold, K, BLOCK)
    write_chosen(SCORES, IDS, count, start, threshold, last, BLOCK)
    if EMIT:
        tl.debug_barrier()  # the ids were written by other threads of this program
        slot = tl.arange(0, BLOCK_K)
        column = tl.load(IDS + slot, mask=slot < K, other=0) - start
        tl.store(CHOSEN + slot, tl.load(SCORES + column, mask=slot < K, other=0.0), mask=slot < K)


@triton.jit
def parts_kernel(
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
    PART: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
    EMIT: tl.constexpr,
):
    """Rows of a chunk that see more than `more_than` entries, in FEWEST to MOST parts; with SHORT also those that see at most K."""
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
    elif count > more_than:
        for parts in tl.static_range(FEWEST, MOST + 1):
            if PART * parts > K:
                more = PART * (parts - 1) if parts > FEWEST else 0
                if (count > more) & (count <= PART * parts):
                    choose_row(scores, ids, chosen, count, start, K, BLOCK_K, PART, parts, BLOCK, EMIT)


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
