# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers: clamped SwiGLU, and DeepSeekMoE with hash-routed and scored layers.

Legend: T tokens, N documents, E experts, K experts per token, d hidden, f expert width, P = T * K (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csa_model.config import ModelConfig
from csa_model.layers import Linear, activation_dtype, at_least_fp32, linear_fp32
from csa_model.row import Row


@dataclass
class RouterRecord:
    """Load of one scored layer. counts int64 [E]: real tokens per expert; balance_sum []: sum over documents of sum_i f_i * P_i, with gradient."""

    layer: int
    module: Gate
    counts: Tensor
    balance_sum: Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) [* weight], in fp32, returned in the dtype of `gate`."""
    hidden = F.silu(at_least_fp32(gate).clamp(max=limit)) * at_least_fp32(up).clamp(-limit, limit)
    return (hidden if weight is None else hidden * weight).to(gate.dtype)


class SwiGLU(nn.Module):
    """Clamped SwiGLU of one width: x [T, d] -> [T, d]."""

    def __init__(self, config: ModelConfig, width: int, std_out: float) -> None:
        super().__init__()
        self.limit = config.moe.swiglu_limit
        self.w1 = Linear(config.hidden_size, width, config.initializer_range)
        self.w2 = Linear(width, config.hidden_size, std_out)
        self.w3 = Linear(config.hidden_size, width, config.initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit))
        return y


class Gate(nn.Module):
    """Chooses K experts per token and their weights.

    Scored: top K of score + bias, where the bias only balances the load and is moved by `update_router_biases`. Hash: a fixed table from token id to
    K distinct experts. Either way the weights come from the scores without bias: normalised, times `routed_scaling_factor`.
    """

    bias: Tensor
    tid2eid: Tensor

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        super().__init__()
        moe = config.moe
        self.experts, self.topk, self.scaling, self.hashed = moe.n_routed_experts, moe.num_experts_per_tok, moe.routed_scaling_factor, hashed
        self.std = config.initializer_range
        self.weight = nn.Parameter(torch.empty(self.experts, config.hidden_size))
        if hashed:
            self.register_buffer("tid2eid", torch.empty(config.vocab_size, self.topk, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(self.experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.hashed:  # a uniformly random K-subset per token id, from torch's seed
            self.tid2eid.copy_(torch.rand(self.tid2eid.shape[0], self.experts, device=self.tid2eid.device).topk(self.topk).indices)
        else:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """scores fp32 [T, E], expert ids int64 [T, K], weights fp32 [T, K]."""
        # softplus is exactly 0 in fp32 below -104, where the gradient of its square root would be NaN
        scores = torch.sqrt(F.softplus(linear_fp32(x, self.weight)) + 1e-20)
        experts = self.tid2eid[token_ids] if self.hashed else (scores.detach() + self.bias).topk(self.topk).indices
        weights = scores.gather(1, experts)
        return scores, experts, weights * (self.scaling / weights.sum(-1, keepdim=True))

    def balance(self, scores: Tensor, experts: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """counts int64 [E] over real tokens and the summed sequence-wise balance loss [] (arXiv 2412.19437, section 2.1.2).

        Per document: sum_i f_i P_i with f_i = E / (K * length) * tokens routed to i (the routing that happened, bias included) and P_i the mean of
        the scores normalised per token.
        """
        documents = row.layout.cu_seqlens.numel() - 1
        index = torch.where(row.is_real, row.layout.document_of_token, documents).long()  # padding goes to a row of its own
        chosen = torch.zeros_like(scores).scatter_(1, experts, 1.0)
        shares = scores / scores.sum(-1, keepdim=True)
        zeros = scores.new_zeros(documents + 1, self.experts)
        load = zeros.index_add(0, index, chosen)[:documents]
        share = zeros.index_add(0, index, shares)[:documents]
        lengths = row.layout.cu_seqlens.diff().clamp(min=1).to(scores.dtype)
        balance_sum = ((load * share).sum(-1) / lengths.square()).sum() * (self.experts / self.topk)
        return load.sum(0).long(), balance_sum


class _GroupedLinear(torch.autograd.Function):
    """y[p] = weight[e(p)] @ x[p] for pairs sorted by expert, as one GEMM per expert."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.bounds = [0, *offsets.tolist()]
        out = x.new_empty(x.shape[0], weight.shape[1])
        for e, (start, stop) in enumerate(zip(ctx.bounds, ctx.bounds[1:], strict=False)):
            torch.mm(x[start:stop], weight[e].t(), out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        for e, (start, stop) in enumerate(zip(ctx.bounds, ctx.bounds[1:], strict=False)):
            torch.mm(grad[start:stop], weight[e], out=grad_x[start:stop])
            torch.mm(grad[start:stop].t(), x[start:stop], out=grad_weight[e])
        return grad_x, grad_weight, None


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of x [P, in], sorted by expert, through weight [E, out, in]; offsets int32 [E]: end of each expert's rows, the last one P.

    bf16 on CUDA takes torch's grouped GEMM, which reads the offsets on the device; everything else runs one GEMM per expert.
    """
    weight = weight.to(x.dtype)
    if grouped_gemm_applies(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    return _GroupedLinear.apply(x, weight, offsets)


def grouped_gemm_applies(x: Tensor, weight: Tensor) -> bool:
    """torch's grouped GEMM wants CUDA, bf16 and rows of a multiple of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0


def _to_pairs(x: Tensor, order: Tensor, topk: int) -> Tensor:
    return x.index_select(0, order // topk)


def _to_tokens(pairs: Tensor, inverse: Tensor, topk: int) -> Tensor:
    return pairs.index_select(0, inverse).unflatten(0, (-1, topk)).sum(1)


class _Dispatch(torch.autograd.Function):
    """Token rows [T, d] copied into expert order [P, d]. Its backward gathers and sums: no atomic addition makes it vary."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        ctx.topk = topk
        return _to_pairs(x, order, topk)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return _to_tokens(grad, inverse, ctx.topk), None, None, None


class _Combine(torch.autograd.Function):
    """Rows in expert order [P, d] summed per token [T, d]: the adjoint of _Dispatch."""

    @staticmethod
    def forward(ctx, pairs: Tensor, order: Tensor, inverse: Tensor, topk: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order)
        ctx.topk = topk
        return _to_tokens(pairs, inverse, topk)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        return _to_pairs(grad, order, ctx.topk), None, None, None


class Experts(nn.Module):
    """E clamped SwiGLU experts with stacked weights; nothing is ever dropped."""

    def __init__(self, config: ModelConfig, std_out: float) -> None:
        super().__init__()
        moe = config.moe
        self.limit, self.std, self.std_out = moe.swiglu_limit, config.initializer_range, std_out
        self.w1 = nn.Parameter(torch.empty(moe.n_routed_experts, moe.moe_intermediate_size, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(moe.n_routed_experts, config.hidden_size, moe.moe_intermediate_size))
        self.w3 = nn.Parameter(torch.empty(moe.n_routed_experts, moe.moe_intermediate_size, config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w1, std=self.std)
        nn.init.normal_(self.w2, std=self.std_out)
        nn.init.normal_(self.w3, std=self.std)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """sum_k weights[t, k] * expert[experts[t, k]](x[t]): x [T, d], experts int64 [T, K], weights fp32 [T, K] -> [T, d]."""
        topk = experts.shape[1]
        of_pair, order = experts.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        offsets = torch.searchsorted(of_pair, torch.arange(self.w1.shape[0], device=order.device), right=True).int()
        pairs = _Dispatch.apply(x.to(activation_dtype(x)), order, inverse, topk)
        gate, up = grouped_linear(pairs, self.w1, offsets), grouped_linear(pairs, self.w3, offsets)
        hidden = clamped_swiglu(gate, up, self.limit, weights.flatten()[order, None])
        y: Tensor = _Combine.apply(grouped_linear(hidden, self.w2, offsets), order, inverse, topk)
        return y


class MoE(nn.Module):
    """Routed experts plus a shared one: (x [T, d], token ids [T]) -> y [T, d] and, for a scored layer, its RouterRecord."""

    def __init__(self, config: ModelConfig, layer: int, hashed: bool, std_out: float) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Gate(config, hashed)
        self.experts = Experts(config, std_out)
        shared = config.moe.n_shared_experts
        self.shared_experts = SwiGLU(config, shared * config.moe.moe_intermediate_size, std_out) if shared else None

    def forward(self, x: Tensor, token_ids: Tensor, row: Row) -> tuple[Tensor, RouterRecord | None]:
        scores, experts, weights = self.gate(x, token_ids)
        y = self.experts(x, experts, weights * row.is_real[:, None])
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        if self.gate.hashed:
            return y, None
        counts, balance_sum = self.gate.balance(scores, experts, row)
        return y, RouterRecord(self.layer, self.gate, counts, balance_sum)


@torch.no_grad()
def update_router_biases(counts: Iterable[tuple[Gate, Tensor]], rate: float) -> None:
    """Move each expert's bias by `rate` towards the mean load: up if underloaded, down if overloaded (arXiv 2408.15664).

    `counts`: pairs of gate and tokens per expert [E], summed over the micro-batches and ranks of one optimizer step.
    """
    for gate, load in counts:
        load = load.to(gate.bias.dtype)
        gate.bias += rate * torch.sign(load.mean() - load)
