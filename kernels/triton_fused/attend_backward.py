# SPDX-License-Identifier: Apache-2.0
"""Attention over {sink, window, selected | all visible entries | none}: the backward, which can emit the teacher as it goes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Selection
from kernels.layout import PackedLayout
from kernels.triton_fused import dense_attention as dense
from kernels.triton_fused import hopper
from kernels.triton_fused.attend_forward import check_operands, reads_entries, use_dense, use_hopper
from kernels.triton_fused.gradient_prepare import prepare_gradient
from kernels.triton_fused.portable_backward import portable_backward
from kernels.triton_fused.rows import RowBounds, plan_rows

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]


def attend_backward(
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
    *,
    emit_teacher: bool = False,
    deterministic: bool = False,
) -> Gradients:
    """Gradients of `attend_forward`, and the sum of the attention probabilities over the heads.

    Args:
        grad_out: [R, H, D]; out, lse: what the forward returned.
        emit_teacher: also return sum over heads of P[r, h, slot] = exp(logit - logaddexp(lse, sink)), 0 in invalid slots: the full_csa teacher
            before normalisation. It underflows where it is below fp32's range. Needs ids in `selected`; None otherwise.
        deterministic: bit-equal results from run to run (the portable kernels with integer sums; slower).

    Returns:
        dq [R, H, D], d_window_kv [T, D], d_compressed_kv [C, D] or None in the dtype of their tensors, d_sink fp32 [H], teacher_sum fp32 [R, K].
    """
    reads = reads_entries(compressed_kv, selected)
    ids = selected if isinstance(selected, Tensor) else None
    bounds = RowBounds.of(layout, ratio, window, reads)
    entries = compressed_kv if reads else None
    dq, d_window, d_entries, d_sink, teacher = attend_backward_rows(
        grad_out, q, window_kv, entries, ids if reads else None, sink, out, lse, bounds, scale, emit_teacher=emit_teacher, deterministic=deterministic
    )
    if compressed_kv is not None and d_entries is None:
        d_entries = torch.zeros_like(compressed_kv)
    if emit_teacher and teacher is None and ids is not None:
        teacher = torch.zeros(ids.shape, dtype=torch.float32, device=q.device)
    return dq, d_window, d_entries, d_sink, teacher


def attend_backward_rows(
    grad_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: RowBounds,
    scale: float,
    *,
    emit_teacher: bool = False,
    deterministic: bool = False,
) -> Gradients:
    """`attend_backward` on plain tensors: `selected` None reads every visible entry of `compressed_kv`."""
    check_operands(q, window_kv, compressed_kv, selected, sink, bounds)
    emit = emit_teacher and selected is not None and compressed_kv is not None
    grad_out, q, window_kv, out = grad_out.to(q.dtype).contiguous(), q.contiguous(), window_kv.contiguous(), out.contiguous()
    compressed_kv = None if compressed_kv is None else compressed_kv.contiguous()
    selected = None if selected is None else selected.contiguous()
    plan = plan_rows(selected, bounds, 0 if compressed_kv is None else compressed_kv.shape[0])
    z_log2, delta, d_sink = prepare_gradient(grad_out, out, lse, sink.float().contiguous())
    operands = (grad_out, q, window_kv, compressed_kv, selected, z_log2, delta, bounds, plan, scale, emit)
    if use_hopper(q) and not deterministic:
        dq, dkv, teacher = hopper.backward(*operands)
    elif use_dense(q, selected) and not deterministic:
        dq, dkv, teacher = dense.dense_backward(*operands)
    else:
        dq, dkv, teacher = portable_backward(*operands, deterministic)
    tokens = window_kv.shape[0]
    d_entries = None if compressed_kv is None else dkv[tokens:].to(compressed_kv.dtype)
    return dq, dkv[:tokens].to(window_kv.dtype), d_entries, d_sink, teacher
