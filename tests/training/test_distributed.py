# SPDX-License-Identifier: Apache-2.0
"""Two ranks equal one process: losses, gradients, router biases, validation, diagnostics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from training_helpers import loader, make_config, make_module, make_rows, make_trainer

from csa_model.callbacks import IndexerDiagnostics, LastCheckpoint, PeakMemory, Throughput, periodic_checkpoints
from csa_model.config import CheckpointConfig
from csa_model.data.batch import PackedBatch

# The first step's second row is too short for any compressed entry: no compressor and no indexer takes part in it.
TRAIN = make_rows([[40, 5], [3, 2], [17, 3], [48]], accumulate=2, seed=1)
# Five rows for two ranks, one of them without any entry; the sixth is padding.
VALIDATION = make_rows([[40], [11, 20], [3, 3], [48], [30]], seed=2)
PADDING = make_rows([[0]])


class Rows(L.LightningDataModule):
    """Rank r of w takes rows i * w + r."""

    def _share(self, rows: list[PackedBatch]) -> Any:
        assert self.trainer is not None
        world = self.trainer.world_size
        padded = rows + PADDING * (-len(rows) % world)
        return loader(padded[self.trainer.global_rank :: world])

    def train_dataloader(self) -> Any:
        return self._share(TRAIN)

    def val_dataloader(self) -> Any:
        return self._share(VALIDATION)


class Report(L.Callback):
    """Every rank writes what it logged and what it ended with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        content = {"metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}, "state": pl_module.state_dict()}
        torch.save(content, self.folder / f"{trainer.world_size}_{trainer.global_rank}.pt")


def _run(folder: Path, ranks: int) -> list[dict[str, Any]]:
    config = make_config(max_steps=2, accumulate_grad_batches=2 // ranks)
    callbacks = [
        Throughput(config), PeakMemory(), IndexerDiagnostics(config.callbacks.indexer_diagnostics, config.model.index_topk), Report(folder),
        periodic_checkpoints(CheckpointConfig(every_n_steps=1, keep=1), folder / str(ranks)), LastCheckpoint(folder / str(ranks)),
    ]  # fmt: skip
    validation = {"limit_val_batches": 1.0, "val_check_interval": 2 * config.trainer.accumulate_grad_batches, "check_val_every_n_epoch": None}
    strategy = "ddp_fork" if ranks > 1 else "auto"  # forking spares the second import of everything
    trainer = make_trainer(
        config, callbacks=callbacks, devices=ranks, strategy=strategy, enable_checkpointing=True, use_distributed_sampler=False, **validation
    )
    trainer.fit(make_module(config), datamodule=Rows())
    return [torch.load(folder / f"{ranks}_{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """One rank with two micro-batches and two ranks with one take the same steps; validation weights tokens, repeats
    nothing, and every rank logs the same keys, also where one of them has no document longer than the ratio."""
    (one,), (first, second) = _run(tmp_path, 1), _run(tmp_path, 2)
    for name, value in one["state"].items():
        torch.testing.assert_close(first["state"][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        assert torch.equal(first["state"][name], second["state"][name]), name
    assert set(first["metrics"]) == set(second["metrics"]) == set(one["metrics"])
    # the sample of the diagnostics and the machine's own figures depend on the ranks
    exact = [n for n in one["metrics"] if n.startswith(("train/", "val/", "indexer/kl/", "indexer/grad")) or n == "indexer/kl"]
    assert len(exact) == 14
    for name in exact:
        assert first["metrics"][name] == second["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-6, abs=1e-6), name
    assert torch.load(tmp_path / "2" / "last.ckpt", weights_only=True)["global_step"] == 2
