# SPDX-License-Identifier: Apache-2.0
"""An independent oracle: one CSA layer in float64 with dense memory, one row and one key at a time for everything discrete.

It shares no code with the backends. Everything is differentiable through plain autograd except the choice of ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import ALL_VISIBLE


@dataclass
class OracleResult:
    out: Tensor  # [T, H, D]
    lse: Tensor  # [T, H], natural log, without the sink, -inf for an empty row
    scores: Tensor  # [T, C] index scores, -inf where invisible
    teacher: Tensor  # [T, C], 0 outside the support
    kl: Tensor  # [T]
    rows: int  # real rows with at least one visible entry
    support: Tensor  # bool [T, C]


def masks(lengths: Sequence[int], num_tokens: int, num_entries: int, ratio: int, window: int) -> tuple[Tensor, Tensor]:
    """bool [T, T] of the window and bool [T, C] of the visible entries, from the words of the specification."""
    win = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    vis = torch.zeros(num_tokens, num_entries, dtype=torch.bool)
    first_token = first_entry = 0
    for length in lengths:
        for position in range(length):
            for back in range(window):
                if position - back >= 0:
                    win[first_token + position, first_token + position - back] = True
            for entry in range(length // ratio):
                last_token_of_entry = (entry + 1) * ratio - 1
                if last_token_of_entry <= position:
                    vis[first_token + position, first_entry + entry] = True
        first_token += length
        first_entry += length // ratio
    return win, vis


def support_mask(selected: Any, visible: Tensor) -> Tensor:
    """bool [T, C]: what ids, ALL_VISIBLE or None mean."""
    if selected is ALL_VISIBLE:
        return visible
    chosen = torch.zeros_like(visible)
    if selected is not None:
        for row, ids in enumerate(selected.tolist()):
            for j in ids:
                if 0 <= j < visible.shape[1] and visible[row, j]:
                    chosen[row, j] = True
    return chosen


def oracle_select(scores: Tensor, topk: int) -> Tensor:
    """int32 [T, K]: per row a sort by (score descending, id ascending), the first K visible ones, ascending, then -1."""
    rows = []
    for line in scores.tolist():
        order = sorted((j for j, s in enumerate(line) if s != -math.inf), key=lambda j: (-line[j], j))
        ids = sorted(order[:topk])
        rows.append(ids + [-1] * (topk - len(ids)))
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), topk)


def oracle_scores(index_q: Tensor, index_k: Tensor, index_w: Tensor, visible: Tensor) -> Tensor:
    """[T, C] index scores in float64, -inf where invisible."""
    scores = torch.zeros(visible.shape, dtype=torch.float64)
    for head in range(index_q.shape[1]):
        dots = index_q[:, head].double() @ index_k.double().T
        scores = scores + index_w[:, head, None].double() * torch.clamp(dots, min=0)
    return torch.where(visible, scores, -math.inf)


def oracle_layer(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Any,
    sink: Tensor,
    lengths: Sequence[int],
    ratio: int,
    window: int,
    scale: float,
    index: tuple[Tensor, Tensor, Tensor] | None = None,
    teacher: str = "full_csa",
) -> OracleResult:
    """Everything of one layer, float64. `index` = (index_q, index_k, index_w); without it scores and kl are 0."""
    tokens, heads, dim = q.shape
    keys = torch.zeros(0, dim, dtype=torch.float64) if compressed_kv is None else compressed_kv.double()
    win, vis = masks(lengths, tokens, keys.shape[0], ratio, window)
    support = support_mask(selected, vis)
    q, window_kv, sink = q.double(), window_kv.double(), sink.double()
    all_keys = torch.cat([window_kv, keys])
    mask = torch.cat([win, support], 1)
    logits = torch.where(mask[:, None], torch.einsum("thd,jd->thj", q, all_keys) * scale, -math.inf)
    out_rows, lse_rows, teacher_rows = [], [], []
    for t in range(tokens):
        lse_rows.append(torch.logsumexp(logits[t], -1).detach())
        if not mask[t].any():
            out_rows.append(torch.zeros(heads, dim, dtype=torch.float64) * 0)
            teacher_rows.append(torch.zeros(keys.shape[0], dtype=torch.float64))
            continue
        keep = mask[t]
        silent = torch.isposinf(sink)  # such a head gives 0; inf - inf inside softmax would give NaN
        joint = torch.cat([logits[t][:, keep], sink[:, None]], 1)
        p = torch.softmax(torch.where(silent[:, None], 0, joint), -1)[:, :-1]
        out_rows.append(torch.where(silent[:, None], 0, p) @ all_keys[keep])
        teacher_rows.append(_teacher_row(logits[t, :, tokens:].detach(), joint.detach(), teacher))
    result_teacher = torch.stack(teacher_rows) if tokens else torch.zeros(0, keys.shape[0], dtype=torch.float64)
    scores, kl = torch.full(vis.shape, -math.inf, dtype=torch.float64), torch.zeros(tokens, dtype=torch.float64)
    if index is not None:
        scores = oracle_scores(*index, vis)
        kl_rows = []
        for t in range(tokens):
            keep = support[t]
            if not keep.any():
                kl_rows.append(torch.zeros((), dtype=torch.float64))
                continue
            target, student = result_teacher[t, keep], torch.log_softmax(scores[t, keep], -1)
            kl_rows.append(sum((p * (p.log() - s) for p, s in zip(target, student, strict=True) if p > 0), torch.zeros((), dtype=torch.float64)))
        kl = torch.stack(kl_rows)
    return OracleResult(torch.stack(out_rows), torch.stack(lse_rows), scores, result_teacher, kl, int(vis.any(1).sum()), support)


def _teacher_row(entry_logits: Tensor, joint: Tensor, teacher: str) -> Tensor:
    """[C] from the logits [H, C] (-inf outside the support) and all logits of the row with the sink last [H, keys + 1]."""
    if not torch.isfinite(entry_logits).any():
        return torch.zeros(entry_logits.shape[1], dtype=torch.float64)
    total = torch.logsumexp(joint if teacher == "full_csa" else entry_logits, -1)
    log_p = torch.logsumexp(entry_logits - total[:, None], 0)
    return torch.softmax(log_p, -1)
