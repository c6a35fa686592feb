# SPDX-License-Identifier: Apache-2.0
"""The fused hyper-connections compiled ahead of time for sm_90 with the installed Triton: what spills is known, and what needs tensor cores
uses them."""

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
SIZES = 6
ON_TENSOR_CORES = {"open_kernel", "streams_backward_kernel", "fn_backward_kernel"}  # once for a sublayer, once for the closing head
SPILL_LIMITS = {"fn_backward_kernel": 8}  # bytes a thread; none with Triton 3.6 and 3.7
PER_TOKEN = {"write_kernel": 1, "write_backward_kernel": 1, "products_kernel": 2}


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_hyper_connections_spill_nothing_unexpected_and_use_tensor_cores() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_streams"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    expected = dict.fromkeys(ON_TENSOR_CORES, 2 * SIZES) | {name: SIZES * count for name, count in PER_TOKEN.items()}
    expected |= dict.fromkeys(("hyper_maps_backward_kernel", "add_partials_kernel"), SIZES) | {"column_sum_kernel": 2 * SIZES}
    assert Counter(r["kernel"] for r in compiled) == expected
    for r in compiled:
        assert r["stack"] <= SPILL_LIMITS.get(r["kernel"], 0), r
        if r["kernel"] in ON_TENSOR_CORES:
            assert r["HMMA"] + r["HGMMA"] > 0, r
