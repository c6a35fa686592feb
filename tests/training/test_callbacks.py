# SPDX-License-Identifier: Apache-2.0
"""What is measured while training: names, values, and that measuring changes nothing."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from training_helpers import MODEL, loader, make_config, make_module, make_rows, make_trainer

from csa_model.attention import capture
from csa_model.callbacks import IndexerDiagnostics, LearningRates, PeakMemory, Throughput, build_callbacks
from csa_model.config import DiagnosticsConfig, ExperimentConfig, StageConfig
from csa_model.csa_metrics import row_metrics, sample_rows
from csa_model.data.batch import PackedBatch
from csa_model.flops import peak_flops, training_flops
from csa_model.run_dir import RunDirectory

VALIDATION = make_rows([[40, 5, 3]], seed=7)


class Data(L.LightningDataModule):
    def __init__(self, rows: list[PackedBatch]) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> Any:
        return loader(self.rows)

    def val_dataloader(self) -> Any:
        return loader(VALIDATION)


class Log(DummyLogger):
    """Rows as a logger gets them: step -> metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        self.rows.setdefault(step, {}).update({k: float(v) for k, v in metrics.items()})


def _fit(config: ExperimentConfig, callbacks: list[L.Callback], rows: list[PackedBatch] | None = None) -> tuple[Any, Log]:
    log, module = Log(), make_module(config)
    trainer = make_trainer(config, callbacks=callbacks, logger=log)
    trainer.fit(module, datamodule=Data(rows or make_rows([[40, 7]] * config.trainer.max_steps)))
    return module, log


def _diagnostics(config: ExperimentConfig) -> IndexerDiagnostics:
    return IndexerDiagnostics(config.callbacks.indexer_diagnostics, config.model.index_topk)


TWO_CSA_LAYERS = {"num_hidden_layers": 4, "compress_ratios": (0, 4, 8, 4, 0)}
NAMES = {
    "indexer/kl_full_csa", "indexer/kl_compressed_only", "indexer/kl_uniform", "indexer/kl_uniform_compressed_only", "indexer/captured",
    "indexer/captured_compressed_only", "indexer/entropy", "indexer/recall_at_k", "indexer/mass_at_k",
    "attn/mass_window", "attn/mass_sink", "attn/mass_compressed", "teacher/tv",
}  # fmt: skip


@pytest.mark.parametrize("teacher", ["full_csa", "none"])
def test_diagnostics_log_every_metric_per_layer_and_as_mean(teacher: str) -> None:
    config = make_config(teacher, max_steps=3, model=TWO_CSA_LAYERS, log_every_n_steps=100)
    _, log = _fit(config, [_diagnostics(config)])
    assert sorted(log.rows) == [1, 2]  # after steps 2 and 3: every second one and the last
    row = log.rows[1]
    assert set(row) == NAMES | {f"{name}/layer{layer}" for name in NAMES for layer in (1, 3)}
    for name in NAMES:
        assert row[name] == pytest.approx((row[f"{name}/layer1"] + row[f"{name}/layer3"]) / 2), name
    for layer in (1, 3):
        assert row[f"indexer/captured/layer{layer}"] == pytest.approx(
            1 - row[f"indexer/kl_full_csa/layer{layer}"] / row[f"indexer/kl_uniform/layer{layer}"]
        )
        shares = [row[f"attn/mass_{part}/layer{layer}"] for part in ("window", "sink", "compressed")]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert 0 < row[f"indexer/mass_at_k/layer{layer}"] <= 1


def test_diagnostics_are_the_row_metrics_of_a_fixed_sample() -> None:
    config = make_config(max_steps=2)
    module, log = _fit(config, [_diagnostics(config)])
    with torch.no_grad(), capture(module.decoder) as layers:
        module.run_decoder(VALIDATION[0])
    rows = sample_rows(layers[0].layout, 4, 16, torch.Generator().manual_seed(1))
    assert rows.numel() == 16
    values = row_metrics(layers[0], rows, topk=(3,), support="attended").values
    assert log.rows[1]["indexer/kl_full_csa"] == pytest.approx(float(values["kl_full_csa"].nanmean()), rel=1e-5)
    recall = values["recall_full_csa@3"]
    assert 0 < int((~recall.isnan()).sum()) < 16  # rows that see at most k entries do not count
    assert log.rows[1]["indexer/recall_at_k"] == pytest.approx(float(recall.nanmean()), rel=1e-5)


def test_diagnostics_change_nothing() -> None:
    config = make_config(max_steps=3)
    plain, _ = _fit(config, [])
    measured, _ = _fit(config, [_diagnostics(config)])
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), measured.state_dict().values(), strict=True))


def test_diagnostics_without_topk_have_nothing_to_recall() -> None:
    config = make_config(max_steps=2, model={"index_topk": None}, stage=StageConfig(name="dense", attention="dense", indexer_loss="off"))
    _, log = _fit(config, [_diagnostics(config)])
    assert "indexer/kl_full_csa" in log.rows[1]
    assert not any("recall" in name or "mass_at_k" in name for name in log.rows[1])


def test_a_metric_without_any_row_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 15 tokens see at most 3 entries, all of which a top-3 takes: there is nothing to recall; of 3 tokens none at all."""
    config = make_config(max_steps=2)
    for lengths, expected in (([15, 15], NAMES - {"indexer/recall_at_k", "indexer/mass_at_k"}), ([3, 3], set())):
        monkeypatch.setitem(globals(), "VALIDATION", make_rows([lengths]))
        _, log = _fit(config, [_diagnostics(config)])
        assert {name for name in log.rows[1] if name in NAMES} == expected


def test_learning_rates_are_those_of_the_step_taken() -> None:
    config = make_config(max_steps=2)
    scheduler = dataclasses.replace(config.scheduler, warmup_steps=4)
    config = dataclasses.replace(config, scheduler=scheduler, optimizer=dataclasses.replace(config.optimizer, indexer_lr_multiplier=2.0))
    _, log = _fit(config, [LearningRates()])
    rates = {name: value for name, value in log.rows[1].items() if name.startswith("lr/")}
    assert rates == pytest.approx({
        "lr/trunk_matrices": 0.005, "lr/embeddings": 0.005, "lr/trunk_vectors": 0.005, "lr/indexer_matrices": 0.01, "lr/indexer_vectors": 0.01,
    })  # fmt: skip


def test_process_memory_is_reported_under_a_name_that_says_so() -> None:
    config = make_config(max_steps=2, log_every_n_steps=2)
    _, log = _fit(config, [PeakMemory()])
    assert list(log.rows) == [1]
    assert log.rows[1]["memory/process_rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.2)
    assert "memory/peak_gib" not in log.rows[1]


def test_throughput_counts_real_tokens_and_training_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    class Slow(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock.now += 2.0

        def on_validation_epoch_start(self, *args: Any) -> None:
            clock.now += 1000.0

    class SlowDiagnostics(IndexerDiagnostics):
        def measure(self, *args: Any) -> dict[str, float]:
            clock.now += 1000.0
            return {}

    config = make_config(max_steps=7, log_every_n_steps=3)
    diagnostics = SlowDiagnostics(DiagnosticsConfig(every_n_steps=5), 3)
    log, module = Log(), make_module(config)
    validation = {"limit_val_batches": 1.0, "val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = make_trainer(config, callbacks=[Throughput(config), diagnostics, Slow()], logger=log, **validation)
    trainer.fit(module, datamodule=Data(make_rows([[40, 7], [10], [20], [30], [3], [40], [5]])))
    rates = {step: row["throughput/tokens_per_second"] for step, row in log.rows.items() if "throughput/tokens_per_second" in row}
    # The first batch is warm-up: the first window is steps 2 and 3 (30 tokens in 4 s), the second steps 4 to 6. Padding does not count.
    assert rates == {2: 7.5, 5: pytest.approx(73 / 6)}
    assert "throughput/mfu" not in log.rows[2]


def test_mfu_is_the_counted_work_over_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csa_model.callbacks.throughput.torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    config = make_config(max_steps=1, precision="bf16-mixed")
    callback = Throughput(config)
    trainer = SimpleNamespace(accumulate_grad_batches=1, log_every_n_steps=1, global_step=1, world_size=1)
    logged: dict[str, float] = {}
    module: Any = SimpleNamespace(device=torch.device("cuda", 0), log=lambda name, value, **options: logged.update({name: value}))
    callback.on_train_start(trainer, module)  # type: ignore[arg-type]
    callback._device = torch.device("cpu")
    (batch,) = make_rows([[40, 7]])
    now = iter([0.0, 0.5, 0.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    for index in range(2):
        callback.on_train_batch_end(trainer, module, None, batch, index)  # type: ignore[arg-type]
    work = training_flops(MODEL, [40, 7], config.stage, indexer_trains=True)
    assert logged["throughput/mfu"] == pytest.approx(work / 0.5 / peak_flops("NVIDIA H200", "bf16-mixed"))


def test_callbacks_follow_the_config(tmp_path: Path) -> None:
    config = make_config()
    names = [type(c).__name__ for c in build_callbacks(config, RunDirectory(tmp_path))]
    assert names == ["Throughput", "PeakMemory", "LearningRates", "IndexerDiagnostics", "ModelCheckpoint", "LastCheckpoint"]
    off = dataclasses.replace(
        config.callbacks, throughput=False, peak_memory=False, learning_rates=False, indexer_diagnostics=DiagnosticsConfig(enabled=False)
    )
    assert [type(c).__name__ for c in build_callbacks(dataclasses.replace(config, callbacks=off), RunDirectory(tmp_path))] == [
        "ModelCheckpoint",
        "LastCheckpoint",
    ]
    windows = dataclasses.replace(
        config, model=dataclasses.replace(MODEL, compress_ratios=(0, 0, 8, 4), mtp=dataclasses.replace(MODEL.mtp, enabled=False))
    )
    assert not any(isinstance(c, IndexerDiagnostics) for c in build_callbacks(windows, RunDirectory(tmp_path)))


def test_validation_comes_after_optimizer_steps_under_accumulation() -> None:
    """The interval of the config counts optimizer steps; Lightning's counts micro-batches."""
    config = make_config(max_steps=4, accumulate_grad_batches=4, val_every_steps=2)
    log, module = Log(), make_module(config)
    interval = config.trainer.val_every_steps * config.trainer.accumulate_grad_batches
    trainer = make_trainer(config, logger=log, limit_val_batches=1.0, val_check_interval=interval, check_val_every_n_epoch=None)
    trainer.fit(module, datamodule=Data(make_rows([[10]] * 16, accumulate=4)))
    assert [step for step, row in log.rows.items() if "val/loss" in row] == [1, 3]


def test_diagnostics_run_when_a_step_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run meets the step of its checkpoint again in the first micro-batches of the next one."""
    measured: list[int] = []
    monkeypatch.setattr(IndexerDiagnostics, "_run", lambda self, trainer, module: measured.append(trainer.global_step))
    callback = IndexerDiagnostics(DiagnosticsConfig(every_n_steps=2, rows=4), 3)
    for micro_batch in range(4):
        trainer = SimpleNamespace(global_step=4 + (micro_batch + 1) // 2, accumulate_grad_batches=2, max_steps=6)
        callback.on_train_batch_end(trainer, None, None, None, micro_batch)  # type: ignore[arg-type]
    assert measured == [6]
