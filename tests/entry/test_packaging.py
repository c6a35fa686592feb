# SPDX-License-Identifier: Apache-2.0
"""Packaging, licences and the commands that README promises."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.entry.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {m[1].lower().replace("_", "-"): m[2] for m in re.finditer(r"^([\w.-]+)==([\w.!+]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)}
EXTRAS = PROJECT["optional-dependencies"]
OF_DEV = ("dev", "wandb", "tensorboard", "triton", "hf")  # what `make` installs; the other extras come by hand and carry their own range
REQUIREMENTS = [
    Requirement(r) for r in PROJECT["dependencies"] + [r for extra in EXTRAS.values() for r in extra] if not r.startswith("csa-lightning")
]
INSTALLED = [Requirement(r) for r in PROJECT["dependencies"] + [r for name in OF_DEV for r in EXTRAS[name]] if not r.startswith("csa-lightning")]


@pytest.mark.parametrize("requirement", INSTALLED, ids=str)
def test_everything_that_make_installs_has_a_pin_inside_its_range(requirement: Requirement) -> None:
    assert requirement.name in PINS, "constraints.txt pins every direct dependency"
    assert Version(PINS[requirement.name]) in requirement.specifier


def test_every_dependency_has_a_range_and_dev_holds_the_extras_that_the_tests_need() -> None:
    assert not [str(requirement) for requirement in REQUIREMENTS if not str(requirement.specifier)]
    assert EXTRAS["dev"][0] == f"csa-lightning[{','.join(OF_DEV[1:])}]"


def test_pins_name_no_local_build() -> None:
    assert not [name for name, version in PINS.items() if "+" in version]  # any build of the version, CPU or CUDA, satisfies the pin


def test_triton_is_the_version_that_cuda_builds_of_the_pinned_torch_ask_for() -> None:
    asked = {"2.11.0": "3.6.0", "2.12.0": "3.7.0", "2.13.0": "3.7.1", "2.14.0": "3.8.0"}
    assert PINS["triton"] == asked[PINS["torch"]]


def test_licence_is_apache_in_every_place() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "Python Software Foundation" in (ROOT / "NOTICE").read_text()


def tracked(pattern: str) -> list[Path]:
    return [
        path
        for folder in ("kernels", "csa_model", "eval", "benchmarks", "tests")
        for path in sorted((ROOT / folder).rglob(pattern))
        if "__pycache__" not in path.parts
    ] + sorted(ROOT.glob(pattern))


def test_every_source_file_names_the_licence_and_stays_readable_in_one_sitting() -> None:
    for path in tracked("*.py"):
        lines = path.read_text().splitlines()
        assert not lines or lines[0] == "# SPDX-License-Identifier: Apache-2.0", path
        assert len(lines) <= 500 or "tests" in path.parts, f"{path}: {len(lines)} lines"
    assert len((ROOT / "train.py").read_text().splitlines()) < 100


def test_imports_point_from_entry_points_to_the_model_to_the_kernels() -> None:
    for folder, forbidden in (("kernels", "csa_model|eval|train"), ("csa_model", "eval|train")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not re.search(rf"^\s*(from|import) ({forbidden})\b", path.read_text(), re.MULTILINE), path


def test_make_help_lists_every_target() -> None:
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""}).stdout
    for target in ("train", "test", "lint", "types", "bench", "clean"):
        assert re.search(rf"make {target}\b", shown), target


def test_make_hands_its_variables_on() -> None:
    command = ["make", "-n", "VENV=absent", "PYTHON=python3.99", "PIP_ARGS=--extra-index-url=X", "ARGS=seed=7", "train"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""}).stdout
    assert "python3.99 -m venv absent" in shown
    assert re.search(r"pip install .*--extra-index-url=X .*--constraint constraints.txt", shown)
    assert "train.py seed=7" in shown


def test_the_gate_runs_lint_types_and_tests() -> None:
    gate = ROOT / ".ci" / "run"
    assert os.access(gate, os.X_OK)
    text = gate.read_text()
    for target in ("make lint", "make types", "make test"):
        assert target in text
    assert "set -euo pipefail" in text
    assert subprocess.run(["bash", "-n", str(gate)]).returncode == 0
    assert "make test" in (ROOT / "README.md").read_text()
