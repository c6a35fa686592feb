# SPDX-License-Identifier: Apache-2.0
"""Compressor: pools windows of m tokens into one entry with gates per channel; at ratio 4 each entry also pools the window before its own.

Legend: T tokens, C compressed entries of the row, m ratio, D entry dim, S slots pooled per entry (2m with overlap, else m).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from csa_model.config import INDEXED_RATIO
from csa_model.layers import Linear, RMSNorm, activation_dtype, at_least_fp32, without_autocast
from csa_model.rotary import norm_rotate
from csa_model.row import Row
from kernels.backend import RowOperations


class Compressor(nn.Module):
    """x [T, d] -> entries [C, D], normalised and rotated at the position of their window's first token (DeepSeek-V4 report, section 2.3).

    With overlap (ratio 4) the projections have two halves: the first serves a token as part of the previous window, the second as part of its own.
    """

    def __init__(self, hidden_size: int, dim: int, ratio: int, eps: float, std: float, fused: RowOperations | None = None) -> None:
        super().__init__()
        self.dim, self.ratio, self.overlap = dim, ratio, ratio == INDEXED_RATIO
        width = 2 * dim if self.overlap else dim
        self.wkv = Linear(hidden_size, width, std)
        self.wgate = Linear(hidden_size, width, std)
        self.ape = nn.Parameter(torch.zeros(ratio, width))  # learned bias of the gate per position in the window
        self.norm, self.fused = RMSNorm(dim, eps, fused), fused

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.ape)

    def forward(self, x: Tensor, row: Row) -> Tensor:
        windows = row.windows(self.ratio)
        tokens = windows.rows_of(x)
        if self.fused is not None and not torch.compiler.is_compiling():
            projected = _LinearOfBoth.apply(tokens, self.wkv.weight, self.wgate.weight, activation_dtype(x))
            pooled = self.fused.pool_windows(projected, self.ape, windows.starts_document, self.overlap)
        else:
            values = at_least_fp32(self.wkv(tokens)).unflatten(0, (-1, self.ratio))
            gates = at_least_fp32(self.wgate(tokens)).unflatten(0, (-1, self.ratio)) + self.ape
            pooled = self.pool(values, gates, windows.starts_document).to(activation_dtype(x))
        return norm_rotate(pooled, self.norm, self.norm.eps, row.entry_rotation(self.ratio), self.fused)

    def pool(self, values: Tensor, gates: Tensor, starts_document: Tensor) -> Tensor:
        """Gated sum over slots: values and gates [C, m, width] in fp32, starts_document bool [C] -> [C, D]."""
        if self.overlap:
            # Windows of one document are neighbours in the row, so the previous window is the previous entry; a document's first window has none.
            previous_gates = gates[..., : self.dim].roll(1, 0).masked_fill(starts_document[:, None, None], -torch.inf)
            gates = torch.cat([previous_gates, gates[..., self.dim :]], dim=1)
            values = torch.cat([values[..., : self.dim].roll(1, 0), values[..., self.dim :]], dim=1)
        return (gates.softmax(dim=1) * values).sum(dim=1)


class _LinearOfBoth(torch.autograd.Function):
    """x [N, d] times first.T and second.T in one product [N, 2w], in `dtype`; weights [w, d] each.

    The copy into one matrix is the one that autocast makes of each weight to round it. Of the backward, one product takes the place of two and their
    sum, and the gradients of the weights come from one product, summed in fp32 where CUDA can return that.
    """

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        count = first.shape[0]
        weight = torch.empty(count + second.shape[0], first.shape[1], dtype=dtype, device=x.device)
        weight[:count].copy_(first)
        weight[count:].copy_(second)
        ctx.dtypes, ctx.count = (x.dtype, first.dtype), count
        x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        with without_autocast(x):
            return torch.mm(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        grad_x = grad_first = grad_second = None
        with without_autocast(x):
            if ctx.needs_input_grad[0]:
                grad_x = torch.mm(grad, weight).to(x_dtype)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                wide = x.is_cuda and weight_dtype == torch.float32 != x.dtype and x.shape[0] > 0
                grad_weight = torch.mm(grad.t(), x, out_dtype=torch.float32) if wide else torch.mm(grad.t(), x).to(weight_dtype)
                grad_first, grad_second = grad_weight.split([ctx.count, grad_weight.shape[0] - ctx.count])
        return grad_x, grad_first, grad_second, None
