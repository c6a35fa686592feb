# SPDX-License-Identifier: Apache-2.0
"""Finished run folders: finding and reading them, and deciding which of them may be compared.

An arm is a teacher. Runs of one seed are comparable when everything but the teacher is the same: corpus, initial weights, data order, config, steps
and, loudly noted, code and environment.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

Curve = dict[int, float]  # step -> value
ARMS = ("none", "compressed_only", "full_csa")  # the order of differences: an earlier arm minus a later one
# config keys that may differ between runs that are compared: names and places, nothing that reaches the mathematics
FREE_KEYS = (
    "teacher.name",
    "runs_dir",
    "run_dir",
    "ckpt_path",
    "init_from",
    "task",
    "logger",
    "data.cache_dir",
    "data.path",
    "data.num_workers",
    "trainer.enable_progress_bar",
)
SEED_KEYS = ("seed", "data_seed")


class ReportError(ValueError):
    """Input that cannot be reported on; the message names every offending run and what differs."""


@dataclass(frozen=True)
class Run:
    """One finished run. curves: metric name -> step -> value; evaluation: figures that `eval.evaluate` left for last.ckpt, or empty."""

    path: Path
    arm: str
    seed: int
    config: Mapping[str, Any]  # flattened: dotted key -> value
    summary: Mapping[str, Any]
    curves: Mapping[str, Curve]
    evaluation: Mapping[str, float]
    evaluated_on: Mapping[str, Any]  # settings and step of that evaluation
    surroundings: Mapping[str, Any]  # code and environment, flattened

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return int(self.summary["steps"])

    @property
    def resumed_with(self) -> dict[str, str]:
        """Settings that changed when the run was resumed and that reach its mathematics: "at step N key" -> before and after."""
        matters = ("trainer.precision:", *(() if self.config.get("scheduler.name") == "constant" else ("trainer.max_steps:",)))
        resumes = self.summary.get("resumes", [])
        return {
            f"at step {r['at']} {line.split(':')[0]}": line.split(": ", 1)[1] for r in resumes for line in r["changed"] if line.startswith(matters)
        }

    def final(self, metric: str) -> float | None:
        """The last logged value of `metric`, or the value of the evaluation; None where there is none or it is not finite."""
        if metric in self.evaluation:
            value = self.evaluation[metric]
        elif self.curves.get(metric):
            value = self.curves[metric][max(self.curves[metric])]
        else:
            return None
        return value if math.isfinite(value) else None


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Run folders at or under `paths`, sorted, each once: whatever holds a summary.json, or a config.yaml that says a run was begun there."""
    found: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path} is not a folder; give run folders or folders that hold some")
        here = {file.parent.resolve() for name in ("summary.json", "config.yaml") for file in path.rglob(name)}
        here = {folder for folder in here if folder.name != ".hydra"}
        if not here:
            raise ReportError(f"no run folder at or under {path}: a run folder holds config.yaml and, once finished, summary.json")
        found |= here
    return sorted(found)


def read_run(folder: Path) -> Run:
    """Read one run folder. Raises ReportError that names the folder when the run is unfinished or failed, or a file is missing or damaged."""
    summary_file = folder / "summary.json"
    if not summary_file.is_file():
        raise ReportError(f"{folder}: unfinished or failed run, it has no summary.json")
    summary = _read_json(summary_file)
    status = summary.get("status", "finished")
    if status != "finished":
        raise ReportError(f"{folder}: the run did not finish, its status is {status!r}")
    config = _read_yaml(folder / "config.yaml")
    flat = flatten(config)
    for key in ("teacher.name", "seed", "trainer.max_steps"):
        if key not in flat:
            raise ReportError(f"{folder}: config.yaml has no key {key}")
    missing = [key for key in ("status", "steps", "corpus_sha256", "initial_weights_sha256", "data_order") if key not in summary]
    if missing:
        raise ReportError(f"{folder}: summary.json lacks {', '.join(missing)}, without which a fair pair cannot be proven")
    curves = read_metrics(folder / "metrics.csv")
    validation = curves.get("val/loss")
    if not validation:
        raise ReportError(f"{folder}: metrics.csv has no val/loss")
    if not math.isfinite(validation[max(validation)]):
        raise ReportError(f"{folder}: failed run, its last val/loss is {validation[max(validation)]}")
    evaluation_file = folder / "eval" / "last" / "evaluation.json"
    evaluation, evaluated_on = {}, {}
    if evaluation_file.is_file():
        content = _read_json(evaluation_file)
        evaluation = {f"eval/{name}": float(value) for name, value in content.get("yardsticks", {}).items()}
        evaluated_on = flatten(content.get("settings", {})) | {"step": content.get("step")}
    surroundings: dict[str, Any] = {}
    for name in ("git", "environment"):
        if (folder / f"{name}.json").is_file():
            surroundings |= flatten(_read_json(folder / f"{name}.json"), name)
    surroundings.pop("environment.command", None)  # it names the arm
    return Run(folder, str(flat["teacher.name"]), int(flat["seed"]), flat, summary, curves, evaluation, evaluated_on, surroundings)


def read_metrics(path: Path) -> dict[str, Curve]:
    """Curves of Lightning's metrics.csv. Blank cells are no values; of a step logged twice (continued run) the later row counts."""
    if not path.is_file():
        raise ReportError(f"{path.parent}: no metrics.csv (logger=csv writes it)")
    curves: dict[str, Curve] = {}
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                step = int(float(row["step"]))
                for name, cell in row.items():
                    if name not in ("step", "epoch") and cell not in ("", None):
                        curves.setdefault(name, {})[step] = float(cell)
            except (KeyError, TypeError, ValueError) as error:
                raise ReportError(f"{path}: line {number} is not a row of metrics ({error!r})") from error
    return curves


def check_comparable(runs: Sequence[Run]) -> list[str]:
    """Everything that forbids comparing these runs, in words that name the runs and what differs; empty when all is well.

    Within a seed nothing but the teacher may differ; between seeds nothing but the teacher, the seed and what follows from it.
    """
    problems: list[str] = []
    runs = sorted(runs, key=lambda run: (run.seed, run.arm))
    by_place: dict[tuple[str, int], Run] = {}
    for run in runs:
        other = by_place.setdefault((run.arm, run.seed), run)
        if other is not run:
            problems.append(f"two runs of teacher={run.arm} seed={run.seed}: {other.path} and {run.path}")
    for seed in sorted({run.seed for run in runs}):
        group = [run for run in runs if run.seed == seed]
        problems += _differences(group[0], group[1:], same_seed=True)
    firsts = [next(run for run in runs if run.seed == seed) for seed in sorted({run.seed for run in runs})]
    problems += _differences(firsts[0], firsts[1:], same_seed=False) if firsts else []
    return problems


def pair_arms(runs: Sequence[Run]) -> dict[tuple[str, str], list[tuple[Run, Run]]]:
    """(first arm, second arm) -> pairs of runs of equal seed, by rising seed. Arms in the order of ARMS, unknown ones after them."""
    names = sorted({run.arm for run in runs}, key=lambda arm: (ARMS.index(arm) if arm in ARMS else len(ARMS), arm))
    place = {(run.arm, run.seed): run for run in runs}
    seeds = sorted({run.seed for run in runs})
    pairs = {(a, b): [(place[a, s], place[b, s]) for s in seeds if (a, s) in place and (b, s) in place] for a, b in combinations(names, 2)}
    return {arms: found for arms, found in pairs.items() if found}


def surrounding_differences(runs: Sequence[Run]) -> list[str]:
    """Code and environment facts that are not the same in all runs: they do not forbid a comparison, a reader must know them."""
    keys = sorted({key for run in runs for key in run.surroundings})
    lines = []
    for key in keys:
        values = {_show(run.surroundings.get(key)) for run in runs}
        if len(values) > 1:
            lines.append(f"{key}: {', '.join(sorted(values))}")
    return lines


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay values."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _differences(reference: Run, others: Iterable[Run], same_seed: bool) -> list[str]:
    lines = []
    for run in others:
        found = []
        if same_seed:
            for key, what in (("corpus_sha256", "corpus"), ("initial_weights_sha256", "initial weights"), ("data_order", "data order")):
                found += _unequal(what, reference.summary[key], run.summary[key])
        if run.summary.get("backend") != reference.summary.get("backend") and run.config.get("backend.name") == reference.config.get("backend.name"):
            # both say `auto`, which chose differently on two machines
            found += _unequal("backend", reference.summary.get("backend"), run.summary.get("backend"))
        for key in sorted(reference.config.keys() | run.config.keys()):
            free = any(key == name or key.startswith(name + ".") for name in FREE_KEYS)
            free |= not same_seed and key in SEED_KEYS
            free |= key == "teacher.coefficient" and "none" in (run.arm, reference.arm)  # the control has no loss to weigh
            a, b = reference.config.get(key), run.config.get(key)
            if a != b and not free:
                found.append(f"{key} ({_show(a)} and {_show(b)})")
        found += _unequal("changed on resume", reference.resumed_with, run.resumed_with)
        if run.evaluated_on and reference.evaluated_on:
            found += _unequal("evaluation", reference.evaluated_on, run.evaluated_on)
        if run.steps != reference.steps and same_seed:
            found.append(f"trained steps ({reference.steps} and {run.steps})")
        if found:
            lines.append(f"{reference.path} and {run.path} differ in more than the teacher{'' if same_seed else ' and the seed'}: {'; '.join(found)}")
    return lines


def _unequal(what: str, a: Any, b: Any) -> list[str]:
    """`what (a and b)` where the two differ; of two mappings only the keys that do."""
    first, second = flatten(a), flatten(b)
    return [
        f"{' '.join([what, key]).strip()} ({_show(first.get(key))} and {_show(second.get(key))})"
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    ]


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ReportError(f"{path}: expected an object with keys, got {type(value).__name__}")
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ReportError(f"{path}: not readable as YAML ({error})") from error
    if not isinstance(value, dict):
        raise ReportError(f"{path}: expected sections with keys")
    return value
