# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the unfused operations: shapes, dtypes, devices. No check looks at the values of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.backend import AllVisible, Selection
from kernels.layout import PackedLayout


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is, else float32: bf16 and fp16 inputs are computed in float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast off: scores, lse, teacher and KL stay in float32 whatever surrounds the call."""
    with torch.autocast(device_type=device.type, enabled=False):
        yield


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    """ValueError unless `tensor` is floating point, of this shape (None = any) and on this device."""
    fits = tensor.dim() == len(shape) and all(want is None or have == want for have, want in zip(tensor.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the layout on {device}; move one of them")


def check_entries(name: str, keys: Tensor, layout: PackedLayout, ratio: int) -> None:
    """ValueError unless keys [C, D] cover every entry of the layout."""
    needed = layout.num_compressed(ratio)
    if keys.shape[0] < needed:
        raise ValueError(f"{name} has {keys.shape[0]} entries, the layout needs {needed} at ratio {ratio}; legal: >= {needed}")


def check_selection(name: str, ids: Selection | None, layout: PackedLayout) -> None:
    """ValueError unless ids are int32 [rows, K] (int64 is accepted), ALL_VISIBLE or None."""
    if ids is None or isinstance(ids, AllVisible):
        return
    if ids.dim() != 2 or ids.shape[0] != layout.num_rows or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 [{layout.num_rows}, K], ALL_VISIBLE or None, got {ids.dtype} {list(ids.shape)}")


def check_sink(sink: Tensor, heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError unless the sink is float32 [H], or float64 where the computation is."""
    check_tensor("sink", sink, (heads,), device)
    if sink.dtype not in (torch.float32, dtype):
        raise ValueError(f"sink must be float32 (float64 is legal with float64 inputs), got {sink.dtype}: a rounded sink moves whole heads")
