# SPDX-License-Identifier: Apache-2.0
"""The fused row operations compiled ahead of time for sm_90 with the installed Triton: nothing spills, and Sinkhorn stays within a warp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kernels.triton.conftest import HAS_TRITON

ROOT = Path(__file__).parents[3]
# specialisations: 4 and 8 streams; queries, keys and a block's norm; the same without rotation backwards, and two rotations alone; two weights
KERNELS = {
    "hyper_maps_backward_kernel": 2,
    "add_partials_kernel": 2,
    "norm_rotate_kernel": 5,
    "norm_rotate_backward_kernel": 3,
    "column_sum_kernel": 2,
}


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_row_operations_spill_nothing_and_sum_within_a_warp() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_rows"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == KERNELS
    for r in compiled:
        assert r["stack"] == 0, r
        if r["kernel"].startswith("hyper_maps"):
            assert r["barriers"] <= 1, r  # one warp: of all divisions only what leaves a token is exchanged
