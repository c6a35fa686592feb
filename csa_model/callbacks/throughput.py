# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of training, and the share of the card's peak where the peak is known."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from csa_model.config import ExperimentConfig
from csa_model.flops import peak_flops, training_flops

if TYPE_CHECKING:
    from csa_model.data.batch import PackedBatch


class Throughput(L.Callback):
    """Logs `throughput/tokens_per_second` (real tokens, all ranks) and, on a listed card, `throughput/mfu`, over the steps since the last log.

    Loading data and writing checkpoints count; validation and diagnostics do not. What pays for warming up is left out: the first batch of
    a run, or those until a CUDA graph is replayed. The device is waited for only where a window ends or pauses.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.learns = config.teacher.name != "none" and config.stage.indexer_loss != "off"
        self._peak: float | None = None
        self._tokens, self._flops, self._seconds = 0, 0, 0.0
        self._since: float | None = None
        self._device = torch.device("cpu")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._device = pl_module.device
        if self._device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(self._device), self.config.trainer.precision)
        self._since = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        graph = getattr(pl_module, "graph", None)
        if self._since is None or (graph is not None and not graph.captured):
            self._restart()
            return
        self._tokens += batch.layout.num_real_tokens
        if self._peak is not None:
            self._flops += training_flops(self.config.model, batch.layout.lengths, self.config.stage, indexer_trains=self.learns)
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stop()
        totals = torch.tensor([self._tokens, self._flops], dtype=torch.float64, device=self._device)
        if trainer.world_size > 1:
            totals = trainer.strategy.reduce(totals, reduce_op="sum")
        tokens, flops = totals.tolist()
        metrics = {"throughput/tokens_per_second": tokens / self._seconds}
        if self._peak is not None:
            metrics["throughput/mfu"] = flops / self._seconds / (self._peak * trainer.world_size)
        for name, value in metrics.items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1)
        self._restart()

    def _restart(self) -> None:
        self._synchronize()
        self._tokens, self._flops, self._seconds = 0, 0, 0.0
        self._since = time.perf_counter()

    def _stop(self) -> None:
        if self._since is not None:
            self._synchronize()
            self._seconds += time.perf_counter() - self._since

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        running = self._since is not None
        if running:
            self._stop()
        yield
        if running:
            self._since = time.perf_counter()

    @staticmethod
    @contextlib.contextmanager
    def pause_all(trainer: L.Trainer) -> Iterator[None]:
        """`paused` of every Throughput callback of the trainer."""
        with contextlib.ExitStack() as stack:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, Throughput):
                    stack.enter_context(callback.paused())
            yield

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._since is not None:
            self._stop()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._since is not None:
            self._since = time.perf_counter()
