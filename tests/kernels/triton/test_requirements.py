# SPDX-License-Identifier: Apache-2.0
"""What backend=triton refuses, and that each refusal says what is missing and what would work."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from kernels import BackendUnsupported, Geometry, get_backend

pytest.importorskip("triton")

from kernels.triton_fused import requirements

FITS = Geometry(heads=8, head_dim=64, window=16, ratios=(0, 4), topk=8, index_heads=4, index_head_dim=32, dtype=torch.bfloat16, teacher="full_csa")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "torch.float64.*bfloat16, float16, float32"),
        ({"heads": 129}, "heads from 1 to 128, got 129"),
        ({"head_dim": 8}, "head_dim from 16 to 512, got 8"),
        ({"head_dim": 1024}, "head_dim from 16 to 512"),
        ({"head_dim": 100}, "head_dim=100 is not a multiple of 8"),
        ({"index_heads": 200}, "index_heads from 1 to 128"),
        ({"index_head_dim": 512}, "index_head_dim from 16 to 256"),
        ({"topk": 4096}, "topk from 0 to 2048"),
    ],
)
def test_geometry_beyond_the_kernels_is_refused(change: dict, reason: str) -> None:
    with pytest.raises(BackendUnsupported, match=reason) as refusal:
        requirements.check_geometry(dataclasses.replace(FITS, **change))
    assert "backend=unfused" in refusal.value.remedy


def test_odd_geometries_that_work_are_accepted() -> None:
    for heads, dim, index_heads in ((1, 16, 1), (12, 96, 20), (128, 512, 128), (7, 192, 3)):
        requirements.check_geometry(dataclasses.replace(FITS, heads=heads, head_dim=dim, index_heads=index_heads))


def test_machine_without_gpu_hears_what_is_missing_and_that_the_interpreter_is_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnsupported, match=r"needs an NVIDIA GPU.*TRITON_INTERPRET=1.*for tests only.*What would work: .*backend=unfused"):
        get_backend("triton").require(FITS)


@pytest.mark.parametrize(("capability", "device_type", "reason"), [((7, 5), "cuda", "compute capability >= 8.0"), ((9, 0), "cpu", "is on 'cpu'")])
def test_gpu_that_does_not_serve_is_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], device_type: str, reason: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a card")
    with pytest.raises(BackendUnsupported, match=reason):
        requirements.check_machine(device_type)


def test_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "triton_version", lambda: (3, 5))
    with pytest.raises(BackendUnsupported, match=r"needs Triton >= 3\.6"):
        requirements.check_machine("cuda")


def test_head_group_is_refused(device: str) -> None:
    from tests.kernels.triton.test_teacher_and_loss import layer

    x = layer(device, lengths=(14,))
    operands = (x.q, x.window_kv, x.compressed_kv, x.sink, None, x.layout, 4, x.window, x.scale)
    with pytest.raises(BackendUnsupported, match="head_group=None"):
        get_backend("triton").indexer_loss(x.index_q, x.index_k, x.index_w, x.selected, *operands, head_group=object())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda backend: pickle.loads(pickle.dumps(backend))], ids=["copied", "pickled"])
def test_backend_passes_to_another_process_without_its_caches(device: str, again) -> None:
    from tests.kernels.triton.test_teacher_and_loss import layer

    x = layer(device, lengths=(14,))
    backend = get_backend("triton")
    backend.require(dataclasses.replace(FITS, device_type=device))
    index_q = x.index_q.requires_grad_()
    ids = backend.select(index_q, x.index_k, x.index_w, x.layout, 4, 2)
    other = again(backend)
    assert other.describe() == backend.describe()
    assert other._known_scores(ids, index_q, x.index_k, x.index_w) is None
    assert torch.equal(other.select(index_q, x.index_k, x.index_w, x.layout, 4, 2), ids)
