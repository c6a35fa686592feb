# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every parameter group."""

from __future__ import annotations

from typing import Any

import lightning as L


class LearningRates(L.Callback):
    """Logs `lr/<group>`, the rate that the optimizer step just taken used (a LearningRateMonitor shows the one that follows it)."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._used = {f"lr/{group['name']}": float(group["lr"]) for group in optimizer.param_groups}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            pl_module.log_dict(self._used, on_step=True, on_epoch=False, batch_size=1)
