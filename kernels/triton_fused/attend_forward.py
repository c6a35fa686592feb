# SPDX-License-Identifier: Apache-2.0
"""Attention over {sink, window, selected | all visible entries | none}: the forward, and the choice of the kernel that runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import ALL_VISIBLE, Selection
from kernels.layout import PackedLayout
from kernels.triton_fused import dense_attention as dense
from kernels.triton_fused import hopper
from kernels.triton_fused.portable_forward import portable_forward
from kernels.triton_fused.rows import RowBounds, plan_rows


def implementation(q: Tensor) -> str:
    """Name of the kernels that would attend with these queries [R, H, D]: on this device, head count, head dim and dtype."""
    if not q.is_cuda:
        return "portable Triton kernels (interpreter)"
    if dense.prefers_dense(q.shape[1], q.shape[2], q.dtype):
        return "portable Triton kernels; where no ids are given, several rows share their keys"
    reason = hopper.refusal(q.shape[1], q.shape[2], q.dtype, torch.cuda.get_device_capability(q.device))
    return "Gluon warp-specialised kernels for SM90" if reason is None else f"portable Triton kernels ({reason})"


def use_dense(q: Tensor, selected: Tensor | None) -> bool:
    """Whether the form that shares keys between rows is the faster one: never under a selection."""
    return selected is None and dense.prefers_dense(q.shape[1], q.shape[2], q.dtype)


def use_hopper(q: Tensor) -> bool:
    """Whether the Gluon kernels serve these queries."""
    return q.is_cuda and hopper.refusal(q.shape[1], q.shape[2], q.dtype, torch.cuda.get_device_capability(q.device)) is None


def attend_forward(
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
    """out [R, H, D] in the dtype of q and lse fp32 [R, H] (natural log, without the sink, -inf for an empty row).

    Arguments as `kernels.Backend.attend`; all tensors of one dtype (sink fp32), on one device. ValueError for shapes that do not fit together.
    """
    bounds = RowBounds.of(layout, ratio, window, reads_entries(compressed_kv, selected))
    ids = selected if isinstance(selected, Tensor) else None
    return attend_forward_rows(q, window_kv, compressed_kv if reads_entries(compressed_kv, selected) else None, ids, sink, bounds, scale)


def attend_forward_rows(
    q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, selected: Tensor | None, sink: Tensor, bounds: RowBounds, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend_forward` on plain tensors: `selected` None reads every visible entry of `compressed_kv`."""
    check_operands(q, window_kv, compressed_kv, selected, sink, bounds)
    q, window_kv, sink = q.contiguous(), window_kv.contiguous(), sink.float().contiguous()
    compressed_kv = None if compressed_kv is None else compressed_kv.contiguous()
    selected = None if selected is None else selected.contiguous()
    plan = plan_rows(selected, bounds, 0 if compressed_kv is None else compressed_kv.shape[0])
    if use_hopper(q):
        return hopper.forward(q, window_kv, compressed_kv, selected, sink, bounds, plan, scale)
    if use_dense(q, selected):
        return dense.dense_forward(q, window_kv, compressed_kv, sink, bounds, plan, scale)
    return portable_forward(q, window_kv, compressed_kv, selected, sink, bounds, plan, scale)


def reads_entries(compressed_kv: Tensor | None, selected: Selection | None) -> bool:
    """Whether any entry can be read at all."""
    if compressed_kv is None or selected is None or compressed_kv.shape[0] == 0:
        return False
    return selected is ALL_VISIBLE or (isinstance(selected, Tensor) and selected.shape[1] > 0)


def check_operands(q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, selected: Tensor | None, sink: Tensor, bounds: RowBounds) -> None:
    """ValueError that names what does not fit: a kernel would read past the end of a tensor."""
    if q.dim() != 3:
        raise ValueError(f"q must be [rows, heads, head dim], got {list(q.shape)}")
    rows, heads, dim = q.shape
    if rows != bounds.window_start.shape[0]:
        raise ValueError(f"q has {rows} rows, the layout {bounds.window_start.shape[0]}; they must agree")
    if window_kv.dim() != 2 or window_kv.shape[1] != dim or window_kv.shape[0] < bounds.first_row + rows:
        raise ValueError(f"window_kv must be [at least {bounds.first_row + rows}, {dim}], got {list(window_kv.shape)}")
    if sink.shape != (heads,):
        raise ValueError(f"sink must be [{heads}], one logit per head, got {list(sink.shape)}")
    if compressed_kv is not None and (compressed_kv.dim() != 2 or compressed_kv.shape[1] != dim):
        raise ValueError(f"compressed_kv must be [entries, {dim}], got {list(compressed_kv.shape)}")
    if selected is not None and (selected.dim() != 2 or selected.shape[0] != rows or selected.dtype != torch.int32):
        raise ValueError(f"selected must be int32 [{rows}, K], got {selected.dtype} {list(selected.shape)}")
    for name, tensor in (("window_kv", window_kv), ("compressed_kv", compressed_kv)):
        if tensor is not None and tensor.dtype != q.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} and q is {q.dtype}; the kernels take one dtype: torch.bfloat16, torch.float16 or torch.float32"
            )
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"q is {q.dtype}; legal: torch.bfloat16, torch.float16, torch.float32. backend=unfused takes any dtype")
    if not 1 <= heads <= 128 or not 1 <= dim <= 512:
        raise ValueError(f"{heads} heads of {dim} columns; legal: 1..128 heads, head dim up to 512")
