# SPDX-License-Identifier: Apache-2.0
"""Plots of one run from its metrics.csv: losses, the indexer's KL and recall, and where the attention mass goes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Curves = Mapping[str, tuple[list[int], list[float]]]  # metric -> optimizer steps, values
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"  # Okabe-Ito: told apart by colour-blind eyes


def metric_rows(metrics_file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a metrics.csv. A row that a killed process or a full disk cut short is left out."""
    if not metrics_file.exists():
        return [], []
    with metrics_file.open(newline="") as handle:
        lines = handle.readlines()
    reader = csv.DictReader(line for line in lines if line.endswith("\n"))
    return list(reader.fieldnames or []), [row for row in reader if None not in row and None not in row.values()]


def read_curves(metrics_file: Path) -> Curves:
    """Every metric of a metrics.csv with the steps at which it was logged."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in metric_rows(metrics_file)[1]:
        for name, value in row.items():
            if value != "" and name not in ("step", "epoch"):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(int(row["step"]))
                values.append(float(value))
    return curves


def last_values(curves: Curves) -> dict[str, float]:
    """The last value of every metric."""
    return {name: values[-1] for name, (_, values) in curves.items()}


def plot_run(metrics_file: Path, folder: Path, unigram_nats: float | None, title: str) -> list[Path]:
    """Write loss.png, indexer.png and mass.png, each only where something of it was logged; returns what was written."""
    curves = read_curves(metrics_file)
    losses = [
        ("train/lm_loss", "training, next token", BLUE, "-"),
        ("val/loss", "validation, next token", ORANGE, "o-"),
        ("train/mtp_loss", "training, the token after the next", GREY, ":"),
    ]
    kl = [
        ("indexer/kl_full_csa", "to the full_csa teacher", BLUE, "o-"),
        ("indexer/kl_compressed_only", "to the compressed_only teacher", ORANGE, "s--"),
        ("indexer/kl_uniform", "of a uniform guess to full_csa", GREY, ":"),
    ]
    shares = [
        ("indexer/recall_at_k", "recall@k of the teacher's own top-k", GREEN, "o-"),
        ("indexer/mass_at_k", "teacher mass on the selected entries", PINK, "s--"),
        ("indexer/captured", "captured: 1 - KL / KL of a uniform guess", BLUE, "^:"),
    ]
    mass = [("attn/mass_window", "window", BLUE, "-"), ("attn/mass_compressed", "compressed", ORANGE, "-"), ("attn/mass_sink", "sink", GREY, "-")]
    written = [
        _figure(folder / "loss.png", title, curves, [("loss", "nats per token", losses, unigram_nats)]),
        _figure(folder / "indexer.png", title, curves, [("indexer KL", "nats per query row", kl, None), ("recall and mass", "share", shares, None)]),
        _figure(folder / "mass.png", title, curves, [("attention mass in the CSA layers", "share", mass, None)]),
    ]
    return [path for path in written if path is not None]


def _figure(
    path: Path, title: str, curves: Curves, panels: Sequence[tuple[str, str, Sequence[tuple[str, str, str, str]], float | None]]
) -> Path | None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not any(metric in curves for _, _, lines, _ in panels for metric, *_ in lines):
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.2), squeeze=False, constrained_layout=True)
    for axis, (name, unit, lines, reference) in zip(axes[0], panels):
        for metric, label, colour, style in lines:
            if metric in curves:
                if len(curves[metric][0]) == 1:
                    style = "o"  # a line through one point shows nothing
                axis.plot(*curves[metric], style, color=colour, label=label, markersize=3.5, linewidth=1.6)
        if reference is not None:
            axis.axhline(reference, color=GREY, linestyle="--", linewidth=1, label="unigram model")
        if unit == "share":
            axis.set_ylim(_share_floor(curves, lines), 1.02)
        axis.set(title=name, xlabel="optimizer step", ylabel=unit)
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _share_floor(curves: Curves, lines: Sequence[tuple[Any, ...]]) -> float:
    """0, or a little below it where `captured` is negative: a student worse than a uniform guess."""
    lowest = min((min(curves[metric][1]) for metric, *_ in lines if metric in curves), default=0.0)
    return max(-1.0, min(-0.02, lowest - 0.02))
