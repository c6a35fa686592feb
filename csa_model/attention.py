# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer: window only (ratio 0), CSA (ratio 4, entries chosen by the indexer) or HCA (larger ratios, every visible entry).

Legend: T tokens, C compressed entries of the row, H heads, D head dim, d hidden, dq query rank, g output groups, dg output rank, W window, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from csa_model.compressor import Compressor
from csa_model.config import INDEXED_RATIO, ConfigError, ModelConfig, StageConfig
from csa_model.indexer import Indexer
from csa_model.layers import Linear, RMSNorm, grouped_projection
from csa_model.rotary import norm_rotate, rotate
from csa_model.row import Row
from kernels import ALL_VISIBLE, Backend, IndexerStats, PackedLayout
from kernels.backend import Selection, Teacher

if TYPE_CHECKING:
    from csa_model.decoder import Decoder


@dataclass(frozen=True)
class AttentionMode:
    """What CSA layers attend to, and which set the indexer loss runs over: "sparse" the selected entries, "dense" every visible one."""

    attention: Literal["dense", "sparse"] = "sparse"
    indexer_loss: Literal["off", "dense", "sparse"] = "off"
    teacher: Teacher = "full_csa"

    @classmethod
    def from_config(cls, stage: StageConfig, teacher: str) -> AttentionMode:
        """Mode of a training stage; teacher "none" switches the indexer loss off."""
        if teacher == "none":
            return cls(stage.attention, "off")
        if teacher not in ("full_csa", "compressed_only"):
            raise ConfigError(f"teacher.name={teacher!r} is not legal; legal values: full_csa, compressed_only, none")
        return cls(stage.attention, stage.indexer_loss, teacher)  # type: ignore[arg-type]


@dataclass
class IndexerRecord:
    """Indexer loss of one CSA layer. kl_sum [] carries the gradient (its value may be 0 in the forward); stats holds the values to log."""

    layer: int
    ratio: int
    kl_sum: Tensor
    stats: IndexerStats


@dataclass(frozen=True)
class CapturedLayer:
    """Detached inputs and outputs of one CSA layer, shaped as the backend takes them; `selected` is what the attention read."""

    layer: int
    q: Tensor
    window_kv: Tensor
    compressed_kv: Tensor
    sink: Tensor
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor
    selected: Selection
    out: Tensor
    lse: Tensor
    layout: PackedLayout
    ratio: int
    window: int
    scale: float


@dataclass
class AttentionOutput:
    """y [T, d]; `indexer` where an indexer loss ran; `captured` where it was asked for. Records are returned, not stored, so that recomputing a
    block in the backward pass cannot count one twice."""

    y: Tensor
    indexer: IndexerRecord | None = None
    captured: CapturedLayer | None = None


class Attention(nn.Module):
    """Low-rank queries, one shared head whose keys are its values, sink, window and compressed entries, grouped low-rank output."""

    def __init__(self, config: ModelConfig, backend: Backend, layer: int, ratio: int) -> None:
        super().__init__()
        self.backend, self.fused, self.layer, self.ratio = backend, backend.row_operations(), layer, ratio
        self.heads, self.head_dim, self.groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.window, self.topk, self.eps = config.sliding_window, config.index_topk, config.rms_norm_eps
        self.softmax_scale: float = self.head_dim**-0.5
        d, std = config.hidden_size, config.initializer_range
        self.wq_a = Linear(d, config.q_lora_rank, std)
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps, self.fused)
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.head_dim, std)
        self.wkv = Linear(d, self.head_dim, std)
        self.kv_norm = RMSNorm(self.head_dim, self.eps, self.fused)
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.wo_a = Linear(self.heads * self.head_dim // self.groups, self.groups * config.o_lora_rank, std)  # g blocks of dg rows
        self.wo_b = Linear(self.groups * config.o_lora_rank, d, std * (2 * config.num_hidden_layers) ** -0.5)
        self.compressor = Compressor(d, self.head_dim, ratio, self.eps, std, self.fused) if ratio else None
        self.indexer = Indexer(config, ratio, self.fused) if ratio == INDEXED_RATIO else None

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.attn_sink)

    def forward(self, x: Tensor, row: Row, mode: AttentionMode, capture: bool = False) -> AttentionOutput:
        """x [T, d] (normalised) -> AttentionOutput."""
        rotation = row.token_rotation(self.ratio)
        query_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(query_latent).unflatten(-1, (self.heads, self.head_dim))
        q = norm_rotate(q, None, self.eps, rotation, self.fused)
        window_kv = norm_rotate(self.wkv(x), self.kv_norm, self.eps, rotation, self.fused)
        compressed_kv = self.compressor(x, row) if self.compressor is not None else None
        if self.indexer is not None and compressed_kv is not None:
            result = self._indexed(x, query_latent, q, window_kv, compressed_kv, row, mode, capture)
        else:
            selected = None if compressed_kv is None else ALL_VISIBLE
            out, _ = self.backend.attend(
                q, window_kv, compressed_kv, selected, self.attn_sink, row.layout, self.ratio, self.window, self.softmax_scale
            )
            result = AttentionOutput(out)
        result.y = self.project(rotate(result.y, rotation, inverse=True, fused=self.fused))
        return result

    def project(self, out: Tensor) -> Tensor:
        """out [T, H, D] -> [T, d]: consecutive heads form a group, each group is projected to dg, all groups together to d."""
        grouped = out.unflatten(1, (self.groups, -1)).flatten(2)
        y: Tensor = self.wo_b(grouped_projection(grouped, self.wo_a.weight.unflatten(0, (self.groups, -1))).flatten(1))
        return y

    def _indexed(
        self, x: Tensor, query_latent: Tensor, q: Tensor, window_kv: Tensor, compressed_kv: Tensor, row: Row, mode: AttentionMode, capture: bool
    ) -> AttentionOutput:
        """Attention over the entries that the indexer selects (or all), with the indexer loss if it is on; y is still [T, H, D]."""
        assert self.indexer is not None
        learns = mode.indexer_loss != "off"
        selects = self.topk is not None and "sparse" in (mode.attention, mode.indexer_loss)
        index: tuple[Tensor, Tensor, Tensor] | None = None
        if learns or selects or capture:
            with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                index = self.indexer(x, query_latent, row)
        chosen: Selection = ALL_VISIBLE
        if index is not None and self.topk is not None and selects:
            chosen = self.backend.select(*index, row.layout, self.ratio, self.topk)
        selected: Selection = chosen if mode.attention == "sparse" else ALL_VISIBLE
        support: Selection = chosen if mode.indexer_loss == "sparse" else ALL_VISIBLE
        sink, layout, ratio, window, scale = self.attn_sink, row.layout, self.ratio, self.window, self.softmax_scale
        record = None
        if index is not None and learns and selected is support and q.requires_grad and index[0].requires_grad:
            out, lse, kl_sum, stats = self.backend.attend_with_indexer_loss(
                *index, selected, q, window_kv, compressed_kv, sink, layout, ratio, window, scale, teacher=mode.teacher
            )
            record = IndexerRecord(self.layer, ratio, kl_sum, stats)
        else:
            out, lse = self.backend.attend(q, window_kv, compressed_kv, selected, sink, layout, ratio, window, scale)
            if index is not None and learns:
                known = lse if selected is support else None
                kl_sum, rows = self.backend.indexer_loss(
                    *index, support, q, window_kv, compressed_kv, sink, known, layout, ratio, window, scale, teacher=mode.teacher
                )
                record = IndexerRecord(self.layer, ratio, kl_sum, IndexerStats(kl_sum.detach(), rows))
        captured = None
        if capture and index is not None:
            q, window_kv, compressed_kv = (t.detach() for t in (q, window_kv, compressed_kv))
            index_q, index_k, index_w = (t.detach() for t in index)
            captured = CapturedLayer(
                self.layer,
                q,
                window_kv,
                compressed_kv,
                sink.detach(),
                index_q,
                index_k,
                index_w,
                selected,
                out.detach(),
                lse,
                layout,
                ratio,
                window,
                scale,
            )
        return AttentionOutput(out, record, captured)


@contextmanager
def capture(decoder: Decoder) -> Iterator[list[CapturedLayer]]:
    """Within the context every forward of `decoder` appends one CapturedLayer per CSA layer to the list."""
    previous, decoder.captured = decoder.captured, []
    try:
        yield decoder.captured
    finally:
        decoder.captured = previous
