# SPDX-License-Identifier: Apache-2.0
"""Resuming: which file `ckpt_path` means, and whether the config of this call is that of the checkpoint."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.types import Override

from csa_model.config import ConfigError, ExperimentConfig
from csa_model.overrides import inherited
from csa_model.run_dir import find_run, plain

LAST = "last.ckpt"
# May change when a run goes on: where and how long it runs, what it reports. Everything else makes another experiment and is refused, and so is
# another number of rows to an optimizer step.
MAY_DIFFER = (
    *("staged.", "trainer.", "callbacks.", "logger.", "task", "runs_dir", "run_dir", "ckpt_path", "init_from", "compile"),
    *("data.num_workers", "data.cache_dir", "data.path"),
)
SILENT = ("staged.enabled", "task", "runs_dir", "run_dir", "ckpt_path", "init_from", "data.cache_dir")


def resolve(ckpt_path: str | None, run_dir: str | None, key: str = "ckpt_path") -> Path | None:
    """The checkpoint file that `ckpt_path` names: `last`, a file, a run folder or a checkpoints folder. Raises ConfigError where there is none.

    A relative path is looked up from the working directory, then from `run_dir`, so that a moved run folder still resumes.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last" and run_dir is None:
        raise ConfigError(f"{key}=last means the last checkpoint of a run folder: name it with run_dir=PATH, or give {key}=FILE_OR_FOLDER")
    roots = [Path(run_dir).expanduser()] if run_dir else []
    if ckpt_path == "last":
        candidates = [roots[0] / "checkpoints" / LAST]
    else:
        given = Path(ckpt_path).expanduser()
        bases = [given, *(root / given for root in roots), *(root / "checkpoints" / given for root in roots)]
        candidates = [p for base in bases for p in (base, base / LAST, base / "checkpoints" / LAST)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    where = f"run_dir={run_dir} has no checkpoints/{LAST}" if ckpt_path == "last" else f"there is no such file, and no {LAST} under such a folder"
    raise ConfigError(f"{key}={ckpt_path}: {where}; legal: a checkpoint file, a run folder{', last (with run_dir)' if key == 'ckpt_path' else ''}")


def prepare(config: ExperimentConfig) -> tuple[Path | None, int | None, list[str]]:
    """Checkpoint to resume from, its optimizer step, and what harmlessly differs from it; None, None, [] for a fresh run. Raises ConfigError."""
    path = resolve(config.ckpt_path, config.run_dir)
    if path is None:
        return None, None, []
    stored, step = read_config(path)
    changed = compare(path, stored, config)
    if step >= config.trainer.max_steps:
        raise ConfigError(f"{path} is at step {step} already and trainer.max_steps={config.trainer.max_steps}: raise trainer.max_steps to go on")
    return path, step, changed


def backend_change(checkpoint: Path | None, backend: str) -> list[str]:
    """What to tell where `backend=auto` takes another backend than the run had before, on another machine say; [] otherwise."""
    run = find_run(checkpoint) if checkpoint is not None else None
    if run is None or not run.summary_file.is_file():
        return []
    before = json.loads(run.summary_file.read_text()).get("backend")
    return [] if before in (None, backend) else [f"backend: {before} before, auto takes {backend} here"]


def overrides_of_run(given: Sequence[Override]) -> list[str]:
    """The overrides that the run to be resumed was started with, those that this call gives anew left out; [] for a fresh run."""
    values = {o.key_or_group: str(o.value()) for o in given if not o.is_sweep_override() and not o.is_delete()}
    staged = Path(values.get("run_dir", "")).expanduser()
    if values.get("ckpt_path") == LAST.removesuffix(".ckpt") and (staged / "staged.json").is_file():
        return inherited((staged / "overrides.txt").read_text().splitlines(), given)
    path = resolve(values.get("ckpt_path"), values.get("run_dir")) if values.get("ckpt_path", "None") != "None" else None
    run = find_run(path) if path is not None else None
    if run is None or not run.overrides_file.exists():
        return []
    return inherited(run.overrides_file.read_text().splitlines(), given)


def read_config(path: Path) -> tuple[Mapping[str, Any], int]:
    """Config (plain containers) and optimizer step of a checkpoint of this program. Raises ConfigError for any other file."""
    content = _load(path)
    config = content.get("hyper_parameters", {}).get("config") if isinstance(content, Mapping) else None
    if not isinstance(config, Mapping) or "model" not in config:
        raise ConfigError(f"{path} is no checkpoint of this program: it holds no configuration")
    return config, int(content.get("global_step", 0))


def check_order(path: Path | None, data: Any) -> None:
    """Raise ConfigError where the checkpoint's data are not those of `data`, before anything is written (Lightning would find out in the middle)."""
    if path is not None and "CSADataModule" in (content := _load(path)):
        data.load_state_dict(content["CSADataModule"])


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        # torch's own text advises to load it unsafely
        raise ConfigError(f"{path} cannot be read as a checkpoint of tensors and plain values ({type(error).__name__})") from None


def compare(path: Path, stored: Mapping[str, Any], config: ExperimentConfig) -> list[str]:
    """Raise ConfigError naming every setting that makes this another experiment than the checkpoint's; return the harmless changes as text."""
    refused, changed = [], []
    now = dict(_leaves(plain(config)))
    for key, before in _leaves(stored):
        if key not in now or now[key] == before:
            continue
        line = f"{key}: {_text(before)} in the checkpoint, {_text(now[key])} now"
        if not key.startswith(MAY_DIFFER):
            refused.append(line)
        elif not key.startswith(SILENT):
            changed.append(line)
    before, after = rows_per_step(dict(_leaves(stored))), rows_per_step(now)
    if None not in (before, after) and before != after:
        refused.append(f"rows per optimizer step (trainer.accumulate_grad_batches x devices x num_nodes): {before} in the checkpoint, {after} now")
    if refused:
        raise ConfigError(
            f"ckpt_path={path} was trained with other settings:\n  "
            + "\n  ".join(refused)
            + "\nResume with the settings of the checkpoint, or start a new run from its weights with init_from instead of ckpt_path."
        )
    return changed


def rows_per_step(leaves: Mapping[str, Any]) -> int | None:
    """Packed rows that one optimizer step reads, of a flat config; None where trainer.devices=auto leaves that to the machine."""
    factors = [leaves.get(f"trainer.{name}", 1) for name in ("accumulate_grad_batches", "devices", "num_nodes")]
    return math.prod(factors) if all(isinstance(factor, int) for factor in factors) else None


def _leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, key + ".")
        else:
            yield key, list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
