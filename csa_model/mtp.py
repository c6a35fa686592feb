# SPDX-License-Identifier: Apache-2.0
"""One decoder block, and the multi-token prediction block that follows the last one.

Legend: T tokens, n streams, d hidden. `state` is [T, n, d] with hyper-connections and [T, d] without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from csa_model.attention import Attention, AttentionMode, CapturedLayer, IndexerRecord
from csa_model.config import ModelConfig
from csa_model.hyper_connections import HyperConnection, HyperHead
from csa_model.layers import Linear, RMSNorm
from csa_model.moe import MoE, RouterRecord, SwiGLU
from csa_model.row import Row
from kernels import Backend


@dataclass
class BlockOutput:
    """State after the block and the records of its sublayers."""

    state: Tensor
    indexer: IndexerRecord | None
    router: RouterRecord | None
    captured: CapturedLayer | None


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each inside a hyper-connection or, without them, a plain residual."""

    def __init__(self, config: ModelConfig, backend: Backend, layer: int) -> None:
        super().__init__()
        d, std_out = config.hidden_size, config.initializer_range * (2 * config.num_hidden_layers) ** -0.5
        fused = backend.row_operations()
        self.attn_norm, self.ffn_norm = (RMSNorm(d, config.rms_norm_eps, fused) for _ in range(2))
        self.attn = Attention(config, backend, layer, config.compress_ratios[layer])
        hashed = layer < min(config.moe.num_hash_layers, config.num_hidden_layers)  # the MTP block is always scored
        self.ffn: MoE | SwiGLU = (
            MoE(config, layer, hashed, std_out, fused) if config.moe.enabled else SwiGLU(config, config.moe.dense_intermediate_size, std_out, fused)
        )
        enabled = config.hyper_connections.enabled
        self.hc_attn, self.hc_ffn = (HyperConnection(config, fused) if enabled else None for _ in range(2))

    def forward(self, state: Tensor, token_ids: Tensor, row: Row, mode: AttentionMode, capture: bool = False) -> BlockOutput:
        x, put_back = _around(self.hc_attn, state)
        attention = self.attn(self.attn_norm(x), row, mode, capture)
        state = put_back(attention.y)
        x, put_back = _around(self.hc_ffn, state)
        x = self.ffn_norm(x)
        y, router = self.ffn(x, token_ids, row) if isinstance(self.ffn, MoE) else (self.ffn(x), None)
        return BlockOutput(put_back(y), attention.indexer, router, attention.captured)


def _around(connection: HyperConnection | None, state: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Input of a sublayer [T, d], and the function that turns the sublayer's output into the new state."""
    if connection is None:
        return state, lambda y: state + y
    return connection.around(state)


class MTPBlock(Block):
    """Predicts the token after the next: a block whose input joins the trunk's state at i with the embedding of token i + 1.

    Depth one, as in DeepSeek-V4: two d x d projections, an own stream head and norm; embedding and output head are the trunk's.
    """

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__(config, backend, config.num_hidden_layers)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = Linear(d, d, config.initializer_range), Linear(d, d, config.initializer_range)
        fused = backend.row_operations()
        self.enorm, self.hnorm, self.norm = (RMSNorm(d, eps, fused) for _ in range(3))
        self.hc_head = HyperHead(config, fused) if config.hyper_connections.enabled else None

    def join(self, state: Tensor, next_embedding: Tensor) -> Tensor:
        """Input state of the block from the trunk's last state and the embeddings [T, d] of the next tokens."""
        joined: Tensor = self.e_proj(self.enorm(next_embedding))
        if self.hc_head is not None:
            joined = joined[:, None]
        return joined + self.h_proj(self.hnorm(state))

    def head(self, state: Tensor) -> Tensor:
        """State after the block -> hidden [T, d], ready for the output head."""
        hidden: Tensor = self.norm(self.hc_head(state) if self.hc_head is not None else state)
        return hidden
