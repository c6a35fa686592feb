# SPDX-License-Identifier: Apache-2.0
"""Figures of the comparison of arms and of the evaluation of one checkpoint (the plots of a single run are csa_model.plots)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.runs import Curve, Run
from eval.statistics import paired_difference

# metric -> title, unit of the value axis; what is drawn over training steps
CURVES = {
    "val/loss": ("validation loss", "nats per token"),
    "indexer/kl_full_csa": ("KL(full_csa teacher || student)", "nats per query row"),
    "indexer/kl_compressed_only": ("KL(compressed_only teacher || student)", "nats per query row"),
    "indexer/recall_at_k": ("recall at k of full_csa's own top-k", "share of k"),
}
# Okabe-Ito: told apart with colour-blind eyes and, with the dashes, in grey print
STYLES = {"full_csa": ("#0072B2", "-"), "compressed_only": ("#D55E00", "--"), "none": ("#555555", ":")}
SPARE = [("#009E73", "-."), ("#CC79A7", "-")]
MARKERS = "osD^vP*X"


def plot_curves(runs: Sequence[Run], path: Path) -> None:
    """Overlaid curves of every arm: one thin line per seed, the mean over seeds on top where there is more than one."""

    def draw(axes: Axes, metric: str) -> bool:
        for index, arm in enumerate(dict.fromkeys(run.arm for run in runs)):
            colour, dash = _style(arm, index)
            curves = [run.curves[metric] for run in runs if run.arm == arm and run.curves.get(metric)]
            for curve in curves:
                axes.plot(
                    *(list(curve), list(curve.values()), dash),
                    color=colour,
                    lw=0.8 if len(curves) > 1 else 1.8,
                    alpha=0.5 if len(curves) > 1 else 1,
                    marker="o" if len(curve) == 1 else "",  # a line of one point cannot be seen
                )
            if len(curves) > 1:
                steps = common_steps(curves)
                axes.plot(steps, [np.mean([curve[step] for curve in curves]) for step in steps], dash, color=colour, lw=2)
            if curves:
                axes.plot([], [], dash, color=colour, lw=2, label=f"{arm}, {len(curves)} {'seed' if len(curves) == 1 else 'seeds'}")
        return bool(axes.lines)

    _panels(draw, "Arms overlaid; thin lines are seeds, thick lines their mean", path, signed=False)


def plot_differences(arms: tuple[str, str], pairs: Sequence[tuple[Run, Run]], confidence: float, path: Path) -> None:
    """Mean paired difference over training with its interval over seeds; with one seed only the difference, and the legend says so."""
    first, second = arms

    def draw(axes: Axes, metric: str) -> bool:
        curves = [(a.curves[metric], b.curves[metric]) for a, b in pairs if a.curves.get(metric) and b.curves.get(metric)]
        steps = [
            s for s in common_steps([curve for pair in curves for curve in pair]) if all(math.isfinite(curve[s]) for pair in curves for curve in pair)
        ]
        if not steps:
            return False
        for a, b in curves if len(curves) > 1 else ():
            axes.plot(steps, [a[s] - b[s] for s in steps], color="#888888", lw=0.8, alpha=0.7)
        differences = [paired_difference([a[s] for a, _ in curves], [b[s] for _, b in curves], confidence) for s in steps]
        label = f"mean of {len(curves)} paired seeds" if len(curves) > 1 else "ONE seed: no interval"
        axes.plot(steps, [d.mean for d in differences], color="black", lw=1.8, marker="o", ms=3, label=label)
        if len(curves) > 1:
            low, high = [d.low for d in differences], [d.high for d in differences]
            axes.fill_between(steps, low, high, color="#56B4E9", alpha=0.35, lw=0, label=f"{confidence:.0%} interval (Student t)")  # type: ignore[arg-type]
        return True

    title = f"{first} minus {second}; same seed, corpus, initial weights and data order{'; thin lines are seeds' if len(pairs) > 1 else ''}"
    _panels(draw, title, path, signed=True)


def plot_evaluation(yardsticks: Mapping[str, float], layers: Sequence[int], topk: Sequence[int], title: str, path: Path) -> None:
    """Recall, captured mass, output error and the cost of sparse attention over k, per CSA layer (keys as in evaluation.json)."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    figure.suptitle(title, fontsize=11)
    recall, mass, error, cost = grid.flat
    for index, layer in enumerate(layers):
        marker = MARKERS[index % len(MARKERS)]
        for teacher in ("full_csa", "compressed_only"):
            colour, dash = STYLES[teacher]
            for axes, name in ((recall, f"recall_{teacher}"), (mass, f"mass_{teacher}")):
                _over_k(axes, yardsticks, f"layer{layer}/{name}", topk, f"layer {layer}, {teacher}", color=colour, ls=dash, marker=marker)
            _over_k(
                error,
                yardsticks,
                f"layer{layer}/output_error_{teacher}",
                topk,
                f"layer {layer}, {teacher}'s own",
                color=colour,
                ls=dash,
                marker=marker,
                alpha=0.45,
            )
        _over_k(error, yardsticks, f"layer{layer}/output_error", topk, f"layer {layer}, student", color="black", ls="-", marker=marker)
    _over_k(cost, yardsticks, "kl_dense_sparse", topk, "KL(dense || sparse)", color="#0072B2", marker="o")
    dense = yardsticks.get("loss_dense")
    increase = {f"increase@{k}": yardsticks[f"loss_sparse@{k}"] - dense for k in topk if dense is not None and f"loss_sparse@{k}" in yardsticks}
    _over_k(cost, increase, "increase", topk, "loss, sparse - dense", color="#D55E00", ls="--", marker="s")
    cost.axhline(0, color="black", lw=0.8)
    for axes, title, unit in (
        (recall, "recall of the teacher's own top-k", "share of k"),
        (mass, "teacher mass on the student's k entries", "probability"),
        (error, "attention-output error |o_k - o| / |o|", "relative norm"),
        (cost, "what sparse attention costs, all CSA layers switched", "nats per token"),
    ):
        axes.set_title(title, fontsize=11)
        axes.set_ylabel(unit)
        axes.set_xlabel("k, selected entries")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(topk), [str(k) for k in topk], minor=False)
        axes.grid(alpha=0.3)
        if axes.lines and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        else:
            axes.text(0.5, 0.5, "no query row sees more than k entries", ha="center", transform=axes.transAxes)
    _save(figure, path)


def common_steps(curves: Sequence[Curve]) -> list[int]:
    """Steps at which every curve has a value, rising."""
    return sorted(set(curves[0]).intersection(*curves[1:])) if curves else []


def _over_k(axes: Axes, values: Mapping[str, float], name: str, topk: Sequence[int], label: str, **style: object) -> None:
    points = [(k, values[f"{name}@{k}"]) for k in topk if f"{name}@{k}" in values]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, lw=1.5, ms=5, **style)  # type: ignore[arg-type]


def _panels(draw: Callable[[Axes, str], bool], title: str, path: Path, signed: bool) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    figure.suptitle(title, fontsize=11)
    for axes, (metric, (name, unit)) in zip(grid.flat, CURVES.items(), strict=True):
        drawn = draw(axes, metric)
        axes.set_title(name, fontsize=11)
        axes.set_ylabel(f"{'difference, ' if signed else ''}{unit}")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if not drawn:
            axes.text(0.5, 0.5, f"{metric} was not logged", ha="center", transform=axes.transAxes)
            continue
        if signed:
            axes.axhline(0, color="black", lw=0.8)
        axes.legend(fontsize=8)
    _save(figure, path)


def _style(arm: str, index: int) -> tuple[str, str]:
    return STYLES.get(arm, SPARE[index % len(SPARE)])


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
