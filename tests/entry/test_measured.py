# SPDX-License-Identifier: Apache-2.0
"""docs/measured.md says what the result files say."""

from __future__ import annotations

from benchmarks.tables import SECTIONS, read, render
from tests.entry.helpers import CONFIGS


def test_the_page_of_measurements_is_written_from_the_result_files() -> None:
    assert (CONFIGS.parent / "docs" / "measured.md").read_text() == render(), "run python -m benchmarks.tables"


def test_nothing_is_shown_that_was_timed_on_a_red_gate() -> None:
    for name in SECTIONS:
        gate = read(name).get("gate")
        assert gate is None or gate["passed"], name
