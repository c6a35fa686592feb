# SPDX-License-Identifier: Apache-2.0
"""trainer.max_time: the run ends between two steps, says so, and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from csa_model import staged
from csa_model.callbacks import LastCheckpoint, TimeLimit
from csa_model.config import STAGES
from csa_model.launch import isolated_job, job_seconds
from csa_model.lit_module import CSALitModule
from tests.entry.helpers import TINY, run, write_text

PLAN = [f"staged.{name}.{key}" for name in STAGES for key in ("steps=3", "warmup_steps=1", "decay_steps=1")]
STAGED = [*(line for line in TINY if not line.startswith("trainer.max_steps")), "experiment=staged", *PLAN]
LIMIT = "trainer.max_time=00:01:00:00"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text corpus, where half an hour passes whenever a timer looks."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)

    def seconds(self: Any, *stage: object) -> float:
        self.looks = getattr(self, "looks", -1) + 1
        return float(self._offset + 1800 * self.looks)

    monkeypatch.setattr(TimeLimit, "time_elapsed", seconds)
    return tmp_path


def summary(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return facts


def test_a_run_out_of_time_says_how_to_go_on_and_has_the_whole_time_again(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two looks end it: after two steps of two micro-batches each, not amid the accumulation of the first."""
    run(*TINY, LIMIT, "trainer.accumulate_grad_batches=2", "trainer.max_steps=5", "run_dir=out")
    out = workplace / "out"
    shown = capfd.readouterr().out
    assert "was over before step 5" in shown
    assert f"go on with run_dir={out} ckpt_path=last" in " ".join(shown.split())
    assert (summary(out)["status"], summary(out)["steps"]) == ("out_of_time", 2)
    run("run_dir=out", "ckpt_path=last")
    assert (summary(out)["status"], summary(out)["steps"]) == ("out_of_time", 4)
    run("run_dir=out", "ckpt_path=last")
    assert (summary(out)["status"], summary(out)["steps"]) == ("finished", 5)
    assert "was over" not in capfd.readouterr().out.split("5 steps in all")[0].rsplit("result", 1)[1]


def test_a_stage_out_of_time_ends_the_staged_run(workplace: Path) -> None:
    """The next stage does not begin from half a stage; the plan goes on where it stopped."""
    run(*STAGED, LIMIT, "run_dir=out")
    out = workplace / "out"
    assert json.loads((out / "staged.json").read_text())["status"] == "out_of_time"
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["1_dense"]
    run("run_dir=out", "ckpt_path=last")
    assert summary(out / "1_dense")["status"] == "finished"
    assert summary(out / "2_indexer_warmup")["status"] == "out_of_time"


def test_the_stages_of_one_start_share_its_time(workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """40 minutes of the hour are over when the second stage begins, 80 when the third would."""
    clock = iter(range(0, 10**6, 2400))
    monkeypatch.setattr(TimeLimit, "time_elapsed", lambda self, *stage: self._offset)
    monkeypatch.setattr(staged.launch, "job_seconds", lambda: float(next(clock)))
    run(*STAGED, LIMIT, "run_dir=out")
    out = workplace / "out"
    assert [p.name for p in sorted(out.iterdir()) if p.is_dir()] == ["1_dense", "2_indexer_warmup"]
    assert summary(out / "2_indexer_warmup")["status"] == "finished"
    assert json.loads((out / "staged.json").read_text())["status"] == "out_of_time"
    assert f"go on with run_dir={out} ckpt_path=last" in capfd.readouterr().out


def test_the_weights_are_saved_before_anything_else_is_done_with_them(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job may be killed in the validation that follows, which takes place once."""
    events: list[str] = []
    saved, began = LastCheckpoint._save, CSALitModule.on_validation_epoch_start
    monkeypatch.setattr(LastCheckpoint, "_save", lambda self, trainer: (events.append("saved"), saved(self, trainer))[1])
    monkeypatch.setattr(CSALitModule, "on_validation_epoch_start", lambda self: (events.append("validation"), began(self))[1])
    run(*TINY, LIMIT, "trainer.max_steps=50", "trainer.val_every_steps=40", "run_dir=out")
    assert summary(workplace / "out")["status"] == "out_of_time"
    assert events == ["saved", "validation", "saved"]


def test_the_time_counts_from_the_start_of_the_job() -> None:
    assert job_seconds() == 0.0
    with isolated_job([]):
        first = job_seconds()
        with isolated_job([]):
            assert job_seconds() >= first > 0.0
        assert job_seconds() > first
    assert job_seconds() == 0.0
