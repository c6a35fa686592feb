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


@pytest.mark.parametrize(("tokens", "experts", "topk"), [(37, 5, 2), (1, 16, 3), (300, 16, 3), (19, 256, 8), (3, 4, 4), (0, 8, 1), (70, 24, 1)])
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("uses", ["scores", "weights", "both"])
def test_router(device: str, fused: Any, tokens: int, experts: int, topk: int, hashed: bool, uses: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(moe=MoEConfig(n_routed_experts=experts, num_experts_per_tok=topk, routed_scaling_factor=1.7))
    gate, x = Gate(config, hashed, fused).to(device), torch.randn(tokens, 24).to(device).requires_grad_()
    with torch.no_grad():
        gate.weight.mul_(40.0)
        if not hashed:
            gate.bias.normal_(std=0.3)
    ids, probes = torch.randint(0, 61, (tokens,), device=device), [torch.randn(tokens, n, device=device).double() for n in (experts, topk)]
    probes[0] *= uses != "weights"
    probes[1] *= uses != "scores"
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, gate.weight))
    exact_scores = torch.nn.functional.softplus(x64 @ weight64.t()).sqrt()
    with poisoned_outputs():
        scores, chosen, weights = gate(x, ids)
        ours = [(scores, weights)[uses == "weights"]] if uses != "both" else [scores, weights]  # a gradient that is missing, not 0
        grads = torch.autograd.grad(
            ours, [x, gate.weight], [p.float() for p, name in zip(probes, ("scores", "weights"), strict=True) if uses in (name, "both")]
        )
    if hashed:
        assert torch.equal(chosen, gate.tid2eid[ids])
    else:  # two almost equal ones may change places
        biased = exact_scores.detach() + gate.bias
        torch.testing.assert_close(biased.gather(1, chosen), biased.topk(topk).values, rtol=0, atol=1e-5)
    assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()
    exact_weights = exact_scores.gather(1, chosen)
    exact_weights = 1.7 * exact_weights / exact_weights.sum(-1, keepdim=True)
    exact_grads = torch.autograd.grad([exact_scores, exact_weights], [x64, weight64], probes)
    for a, b in zip((scores, weights, *grads), (exact_scores, exact_weights, *exact_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * max(1.0, float(b.detach().abs().max()) if b.numel() else 1.0))


def test_the_plain_gate_routes_alike(device: str, fused: Any) -> None:
    torch.manual_seed(0)
    config = tiny_config(moe=MoEConfig(n_routed_experts=8, num_experts_per_tok=3))
    plain = Gate(config, False).to(device)
    ours = Gate(config, False, fused).to(device)
    ours.load_state_dict(plain.state_dict())
    logits = torch.arange(24.0).view(3, 8) / 8  # far apart: no rounding changes a choice
    with torch.no_grad():
        plain.weight.copy_(torch.eye(24)[:8])
        ours.weight.copy_(plain.weight)
    x = torch.cat([logits, torch.zeros(3, 16)], 1).to(device)
    for a, b in zip(ours(x, None), plain(x, None), strict=True):
        torch.testing.assert_close(a, b)


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
