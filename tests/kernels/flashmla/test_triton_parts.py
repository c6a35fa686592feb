# SPDX-License-Identifier: Apache-2.0
"""The default composition with the real Triton kernels, in Triton's interpreter: a process of its own, since Triton decides at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks.flashmla_gate checks the compiled kernels")
def test_selection_loss_and_both_backwards_of_the_triton_kernels_fit() -> None:
    """Gradients of q, kv, compressor, sink and indexer arrive, and are those of unfused."""
    command = [sys.executable, "-m", "tests.kernels.flashmla.interpreted"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("equal")] == [
        "equal selected full_csa step",
        "equal selected compressed_only step",
        "equal all visible full_csa step",
        "equal all visible full_csa warm-up",
    ]
    assert "base-2 lse converted" in lines[-1]
    assert "emitted by the attention backward" in lines[-1]
