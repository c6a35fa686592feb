# SPDX-License-Identifier: Apache-2.0
"""Index scores and the exact top-k over them: ties to the lower id, ids ascending, -1 behind the last valid one.

Legend: R rows of a chunk, HI index heads, DI index dim, C entries that the chunk can see, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.layout import PackedLayout
from kernels.unfused.checks import check_entries, check_tensor, compute_dtype, full_precision
from kernels.unfused.keys import KeyChunk, VisibleKeys, row_chunks

_NO_ENTRY = 2**31 - 1  # larger than any id
_KEY_COPIES = 4  # [R, C] temporaries of the top-k, in units of one index head
_INVISIBLE = torch.iinfo(torch.int64).min


def index_scores(keys: KeyChunk, index_q: Tensor, index_w: Tensor) -> Tensor:
    """[R, C]: sum over index heads of index_w [R, HI] * relu(index_q [R, HI, DI] . key). The ReLU acts per head, before the sum."""
    return torch.bmm(index_w[:, None, :], keys.dot(index_q).relu_())[:, 0]


@torch.no_grad()
def select(index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: PackedLayout, ratio: int, topk: int) -> Tensor:
    """See `Backend.select`. Raises ValueError for topk < 0 and for shapes that do not fit the layout."""
    check_indexer_inputs(index_q, index_k, index_w, layout, ratio)
    if topk < 0:
        raise ValueError(f"topk must be >= 0, got {topk}")
    dtype = compute_dtype(index_q, index_k, index_w)
    selected = torch.full((layout.num_rows, topk), -1, dtype=torch.int32, device=layout.device)
    if topk == 0 or index_k.shape[0] == 0:
        return selected
    with full_precision(layout.device):
        entries = VisibleKeys(index_k.to(dtype), layout, ratio)
        start_of_row, visible = layout.entry_start(ratio), layout.visible_compressed(ratio)
        take_all = layout.longest_document() // ratio <= topk
        for start, stop in row_chunks(layout, [(entries, index_q.shape[1] + _KEY_COPIES)]):
            first, last = layout.entry_range(start, stop, ratio)
            if first == last:
                continue
            if take_all:  # no row sees more than K entries: no score can change the outcome
                slot = torch.arange(topk, dtype=torch.int32, device=layout.device)
                selected[start:stop] = torch.where(slot < visible[start:stop, None], start_of_row[start:stop, None] + slot, -1)
                continue
            keys = entries.chunk(start, stop)
            scores = index_scores(keys, index_q[start:stop].to(dtype), index_w[start:stop].to(dtype))
            ids = top_ids(scores, keys.bias != -torch.inf, topk)
            selected[start:stop, : ids.shape[1]] = torch.where(ids == _NO_ENTRY, -1, ids + first)
    return selected


def top_ids(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """int32 [R, min(K, C)]: columns of the highest visible scores, ascending; 2**31 - 1 in the slots that stay empty.

    Exact under ties, which ReLU makes common (all heads off: score 0): score and column become one integer key without equals.
    """
    count = min(topk, scores.shape[1])
    column = torch.arange(scores.shape[1], dtype=torch.int64, device=scores.device)
    if scores.dtype == torch.float32:
        bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 a tie with 0.0
        ordered = bits ^ ((bits >> 31) & _NO_ENTRY)  # integer order = float order
        key = (ordered.long() << 32) | (_NO_ENTRY - column)
        best = key.masked_fill_(~visible, _INVISIBLE).topk(count, sorted=False).values
        ids = torch.where(best == _INVISIBLE, _NO_ENTRY, _NO_ENTRY - (best & _NO_ENTRY))
    else:  # no integer holds a float64 and a column: two stable sorts
        by_score = scores.sort(dim=-1, descending=True, stable=True).indices
        hidden = ~visible.gather(1, by_score)
        order = by_score.gather(1, hidden.to(torch.int8).sort(dim=-1, stable=True).indices)[:, :count]
        ids = torch.where(visible.gather(1, order), order, _NO_ENTRY)
    return ids.to(torch.int32).sort(dim=-1).values


def check_indexer_inputs(index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: PackedLayout, ratio: int) -> None:
    """ValueError unless the indexer's tensors fit each other and the layout."""
    check_tensor("index_q", index_q, (layout.num_rows, None, None), layout.device)
    check_tensor("index_k", index_k, (None, index_q.shape[2]), layout.device)
    check_tensor("index_w", index_w, (layout.num_rows, index_q.shape[1]), layout.device)
    check_entries("index_k", index_k, layout, ratio)
