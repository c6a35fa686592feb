# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval.yardsticks as yardsticks
from csa_model.attention import capture
from csa_model.config import HyperConnectionsConfig, ModelConfig, MoEConfig, MTPConfig
from csa_model.csa_metrics import sample_rows
from csa_model.data.batch import IGNORED, PackedBatch
from csa_model.data.packing import pack
from csa_model.decoder import Decoder
from eval.yardsticks import DENSE, SPARSE, evaluate_rows, token_kl, top_k
from kernels import ALL_VISIBLE, get_backend

VOCAB = 23


def make_decoder(topk: int | None = 3, **changes: Any) -> Decoder:
    config = ModelConfig(
        name="test",
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=8,
        qk_rope_head_dim=4,
        q_lora_rank=8,
        o_groups=1,
        o_lora_rank=8,
        sliding_window=2,
        compress_ratios=(0, 4, 4, 0),
        index_n_heads=2,
        index_head_dim=8,
        index_topk=topk,
        initializer_range=0.4,
        hyper_connections=HyperConnectionsConfig(enabled=False),
        moe=MoEConfig(enabled=False, dense_intermediate_size=16),
        mtp=MTPConfig(enabled=False),
    )
    torch.manual_seed(0)
    return Decoder(replace(config, **changes), get_backend("unfused"), device_type="cpu").eval()


def make_batch(lengths: list[int], seed: int = 0, num_tokens: int | None = None) -> PackedBatch:
    generator = np.random.default_rng(seed)
    batch = pack([generator.integers(0, VOCAB, n) for n in lengths], num_tokens, (4,))
    return replace(batch, target_bytes=3 * int((batch.targets != IGNORED).sum()))


BATCHES = [make_batch([40, 3], 1, 48), make_batch([9], 2)]  # unequal rows: a mean of row means would differ


def plain_log_probs(decoder: Decoder, batch: PackedBatch, k: int | None) -> torch.Tensor:
    """Log-probabilities [N, V] at the counted tokens, by a decoder that was built with this k."""
    with torch.no_grad():
        hidden = decoder(batch.tokens, batch.layout, DENSE if k is None else SPARSE).hidden
        return torch.log_softmax(hidden @ decoder.head.weight.T, dim=-1)[batch.targets != IGNORED]


def test_losses_are_weighted_by_token_over_unequal_rows() -> None:
    decoder = make_decoder()
    found = evaluate_rows(decoder, BATCHES, (1, 3))
    targets = torch.cat([batch.targets[batch.targets != IGNORED] for batch in BATCHES])
    for mode, k in (("dense", None), ("sparse@1", 1), ("sparse@3", 3)):
        same = make_decoder(topk=k)
        same.load_state_dict(decoder.state_dict())
        log_p = torch.cat([plain_log_probs(same, batch, k) for batch in BATCHES])
        expected = float(F.nll_loss(log_p, targets))
        assert found.values[f"loss_{mode}"] == pytest.approx(expected, rel=1e-6)
        assert found.values[f"bits_per_byte_{mode}"] == pytest.approx(expected / math.log(2) / 3, rel=1e-6)
        assert found.counts[f"loss_{mode}"] == len(targets) == 39 + 2 + 8
    assert found.values["loss_sparse@1"] != found.values["loss_dense"]


def test_every_k_changes_what_is_attended_to() -> None:
    """Against a top-k that is read from the configuration once and ignored afterwards."""
    found = evaluate_rows(make_decoder(topk=3), BATCHES, (1, 2, 4, 8))
    costs = [found.values[f"kl_dense_sparse@{k}"] for k in (1, 2, 4, 8)]
    assert len(set(costs)) == 4
    assert costs[0] > costs[-1] > 0


def test_kl_between_dense_and_sparse_equals_a_plain_sum() -> None:
    decoder = make_decoder(topk=2)
    found = evaluate_rows(decoder, BATCHES, (2,))
    dense = torch.cat([plain_log_probs(decoder, batch, None) for batch in BATCHES]).double()
    sparse = torch.cat([plain_log_probs(decoder, batch, 2) for batch in BATCHES]).double()
    rows = (dense.exp() * (dense - sparse)).sum(-1)
    np.testing.assert_allclose(found.arrays["token/kl_dense_sparse@2"], rows.numpy(), rtol=1e-3, atol=1e-7)
    assert found.values["kl_dense_sparse@2"] == pytest.approx(float(rows.mean()), rel=1e-3)


def test_token_kl_in_closed_form() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert token_kl(p, q).tolist() == pytest.approx([0.5 * math.log(2)])
    assert token_kl(q, q).tolist() == [0.0]


def test_selecting_more_than_there_is_equals_dense_attention_bit_for_bit() -> None:
    """A k beyond the number of entries."""
    found = evaluate_rows(make_decoder(), BATCHES, (1000,))
    np.testing.assert_array_equal(found.arrays["token/nll_sparse@1000"], found.arrays["token/nll_dense"])
    assert found.values["kl_dense_sparse@1000"] == 0
    assert "recall_full_csa@1000" not in found.values  # no row sees more than 1000 entries


def test_output_error_is_that_of_the_kernels() -> None:
    decoder, k = make_decoder(), 2
    found = evaluate_rows(decoder, BATCHES[:1], (k,))
    batch = BATCHES[0]
    with torch.no_grad(), capture(decoder) as layers:
        decoder(batch.tokens, batch.layout, DENSE)
    for c in layers:
        selected = decoder.backend.select(c.index_q, c.index_k, c.index_w, c.layout, c.ratio, k)
        tail = (c.sink, c.layout, c.ratio, c.window, c.scale)
        sparse, dense = (decoder.backend.attend(c.q, c.window_kv, c.compressed_kv, s, *tail)[0].flatten(1) for s in (selected, ALL_VISIBLE))
        error = (sparse - dense).norm(dim=-1) / dense.norm(dim=-1)
        rows = torch.nonzero(c.layout.visible_compressed(c.ratio) > k).flatten()
        assert found.counts[f"layer{c.layer}/output_error@{k}"] == len(rows)
        assert found.values[f"layer{c.layer}/output_error@{k}"] == pytest.approx(float(error[rows].mean()), rel=1e-5)
    assert found.layers == (1, 2)
    mean = (found.values[f"layer1/output_error@{k}"] + found.values[f"layer2/output_error@{k}"]) / 2
    assert found.values[f"output_error@{k}"] == pytest.approx(mean)


def test_arrays_hold_one_element_per_token_and_query_row_and_average_to_the_values() -> None:
    found = evaluate_rows(make_decoder(), BATCHES, (2,))
    tokens = [name for name in found.arrays if name.startswith("token/")]
    assert {len(found.arrays[name]) for name in tokens} == {49}
    assert found.arrays["token/packed_row"].tolist() == [0] * 41 + [1] * 8
    assert found.arrays["token/document"].tolist() == [0] * 39 + [1] * 2 + [0] * 8
    for name in ("recall_full_csa@2", "kl_compressed_only", "tv", "output_error@2"):
        array = found.arrays[f"layer1/{name}"]
        assert np.nanmean(array.astype(np.float64)) == pytest.approx(found.values[f"layer1/{name}"])
        assert np.isfinite(array).sum() == found.counts[f"layer1/{name}"]
    visible = np.concatenate([[(i + 1) // 4 for i in range(n) if i >= 3] for n in (40, 9)])
    assert found.arrays["layer1/visible"].tolist() == visible.tolist()
    assert found.arrays["layer1/packed_row"].tolist() == [0] * 37 + [1] * 6


def test_a_sample_of_query_rows_is_the_same_every_time_and_bounded() -> None:
    decoder = make_decoder()
    a, b = (evaluate_rows(decoder, BATCHES, (2,), query_rows=5) for _ in range(2))
    assert set(a.arrays) == set(b.arrays)
    for name, array in a.arrays.items():
        np.testing.assert_array_equal(array, b.arrays[name])
    assert len(a.arrays["layer1/row"]) == 10
    assert a.arrays["layer1/row"].tolist() == a.arrays["layer2/row"].tolist()
    everything = set(sample_rows(BATCHES[0].layout, 4, None).tolist())
    assert set(a.arrays["layer1/row"][:5].tolist()) <= everything


def test_chunks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder()
    whole = evaluate_rows(decoder, BATCHES, (2,))
    monkeypatch.setattr(yardsticks, "LOGIT_ELEMENTS", 5 * VOCAB)
    sizes: list[int] = []
    real = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda hidden: sizes.append(len(hidden)) or real(hidden))
    pieces = evaluate_rows(decoder, BATCHES, (2,))
    assert max(sizes) == 5
    for name in ("token/nll_dense", "token/nll_sparse@2", "token/target", "token/index"):
        np.testing.assert_allclose(pieces.arrays[name], whole.arrays[name], rtol=1e-5)


def test_a_uniform_decoder_costs_the_logarithm_of_the_vocabulary() -> None:
    decoder = make_decoder()
    torch.nn.init.zeros_(decoder.head.weight)
    found = evaluate_rows(decoder, BATCHES, (2,))
    assert found.values["loss_dense"] == pytest.approx(math.log(VOCAB))
    assert found.values["bits_per_byte_sparse@2"] == pytest.approx(math.log2(VOCAB) / 3)
    assert found.values["kl_dense_sparse@2"] == 0


def test_accuracy_by_distance_counts_only_asked_tokens() -> None:
    decoder = make_decoder()
    batch = BATCHES[0]
    best = torch.full_like(batch.targets, IGNORED)
    counted = batch.targets != IGNORED
    best[counted] = plain_log_probs(decoder, batch, None).argmax(-1)
    distance = torch.full(batch.tokens.shape, -1, dtype=torch.int32)
    distance[[5, 6, 7, 20]] = torch.tensor([16, 16, 16, 64], dtype=torch.int32)
    targets = batch.targets.clone()
    targets[[5, 6, 20]] = best[[5, 6, 20]]  # right answers
    targets[7] = (best[7] + 1) % VOCAB
    found = evaluate_rows(decoder, [replace(batch, targets=targets, distance=distance)], (2,))
    assert found.values["accuracy_dense/distance16"] == pytest.approx(2 / 3)
    assert found.values["accuracy_dense/distance64"] == 1
    assert found.values["accuracy_dense"] == pytest.approx(3 / 4)
    assert found.counts["accuracy_dense/distance16"] == 3
    assert "accuracy_sparse@2/distance64" in found.values
    assert not any(name.startswith("accuracy") for name in evaluate_rows(decoder, BATCHES, ()).values)


def test_bits_per_byte_are_left_out_where_tokens_have_no_bytes() -> None:
    found = evaluate_rows(make_decoder(), [replace(BATCHES[0], target_bytes=0)], ())
    assert "bits_per_byte_dense" not in found.values


def test_a_decoder_without_indexed_layers_is_measured_too() -> None:
    found = evaluate_rows(make_decoder(compress_ratios=(0, 8, 8, 0)), BATCHES, (2,))
    assert found.layers == ()
    assert set(found.values) == {"loss_dense", "bits_per_byte_dense"}


def test_top_k_is_restored_also_after_an_error() -> None:
    decoder = make_decoder(topk=3)
    selected = []

    def fail() -> None:
        with top_k(decoder, 9):
            selected.extend(module.topk for _, module in decoder.csa_layers())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert selected == [9, 9]
    assert {module.topk for _, module in decoder.csa_layers()} == {3}


def test_nothing_to_evaluate_is_said() -> None:
    with pytest.raises(ValueError, match="no held-out token"):
        evaluate_rows(make_decoder(), [], (2,))
