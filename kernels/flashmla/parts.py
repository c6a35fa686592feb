# SPDX-License-Identifier: Apache-2.0
"""What the flashmla backend is put together from besides the forward: selection, indexer loss and attention backward, each to be replaced alone.

Legend: R query rows, T tokens, C compressed entries, H heads, D head dim, K slots of the selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.backend import Backend, Selection
from kernels.layout import PackedLayout

AttentionGradients = tuple[Tensor, Tensor, Tensor | None, Tensor]
TeachingGradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class AttentionBackward(Protocol):
    """dq [R, H, D], d_window_kv [T, D], d_compressed_kv [C, D] or None, d_sink [H] of `Backend.attend`."""

    def __call__(
        self,
        grad_out: Tensor,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor | None,
        selected: Selection | None,
        sink: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
    ) -> AttentionGradients: ...


class TeachingBackward(Protocol):
    """As AttentionBackward for ids, and the indexer loss over the teacher that it emits; writes the KL sum into `kl_value` [].

    Returns d index_q, d index_k, d index_w, dq, d_window_kv, d_compressed_kv, d_sink.
    """

    def __call__(
        self,
        grad_out: Tensor,
        grad_kl: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        scores: Tensor | None,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        selected: Tensor,
        sink: Tensor,
        out: Tensor,
        lse: Tensor,
        kl_value: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
    ) -> TeachingGradients: ...


@dataclass(frozen=True)
class Parts:
    """selection and indexer loss: those of `base`; `teaching_backward` None: the teacher is a pass of its own."""

    base: Backend
    attention_backward: AttentionBackward
    backward_name: str
    teaching_backward: TeachingBackward | None = None
    known_scores: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None] | None = None  # scores that `base.select` kept for ids


def triton_parts() -> Parts:
    """All from the Triton kernels."""
    import triton

    from kernels.triton_fused import TritonBackend
    from kernels.triton_fused.attend_backward import attend_backward
    from kernels.triton_fused.ops import on_device_of
    from kernels.triton_fused.rows import RowBounds
    from kernels.triton_fused.training_op import attend_and_teach_backward

    def attention(
        grad_out: Tensor,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor | None,
        selected: Selection | None,
        sink: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
    ) -> AttentionGradients:
        deterministic = torch.are_deterministic_algorithms_enabled()
        operands = (grad_out, q, window_kv, compressed_kv, selected, sink, out, lse, layout, ratio, window, scale)
        with on_device_of(q):
            dq, d_window, d_entries, d_sink, _ = attend_backward(*operands, deterministic=deterministic)
        return dq, d_window, d_entries, d_sink

    def teaching(
        grad_out: Tensor,
        grad_kl: Tensor,
        index: tuple[Tensor, Tensor, Tensor],
        scores: Tensor | None,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        selected: Tensor,
        sink: Tensor,
        out: Tensor,
        lse: Tensor,
        kl_value: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
    ) -> TeachingGradients:
        rows = RowBounds.of(layout, ratio, window, True)
        attended = (q, window_kv, compressed_kv, sink, out, lse, rows.window_start, rows.entry_start, rows.visible)
        gradients: TeachingGradients = attend_and_teach_backward(
            grad_out, grad_kl, *index, selected, scores, *attended, kl_value, rows.first_row, window, scale
        )
        return gradients

    base = TritonBackend()
    return Parts(
        base,
        attention,
        f"ours, Triton {triton.__version__}, Gluon on SM90 for 64 or 128 heads of 512, portable kernels elsewhere",
        teaching,
        base._known_scores,
    )


def with_backward(parts: Parts, backward: AttentionBackward, name: str) -> Parts:
    """`parts` with another attention backward, which emits no teacher: that one becomes a pass after the forward."""
    return Parts(parts.base, backward, name)
