# SPDX-License-Identifier: Apache-2.0
"""Training on an NVIDIA GPU: nothing waits for the device inside a step, and a poisoned step still stops the run in time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from training_helpers import loader, make_config, make_module, make_rows, make_trainer

from csa_model.callbacks import IndexerDiagnostics, LastCheckpoint, PeakMemory, Throughput, periodic_checkpoints
from csa_model.config import CheckpointConfig
from csa_model.gradients import NonFiniteGradientError, clip_to_norm, gradient_norms
from csa_model.losses import total_loss
from csa_model.optimizers import MuonAdamW, build_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _fit(config: Any, callbacks: list[L.Callback], rows: Any) -> tuple[Any, L.Trainer]:
    module = make_module(config)
    trainer = make_trainer(config, accelerator="gpu", callbacks=callbacks, enable_checkpointing=True, logger=False)
    trainer.fit(module, loader(rows), loader(rows[:1]))
    return module, trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_on_the_gpu_follows_the_cpu(precision: str, tmp_path: Path) -> None:
    rows = make_rows([[40, 7], [30, 18], [48]])
    reference = make_config(max_steps=3)
    cpu = make_trainer(reference, limit_val_batches=0)
    cpu.fit(make_module(reference), loader(rows))
    config = make_config(max_steps=3, accelerator="gpu", precision=precision)
    callbacks = [Throughput(config), PeakMemory(), periodic_checkpoints(CheckpointConfig(every_n_steps=2), tmp_path), LastCheckpoint(tmp_path)]
    _, trainer = _fit(config, callbacks, rows)
    for name in ("train/lm_loss", "train/mtp_loss"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(cpu.callback_metrics[name]), rel=1e-3 if precision == "32-true" else 2e-2)
    assert trainer.callback_metrics["memory/peak_gib"] > 0
    assert "memory/process_rss_gib" not in trainer.callback_metrics
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3


def test_losses_clipping_guard_and_optimizer_never_wait_for_the_device() -> None:
    (batch,) = make_rows([[40, 7]])
    config = make_config(accelerator="gpu")
    module = make_module(config).cuda()
    batch = batch.to("cuda")
    optimizer = build_optimizer(module.decoder, config.optimizer)
    trained = [(n, p) for n, p in module.decoder.named_parameters() if p.requires_grad]
    for step in range(3):
        output = module.run_decoder(batch)
        with _no_waiting():
            terms = total_loss(output, batch, module.decoder, config)
        terms.total.backward()
        with _no_waiting():
            names, norms = gradient_norms(trained)
            module._guards["train/grad_norm"].check(names, norms, step + 1)
            clip_to_norm(trained, torch.linalg.vector_norm(norms), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("choice", ["always", "never"])
def test_whole_steps_of_a_run_never_wait_for_the_device(choice: str) -> None:
    """From the end of one step to that of a later one, with norms, update, schedule and what Lightning does, after a log."""

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (5, 7):
                torch.cuda.set_sync_debug_mode("error" if batch_idx == 5 else "default")

    config = make_config(max_steps=10, accelerator="gpu", precision="bf16-mixed", cuda_graph=choice, log_every_n_steps=5)
    model = dataclasses.replace(config.model, head_dim=16, index_head_dim=16, hidden_size=32)
    config = dataclasses.replace(config, model=model, backend=dataclasses.replace(config.backend, name="triton"))
    try:
        # rows that are on the device already: how they get there is the data module's matter, and train.py's loader pins them
        module, trainer = _fit(config, [Watch()], [row.to("cuda") for row in make_rows([[40, 7], [30, 18]] * 5)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 10
    assert (module.graph is not None) == (choice == "always")


def test_a_poisoned_step_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    class Poison(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1:
                dict(pl_module.decoder.named_parameters())["layers.1.attn.wq_a.weight"].grad[0, 0] = float("nan")

    rows = make_rows([[40]] * 6)
    config = make_config(max_steps=6, accelerator="gpu")
    for interval in (1, 4):  # saved at once, and not before the next step has noticed
        folder = tmp_path / str(interval)
        with pytest.raises(NonFiniteGradientError, match=r"layers\.1\.attn\.wq_a\.weight is not finite in optimizer step 2"):
            _fit(config, [Poison(), periodic_checkpoints(CheckpointConfig(every_n_steps=interval), folder), LastCheckpoint(folder)], rows)
        for path in folder.glob("*.ckpt"):
            saved = torch.load(path, weights_only=True)
            assert saved["global_step"] == 1
            assert all(bool(torch.isfinite(v).all()) for v in saved["state_dict"].values() if v.is_floating_point())


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 3e-2)])
def test_compiled_gradients_equal_the_plain_ones(precision: str, tolerance: float) -> None:
    """Documents of other lengths in every row. Gradients of one pass: several steps would compare two chaotic paths."""
    rows = make_rows([[40, 7], [30, 18], [9, 9, 9]])
    gradients = []
    for compiled in (False, True):
        config = dataclasses.replace(make_config(accelerator="gpu", precision=precision), compile=compiled)
        module = make_module(config).cuda()
        for batch in (row.to("cuda") for row in rows):
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
                output = module.run_decoder(batch)
            total_loss(output, batch, module.decoder, config).total.backward()
        gradients.append({n: p.grad for n, p in module.decoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, plain in gradients[0].items():
        assert (gradients[1][name] - plain).norm() <= tolerance * plain.norm() + 1e-6, name


def test_muon_in_bf16_follows_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 64, 96, generator=generator)
    grad = torch.randn(3, 64, 96, generator=generator)
    updates = []
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(start.clone().to(device))
        p.grad = grad.to(device)
        MuonAdamW([{"name": "m", "algorithm": "muon", "params": [p], "lr": 1.0}]).step()
        updates.append((p.detach().cpu() - start) / 0.18)
    assert (updates[0] - updates[1]).norm() < 0.03 * updates[0].norm()
    assert float(updates[1].square().mean().sqrt()) == pytest.approx(1.0, abs=0.02)


def test_diagnostics_on_the_gpu_follow_the_cpu() -> None:
    class Data(L.LightningDataModule):
        def val_dataloader(self) -> Any:
            return loader(make_rows([[40, 5, 3]], seed=7))

    results = []
    for accelerator in ("cpu", "gpu"):
        config = make_config(accelerator=accelerator)
        trainer = make_trainer(config, accelerator=accelerator)
        trainer.datamodule = Data()  # type: ignore[attr-defined]
        module = make_module(config).to("cuda" if accelerator == "gpu" else "cpu")
        results.append(IndexerDiagnostics(config.callbacks.indexer_diagnostics, config.model.index_topk).measure(trainer, module))
    assert results[0] == pytest.approx(results[1], rel=1e-3, abs=1e-4)
