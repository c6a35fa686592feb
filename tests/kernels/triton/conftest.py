# SPDX-License-Identifier: Apache-2.0
"""How the Triton kernels are tested here: on a GPU where there is one, else in Triton's interpreter.

Triton decides between compiler and interpreter when it is imported. If another test file imported it before, the tests marked `interpreted` are run
in a process of their own by test_own_process.py and skipped in this one.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _import_for_interpreter() -> bool:
    """Whether the kernels of this process run in the interpreter."""
    if not HAS_TRITON or torch.cuda.is_available():
        return False
    if "triton" not in sys.modules:
        previous = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            import kernels.triton_fused  # noqa: F401
        finally:
            if previous is None:
                del os.environ["TRITON_INTERPRET"]
    from triton.runtime.interpreter import InterpretedFunction

    from kernels.triton_fused.row_select import parts_kernel

    return isinstance(parts_kernel, InterpretedFunction)


INTERPRETED = _import_for_interpreter()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run; skips where they cannot."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return "cuda"
    if not INTERPRETED:
        pytest.skip("triton was imported by another test file; test_own_process.py runs this one")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return "cpu"
