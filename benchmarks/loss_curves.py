# SPDX-License-Identifier: Apache-2.0
"""Does training take the same course on every backend? `python -m benchmarks.loss_curves [--backends triton flashmla] [--steps 120] [key=value ...]`

Trains model=small on the interpreter's sources with `train.py`: once per backend with one seed, and with unfused a second seed, whose distance is the
noise that any other change of a run brings. All runs share one GPU at the same time, so their speed says nothing. Further arguments go to train.py.
Writes benchmarks/results/loss_curves_<card>.json and .png. Exit status 0 only if every backend stays nearer to unfused than the other seed does.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import RESULTS, provenance

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "model=small",
    "trainer=gpu",
    "data.sequence_length=1024",
    "data.tokens_per_batch=8192",
    "scheduler.warmup_steps=20",
    "optimizer.lr=1e-3",
    "callbacks.indexer_diagnostics.enabled=false",
]
METRICS = ("train/lm_loss", "indexer/kl", "val/loss")


def command(backend: str, seed: int, steps: int, folder: Path, extra: list[str]) -> list[str]:
    lengths = [f"trainer.max_steps={steps}", f"trainer.val_every_steps={steps}", "trainer.log_every_n_steps=5"]
    return [sys.executable, str(ROOT / "train.py"), *SETTINGS, *lengths, f"backend={backend}", f"seed={seed}", f"run_dir={folder}", *extra]


def curves_of(folder: Path) -> dict[str, dict[int, float]]:
    """Metric -> step -> value, from a run's metrics.csv."""
    found: dict[str, dict[int, float]] = {name: {} for name in METRICS}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name in METRICS:
                if row.get(name):
                    found[name][int(row["step"])] = float(row[name])
    return found


def distance(a: dict[int, float], b: dict[int, float]) -> float:
    """Mean absolute difference over the steps that both have."""
    common = sorted(a.keys() & b.keys())
    return fmean(abs(a[step] - b[step]) for step in common) if common else float("nan")


def plot(runs: dict[str, dict[str, dict[int, float]]], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, metric in zip(axes, METRICS[:2], strict=True):
        for name, curves in runs.items():
            points = sorted(curves[metric].items())
            axis.plot([p[0] for p in points], [p[1] for p in points], label=name, linewidth=1.2, linestyle="--" if "seed 2" in name else "-")
        axis.set_xlabel("step")
        axis.set_ylabel(metric)
        axis.grid(True, alpha=0.3)
        axis.legend()
    figure.suptitle(f"model=small, {torch.cuda.get_device_name()}")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["triton"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, extra = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("this comparison needs an NVIDIA GPU")
        return 2
    plan = [("unfused", 1), ("unfused", 2), *((backend, 1) for backend in args.backends)]
    runs: dict[str, dict[str, dict[int, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # the first run makes the tokenizer and the token file that the others then share
        first = subprocess.run(command("triton", 1, 2, Path(folder) / "first", [*extra, "scheduler.warmup_steps=1"]), capture_output=True, text=True)
        if first.returncode:
            print(first.stdout[-2000:], first.stderr[-2000:])
            return 1
        started = []
        for backend, seed in plan:
            name = f"{backend} seed {seed}"
            log = (Path(folder) / f"{name}.log").open("w")
            at = command(backend, seed, args.steps, Path(folder) / name.replace(" ", "_"), extra)
            started.append((name, subprocess.Popen(at, stdout=log, stderr=subprocess.STDOUT)))
        for name, process in started:
            if process.wait():
                print(f"{name} failed:\n{(Path(folder) / f'{name}.log').read_text()[-2000:]}")
                return 1
            runs[name] = curves_of(Path(folder) / name.replace(" ", "_"))
    reference, other = runs["unfused seed 1"], runs["unfused seed 2"]
    apart: dict[str, dict[str, float]] = {
        name: {metric: distance(reference[metric], curves[metric]) for metric in METRICS} for name, curves in runs.items() if curves is not reference
    }
    noise = {metric: distance(reference[metric], other[metric]) for metric in METRICS[:2]}
    good = all(apart[f"{backend} seed 1"][metric] < noise[metric] for backend in args.backends for metric in METRICS[:2])
    result: dict[str, Any] = provenance() | {
        "card": torch.cuda.get_device_name(),
        "settings": [*SETTINGS, *extra],
        "steps": args.steps,
        "mean_absolute_distance_to_unfused_seed_1": apart,
        "curves": runs,
    }
    card = result["card"].lower().replace(" ", "_")
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"loss_curves_{card}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    plot(runs, target.with_suffix(".png"))
    for name, values in apart.items():
        print(f"{name:18s} mean |difference| to unfused seed 1: " + ", ".join(f"{metric} {value:.4f}" for metric, value in values.items()))
    print(f"{'within' if good else 'BEYOND'} the noise of another seed; wrote {target}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
