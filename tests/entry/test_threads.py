# SPDX-License-Identifier: Apache-2.0
"""How OpenMP threads wait must be settled before torch loads the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WATCH = """
import importlib, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy", os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0)
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.parametrize("entry", ["train", "eval.evaluate", "csa_model.hf.__main__"])
def test_openmp_threads_sleep_while_they_wait(entry: str, given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | ({"OMP_WAIT_POLICY": given} if given else {})
    done = subprocess.run([sys.executable, "-c", WATCH, entry], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["policy", expected], done.stdout + done.stderr
