# SPDX-License-Identifier: Apache-2.0
"""Clamped SwiGLU of whole rows in one pass each way; fp32 mathematics, one rounding at the end.

    y = silu(g) * u * weight        g = min(gate, limit), u = clip(up, -limit, limit)

The backward reads gate and up again and keeps nothing else. With s = sigmoid(g), each gradient 0 where its clamp cuts:
    d_gate = dy * weight * u * s * (1 + g (1 - s))     d_up = dy * weight * g * s     d_weight = sum over the row of dy * g * s * u

`source` reorders the weights: each row takes the number at its own index there, and leaves the gradient at the same index.

Legend: R rows, D features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two


@triton.jit
def swiglu_kernel(
    GATE,
    UP,
    WEIGHT,
    SOURCE,
    OUT,
    rows,
    limit,
    WEIGHTED: tl.constexpr,
    SOURCED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    if WEIGHTED:
        source = tl.load(SOURCE + row, mask=row < rows, other=0) if SOURCED else row
        weight = tl.load(WEIGHT + source, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        real = (row < rows)[:, None] & (dim < D)[None, :]
        offset = row[:, None] * D + dim[None, :]
        gate = tl.load(GATE + offset, mask=real, other=0.0).to(tl.float32)
        up = tl.load(UP + offset, mask=real, other=0.0).to(tl.float32)
        gate = tl.where(gate > limit, limit, gate)  # not minimum, which drops a NaN
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = gate * tl.sigmoid(gate) * up
        if WEIGHTED:
            y = y * weight
        tl.store(OUT + offset, y.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def swiglu_backward_kernel(
    GATE,
    UP,
    WEIGHT,
    SOURCE,
    GRAD,
    GRAD_GATE,
    GRAD_UP,
    GRAD_WEIGHT,
    rows,
    limit,
    WEIGHTED: tl.constexpr,
    SOURCED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    if WEIGHTED:
        source = tl.load(SOURCE + row, mask=row < rows, other=0) if SOURCED else row
        weight = tl.load(WEIGHT + source, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        d_weight = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        dim = start + tl.arange(0, BLOCK_D)
        real = (row < rows)[:, None] & (dim < D)[None, :]
        offset = row[:, None] * D + dim[None, :]
        gate = tl.load(GATE + offset, mask=real, other=0.0).to(tl.float32)
        up = tl.load(UP + offset, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + offset, mask=real, other=0.0).to(tl.float32)
        gate_cut, up_cut = gate > limit, (up > limit) | (up < -limit)
        gate = tl.where(gate_cut, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        s = tl.sigmoid(gate)
        if WEIGHTED:
            d_weight += grad * gate * s * up
            grad = grad * weight
        d_gate = tl.where(gate_cut, 0.0, grad * up * s * (1.0 + gate * (1.0 - s)))
        d_up = tl.where(up_cut, 0.0, grad * gate * s)
        tl.store(GRAD_GATE + offset, d_gate.to(GRAD_GATE.dtype.element_ty), mask=real)
        tl.store(GRAD_UP + offset, d_up.to(GRAD_UP.dtype.element_ty), mask=real)
    if WEIGHTED:
        tl.store(GRAD_WEIGHT + source, tl.sum(d_weight, 1), mask=row < rows)


def _tiles(x: Tensor) -> dict[str, int]:
    """Compile-time sizes for x [R, D]: 2,048 numbers a program and pass, 16 a thread."""
    block_d = min(1024, power_of_two(x.shape[1]))
    return {"D": x.shape[1], "BLOCK_R": 2048 // block_d, "BLOCK_D": block_d, "num_warps": 4}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None, source: Tensor | None, limit: float) -> Tensor:
        gate, up, weight = gate.contiguous(), up.contiguous(), None if weight is None else weight.contiguous()
        source = None if source is None else source.contiguous()
        ctx.save_for_backward(gate, up, weight, source)
        ctx.limit = limit
        out = torch.empty_like(gate)
        if gate.numel():
            tiles, rows = _tiles(gate), gate.shape[0]
            operands = (gate, up, gate if weight is None else weight, gate if source is None else source, out, rows, limit)
            with on_device_of(gate):
                grid = (ceil_div(rows, tiles["BLOCK_R"]),)
                swiglu_kernel[grid](*operands, WEIGHTED=weight is not None, SOURCED=source is not None, **tiles)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        gate, up, weight, source = ctx.saved_tensors
        grad, grad_gate, grad_up = grad.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        grad_weight = None if weight is None else torch.empty_like(weight)
        if not gate.numel():
            return grad_gate, grad_up, None if grad_weight is None else grad_weight.zero_(), None, None
        tiles, rows = _tiles(gate), gate.shape[0]
        read = (gate, up, gate if weight is None else weight, gate if source is None else source, grad)
        written = (grad_gate, grad_up, gate if grad_weight is None else grad_weight)
        with on_device_of(gate):
            grid = (ceil_div(rows, tiles["BLOCK_R"]),)
            swiglu_backward_kernel[grid](*read, *written, rows, ctx.limit, WEIGHTED=weight is not None, SOURCED=source is not None, **tiles)
        return grad_gate, grad_up, grad_weight, None, None


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None, source: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) [* weight]; dtype of gate.

    Args:
        gate, up: [R, D] in one of bfloat16, float16 and float32. weight: fp32 [R, 1], one number a row, or None.
        source: int64 [R], the numbers from 0 to R - 1 in some order: row r takes weight[source[r]], and its gradient lands there. None: weight[r].

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype not in DTYPES:
        raise ValueError(
            f"gate and up must be [R, D] of one dtype of {', '.join(map(str, DTYPES))}, "
            f"got {list(gate.shape)} in {gate.dtype} and {list(up.shape)} in {up.dtype}"
        )
    if weight is not None and (weight.shape != (gate.shape[0], 1) or weight.dtype != torch.float32):
        raise ValueError(f"weight must be float32 [{gate.shape[0]}, 1], one number per row of gate, got {list(weight.shape)} in {weight.dtype}")
    if source is not None and (weight is None or source.shape != gate.shape[:1] or source.dtype != torch.int64):
        raise ValueError(f"source must be int64 [{gate.shape[0]}] and needs a weight, got {list(source.shape)} in {source.dtype}")
    out: Tensor = _SwiGLU.apply(gate, up, weight, source, limit)
    return out
