# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from kernels import BackendUnsupported, Geometry, available_backends, get_backend


def test_unknown_backend_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'flash_mla'.*unfused, triton, flashmla"):
        get_backend("flash_mla")


def test_a_backend_is_imported_only_when_asked_for() -> None:
    """`unfused` works without importing triton or FlashMLA."""
    script = "import sys, kernels; print(*[m for m in sys.modules if m.startswith('kernels.')]); kernels.get_backend('unfused');"
    script += "print(*[m for m in sys.modules if m.startswith(('kernels.', 'flash_mla', 'sgl_kernel'))])"
    before, after = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(before.split()) == ["kernels.backend", "kernels.layout", "kernels.static_layout"]
    assert all(name.split(".")[1] in ("backend", "layout", "static_layout", "unfused") for name in after.split())
    assert available_backends() == ("unfused", "triton", "flashmla")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what a machine without a GPU is told")
def test_flashmla_without_a_gpu_says_what_is_missing_and_what_would_work() -> None:
    """No silent switch to another path."""
    geometry = Geometry(heads=64, head_dim=512, window=128, ratios=(4,), topk=512, dtype=torch.bfloat16, device_type="cuda")
    with pytest.raises(BackendUnsupported) as caught:
        get_backend("flashmla").require(geometry)
    assert "NVIDIA GPU" in str(caught.value)
    assert "unfused" in caught.value.remedy


def test_unfused_takes_any_geometry_and_names_the_dtype_it_refuses() -> None:
    backend = get_backend("unfused")
    backend.require(Geometry(heads=3, head_dim=7, window=0, ratios=(0, 4, 128), topk=5, teacher="full_csa", support="dense"))
    with pytest.raises(BackendUnsupported, match=r"int8.*What would work.*float64, float32, bfloat16, float16"):
        backend.require(Geometry(heads=1, head_dim=1, window=1, dtype=torch.int8))


def test_describe_names_every_operation_with_a_version() -> None:
    described = get_backend("unfused").describe()
    assert set(described) == {"select", "attend", "indexer_loss"}
    assert all(torch.__version__ in text for text in described.values())


def test_a_refusal_survives_pickling_between_processes() -> None:
    error = pickle.loads(pickle.dumps(BackendUnsupported("no card", "another card")))
    assert (error.reason, error.remedy) == ("no card", "another card")
    assert str(error) == "no card. What would work: another card"
