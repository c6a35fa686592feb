# SPDX-License-Identifier: Apache-2.0
"""FLOPs that one packed row asks of the model, counted by hand from the configuration and the document lengths.

Matrix products only, 2 FLOPs per multiply-add. Attention counts the entries that a query really attends to: window entries and selected or
visible compressed entries, never the square of the length. Recomputation, padding and the indexer's teacher (which falls out of the attention's own
probabilities) are not counted, so a figure from here is useful work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from csa_model.config import INDEXED_RATIO, ModelConfig, StageConfig

# Dense bf16 peak, FLOP/s, by the name that CUDA reports (vendor data sheets, without sparsity). A card that is not listed gets no MFU.
PEAK_BF16_FLOPS: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak of the card for the precision's matrix products; None where it is not known."""
    return PEAK_BF16_FLOPS.get(device_name) if precision == "bf16-mixed" else None


@dataclass(frozen=True)
class AttendedEntries:
    """(query, key) pairs of one layer, summed over every query of the row."""

    window: int
    visible: int  # compressed entries that causality allows
    attended: int  # compressed entries that the attention reads


def attended_entries(lengths: Iterable[int], window: int, ratio: int, topk: int | None) -> AttendedEntries:
    """Count the pairs of documents of the given lengths. `topk` None: every visible entry is attended."""
    in_window = visible = attended = 0
    for length in lengths:
        full = min(length, window)
        in_window += full * (full + 1) // 2 + (length - full) * window
        if ratio == 0:
            continue
        # Query t sees v = (t + 1) // ratio entries: `ratio` queries for every v below the last, the tail for the last.
        entries, tail = divmod(length, ratio)
        visible += _staircase(entries, tail, ratio)
        if topk is None or topk >= entries:
            attended += _staircase(entries, tail, ratio)
        else:
            rows_above = (entries - topk) * ratio + tail + 1  # queries that see at least topk entries, minus those that see fewer
            attended += ratio * topk * (topk - 1) // 2 + topk * rows_above
    return AttendedEntries(in_window, visible, attended)


def _staircase(entries: int, tail: int, ratio: int) -> int:
    return ratio * entries * (entries - 1) // 2 + entries * (tail + 1) if entries else 0


def forward_flops(config: ModelConfig, lengths: Iterable[int], *, sparse: bool = True, targets: int | None = None) -> dict[str, int]:
    """Forward FLOPs of one row by component: projections, compressors, attention, indexer, feed_forward, router, streams, mtp_projections, head.

    `sparse` False is the dense stage: every visible compressed entry is attended and nothing is scored unless the indexer's loss asks for it.
    `targets`: rows of the head (default: every token; the MTP block asks the head again for the same number).
    """
    lengths = [int(n) for n in lengths]
    tokens = sum(lengths)
    d, heads, dim, streams = config.hidden_size, config.num_attention_heads, config.head_dim, config.hyper_connections.hc_mult
    blocks = config.num_hidden_layers + int(config.mtp.enabled)
    total = dict.fromkeys(("projections", "compressors", "attention", "indexer", "feed_forward", "router", "streams", "mtp_projections", "head"), 0)
    per_token = d * config.q_lora_rank + config.q_lora_rank * heads * dim + d * dim  # wq_a, wq_b, wkv
    per_token += heads * dim * config.o_lora_rank + config.o_groups * config.o_lora_rank * d  # wo_a (block diagonal), wo_b
    for layer in range(blocks):
        ratio = config.compress_ratios[layer]
        indexed = ratio == INDEXED_RATIO
        total["projections"] += 2 * tokens * per_token
        pairs = attended_entries(lengths, config.sliding_window, ratio, config.index_topk if indexed and sparse else None)
        total["attention"] += 2 * heads * 2 * dim * (pairs.window + pairs.attended)
        if ratio:
            total["compressors"] += 2 * tokens * 2 * d * dim * (2 if indexed else 1)  # wkv and wgate; overlapping ones are twice as wide
        if indexed:
            index_heads, index_dim = config.index_n_heads, config.index_head_dim
            total["indexer"] += 2 * tokens * (config.q_lora_rank * index_heads * index_dim + d * index_heads + 2 * d * 2 * index_dim)
            total["indexer"] += 2 * index_heads * index_dim * pairs.visible
        moe = config.moe
        if moe.enabled:
            experts = moe.num_experts_per_tok + moe.n_shared_experts
            total["feed_forward"] += 2 * tokens * 3 * d * moe.moe_intermediate_size * experts
            total["router"] += 2 * tokens * d * moe.n_routed_experts
        else:
            total["feed_forward"] += 2 * tokens * 3 * d * moe.dense_intermediate_size
        if config.hyper_connections.enabled:
            maps = 2 * streams + streams * streams
            # Twice per block: the maps from all streams, the collapse to one, and the mix of streams with the block's output.
            total["streams"] += 2 * 2 * tokens * d * (streams * maps + streams + streams * streams + streams)
    if config.hyper_connections.enabled:
        total["streams"] += (1 + int(config.mtp.enabled)) * 2 * tokens * d * (streams * streams + streams)  # the closing heads
    if config.mtp.enabled:
        # e_proj acts once per token, h_proj on every stream.
        total["mtp_projections"] = 2 * tokens * d * d * (1 + (streams if config.hyper_connections.enabled else 1))
    rows = tokens if targets is None else targets
    total["head"] = 2 * rows * d * config.vocab_size * (1 + int(config.mtp.enabled))
    return total


def training_flops(config: ModelConfig, lengths: Iterable[int], stage: StageConfig, *, indexer_trains: bool) -> int:
    """FLOPs of one training step on one row: the backward pass is twice the forward for whatever is trained.

    A stage that trains the indexers alone has a trunk without backward; an indexer that does not train costs its forward, and nothing at all when
    the attention is dense.
    """
    parts: Mapping[str, int] = forward_flops(config, lengths, sparse=stage.attention == "sparse")
    indexer = parts["indexer"]
    trunk = sum(parts.values()) - indexer
    trunk_factor = 1 if stage.train_only_indexer else 3
    if indexer_trains:
        indexer_factor = 3
    else:
        indexer_factor = 1 if stage.attention == "sparse" else 0
    return trunk_factor * trunk + indexer_factor * indexer
