# SPDX-License-Identifier: Apache-2.0
"""From the config to the Trainer, the loggers, and one job's isolation from the next."""

from __future__ import annotations

import csv
import dataclasses
import os
import sys
from pathlib import Path

import pytest

from csa_model.callbacks import TimeLimit, build_callbacks
from csa_model.config import ConfigError
from csa_model.launch import (
    JOB_VARIABLES,
    MetricsLogger,
    build_loggers,
    build_trainer,
    check_logger,
    is_first_process,
    isolated_job,
    refuse_folder,
)
from csa_model.plots import read_curves
from csa_model.run_dir import RunDirectory
from tests.entry.helpers import load


def rows(run: RunDirectory) -> list[dict[str, str]]:
    with run.metrics_file.open(newline="") as handle:
        return list(csv.DictReader(handle))


def write(run: RunDirectory, resume_step: int | None, *steps: int, name: str = "a") -> None:
    logger = MetricsLogger(run, resume_step)
    for step in steps:
        logger.log_metrics({name: float(step)}, step)
    logger.save()


def test_metrics_lie_in_the_run_folder_and_nothing_else_does(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write(run, None, 1, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]
    assert [row["step"] for row in rows(run)] == ["1", "2"]


def test_a_continued_run_keeps_its_rows_up_to_the_checkpoint_and_drops_later_ones(tmp_path: Path) -> None:
    """Steps before the checkpoint are not overwritten; those after it, of a run that crashed, do not stay beside their repeats."""
    run = RunDirectory(tmp_path)
    write(run, None, 1, 2, 3)
    write(run, 2, 3, 4, name="b")
    assert [(row["step"], row["a"], row["b"]) for row in rows(run)] == [("1", "1.0", ""), ("2", "2.0", ""), ("3", "", "3.0"), ("4", "", "4.0")]


@pytest.mark.parametrize("torn", ["3", "3.5,", "3.5,0,", "3.5,0,3"])
def test_a_row_that_a_killed_run_left_half_written_stops_neither_summary_nor_resume(tmp_path: Path, torn: str) -> None:
    run = RunDirectory(tmp_path)
    write(run, None, 1, 2)
    with run.metrics_file.open("a") as handle:
        handle.write(torn)
    assert read_curves(run.metrics_file) == {"a": ([1, 2], [1.0, 2.0])}
    write(run, 2, 3)
    assert [(row["step"], row["a"]) for row in rows(run)] == [("1", "1.0"), ("2", "2.0"), ("3", "3.0")]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_steps_are_optimizer_steps_whatever_lightning_counts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    config = load("trainer.max_steps=30")
    loggers = build_loggers(config, run, None)
    trainer = build_trainer(config, run, [], loggers)
    loggers[0].log_metrics({"a": 1.0}, step=77)
    assert rows(run)[0]["step"] == str(trainer.global_step) == "0"


def test_every_trainer_setting_reaches_lightning(tmp_path: Path) -> None:
    arguments = ["trainer.max_steps=30", "trainer.val_every_steps=5", "trainer.accumulate_grad_batches=3", "trainer.log_every_n_steps=7"]
    config = load(*arguments, "trainer.precision=bf16-mixed", "trainer.deterministic=true", "trainer.max_time=00:01:00:00", "trainer.profiler=simple")
    run = RunDirectory(tmp_path)
    trainer = build_trainer(config, run, build_callbacks(config, run), [])
    assert trainer.max_steps == 30
    assert trainer.accumulate_grad_batches == 3
    assert trainer.val_check_interval == 15  # micro-batches: Lightning's unit
    assert trainer.check_val_every_n_epoch is None
    assert trainer.log_every_n_steps == 7
    assert trainer.precision == "bf16-mixed"
    assert trainer.profiler.__class__.__name__ == "SimpleProfiler"
    limits = [callback for callback in trainer.callbacks if isinstance(callback, TimeLimit)]
    assert [limit.time_remaining() for limit in limits] == [3600]
    assert trainer.gradient_clip_val is None  # clipping is the module's own


def test_a_job_leaves_no_rank_port_or_arguments_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first job of a multirun puts into the environment does not reach the second."""
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "seed=1,2"])
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    with isolated_job(["seed=1"]):
        assert sys.argv == ["train.py", "seed=1"]
        for name in JOB_VARIABLES:
            os.environ[name] = "7"
    assert sys.argv == ["train.py", "-m", "seed=1,2"]
    assert {name: os.environ[name] for name in JOB_VARIABLES if name in os.environ} == {"MASTER_PORT": "1234"}


def test_ranks_are_known_before_any_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "SLURM_PROCID", "SLURM_NTASKS", *JOB_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert is_first_process()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_first_process()
    monkeypatch.setenv("RANK", "0")
    assert is_first_process()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="run_dir=PATH"):
        refuse_folder(load(), None)
    refuse_folder(dataclasses.replace(load(), run_dir=str(tmp_path / "x")), None)


def test_an_online_logger_without_an_account_is_refused_before_it_can_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        check_logger(load("logger=wandb", "logger.offline=false").logger)
    check_logger(load("logger=wandb").logger)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    check_logger(load("logger=wandb", "logger.offline=false").logger)
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_logger(load("logger=wandb", "logger.offline=false").logger)


def test_a_logger_whose_package_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logger=tensorboard needs the package tensorboard.*\[tensorboard\]"):
        check_logger(load("logger=tensorboard").logger)
