# SPDX-License-Identifier: Apache-2.0
"""Selected ids as bits, for the form of the attention that walks over all visible entries of a short row and masks the ones not chosen.

    bits[r, j // 32] has bit j % 32 set where row r selects entry j; below[r, w] counts the bits of the words before w, so that a set bit has a rank.

Legend: R query rows, K slots, C entries, word: 32 entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rows import RowPlan


@dataclass(frozen=True)
class EntryBits:
    """bits, below: int32 [R, ceil(C / 32) rounded up to whole tiles of 64 entries]."""

    bits: Tensor
    below: Tensor


@triton.jit
def count_bits(x):
    """Set bits of an int32, pairwise sums of ever wider fields."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def set_bits_kernel(SELECTED, BOUNDS, BITS, K, words, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(BOUNDS + row * 4 + 1)
    end = tl.load(BOUNDS + row * 4 + 2)
    slot = tl.arange(0, BLOCK_K)
    entry = tl.load(SELECTED + row * K + slot, mask=slot < K, other=-1)
    one = tl.full([BLOCK_K], 1, tl.int32)
    tl.atomic_or(BITS + row * words + entry // 32, one << (entry & 31), mask=(entry >= first) & (entry < end), sem="relaxed")


@triton.jit
def count_below_kernel(BITS, BELOW, words, BLOCK_W: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK_W)
    count = count_bits(tl.load(BITS + row * words + word, mask=word < words, other=0))
    tl.store(BELOW + row * words + word, tl.cumsum(count, 0) - count, mask=word < words)


@triton.jit
def to_slots_kernel(RANKED, SELECTED, BOUNDS, BITS, BELOW, TEACHER, K, words, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(BOUNDS + row * 4 + 1)
    end = tl.load(BOUNDS + row * 4 + 2)
    slot = tl.arange(0, BLOCK_K)
    entry = tl.load(SELECTED + row * K + slot, mask=slot < K, other=-1)
    valid = (entry >= first) & (entry < end)
    at = row * words + entry // 32
    one = tl.full([BLOCK_K], 1, tl.int32)
    lower = tl.load(BITS + at, mask=valid, other=0) & ((one << (entry & 31)) - 1)
    rank = tl.load(BELOW + at, mask=valid, other=0) + count_bits(lower)
    tl.store(TEACHER + row * K + slot, tl.load(RANKED + row * K + rank, mask=valid, other=0.0), mask=slot < K)


def entry_bits(selected: Tensor, plan: RowPlan, entries: int, with_ranks: bool) -> EntryBits:
    """Bits of int32 [R, K] ids in any order, invalid ones left out; `below` is filled only `with_ranks`."""
    rows, slots = selected.shape
    words = 2 * triton.cdiv(entries, 64)
    bits = torch.zeros(rows, words, dtype=torch.int32, device=selected.device)
    below = torch.empty_like(bits) if with_ranks else bits
    if rows:
        set_bits_kernel[(rows,)](selected, plan.bounds, bits, slots, words, BLOCK_K=triton.next_power_of_2(slots), num_warps=1)
        if with_ranks:
            count_below_kernel[(rows,)](bits, below, words, BLOCK_W=triton.next_power_of_2(words), num_warps=1)
    return EntryBits(bits, below)


def ranks_to_slots(ranked: Tensor, selected: Tensor, plan: RowPlan, bits: EntryBits) -> Tensor:
    """fp32 [R, K] by rank of the entry among the selected ones -> by slot; 0 where a slot holds no valid id."""
    rows, slots = selected.shape
    teacher = torch.empty_like(ranked)
    if rows:
        block = triton.next_power_of_2(slots)
        to_slots_kernel[(rows,)](ranked, selected, plan.bounds, bits.bits, bits.below, teacher, slots, bits.bits.shape[1], BLOCK_K=block, num_warps=1)
    return teacher
