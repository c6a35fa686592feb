# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers: clamped SwiGLU, and DeepSeekMoE with hash-routed and scored layers.

Legend: T tokens, N documents, E experts, K experts per token, d hidden, f expert width, P = T * K (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from csa_model.config import ModelConfig
from csa_model.layers import Linear, activation_dtype, at_least_fp32, linear_fp32
from csa_model.row import Row
from kernels.backend import RowOperations


@dataclass
class RouterRecord:
    """Load of one scored layer. counts int64 [E]: real tokens per expert; balance_sum []: sum over documents of sum_i f_i * P_i, with gradient."""

    layer: int
    module: Gate
    counts: Tensor
    balance_sum: Tensor


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None, fused: RowOperations | None = None) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) [* weight], in fp32, returned in the dtype of `gate`.

    `fused`: the backend's form of it, if it has one; torch.compile fuses the plain form itself.
    """
    if fused is not None and not torch.compiler.is_compiling():
        return fused.swiglu(gate, up, limit, weight)
    hidden = F.silu(at_least_fp32(gate).clamp(max=limit)) * at_least_fp32(up).clamp(-limit, limit)
    return (hidden if weight is None else hidden * weight).to(gate.dtype)


class SwiGLU(nn.Module):
    """Clamped SwiGLU of one width: x [T, d] -> [T, d]."""

    def __init__(self, config: ModelConfig, width: int, std_out: float, fused: RowOperations | None = None) -> None:
        super().__init__()
        self.limit, self.fused = config.moe.swiglu_limit, fused
        self.w1 = Linear(config.hidden_size, width, config.initializer_range)
        self.w2 = Linear(width, config.hidden_size, std_out)
        self.w3 = Linear(config.hidden_size, width, config.initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit, fused=self.fused))
        return y


class Gate(nn.Module):
    """Chooses K experts per token and their weights.

    Scored: top K of score + bias, where the bias only balances the load and is moved by `update_router_biases`. Hash: a fixed table from token id to
    K distinct experts. Either way the weights come from the scores without bias: normalised, times `routed_scaling_factor`.
    """

    bias: Tensor
    tid2eid: Tensor

    def __init__(self, config: ModelConfig, hashed: bool, fused: RowOperations | None = None) -> None:
        super().__init__()
        moe, self.fused = config.moe, fused
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
        logits = linear_fp32(x, self.weight)
        if self.fused is not None and not torch.compiler.is_compiling():
            bias, given = (None, self.tid2eid[token_ids]) if self.hashed else (self.bias, None)
            return self.fused.route(logits, bias, given, self.topk, self.scaling)
        # softplus is exactly 0 in fp32 below -104, where the gradient of its square root would be NaN
        scores = torch.sqrt(F.softplus(logits) + 1e-20)
        experts = self.tid2eid[token_ids] if self.hashed else (scores.detach() + self.bias).topk(self.topk).indices
        weights = scores.gather(1, experts)
        return scores, experts, weights * (self.scaling / weights.sum(-1, keepdim=True))

    def balance(self, scores: Tensor, experts: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """counts int64 [E] over real tokens and the summed sequence-wise balance loss [] (arXiv 2412.19437, section 2.1.2).

        Per document: sum_i f_i P_i with f_i = E / (K * length) * tokens routed to i (the routing that happened, bias included) and P_i the mean of
        the scores normalised per token.
        """
        balance = self.fused.balance if self.fused is not None and not torch.compiler.is_compiling() else _Balance.apply
        balance_sum, load = balance(scores, experts, row.document_index, row.document_lengths)
        return load[:-1].sum(0, dtype=torch.int64), balance_sum


class _Balance(torch.autograd.Function):
    """Sum over documents of sum_i f_i P_i, and the tokens of each document per expert [N + 1, E]; the last row counts padding.

    Written over tokens, sum_t (sum_i factor[t, i] scores[t, i]) / (sum_i scores[t, i]) with factor = f of the token's document / its length, the
    gradient costs two more operations in the forward and one in the backward.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, experts: Tensor, document: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        number = scores.shape[1]
        cell = torch.add(experts, document[:, None], alpha=number).flatten()
        load = scores.new_zeros(lengths.numel() * number).scatter_add_(0, cell, scores.new_ones(()).expand(cell.shape)).view(-1, number)
        factor = (load / lengths.to(scores.dtype).square()[:, None]).mul_(number / experts.shape[1]).index_select(0, document)
        total = scores.sum(-1, keepdim=True)
        share = (scores * factor).sum(-1, keepdim=True).div_(total)
        ctx.save_for_backward(factor.sub_(share).div_(total))
        ctx.mark_non_differentiable(load)
        return share.sum(), load

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None, None


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
    """Whether `grouped_linear` takes torch's grouped GEMM for rows `x` of its dtype and weight [E, out, in]."""
    return grouped_gemm_takes(x.device.type, x.dtype, weight.shape[1], weight.shape[2])


def grouped_gemm_takes(device_type: str, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """torch's grouped GEMM wants CUDA, bf16 and rows of a multiple of 16 bytes."""
    return device_type == "cuda" and dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and rows % 8 == 0 and columns % 8 == 0


class _Order:
    """The P (token, expert) pairs sorted by expert, those of one expert by token.

    pair int64 [P]: number token * K + k of the pair at each place; token int64 [P]: its token; place int64 [P]: where each pair went; end int32 [E]:
    end of each expert's places, the last one P.
    """

    def __init__(self, experts: Tensor, number: int) -> None:
        keys = torch.uint8 if number <= 2**8 else torch.int16 if number <= 2**15 else torch.int64  # a radix sort passes over every byte of its keys
        of_pair, self.pair = experts.flatten().to(keys).sort(stable=True)
        self.topk = experts.shape[1]
        self.token = self.pair // self.topk
        self.place = torch.empty_like(self.pair).scatter_(0, self.pair, torch.arange(self.pair.numel(), device=self.pair.device))
        self.end = torch.searchsorted(of_pair, torch.arange(number, dtype=keys, device=of_pair.device), right=True, out_int32=True)


class _Gather(torch.autograd.Function):
    """x[source], where `places` [N, k] are all the places that row n of x went to. The backward gathers and sums: no atomic addition varies it."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, places: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(source, places)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        source, places = ctx.saved_tensors
        return _SumOf.apply(grad, source, places), None, None


class _SumOf(torch.autograd.Function):
    """Row n of the result is the sum of x over places[n]: the adjoint of _Gather."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, places: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(source, places)
        gathered = x.index_select(0, places.flatten())
        return gathered if places.shape[1] == 1 else gathered.unflatten(0, places.shape).sum(1).to(x.dtype)  # autocast sums into fp32 on CUDA

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        source, places = ctx.saved_tensors
        return _Gather.apply(grad, source, places), None, None


class Experts(nn.Module):
    """E clamped SwiGLU experts with stacked weights; nothing is ever dropped."""

    def __init__(self, config: ModelConfig, std_out: float, fused: RowOperations | None = None) -> None:
        super().__init__()
        moe = config.moe
        self.limit, self.std, self.std_out, self.fused = moe.swiglu_limit, config.initializer_range, std_out, fused
        self.w1 = nn.Parameter(torch.empty(moe.n_routed_experts, moe.moe_intermediate_size, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(moe.n_routed_experts, config.hidden_size, moe.moe_intermediate_size))
        self.w3 = nn.Parameter(torch.empty(moe.n_routed_experts, moe.moe_intermediate_size, config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w1, std=self.std)
        nn.init.normal_(self.w2, std=self.std_out)
        nn.init.normal_(self.w3, std=self.std)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
        """sum_k weights[t, k] * expert[experts[t, k]](x[t]) [+ plus[t]] -> [T, d].

        x [T, d]; experts int64 [T, K]; weights fp32 [T, K]; plus [T, d] in the dtype of the result.
        """
        x = x.to(activation_dtype(x))
        if self.fused is not None and not torch.compiler.is_compiling():
            pair, place, end = self.fused.order_pairs(experts, self.w1.shape[0])
            for_gate, for_up = self.fused.spread_rows(x, place)
            gate, up = grouped_linear(for_gate, self.w1, end), grouped_linear(for_up, self.w3, end)
            hidden = self.fused.swiglu(gate, up, self.limit, weights.reshape(-1, 1), pair)
            return self.fused.sum_rows(grouped_linear(hidden, self.w2, end), place, plus)
        order = _Order(experts, self.w1.shape[0])
        places = order.place.view(-1, order.topk)
        pairs = _Gather.apply(x, order.token, places)
        weight = _Gather.apply(weights.flatten(), order.pair, order.place[:, None])
        gate, up = grouped_linear(pairs, self.w1, order.end), grouped_linear(pairs, self.w3, order.end)
        hidden = clamped_swiglu(gate, up, self.limit, weight[:, None])
        y: Tensor = _SumOf.apply(grouped_linear(hidden, self.w2, order.end), order.token, places)
        return y if plus is None else y + plus


class MoE(nn.Module):
    """Routed experts plus a shared one: (x [T, d], token ids [T]) -> y [T, d] and, for a scored layer, its RouterRecord."""

    def __init__(self, config: ModelConfig, layer: int, hashed: bool, std_out: float, fused: RowOperations | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Gate(config, hashed, fused)
        self.experts = Experts(config, std_out, fused)
        shared = config.moe.n_shared_experts
        self.shared_experts = SwiGLU(config, shared * config.moe.moe_intermediate_size, std_out, fused) if shared else None

    def forward(self, x: Tensor, token_ids: Tensor, row: Row) -> tuple[Tensor, RouterRecord | None]:
        scores, experts, weights = self.gate(x, token_ids)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        y = self.experts(x, experts, weights * row.is_real[:, None], shared)
        if self.gate.hashed:
            return y, None
        counts, balance_sum = self.gate.balance(scores, experts, row)
        return y, RouterRecord(self.layer, self.gate, counts, balance_sum)


@torch.no_grad()
def update_router_biases(gates: Sequence[Gate], loads: Tensor, rate: float) -> None:
    """Move each expert's bias by `rate` towards the mean load: up if underloaded, down if overloaded (arXiv 2408.15664).

    Args:
        loads: tokens per gate and expert [L, E], summed over the micro-batches and ranks of one optimizer step.
    """
    biases = [gate.bias for gate in gates]
    loads = loads.to(biases[0].dtype)
    torch._foreach_add_(biases, list((rate * torch.sign(loads.mean(1, keepdim=True) - loads)).unbind()))
