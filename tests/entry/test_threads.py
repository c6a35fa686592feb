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
            print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
            os._exit(0)
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(("given", "expected"), [(None, ["PASSIVE", "1000"]), ("ACTIVE", ["ACTIVE", "None"])])
@pytest.mark.parametrize("entry", ["train", "eval.evaluate", "csa_model.hf.__main__"])
def test_openmp_threads_spin_briefly_then_sleep(entry: str, given: str | None, expected: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | (
        {"OMP_WAIT_POLICY": given} if given else {}
    )
    done = subprocess.run([sys.executable, "-c", WATCH, entry], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == expected, done.stdout + done.stderr
