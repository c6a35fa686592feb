# SPDX-License-Identifier: Apache-2.0
"""Loss curves of several seeds: distances, the yardstick, differences with their sign, and how the runs are started."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import loss_curves
from benchmarks.loss_curves import (
    LOGGED,
    Runs,
    arguments,
    command,
    distance,
    over_seeds,
    seeds_order_data,
    signed_difference,
    summary,
    within_noise,
)
from csa_model.overrides import check_arguments
from tests.entry.helpers import CONFIGS


def test_a_distance_takes_the_steps_that_both_curves_have() -> None:
    assert distance({5: 1.0, 10: 4.0, 15: 9.0}, {5: 2.0, 10: 1.0}) == 2.0
    assert distance({5: 1.0}, {10: 1.0}) is None


def test_a_signed_difference_is_relative_and_keeps_its_sign() -> None:
    reference = {5: 1.0, 10: 2.0, 15: 4.0, 20: 8.0}
    curve = {5: 2.0, 10: 1.0, 15: 3.0, 20: 7.0, 25: 99.0}
    assert signed_difference(curve, reference) == pytest.approx((1.0 - 0.5 - 0.25 - 0.125) / 4)
    assert signed_difference(curve, reference, after=10) == pytest.approx(-(0.25 + 0.125) / 2)
    assert signed_difference(curve, {}) is None


def test_a_standard_error_is_the_deviation_of_the_sample_over_the_root_of_its_size() -> None:
    got = over_seeds([1.0, 3.0, None, 5.0, 7.0])
    assert (got["mean"], got["each"]) == (4.0, [1.0, 3.0, 5.0, 7.0])
    assert got["standard_error"] == pytest.approx((20 / 3) ** 0.5 / 2)
    assert over_seeds([2.0]) == {"mean": 2.0, "standard_error": None, "each": [2.0]}
    assert over_seeds([None]) == {"mean": None, "standard_error": None, "each": []}


def made_up(offset: dict[tuple[str, int], float]) -> Runs:
    """Curves of 1 at step 5 and 2 at step 10, the latter times 1 + offset; validation at the end."""
    return {key: {**{m: {5: 1.0, 10: 2.0 * (1 + value)} for m in LOGGED}, "val/loss": {10: 3.0 + value}} for key, value in offset.items()}


def test_a_backend_is_compared_with_the_same_seed_and_seeds_with_one_another() -> None:
    seeds = {("unfused", 1): 0.0, ("unfused", 2): 0.5, ("unfused", 3): -0.25}
    runs = made_up(seeds | {("triton", 1): 0.1, ("triton", 2): 0.5, ("triton", 3): -0.4})
    got = summary(runs, 10)
    # the curves differ at one of two steps: half of 2 |difference of the offsets|
    assert got["distance_between_seeds"]["indexer/kl"] == {"mean": pytest.approx(0.5), "each": pytest.approx([0.5, 0.25, 0.75])}
    assert got["distance_to_unfused"]["triton"]["indexer/kl"]["each"] == pytest.approx([0.1, 0.0, 0.15])
    assert got["distance_to_unfused"]["triton"]["val/loss"]["mean"] == pytest.approx(0.25 / 3)
    signed = got["signed_difference"]["triton"]["train/lm_loss"]
    assert signed["second_half"]["each"] == pytest.approx([0.1, 0.0, 0.6 / 0.75 - 1])
    assert signed["all"]["each"] == pytest.approx([0.05, 0.0, -0.1])
    assert signed["all"]["mean"] == pytest.approx(-0.05 / 3)
    assert "val/loss" not in got["signed_difference"]["triton"]
    assert within_noise(got, ["triton"])
    text = "\n".join(loss_curves.lines(got))
    assert "indexer/kl / unfused - 1, all: -1.667% ± 4.410% (by seed: +5.000%, +0.000%, -10.000%)" in text


def test_a_backend_beyond_another_seed_or_without_runs_is_not_within_the_noise() -> None:
    runs = made_up({("unfused", 1): 0.0, ("unfused", 2): 0.1, ("triton", 1): 0.3, ("flashmla", 2): 0.1})
    got = summary(runs, 10)
    assert not within_noise(got, ["triton"])
    assert within_noise(got, ["flashmla"])
    assert not within_noise(got, ["flashmla", "absent"])
    assert not within_noise(summary(made_up({("unfused", 1): 0.0, ("triton", 1): 0.0}), 10), ["triton"])  # no yardstick
    assert summary({}, 10)["distance_between_seeds"]["val/loss"] == {"mean": None, "each": []}


def test_a_run_is_a_command_line_that_train_py_takes() -> None:
    got = command("small_flash", "flashmla", 3, 60, Path("runs") / "a", ["optimizer.lr=3e-4"])
    assert got[:2] == [sys.executable, str(CONFIGS.parent / "train.py")]
    check_arguments(got[2:], CONFIGS)
    assert {"model=small_flash", "backend=flashmla", "seed=3", "trainer.max_steps=60", f"run_dir={Path('runs') / 'a'}"} <= set(got)
    assert got[-1] == "optimizer.lr=3e-4"  # the last one wins
    assert "data_seed=1" in got


def test_seeds_order_the_data_unless_that_has_a_seed_of_its_own() -> None:
    assert not seeds_order_data(loss_curves.SETTINGS)
    assert seeds_order_data([item for item in loss_curves.SETTINGS if not item.startswith("data_seed")])
    assert seeds_order_data([*loss_curves.SETTINGS, "data_seed=null"])


def test_what_the_options_set_may_not_be_set_behind_their_back(capsys: pytest.CaptureFixture[str]) -> None:
    args, extra = arguments(["--backends", "triton", "flashmla", "triton", "--model", "small_flash", "optimizer.lr=1e-4"])
    assert (args.model, args.backends, args.seeds, extra) == ("small_flash", ["triton", "flashmla"], 3, ["optimizer.lr=1e-4"])
    for wrong in (["model=nano"], ["--model", "huge"], ["--seeds", "1"], ["--backends", "unfused"], ["--backends", "triton", "seed=2"]):
        with pytest.raises(SystemExit):
            arguments(wrong)
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [None, ("triton", 2)])
def test_runs_share_the_gpu_up_to_half_the_cores_and_a_broken_one_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: tuple[str, int] | None
) -> None:
    alive, most, lock = 0, 0, threading.Lock()

    def train(at: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        nonlocal alive, most
        options = dict(item.split("=", 1) for item in at[2:])
        seed, backend, folder = int(options["seed"]), options["backend"], Path(options["run_dir"])
        with lock:
            alive += 1
            most = max(most, alive)
        time.sleep(0.05)
        with lock:
            alive -= 1
        if (backend, seed) == broken:
            return subprocess.CompletedProcess(at, 1, "out of memory")
        folder.mkdir()
        value = seed + (0.01 if backend == "triton" else 0)
        (folder / "metrics.csv").write_text(f"step,train/lm_loss,indexer/kl,val/loss\n5,{value},{value},\n10,{value},{value},{value}\n")
        return subprocess.CompletedProcess(at, 0, "")

    monkeypatch.setattr(loss_curves.subprocess, "run", train)
    monkeypatch.setattr(loss_curves, "provenance", dict)
    monkeypatch.setattr(loss_curves.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    monkeypatch.setattr(sys, "argv", ["loss_curves", "--steps", "10", "--out", str(tmp_path), "--model", "nano"])
    assert loss_curves.main() == (0 if broken is None else 1)
    assert most == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss_curves_nano_some_card.json", "loss_curves_nano_some_card.png"]
    record = json.loads((tmp_path / "loss_curves_nano_some_card.json").read_text())
    assert record["model"] == "nano"
    assert record["failed"] == ([] if broken is None else ["triton seed 2"])
    assert list(record["curves"]) == [f"{b} seed {s}" for b in ("unfused", "triton") for s in (1, 2, 3) if (b, s) != broken]
    each = record["signed_difference"]["triton"]["indexer/kl"]["all"]["each"]
    assert each == pytest.approx([0.01 / seed for seed in (1, 2, 3) if ("triton", seed) != broken])
