# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections (arXiv 2512.24880): n residual streams, mixed by input-dependent maps around every sublayer.

Legend: T tokens, n streams, d hidden. `streams` is [T, n, d]; maps are fp32 (float64 in a float64 model).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csa_model.config import ModelConfig
from csa_model.layers import at_least_fp32, linear_fp32, without_autocast
from kernels.backend import RowOperations

FN_STD = 0.02


class _Sinkhorn(torch.autograd.Function):
    """Alternating row and column normalisation, differentiated through every iteration.

    Works on [n, n, T], where each step is a few long vector operations. Kept for the backward are the result and the sums of each step, from which
    the matrices in between are rebuilt: an n-th of what autograd would keep.
    """

    @staticmethod
    def forward(ctx, start: Tensor, iterations: int, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        matrix = start  # [n, n, T], rows already normalised by the softmax
        sums = []
        for step in range(2 * iterations - 1):
            total = matrix.sum(step % 2, keepdim=True).add_(eps)
            matrix = matrix / total
            sums.append(total)
        ctx.save_for_backward(matrix, *sums)
        return matrix

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        matrix, *sums = ctx.saved_tensors
        grad = grad.contiguous()
        for step in range(len(sums) - 1, -1, -1):
            grad = (grad - (grad * matrix).sum(step % 2, keepdim=True)).div_(sums[step])
            matrix = matrix * sums[step]
        return grad, None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices [n, n, T] from logits [n, n, T]: softmax over the second axis counts as the first row normalisation.

    The last step normalises columns (the sum over the first axis), so those sums are exact to `eps` and row sums to the convergence of `iterations`.
    """
    return _Sinkhorn.apply(logits.softmax(dim=1) + eps, iterations, eps)


class _Mix(torch.autograd.Function):
    """fn [R, n * d] applied to the flattened streams after an RMS norm without weight: [T, R], in fp32. Saves the streams in their own dtype."""

    @staticmethod
    def forward(ctx, streams: Tensor, fn: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        flat = at_least_fp32(streams.flatten(1))
        scale = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square_().div_(flat.shape[-1]).add_(eps).rsqrt_()
        mix = linear_fp32(flat, fn).mul_(scale)
        ctx.save_for_backward(streams, fn, scale, mix)
        return mix

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        streams, fn, scale, mix = ctx.saved_tensors
        flat, scaled = at_least_fp32(streams.flatten(1)), grad * scale
        through_norm = (grad * mix).sum(-1, keepdim=True).mul_(scale.square()).div_(-flat.shape[-1])
        with without_autocast(streams):
            grad_flat = torch.mm(scaled, at_least_fp32(fn)).addcmul_(flat, through_norm)
            grad_fn = torch.mm(scaled.t(), flat)
        return grad_flat.view(streams.shape).to(streams.dtype), grad_fn, None


class _Collapse(torch.autograd.Function):
    """sum_i weights[:, i] * streams[:, i] in fp32. Saves the streams in their own dtype."""

    @staticmethod
    def forward(ctx, weights: Tensor, streams: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weights, streams)
        return (at_least_fp32(streams) * weights[:, :, None]).sum(1).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        weights, streams = ctx.saved_tensors
        grad = at_least_fp32(grad)[:, None]
        return (at_least_fp32(streams) * grad).sum(-1), (weights[:, :, None] * grad).to(streams.dtype)


class _Expand(torch.autograd.Function):
    """out[:, k] = sum_j maps[:, k, j] * inputs[:, j], where the inputs are the n streams and, last, y; in fp32.

    Saves streams and y in their own dtype.
    """

    @staticmethod
    def forward(ctx, maps: Tensor, streams: Tensor, y: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(maps, streams, y)
        with without_autocast(streams):
            return torch.bmm(maps, _inputs(streams, y)).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        maps, streams, y = ctx.saved_tensors
        grad = at_least_fp32(grad)
        with without_autocast(streams):
            grad_maps = torch.bmm(grad, _inputs(streams, y).transpose(1, 2))
            grad_inputs = torch.bmm(maps.transpose(1, 2), grad)
        return grad_maps, grad_inputs[:, :-1].to(streams.dtype), grad_inputs[:, -1].to(y.dtype)


def _inputs(streams: Tensor, y: Tensor) -> Tensor:
    return torch.cat([at_least_fp32(streams), at_least_fp32(y)[:, None]], dim=1)


class HyperConnection(nn.Module):
    """Maps around one sublayer: `collapse` reads its input from the streams, `expand` writes its output back and mixes the streams.

    `around` is both, by the backend's kernels where it has them for this number of streams.
    """

    def __init__(self, config: ModelConfig, fused: RowOperations | None = None) -> None:
        super().__init__()
        hc = config.hyper_connections
        self.fused = fused if fused is not None and hc.hc_mult in fused.streams else None
        self.n, self.iterations, self.init_scale = hc.hc_mult, hc.hc_sinkhorn_iters, hc.init_scale
        self.hc_eps, self.norm_eps = hc.hc_eps, config.rms_norm_eps
        rows = self.n * (2 + self.n)  # n rows that read, n that write, n * n that mix (source stream major)
        self.fn = nn.Parameter(torch.empty(rows, self.n * config.hidden_size))
        self.scale = nn.Parameter(torch.empty(3))
        self.base = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=FN_STD)
        nn.init.constant_(self.scale, self.init_scale)
        nn.init.zeros_(self.base)

    def around(self, streams: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Input of the sublayer [T, d], and the function that turns the sublayer's output [T, d] into the new streams [T, n, d]."""
        if self.fused is None or torch.compiler.is_compiling():
            x, write, mix = self.collapse(streams)
            return x, lambda y: self.expand(streams, y, write, mix)
        return self.fused.around_sublayer(streams, self.fn, self.scale, self.base, self.iterations, self.hc_eps, self.norm_eps)

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """read [T, n], write [T, n] and mix [n, n, T] (first axis: source stream)."""
        return self.maps_of(_Mix.apply(streams, self.fn, self.norm_eps), self.scale, self.base)

    def maps_of(self, mix: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The maps from the projected streams mix [T, n (2 + n)]."""
        n = self.n
        read = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + self.hc_eps
        write = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).t().unflatten(0, (n, n))
        return read, write, sinkhorn(logits.contiguous(), self.iterations, self.hc_eps)

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [T, n, d] -> input of the sublayer [T, d], write [T, n], mix [n, n, T]."""
        read, write, mix = self.maps(streams)
        return _Collapse.apply(read, streams), write, mix

    def expand(self, streams: Tensor, y: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        """New streams: stream k receives write[k] * y and sum_j mix[j, k] * streams[j]."""
        maps = torch.cat([mix, write.t()[None]]).permute(2, 1, 0).contiguous()  # small strided matrices make a batched product crawl
        return _Expand.apply(maps, streams, y)


class HyperHead(nn.Module):
    """Collapses the streams before a final norm: streams [T, n, d] -> [T, d]."""

    def __init__(self, config: ModelConfig, fused: RowOperations | None = None) -> None:
        super().__init__()
        hc = config.hyper_connections
        self.fused = fused if fused is not None and hc.hc_mult in fused.streams else None
        self.hc_eps, self.norm_eps, self.init_scale = hc.hc_eps, config.rms_norm_eps, hc.init_scale
        self.fn = nn.Parameter(torch.empty(hc.hc_mult, hc.hc_mult * config.hidden_size))
        self.scale = nn.Parameter(torch.empty(1))
        self.base = nn.Parameter(torch.empty(hc.hc_mult))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fn, std=FN_STD)
        nn.init.constant_(self.scale, self.init_scale)
        nn.init.zeros_(self.base)

    def __call__(self, streams: Tensor) -> Tensor:
        # A compiled backward runs under the autocast around the call, not the one within: the products of its gradients would be rounded.
        with without_autocast(streams):
            collapsed: Tensor = super().__call__(streams)
        return collapsed

    def forward(self, streams: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # plain operations, as in layers.rms_norm: dynamo of torch 2.11 drops the gradients of the Functions below
            flat = at_least_fp32(streams.flatten(1))
            mix = linear_fp32(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
            weights = torch.sigmoid(mix * self.scale + self.base) + self.hc_eps
            return (at_least_fp32(streams) * weights[:, :, None]).sum(1).to(streams.dtype)
        if self.fused is not None:
            return self.fused.collapse_streams(streams, self.fn, self.scale, self.base, self.hc_eps, self.norm_eps)
        weights = torch.sigmoid(_Mix.apply(streams, self.fn, self.norm_eps) * self.scale + self.base) + self.hc_eps
        return _Collapse.apply(weights, streams)
