# SPDX-License-Identifier: Apache-2.0
"""Which keys each query row reads: its window, its range of visible entries, and how far its list of selected ids reaches.

Legend: R query rows, K slots of a row's selection, C compressed entries of the whole row, W window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layout import PackedLayout

SLOTS_PER_WORD = 64


@dataclass(frozen=True)
class RowBounds:
    """Per-row int32 [R]: a row with token id t reads the tokens [window_start, t] and may read the entries [entry_start, entry_start + visible)."""

    window_start: Tensor
    entry_start: Tensor
    visible: Tensor
    first_row: int
    window: int

    @classmethod
    def of(cls, layout: PackedLayout, ratio: int, window: int, with_entries: bool) -> RowBounds:
        """Bounds of every row of `layout`; `with_entries` False makes no entry visible (`ratio` is then ignored)."""
        starts = layout.window_start(window)
        if not with_entries:
            nothing = torch.zeros_like(starts)
            return cls(starts, nothing, nothing, layout.first_row, window)
        return cls(starts, layout.entry_start(ratio), layout.visible_compressed(ratio), layout.first_row, window)


@dataclass(frozen=True)
class RowPlan:
    """bounds int32 [R, 4]: window start, first entry, end of the entries, extent (slots up to and including the last valid one).

    words int64 [R, ceil(K / 64)]: one bit per slot, set where its id is valid; empty where there are no ids.
    """

    bounds: Tensor
    words: Tensor


@triton.jit
def plan_kernel(SELECTED, WINDOW_START, ENTRY_START, VISIBLE, BOUNDS, WORDS, C, K, HAS_IDS: tl.constexpr, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(ENTRY_START + row)
    end = tl.maximum(tl.minimum(first + tl.load(VISIBLE + row), C), first)
    extent = end - first
    if HAS_IDS:
        word_count = (K + 63) // 64
        word = tl.arange(0, BLOCK_K // 64)
        slot = word[:, None] * 64 + tl.arange(0, 64)[None, :]
        ids = tl.load(SELECTED + row * K + slot, mask=slot < K, other=-1)
        valid = (ids >= first) & (ids < end)
        extent = tl.max(tl.max(tl.where(valid, slot + 1, 0), 1), 0)
        # the 64 bits of a word are distinct, so that their sum is their union
        bits = tl.sum(valid.to(tl.int64) << tl.arange(0, 64).to(tl.int64)[None, :], 1)
        tl.store(WORDS + row * word_count + word, bits, mask=word < word_count)
    tl.store(BOUNDS + row * 4, tl.load(WINDOW_START + row))
    tl.store(BOUNDS + row * 4 + 1, first)
    tl.store(BOUNDS + row * 4 + 2, end)
    tl.store(BOUNDS + row * 4 + 3, extent)


def plan_rows(selected: Tensor | None, bounds: RowBounds, entries: int) -> RowPlan:
    """Bounds, extent and validity of each row's list of keys.

    Args:
        selected: int32 [R, K], or None for the whole visible range, whose extent is all of it.
        entries: C; ids at or beyond it are invalid whatever the layout says.
    """
    rows = bounds.visible.shape[0]
    slots = 0 if selected is None else selected.shape[1]
    device = bounds.visible.device
    table = torch.empty(rows, 4, dtype=torch.int32, device=device)
    words = torch.empty(rows, triton.cdiv(slots, SLOTS_PER_WORD), dtype=torch.int64, device=device)
    if rows:
        block = max(64, triton.next_power_of_2(slots))
        plan_kernel[(rows,)](
            bounds.visible if selected is None else selected,
            bounds.window_start,
            bounds.entry_start,
            bounds.visible,
            table,
            words,
            entries,
            slots,
            HAS_IDS=slots > 0,
            BLOCK_K=block,
            num_warps=1 if block <= 1024 else 4,
        )
    return RowPlan(table, words)
