# SPDX-License-Identifier: Apache-2.0
"""`python -m kernels.doctor`: every backend is named with what it can do here, or why not."""

from __future__ import annotations

import pytest
import torch

from kernels import BackendUnsupported, Geometry, available_backends, doctor


def test_report_names_versions_and_every_backend() -> None:
    report = doctor.report()
    assert f"torch {torch.__version__}" in report
    for name in available_backends():
        assert f"backend {name} " in report
    lines = report.splitlines()
    unfused = lines.index(next(line for line in lines if line.startswith("backend unfused")))
    assert lines[unfused + 1].startswith("  yes: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refusal_says_what_is_missing_once() -> None:
    lines = doctor.capabilities("triton", "cpu")
    assert len(lines) == 1
    assert "no NVIDIA GPU" in lines[0] or "built without CUDA" in lines[0] or "no GPU" in lines[0]
    assert "backend=unfused" in lines[0]


def test_geometry_that_is_refused_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky:
        def require(self, geometry: Geometry) -> None:
            if geometry.heads == 64:
                raise BackendUnsupported("64 heads are too many", "8 heads")

        def describe(self) -> dict[str, str]:
            return {"select": "by hand"}

        def capturable(self) -> bool:
            return True

    monkeypatch.setattr(doctor, "get_backend", lambda name: Picky())
    lines = doctor.capabilities("picky", "cpu")
    assert [line.split(":")[0].strip() for line in lines] == ["no", "yes", "yes", "select", "training step as a CUDA graph"]
    assert "8 heads" in lines[0]
    assert lines[-1].endswith("yes, on one GPU under bf16-mixed")
    assert doctor.automatic("cpu") == ["unfused: the model runs on the CPU"]
    automatic = doctor.automatic("cuda")
    assert automatic[0] == "unfused: 64 heads of 512, top-k 512, bf16: 64 heads are too many"
    assert [line.split(":")[0] for line in automatic] == ["unfused", "triton", "triton"]
