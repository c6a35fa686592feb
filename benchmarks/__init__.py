# SPDX-License-Identifier: Apache-2.0
"""Measurements, one command each; `results/` holds what they wrote, with the machine and versions beside every number."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
MEASURED = ("kernels", "csa_model", "configs", "train.py", "benchmarks/*.py")  # what a number can depend on
COPIED_FROM = os.environ.get("CSA_GIT_SHA")  # the commit of which this tree is a copy, where it is no checkout of its own


def provenance() -> dict[str, Any]:
    """Where a number comes from: versions, processor or card, git state. Unknown things are None, never a guess."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu_model(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git_sha": COPIED_FROM or _git("rev-parse", "HEAD"),
        # a copy cannot tell: its own git data, if it has any, belong to another commit
        "git_dirty": None if COPIED_FROM or (changes := _git("status", "--porcelain", "--", *MEASURED)) is None else bool(changes),
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """In one piece, making the folder: a process that is stopped, or a result that is no JSON, leaves the last record and never half of one."""
    text = json.dumps(result, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or None)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
