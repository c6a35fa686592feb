# SPDX-License-Identifier: Apache-2.0
"""From the packed row to what FlashMLA takes: one list of keys, global ids, padded heads and columns.

Keys are the tokens of the row, then its compressed entries. Padding never changes a result: a padded column is 0 in queries and keys, a padded head
is dropped afterwards, a padded id is -1. An offset is never added to an invalid id.

Legend: R query rows, T tokens, C compressed entries, H heads, D head dim, K slots of the selection, W window, S ids per query.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.backend import ALL_VISIBLE, Selection
from kernels.flashmla.rules import ArchitectureRules
from kernels.layout import PackedLayout

MOST_IDS = 2**26  # int32 ids alive at once: 256 MiB


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def key_table(window_kv: Tensor, compressed_kv: Tensor | None, columns: int) -> Tensor:
    """[T + C, columns]: tokens, then entries, 0 in the columns beyond the head dim."""
    parts = [window_kv] if compressed_kv is None else [window_kv, compressed_kv]
    return pad(torch.cat(parts), (0, columns - window_kv.shape[1])).contiguous()


def padded_queries(q: Tensor, heads: int, columns: int) -> Tensor:
    """[R, heads, columns]."""
    return pad(q, (0, columns - q.shape[2], 0, heads - q.shape[1])).contiguous()


def padded_sink(sink: Tensor, heads: int) -> Tensor:
    """fp32 [heads], whatever autocast surrounds the call; a padded head has no sink."""
    return pad(sink.detach().float(), (0, heads - sink.shape[0]), value=-torch.inf).contiguous()


def reads_entries(compressed_kv: Tensor | None, selected: Selection | None) -> bool:
    """Whether any entry can be read at all."""
    if compressed_kv is None or selected is None or compressed_kv.shape[0] == 0:
        return False
    return selected is ALL_VISIBLE or (isinstance(selected, Tensor) and selected.shape[1] > 0)


def slots_of_rows(first: int, last: int, entries: int, selected: Selection | None, layout: PackedLayout, ratio: int, window: int) -> int:
    """Ids that a row of [first, last) can have at most, before padding; known on the host. `entries` C, 0 where none is read."""
    if entries == 0:
        return window
    if isinstance(selected, Tensor):
        return selected.shape[1] + window
    low, high = layout.entry_range(first, last, ratio)
    return min(high - low, layout.longest_document() // ratio, entries) + window


def row_chunks(
    entries: int, selected: Selection | None, layout: PackedLayout, ratio: int, window: int, rules: ArchitectureRules, heads: int
) -> Iterator[tuple[int, int, int]]:
    """(first, last, S) of each launch: bounded by the rules and by the memory of the ids. A row's result does not depend on its chunk."""
    widest = slots_of_rows(0, layout.num_rows, entries, selected, layout, ratio, window) if layout.num_rows else 0
    size = max(1, min(rules.rows_per_call(heads), MOST_IDS // max(1, widest)))
    for first in range(0, layout.num_rows, size):
        last = min(layout.num_rows, first + size)
        slots = slots_of_rows(first, last, entries, selected, layout, ratio, window)
        yield first, last, rules.padded_slots(slots, heads)


def global_ids(first: int, last: int, width: int, entries: int, selected: Selection | None, layout: PackedLayout, ratio: int, window: int) -> Tensor:
    """int32 [last - first, width]: entries, then window, then -1; invalid ids are -1 wherever they stand.

    Selected ids keep their slots and the window follows in the K-th; all visible entries are followed by the window at once, so that a row's list
    does not depend on the rest of the batch.
    """
    rows = slice(first, last)
    tokens = layout.num_tokens
    if entries > 0 and isinstance(selected, Tensor):
        start, visible = layout.entry_start(ratio)[rows, None], layout.visible_compressed(ratio)[rows, None]
        chosen = selected[rows]
        valid = (chosen >= start) & (chosen < (start + visible).clamp(max=entries))
        chosen = torch.where(valid, chosen, -1 - tokens).to(torch.int32) + tokens
        return pad(torch.cat([chosen, layout.window_ids(window)[rows]], 1), (0, width - chosen.shape[1] - window), value=-1).contiguous()
    if entries == 0:
        return pad(layout.window_ids(window)[rows], (0, width - window), value=-1).contiguous()
    start, visible = layout.entry_start(ratio)[rows, None], layout.visible_compressed(ratio)[rows, None]
    window_start, own = layout.window_start(window)[rows, None], layout.token_ids[rows, None]
    slot = torch.arange(width, dtype=torch.int32, device=start.device)[None]
    token = window_start + slot - visible
    return torch.where(slot < visible, start + tokens + slot, torch.where(token <= own, token, -1)).contiguous()
