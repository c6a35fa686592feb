# SPDX-License-Identifier: Apache-2.0
"""Linear layers, norms and the numeric rules that every module of the decoder shares.

Legend: T tokens, d features. "fp32" means at least float32: a float64 model computes in float64 throughout, so that it can serve as its own oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.backend import RowOperations


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    if torch.compiler.is_compiling():  # it chooses by itself what to keep; and dynamo of torch 2.11 gives a Function that returns x.mul_(y) no gradient
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
