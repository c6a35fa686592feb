# SPDX-License-Identifier: Apache-2.0
"""Periodic checkpoints and the last one, which is written however a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from csa_model.config import CheckpointConfig
from csa_model.gradients import NonFiniteGradientError

LAST = "last.ckpt"


def periodic_checkpoints(config: CheckpointConfig, folder: Path) -> ModelCheckpoint:
    """Every `every_n_steps` optimizer steps; the latest `keep` of them stay, and last.ckpt points to the newest."""
    return ModelCheckpoint(
        dirpath=folder,
        filename="step{step:06d}",
        auto_insert_metric_name=False,
        every_n_train_steps=config.every_n_steps,
        save_top_k=config.keep,
        monitor="step",
        mode="max",
        save_last="link",
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )


class LastCheckpoint(L.Callback):
    """Writes last.ckpt at the end of training, and when an interrupt or an error ends it.

    A state is worth saving only between two optimizer steps: not while the optimizer changes the weights, not with gradients half accumulated (a
    resume would lose them), and not after a gradient that is not finite. In those cases last.ckpt stays the newest periodic checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sound = trainer.global_step > 0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._sound = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._sound = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._sound and trainer.should_stop:  # time is over: a validation follows, which a batch job may not live to see the end of
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Ranks cannot be brought together any more when one of them has failed.
        if self._sound and trainer.world_size == 1 and not isinstance(exception, NonFiniteGradientError):
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        # Lightning moves the finished file into place, which replaces the link and not the periodic checkpoint that it points to.
        trainer.save_checkpoint(self.folder / LAST)
