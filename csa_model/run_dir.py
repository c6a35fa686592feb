# SPDX-License-Identifier: Apache-2.0
"""The folder of one run: where it lies, when it may be written to, and what it records beside the metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from csa_model.config import ConfigError, ExperimentConfig

CONFIG_FILE = "config.yaml"
REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "lightning", "hydra-core", "numpy", "tokenizers", "transformer-engine", "sglang-kernel", "wandb", "tensorboard")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run folder. `continued` is true where the folder held this run before."""

    path: Path
    continued: bool = False

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def overrides_file(self) -> Path:
        return self.path / "overrides.txt"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def wandb_id_file(self) -> Path:
        return self.path / "wandb_run_id.txt"

    def holds_run(self) -> bool:
        return self.config_file.exists() or self.checkpoints.exists() or self.metrics_file.exists()

    def record(self, config: ExperimentConfig, overrides: Sequence[str], corpus: Mapping[str, Any], backend: Mapping[str, str]) -> None:
        """Write config.yaml, overrides.txt, git.json, environment.json and corpus.json; a continued run keeps the earlier ones beside them."""
        if self.continued and self.config_file.exists():
            number = 1 + len(list(self.path.glob("config.before_resume_*.yaml")))
            self.config_file.rename(self.path / f"config.before_resume_{number}.yaml")
        self.config_file.write_text(yaml.safe_dump(plain(config), sort_keys=False))
        self.overrides_file.write_text("".join(f"{_from_anywhere(line)}\n" for line in overrides))
        write_json(self.path / "git.json", git_state())
        write_json(self.path / "environment.json", {**environment(), "backend": dict(backend)})
        write_json(self.path / "corpus.json", dict(corpus))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary_file, dict(summary))


def refuse(config: ExperimentConfig, resume: Path | None) -> None:
    """Raise ConfigError where `run_dir` (or `runs_dir`) may not be written to. Touches nothing."""
    key = "runs_dir" if config.run_dir is None else "run_dir"
    folder = Path(getattr(config, key)).expanduser().resolve()
    above = next(p for p in (folder, *folder.parents) if p.exists())
    if above != folder and not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"{key}={folder} cannot be made: {above} is {'not writable' if above.is_dir() else 'a file'}; name another folder")
    if config.run_dir is None:
        return
    run = RunDirectory(folder)
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f"run_dir={config.run_dir} is a file; name a folder")
    inside = resume is not None and run.path in resume.parents
    if run.holds_run() and not inside:
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run; continue it with ckpt_path=last, or name another folder (init_from=CKPT takes weights)"
        )
    if not run.holds_run() and run.path.exists() and any(run.path.iterdir()):
        raise ConfigError(f"run_dir={config.run_dir} is not empty and holds no run; name another folder")


def open_run(config: ExperimentConfig, resume: Path | None, job_folder: Path | None = None) -> RunDirectory:
    """Make or reopen the folder of this run, with its checkpoints and plots folders. `job_folder` is what a multirun gives its job."""
    refuse(config, resume)
    try:
        return _open(config, job_folder)
    except OSError as error:  # no permission, a full disk, a file in the way
        key = "runs_dir" if config.run_dir is None else "run_dir"
        raise ConfigError(f"{key}={getattr(config, key)}: the run folder cannot be made ({error}); name a folder that can be written") from error


def _open(config: ExperimentConfig, job_folder: Path | None) -> RunDirectory:
    if config.run_dir is not None:
        path = Path(config.run_dir).expanduser().resolve()
        run = RunDirectory(path, continued=RunDirectory(path).holds_run())
        path.mkdir(parents=True, exist_ok=True)
    else:
        base = job_folder or Path(config.runs_dir).expanduser().resolve() / config.task / time.strftime("%Y-%m-%d_%H-%M-%S")
        run = RunDirectory(_make_new(base))
    run.checkpoints.mkdir(exist_ok=True)
    run.plots.mkdir(exist_ok=True)
    return run


def _make_new(base: Path) -> Path:
    base.parent.mkdir(parents=True, exist_ok=True)
    if base.is_dir() and not any(base.iterdir()):
        return base  # a multirun made it for its job
    number = 1
    while True:
        path = base if number == 1 else base.with_name(f"{base.name}_{number}")
        try:
            path.mkdir()
        except FileExistsError:  # another run of the same second
            number += 1
        else:
            return path


def _from_anywhere(override: str) -> str:
    """A relative data.path made absolute: a resume from another working directory repeats the overrides of its run."""
    key, _, value = override.partition("=")
    if key.lstrip("+") != "data.path" or not Path(value).exists():
        return override
    absolute = str(Path(value).resolve())
    return f"{key}={absolute}" if re.fullmatch(r"[\w./+-]+", absolute) else override  # else it would need Hydra's quotes


@contextlib.contextmanager
def naming_the_sweep_folder() -> Iterator[None]:
    """ConfigError where Hydra cannot make the folder of a multirun. Errors of a job were reported with it and pass."""
    try:
        yield
    except OSError as error:
        if getattr(error, "_reported", False):
            raise
        raise ConfigError(f"the folder of the multirun cannot be made ({error}); name another with runs_dir=PATH or hydra.sweep.dir=PATH") from error


def remove_empty(folder: Path) -> None:
    """Remove the folder that a multirun made for a job that never began, and the multirun's own folder once no job is left in it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        if all(entry.name == "multirun.yaml" for entry in folder.parent.iterdir()):
            (folder.parent / "multirun.yaml").unlink(missing_ok=True)
            folder.parent.rmdir()


def find_run(path: Path) -> RunDirectory | None:
    """The run folder that `path` (a checkpoint, its folder, or the run folder itself) belongs to."""
    for folder in (path, *list(path.parents)[:2]):
        if (folder / CONFIG_FILE).is_file():
            return RunDirectory(folder)
    return None


def plain(config: Any) -> Any:
    """A dataclass as dicts, lists and scalars, as YAML and checkpoints keep it."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [plain(v) for v in config]
    return config


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write whole or not at all, so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, default=str) + "\n")
    partial.replace(path)


def git_state() -> dict[str, Any]:
    """Commit and dirty state of the source tree; both None where it is no git checkout or git is missing."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"sha": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status), "changed": (status or "").splitlines()}


def environment() -> dict[str, Any]:
    """Versions and devices of this process."""
    import torch

    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["torch"] = torch.__version__
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "packages": versions,
        "command": sys.argv,
    }
