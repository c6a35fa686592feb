# SPDX-License-Identifier: Apache-2.0
"""The step benchmark: the dense twin's row operations, what is counted, and that nothing else runs while a point is measured."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

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


CHILD = """#!{python}
import json, pathlib, sys, time
point = sys.argv[sys.argv.index("--point") + 1]
log = pathlib.Path({log!r})
def tell(what):
    with log.open("a") as file:
        file.write(f"{{what}} {{point}}\\n")
print("a line of some library")
if point == "dense@128":
    print("broken", file=sys.stderr)
    sys.exit(1)
time.sleep(0.5 if point == "dense@256" else 0)
tell("ready")
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
tell("measured")
print("another line")
print(json.dumps({{"point": point}}))
"""


def test_no_point_is_measured_before_all_have_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, child = tmp_path / "log", tmp_path / "child"
    child.write_text(CHILD.format(python=sys.executable, log=str(log)))
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    args = argparse.Namespace(tokens=[128, 256], paths=["unfused", "dense"], model="nano", device="cpu", repeats=1, no_profile=True)
    got = list(train_step.measured_points(args))
    assert [(path, tokens) for path, tokens, _ in got] == [("unfused", 128), ("dense", 128), ("unfused", 256), ("dense", 256)]
    assert [record.get("point") for _, _, record in got] == ["unfused@128", None, "unfused@256", "dense@256"]
    assert got[1][2]["failed"] == "broken"
    done = log.read_text().split("\n")
    assert {line.split()[0] for line in done[:3]} == {"ready"}
    assert done[3:6] == ["measured unfused@128", "measured unfused@256", "measured dense@256"]


def test_a_point_whose_parent_is_gone_measures_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[tuple[object, ...]] = []

    def measure_point(*arguments: object) -> dict[str, int]:
        measured.append(arguments)
        return {}

    monkeypatch.setattr(train_step, "measure_point", measure_point)
    monkeypatch.setattr(sys, "argv", ["train_step", "--device", "cpu", "--point", "unfused@128", "--wait"])
    for told, status in (("", 1), ("go\n", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(told))
        assert train_step.main() == status
        assert capsys.readouterr().out.splitlines() == ["ready"] + ["{}"] * (status == 0)
    assert len(measured) == 1


def test_the_first_process_of_a_path_compiles_before_it_is_ready(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []

    def build_step(model: str, path: str, tokens: int, device: str) -> tuple[object, object]:
        return object(), lambda: steps.append(f"{path}@{tokens}")

    monkeypatch.setattr(train_step, "build_step", build_step)
    monkeypatch.setattr(train_step, "measure_point", lambda *arguments: {"steps": len(steps)})
    monkeypatch.setattr(sys, "argv", ["train_step", "--device", "cpu", "--point", "triton@128", "--wait", "--compile"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    assert train_step.main() == 0
    assert capsys.readouterr().out.splitlines() == ["ready", '{"steps": 3}']  # a graph is replayed in the third step
    assert steps == ["triton@128"] * 3


def test_only_the_first_length_of_a_path_is_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Process:
        stdout, returncode = ["ready\n"], 0

        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command)

        def communicate(self, told: str) -> tuple[str, None]:
            return "{}", None

        def kill(self) -> None: ...

    monkeypatch.setattr(train_step.subprocess, "Popen", Process)
    args = argparse.Namespace(tokens=[128, 256], paths=["triton", "dense"], model="nano", device="cuda", repeats=1, no_profile=True)
    assert len(list(train_step.measured_points(args))) == 4
    assert ["--compile" in command for command in commands] == [True, True, False, False]
