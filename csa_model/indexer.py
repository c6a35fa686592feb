# SPDX-License-Identifier: Apache-2.0
"""Lightning indexer of a CSA layer: small queries, keys and signed head weights whose scores choose the compressed entries a query attends to.

score[t, j] = sum_h index_w[t, h] * relu(index_q[t, h] . index_k[j]); scoring and selection are the backend's.
Legend: T tokens, C compressed entries, HI index heads, DI index head dim, d hidden, dq query rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from csa_model.compressor import Compressor
from csa_model.config import ModelConfig
from csa_model.layers import Linear, linear_fp32
from csa_model.rotary import rotate
from csa_model.row import Row
from kernels.backend import RowOperations


class Indexer(nn.Module):
    """(x [T, d], query_latent [T, dq]) -> index_q [T, HI, DI], index_k [C, DI], index_w [T, HI] (fp32, scales included).

    Both inputs are detached: the indexer learns from the indexer loss alone and that loss reaches nothing else (arXiv 2512.02556, section 2.1).
    """

    def __init__(self, config: ModelConfig, ratio: int, fused: RowOperations | None = None) -> None:
        super().__init__()
        self.heads, self.dim, self.ratio, self.fused = config.index_n_heads, config.index_head_dim, ratio, fused
        std = config.initializer_range
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, std)
        self.weights_proj = Linear(config.hidden_size, self.heads, std)
        self.compressor = Compressor(config.hidden_size, self.dim, ratio, config.rms_norm_eps, std, fused)

    def forward(self, x: Tensor, query_latent: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        x, query_latent = x.detach(), query_latent.detach()
        index_q = self.wq_b(query_latent).unflatten(-1, (self.heads, self.dim))
        index_q = rotate(index_q, row.token_rotation(self.ratio), fused=self.fused)
        index_k = self.compressor(x, row)
        index_w = linear_fp32(x, self.weights_proj.weight) * (self.dim * self.heads) ** -0.5
        return index_q, index_k, index_w
