# SPDX-License-Identifier: Apache-2.0
"""Linear layers, norms and the numeric rules that every module of the decoder shares.

Legend: T tokens, d features. "fp32" means at least float32: a float64 model computes in float64 throughout, so that it can serve as its own oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.backend import RowOperations


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged in float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def activation_dtype(x: Tensor) -> torch.dtype:
    """Dtype of activations between modules: that of autocast where it is on for the device of `x`, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def without_autocast(x: Tensor) -> torch.autocast:
    """Context in which the operations on the device of `x` keep the dtypes they are given."""
    return torch.autocast(x.device.type, enabled=False)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in fp32, also under autocast."""
    with without_autocast(x):
        return F.linear(at_least_fp32(x), at_least_fp32(weight))


def linear_rounded(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in fp32, x [T, in] and weight [out, in]; under autocast from operands rounded to its dtype, summed and returned in fp32.

    A matrix product of rounded operands takes the tensor cores; rounding the result as well, as a linear layer under autocast does, would cost a loss
    most of its digits. The backward rounds the incoming gradient alike, and the gradient of `weight` is summed in fp32 without another rounding.
    """
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return linear_fp32(x, weight)
    return _LinearRounded.apply(x, weight, torch.get_autocast_dtype(kind))


class _LinearRounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtypes = x.dtype, weight.dtype
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t(), torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        grad_x = _product(grad, weight, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        grad_weight = _product(grad.t(), x, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b of rounded matrices, summed in fp32; out_dtype: theirs or float32. Only CUDA multiplies them as they are and returns fp32."""
    with without_autocast(a):
        if not a.is_cuda:
            return torch.mm(a.float(), b.float()).to(out_dtype)
        return torch.mm(a, b) if out_dtype == a.dtype else torch.mm(a, b, out_dtype=out_dtype)


def grouped_projection(x: Tensor, weight: Tensor) -> Tensor:
    """y[t, g] = weight[g] @ x[t, g]: x [T, g, in], weight [g, out, in] -> [T, g, out], in the dtype of activations."""
    dtype = activation_dtype(x)
    y: Tensor = _GroupedProjection.apply(x.to(dtype), weight.to(dtype))
    return y


class _GroupedProjection(torch.autograd.Function):
    """Batched products that read and write [T, g, ...] in place; autograd's own would copy y, and the gradient of x, out of [g, T, ...]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        y = x.new_empty(*x.shape[:2], weight.shape[1])
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=y.transpose(0, 1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), None
        with without_autocast(x):
            torch.bmm(grad.transpose(0, 1), weight, out=grad_x.transpose(0, 1))
            if ctx.needs_input_grad[1]:
                grad_weight = torch.bmm(grad.permute(1, 2, 0), x.transpose(0, 1))
        return grad_x, grad_weight


class Linear(nn.Linear):
    """Linear layer without bias whose weight starts as N(0, std)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class _RMSNorm(torch.autograd.Function):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis. Saves x and one number per row; autograd's own graph would keep four copies of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        x32 = at_least_fp32(x)
        scale = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out = x32 * scale
        return (out if weight is None else out.mul_(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        x32, grad = at_least_fp32(x), at_least_fp32(grad)
        grad_weight = None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                with without_autocast(x):
                    grad_weight = torch.mv((grad * x32).flatten(0, -2).t(), scale.flatten())
            grad = grad * weight
        projection = (grad * x32).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-x.shape[-1])
        return (grad * scale).addcmul_(x32, projection).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last axis in fp32, returned in the dtype of `x`. `weight` None: no scale (queries, semantics of the per-head norm)."""
    # The compiler chooses by itself what to keep. And dynamo of torch 2.11 gives gradients of 0 to a Function whose result comes from an operation
    # that returned its own argument: here `mul_` and a `to` that has nothing to convert.
    if torch.compiler.is_compiling():
        normed = at_least_fp32(x)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
        return (normed if weight is None else normed * weight).to(x.dtype)
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """RMS norm with a weight that starts at 1; the mathematics runs in fp32. `fused`: the backend's form of it, if it has one."""

    def __init__(self, features: int, eps: float, fused: RowOperations | None = None) -> None:
        super().__init__()
        self.eps, self.fused = eps, fused
        self.weight = nn.Parameter(torch.ones(features))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is None or torch.compiler.is_compiling():  # the compiler fuses a norm itself
            return rms_norm(x, self.weight, self.eps)
        return self.fused.norm_rotate(x, self.weight, self.eps)
