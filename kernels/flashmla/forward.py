# SPDX-License-Identifier: Apache-2.0
"""The attention forward on FlashMLA's op, with the conventions that the probe has found turned into ours.

Legend: R query rows, T tokens, C compressed entries, H heads, D head dim, K slots of the selection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Selection
from kernels.flashmla import adapt
from kernels.flashmla.probe import Convention
from kernels.flashmla.providers import Provider
from kernels.flashmla.rules import ArchitectureRules
from kernels.layout import PackedLayout
from kernels.unfused.checks import compute_dtype


def flashmla_forward(
    provider: Provider,
    convention: Convention,
    rules: ArchitectureRules,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Selection | None,
    sink: Tensor,
    layout: PackedLayout,
    ratio: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [R, H, D] in the dtype of q; lse [R, H] in natural log, without the sink, -inf for an empty row. See `Backend.attend`."""
    heads, dim = q.shape[1:]
    padded = rules.padded_heads(heads)
    entries = compressed_kv if adapt.reads_entries(compressed_kv, selected) else None
    count = 0 if entries is None else entries.shape[0]
    keys = adapt.key_table(window_kv, entries, rules.head_dim)
    sinks = adapt.padded_sink(sink, padded)
    parts = []
    for first, last, slots in adapt.row_chunks(count, selected, layout, ratio, window, rules, padded):
        rows = q[first:last]
        if slots == 0:
            parts.append((torch.zeros_like(rows), torch.full(rows.shape[:2], -torch.inf, dtype=compute_dtype(q), device=q.device)))
            continue
        ids = adapt.global_ids(first, last, slots, count, selected, layout, ratio, window)
        with adapt.on_device(q.device):
            out, lse = _one_call(provider, convention, adapt.padded_queries(rows, padded, rules.head_dim), keys, ids, scale, sinks)
        parts.append((out[:, :heads, :dim], lse[:, :heads]))
    if not parts:
        return torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=compute_dtype(q))
    if len(parts) == 1:
        return parts[0][0].contiguous(), parts[0][1].contiguous()
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _one_call(provider: Provider, convention: Convention, q: Tensor, keys: Tensor, ids: Tensor, scale: float, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out and our lse of one launch with legal shapes."""
    out, raw = provider(q, keys, ids, scale, sink if convention.applies_sink else None)
    lse = torch.where(raw == convention.empty_lse, -torch.inf, raw * convention.to_natural)
    if not convention.applies_sink:
        # the share of the softmax that the sink leaves to the keys; of no key at all it is 0
        share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
        out = (out * share[..., None]).to(out.dtype)
    return out, lse
