# SPDX-License-Identifier: Apache-2.0
"""The Lightning module: what moves in which stage, clipping, router biases, emitting backends, precision, recomputation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training_helpers import MODEL, loader, make_config, make_module, make_rows, make_trainer

from csa_model.config import ConfigError, StageConfig
from csa_model.gradients import FiniteGuard, NonFiniteGradientError, clip_to_norm, gradient_norms
from csa_model.lit_module import CSALitModule, load_initial_weights
from csa_model.losses import total_loss
from csa_model.moe import update_router_biases
from csa_model.optimizers import parameter_groups
from csa_model.run_dir import plain
from kernels.backend import IndexerStats
from kernels.unfused import UnfusedBackend

WARM_UP = StageConfig(name="indexer_warmup", attention="dense", indexer_loss="dense", train_only_indexer=True)


def _fit(config: Any, rows: Any, module: Any = None, **options: Any) -> Any:
    module = module or make_module(config)
    trainer = make_trainer(config, **options)
    trainer.fit(module, loader(rows), loader(rows[:1]))
    return module, {k: float(v) for k, v in trainer.callback_metrics.items()}


def _changed(before: dict[str, Tensor], module: CSALitModule) -> set[str]:
    return {name for name, value in module.decoder.state_dict().items() if not torch.equal(before[name], value)}


def _state(module: CSALitModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.decoder.state_dict().items()}


def test_groups_follow_the_published_split() -> None:
    config = make_config()
    module = make_module(config)
    names = {id(p): n for n, p in module.decoder.named_parameters()}
    groups = {g["name"]: g for g in parameter_groups(module.decoder, config.optimizer)}
    members = {name: {names[id(p)] for p in g["params"]} for name, g in groups.items()}
    assert list(groups) == ["trunk_matrices", "embeddings", "trunk_vectors", "indexer_matrices", "indexer_vectors"]
    assert sum(len(m) for m in members.values()) == len(names)
    assert members["embeddings"] == {"embed.weight", "head.weight"}
    for name in (
        "layers.1.attn.wq_b.weight",
        "layers.2.ffn.gate.weight",
        "layers.0.ffn.experts.w2",
        "layers.1.hc_attn.fn",
        "hc_head.fn",
        "mtp.e_proj.weight",
    ):
        assert name in members["trunk_matrices"]
    for name in ("norm.weight", "layers.1.attn.attn_sink", "layers.1.attn.compressor.ape", "layers.0.hc_ffn.scale", "hc_head.base"):
        assert name in members["trunk_vectors"]
    assert members["indexer_matrices"] == {
        f"layers.1.attn.indexer.{n}.weight" for n in ("wq_b", "weights_proj", "compressor.wkv", "compressor.wgate")
    }
    assert members["indexer_vectors"] == {"layers.1.attn.indexer.compressor.ape", "layers.1.attn.indexer.compressor.norm.weight"}
    assert {name: g["algorithm"] for name, g in groups.items()} == {
        "trunk_matrices": "muon", "embeddings": "adamw", "trunk_vectors": "adamw", "indexer_matrices": "muon", "indexer_vectors": "adamw",
    }  # fmt: skip
    blocks = dict(zip((names[id(p)] for p in groups["trunk_matrices"]["params"]), groups["trunk_matrices"]["matrices"], strict=True))
    assert {b for n, b in blocks.items() if ".wo_a." in n} == {MODEL.o_groups}
    assert {b for n, b in blocks.items() if ".wo_a." not in n} == {1}


def test_indexer_groups_have_their_own_rate_and_no_decay() -> None:
    config = make_config()
    settings = dataclasses.replace(config.optimizer, indexer_lr_multiplier=0.5, weight_decay=0.1)
    groups = {g["name"]: g for g in parameter_groups(make_module(config).decoder, settings)}
    assert {n: g["lr"] for n, g in groups.items() if n.startswith("indexer")} == {"indexer_matrices": 0.005, "indexer_vectors": 0.005}
    assert {n: g["weight_decay"] for n, g in groups.items()} == {
        "trunk_matrices": 0.1, "embeddings": 0.1, "trunk_vectors": 0.0, "indexer_matrices": 0.0, "indexer_vectors": 0.0,
    }  # fmt: skip


def test_adamw_alone_trains_the_same_groups() -> None:
    config = make_config(max_steps=2)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="adamw"))
    module, metrics = _fit(config, make_rows([[40], [40]]))
    assert {g["algorithm"] for g in parameter_groups(module.decoder, config.optimizer)} == {"adamw"}
    assert math.isfinite(metrics["train/loss"])


def test_warm_up_moves_only_the_indexers_and_the_next_stage_everything() -> None:
    """In the warm-up the LM loss is logged but not differentiated, and neither weights nor router biases of the trunk move."""
    rows = make_rows([[40, 7]] * 3)
    config = make_config(max_steps=3, stage=WARM_UP)
    module = make_module(config)
    before = _state(module)
    output = module.run_decoder(rows[0])
    assert not output.hidden.requires_grad  # no trunk graph at all
    terms = total_loss(output, rows[0], module.decoder, config)
    torch.testing.assert_close(terms.total.detach(), terms.means(rows[0].step, config)["train/indexer_loss"])
    module, metrics = _fit(config, rows, module)
    assert _changed(before, module) == {name for name, _ in module.decoder.indexer_parameters()}
    assert metrics["train/lm_loss"] > 1
    assert metrics["train/loss"] == pytest.approx(metrics["train/indexer_loss"])
    assert metrics["train/grad_norm"] == 0

    sparse = make_module(make_config(max_steps=3))
    sparse.decoder.load_state_dict(module.decoder.state_dict())
    before = _state(sparse)
    _fit(sparse.config, rows, sparse)
    untouched = {name for name in before if name not in _changed(before, sparse)}
    assert all(name.endswith(("tid2eid", "layers.0.ffn.gate.bias")) for name in untouched), untouched


def test_kl_is_continuous_across_the_stage_switch_where_the_sets_coincide() -> None:
    """With top-k at least the visible entries, dense and sparse support are one set and the KL is the same."""
    (batch,) = make_rows([[40, 7]])
    values = []
    for stage in (WARM_UP, StageConfig()):
        config = make_config(stage=stage, model={"index_topk": 16})
        module = make_module(config)
        values.append(total_loss(module.run_decoder(batch), batch, module.decoder, config).means(batch.step, config)["indexer/kl"])
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-7)


def test_without_a_teacher_the_indexer_is_left_out() -> None:
    config = make_config(teacher="none", max_steps=2)
    module = make_module(config)
    before = _state(module)
    module, metrics = _fit(config, make_rows([[40], [40]]), module)
    assert not _changed(before, module) & {name for name, _ in module.decoder.indexer_parameters()}
    assert not any(g["name"].startswith("indexer") for g in parameter_groups(module.decoder, config.optimizer))
    assert "indexer/kl" not in metrics


def test_warm_up_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="trains nothing here"):
        make_module(make_config(teacher="none", stage=WARM_UP))


def test_size_of_the_kl_does_not_change_the_step_of_the_trunk() -> None:
    rows = make_rows([[40, 7]])
    states = []
    for coefficient in (1.0, 1000.0):
        config = make_config(max_steps=1)
        config = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher, coefficient=coefficient))
        module, _ = _fit(config, rows)
        states.append(_state(module))
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0] if ".attn.indexer." not in n)


def test_clipping_scales_to_the_limit() -> None:
    params = [("p", torch.nn.Parameter(torch.zeros(4))), ("q", torch.nn.Parameter(torch.zeros(1))), ("without", torch.nn.Parameter(torch.zeros(1)))]
    for limit, expected in ((1.0, 1.0), (100.0, 6.5), (0.0, 6.5)):
        params[0][1].grad, params[1][1].grad = torch.full((4,), 3.0), torch.tensor([2.5])
        names, norms = gradient_norms(params)
        assert names == ["p", "q"]
        total = torch.linalg.vector_norm(norms)
        assert float(total) == pytest.approx(6.5)
        clip_to_norm(params, total, limit)
        clipped = torch.cat([params[0][1].grad, params[1][1].grad])
        assert float(clipped.norm()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", ["layers.1.attn.wq_a.weight", "layers.1.attn.indexer.wq_b.weight"])
def test_non_finite_gradient_stops_the_run_naming_the_parameter(bad: str) -> None:
    class Poison(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1:
                dict(pl_module.decoder.named_parameters())[bad].grad[0, 0] = float("nan")

    config = make_config(max_steps=3)
    module = make_module(config)
    with pytest.raises(NonFiniteGradientError, match=rf"the gradient of {bad} is not finite in optimizer step 2"):
        _fit(config, make_rows([[40]] * 3), module, callbacks=[Poison()])
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())  # stopped before the weights were touched


def test_guard_lists_at_most_eight_parameters() -> None:
    with pytest.raises(NonFiniteGradientError, match="p7 and 2 more"):
        FiniteGuard().check([f"p{i}" for i in range(10)], torch.full((10,), float("inf")), 1)


def test_router_biases_move_once_per_optimizer_step() -> None:
    rows = make_rows([[40], [9, 9], [48]], accumulate=3)
    config = make_config(max_steps=1, accumulate_grad_batches=3)
    module = make_module(config)
    gates = {record.layer: record.module for record in module.run_decoder(rows[0]).router}
    counts = {layer: sum(r.counts for b in rows for r in module.run_decoder(b).router if r.layer == layer) for layer in gates}
    before = {layer: gate.bias.clone() for layer, gate in gates.items()}
    _fit(config, rows, module)
    assert gates
    for layer, gate in gates.items():
        expected = before[layer] + 1e-2 * torch.sign(counts[layer].float().mean() - counts[layer])
        torch.testing.assert_close(gate.bias, expected)
        assert gate.bias.abs().max() == pytest.approx(1e-2)
    update_router_biases([gates[1]], counts[1][None], 0.0)


def test_no_figure_is_logged_for_a_progress_bar() -> None:
    """Lightning reads such a figure after every step, and on a GPU the host waits for it."""
    config = make_config(max_steps=3)
    trainer, rows = make_trainer(config, limit_val_batches=1), make_rows([[40, 7]] * 3)
    trainer.fit(make_module(config), loader(rows), loader(rows[:1]))
    assert {"train/loss", "val/loss"} <= set(trainer.callback_metrics)
    assert trainer.progress_bar_metrics == {}


class _EmittingBackend(UnfusedBackend):
    """As a fused backend behaves: kl_sum reads 0 in the forward, the statistics are filled in by the backward pass."""

    def attend_with_indexer_loss(self, *args: Any, **kwargs: Any) -> Any:
        out, lse, kl_sum, stats = super().attend_with_indexer_loss(*args, **kwargs)
        late = IndexerStats(torch.full_like(stats.kl_sum, math.nan), torch.zeros_like(stats.rows))

        def fill(grad: Tensor) -> None:
            late.kl_sum, late.rows = stats.kl_sum, stats.rows

        kl_sum = kl_sum - kl_sum.detach()
        kl_sum.register_hook(fill)
        return out, lse, kl_sum, late


def test_statistics_of_an_emitting_backend_are_read_after_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows([[40, 7], [30], [48], [5]], accumulate=2)
    config = make_config(max_steps=2, accumulate_grad_batches=2)
    plain, expected = _fit(config, rows)
    monkeypatch.setattr("csa_model.backend_choice.get_backend", lambda name: _EmittingBackend())
    emitting, metrics = _fit(config, rows)
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(_state(plain).values(), _state(emitting).values(), strict=True))


def test_recomputation_changes_neither_weights_nor_metrics() -> None:
    rows = make_rows([[40, 7], [30, 18]])
    stored, expected = _fit(make_config(max_steps=2), rows)
    recomputed, metrics = _fit(make_config(max_steps=2, model={"recompute": True}), rows)
    assert metrics == expected
    assert all(torch.equal(a, b) for a, b in zip(_state(stored).values(), _state(recomputed).values(), strict=True))


def test_bf16_mixed_keeps_weights_in_fp32_and_follows_fp32() -> None:
    rows = make_rows([[40, 7], [30, 18]])
    _, expected = _fit(make_config(max_steps=2), rows)
    module, metrics = _fit(make_config(max_steps=2, precision="bf16-mixed"), rows)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    for name in ("train/lm_loss", "train/mtp_loss", "val/loss" if "val/loss" in expected else "train/lm_loss"):
        assert metrics[name] == pytest.approx(expected[name], rel=2e-2)


def test_plain_decoder_trains_without_moe_streams_and_mtp() -> None:
    model = {part: dataclasses.replace(getattr(MODEL, part), enabled=False) for part in ("hyper_connections", "moe", "mtp")}
    _, metrics = _fit(make_config(max_steps=2, model=model), make_rows([[40], [40]]))
    assert {"train/lm_loss", "train/indexer_loss"} <= set(metrics)
    assert not {"train/mtp_loss", "train/balance_loss"} & set(metrics)


def test_validation_weights_tokens_not_rows() -> None:
    rows = make_rows([[11], [48], [3, 2]])
    config = make_config()
    module = make_module(config)
    trainer = make_trainer(config, limit_val_batches=1.0)
    (metrics,) = trainer.validate(module, loader(rows), verbose=False)
    with torch.no_grad():
        outputs = [module.run_decoder(b) for b in rows]
        nats = sum(
            F.cross_entropy(module.decoder.logits(o.hidden), b.targets, ignore_index=-100, reduction="sum")
            for o, b in zip(outputs, rows, strict=True)
        )
        kl = sum(o.indexer[0].stats.kl_sum for o in outputs)
    tokens, query_rows = 10 + 47 + 3, (11 - 3) + (48 - 3)
    assert metrics["val/loss"] == pytest.approx(float(nats) / tokens, rel=1e-6)
    assert metrics["val/bits_per_byte"] == pytest.approx(float(nats) / math.log(2) / (3 * tokens), rel=1e-6)
    assert metrics["val/indexer_kl"] == metrics["val/indexer_kl/layer1"] == pytest.approx(float(kl) / query_rows, rel=1e-6)
    assert set(metrics) == {"val/loss", "val/bits_per_byte", "val/mtp_loss", "val/indexer_kl", "val/indexer_kl/layer1"}


def test_rows_that_stand_for_no_text_have_no_bits_per_byte() -> None:
    module = make_module(make_config())
    sums = torch.ones(len(module._validation.names), dtype=torch.float64)
    assert "val/bits_per_byte" in module._validation.metrics(sums)
    sums[module._validation.names.index("bytes")] = 0
    assert "val/bits_per_byte" not in module._validation.metrics(sums)


def test_init_from_takes_weights_and_names_what_does_not_fit(tmp_path: Any) -> None:
    source = make_module(make_config(), seed=1)
    path = tmp_path / "weights.ckpt"
    torch.save({"state_dict": source.state_dict(), "hyper_parameters": {"config": plain(source.config)}}, path)
    target = make_module(make_config(teacher="compressed_only"), seed=2)
    load_initial_weights(target.decoder, path)
    assert all(torch.equal(a, b) for a, b in zip(_state(source).values(), _state(target).values(), strict=True))

    other = make_module(make_config(model={"hidden_size": 32, "mtp": dataclasses.replace(MODEL.mtp, enabled=False)}))
    before = _state(other)
    with pytest.raises(ConfigError) as error:
        load_initial_weights(other.decoder, path)
    assert "checkpoint of another model" in str(error.value)
    assert "unexpected mtp." in str(error.value)
    assert "embed.weight is [61, 16] there and [61, 32] here" in str(error.value)
    assert "model.hidden_size: 16 there, 32 here" in str(error.value)
    assert len(str(error.value)) < 1500
    assert not _changed(before, other)


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), (b"no checkpoint", "cannot be read"), ({"a": 1}, "holds no state dict")])
def test_init_from_refuses_what_is_no_checkpoint(tmp_path: Any, content: Any, message: str) -> None:
    path = tmp_path / "file.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=message):
        load_initial_weights(make_module(make_config()).decoder, path)


def test_compiled_module_keeps_clean_keys() -> None:
    """Checkpoints of compiled and plain runs load into each other."""
    plain = make_module(make_config())
    config = dataclasses.replace(make_config(), compile=True)
    compiled = make_module(config, seed=5)
    parts = {type(m).__name__ for m in compiled.decoder.modules() if m._compiled_call_impl is not None}
    assert parts == {"RMSNorm", "SwiGLU", "HyperHead"}
    assert set(compiled.state_dict()) == set(plain.state_dict())
    compiled.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(compiled.state_dict(), strict=True)
