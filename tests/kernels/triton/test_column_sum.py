# SPDX-License-Identifier: Apache-2.0
"""The sum of partial gradients over their first axis against float64, and compiled ahead of time for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.csa_gate_checks import poisoned_outputs
from tests.kernels.triton.conftest import HAS_TRITON

ROOT = Path(__file__).parents[3]
COLUMNS = [(), (1,), (24,), (32,), (3, 7), (512,)]
SHAPES = [(rows, *columns) for rows in (0, 1, 7, 528, 1025) for columns in COLUMNS]
# as many rows as fill every share but the last, wide ones in one pass, and no column at all
SHAPES += [(20000, 1), (20000, 24), (65536, 3), (65537, 3), (7, 24, 2048), (1030, 1100), (5, 0), (0, 0)]


@pytest.fixture
def column_sum(device: str) -> Any:
    from kernels.triton_fused.column_sum import column_sum

    return column_sum


def _partial(shape: tuple[int, ...], device: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def _with_nan_behind(partial: Tensor) -> Tensor:
    """The same numbers, in memory before numbers that no sum may hold."""
    memory = torch.full((partial.numel() + 4096,), float("nan"), device=partial.device)
    memory[: partial.numel()] = partial.flatten()
    return memory[: partial.numel()].view(partial.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_sum_in_double(device: str, column_sum: Any, shape: tuple[int, ...]) -> None:
    partial = _with_nan_behind(_partial(shape, device))
    with poisoned_outputs():
        results = [column_sum(partial) for _ in range(2)]
    expected = partial.double().sum(0)
    assert results[0].shape == shape[1:]
    assert results[0].dtype == torch.float32
    # sums of sums: the error grows with the logarithm of the rows
    assert ((results[0] - expected).abs() <= 2e-6 * partial.double().square().sum(0).sqrt()).all()
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [0, 1, 40, 1500])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounds_once_to_the_dtype_asked_for(device: str, column_sum: Any, rows: int, dtype: torch.dtype) -> None:
    partial = _partial((rows, 24), device)
    result = column_sum(partial, dtype)
    assert result.dtype == dtype
    # the interpreter cuts off where hardware rounds to bfloat16
    torch.testing.assert_close(result.double(), column_sum(partial).double(), rtol=torch.finfo(dtype).eps, atol=0)


def test_what_is_not_finite_stays_in_its_column(device: str, column_sum: Any) -> None:
    partial = torch.ones(1100, 24, device=device)
    partial[3, 2], partial[1050, 5], partial[1099, 23] = float("nan"), float("inf"), -float("inf")
    result = column_sum(partial)
    assert result[2].isnan()
    assert result[[5, 23]].tolist() == [float("inf"), -float("inf")]
    assert (result[[c for c in range(24) if c not in (2, 5, 23)]] == 1100).all()


def test_refuses_what_it_does_not_read(device: str, column_sum: Any) -> None:
    for partial in (torch.zeros(3, 4, device=device, dtype=torch.float64), torch.zeros((), device=device), torch.zeros(3, 4, device=device).mT):
        with pytest.raises(ValueError, match=r"partial must be float32 \[P, ...\] and contiguous"):
            column_sum(partial)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", [(512, 512), (16384, 32)])
def test_runs_within_a_graph(device: str, column_sum: Any, shape: tuple[int, int]) -> None:
    partial = _partial(shape, device)
    column_sum(partial)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = column_sum(partial)
    partial.neg_()
    graph.replay()
    assert torch.equal(result, column_sum(partial))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_ahead_of_time_nothing_spills_and_every_load_has_16_bytes() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_column_sum"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    # every shape in two dtypes; three tall ones in two passes, alike where shares have as many rows as there are shares
    assert len(compiled) == 2 * 8 + 2 + 2 + 1
    for r in compiled:
        assert r["stack"] == 0, r
        assert r["loads"] == r["wide"] == r["tile"]["BLOCK_P"] * r["tile"]["BLOCK_C"] // 4 // 128, r  # all of a tile before the first addition
