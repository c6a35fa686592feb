# SPDX-License-Identifier: Apache-2.0
"""The whole decoder: causality, documents, padding, recomputation, seeds, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from csa_model.attention import AttentionMode
from csa_model.config import ConfigError, ModelConfig, MTPConfig
from csa_model.decoder import Decoder
from kernels import BackendUnsupported, Geometry, PackedLayout, get_backend
from tests.model.helpers import SPARSE, build, logits_of, next_of, plain_config, random_tokens, run, tiny_config

LENGTH = 40
MODES = [SPARSE, AttentionMode("dense", "off")]


def all_losses(decoder: Decoder, tokens: Tensor, lengths: list[int], mode: AttentionMode = SPARSE) -> Tensor:
    """LM, MTP, KL and balance sums, each with a weight of its own."""
    targets = next_of(tokens, lengths)
    out = run(decoder, tokens, lengths, mode, next_tokens=targets)
    loss = F.cross_entropy(decoder.logits(out.hidden), targets, ignore_index=-100, reduction="sum")
    if out.mtp_hidden is not None:
        after = torch.where(targets >= 0, targets.roll(-1), -100)
        loss = loss + 0.3 * F.cross_entropy(decoder.logits(out.mtp_hidden), after, ignore_index=-100, reduction="sum")
    for record in out.indexer:
        loss = loss + record.kl_sum
    for router in out.router:
        loss = loss + 0.1 * router.balance_sum
    return loss


def gradients(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    norm = torch.stack([g.norm() for g in a.values()]).norm()
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * norm, name


@pytest.mark.parametrize("mode", MODES, ids=["sparse", "dense"])
def test_later_tokens_change_nothing_before_them(mode: AttentionMode) -> None:
    """Exactly, for every t: through windows, compressor overlap and selection."""
    decoder, tokens = build(plain_config()), random_tokens(LENGTH)
    with torch.no_grad():
        logits = logits_of(decoder, tokens, mode=mode)
        for t in range(LENGTH):
            changed = tokens.clone()
            changed[t:] = (changed[t:] + 1 + torch.arange(LENGTH - t)) % decoder.config.vocab_size
            others = logits_of(decoder, changed, mode=mode)
            assert torch.equal(others[:t], logits[:t]), t
            assert not torch.equal(others[t], logits[t])


def test_later_tokens_change_nothing_before_them_with_experts() -> None:
    decoder, tokens = build(tiny_config()), random_tokens(LENGTH)
    with torch.no_grad():
        logits = logits_of(decoder, tokens)
        for t in range(LENGTH):
            changed = tokens.clone()
            changed[t:] = (changed[t:] + 1) % decoder.config.vocab_size
            torch.testing.assert_close(logits_of(decoder, changed)[:t], logits[:t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [plain_config, tiny_config])
def test_no_gradient_from_earlier_logits_to_later_embeddings(make: type) -> None:
    decoder, tokens = build(make()), random_tokens(LENGTH)
    for t in (0, 2, 3, 4, 7, 11, 20, LENGTH - 2):
        embedding: list[Tensor] = []
        handle = decoder.embed.register_forward_hook(lambda module, args, out, seen=embedding: seen.append(out))
        row = logits_of(decoder, tokens)[t]
        handle.remove()
        (grad,) = torch.autograd.grad(row.square().sum(), embedding[0])
        assert not grad[t + 1 :].any()
        assert grad[t].any()


@pytest.mark.parametrize("make", [plain_config, tiny_config])
def test_a_prefix_gives_the_same_logits(make: type) -> None:
    decoder, tokens = build(make()), random_tokens(LENGTH)
    with torch.no_grad():
        whole = logits_of(decoder, tokens)
        for s in (1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 39):
            torch.testing.assert_close(logits_of(decoder, tokens[:s]), whole[:s], rtol=1e-4, atol=1e-5)


def test_documents_do_not_see_each_other() -> None:
    """Exactly, when the documents around one are replaced; neighbours of a length that is no multiple of any ratio."""
    decoder, lengths = build(plain_config()), [13, 22, 9]
    a, b = random_tokens(44, seed=1), random_tokens(44, seed=2)
    b[13:35] = a[13:35]
    with torch.no_grad():
        ours, theirs = logits_of(decoder, a, lengths), logits_of(decoder, b, lengths)
        assert torch.equal(ours[13:35], theirs[13:35])
        assert not torch.equal(ours[35:], theirs[35:])
        torch.testing.assert_close(ours[13:35], logits_of(decoder, a[13:35]), rtol=1e-4, atol=1e-5)


def test_documents_do_not_see_each_other_with_experts() -> None:
    decoder, lengths = build(tiny_config()), [13, 22, 9]
    a, b = random_tokens(44, seed=1), random_tokens(44, seed=2)
    b[13:35] = a[13:35]
    ours, theirs = (run(decoder, t, lengths, next_tokens=next_of(t, lengths)) for t in (a, b))
    assert ours.mtp_hidden is not None
    assert theirs.mtp_hidden is not None
    torch.testing.assert_close(ours.hidden[13:35], theirs.hidden[13:35], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.mtp_hidden[13:35], theirs.mtp_hidden[13:35], rtol=1e-5, atol=1e-5)
    embedding: list[Tensor] = []
    handle = decoder.embed.register_forward_hook(lambda module, args, out: embedding.append(out))
    out = run(decoder, a, lengths, next_tokens=next_of(a, lengths))
    handle.remove()
    assert out.mtp_hidden is not None
    for grad in torch.autograd.grad(out.hidden[13:35].square().sum() + out.mtp_hidden[13:35].square().sum(), embedding):
        assert not grad[:13].any()
        assert not grad[35:].any()
        assert grad[13:34].any()


def test_first_step_is_the_same_under_every_teacher() -> None:
    decoder, tokens = build(tiny_config()), random_tokens(LENGTH)
    arms = [AttentionMode("sparse", "sparse", "full_csa"), AttentionMode("sparse", "sparse", "compressed_only"), AttentionMode("sparse", "off")]
    lm = [logits_of(decoder, tokens, mode=arm) for arm in arms]
    assert torch.equal(lm[0], lm[1])
    assert torch.equal(lm[0], lm[2])
    trunk = [gradients(decoder, F.cross_entropy(logits, tokens)) for logits in lm]
    for name in trunk[2]:
        assert torch.equal(trunk[0][name], trunk[1][name]), name
        assert torch.equal(trunk[0][name], trunk[2][name]), name


def test_packing_gives_the_gradients_of_separate_rows() -> None:
    """Four documents in one row, or each in a row of its own, with sum-reduced losses."""
    decoder, lengths = build(tiny_config(), dtype=torch.float64), [17, 3, 30, 9]
    tokens = random_tokens(sum(lengths))
    packed = gradients(decoder, all_losses(decoder, tokens, lengths))
    apart = gradients(decoder, torch.stack([all_losses(decoder, part, [len(part)]) for part in tokens.split(lengths)]).sum())
    assert_same_gradients(packed, apart, 1e-10)


def test_padding_changes_nothing() -> None:
    """Padding behind the documents, whatever it holds, and empty documents between them leave loss and gradients alone."""
    decoder, lengths = build(tiny_config(), dtype=torch.float64), [17, 30]
    tokens = random_tokens(47)
    plain = all_losses(decoder, tokens, lengths)
    reference = gradients(decoder, plain)
    for padded, layout in ((torch.cat([tokens, random_tokens(6, seed=9)]), lengths), (tokens, [17, 0, 30, 0])):
        loss = all_losses(decoder, padded, layout)
        torch.testing.assert_close(loss, plain)
        assert_same_gradients(gradients(decoder, loss), reference, 1e-10)


def test_one_token_documents() -> None:
    """Documents of 3, 1, 1, 5 tokens are four documents."""
    decoder, tokens, lengths = build(plain_config()), random_tokens(10), [3, 1, 1, 5]
    logits = logits_of(decoder, tokens, lengths)
    torch.testing.assert_close(logits, torch.cat([logits_of(decoder, part) for part in tokens.split(lengths)]), rtol=1e-4, atol=1e-5)


def test_two_rows_accumulate_to_one() -> None:
    decoder, tokens = build(tiny_config(), dtype=torch.float64), random_tokens(48)
    together = gradients(decoder, all_losses(decoder, tokens, [24, 24]))
    decoder.zero_grad(set_to_none=True)
    for part in tokens.split(24):
        all_losses(decoder, part, [24]).backward()
    assert_same_gradients({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}, together, 1e-10)


@pytest.mark.parametrize("make", [plain_config, tiny_config])
def test_recomputation_is_exact_and_counts_once(make: type) -> None:
    tokens, results = random_tokens(LENGTH), []
    for recompute in (False, True):
        decoder = build(make(recompute=recompute))
        out = run(decoder, tokens, [25, 12], next_tokens=next_of(tokens, [25, 12]))
        loss = decoder.logits(out.hidden).square().sum()
        loss = loss + sum(r.kl_sum for r in out.indexer) + sum(r.balance_sum for r in out.router)
        grads = gradients(decoder, loss)
        results.append((loss, grads, [(r.layer, r.stats.kl_sum, r.stats.rows) for r in out.indexer], [(r.layer, r.counts) for r in out.router]))
    (loss, grads, indexer, router), (loss_2, grads_2, indexer_2, router_2) = results
    assert torch.equal(loss, loss_2)
    assert grads.keys() == grads_2.keys()
    assert all(torch.equal(grads[name], grads_2[name]) for name in grads)
    assert [tuple(map(float, r)) for r in indexer] == [tuple(map(float, r)) for r in indexer_2]
    assert [(layer, counts.tolist()) for layer, counts in router] == [(layer, counts.tolist()) for layer, counts in router_2]
    assert all(counts.sum() == 2 * 37 for _, counts in router)


def test_recomputation_keeps_fewer_tensors() -> None:
    sizes = []
    for recompute in (False, True):
        decoder, kept = build(tiny_config(recompute=recompute)), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            run(decoder, random_tokens(LENGTH))
        sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 3


def test_seed_decides_every_initial_value() -> None:
    first, again, other = (build(tiny_config(), seed=seed, shake=False).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, value in first.items():
        constant = name.endswith(("norm.weight", "attn_sink", ".ape", ".base", ".scale", "gate.bias")) or "norm" in name
        assert torch.equal(value, other[name]) is constant, name


def test_initial_values() -> None:
    config = tiny_config(hidden_size=256, vocab_size=2000)
    decoder = build(config, shake=False)
    ffn = decoder.layers[1].ffn
    for weight, std in (
        (decoder.embed.weight, 0.02),
        (decoder.head.weight, 0.02),
        (ffn.experts.w1, 0.02),
        (ffn.experts.w2, 0.02 / 8**0.5),
        (ffn.shared_experts.w2.weight, 0.02 / 8**0.5),
        (decoder.layers[0].hc_attn.fn, 0.02),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert decoder.layers[0].hc_attn.scale.tolist() == pytest.approx([0.01] * 3)
    assert decoder.hc_head is not None
    assert decoder.hc_head.scale.item() == pytest.approx(0.01)


def test_tied_embeddings_share_one_parameter() -> None:
    decoder = build(tiny_config(tie_word_embeddings=True), shake=False)
    assert decoder.head.weight is decoder.embed.weight
    untied = sum(p.numel() for p in build(tiny_config(), shake=False).parameters())
    assert sum(p.numel() for p in decoder.parameters()) == untied - decoder.embed.weight.numel()


def test_mtp_reads_the_next_token_and_only_that() -> None:
    decoder, tokens = build(tiny_config()), random_tokens(20)
    targets = next_of(tokens, [20])
    base = run(decoder, tokens, [20], next_tokens=targets)
    assert base.mtp_hidden is not None
    moved = targets.clone()
    moved[10] = (moved[10] + 1) % decoder.config.vocab_size
    out = run(decoder, tokens, [20], next_tokens=moved)
    assert out.mtp_hidden is not None
    assert torch.equal(out.hidden, base.hidden)
    assert not torch.equal(out.mtp_hidden[10], base.mtp_hidden[10])
    torch.testing.assert_close(out.mtp_hidden[:10], base.mtp_hidden[:10], rtol=1e-5, atol=1e-5)
    assert run(decoder, tokens, [20]).mtp_hidden is None
    assert [r.layer for r in base.router] == [1, 2, 3, 4]


def test_mtp_trains_trunk_embedding_and_head() -> None:
    decoder, tokens = build(tiny_config()), random_tokens(20)
    out = run(decoder, tokens, [20], next_tokens=next_of(tokens, [20]))
    assert out.mtp_hidden is not None
    grads = gradients(decoder, decoder.logits(out.mtp_hidden).square().sum())
    for name in ("embed.weight", "head.weight", "layers.0.attn.wkv.weight", "mtp.e_proj.weight", "mtp.h_proj.weight", "mtp.attn.wkv.weight"):
        assert grads[name].any(), name
    assert "norm.weight" not in grads


def test_compress_ratios_must_cover_the_mtp_block() -> None:
    """The list counts the MTP block; the message names both numbers."""
    with pytest.raises(ConfigError, match=r"has 2 entries.*3 layers.*need 4"):
        build(tiny_config(num_hidden_layers=3, compress_ratios=(4, 4)))
    with pytest.raises(ConfigError, match="4 entries"):
        build(tiny_config(compress_ratios=(0, 4, 8, 4)))
    build(tiny_config(compress_ratios=(0, 4, 8, 4), mtp=MTPConfig(enabled=False)))


def test_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[12\].*\[10\]"):
        build(tiny_config())(random_tokens(10), PackedLayout.from_lengths([12]), SPARSE)


def test_unsupported_geometry_is_refused_when_the_model_is_built() -> None:
    seen: list[Geometry] = []

    class Refusing(type(get_backend("unfused"))):  # type: ignore[misc]
        def require(self, geometry: Geometry) -> None:
            seen.append(geometry)
            raise BackendUnsupported("no such head dim", "head_dim=64")

    with pytest.raises(BackendUnsupported, match="head_dim=64"):
        Decoder(tiny_config(), Refusing(), device_type="cuda", dtype=torch.bfloat16, mode=AttentionMode("dense", "dense", "compressed_only"))
    (geometry,) = seen
    assert (geometry.heads, geometry.head_dim, geometry.window, geometry.topk) == (4, 16, 6, 3)
    assert (geometry.index_heads, geometry.index_head_dim) == (3, 8)
    assert set(geometry.ratios) == {0, 4, 8}
    assert (geometry.teacher, geometry.support, geometry.dtype, geometry.device_type) == ("compressed_only", "dense", torch.bfloat16, "cuda")


def test_logits_under_autocast_come_from_rounded_operands_and_are_float32() -> None:
    decoder, tokens = build(plain_config(), shake=False), random_tokens(LENGTH)
    exact = logits_of(decoder, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(decoder, tokens)
        logits = decoder.logits(out.hidden)
        assert not torch.equal(logits, F.linear(out.hidden, decoder.head.weight).float())  # the plain product would be rounded
    assert out.hidden.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, F.linear(out.hidden.float(), decoder.head.weight.bfloat16().float()))
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max()


def test_mixed_precision_gradients_point_the_same_way() -> None:
    decoder, tokens = build(plain_config(index_topk=None), shake=False), random_tokens(LENGTH)
    exact = gradients(decoder, all_losses(decoder, tokens, [25, 15]))
    with torch.autocast("cpu", torch.bfloat16):
        loss = all_losses(decoder, tokens, [25, 15])
    mixed = gradients(decoder, loss)
    for name in exact:
        assert mixed[name].dtype == torch.float32
        assert F.cosine_similarity(mixed[name].flatten(), exact[name].flatten(), dim=0) > 0.98, name


def test_names_are_those_of_the_released_checkpoints() -> None:
    names = set(build(tiny_config(), shake=False).state_dict())
    listed = (
        "embed.weight norm.weight head.weight hc_head.fn hc_head.base hc_head.scale layers.0.attn_norm.weight layers.0.ffn_norm.weight "
        "layers.1.attn.wq_a.weight layers.1.attn.q_norm.weight layers.1.attn.wq_b.weight layers.1.attn.wkv.weight layers.1.attn.kv_norm.weight "
        "layers.1.attn.attn_sink layers.1.attn.wo_a.weight layers.1.attn.wo_b.weight layers.1.attn.compressor.wkv.weight "
        "layers.1.attn.compressor.wgate.weight layers.1.attn.compressor.ape layers.1.attn.compressor.norm.weight layers.1.attn.indexer.wq_b.weight "
        "layers.1.attn.indexer.weights_proj.weight layers.1.attn.indexer.compressor.wkv.weight layers.1.attn.indexer.compressor.ape "
        "layers.0.hc_attn.fn layers.0.hc_attn.scale layers.0.hc_ffn.base layers.0.ffn.gate.weight layers.0.ffn.gate.tid2eid layers.1.ffn.gate.bias "
        "layers.0.ffn.experts.w1 layers.0.ffn.shared_experts.w2.weight mtp.e_proj.weight mtp.h_proj.weight mtp.enorm.weight mtp.hnorm.weight "
        "mtp.norm.weight mtp.hc_head.fn mtp.attn.wq_a.weight mtp.ffn.gate.bias"
    )
    assert set(listed.split()) <= names
    assert "layers.0.ffn.w1.weight" in build(plain_config(), shake=False).state_dict()


def sized(base: ModelConfig, sizes: str, attention: str, experts: str, vocabulary: int, ratios: list[int], hashed: int = 2) -> ModelConfig:
    d, layers, h, c, r = map(int, sizes.split())
    dc, g, dg, w, hi, ci, k = map(int, attention.split())
    e, topk, f = map(int, experts.split())
    moe = dataclasses.replace(base.moe, n_routed_experts=e, num_experts_per_tok=topk, moe_intermediate_size=f, num_hash_layers=hashed)
    return dataclasses.replace(
        base, vocab_size=vocabulary, hidden_size=d, num_hidden_layers=layers, num_attention_heads=h, head_dim=c, qk_rope_head_dim=r, q_lora_rank=dc,
        o_groups=g, o_lora_rank=dg, sliding_window=w, index_n_heads=hi, index_head_dim=ci, index_topk=k, moe=moe, compress_ratios=tuple(ratios),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "attention", "experts", "vocabulary", "ratios", "without_mtp", "with_mtp"),
    [
        pytest.param("64 7 8 64 8", "16 2 64 16 8 16 8", "8 2 32", 512, [0, 0, 4, *[16, 4] * 2, 0], 1_014_935, 1_146_986, id="tiny"),
        pytest.param("96 7 12 64 8", "24 3 64 16 12 16 8", "8 2 48", 512, [0, 0, 4, *[16, 4] * 2, 0], 1_907_275, 2_165_962, id="tiny3"),
        pytest.param(
            "512 7 32 128 16", "128 4 256 128 32 32 128", "16 3 256", 32768, [0, 0, 4, *[128, 4] * 2, 0], 98_433_343, 107_988_122, id="small"
        ),
        pytest.param("512 5 64 512 64", "128 8 128 128 16 128 256", "8 2 256", 32768, [0, 0, 4, 128, 4, 0], 101_745_619, 115_163_342, id="small-fm"),
        pytest.param(
            "1024 13 64 512 64", "256 8 256 128 16 128 256", "32 4 512", 32768, [0, 0, 4, *[128, 4] * 5, 0], 1_025_075_715, 1_098_989_950, id="base"
        ),
    ],
)
def test_parameter_count(sizes: str, attention: str, experts: str, vocabulary: int, ratios: list[int], without_mtp: int, with_mtp: int) -> None:
    """Equal to the released class at the same sizes, parameter for parameter."""
    with torch.device("meta"):
        decoder = Decoder(sized(tiny_config(), sizes, attention, experts, vocabulary, ratios), get_backend("unfused"), device_type="cpu")
    counts = {name: p.numel() for name, p in decoder.named_parameters()}
    assert sum(n for name, n in counts.items() if not name.startswith("mtp.")) == without_mtp
    assert sum(counts.values()) == with_mtp


@pytest.mark.parametrize(
    ("sizes", "attention", "experts", "ratios", "billions", "billions_with_mtp"),
    [
        pytest.param("4096 43 64 512 64", "1024 8 1024 128 64 128 512", "256 6 2048", [0, 0, *[4, 128] * 20, 4, 0], 284.33, 290.94, id="flash"),
        pytest.param("7168 61 128 512 64", "1536 16 1024 128 64 128 1024", "384 6 3072", [128, 128, *[4, 128] * 29, 4, 0], 1573, 1599, id="pro"),
    ],
)
def test_parameter_count_of_the_released_models(
    sizes: str, attention: str, experts: str, ratios: list[int], billions: float, billions_with_mtp: float
) -> None:
    with torch.device("meta"):
        decoder = Decoder(sized(tiny_config(), sizes, attention, experts, 129_280, ratios, hashed=3), get_backend("unfused"), device_type="cpu")
    counts = {name: p.numel() for name, p in decoder.named_parameters()}
    assert round(sum(n for name, n in counts.items() if not name.startswith("mtp.")) / 1e9, 2) == pytest.approx(
        billions, abs=0.5 if billions > 1000 else 0
    )
    assert round(sum(counts.values()) / 1e9, 2) == pytest.approx(billions_with_mtp, abs=0.5 if billions > 1000 else 0)
