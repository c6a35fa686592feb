# SPDX-License-Identifier: Apache-2.0
"""The fused pooling of the compressor compiled ahead of time for sm_90 with the installed Triton: nothing spills, several programs fit."""

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
SIZES = 7
# of 256 threads: three programs a multiprocessor, two; of 128 threads: eight
REGISTERS = {"compress_pool_kernel": 80, "compress_pool_backward_kernel": 128, "column_sum_kernel": 64}


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_pooling_spills_nothing_and_several_programs_fit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_pool"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == dict.fromkeys(REGISTERS, SIZES)
    for r in compiled:
        assert r["stack"] == 0, r
        assert r["registers"] <= REGISTERS[r["kernel"]], r
        assert r["atomics"] == 0, r
        if r["kernel"] == "compress_pool_kernel" and r["ratio"] <= 8:
            assert r["barriers"] == 0, r  # a thread holds all slots of an entry
