# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts from its logits: scores, chosen experts and their weights, in one kernel each way; fp32.

    s = sqrt(softplus(z) + FLOOR)        weight[k] = scaling * s[expert k] / total, total = sum over k of s[expert k]

The backward, with g the gradient of the weights and dot = sum over k of g[k] * s[expert k]:
    ds[expert k] += scaling / total * (g[k] - dot / total)        dz = ds * sigmoid(z) / (2 s)

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.rounding import ceil_div, power_of_two

FLOOR = tl.constexpr(1e-20)  # softplus is exactly 0 in fp32 below -104, where the gradient of its square root would be NaN


@triton.jit
def _softplus(z):
    """log(1 + exp(z)) to a few units in the last place: the logarithm of the GPU is too coarse near 1, so 2 artanh(t / (2 + t)) as a series."""
    t = tl.exp(-tl.abs(z))
    s = t / (2.0 + t)
    q = s * s
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15)))))))
    return tl.where(z > 0, z, 0.0) + 2.0 * s * series


@triton.jit
def route_kernel(
    LOGITS,
    BIAS,
    GIVEN,
    SCORES,
    EXPERTS,
    WEIGHTS,
    tokens,
    scaling,
    CHOOSES: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    here = token < tokens
    real = here[:, None] & (expert < E)[None, :]
    offset = token[:, None] * E + expert[None, :]
    score = tl.sqrt(_softplus(tl.load(LOGITS + offset, mask=real, other=0.0)) + FLOOR)
    tl.store(SCORES + offset, score, mask=real)
    if CHOOSES:
        left = tl.where(real, score + tl.load(BIAS + expert, mask=expert < E, other=0.0)[None, :], float("-inf"))
    total = tl.zeros([BLOCK_T], tl.float32)
    weight = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        if CHOOSES:
            best = tl.max(left, 1)
            chosen = tl.min(tl.where(left == best[:, None], expert[None, :], E - 1), 1)  # the lower of equals; of NaN some expert
            left = tl.where(expert[None, :] == chosen[:, None], float("-inf"), left)
            tl.store(EXPERTS + token * K + k, chosen.to(tl.int64), mask=here)
        else:
            chosen = tl.load(GIVEN + token * K + k, mask=here, other=0).to(tl.int32)
        value = tl.sum(tl.where(expert[None, :] == chosen[:, None], score, 0.0), 1)
        weight = tl.where(slot[None, :] == k, value[:, None], weight)
        total += value
    weight = weight * (scaling / total)[:, None]
    tl.store(WEIGHTS + token[:, None] * K + slot[None, :], weight, mask=here[:, None] & (slot < K)[None, :])


@triton.jit
def route_backward_kernel(
    LOGITS,
    SCORES,
    EXPERTS,
    GRAD_SCORES,
    GRAD_WEIGHTS,
    GRAD_LOGITS,
    tokens,
    scaling,
    SCORED: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    here = token < tokens
    real = here[:, None] & (expert < E)[None, :]
    offset = token[:, None] * E + expert[None, :]
    score = tl.load(SCORES + offset, mask=real, other=1.0)
    total = tl.zeros([BLOCK_T], tl.float32)
    dot = tl.zeros([BLOCK_T], tl.float32)
    for k in tl.static_range(K):
        chosen = tl.load(EXPERTS + token * K + k, mask=here, other=0).to(tl.int32)
        value = tl.sum(tl.where(expert[None, :] == chosen[:, None], score, 0.0), 1)
        total += value
        dot += value * tl.load(GRAD_WEIGHTS + token * K + k, mask=here, other=0.0)
    if SCORED:
        grad = tl.load(GRAD_SCORES + offset, mask=real, other=0.0)
    else:
        grad = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for k in tl.static_range(K):
        chosen = tl.load(EXPERTS + token * K + k, mask=here, other=0).to(tl.int32)
        slope = (tl.load(GRAD_WEIGHTS + token * K + k, mask=here, other=0.0) - dot / total) * (scaling / total)
        grad += tl.where(expert[None, :] == chosen[:, None], slope[:, None], 0.0)
    logit = tl.load(LOGITS + offset, mask=real, other=0.0)
    tl.store(GRAD_LOGITS + offset, grad * tl.sigmoid(logit) / (2.0 * score), mask=real)


def _tiles(logits: Tensor, topk: int) -> dict[str, int]:
    block_e = power_of_two(logits.shape[1])
    return {"E": logits.shape[1], "K": topk, "BLOCK_T": max(1, 2048 // block_e), "BLOCK_E": block_e, "num_warps": 4}


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, given: Tensor | None, topk: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        logits, tokens = logits.contiguous(), logits.shape[0]
        scores, weights = torch.empty_like(logits), torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
        experts = torch.empty(tokens, topk, dtype=torch.int64, device=logits.device) if given is None else given.contiguous()
        if tokens:
            tiles = _tiles(logits, topk)
            operands = (logits, logits if bias is None else bias, experts, scores, experts, weights, tokens, scaling)
            with on_device_of(logits):
                route_kernel[(ceil_div(tokens, tiles["BLOCK_T"]),)](*operands, CHOOSES=given is None, BLOCK_K=power_of_two(topk), **tiles)
        ctx.save_for_backward(logits, scores, experts)
        ctx.scaling = scaling
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts)
        return scores, experts, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor | None, _: Any, grad_weights: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, scores, experts = ctx.saved_tensors
        grad, tokens = torch.empty_like(logits), logits.shape[0]
        grad_weights = torch.zeros(experts.shape, device=logits.device) if grad_weights is None else grad_weights.contiguous()
        if tokens:
            tiles = _tiles(logits, experts.shape[1])
            operands = (logits, scores, experts, logits if grad_scores is None else grad_scores.contiguous(), grad_weights, grad, tokens, ctx.scaling)
            with on_device_of(logits):
                route_backward_kernel[(ceil_div(tokens, tiles["BLOCK_T"]),)](*operands, SCORED=grad_scores is not None, **tiles)
        return grad, None, None, None, None


def route(logits: Tensor, bias: Tensor | None, given: Tensor | None, topk: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """scores fp32 [T, E], expert ids int64 [T, K] and weights fp32 [T, K] from logits fp32 [T, E].

    Args:
        bias: fp32 [E], added to the scores when the K highest are chosen (the lower id of equals); no gradient.
        given: int64 [T, K], the experts, in place of bias; one of the two is None.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or not 0 < topk <= logits.shape[1]:
        raise ValueError(f"logits must be float32 [T, E] with E >= {topk} experts per token, got {list(logits.shape)} in {logits.dtype}")
    if (bias is None) == (given is None):
        raise ValueError("route takes either the bias or the experts")
    if bias is not None and (bias.shape != logits.shape[1:] or bias.dtype != torch.float32):
        raise ValueError(f"bias must be float32 [{logits.shape[1]}], got {list(bias.shape)} in {bias.dtype}")
    if given is not None and (given.shape != (logits.shape[0], topk) or given.dtype != torch.int64):
        raise ValueError(f"the experts must be int64 [{logits.shape[0]}, {topk}], got {list(given.shape)} in {given.dtype}")
    scores, experts, weights = _Route.apply(logits, bias, given, topk, scaling)
    return scores, experts, weights
