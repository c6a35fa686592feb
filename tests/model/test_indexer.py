# SPDX-License-Identifier: Apache-2.0
"""Indexer: what it computes, what it selects, whom it reaches."""

from __future__ import annotations

import pytest
import torch

from csa_model.attention import AttentionMode, capture
from csa_model.indexer import Indexer
from csa_model.row import RotaryTables, Row
from kernels import ALL_VISIBLE, PackedLayout, get_backend
from tests.model.helpers import SPARSE, build, next_of, random_tokens, run, tiny_config


def row_of(lengths: list[int], offset: int = 0) -> Row:
    return Row(PackedLayout.from_lengths(lengths), RotaryTables(tiny_config()), {4}, torch.float64, position_offset=offset)


def test_weights_carry_both_scales_and_stay_signed() -> None:
    torch.manual_seed(0)
    indexer = Indexer(tiny_config(), 4).double()
    x, latent = torch.randn(12, 24).double(), torch.randn(12, 12).double()
    index_q, index_k, index_w = indexer(x, latent, row_of([12]))
    assert index_q.shape == (12, 3, 8)
    assert index_k.shape == (3, 8)
    torch.testing.assert_close(index_w, x @ indexer.weights_proj.weight.t() * 8**-0.5 * 3**-0.5)
    assert (index_w < 0).any()


def test_relu_acts_per_head() -> None:
    """Dot products (+2, -5) under weights (1, 1) score 2; selection must prefer it to a score of 1 and lose to one of 3."""
    backend = get_backend("unfused")
    layout = PackedLayout.from_lengths([8])
    index_q = torch.zeros(8, 2, 2)
    index_q[:, 0, 0] = index_q[:, 1, 1] = 1.0
    for other, chosen in ((1.0, 0), (3.0, 1)):
        index_k = torch.tensor([[2.0, -5.0], [other, 0.0]])
        assert backend.select(index_q, index_k, torch.ones(8, 2), layout, 4, 1)[7].tolist() == [chosen]


def test_scores_depend_on_distances_only() -> None:
    """Through the module: queries at their token, keys at the first token of their window, with the layer's table."""
    torch.manual_seed(1)
    indexer = Indexer(tiny_config(), 4).double()
    x, latent = torch.randn(20, 24).double(), torch.randn(20, 12).double()
    scores = []
    for offset in (0, 4, 777):
        q, k, w = indexer(x, latent, row_of([20], offset))
        scores.append(torch.einsum("th,thj->tj", w, torch.einsum("thd,jd->thj", q, k).relu()))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-9, atol=1e-9)


def test_weights_run_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    indexer = Indexer(tiny_config(), 4)
    x, latent = torch.randn(12, 24), torch.randn(12, 12)
    row = Row(PackedLayout.from_lengths([12]), RotaryTables(tiny_config()), {4}, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        index_q, index_k, index_w = indexer(x, latent, row)
    assert index_q.dtype == index_k.dtype == torch.bfloat16
    assert torch.equal(index_w, indexer(x, latent, row)[2])


@pytest.mark.parametrize("mode", [SPARSE, AttentionMode("dense", "dense"), AttentionMode("sparse", "dense"), AttentionMode("dense", "sparse")])
def test_losses_reach_disjoint_parameters(mode: AttentionMode) -> None:
    """The LM, MTP and balance losses reach no indexer parameter; the indexer loss reaches exactly the indexers'."""
    decoder, tokens = build(tiny_config()), random_tokens(40)
    indexer = {name for name, _ in decoder.indexer_parameters()}
    assert indexer == {n for n, _ in decoder.named_parameters() if ".indexer." in n}
    assert len(indexer) == 2 * 6
    out = run(decoder, tokens, [40], mode, next_tokens=next_of(tokens, [40]))
    assert out.mtp_hidden is not None
    lm = decoder.logits(out.hidden).square().sum() + decoder.logits(out.mtp_hidden).square().sum() + sum(r.balance_sum for r in out.router)
    lm.backward(retain_graph=True)
    reached = {name for name, p in decoder.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in decoder.named_parameters()} - indexer
    decoder.zero_grad(set_to_none=True)
    sum(r.kl_sum for r in out.indexer).backward()  # type: ignore[union-attr]
    assert {name for name, p in decoder.named_parameters() if p.grad is not None} == indexer
    assert all(p.grad is not None and p.grad.any() for _, p in decoder.indexer_parameters())


def test_coefficient_zero_gives_zero_gradients() -> None:
    decoder = build(tiny_config())
    out = run(decoder, random_tokens(40))
    (0.0 * sum(r.kl_sum for r in out.indexer) + decoder.logits(out.hidden).sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for _, p in decoder.indexer_parameters())


def test_frozen_trunk_keeps_no_graph() -> None:
    """The warm-up trains indexers alone: with the rest frozen nothing of the trunk is saved and the KL still reaches every indexer."""
    for recompute in (False, True):
        decoder = build(tiny_config(recompute=recompute))
        decoder.requires_grad_(False)
        for _, parameter in decoder.indexer_parameters():
            parameter.requires_grad_(True)
        out = run(decoder, random_tokens(40), mode=AttentionMode("dense", "dense"))
        assert not out.hidden.requires_grad
        sum(r.kl_sum for r in out.indexer).backward()  # type: ignore[union-attr]
        assert {n for n, p in decoder.named_parameters() if p.grad is not None} == {n for n, _ in decoder.indexer_parameters()}


def test_loss_off_needs_no_indexer_graph() -> None:
    decoder, seen = build(tiny_config()), []
    decoder.layers[1].attn.indexer.register_forward_hook(lambda module, args, outputs: seen.extend(outputs))
    out = run(decoder, random_tokens(40), mode=AttentionMode("sparse", "off"))
    assert out.indexer == []
    assert len(seen) == 3
    assert not any(t.requires_grad for t in seen)
    run(decoder, random_tokens(40), mode=AttentionMode("dense", "off"))
    assert len(seen) == 3  # nothing selects, nothing learns: not even run
    decoder.logits(out.hidden).sum().backward()
    assert all(p.grad is None for _, p in decoder.indexer_parameters())


@pytest.mark.parametrize("topk", [2, 4, 8])
def test_configured_topk_is_the_width_of_the_ids(topk: int) -> None:
    """Also the support of the KL follows it."""
    decoder, tokens = build(tiny_config(index_topk=topk)), random_tokens(64)
    with capture(decoder) as layers:
        out = run(decoder, tokens)
    assert [layer.layer for layer in layers] == [1, 3] == [record.layer for record in out.indexer]
    for layer in layers:
        assert isinstance(layer.selected, torch.Tensor)
        assert layer.selected.shape == (64, topk)
        assert (layer.selected[-1] >= 0).sum() == topk
    other = run(build(tiny_config(index_topk=3)), tokens)
    assert float(out.indexer[0].stats.kl_sum) != float(other.indexer[0].stats.kl_sum)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_topk_beyond_the_entries_runs(length: int) -> None:
    """Top-k 512 on 8 tokens takes every entry; 3 tokens have none and a KL of 0."""
    decoder = build(tiny_config(index_topk=512))
    with capture(decoder) as layers:
        out = run(decoder, random_tokens(length))
    for layer, record in zip(layers, out.indexer, strict=True):
        assert isinstance(layer.selected, torch.Tensor)
        assert layer.selected.shape == (length, 512)
        assert layer.selected[-1].ge(0).sum() == length // 4
        assert int(record.stats.rows) == max(0, length - 3)
        if length < 4:
            assert float(record.stats.kl_sum) == 0.0


def test_capture_sees_every_mode_and_ends_with_its_context() -> None:
    decoder, tokens = build(tiny_config()), random_tokens(24)
    with torch.no_grad(), capture(decoder) as layers:
        run(decoder, tokens, mode=AttentionMode("dense", "off"))
    run(decoder, tokens)
    assert len(layers) == 2
    for layer in layers:
        assert layer.selected is ALL_VISIBLE
        assert layer.index_q.shape == (24, 3, 8)
        assert layer.compressed_kv.shape == (6, 16)
        assert layer.lse.shape == (24, 4)
        assert not any(t.requires_grad for t in (layer.q, layer.out, layer.index_k, layer.sink))


def test_capture_counts_a_recomputed_block_once() -> None:
    decoder = build(tiny_config(recompute=True))
    with capture(decoder) as layers:
        out = run(decoder, random_tokens(24))
        (decoder.logits(out.hidden).sum() + sum(r.kl_sum for r in out.indexer)).backward()
    assert [layer.layer for layer in layers] == [1, 3]
