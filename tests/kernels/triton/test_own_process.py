# SPDX-License-Identifier: Apache-2.0
"""The interpreter tests in a process of their own, where this process cannot run them (see conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.triton.conftest import HAS_TRITON, INTERPRETED

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the compiled kernels")
@pytest.mark.skipif(INTERPRETED, reason="this process runs them")
def test_kernels_agree_with_float64_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels/triton", "--ignore", __file__, "-k", "not ahead"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-2000:]
