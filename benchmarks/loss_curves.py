# SPDX-License-Identifier: Apache-2.0
"""Does training take the same course on every backend? `python -m benchmarks.loss_curves [--backends triton flashmla] [--model small] [k=v ...]`

Trains a model on the interpreter's sources with `train.py`, for every seed with unfused and with every backend asked for. Two questions:

- Is a backend as near to unfused with the same seed as it should be? The yardstick is the distance between unfused runs of different seeds: other
  initial weights on the same batches.
- Is it biased? The mean relative difference to unfused with its sign, a mean and a standard error over the seeds: noise has no preferred sign.

The runs share one GPU, as many at the same time as half the CPU cores, so their speed says nothing. Further arguments go to train.py. Writes
benchmarks/results/loss_curves_<model>_<card>.json (anew after every run) and .png. Exit status 0 only if every run came to its end and every backend
stays nearer to unfused than another seed does.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks import RESULTS, provenance, write_json

ROOT = Path(__file__).parent.parent
MODELS = sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.yaml"))
SETTINGS = [
    "trainer=gpu",
    "data_seed=1",  # the order of the data is that of every run, so that a seed is another set of initial weights and nothing else
    "data.sequence_length=1024",
    "data.tokens_per_batch=8192",
    "scheduler.warmup_steps=20",
    "optimizer.lr=1e-3",
    "callbacks.indexer_diagnostics.enabled=false",
]
METRICS = ("train/lm_loss", "indexer/kl", "val/loss")
LOGGED = METRICS[:2]  # along the way; val/loss is there at the end alone
UNFUSED = "unfused"
Curve = dict[int, float]  # step -> value
Runs = dict[tuple[str, int], dict[str, Curve]]  # (backend, seed) -> metric -> curve


def command(model: str, backend: str, seed: int, steps: int, folder: Path, extra: Sequence[str]) -> list[str]:
    """How train.py is started for one run."""
    lengths = [f"trainer.max_steps={steps}", f"trainer.val_every_steps={steps}", "trainer.log_every_n_steps=5"]
    chosen = [f"model={model}", *SETTINGS, *lengths, f"backend={backend}", f"seed={seed}", f"run_dir={folder}"]
    return [sys.executable, str(ROOT / "train.py"), *chosen, *extra]


def curves_of(folder: Path) -> dict[str, Curve]:
    """Metric -> curve, from a run's metrics.csv."""
    found: dict[str, Curve] = {name: {} for name in METRICS}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name in METRICS:
                if row.get(name):
                    found[name][int(row["step"])] = float(row[name])
    return found


def distance(a: Curve, b: Curve) -> float | None:
    """Mean absolute difference over the steps that both have; None where there are none."""
    common = a.keys() & b.keys()
    return fmean(abs(a[step] - b[step]) for step in common) if common else None


def signed_difference(curve: Curve, reference: Curve, after: float = 0) -> float | None:
    """Mean of curve / reference - 1 over the steps beyond `after` that both have; None where there are none. The reference is positive."""
    common = [step for step in curve.keys() & reference.keys() if step > after]
    return fmean(curve[step] / reference[step] - 1 for step in common) if common else None


def seeds_order_data(settings: Iterable[str]) -> bool:
    """Whether, under these arguments of train.py, a seed also set the order of the data; the last data_seed counts, null is none."""
    chosen = [item.split("=", 1)[1] for item in settings if item.startswith("data_seed=")]
    return not chosen or chosen[-1] == "null"


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """{mean, standard_error, each}: over the seeds that have a value. The standard error needs two of them, the mean one; else None."""
    each = [value for value in values if value is not None]
    error = stdev(each) / sqrt(len(each)) if len(each) > 1 else None
    return {"mean": fmean(each) if each else None, "standard_error": error, "each": each}


def summary(runs: Runs, steps: int) -> dict[str, Any]:
    """Distances, the yardstick and signed differences, of the runs that there are.

    distance_to_unfused: backend -> metric -> over_seeds; distance_between_seeds: metric -> {mean, each} over all pairs of unfused runs (pairs share
    runs, so they have no standard error); signed_difference: backend -> metric -> {all, second_half} -> over_seeds.
    """
    unfused = {seed: curves for (backend, seed), curves in sorted(runs.items()) if backend == UNFUSED}
    pairs = list(combinations(unfused.values(), 2))
    result: dict[str, Any] = {"distance_between_seeds": {}, "distance_to_unfused": {}, "signed_difference": {}}
    for metric in METRICS:
        between = over_seeds(distance(a[metric], b[metric]) for a, b in pairs)
        result["distance_between_seeds"][metric] = {"mean": between["mean"], "each": between["each"]}
    for backend in dict.fromkeys(backend for backend, _ in runs if backend != UNFUSED):
        both = [(runs[backend, seed], curves) for seed, curves in unfused.items() if (backend, seed) in runs]
        result["distance_to_unfused"][backend] = {m: over_seeds(distance(own[m], curves[m]) for own, curves in both) for m in METRICS}
        result["signed_difference"][backend] = {
            m: {
                part: over_seeds(signed_difference(own[m], curves[m], after) for own, curves in both)
                for part, after in (("all", 0), ("second_half", steps / 2))
            }
            for m in LOGGED
        }
    return result


def within_noise(result: dict[str, Any], backends: Iterable[str]) -> bool:
    """Whether every backend is nearer to unfused than unfused with another seed is; False where one of them is missing."""
    noise, own = result["distance_between_seeds"], result["distance_to_unfused"]
    return all(
        backend in own and None not in (own[backend][m]["mean"], noise[m]["mean"]) and own[backend][m]["mean"] < noise[m]["mean"]
        for backend in backends
        for m in LOGGED
    )


def lines(result: dict[str, Any]) -> list[str]:
    """The summary for a terminal."""

    def number(value: float | None, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    text = [
        "unfused, other seeds: mean |difference| " + ", ".join(f"{m} {number(v['mean'], '.2e')}" for m, v in result["distance_between_seeds"].items())
    ]
    for backend, own in result["distance_to_unfused"].items():
        text.append(f"{backend}, same seed: mean |difference| " + ", ".join(f"{m} {number(v['mean'], '.2e')}" for m, v in own.items()))
        for metric, parts in result["signed_difference"][backend].items():
            text += [
                f"    {metric} / unfused - 1, {part.replace('_', ' ')}: {number(v['mean'], '+.3%')} ± {number(v['standard_error'], '.3%')} "
                f"(by seed: {', '.join(number(value, '+.3%') for value in v['each'])})"
                for part, v in parts.items()
            ]
    return text


def plot(runs: Runs, title: str, target: Path) -> None:
    """LM loss, KL, and the KL relative to unfused with the same seed; a colour per backend, a line style per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(16, 4.4))
    backends, styles = list(dict.fromkeys(backend for backend, _ in runs)), ("-", "--", ":", "-.")
    for (backend, seed), curves in runs.items():
        look: dict[str, Any] = {"color": f"C{backends.index(backend)}", "linestyle": styles[(seed - 1) % len(styles)], "linewidth": 1.2}
        look["label"] = f"{backend}, seed {seed}"
        for axis, metric in zip(axes, LOGGED, strict=False):
            axis.plot(*zip(*sorted(curves[metric].items()), strict=True), **look)
            axis.set_ylabel(metric)
        reference = runs.get((UNFUSED, seed), {}).get("indexer/kl", {})
        if backend != UNFUSED and reference:
            shared = sorted(curves["indexer/kl"].keys() & reference.keys())
            axes[2].plot(shared, [100 * (curves["indexer/kl"][step] / reference[step] - 1) for step in shared], **look)
    axes[2].axhline(0, color="C0", linewidth=0.8)
    axes[2].set_ylabel("indexer/kl / unfused of the same seed - 1, %")
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(True, alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def arguments(given: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes on to train.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=["triton"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to N, at least 2: between them lies the yardstick")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, extra = parser.parse_known_args(given)
    args.backends = list(dict.fromkeys(args.backends))
    wrong = [name for name in args.backends if "=" in name or name == UNFUSED]
    if wrong:
        parser.error(f"--backends {' '.join(wrong)}: give names of backends other than {UNFUSED}, and key=value before or after another option")
    if args.seeds < 2:
        parser.error("--seeds: at least 2, for the distance between seeds is the yardstick")
    taken = [item for item in extra if item.split("=")[0] in ("model", "backend", "seed", "run_dir", "trainer.max_steps")]
    if taken:
        parser.error(f"{' '.join(taken)}: set here by --model, --backends, --seeds, --steps")
    return args, extra


def main() -> int:
    args, extra = arguments()
    if not torch.cuda.is_available():
        print("this comparison needs an NVIDIA GPU")
        return 2
    plan = [(backend, seed) for backend in (UNFUSED, *args.backends) for seed in range(1, args.seeds + 1)]
    result: dict[str, Any] = provenance() | {
        "card": torch.cuda.get_device_name(),
        "model": args.model,
        "settings": [*SETTINGS, *extra],
        "steps": args.steps,
        "seeds": args.seeds,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"loss_curves_{args.model}_{result['card'].lower().replace(' ', '_')}.json"
    runs: Runs = {}
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def run(backend: str, seed: int, steps: int, name: str, more: Sequence[str]) -> subprocess.CompletedProcess[str]:
            at = command(args.model, backend, seed, steps, folder / name, more)
            return subprocess.run(at, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)

        # the first run makes the tokenizer and the token file that the others then share
        first = run(args.backends[0], 1, 2, "first", [*extra, "scheduler.warmup_steps=1"])
        if first.returncode:
            print(first.stdout[-2000:])
            return 1
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            waiting = {pool.submit(run, *key, args.steps, f"{key[0]}_{key[1]}", extra): key for key in plan}
            for done in as_completed(waiting):
                backend, seed = key = waiting[done]
                if done.result().returncode:
                    failed.append(f"{backend} seed {seed}")
                    print(f"{failed[-1]} failed:\n{done.result().stdout[-2000:]}", flush=True)
                else:
                    runs[key] = curves_of(folder / f"{backend}_{seed}")
                    runs = {k: runs[k] for k in plan if k in runs}
                    print(f"{backend} seed {seed} done", flush=True)
                curves = {f"{b} seed {s}": curves for (b, s), curves in runs.items()}
                write_json(target, result | summary(runs, args.steps) | {"failed": failed, "curves": curves})
    compared = summary(runs, args.steps)
    plot(runs, f"model={args.model}, {result['card']}", target.with_suffix(".png"))
    good = within_noise(compared, args.backends)
    print("\n".join(lines(compared)))
    print(f"{'within' if good else 'BEYOND'} the noise of another seed{f'; FAILED: {failed}' if failed else ''}; wrote {target}")
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
