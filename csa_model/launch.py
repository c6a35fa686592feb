# SPDX-License-Identifier: Apache-2.0
"""From the typed configuration to Lightning's Trainer and loggers, and the isolation of one job from the next."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import netrc
import os
import secrets
import sys
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger

from csa_model.config import ConfigError, ExperimentConfig, LoggerConfig
from csa_model.plots import metric_rows
from csa_model.run_dir import RunDirectory, open_run, plain, refuse

RUN_FOLDER_OF_RANK_ZERO = "CSA_RUN_FOLDER"  # read by the processes that a data-parallel run starts, so that every rank writes to one folder
# what a job writes into the environment: Lightning's launcher, and its wandb logger
_job_began: ContextVar[float | None] = ContextVar("job_began", default=None)
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", RUN_FOLDER_OF_RANK_ZERO, "WANDB_MODE", "PL_GLOBAL_SEED")


class _MetricsWriter(_ExperimentWriter):
    """Rows of metrics.csv. A continued run keeps the rows up to the step it resumes from; later ones are written anew."""

    def __init__(self, log_dir: str, resume_step: int | None) -> None:
        self._resume_step = resume_step
        super().__init__(log_dir)

    def _check_log_dir_exists(self) -> None:
        file = Path(self.metrics_file_path)
        if self._resume_step is None or not file.exists():
            file.unlink(missing_ok=True)
            return
        self.metrics_keys, rows = metric_rows(file)
        draft = file.with_suffix(".partial")
        with draft.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, fieldnames=self.metrics_keys)
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["step"]) <= self._resume_step)
        draft.replace(file)

    def log_hparams(self, params: Any) -> None:
        """The run folder has config.yaml."""


class OptimizerSteps:
    """Mixed into a logger: `step` is the number of optimizer steps taken. Lightning's own count drifts by one when a run is resumed."""

    trainer: L.Trainer | None = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics(metrics, step if self.trainer is None else self.trainer.global_step)  # type: ignore[misc]


class MetricsLogger(OptimizerSteps, CSVLogger):
    """Lightning's CSVLogger with metrics.csv directly in the run folder."""

    def __init__(self, run: RunDirectory, resume_step: int | None) -> None:
        super().__init__(save_dir=run.path, name="", version="", flush_logs_every_n_steps=1)
        self._resume_step = resume_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            self._experiment = _MetricsWriter(self.log_dir, self._resume_step)
        return self._experiment


def check_logger(config: LoggerConfig) -> None:
    """Raise ConfigError where the package of the logger is missing, or wandb would ask for an account."""
    package = {"wandb": "wandb", "tensorboard": "tensorboard"}.get(config.name)
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(f"logger={config.name} needs the package {package}: pip install '.[{config.name}]', or take logger=csv")
    online = config.name == "wandb" and not config.offline and os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
    if online and not _has_wandb_account():
        raise ConfigError("logger.offline=false needs a wandb account: set WANDB_API_KEY or run `wandb login`, or leave logger.offline=true")


def _has_wandb_account() -> bool:
    """Whether wandb will find a key. Not asked of wandb itself: that would fix its mode for the whole process."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for file in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if file and netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
    return False


def build_loggers(config: ExperimentConfig, run: RunDirectory, resume_step: int | None) -> list[Logger]:
    """metrics.csv always, and the chosen logger beside it."""
    loggers: list[Logger] = [MetricsLogger(run, resume_step if run.continued else None)]
    if config.logger.name == "tensorboard":
        from lightning.pytorch.loggers import TensorBoardLogger

        class StepTensorBoardLogger(OptimizerSteps, TensorBoardLogger):
            pass

        loggers.append(StepTensorBoardLogger(save_dir=run.path, name="", version="tensorboard", default_hp_metric=False))
    if config.logger.name == "wandb":
        loggers.append(_wandb_logger(config, run))
    return loggers


def _wandb_logger(config: ExperimentConfig, run: RunDirectory) -> Logger:
    from lightning.pytorch.loggers import WandbLogger

    class StepWandbLogger(OptimizerSteps, WandbLogger):
        pass

    os.environ.setdefault("WANDB_SILENT", "true")
    if not run.wandb_id_file.exists():
        run.wandb_id_file.write_text(secrets.token_hex(4) + "\n")
    settings, identity = config.logger, run.wandb_id_file.read_text().strip()
    return StepWandbLogger(
        name=run.path.name,
        save_dir=run.path,
        id=identity,
        version=identity,
        resume="allow",
        offline=settings.offline,
        project=settings.project,
        group=settings.group,
        job_type=settings.job_type,
        tags=list(settings.tags),
        log_model=False,
        config=plain(config),
    )


def data_arguments(config: ExperimentConfig) -> dict[str, Any]:
    """What the data module must know of the rest of the configuration."""
    model = config.model
    return {
        "ratios": model.compress_ratios[: model.num_hidden_layers + int(model.mtp.enabled)],
        "vocab_size": model.vocab_size,
        "accumulate": config.trainer.accumulate_grad_batches,
        "seed": config.seed if config.data_seed is None else config.data_seed,
        "max_steps": config.trainer.max_steps,
    }


def is_first_process() -> bool:
    """Whether this process is rank 0, judged before any process group exists, from what Lightning, torchrun or srun put into the environment."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if name in os.environ and (name != "SLURM_PROCID" or "SLURM_NTASKS" in os.environ):
            return os.environ[name] == "0"
    return True


def open_run_on_every_rank(config: ExperimentConfig, resume: Path | None, job_folder: Path | None) -> RunDirectory:
    """The run folder, made by rank 0. Processes that Lightning starts find it in the environment, those of torchrun or srun in run_dir."""
    if not is_first_process():
        return RunDirectory(Path(os.environ.get(RUN_FOLDER_OF_RANK_ZERO) or _shared_folder(config)))
    run = open_run(config, resume, job_folder)
    os.environ[RUN_FOLDER_OF_RANK_ZERO] = str(run.path)
    return run


def refuse_folder(config: ExperimentConfig, resume: Path | None) -> None:
    """Raise ConfigError where the run folder of this config may not be written to; only rank 0 judges, the others may find it already begun."""
    started_elsewhere = int(os.environ.get("WORLD_SIZE", "1")) > 1 and RUN_FOLDER_OF_RANK_ZERO not in os.environ
    if started_elsewhere:
        _shared_folder(config)
    if is_first_process():
        refuse(config, resume)


def _shared_folder(config: ExperimentConfig) -> str:
    if config.run_dir is None:
        raise ConfigError("processes that torchrun or srun start cannot agree on a folder named by the time: give run_dir=PATH")
    return str(Path(config.run_dir).expanduser().resolve())


def build_trainer(config: ExperimentConfig, run: RunDirectory, callbacks: Sequence[L.Callback], loggers: Sequence[Logger]) -> L.Trainer:
    """The Trainer of this run. Intervals in the config count optimizer steps; Lightning counts micro-batches for validation."""
    t = config.trainer
    trainer = L.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=t.strategy,
        precision=t.precision,
        max_steps=t.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=t.accumulate_grad_batches,
        val_check_interval=t.val_every_steps * t.accumulate_grad_batches,
        check_val_every_n_epoch=None,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=t.log_every_n_steps,
        deterministic=t.deterministic,
        profiler=t.profiler,
        use_distributed_sampler=False,  # the data module deals the rows out to the ranks
        enable_progress_bar=False,  # csa_model.console draws its own, over optimizer steps
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, L.pytorch.callbacks.Checkpoint) for c in callbacks),
        callbacks=list(callbacks),
        logger=list(loggers),
        default_root_dir=run.path,
    )
    for logger in loggers:
        if isinstance(logger, OptimizerSteps):
            logger.trainer = trainer
    return trainer


def job_seconds() -> float:
    """Since the outermost `isolated_job` began; 0 outside of one."""
    began = _job_began.get()
    return 0.0 if began is None else time.monotonic() - began


@contextlib.contextmanager
def isolated_job(arguments: Sequence[str]) -> Iterator[None]:
    """One job: the processes it starts see its own arguments, and the next job of a multirun inherits no rank, port, process group or wandb run."""
    before = {name: os.environ.get(name) for name in JOB_VARIABLES}
    outer = _job_began.set(time.monotonic()) if _job_began.get() is None else None  # a stage is part of the job that runs it
    argv, sys.argv = sys.argv, [sys.argv[0], *arguments]
    failed = 1
    try:
        yield
        failed = 0
    finally:
        if outer is not None:
            _job_began.reset(outer)
        sys.argv = argv
        if "wandb" in sys.modules and getattr(sys.modules["wandb"], "run", None) is not None:
            sys.modules["wandb"].finish(exit_code=failed)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
