# SPDX-License-Identifier: Apache-2.0
"""The decoder: embedding, blocks, final norm and output head over one packed row.

Legend: T tokens, n streams, d hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from csa_model.attention import Attention, AttentionMode, CapturedLayer, IndexerRecord
from csa_model.config import INDEXED_RATIO, ConfigError, ModelConfig
from csa_model.hyper_connections import HyperHead
from csa_model.layers import Linear, RMSNorm, activation_dtype, linear_rounded
from csa_model.moe import RouterRecord
from csa_model.mtp import Block, BlockOutput, MTPBlock
from csa_model.row import RotaryTables, Row
from kernels import Backend, Geometry, PackedLayout

__all__ = ["AttentionMode", "Decoder", "DecoderOutput", "IndexerRecord", "RouterRecord"]


@dataclass
class DecoderOutput:
    """hidden [T, d] and mtp_hidden [T, d] stand behind their final norms; records come in layer order, the MTP block's last."""

    hidden: Tensor
    mtp_hidden: Tensor | None = None
    indexer: list[IndexerRecord] = field(default_factory=list)
    router: list[RouterRecord] = field(default_factory=list)


class Decoder(nn.Module):
    """DeepSeek-V4-style decoder. Without hyper-connections, MoE and MTP a plain pre-norm decoder remains.

    `device_type` and `dtype` say where the attention will run (default: CUDA where there is one, fp32) and `mode` what it will be asked for, so that
    a backend can refuse now and not in the first step.

    Raises:
        ConfigError: `compress_ratios` does not cover every layer and the MTP block.
        BackendUnsupported: the backend cannot run this geometry.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        *,
        device_type: str | None = None,
        dtype: torch.dtype = torch.float32,
        mode: AttentionMode | None = None,
    ) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        layers = config.num_hidden_layers
        ratios = config.compress_ratios[: layers + config.mtp.enabled]
        if len(ratios) < layers + config.mtp.enabled:
            raise ConfigError(
                f"model.compress_ratios has {len(ratios)} entries, but {layers} layers and {int(config.mtp.enabled)} MTP blocks need "
                f"{layers + config.mtp.enabled}: one per layer, then one for the MTP block"
            )
        backend.require(geometry(config, ratios, device_type or ("cuda" if torch.cuda.is_available() else "cpu"), dtype, mode or AttentionMode()))
        self.fused = backend.row_operations()
        self.ratios = set(ratios)
        self.rotary = RotaryTables(config)
        self.captured: list[CapturedLayer] | None = None
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed.weight, std=config.initializer_range)
        self.layers = nn.ModuleList(Block(config, backend, layer) for layer in range(layers))
        self.hc_head = HyperHead(config, self.fused) if config.hyper_connections.enabled else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.fused)
        self.head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        self.mtp = MTPBlock(config, backend) if config.mtp.enabled else None

    def forward(self, tokens: Tensor, layout: PackedLayout, mode: AttentionMode, next_tokens: Tensor | None = None) -> DecoderOutput:
        """One packed row through the decoder.

        Args:
            tokens: int64 [T] with T = layout.num_tokens; any legal id in padding.
            next_tokens: int64 [T], the token after each; negative where there is none. None leaves the MTP block out.
        """
        if tokens.shape != (layout.num_tokens,):
            raise ValueError(f"tokens must be [{layout.num_tokens}] as the layout says, got {list(tokens.shape)}")
        embedding = self._embed(tokens)
        row = Row(layout, self.rotary, self.ratios, torch.promote_types(self.embed.weight.dtype, torch.float32))
        state = embedding
        if self.hc_head is not None:
            state = embedding[:, None].expand(-1, self.config.hyper_connections.hc_mult, -1)
        output = DecoderOutput(embedding)
        for block in self.layers:
            state = self._run(block, state, tokens, row, mode, output)
        output.hidden = self.norm(self.hc_head(state) if self.hc_head is not None else state)
        if self.mtp is not None and next_tokens is not None:
            next_ids = next_tokens.clamp(min=0)
            joined = self.mtp.join(state, self._embed(next_ids))
            output.mtp_hidden = self.mtp.head(self._run(self.mtp, joined, next_ids, row, mode, output))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [T', V] of hidden [T', d].

        Under autocast both operands are rounded to its dtype (released checkpoints hold the head in bf16); the product is summed in fp32 and the
        logits are never rounded. Without autocast everything is fp32 (float64 in a float64 model).
        """
        return linear_rounded(hidden, self.head.weight)

    def indexer_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that the indexer loss trains."""
        return [(name, parameter) for name, parameter in self.named_parameters() if ".attn.indexer." in f".{name}"]

    def csa_layers(self) -> list[tuple[int, Attention]]:
        """Layer index and attention module of every layer with an indexer."""
        blocks = [*self.layers, *([self.mtp] if self.mtp is not None else [])]
        return [(block.attn.layer, block.attn) for block in blocks if block.attn.indexer is not None]

    def _embed(self, tokens: Tensor) -> Tensor:
        embedding: Tensor = self.embed(tokens)
        return embedding.to(activation_dtype(embedding))

    def _run(self, block: nn.Module, state: Tensor, tokens: Tensor, row: Row, mode: AttentionMode, output: DecoderOutput) -> Tensor:
        arguments = (state, tokens, row, mode, self.captured is not None)
        if self.config.recompute and torch.is_grad_enabled():
            result: BlockOutput = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            result = block(*arguments)
        if result.indexer is not None:
            output.indexer.append(result.indexer)
        if result.router is not None:
            output.router.append(result.router)
        if result.captured is not None and self.captured is not None:
            self.captured.append(result.captured)
        return result.state


def geometry(config: ModelConfig, ratios: tuple[int, ...], device_type: str, dtype: torch.dtype, mode: AttentionMode) -> Geometry:
    """What this model asks of a backend."""
    indexed = INDEXED_RATIO in ratios
    learns = indexed and mode.indexer_loss != "off"
    return Geometry(
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        ratios=ratios,
        topk=config.index_topk if indexed else None,
        index_heads=config.index_n_heads if indexed else None,
        index_head_dim=config.index_head_dim if indexed else None,
        dtype=dtype,
        device_type=device_type,
        teacher=mode.teacher if learns else None,
        support="dense" if mode.indexer_loss == "dense" else "sparse",
    )
