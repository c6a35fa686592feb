# SPDX-License-Identifier: Apache-2.0
"""The dense twin of the step benchmark runs the same row operations as the backend it stands beside."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from benchmarks import train_step
from kernels import Geometry


def test_the_dense_twin_takes_the_fused_row_operations_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fused:
        asked: Geometry | None = None

        def require(self, geometry: Geometry) -> None:
            self.asked = geometry

        def row_operations(self) -> str:
            return "fused"

    backend = Fused()
    monkeypatch.setattr(train_step, "get_backend", lambda name: backend if name == "triton" else None)
    twin = train_step.DenseTwin()
    twin.require(Geometry(heads=2, head_dim=8, window=4, device_type="cpu"))
    assert twin.row_operations() is None
    assert backend.asked is None
    geometry = Geometry(heads=2, head_dim=8, window=4, device_type="cuda", dtype=torch.bfloat16)
    twin.require(geometry)
    assert twin.row_operations() == "fused"
    assert backend.asked is geometry


def test_the_launches_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, key: str, count: int, microseconds: float) -> None:
            self.key, self.count, self.self_device_time_total = key, count, microseconds

    class Profile:
        def __init__(self, activities: object) -> None: ...
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None: ...
        def key_averages(self) -> list[Event]:
            return [Event("gemm_bf16", 3, 900.0), Event("cudaLaunchKernel", 100, 0.0), Event("Memcpy DtoD", 4, 100.0)]

    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    profile = train_step.profile_step(lambda: torch.zeros(()))
    assert profile["kernels"] == 7
    assert profile["gpu_ms"] == pytest.approx(1.0)
    assert profile["parts_ms"] == {"matrix products": pytest.approx(0.9), "copies and casts": pytest.approx(0.1)}


def test_a_point_whose_parent_is_gone_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[object, ...]] = []

    def measure_point(*arguments: object) -> dict[str, int]:
        measured.append(arguments)
        return {}

    monkeypatch.setattr(train_step, "measure_point", measure_point)
    monkeypatch.setattr(sys, "argv", ["train_step", "--device", "cpu", "--point", "unfused@128", "--wait"])
    for told, status in (("", 1), ("go\n", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(told))
        assert train_step.main() == status
    assert len(measured) == 1
