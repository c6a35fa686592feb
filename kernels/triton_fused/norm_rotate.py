# SPDX-License-Identifier: Apache-2.0
"""RMS norm and interleaved partial rotation of whole rows, each alone or both in one pass; fp32 mathematics, one rounding at the end.

    y = turn(x * rsqrt(mean(x^2) + eps) * weight)        turn: pairs (x_2i, x_2i+1) of the last r dims, as complex numbers, times the rotation

The backward reads x again and keeps nothing but it: dn = unturn(dy), s = rsqrt(...), g = dn * weight
    dx = s * g - x * s^3 / D * sum(g * x)                 d_weight = sum over rows of dn * x * s

Legend: T tokens, H heads, D features, R = T * H rows, r rotated dims.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.column_sum import column_sum
from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two

PROGRAMS = 512  # of a backward with weight, whose sums one tile of column_sum takes; about four a multiprocessor of an H100


@triton.jit
def _turned(
    x, TURN, row, here, INVERSE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    even, odd = tl.split(tl.reshape(x, [BLOCK_R, BLOCK_D // 2, 2]))
    pair = tl.arange(0, BLOCK_D // 2) - (D // 2 - PAIRS)
    turns = here[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    at = TURN + (row // H)[:, None] * (2 * PAIRS) + 2 * pair[None, :]
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + 1, mask=turns, other=0.0)
    if INVERSE:
        sin = -sin
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BLOCK_R, BLOCK_D])


@triton.jit
def norm_rotate_kernel(
    X,
    WEIGHT,
    TURN,
    OUT,
    rows,
    eps,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dim = tl.arange(0, BLOCK_D)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = row < rows
    real = here[:, None] & (dim < D)[None, :]
    offset = row[:, None] * D + dim[None, :]
    x = tl.load(X + offset, mask=real, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        if WEIGHTED:
            x = x * tl.load(WEIGHT + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
    if PAIRS > 0:
        x = _turned(x, TURN, row, here, INVERSE, H, D, PAIRS, BLOCK_R, BLOCK_D)
    tl.store(OUT + offset, x.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def norm_rotate_backward_kernel(
    X,
    WEIGHT,
    TURN,
    GRAD,
    GRAD_X,
    PARTIAL_WEIGHT,
    rows,
    blocks,
    eps,
    WEIGHTED: tl.constexpr,
    PAIRS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dim = tl.arange(0, BLOCK_D)
    if WEIGHTED:
        weight = tl.load(WEIGHT + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        d_weight = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        here = row < rows
        real = here[:, None] & (dim < D)[None, :]
        offset = row[:, None] * D + dim[None, :]
        x = tl.load(X + offset, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + offset, mask=real, other=0.0).to(tl.float32)
        if PAIRS > 0:
            grad = _turned(grad, TURN, row, here, True, H, D, PAIRS, BLOCK_R, BLOCK_D)
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        normed = x * scale
        if WEIGHTED:
            d_weight += grad * normed
            grad = grad * weight
        grad = scale * (grad - normed * (tl.sum(grad * normed, 1) / D)[:, None])
        tl.store(GRAD_X + offset, grad.to(GRAD_X.dtype.element_ty), mask=real)
    if WEIGHTED:
        tl.store(PARTIAL_WEIGHT + tl.program_id(0).to(tl.int64) * D + dim, tl.sum(d_weight, 0), mask=dim < D)


def _tiles(x: Tensor) -> dict[str, int]:
    """Compile-time sizes for x [T, H, D] or [T, D]: some 2,048 numbers a program, so 16 a thread."""
    block_d = max(2, power_of_two(x.shape[-1]))
    block_r = max(1, 2048 // block_d)
    warps = min(16, max(4, block_d // 512))
    return {"H": x.shape[1] if x.dim() == 3 else 1, "D": x.shape[-1], "BLOCK_R": block_r, "BLOCK_D": block_d, "num_warps": warps}


def _forward(x: Tensor, weight: Tensor | None, turn: Tensor | None, eps: float, norm: bool, inverse: bool) -> Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tiles, rows = _tiles(x), x.numel() // x.shape[-1]
        pairs = 0 if turn is None else turn.shape[1]
        operands = (x, x if weight is None else weight, x if turn is None else turn, out, rows, eps)
        with on_device_of(x):
            grid = (ceil_div(rows, tiles["BLOCK_R"]),)
            norm_rotate_kernel[grid](*operands, NORM=norm, WEIGHTED=weight is not None, PAIRS=pairs, INVERSE=inverse, **tiles)
    return out


def _backward(x: Tensor, weight: Tensor | None, turn: Tensor | None, grad: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    grad, grad_x = grad.contiguous(), torch.empty_like(x)
    if not x.numel():
        return grad_x, None if weight is None else torch.zeros_like(weight)
    tiles, rows = _tiles(x), x.numel() // x.shape[-1]
    blocks, pairs = ceil_div(rows, tiles["BLOCK_R"]), 0 if turn is None else turn.shape[1]
    programs = blocks if weight is None else min(blocks, PROGRAMS)
    partial = x if weight is None else torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    operands = (x, x if weight is None else weight, x if turn is None else turn, grad, grad_x, partial, rows, blocks, eps)
    with on_device_of(x):
        norm_rotate_backward_kernel[(programs,)](*operands, WEIGHTED=weight is not None, PAIRS=pairs, **tiles)
        return grad_x, None if weight is None else column_sum(partial, weight.dtype)


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, turn: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, turn)
        ctx.eps = eps
        return _forward(x, weight, turn, eps, True, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, turn = ctx.saved_tensors
        return *_backward(x, weight, turn, grad, ctx.eps), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(turn)
        ctx.inverse = inverse
        return _forward(x, None, turn, 0.0, False, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (turn,) = ctx.saved_tensors
        return _forward(grad, None, turn, 0.0, False, not ctx.inverse), None, None


def _check(x: Tensor, weight: Tensor | None, rotation: Tensor | None) -> None:
    if x.dim() not in (2, 3) or x.dtype not in DTYPES:
        raise ValueError(f"x must be [T, D] or [T, H, D] in {', '.join(map(str, DTYPES))}, got {list(x.shape)} in {x.dtype}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], one number per feature of x, got {list(weight.shape)}")
    if rotation is None:
        return
    if rotation.dtype != torch.complex64 or rotation.dim() != 2 or rotation.shape[0] != x.shape[0]:
        raise ValueError(f"rotation must be complex64 [{x.shape[0]}, r/2], one row per token of x, got {list(rotation.shape)} in {rotation.dtype}")
    if x.shape[-1] % 2 or 2 * rotation.shape[1] > x.shape[-1]:
        raise ValueError(f"the last {2 * rotation.shape[1]} of {x.shape[-1]} features cannot rotate: D must be even and at least r")


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor | None = None) -> Tensor:
    """RMS norm over the last axis, then rotation of its last r dims; dtype of x.

    Args:
        x: [T, D] or [T, H, D] in bfloat16, float16 or float32. weight: [D], or None for a norm without one.
        rotation: complex64 [T, r/2], cos + i sin of every angle; None rotates nothing. No gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, weight, rotation)
    turn = None if rotation is None else torch.view_as_real(rotation).contiguous()
    out: Tensor = _NormRotate.apply(x, weight, turn, eps)
    return out


def rotate(x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last r dims of x [T, D] or [T, H, D], out of place; `inverse` by the opposite angles. See `norm_rotate`."""
    _check(x, None, rotation)
    out: Tensor = _Rotate.apply(x, torch.view_as_real(rotation).contiguous(), inverse)
    return out
