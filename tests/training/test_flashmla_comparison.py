# SPDX-License-Identifier: Apache-2.0
"""The training that flashmla is compared in: what counts against the limit, what is kept, and over which steps backends are compared."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import flashmla_gate, flashmla_training, write_json
from benchmarks.flashmla_training import Course, follow, over_common_steps
from csa_model.config import ExperimentConfig
from kernels import get_backend
from tests.model.helpers import plain_config


class Clock:
    """Time that passes only where a step takes it."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.seconds = 100.0, seconds

    def perf_counter(self) -> float:
        return self.now

    def step(self, number: int) -> tuple[float, float, float]:
        self.now += self.seconds[min(number, len(self.seconds) - 1)]
        return self.seconds[min(number, len(self.seconds) - 1)], 10.0 - number, float(number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(25.0, 0.25)
    monkeypatch.setattr(flashmla_training.time, "perf_counter", clock.perf_counter)
    yield clock
    monkeypatch.undo()


def test_the_first_step_does_not_count_against_the_limit(clock: Clock) -> None:
    records = [course.record() for course in follow(clock.step, 45, 20.0)]
    assert [record["steps"] for record in records] == [20, 40, 45]
    assert records[-1] == {
        "steps": 45, "first_step_s": 25.0, "median_step_ms": 250.0, "loss_every_20": [10.0, -10.0, -30.0], "kl_every_20": [0.0, 20.0, 40.0],
    }  # fmt: skip


def test_the_record_says_that_the_limit_cut_it_short(clock: Clock) -> None:
    *_, course = follow(clock.step, 100, 5.0)
    assert course.record()["steps"] == 22  # 21 steps of 0.25 s are the first beyond 5 s
    assert course.record()["cut_short"] == "the limit of 5 s ended it after 22 of 100 steps"
    *_, course = follow(clock.step, 22, 5.0)  # what was asked for is done: nothing was cut
    assert "cut_short" not in course.record()


def test_a_single_step_has_no_median() -> None:
    (course,) = follow(lambda number: (3.0, 1.0, 2.0), 1, 0.0)
    assert course.record()["median_step_ms"] is None


def test_loss_and_kl_are_compared_over_the_steps_that_all_reached() -> None:
    long, short = (Course(200, 9.0, [1.0] * n, [float(i) for i in range(n)], [2.0 * i for i in range(n)]) for n in (200, 30))
    got = over_common_steps({"long": long, "short": short})
    assert (got["common_steps"], got["averaged_steps"]) == (30, 20)
    assert got["common"]["long"] == got["common"]["short"] == {"loss": 19.5, "kl": 39.0}
    few = over_common_steps({"long": long, "short": Course(200, 9.0, [1.0] * 2, [5.0, 7.0], [1.0, 2.0])})
    assert (few["common_steps"], few["averaged_steps"]) == (2, 2)
    assert few["common"] == {"long": {"loss": 0.5, "kl": 1.0}, "short": {"loss": 6.0, "kl": 1.5}}


def test_every_backend_trains_from_the_same_weights_on_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExperimentConfig(model=plain_config(vocab_size=256))
    config = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher, name="full_csa"))
    for name, value in {"DEVICE": "cpu", "LENGTHS": (30, 0, 20), "ROW": 64, "EVERY": 2}.items():
        monkeypatch.setattr(flashmla_training, name, value)
    monkeypatch.setattr(flashmla_training, "small_flash_experiment", lambda: config)
    monkeypatch.setattr(flashmla_training, "get_backend", lambda name: get_backend("unfused"))
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**31)

    seen = [copy.deepcopy(result) for result in flashmla_training.training({"triton": get_backend("unfused")}, 3, 60.0)]
    names = ["flashmla, triton backward", "triton", "unfused"]
    assert [(list(r["backends"]), r["backends"][list(r["backends"])[-1]]["steps"]) for r in seen] == [
        *((names[: i + 1], steps) for i in range(3) for steps in (2, 3)), (names, 3),
    ]  # fmt: skip
    assert all("common_steps" not in result for result in seen[:-1])
    final = seen[-1]
    assert (final["documents_per_row"], final["steps_asked"], final["limit_s"], final["common_steps"]) == (2, 3, 60.0, 3)
    first, *others = (final["common"][name] for name in names)
    assert others == [first, first]
    assert first["kl"] > 0
    losses = final["backends"]["triton"]["loss_every_2"]
    assert len(losses) == 2
    assert losses[1] < losses[0]  # it learns
    assert final["backends"]["triton"]["peak_gib"] == 2.0


def test_a_record_that_cannot_be_written_leaves_the_last_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "results" / "a.json"
    write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert target.read_text() == '{\n "a": 1\n}\n'
    assert [p.name for p in target.parent.iterdir()] == ["a.json"]

    def stopped(path: Path, text: str) -> None:
        path.open("w").write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_json(target, {"a": 2})
    assert target.read_text() == '{\n "a": 1\n}\n'


def test_the_gate_says_whether_it_was_the_quick_one() -> None:
    for quick in (True, False):
        got = flashmla_gate.run_gate(quick, ("triton",), 1, only="no check has this name")
        assert (got["quick"], got["checks"], got["passed"]) == (quick, 0, False)
