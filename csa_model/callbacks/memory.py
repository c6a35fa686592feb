# SPDX-License-Identifier: Apache-2.0
"""Peak memory between two logs."""

from __future__ import annotations

from typing import Any

import lightning as L
import psutil
import torch

GIB = 2**30


class PeakMemory(L.Callback):
    """On CUDA `memory/peak_gib`: the most that the allocator held since the last log and what a CUDA graph keeps for itself, the largest over ranks;
    the counter is reset at each log.

    Elsewhere `memory/process_rss_gib`: resident memory of the process at the log, the largest over ranks. It includes the interpreter and the
    libraries, and it is no peak.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not stepped or trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        on_cuda = pl_module.device.type == "cuda"
        used = torch.cuda.max_memory_allocated(pl_module.device) if on_cuda else psutil.Process().memory_info().rss
        graph = getattr(pl_module, "graph", None)
        used += graph.hidden_bytes if on_cuda and graph is not None else 0
        largest = torch.tensor(used / GIB, device=pl_module.device)
        if trainer.world_size > 1:
            largest = trainer.strategy.reduce(largest, reduce_op="max")
        pl_module.log("memory/peak_gib" if on_cuda else "memory/process_rss_gib", largest, on_step=True, on_epoch=False, batch_size=1)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(pl_module.device)
