# SPDX-License-Identifier: Apache-2.0
"""Ends training when its time is over, between two optimizer steps."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer


class TimeLimit(Timer):
    """Lightning's timer for one start of the program, which a batch job limits: a run that goes on has the whole time again, the stages of a staged
    run share it.

    Args:
        duration: DD:HH:MM:SS.
        spent: seconds of it that are over already.
    """

    def __init__(self, duration: str, spent: float = 0.0) -> None:
        super().__init__(duration, verbose=False)
        self._offset = spent  # type: ignore[assignment]  # Lightning's own, of the starts before, which do not count here

    def over(self) -> bool:
        """Whether nothing is left."""
        return (self.time_remaining() or 0.0) <= 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:  # gradients half accumulated would be lost
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning's would count the time of the starts before and end a resumed run at once."""
        return {}
