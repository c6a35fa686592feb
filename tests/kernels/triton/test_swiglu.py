# SPDX-License-Identifier: Apache-2.0
"""The fused clamped SwiGLU against the plain function of csa_model in float64, and compiled ahead of time for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model.config import MoEConfig
from csa_model.moe import MoE, clamped_swiglu
from csa_model.row import RotaryTables, Row
from kernels import PackedLayout
from tests.kernels.triton.conftest import HAS_TRITON
from tests.model.helpers import tiny_config

LIMIT = 1.5
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def swiglu(device: str) -> Any:
    from kernels.triton_fused.swiglu import swiglu

    return swiglu


@pytest.mark.parametrize("shape", [(13, 24), (1, 7), (37, 256), (5, 3000), (0, 8)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_value_and_gradients(device: str, swiglu: Any, shape: tuple[int, int], weighted: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (2 * torch.randn(shape, device=device) for _ in range(2))
    gate[:, 0] = up[:, 1] = LIMIT  # a gradient passes where a clamp just does not cut
    up[:, 2] = -LIMIT
    tensors = [gate.to(dtype), up.to(dtype)] + [torch.rand(shape[0], 1, device=device)] * weighted
    probe, results = torch.randn(shape, device=device).to(dtype), []
    for function, exact in ((swiglu, None), (clamped_swiglu, torch.float64)):
        leaves = [t.to(exact or t.dtype).requires_grad_() for t in tensors]
        with poisoned_outputs():
            out = function(leaves[0], leaves[1], LIMIT, *leaves[2:])
            results.append([out, *torch.autograd.grad(out, leaves, probe.to(out.dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert norm_error(ours.detach(), theirs.detach()) <= TOLERANCE[dtype]
    assert [t.dtype for t in results[0]] == [dtype, dtype, dtype] + [torch.float32] * weighted


@pytest.mark.parametrize("shape", [(13, 24), (37, 256), (5, 3000), (0, 8)])
def test_weights_in_another_order(device: str, swiglu: Any, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device), torch.randn(shape, device=device), torch.rand(shape[0], 1, device=device)]
    source, probe, results = torch.randperm(2 * shape[0], device=device)[::2].argsort(), torch.randn(shape, device=device), []
    for indexed in (True, False):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with poisoned_outputs():
            arguments = (leaves[2], source) if indexed else (leaves[2][source],)
            out = swiglu(leaves[0], leaves[1], LIMIT, *arguments)
            results.append([out, *torch.autograd.grad(out, leaves, probe)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("weight", "source", "message"),
    [
        (torch.ones(4, 1), torch.arange(3), r"source must be int64 \[4\]"),
        (torch.ones(4, 1), torch.arange(4).int(), "int32"),
        (None, torch.arange(4), "needs a weight"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(device: str, swiglu: Any, weight: Any, source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu(torch.zeros(4, 8), torch.zeros(4, 8), LIMIT, weight, source)


def test_strides_and_what_is_not_finite(device: str, swiglu: Any) -> None:
    both = torch.randn(6, 32, device=device)
    gate, up = both.chunk(2, 1)
    torch.testing.assert_close(swiglu(gate, up, LIMIT), clamped_swiglu(gate, up, LIMIT))
    gate = gate.clone()
    gate[0, 0], gate[1, 0] = torch.nan, torch.inf
    out = swiglu(gate, up, LIMIT)
    assert out[0, 0].isnan()
    torch.testing.assert_close(out[1:], clamped_swiglu(gate, up, LIMIT)[1:])


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (((4, 8), (4, 7), None), (torch.float32,) * 2, r"\[4, 7\]"),
        (((4, 8), (4, 8), None), (torch.float32, torch.bfloat16), "one dtype"),
        (((4, 8), (4, 8), None), (torch.float64,) * 2, "float64"),
        (((2, 4, 8), (2, 4, 8), None), (torch.float32,) * 2, r"must be \[R, D\]"),
        (((4, 8), (4, 8), (4,)), (torch.float32,) * 2, r"weight must be float32 \[4, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(device: str, swiglu: Any, shapes: Any, dtypes: Any, message: str) -> None:
    gate, up = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=False))
    with pytest.raises(ValueError, match=message):
        swiglu(gate, up, LIMIT, None if shapes[2] is None else torch.zeros(shapes[2], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_feed_forward_layer_with_it_is_the_plain_one(device: str, dtype: torch.dtype) -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    config, results = tiny_config(moe=MoEConfig(n_routed_experts=4, moe_intermediate_size=16)), []
    row = Row(PackedLayout.from_lengths([20, 9], 32, device=device), RotaryTables(config), {0}, torch.float32)
    x, ids, probe = torch.randn(32, 24, device=device), torch.zeros(32, dtype=torch.int64, device=device), torch.randn(32, 24, device=device)
    for fused in (None, TritonRowOperations()):
        torch.manual_seed(1)
        layer, leaf = MoE(config, 1, False, 0.5, fused).to(device), x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y, _ = layer(leaf, ids, row)
        names, parameters = zip(*[(n, p) for n, p in layer.named_parameters()], strict=True)
        results.append(dict(zip(("y", "x", *names), (y, *torch.autograd.grad(y.float(), [leaf, *parameters], probe)), strict=True)))
    for name, plain in results[0].items():
        assert norm_error(results[1][name].detach(), plain.detach()) <= (1e-5 if dtype == torch.float32 else 2e-2), name


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_compiled_ahead_nothing_spills_on_sm90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_swiglu"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == {"swiglu_kernel": 2, "swiglu_backward_kernel": 2}
    assert all(r["stack"] == 0 for r in compiled), compiled
