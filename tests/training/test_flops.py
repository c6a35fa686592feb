# SPDX-License-Identifier: Apache-2.0
"""FLOP formulas against counts by hand and by brute force."""

from __future__ import annotations

import dataclasses

import pytest

from csa_model.config import HyperConnectionsConfig, ModelConfig, MoEConfig, MTPConfig, StageConfig
from csa_model.flops import attended_entries, forward_flops, peak_flops, training_flops

CONFIG = ModelConfig(
    name="hand",
    vocab_size=10,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=4,
    qk_rope_head_dim=2,
    q_lora_rank=3,
    o_groups=2,
    o_lora_rank=5,
    sliding_window=2,
    compress_ratios=(4, 0),
    index_n_heads=2,
    index_head_dim=3,
    index_topk=1,
    hyper_connections=HyperConnectionsConfig(enabled=False),
    moe=MoEConfig(enabled=False, dense_intermediate_size=6),
    mtp=MTPConfig(enabled=False),
)


@pytest.mark.parametrize("lengths", [[1], [3], [4], [17], [8, 0, 5, 31], [128]])
@pytest.mark.parametrize("topk", [None, 1, 3, 100])
@pytest.mark.parametrize("ratio", [0, 4, 7])
def test_attended_entries_equal_brute_force(lengths: list[int], topk: int | None, ratio: int) -> None:
    window = 6
    expected = [0, 0, 0]
    for length in lengths:
        for t in range(length):
            visible = (t + 1) // ratio if ratio else 0
            expected[0] += min(t + 1, window)
            expected[1] += visible
            expected[2] += visible if topk is None else min(topk, visible)
    assert dataclasses.astuple(attended_entries(lengths, window, ratio, topk)) == tuple(expected)


def test_one_layer_counted_by_hand() -> None:
    # One document of 9 tokens. Window of 2: 1 + 8 * 2 = 17 pairs. Visible at ratio 4: tokens 3..6 see 1, tokens 7, 8 see 2: 8, with top-1 6.
    parts = forward_flops(CONFIG, [9])
    assert parts["projections"] == 2 * 9 * (8 * 3 + 3 * 8 + 8 * 4 + 8 * 5 + 10 * 8)
    assert parts["attention"] == 2 * 2 * (4 + 4) * (17 + 6)
    assert parts["compressors"] == 2 * 9 * (8 * 8 + 8 * 8)
    assert parts["indexer"] == 2 * 9 * (3 * 6 + 8 * 2 + 8 * 6 + 8 * 6) + 2 * 2 * 3 * 8
    assert parts["feed_forward"] == 2 * 9 * 3 * 8 * 6
    assert parts["head"] == 2 * 9 * 8 * 10
    assert parts["router"] == parts["streams"] == parts["mtp_projections"] == 0


def test_dense_attention_counts_every_visible_entry() -> None:
    assert forward_flops(CONFIG, [9], sparse=False)["attention"] == 2 * 2 * 8 * (17 + 8)


def test_moe_streams_and_mtp_counted_by_hand() -> None:
    config = dataclasses.replace(
        CONFIG,
        hyper_connections=HyperConnectionsConfig(enabled=True, hc_mult=2),
        moe=MoEConfig(enabled=True, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=6),
        mtp=MTPConfig(enabled=True),
    )
    parts = forward_flops(config, [9])
    blocks = 2  # one layer and the MTP block
    assert parts["feed_forward"] == blocks * 2 * 9 * 3 * (3 * 8 * 6)
    assert parts["router"] == blocks * 2 * 9 * 8 * 4
    per_mix = 2 * 8 * 8 + 2 * 8 + 2 * 2 * 8 + 2 * 8  # fn [8, 2d], collapse, stream mix, output to streams
    closing = 2 * 2 * 8 + 2 * 8
    assert parts["streams"] == 2 * 9 * (blocks * 2 * per_mix + 2 * closing)
    assert parts["mtp_projections"] == 2 * 9 * (8 * 8 + 2 * 8 * 8)
    assert parts["head"] == 2 * (2 * 9 * 8 * 10)


def test_training_counts_the_backward_of_what_is_trained() -> None:
    parts = forward_flops(CONFIG, [9])
    trunk = sum(parts.values()) - parts["indexer"]
    sparse, warm = StageConfig(), StageConfig(attention="sparse", train_only_indexer=True)
    assert training_flops(CONFIG, [9], sparse, indexer_trains=True) == 3 * trunk + 3 * parts["indexer"]
    assert training_flops(CONFIG, [9], sparse, indexer_trains=False) == 3 * trunk + parts["indexer"]
    assert training_flops(CONFIG, [9], warm, indexer_trains=True) == trunk + 3 * parts["indexer"]


def test_sparse_attention_is_linear_in_the_length() -> None:
    """A count by the square of the length would overstate the use of the machine by the ratio of length and top-k."""
    short, long = (forward_flops(CONFIG, [n])["attention"] for n in (1000, 2000))
    assert long < 2.01 * short


def test_peak_is_known_or_none() -> None:
    assert peak_flops("NVIDIA H200", "bf16-mixed") == 989.4e12
    assert peak_flops("NVIDIA H200", "32-true") is None
    assert peak_flops("Some Future Card", "bf16-mixed") is None
