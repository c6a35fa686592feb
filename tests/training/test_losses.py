# SPDX-License-Identifier: Apache-2.0
"""Losses of one optimizer step: exact over micro-batches, silent where nothing is predicted, and each reaching its own parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from training_helpers import loader, make_config, make_module, make_rows, make_trainer

from csa_model.config import StageConfig
from csa_model.data.batch import PackedBatch
from csa_model.losses import cross_entropy_sum, total_loss


class Recorder(L.Callback):
    """Gradients, before clipping, and logged losses of every optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(self.metrics):
            self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def _one_step(batches: list[PackedBatch], **settings: Any) -> tuple[Recorder, Any]:
    config = make_config(max_steps=1, accumulate_grad_batches=len(batches), **settings)
    module, recorder = make_module(config), Recorder()
    make_trainer(config, callbacks=[recorder]).fit(module, loader(batches))
    return recorder, module


def _as_one_row(batches: list[PackedBatch]) -> PackedBatch:
    """The documents of several rows in a single one, padding dropped."""
    from kernels import PackedLayout

    real = [b.layout.num_real_tokens for b in batches]
    lengths = [n for b in batches for n in b.layout.lengths]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(b, name)[:n] for b, n in zip(batches, real, strict=True)])

    return dataclasses.replace(
        batches[0],
        tokens=joined("tokens"),
        targets=joined("targets"),
        mtp_targets=joined("mtp_targets"),
        layout=PackedLayout.from_lengths(lengths),
    )


def test_accumulation_equals_one_batch_with_unequal_lengths() -> None:
    """LM, MTP, KL and balance loss are divided by the counts of the whole optimizer step."""
    rows = make_rows([[40, 5], [2], [17, 3, 1]], accumulate=3)
    split, split_module = _one_step(rows)
    joint, joint_module = _one_step([_as_one_row(rows)])
    for name, grad in joint.gradients[0].items():
        torch.testing.assert_close(split.gradients[0][name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    names = (
        "train/loss",
        "train/lm_loss",
        "train/mtp_loss",
        "train/indexer_loss",
        "train/balance_loss",
        "indexer/kl",
        "train/grad_norm",
        "indexer/grad_norm",
    )
    for name in names:
        assert split.metrics[0][name] == pytest.approx(joint.metrics[0][name], rel=1e-6, abs=1e-7), name
    for a, b in zip(split_module.buffers(), joint_module.buffers(), strict=True):
        assert torch.equal(a, b)  # router biases moved once, by the counts of all three rows


def test_every_term_is_divided_by_the_counts_of_the_step() -> None:
    """Micro-batches of 10 and 2 valid tokens give their sum over 12, not the mean of their means."""
    rows = make_rows([[11], [3]], accumulate=2)
    assert [int((b.targets >= 0).sum()) for b in rows] == [10, 2]
    config = make_config()
    module = make_module(config)
    with torch.no_grad():
        sums = [total_loss(module.run_decoder(b), b, module.decoder, config) for b in rows]
        logits = [module.decoder.logits(module.run_decoder(b).hidden) for b in rows]
    expected = sum(F.cross_entropy(x, b.targets, ignore_index=-100, reduction="sum") for x, b in zip(logits, rows, strict=True)) / 12
    logged = sum(terms.means(b.step, config)["train/lm_loss"] for terms, b in zip(sums, rows, strict=True))
    torch.testing.assert_close(logged, expected)
    recorder, _ = _one_step(rows)
    assert recorder.metrics[0]["train/lm_loss"] == pytest.approx(float(expected), rel=1e-6)


def test_the_logged_loss_is_the_loss_that_is_differentiated() -> None:
    (batch,) = make_rows([[30, 9]])
    config = make_config()
    module = make_module(config)
    terms = total_loss(module.run_decoder(batch), batch, module.decoder, config)
    means = terms.means(batch.step, config)
    torch.testing.assert_close(means["train/loss"], terms.total.detach())
    parts = means["train/lm_loss"] + 0.3 * means["train/mtp_loss"] + means["train/indexer_loss"] + 1e-2 * means["train/balance_loss"]
    torch.testing.assert_close(means["train/loss"], parts)
    assert means["indexer/kl"] > 0
    assert means["train/balance_loss"] > 0


def test_a_step_without_any_target_is_silent_and_training_goes_on() -> None:
    """LM loss 0, gradients finite, the next step trains normally."""
    rows = make_rows([[30], [30], [30]])
    ignored = torch.full_like(rows[1].targets, -100)
    step = dataclasses.replace(rows[1].step, tokens=0, mtp_tokens=0)
    rows[1] = dataclasses.replace(rows[1], targets=ignored, mtp_targets=ignored, step=step)
    config = make_config(max_steps=3)
    module, recorder = make_module(config), Recorder()
    make_trainer(config, callbacks=[recorder]).fit(module, loader(rows))
    assert recorder.metrics[1]["train/lm_loss"] == recorder.metrics[1]["train/mtp_loss"] == 0
    assert all(bool(torch.isfinite(g).all()) for g in recorder.gradients[1].values())
    assert recorder.metrics[2]["train/lm_loss"] > 1
    assert recorder.gradients[2]["decoder.head.weight"].abs().max() > 0


def test_documents_too_short_for_any_entry_give_no_indexer_loss() -> None:
    recorder, _ = _one_step(make_rows([[3, 2, 1]]))
    assert recorder.metrics[0]["indexer/kl"] == 0
    assert all(bool(torch.isfinite(g).all()) for g in recorder.gradients[0].values())


def test_chunked_cross_entropy_equals_whole() -> None:
    config = make_config()
    module = make_module(config)
    hidden = torch.randn(20, 16, requires_grad=True)
    targets = torch.randint(0, 61, (20,)).index_fill(0, torch.tensor([3, 4]), -100)
    results = []
    for limit in (2**20, 61 * 7):
        loss = cross_entropy_sum(module.decoder, hidden, targets, logit_elements=limit)
        results.append((loss.detach(), *torch.autograd.grad(loss, [hidden, module.decoder.head.weight])))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)


def test_a_backend_that_fuses_the_head_with_its_loss_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 and rounded dtypes, with gradients and without; a float64 model and a compiled one take the plain path."""
    module, asked = make_module(make_config()), []

    class Fused:
        def linear_cross_entropy(self, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
            asked.append((hidden.dtype, torch.is_grad_enabled()))
            return F.cross_entropy(F.linear(hidden.float(), weight), targets, ignore_index=ignored, reduction="sum")

    hidden, targets = torch.randn(20, 16), torch.randint(0, 61, (20,)).index_fill(0, torch.tensor([3, 4]), -100)
    expected = cross_entropy_sum(module.decoder, hidden, targets)
    module.decoder.fused = Fused()
    torch.testing.assert_close(cross_entropy_sum(module.decoder, hidden, targets), expected)
    with torch.no_grad():
        cross_entropy_sum(module.decoder, hidden.bfloat16(), targets)
    assert asked == [(torch.float32, True), (torch.bfloat16, False)]
    cross_entropy_sum(module.decoder.double(), hidden.double(), targets)
    module.decoder.float()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(cross_entropy_sum(module.decoder, hidden, targets), expected)
    assert len(asked) == 2


def _reached(module: Any, loss: Tensor) -> set[str]:
    module.zero_grad()
    loss.backward()
    return {name for name, p in module.decoder.named_parameters() if p.grad is not None and bool(p.grad.abs().max() > 0)}


def test_each_loss_reaches_its_own_parameters() -> None:
    """The LM loss reaches no indexer parameter, the indexer loss exactly the indexer's."""
    (batch,) = make_rows([[30, 9]])
    config = make_config()
    module = make_module(config)
    indexer = {name for name, _ in module.decoder.indexer_parameters()}
    without = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher, coefficient=0.0))
    assert not _reached(module, total_loss(module.run_decoder(batch), batch, module.decoder, without).total) & indexer
    # Coefficient 0 still gives zero gradients, not None: ranks and optimizer state stay aligned.
    assert all(p.grad is not None for _, p in module.decoder.indexer_parameters())
    empty = dataclasses.replace(batch, targets=torch.full_like(batch.targets, -100), mtp_targets=torch.full_like(batch.targets, -100))
    no_balance = dataclasses.replace(
        config, model=dataclasses.replace(config.model, moe=dataclasses.replace(config.model.moe, balance_coefficient=0.0))
    )
    assert _reached(module, total_loss(module.run_decoder(empty), empty, module.decoder, no_balance).total) == indexer


@pytest.mark.parametrize("stage", [StageConfig(name="dense", attention="dense", indexer_loss="off"), StageConfig()])
def test_lm_loss_of_the_first_step_does_not_depend_on_the_teacher(stage: StageConfig) -> None:
    rows = make_rows([[40, 7]])
    losses = {t: _one_step(rows, teacher=t, stage=stage)[0].metrics[0]["train/lm_loss"] for t in ("full_csa", "compressed_only", "none")}
    assert len(set(losses.values())) == 1
