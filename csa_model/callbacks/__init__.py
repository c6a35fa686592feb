# SPDX-License-Identifier: Apache-2.0
"""What is measured and saved while training, one small callback per concern."""

from __future__ import annotations

import lightning as L

from csa_model.callbacks.checkpoints import LastCheckpoint, periodic_checkpoints
from csa_model.callbacks.diagnostics import IndexerDiagnostics
from csa_model.callbacks.learning_rates import LearningRates
from csa_model.callbacks.memory import PeakMemory
from csa_model.callbacks.throughput import Throughput
from csa_model.callbacks.time_limit import TimeLimit
from csa_model.config import INDEXED_RATIO, ExperimentConfig
from csa_model.launch import job_seconds
from csa_model.run_dir import RunDirectory

__all__ = [
    "IndexerDiagnostics",
    "LastCheckpoint",
    "LearningRates",
    "PeakMemory",
    "Throughput",
    "TimeLimit",
    "build_callbacks",
    "periodic_checkpoints",
]


def build_callbacks(config: ExperimentConfig, run: RunDirectory) -> list[L.Callback]:
    """What `config.callbacks` and trainer.max_time ask for. Checkpoints come last: they then count what the others did in the same step."""
    settings = config.callbacks
    callbacks: list[L.Callback] = []
    if settings.throughput:
        callbacks.append(Throughput(config))
    if settings.peak_memory:
        callbacks.append(PeakMemory())
    if settings.learning_rates:
        callbacks.append(LearningRates())
    layers = config.model.compress_ratios[: config.model.num_hidden_layers + config.model.mtp.enabled]
    if settings.indexer_diagnostics.enabled and INDEXED_RATIO in layers:
        callbacks.append(IndexerDiagnostics(settings.indexer_diagnostics, config.model.index_topk))
    if config.trainer.max_time is not None:
        callbacks.append(TimeLimit(config.trainer.max_time, job_seconds()))
    callbacks += [periodic_checkpoints(settings.checkpoint, run.checkpoints), LastCheckpoint(run.checkpoints)]
    return callbacks
