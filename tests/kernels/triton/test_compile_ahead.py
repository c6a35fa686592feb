# SPDX-License-Identifier: Apache-2.0
"""Selection, teacher and loss compiled ahead of time for sm_90 with the installed Triton: spills, shared memory, matrix instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.conftest import HAS_TRITON

ROOT = Path(__file__).parents[3]
# Bytes of local memory a thread that a kernel may use, by geometry and Triton version: what was measured, 0 where nothing stands.
# A newer version is held to the values of the newest listed one.
STACK_BYTES = {
    "3.6": {
        ("published", "loss_kernel"): 56,  # it is held to 168 registers
        ("published, deterministic", "loss_kernel"): 8,
        ("published, scores recomputed", "loss_kernel"): 56,
        ("128 heads of 128", "loss_kernel"): 40,
        ("largest", "loss_kernel"): 24,
        ("largest", "key_gradient_kernel"): 16,
    },
    "3.7": {
        ("published", "loss_kernel"): 56,
        ("published, deterministic", "loss_kernel"): 8,
        ("published, scores recomputed", "loss_kernel"): 56,
        ("128 heads of 128", "loss_kernel"): 40,
        ("48 heads of 96", "loss_kernel"): 48,
        ("largest", "loss_kernel"): 24,
        ("largest", "key_gradient_kernel"): 32,
    },
    "3.9": {
        ("published", "loss_kernel"): 80,
        ("published, deterministic", "loss_kernel"): 104,
        ("published, scores recomputed", "loss_kernel"): 80,
        ("128 heads of 128", "loss_kernel"): 72,
        ("48 heads of 96", "loss_kernel"): 72,
        ("largest", "loss_kernel"): 88,
        ("largest", "key_gradient_kernel"): 32,
    },
}
SHARED_LIMIT = 227 * 1024
KERNELS = {
    "scores_kernel",
    "parts_kernel",
    "long_row_kernel",
    "teacher_kernel",
    "loss_kernel",
    "head_sum_kernel",
    "row_kernel",
    "query_gradient_kernel",
    "key_gradient_kernel",
}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_geometry(compiled: list[dict[str, Any]]) -> None:
    for geometry in ("published", "largest"):
        assert {r["kernel"] for r in compiled if r["geometry"] == geometry} == KERNELS


def test_no_kernel_spills_more_or_takes_more_shared_memory_than_there_is(compiled: list[dict[str, Any]]) -> None:
    for r in compiled:
        version = ".".join(r["triton"].split(".")[:2])
        table = STACK_BYTES.get(version, STACK_BYTES[max(STACK_BYTES, key=lambda v: [int(p) for p in v.split(".")])])
        assert r["stack"] <= table.get((r["geometry"], r["kernel"]), 0), r
        assert r["shared"] <= SHARED_LIMIT, r


def test_matrix_products_run_on_the_warp_group_unit_and_are_not_serialised(compiled: list[dict[str, Any]]) -> None:
    for r in compiled:
        if r["geometry"].startswith("published") and r["kernel"] not in ("parts_kernel", "long_row_kernel", "row_kernel"):
            assert r["HGMMA"] > 0, r
            # a serialised kernel has an arrive and a wait around every single HGMMA, a pipelined one around a product of several
            assert r["WARPGROUP"] < r["HGMMA"], r
