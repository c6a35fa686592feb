# SPDX-License-Identifier: Apache-2.0
"""Load of the experts by document, and the sequence-wise balance loss from it; fp32, in two kernels.

    f[n, i] = E / (K * length[n]) * load[n, i]        balance = sum over documents n and experts i of f[n, i] * P[n, i]

with P[n, i] the mean over the document's tokens of s[t, i] / total[t], total[t] = sum over i of s[t, i]. Written over tokens, with
factor[t, i] = f[n, i] / length[n] of the token's document n, the gradient is at hand as well:
    share[t] = sum over i of factor[t, i] * s[t, i] / total[t]        balance = sum over t of share[t]
    d s[t, i] = (factor[t, i] - share[t]) / total[t]

The load is counted in integers, so that the order of the atomic additions does not show; shares are summed in a fixed order.

Legend: T tokens, N documents, E experts, K experts per token, P = T * K pairs.
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

NO_DOCUMENT = tl.constexpr(2**31 - 1)
_BLOCK_P = 256  # pairs of one program that counts
_BLOCK_E = 32  # experts of one program that counts


@triton.jit
def load_kernel(EXPERTS, DOCUMENT, LOAD, pairs, E: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    chosen = tl.load(EXPERTS + pair, mask=pair < pairs, other=-1).to(tl.int32)
    document = tl.load(DOCUMENT + pair // K, mask=pair < pairs, other=NO_DOCUMENT).to(tl.int32)
    now = tl.min(document, 0)
    while now < NO_DOCUMENT:  # once for each document of these pairs
        count = tl.sum(((chosen[None, :] == expert[:, None]) & (document[None, :] == now)).to(tl.int32), 1)
        tl.atomic_add(LOAD + now.to(tl.int64) * E + expert, count, mask=count > 0, sem="relaxed")
        now = tl.min(tl.where(document > now, document, NO_DOCUMENT), 0)


@triton.jit
def balance_kernel(SCORES, DOCUMENT, LENGTHS, LOAD, SLOPE, SHARES, tokens, scale, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    here = token < tokens
    real = here[:, None] & (expert < E)[None, :]
    offset = token[:, None] * E + expert[None, :]
    score = tl.load(SCORES + offset, mask=real, other=0.0)
    document = tl.load(DOCUMENT + token, mask=here, other=0)
    length = tl.load(LENGTHS + document, mask=here, other=1.0)
    load = tl.load(LOAD + document[:, None] * E + expert[None, :], mask=real, other=0)
    factor = load.to(tl.float32) / (length * length)[:, None] * scale
    total = tl.where(here, tl.sum(score, 1), 1.0)
    share = tl.sum(score * factor, 1) / total
    tl.store(SLOPE + offset, (factor - share[:, None]) / total[:, None], mask=real)
    tl.store(SHARES + tl.program_id(0), tl.sum(share, 0))


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, experts: Tensor, document: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        scores, experts, document, lengths = scores.contiguous(), experts.contiguous(), document.contiguous(), lengths.contiguous()
        (tokens, number), topk = scores.shape, experts.shape[1]
        load, slope = torch.zeros(lengths.numel(), number, dtype=torch.int32, device=scores.device), torch.empty_like(scores)
        pairs, count_e, block_e = experts.numel(), min(_BLOCK_E, power_of_two(number)), power_of_two(number)
        block_t = max(1, 1024 // block_e)
        shares = torch.empty(ceil_div(tokens, block_t), dtype=torch.float32, device=scores.device)
        if tokens:
            sizes = {"E": number, "num_warps": 4}
            with on_device_of(scores):
                grid = (ceil_div(pairs, _BLOCK_P), ceil_div(number, count_e))
                load_kernel[grid](experts, document, load, pairs, K=topk, BLOCK_P=_BLOCK_P, BLOCK_E=count_e, **sizes)
                operands = (scores, document, lengths, load, slope, shares, tokens, number / topk)
                balance_kernel[(shares.numel(),)](*operands, BLOCK_T=block_t, BLOCK_E=block_e, **sizes)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(load)
        return shares.sum(), load

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None, None


def balance(scores: Tensor, experts: Tensor, document: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The balance loss summed over documents, fp32 [], with gradient to the scores, and the load int32 [N + 1, E]: pairs per document and expert.

    Args:
        scores: fp32 [T, E], positive. experts: int64 [T, K], ids below E.
        document: int64 [T], from 0 to N, where N stands for no document. lengths: fp32 [N + 1], tokens of each document, infinity at N.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 [T, E], got {list(scores.shape)} in {scores.dtype}")
    tokens = scores.shape[0]
    if experts.dim() != 2 or experts.shape[0] != tokens or experts.dtype != torch.int64:
        raise ValueError(f"experts must be int64 [{tokens}, K], got {list(experts.shape)} in {experts.dtype}")
    if document.shape != (tokens,) or document.dtype != torch.int64:
        raise ValueError(f"document must be int64 [{tokens}], got {list(document.shape)} in {document.dtype}")
    if lengths.dim() != 1 or lengths.dtype != torch.float32:
        raise ValueError(f"lengths must be float32 [N + 1], got {list(lengths.shape)} in {lengths.dtype}")
    total, load = _Balance.apply(scores, experts, document, lengths)
    return total, load
