# SPDX-License-Identifier: Apache-2.0
"""Compressor: pools windows of m tokens into one entry with gates per channel; at ratio 4 each entry also pools the window before its own.

Legend: T tokens, C compressed entries of the row, m ratio, D entry dim, S slots pooled per entry (2m with overlap, else m).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from csa_model.config import INDEXED_RATIO
from csa_model.layers import Linear, RMSNorm, activation_dtype, at_least_fp32
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
        tokens = x.index_select(0, windows.token_ids)
        values = at_least_fp32(self.wkv(tokens)).unflatten(0, (-1, self.ratio))
        gates = at_least_fp32(self.wgate(tokens)).unflatten(0, (-1, self.ratio)) + self.ape
        pooled = self.pool(values, gates, windows.starts_document)
        return norm_rotate(pooled.to(activation_dtype(x)), self.norm, self.norm.eps, row.entry_rotation(self.ratio), self.fused)

    def pool(self, values: Tensor, gates: Tensor, starts_document: Tensor) -> Tensor:
        """Gated sum over slots: values and gates [C, m, width] in fp32, starts_document bool [C] -> [C, D]."""
        if self.overlap:
            # Windows of one document are neighbours in the row, so the previous window is the previous entry; a document's first window has none.
            previous_gates = gates[..., : self.dim].roll(1, 0).masked_fill(starts_document[:, None, None], -torch.inf)
            gates = torch.cat([previous_gates, gates[..., self.dim :]], dim=1)
            values = torch.cat([values[..., : self.dim].roll(1, 0), values[..., self.dim :]], dim=1)
        return (gates.softmax(dim=1) * values).sum(dim=1)
