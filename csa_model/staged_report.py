# SPDX-License-Identifier: Apache-2.0
"""What the switch to sparse attention costs: the weights after each stage, on the same held-out rows, with dense and with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from csa_model import launch
from csa_model.backend_choice import device_type
from csa_model.config import ExperimentConfig
from csa_model.console import number, print_table
from csa_model.data.datamodule import CSADataModule
from csa_model.decoder import AttentionMode, Decoder
from csa_model.lit_module import build_decoder, load_initial_weights
from csa_model.losses import cross_entropy_sum
from csa_model.plots import BLUE, GREEN, GREY, ORANGE, read_curves

MODES = {name: AttentionMode(name, "off", "full_csa") for name in ("dense", "sparse")}
COLOURS = {"dense": BLUE, "indexer_warmup": GREEN, "sparse": ORANGE}


def write(config: ExperimentConfig, stages: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Measure the final weights of each stage, print the table, write report.md and losses.png into `folder`; returns the figures.

    Losses are nats per token. `switch_cost` is sparse minus dense with the weights of the warm-up: what the selection alone takes away.
    `recovered_at_step` is the first validation of the sparse stage at or below the dense loss of that moment, None where there was none.
    """
    losses = {name: held_out_losses(config, path / "checkpoints" / "last.ckpt") for name, path in stages.items()}
    before = losses["indexer_warmup"]
    steps, values = read_curves(stages["sparse"] / "metrics.csv").get("val/loss", ([], []))
    recovered = next((step for step, value in zip(steps, values, strict=True) if value <= before["dense"]), None)
    figures: dict[str, Any] = {
        "losses": losses,
        "switch_cost_untrained_indexer": losses["dense"]["sparse"] - losses["dense"]["dense"],
        "switch_cost": before["sparse"] - before["dense"],
        "sparse_minus_dense_at_the_end": losses["sparse"]["sparse"] - losses["sparse"]["dense"],
        "recovered_at_step": recovered,
    }
    (folder / "report.md").write_text(_markdown(config, figures))
    _plot(stages, folder / "losses.png")
    print_table("\nstaged run: held-out loss, nats per token", [*_rows(figures), ("folder", str(folder))])
    return figures


def held_out_losses(config: ExperimentConfig, checkpoint: Path) -> dict[str, float]:
    """Validation loss of the weights with dense and with sparse attention, over the rows that validation uses."""
    device = device_type(config)
    decoder: Decoder = build_decoder(config, MODES["sparse"])
    load_initial_weights(decoder, checkpoint)
    decoder.to(device).eval()
    data = CSADataModule(config.data, **launch.data_arguments(config))
    data.setup("validate")
    sums, tokens = dict.fromkeys(MODES, 0.0), 0
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=config.trainer.precision == "bf16-mixed"):
        for batch in data.validation_rows():
            batch = batch.to(device)
            tokens += int((batch.targets >= 0).sum())
            for name, mode in MODES.items():
                hidden = decoder(batch.tokens, batch.layout, mode).hidden
                sums[name] += float(cross_entropy_sum(decoder, hidden, batch.targets))
    return {name: value / max(1, tokens) for name, value in sums.items()}


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(f"after {name}", f"dense {number(v['dense'], 4)}, sparse {number(v['sparse'], 4)}") for name, v in figures["losses"].items()]
    recovered = figures["recovered_at_step"]
    return [
        *rows,
        ("cost of the switch", f"{figures['switch_cost']:+.4f} after the warm-up, {figures['switch_cost_untrained_indexer']:+.4f} without it"),
        ("left at the end", f"{figures['sparse_minus_dense_at_the_end']:+.4f} sparse against dense, same weights"),
        ("back at the dense loss", "not within the sparse stage" if recovered is None else f"at step {recovered} of the sparse stage"),
    ]


def _markdown(config: ExperimentConfig, figures: Mapping[str, Any]) -> str:
    topk = "all" if config.model.index_topk is None else config.model.index_topk
    lines = [
        f"# Staged run: {config.model.name}, teacher {config.teacher.name}, seed {config.seed}",
        "",
        f"Held-out loss in nats per token of the weights after each stage. Dense: CSA layers read every visible entry; sparse: the top {topk}.",
        "",
        "| weights after | steps | dense | sparse | sparse - dense |",
        "|---|---|---|---|---|",
    ]
    for name, v in figures["losses"].items():
        lines.append(f"| {name} | {getattr(config.staged, name).steps} | {v['dense']:.4f} | {v['sparse']:.4f} | {v['sparse'] - v['dense']:+.4f} |")
    lines += ["", *(f"- {key}: {text}" for key, text in _rows(figures)[len(figures["losses"]) :]), "", "![validation loss](losses.png)"]
    return "\n".join(lines) + "\n"


def _plot(stages: Mapping[str, Path], path: Path) -> None:
    """Validation loss over the optimizer steps of all stages; each stage validates with its own attention."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), constrained_layout=True)
    start = 0
    for name, folder in stages.items():
        curves = read_curves(folder / "metrics.csv")
        steps, values = curves.get("val/loss", ([], []))
        axis.plot([start + step for step in steps], values, "o-", color=COLOURS[name], label=name, markersize=3.5, linewidth=1.6)
        start += max((max(logged, default=0) for logged, _ in curves.values()), default=0)
        axis.axvline(start, color=GREY, linewidth=0.6)
    axis.set(title="validation loss", xlabel="optimizer step, all stages", ylabel="nats per token")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
