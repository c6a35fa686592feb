# SPDX-License-Identifier: Apache-2.0
"""The attention kernels compiled ahead of time for sm_90: what the compiler spills, and whether matrix instructions still overlap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from kernels.triton_fused import hopper, hopper_backward, hopper_forward
from kernels.triton_fused.attend_backward import attend_backward_rows
from kernels.triton_fused.attend_forward import attend_forward_rows
from kernels.triton_fused.rows import RowBounds, plan_rows
from tests.kernels.triton.aot import CompiledKernel, compiling_for_sm90
from tests.kernels.triton.conftest import INTERPRETED

ROOT = Path(__file__).parents[3]
compiles = pytest.mark.skipif(INTERPRETED, reason="this process interprets the kernels; test_in_a_process_of_its_own compiles them")

VERSION = ".".join(triton.__version__.split(".")[:2])
# Bytes of local memory a thread that a kernel may use, by Triton version and by heads x head dim: what was measured, 0 where nothing stands. A newer
# version is held to the values of the newest. Those of 16 and 32 heads and the backward of 64 x 128 are fastest with few warps although they spill.
NEWEST = {
    "hopper_forward_kernel 64x512": 16,
    "hopper_forward_kernel 128x512": 8,
    "hopper_backward_kernel 64x512": 208,
    "hopper_backward_kernel 128x512": 208,
    "forward_kernel 16x128": 360,
    "forward_kernel 32x128": 104,
    "forward_kernel 64x256": 144,
    "forward_kernel 32x512": 136,
    "backward_kernel 16x128": 224,
    "backward_kernel 32x64": 40,
    "backward_kernel 32x128": 128,
    "backward_kernel 64x128": 48,
    "backward_kernel 64x256": 264,
    "backward_kernel 32x512": 80,
}
STACK_BYTES = {
    "3.6": {
        "hopper_backward_kernel 64x512": 128,
        "hopper_backward_kernel 128x512": 144,
        "forward_kernel 32x64": 16,
        "forward_kernel 32x128": 32,
        "forward_kernel 64x256": 8,
        "backward_kernel 16x128": 224,
        "backward_kernel 32x128": 56,
        "backward_kernel 64x128": 88,
        "backward_kernel 32x512": 64,
        "dense_backward_kernel 16x128": 80,
    },
    "3.7": NEWEST | {"forward_kernel 32x64": 32, "backward_kernel 16x128": 248, "backward_kernel 64x128": 88, "dense_backward_kernel 16x128": 80},
    "3.8": NEWEST
    | {
        "forward_kernel 64x256": 232,
        "backward_kernel 16x128": 280,
        "backward_kernel 64x128": 80,
        "dense_backward_kernel 16x128": 32,
        "dense_backward_kernel 32x128": 24,
    },
    "3.9": NEWEST,
}
SHARED_LIMIT = 227 * 1024


def operands(heads: int, dim: int, topk: int | None, rows: int = 3, entries: int = 8):
    q = torch.zeros(rows, heads, dim, dtype=torch.bfloat16)
    window_kv, compressed_kv = torch.zeros(rows, dim, dtype=torch.bfloat16), torch.zeros(entries, dim, dtype=torch.bfloat16)
    selected = None if topk is None else torch.zeros(rows, topk, dtype=torch.int32)
    bounds = RowBounds(*(torch.zeros(rows, dtype=torch.int32) for _ in range(3)), 0, 128)
    return q, window_kv, compressed_kv, selected, torch.zeros(heads), bounds


def check(kernels: list[CompiledKernel], name: str, heads: int, dim: int) -> CompiledKernel:
    (kernel,) = [k for k in kernels if k.name == name]
    limit = STACK_BYTES.get(VERSION, NEWEST).get(f"{name} {heads}x{dim}", 0)
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.stack_bytes <= limit, f"{name} {heads}x{dim} of Triton {VERSION}: {kernel.stack_bytes} bytes of local memory a thread"
    return kernel


def assert_matrix_products_overlap(kernel: CompiledKernel) -> None:
    """A serialised kernel has an arrive and a wait around each of its HGMMA; a pipelined one has a few for a whole loop."""
    assert kernel.count("HGMMA") > 0
    assert kernel.count("WARPGROUP") * 2 < kernel.count("HGMMA")


@pytest.fixture
def pretend_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    if hopper.GLUON_REFUSAL is not None:
        pytest.skip(hopper.GLUON_REFUSAL)
    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


@compiles
@pytest.mark.parametrize(("heads", "topk"), [(64, 512), (128, None)])
def test_hopper_forward_ahead_of_time(pretend_h200, heads: int, topk: int | None) -> None:
    q, window_kv, compressed_kv, selected, sink, bounds = operands(heads, 512, topk)
    with compiling_for_sm90() as kernels:
        plan = plan_rows(selected, bounds, compressed_kv.shape[0])
        hopper.forward(q, window_kv, compressed_kv, selected, sink, bounds, plan, 0.04)
    assert_matrix_products_overlap(check(kernels, "hopper_forward_kernel", heads, 512))


@compiles
@pytest.mark.parametrize(("heads", "topk"), [(64, 512), (128, 512)])
def test_hopper_backward_ahead_of_time(pretend_h200, heads: int, topk: int) -> None:
    q, window_kv, compressed_kv, selected, _, bounds = operands(heads, 512, topk)
    row_values = torch.zeros(q.shape[:2])
    with compiling_for_sm90() as kernels:
        plan = plan_rows(selected, bounds, compressed_kv.shape[0])
        hopper.backward(q, q, window_kv, compressed_kv, selected, row_values, row_values, bounds, plan, 0.04, True)
    kernel = check(kernels, "hopper_backward_kernel", heads, 512)
    assert_matrix_products_overlap(kernel)
    assert kernel.count("RED.E.ADD.F32") == 0, "additions of single floats: four go into one instruction"
    assert kernel.count("REDG") > 0


@compiles
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (16, 128), (32, 32), (32, 64), (32, 128), (64, 64), (64, 128), (64, 256), (32, 512)])
def test_portable_attention_ahead_of_time(heads: int, dim: int) -> None:
    q, window_kv, compressed_kv, selected, sink, bounds = operands(heads, dim, 512)
    with compiling_for_sm90() as kernels:
        out, lse = attend_forward_rows(q, window_kv, compressed_kv, selected, sink, bounds, 0.1)
        attend_backward_rows(q, q, window_kv, compressed_kv, selected, sink, out, lse, bounds, 0.1, emit_teacher=True)
    for name in ("plan_kernel", "forward_kernel", "prepare_kernel", "backward_kernel"):
        check(kernels, name, heads, dim)


@compiles
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (16, 128), (32, 128)])
def test_dense_form_ahead_of_time(heads: int, dim: int) -> None:
    q, window_kv, compressed_kv, _, sink, bounds = operands(heads, dim, None)
    with compiling_for_sm90() as kernels:
        out, lse = attend_forward_rows(q, window_kv, compressed_kv, None, sink, bounds, 0.1)
        attend_backward_rows(q, q, window_kv, compressed_kv, None, sink, out, lse, bounds, 0.1)
    for name in ("dense_forward_kernel", "dense_backward_kernel"):
        kernel = check(kernels, name, heads, dim)
        assert kernel.count("HGMMA") > 0, "stacked rows fill the matrix instruction of a warp group"
        assert kernel.count("REDG") == kernel.count("REDG.E.ADD.F32x4"), "additions of single floats: four go into one instruction"


@pytest.mark.timeout(600)
@pytest.mark.skipif(not INTERPRETED, reason="this process compiles")
def test_in_a_process_of_its_own() -> None:
    """Triton decides at its import whether it compiles; the plugin below imports it before the conftest of this folder asks for the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.kernels.triton.aot", __file__]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-2000:]
