# SPDX-License-Identifier: Apache-2.0
"""FlashMLA has no backward: these functions join its forward with the backward of parts.py.

The forward is a callable (q, window_kv, compressed_kv, selected, sink) -> out, lse, the arguments of one layer bound to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.backend import ALL_VISIBLE, Selection
from kernels.flashmla.parts import Parts
from kernels.layout import PackedLayout

Forward = Callable[[Tensor, Tensor, Tensor | None, Selection | None, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Call:
    """What one layer passes besides tensors that need gradients. `everything`: ids are ALL_VISIBLE."""

    forward: Forward
    parts: Parts
    layout: PackedLayout
    ratio: int
    window: int
    scale: float
    everything: bool = False

    def selection(self, ids: Tensor | None) -> Selection | None:
        return ALL_VISIBLE if self.everything else ids

    @property
    def shape(self) -> tuple[PackedLayout, int, int, float]:
        return self.layout, self.ratio, self.window, self.scale


class Attend(torch.autograd.Function):
    """out, lse; gradients to q, window_kv, compressed_kv, sink."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, ids: Tensor | None, sink: Tensor, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, window_kv, compressed_kv, call.selection(ids), sink)
        ctx.save_for_backward(q, window_kv, compressed_kv, ids, sink, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, window_kv, compressed_kv, ids, sink, out, lse = ctx.saved_tensors
        call: Call = ctx.call
        gradients = call.parts.attention_backward(
            grad_out, q, window_kv, compressed_kv, call.selection(ids), sink, out, lse, call.layout, call.ratio, call.window, call.scale
        )
        dq, d_window, d_entries, d_sink = gradients
        if compressed_kv is not None and d_entries is None:
            d_entries = torch.zeros_like(compressed_kv)
        return dq, d_window, d_entries, None, d_sink.to(sink.dtype), None


class AttendAndTeach(torch.autograd.Function):
    """out, lse, kl_sum = 0; `kl_value` holds the KL sum after the backward, whose weight is the gradient of kl_sum."""

    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        index_w: Tensor,
        scores: Tensor | None,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        ids: Tensor,
        sink: Tensor,
        kl_value: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = call.forward(q, window_kv, compressed_kv, ids, sink)
        ctx.save_for_backward(index_q, index_k, index_w, scores, q, window_kv, compressed_kv, ids, sink, out, lse)
        ctx.call, ctx.kl_value = call, kl_value
        ctx.mark_non_differentiable(lse)
        return out, lse, torch.zeros_like(kl_value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor, grad_kl: Tensor) -> tuple[Any, ...]:
        index_q, index_k, index_w, scores, q, window_kv, compressed_kv, ids, sink, out, lse = ctx.saved_tensors
        call: Call = ctx.call
        assert call.parts.teaching_backward is not None
        index = (index_q, index_k, index_w)
        operands = (q, window_kv, compressed_kv, ids, sink, out, lse, ctx.kl_value, *call.shape)
        d_index_q, d_index_k, d_index_w, dq, d_window, d_entries, d_sink = call.parts.teaching_backward(grad_out, grad_kl, index, scores, *operands)
        return d_index_q, d_index_k, d_index_w, None, dq, d_window, d_entries, None, d_sink.to(sink.dtype), None, None
