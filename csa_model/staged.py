# SPDX-License-Identifier: Apache-2.0
"""A staged run: dense attention, then the indexers alone, then sparse attention; each stage a run folder of its own, each resumable.

DeepSeek's order (arXiv 2512.02556, section 2.1.1; arXiv 2606.19348, section 4.2.2): with dense attention CSA layers read every visible entry and the
indexers rest; in the warm-up everything but the indexers is frozen, attention stays dense and the LM loss is not differentiated; then everything
trains on the selected entries. Weights go from stage to stage, optimizer states do not: what trains changes. Each stage reads an order
of the data of its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from csa_model import config_checks, launch, resume, staged_report
from csa_model.callbacks import TimeLimit
from csa_model.config import STAGES, ConfigError, ExperimentConfig, SchedulerConfig, StagedConfig, StagePlan
from csa_model.overrides import parse
from csa_model.report import OUT_OF_TIME
from csa_model.run_dir import RunDirectory, open_run, plain, write_json

SET_BY_THE_PLAN = ("stage", "trainer.max_steps", "scheduler", "scheduler.name", "scheduler.warmup_steps", "scheduler.decay_steps")
Train = Callable[[ExperimentConfig, list[str]], dict[str, object]]
PLAN_FILE = "staged.json"  # marks the folder of a staged run: its status and its report


def run(config: ExperimentConfig, arguments: Sequence[str], train: Train, job_folder: Path | None = None) -> dict[str, object]:
    """Run what is left of the three stages and write the report. `train` runs one configuration with the arguments that its folder records.

    Returns what staged.json holds; where trainer.max_time ends a stage, the plan ends with that status. Raises ConfigError, before any work, for a
    stage that cannot run and for a folder that may not be written to.
    """
    _refuse_what_the_plan_sets(arguments)
    for name in STAGES:
        config_checks.check(stage_config(config, name, Path()))
    folder = _folder(config, job_folder)
    configs = {name: stage_config(config, name, folder) for name in STAGES}
    done = {name: _finished(stage) for name, stage in configs.items()}  # refuses other settings than those that a stage was run with
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PLAN_FILE).exists():
        (folder / "overrides.txt").write_text("".join(f"{line}\n" for line in arguments))
    facts: dict[str, Any] = {"status": "running", "arm": config.teacher.name, "model": config.model.name, "seed": config.seed}
    facts["stages"] = {name: plain(getattr(config.staged, name)) for name in STAGES}
    write_json(folder / PLAN_FILE, facts)
    previous = config.init_from
    for name, stage in configs.items():
        run_folder = RunDirectory(Path(str(stage.run_dir)))
        if done[name]:
            print(f"stage {name}: finished before, {run_folder.path}")
        else:
            last = run_folder.checkpoints / resume.LAST
            if last.is_file():
                stage = replace(stage, ckpt_path=str(last))
            else:
                _set_aside(run_folder.path)
                stage = replace(stage, init_from=previous)
            given = stage_arguments(arguments, stage)
            limit = config.trainer.max_time
            status: object = OUT_OF_TIME
            if limit is None or not TimeLimit(limit, launch.job_seconds()).over():
                with launch.isolated_job(given):
                    status = train(stage, given).get("status")
            else:
                print(f"stage {name}: trainer.max_time={limit} is over; go on with run_dir={folder} ckpt_path=last")
            if status == OUT_OF_TIME:  # the next stage would begin from a half trained one
                facts["status"] = status
                write_json(folder / PLAN_FILE, facts)
                return facts
        previous = str(run_folder.checkpoints / resume.LAST)
    facts |= {"status": "finished", **staged_report.write(config, {name: Path(str(c.run_dir)) for name, c in configs.items()}, folder)}
    write_json(folder / PLAN_FILE, facts)
    return facts


def stage_config(config: ExperimentConfig, name: str, folder: Path) -> ExperimentConfig:
    """The configuration of one stage: an ordinary run in `folder`/<number>_<name> with the plan's steps and learning rate."""
    plan: StagePlan = getattr(config.staged, name)
    number = list(STAGES).index(name)
    seed = config.seed if config.data_seed is None else config.data_seed
    return replace(
        config,
        stage=STAGES[name],
        run_dir=str(folder / f"{number + 1}_{name}"),
        ckpt_path=None,
        init_from=None,
        data_seed=seed + number,
        scheduler=SchedulerConfig(plan.scheduler, plan.warmup_steps, plan.decay_steps, config.scheduler.min_lr_ratio),
        optimizer=replace(config.optimizer, lr=config.optimizer.lr * plan.lr_multiplier),
        trainer=replace(config.trainer, max_steps=plan.steps),
        staged=replace(config.staged, enabled=False),
    )


def stage_arguments(arguments: Sequence[str], stage: ExperimentConfig) -> list[str]:
    """Overrides that compose to `stage` by themselves, so that its folder resumes like that of any run."""
    own = {
        "staged.enabled": "false",
        "stage": stage.stage.name,
        "data_seed": stage.data_seed,
        "trainer.max_steps": stage.trainer.max_steps,
        "optimizer.lr": stage.optimizer.lr,
        "run_dir": f"'{stage.run_dir}'",
        **{f"scheduler.{f.name}": getattr(stage.scheduler, f.name) for f in dataclasses.fields(stage.scheduler)},
    }
    replaced = {*own, "ckpt_path", "init_from"}
    kept = [o.input_line for o in parse(arguments) if o.key_or_group not in replaced and o.input_line is not None]
    return [*kept, *(f"{key}={value}" for key, value in own.items())]


def _refuse_what_the_plan_sets(arguments: Sequence[str]) -> None:
    """ConfigError for an override that no stage would read."""
    for override in parse(arguments):
        key = override.key_or_group
        if key in SET_BY_THE_PLAN or key.startswith("stage."):
            raise ConfigError(
                f"{override.input_line}: a staged run takes steps, schedule and stage of each stage from its plan; legal: "
                f"staged.NAME.KEY with NAME one of {', '.join(STAGES)} and KEY one of {', '.join(f.name for f in dataclasses.fields(StagePlan))}"
            )


def _folder(config: ExperimentConfig, job_folder: Path | None) -> Path:
    trainer = config.trainer
    if trainer.strategy != "auto" or trainer.devices != 1 or trainer.num_nodes != 1:
        raise ConfigError(
            "a staged run is one process: take trainer=cpu or trainer=gpu, or start the stages one after the other: stage=dense, then "
            "stage=indexer_warmup init_from=RUN, then stage=sparse init_from=RUN"
        )
    if config.ckpt_path not in (None, "last"):
        raise ConfigError(f"ckpt_path={config.ckpt_path}: a staged run goes on with run_dir=PATH ckpt_path=last, where PATH holds its {PLAN_FILE}")
    if config.run_dir is None:
        if config.ckpt_path is not None:
            raise ConfigError("ckpt_path=last needs run_dir=PATH, the folder of the staged run")
        made = open_run(config, None, job_folder).path
        for unused in (made / "checkpoints", made / "plots"):  # of an ordinary run
            unused.rmdir()
        return made
    folder = Path(config.run_dir).expanduser().resolve()
    holds = (folder / PLAN_FILE).is_file()
    if config.ckpt_path is not None and not holds:
        raise ConfigError(f"run_dir={config.run_dir} holds no staged run (no {PLAN_FILE}); leave ckpt_path out to begin one")
    if config.ckpt_path is None and folder.exists() and (holds or not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"run_dir={config.run_dir} {'already holds a staged run; continue it with ckpt_path=last' if holds else 'is not empty'}")
    return folder


def _finished(stage: ExperimentConfig) -> bool:
    """Whether the stage has taken all its steps. ConfigError where its checkpoint was made with other settings."""
    last = Path(str(stage.run_dir)) / "checkpoints" / resume.LAST
    if not last.is_file():
        return False
    stored, step = resume.read_config(last)
    resume.compare(last, stored, stage)
    summary = last.parent.parent / "summary.json"
    finished = summary.is_file() and json.loads(summary.read_text()).get("status") == "finished"
    return step >= stage.trainer.max_steps and finished


def _set_aside(folder: Path) -> None:
    """Rename the folder of a stage that ended before its first checkpoint; nothing of it can be continued."""
    if folder.exists():
        number = 1 + len(list(folder.parent.glob(f"{folder.name}_aborted_*")))
        folder.rename(folder.with_name(f"{folder.name}_aborted_{number}"))


__all__ = ["PLAN_FILE", "STAGES", "StagedConfig", "run", "stage_arguments", "stage_config"]
