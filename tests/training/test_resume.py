# SPDX-License-Identifier: Apache-2.0
"""A run that is cut in two equals a run in one go, bit for bit: weights, optimizer, router biases, data order."""

from __future__ import annotations

import dataclasses
import random
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from training_helpers import StopAt, make_config, make_module, make_trainer

from csa_model.callbacks import LastCheckpoint, periodic_checkpoints
from csa_model.config import CheckpointConfig, DataConfig, ExperimentConfig, SchedulerConfig, TokenizerConfig
from csa_model.data.datamodule import CSADataModule
from csa_model.gradients import NonFiniteGradientError
from csa_model.lit_module import CSALitModule


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if "train/loss" in trainer.callback_metrics:
            self.values.setdefault(trainer.global_step, float(trainer.callback_metrics["train/loss"]))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    source = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "(", ")", "=", "\n"]
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(" ".join(source.choices(words, k=source.randint(3, 60))))
    return folder


def _config(text: Path, workers: int = 0, max_steps: int = 20, accumulate: int = 2) -> ExperimentConfig:
    config = make_config(max_steps=max_steps, accumulate_grad_batches=accumulate, model={"vocab_size": 260})
    data = DataConfig(
        name="text_files",
        path=str(text),
        cache_dir=str(text.parent / "cache"),
        sequence_length=40,
        tokens_per_batch=96,
        validation_batches=2,
        validation_fraction=0.1,
        num_workers=workers,
        tokenizer=TokenizerConfig(name="bytes", vocab_size=257),
    )
    return dataclasses.replace(config, data=data)


def _data(config: ExperimentConfig) -> CSADataModule:
    return CSADataModule(
        config.data,
        ratios=config.model.compress_ratios,
        vocab_size=config.model.vocab_size,
        accumulate=config.trainer.accumulate_grad_batches,
        seed=3,
        max_steps=config.trainer.max_steps,
    )


def _run(
    config: ExperimentConfig, folder: Path, resume: Path | None = None, *extra: L.Callback, seed: int = 0
) -> tuple[CSALitModule, Losses, L.Trainer]:
    module, losses = make_module(config, seed), Losses()
    callbacks = [losses, *extra, periodic_checkpoints(CheckpointConfig(every_n_steps=5, keep=10), folder), LastCheckpoint(folder)]
    validation = {"limit_val_batches": 1.0, "val_check_interval": 5 * config.trainer.accumulate_grad_batches, "check_val_every_n_epoch": None}
    trainer = make_trainer(config, callbacks=callbacks, enable_checkpointing=True, **validation)
    trainer.fit(module, datamodule=_data(config), ckpt_path=resume, weights_only=True)
    return module, losses, trainer


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CSALitModule, Losses, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("straight")
    module, losses, _ = _run(_config(text), folder)
    return module, losses, folder


def _assert_same(module: CSALitModule, straight: CSALitModule) -> None:
    for (name, a), b in zip(module.state_dict().items(), straight.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("workers", [0, 2])
def test_ten_and_ten_steps_equal_twenty(text: Path, straight: Any, tmp_path: Path, workers: int) -> None:
    """From last.ckpt of a run that ended, with Muon, expert balancing and data order; losses and weights agree bit for bit."""
    _run(_config(text, workers, max_steps=10), tmp_path)
    resumed, losses, trainer = _run(_config(text, workers), tmp_path, tmp_path / "last.ckpt", seed=9)
    assert trainer.global_step == 20
    assert losses.values == {step: value for step, value in straight[1].values.items() if step > 10}
    assert len(losses.values) == 9
    _assert_same(resumed, straight[0])


def test_resume_from_the_middle_twice(text: Path, straight: Any, tmp_path: Path) -> None:
    """From a periodic checkpoint of a run whose end lay further away, and once more from a checkpoint of that one."""
    _run(_config(text, max_steps=15), tmp_path, straight[2] / "step000005.ckpt", seed=9)
    resumed, _, _ = _run(_config(text), tmp_path / "again", tmp_path / "step000010.ckpt", seed=8)
    _assert_same(resumed, straight[0])


def test_an_interrupt_leaves_a_checkpoint_that_continues_exactly(text: Path, straight: Any, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # Lightning turns the interrupt into a non-zero exit, and ignores further ones
            _run(_config(text), tmp_path, None, StopAt(2 * 7 + 1, KeyboardInterrupt()))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 7
    assert torch.load(tmp_path / "step000005.ckpt", weights_only=True)["global_step"] == 5  # not written through the link
    resumed, _, _ = _run(_config(text), tmp_path, tmp_path / "last.ckpt", seed=9)
    _assert_same(resumed, straight[0])


@pytest.mark.parametrize(
    ("micro_batch", "error"), [(2 * 7 + 2, RuntimeError("in the second half of a step")), (2 * 7 + 1, NonFiniteGradientError("poison"))]
)
def test_an_unsound_state_is_not_saved(text: Path, straight: Any, tmp_path: Path, micro_batch: int, error: Exception) -> None:
    """The error comes through; last.ckpt stays the newest periodic checkpoint."""
    with pytest.raises(type(error)):
        _run(_config(text), tmp_path, None, StopAt(micro_batch, error))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5


def test_checkpoints_are_plain_and_bounded(text: Path, straight: Any) -> None:
    """`torch.load(weights_only=True)` reads them, and the module comes back from the file alone."""
    path = straight[2] / "last.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["global_step"] == 20
    assert content["hyper_parameters"]["config"]["model"]["compress_ratios"] == [0, 4, 8, 0]
    module = CSALitModule.load_from_checkpoint(path, weights_only=True)
    assert module.config == straight[0].config
    _assert_same(module, straight[0])


def test_only_the_latest_checkpoints_stay(text: Path, tmp_path: Path) -> None:
    config = _config(text, max_steps=6, accumulate=1)
    callbacks = [periodic_checkpoints(CheckpointConfig(every_n_steps=1, keep=2), tmp_path), LastCheckpoint(tmp_path)]
    make_trainer(config, callbacks=callbacks, enable_checkpointing=True).fit(make_module(config), datamodule=_data(config))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step000005.ckpt", "step000006.ckpt"]
    assert not (tmp_path / "last.ckpt").is_symlink()


class Rates(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.values.append(optimizer.param_groups[0]["lr"])


def test_an_extended_run_has_its_new_schedule_from_the_first_step_on(text: Path, tmp_path: Path) -> None:
    rates = {}
    for name, steps, checkpoint in (("first", 4, None), ("extended", 8, tmp_path / "last.ckpt"), ("whole", 8, None)):
        config = _config(text, max_steps=steps)
        config = dataclasses.replace(config, scheduler=SchedulerConfig(name="cosine", warmup_steps=0))
        callback = Rates()
        saves = [LastCheckpoint(tmp_path)] if name == "first" else []
        trainer = make_trainer(config, callbacks=[callback, *saves])
        trainer.fit(CSALitModule(config), datamodule=_data(config), ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        rates[name] = callback.values
    assert rates["extended"] == rates["whole"][4:]
    assert rates["first"] != rates["whole"][:4]
