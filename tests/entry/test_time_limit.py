# SPDX-License-Identifier: Apache-2.0
"""trainer.max_time: the run ends between two steps, says so, and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from csa_model.callbacks import TimeLimit
from csa_model.config import STAGES
from tests.entry.helpers import TINY, run, write_text

LIMIT = "trainer.max_time=00:00:00:02"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text corpus, where time goes on by a second whenever a timer looks."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)

    def seconds(self: Any, *stage: object) -> float:
        self.looks = getattr(self, "looks", -1) + 1
        return float(self._offset + self.looks)

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
    plan = [f"staged.{name}.{key}" for name in STAGES for key in ("steps=3", "warmup_steps=1", "decay_steps=1")]
    kept = [line for line in TINY if not line.startswith("trainer.max_steps")]
    run(*kept, "experiment=staged", *plan, LIMIT, "run_dir=out")
    out = workplace / "out"
    assert json.loads((out / "staged.json").read_text())["status"] == "out_of_time"
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["1_dense"]
    run("run_dir=out", "ckpt_path=last")
    assert summary(out / "1_dense")["status"] == "finished"
    assert summary(out / "2_indexer_warmup")["status"] == "out_of_time"
