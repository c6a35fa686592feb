# SPDX-License-Identifier: Apache-2.0
"""Attention and full_csa indexer loss of a training step as one operator: the teacher falls out of the attention backward.

The backward recomputes every probability of the real attention; their sum over the heads is the teacher. So the KL is evaluated in the backward,
from the sums that the attention kernel emits, and no second pass over queries and keys is needed. In the forward the KL has the value 0; the
weight of the loss arrives as the gradient of that output.

Legend: see ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.attend_forward import attend_forward_rows
from kernels.triton_fused.indexer_sparse import sparse_loss
from kernels.triton_fused.ops import NAMESPACE, Reads, _attention_gradients, _fake_attention_gradients, on_device_of
from kernels.triton_fused.rows import RowBounds
from kernels.triton_fused.teacher import sparse_teacher


def _forward(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    selected: Tensor,
    scores: Tensor | None,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor,
    sink: Tensor,
    window_start: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    kl_value: Tensor,
    first_row: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out [R, H, D], lse fp32 [R, H], kl_sum fp32 [] with the value 0. `kl_value` fp32 [] receives the right one in the backward.

    scores: fp32 [R, K], the index scores of `selected` where the selection kept them.
    """
    bounds = RowBounds(window_start, entry_start, visible, first_row, window)
    with on_device_of(q):
        out, lse = attend_forward_rows(q, window_kv, compressed_kv, selected, sink, bounds, scale)
        return out, lse, torch.zeros((), dtype=torch.float32, device=q.device)


attend_and_teach = torch.library.custom_op(f"{NAMESPACE}::attend_and_teach", _forward, mutates_args=())


@attend_and_teach.register_fake
def _(index_q, index_k, index_w, selected, scores, q, *rest):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty((), dtype=torch.float32)


def _backward(
    grad_out: Tensor,
    grad_kl: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    selected: Tensor,
    scores: Tensor | None,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor,
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    window_start: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    kl_value: Tensor,
    first_row: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d index_q, d index_k, d index_w, dq, d_window_kv, d_compressed_kv, d_sink; writes the KL sum into `kl_value`."""
    bounds = RowBounds(window_start, entry_start, visible, first_row, window)
    with on_device_of(q):
        index_q, index_k, index_w, selected, q, compressed_kv = (t.contiguous() for t in (index_q, index_k, index_w, selected, q, compressed_kv))
        dq, d_window, d_entries, d_sink, emitted = _attention_gradients(
            grad_out, q, window_kv, compressed_kv, selected, sink, out, lse, bounds, scale, Reads.SELECTED, True
        )
        assert emitted is not None
        teacher = sparse_teacher(q, compressed_kv, selected, sink.float().contiguous(), lse, entry_start, visible, scale, emitted=emitted)
        deterministic = torch.are_deterministic_algorithms_enabled()
        kl, gradients = sparse_loss(
            index_q, index_k, index_w, selected, teacher, entry_start, visible, grad_kl.float(), deterministic, scores=scores, overwrite_teacher=True
        )
        assert gradients is not None
        torch.sum(kl, 0, out=kl_value)
        return gradients.index_q, gradients.index_k, gradients.index_w, dq, d_window, d_entries, d_sink


attend_and_teach_backward = torch.library.custom_op(f"{NAMESPACE}::attend_and_teach_backward", _backward, mutates_args=("kl_value",))


@attend_and_teach_backward.register_fake
def _(grad_out, grad_kl, index_q, index_k, index_w, selected, scores, q, window_kv, compressed_kv, sink, *rest):
    indexer = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (index_q, index_k, index_w)]
    return *indexer, *_fake_attention_gradients(q, window_kv, compressed_kv, sink)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    # kl_value is no operand but a place to write to: under activation checkpointing a saved tensor would be another one, made by the recomputation
    ctx.save_for_backward(*inputs[:9], *output[:2], *inputs[9:12])
    ctx.constants = inputs[12:]


def _gradients(function: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor, grad_kl: Tensor) -> tuple[Any, ...]:
    d_index_q, d_index_k, d_index_w, *attention = function(grad_out, grad_kl, *ctx.saved_tensors, *ctx.constants)
    return d_index_q, d_index_k, d_index_w, None, None, *attention, *(None,) * 7


def _autograd(ctx: Any, grad_out: Tensor, grad_lse: Tensor, grad_kl: Tensor) -> tuple[Any, ...]:
    return _gradients(attend_and_teach_backward, ctx, grad_out, grad_kl)


attend_and_teach.register_autograd(_autograd, setup_context=_context)


class DirectAttendAndTeach(torch.autograd.Function):
    """The same without the operators' dispatch, which costs a quarter of a millisecond of host time a layer: as much as a small layer computes."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(*inputs)
        _context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor, grad_kl: Tensor) -> tuple[Any, ...]:
        return _gradients(_backward, ctx, grad_out, grad_kl)
