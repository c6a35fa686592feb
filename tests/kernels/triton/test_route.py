# SPDX-License-Identifier: Apache-2.0
"""The fused router against the gate of csa_model in float64: choices, values and gradients, and compiled ahead of time for sm_90."""

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

from benchmarks.csa_gate_checks import poisoned_outputs
from csa_model.config import MoEConfig
from csa_model.moe import Gate
from tests.kernels.triton.conftest import HAS_TRITON
from tests.model.helpers import tiny_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fused(device: str) -> Any:
    from kernels.triton_fused.row_operations import TritonRowOperations

    return TritonRowOperations()


def gates(fused: Any, device: str, experts: int, topk: int, hashed: bool) -> tuple[Gate, Gate]:
    """The same gate with the fused form in fp32, and plain in float64."""
    config = tiny_config(moe=MoEConfig(n_routed_experts=experts, num_experts_per_tok=topk, routed_scaling_factor=1.7))
    torch.manual_seed(0)
    ours = Gate(config, hashed, fused).to(device)
    with torch.no_grad():
        ours.weight.mul_(40.0)
        if not hashed:
            ours.bias.normal_(std=0.3)
    exact = Gate(config, hashed).to(device)
    exact.load_state_dict(ours.state_dict())
    return ours, exact.double()


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(37, 5, 2), (1, 16, 3), (300, 16, 3), (19, 256, 8), (3, 4, 4), (0, 8, 1), (70, 24, 1)])
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("uses", ["scores", "weights", "both"])
def test_router(device: str, fused: Any, tokens: int, experts: int, topk: int, hashed: bool, uses: str) -> None:
    ours, exact = gates(fused, device, experts, topk, hashed)
    x, ids = torch.randn(tokens, 24, device=device), torch.randint(0, 61, (tokens,), device=device)
    on_scores, on_weights = torch.randn(tokens, experts, device=device), torch.randn(tokens, topk, device=device)
    results = []
    for gate, dtype in ((ours, torch.float32), (exact, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        with poisoned_outputs():
            scores, chosen, weights = gate(leaf, ids)
            loss = (scores * on_scores).sum() * (uses != "weights") + (weights * on_weights).sum() * (uses != "scores")
            results.append([scores, weights, *torch.autograd.grad(loss, [leaf, gate.weight])])
        results[-1].append(chosen)
    assert torch.equal(results[0].pop(), results[1].pop())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * max(1.0, float(b.detach().abs().max()) if b.numel() else 1.0))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_scores_keep_their_digits_at_every_size_of_a_logit(device: str, fused: Any) -> None:
    z = torch.linspace(-80, 60, 1401, device=device)[:, None].repeat(1, 2).requires_grad_()
    scores, _, weights = fused.route(z, torch.zeros(2, device=device), None, 1, 1.0)
    exact = torch.nn.functional.softplus(z.double(), threshold=100).sqrt()
    torch.testing.assert_close(scores.double(), exact, rtol=2e-6 if device == "cpu" else 1e-5, atol=1e-9)
    (slope,) = torch.autograd.grad(scores.sum(), z, retain_graph=True)
    torch.testing.assert_close(slope.double(), torch.autograd.grad(exact.sum(), z)[0].double(), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(weights, torch.ones_like(weights))
    far = torch.tensor([[-3000.0, 3000.0, 0.0], [-3000.0, -3000.0, -3000.0]], device=device, requires_grad=True)
    scores, experts, weights = fused.route(far, torch.zeros(3, device=device), None, 2, 1.0)
    (slope,) = torch.autograd.grad(scores.sum() + weights.square().sum(), far)
    assert all(t.isfinite().all() for t in (scores, weights, slope))
    assert experts.tolist() == [[1, 2], [0, 1]]  # equals: the lower id


def test_a_nan_stays_one_and_names_existing_experts(device: str, fused: Any) -> None:
    logits = torch.randn(3, 6, device=device)
    logits[1] = torch.nan
    _, experts, weights = fused.route(logits, torch.zeros(6, device=device), None, 2, 1.0)
    assert ((experts >= 0) & (experts < 6)).all()
    assert weights[1].isnan().all()
    assert weights[::2].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 4).double(), torch.zeros(4), None, 2, 1.0), "float64"),
        ((torch.zeros(2, 4), torch.zeros(4), None, 5, 1.0), "E >= 5"),
        ((torch.zeros(2, 4), None, None, 2, 1.0), "either"),
        ((torch.zeros(2, 4), torch.zeros(3), None, 2, 1.0), r"bias must be float32 \[4\]"),
        ((torch.zeros(2, 4), None, torch.zeros(2, 3, dtype=torch.int64), 2, 1.0), r"int64 \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(fused: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused.route(*arguments)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_compiled_ahead_nothing_spills_on_sm90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_route"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == {"route_kernel": 3, "route_backward_kernel": 3}
    assert all(r["stack"] == 0 for r in compiled), compiled
