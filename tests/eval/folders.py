# SPDX-License-Identifier: Apache-2.0
"""Synthetic run folders, as a finished training run leaves them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

STEPS = (0, 10, 20)


def make_run(
    path: Path,
    arm: str,
    seed: int,
    final_loss: float = 2.0,
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run folder; `config` and `summary` override keys at the top level (a summary value None removes the key)."""
    path.mkdir(parents=True)
    body = {
        "seed": seed,
        "run_dir": str(path),
        "task": "csa",
        "teacher": {"name": arm, "coefficient": 1.0},
        "model": {"name": "nano", "index_topk": 8},
        "data": {"name": "stdlib", "cache_dir": "data_cache"},
        "optimizer": {"lr": 1e-3},
        "trainer": {"max_steps": 20},
        "logger": {"name": "csv"},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(body | dict(config or {})))
    facts = {
        "status": "finished",
        "steps": STEPS[-1],
        "corpus_sha256": "c0ffee",
        "initial_weights_sha256": f"weights{seed}",
        "data_order": {"seed": seed},
        "arm": arm,
        "backend": "unfused",
        "seed": seed,
    } | dict(summary or {})
    (path / "summary.json").write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    (path / "git.json").write_text(json.dumps({"sha": "abc"}))
    with (path / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["epoch", "step", "train/loss", "val/loss", "indexer/kl_full_csa", "indexer/kl_compressed_only", "indexer/recall_at_k", "indexer/kl"]
        )
        for step in STEPS:
            writer.writerow([0, step, 5.0 - 0.1 * step, "", "", "", "", ""])
            loss = final_loss + 0.1 * (STEPS[-1] - step)
            writer.writerow([0, step, "", loss, 0.3 - 0.001 * step, 0.4 - 0.001 * step, 0.5 + 0.01 * step + 0.01 * seed, 0.1])
    if evaluation is not None:
        (path / "eval" / "last").mkdir(parents=True)
        content = {"yardsticks": dict(evaluation), "settings": {"rows": 4} | dict(settings or {}), "step": STEPS[-1]}
        (path / "eval" / "last" / "evaluation.json").write_text(json.dumps(content))
    return path
