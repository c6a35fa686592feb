# SPDX-License-Identifier: Apache-2.0
"""When the Gluon kernels for SM90 can run, and their entry points. Importing this module needs no Gluon."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.triton_fused.rows import RowBounds, RowPlan

HEAD_BLOCK = 64  # rows of the matrix instruction
HEAD_DIM = 512

COMPILES_WITH = ((3, 6), (3, 9))  # Triton versions, both included; Gluon is experimental and changes between them


def gluon_refusal(triton_version: str) -> str | None:
    """Why this Triton cannot compile the Gluon kernels, as far as is known."""
    lowest, highest = (".".join(map(str, v)) for v in COMPILES_WITH)
    if not COMPILES_WITH[0] <= tuple(int(part) for part in triton_version.split("+")[0].split(".")[:2]) <= COMPILES_WITH[1]:
        return f"the Gluon kernels are known to compile with Triton {lowest} to {highest}, this is {triton_version}"
    return None


GLUON_REFUSAL = gluon_refusal(triton.__version__)
if GLUON_REFUSAL is None:
    from kernels.triton_fused.hopper_backward import hopper_backward
    from kernels.triton_fused.hopper_forward import hopper_forward


def refusal(heads: int, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why the Gluon kernels cannot serve this shape on such a device, or None where they can."""
    if capability != (9, 0):
        return f"the Gluon kernels need compute capability 9.0, this device has {capability[0]}.{capability[1]}"
    if head_dim != HEAD_DIM or heads not in (HEAD_BLOCK, 2 * HEAD_BLOCK):
        return f"the Gluon kernels take {HEAD_BLOCK} or {2 * HEAD_BLOCK} heads of {HEAD_DIM} columns, not {heads} of {head_dim}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the Gluon kernels take bfloat16 and float16, not {dtype}"
    return GLUON_REFUSAL


def forward(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As portable_forward."""
    return hopper_forward(q, window_kv, compressed_kv, selected, sink, bounds, plan, scale)


def backward(
    grad_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    z_log2: Tensor,
    delta: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
    emit_teacher: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As portable_backward, not deterministic."""
    return hopper_backward(grad_out, q, window_kv, compressed_kv, selected, z_log2, delta, bounds, plan, scale, emit_teacher)
