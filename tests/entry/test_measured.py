# SPDX-License-Identifier: Apache-2.0
"""docs/measured.md says what the result files say."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.tables import SECTIONS, read, render
from tests.entry.helpers import CONFIGS


def test_the_page_of_measurements_is_written_from_the_result_files() -> None:
    assert (CONFIGS.parent / "docs" / "measured.md").read_text() == render(), "run python -m benchmarks.tables"


def test_nothing_is_shown_that_was_timed_on_a_red_gate() -> None:
    for name in SECTIONS:
        gate = read(name).get("gate")
        assert gate is None or gate["passed"], name


def test_losses_of_training_are_shown_only_over_the_steps_that_every_backend_did() -> None:
    alone = {"steps": 3, "median_step_ms": 12.5, "peak_gib": 1.0, "first_step_s": 20.0, "loss_every_20": [9.0], "kl_every_20": [0.5]}
    training = {"tokens_per_row": 2048, "documents_per_row": 5, "backends": {"triton": alone, "unfused": alone | {"cut_short": "too slow"}}}
    record = {"gpu": "card", "torch": "2", "git_sha": "abc", "training": training}
    assert "Training" not in "\n".join(tables.flashmla(record))  # stopped before every backend was done, or an older record
    training |= {"common_steps": 3, "averaged_steps": 2, "common": {"triton": {"loss": 8.0, "kl": 0.25}, "unfused": {"loss": 8.5, "kl": 0.125}}}
    page = "\n".join(tables.flashmla(record))
    assert "means of steps 2 to 3, the last 2 of the 3 steps" in page
    assert "| triton | 3 | 12.5 | 1.00 | 8.0000 | 0.25000 | 20.0 |" in page
    assert "unfused: too slow." in page
