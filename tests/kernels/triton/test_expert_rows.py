# SPDX-License-Identifier: Apache-2.0
"""Rows to their experts and back against plain PyTorch: order and copies bit for bit, sums in float64; whole layers; compiled ahead for sm_90."""

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
from torch import Tensor

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model.config import MoEConfig
from csa_model.moe import Experts, MoE, _Order
from csa_model.row import RotaryTables, Row
from kernels import PackedLayout
from tests.kernels.triton.conftest import HAS_TRITON
from tests.model.helpers import tiny_config

ROOT = Path(__file__).parents[3]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def fused(device: str) -> Any:
    from kernels.triton_fused.row_operations import TritonRowOperations

    return TritonRowOperations()


def a_permutation(tokens: int, topk: int, device: str) -> Tensor:
    return torch.randperm(tokens * topk, generator=torch.Generator().manual_seed(0)).view(tokens, topk).to(device)


@pytest.mark.parametrize(
    ("tokens", "number", "topk"),
    [
        (37, 5, 2),
        (1, 1, 1),
        (128, 16, 1),  # a block that is full
        (129, 33, 1),  # one more pair than a block, one more expert than a program counts
        (700, 16, 3),  # blocks whose pairs of one token lie in two
        (90, 512, 8),
        (300, 2, 3),
        (0, 7, 3),
    ],
)
@pytest.mark.parametrize("load", ["even", "one", "last two"])
def test_the_order_is_that_of_a_stable_sort(device: str, fused: Any, tokens: int, number: int, topk: int, load: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    low, high = {"even": (0, number), "one": (number // 2, number // 2 + 1), "last two": (max(0, number - 2), number)}[load]
    experts = torch.randint(low, high, (tokens, topk), generator=generator).to(device)
    with poisoned_outputs():
        pair, place, end = fused.order_pairs(experts, number)
    expected = _Order(experts, number)
    assert (pair.dtype, place.dtype, end.dtype) == (torch.int64, torch.int64, torch.int32)
    assert torch.equal(pair, expected.pair)
    assert torch.equal(place, expected.place.view(tokens, topk))
    assert torch.equal(end, expected.end)


def test_the_order_of_experts_that_do_not_lie_together(device: str, fused: Any) -> None:
    experts = torch.randint(0, 6, (3, 50), generator=torch.Generator().manual_seed(0)).to(device).t()
    for ours, theirs in zip(fused.order_pairs(experts, 6), fused.order_pairs(experts.contiguous(), 6), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "width"), [(19, 24), (1, 7), (5, 1500), (130, 64), (0, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device: str, fused: Any, tokens: int, width: int, topk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    places = a_permutation(tokens, topk, device)
    eps = torch.finfo(dtype).eps / (1 if device == "cpu" and dtype == torch.bfloat16 else 2)  # the interpreter cuts digits off for bf16
    x, plus, y, other = (torch.randn(n, width, device=device).to(dtype) for n in (tokens, tokens, tokens * topk, tokens * topk))

    def close(ours: Tensor, exact: Tensor, size: Tensor) -> None:
        """To one rounding, and to those of a sum in fp32 of numbers of this size."""
        assert ours.dtype == dtype
        assert ((ours.double() - exact).abs() <= eps * exact.abs() + 2 * topk * 2**-24 * size + 2**-25).all()  # 2**-25: below the normal float16

    def summed(t: Tensor) -> Tensor:
        return t.double()[places.flatten()].view(tokens, topk, width).sum(1)

    with poisoned_outputs():
        leaf = x.clone().requires_grad_()
        one, two = fused.spread_rows(leaf, places)
        (grad,) = torch.autograd.grad([one, two], leaf, [y, other], retain_graph=True)
        (of_one,), (of_two,) = torch.autograd.grad(one, leaf, y, retain_graph=True), torch.autograd.grad(two, leaf, y)
        leaves = [y.clone().requires_grad_(), plus.clone().requires_grad_()]
        alone, added = fused.sum_rows(leaves[0], places), fused.sum_rows(leaves[0], places, leaves[1])
        (of_alone,), of_added = torch.autograd.grad(alone, leaves[0], x), torch.autograd.grad(added, leaves, x)
    expected = torch.empty_like(y)
    expected[places.flatten()] = x.repeat_interleave(topk, 0)
    for copy in (one, two, of_alone, of_added[0]):
        assert torch.equal(copy, expected)
    assert torch.equal(of_added[1], x)
    close(alone.detach(), summed(y), summed(y.abs()))
    close(added.detach(), summed(y) + plus.double(), summed(y.abs()) + plus.abs())
    close(grad, summed(y) + summed(other), summed(y.abs()) + summed(other.abs()))
    for single in (of_one, of_two):
        assert torch.equal(single, alone)


def test_the_gradient_may_be_asked_of_either_alone(device: str, fused: Any) -> None:
    places, x, plus = a_permutation(6, 2, device), torch.randn(12, 8, device=device), torch.randn(6, 8, device=device)
    fused.sum_rows(x, places, plus.requires_grad_()).sum().backward()
    assert torch.equal(plus.grad, torch.ones(6, 8, device=device))
    x.requires_grad_()
    fused.sum_rows(x, places, plus.detach()).sum().backward()
    assert torch.equal(x.grad, torch.ones(12, 8, device=device))


def test_rows_that_do_not_lie_together_are_taken(device: str, fused: Any) -> None:
    torch.manual_seed(0)
    places = a_permutation(3, 10, device).t().contiguous().t()
    y, x, plus = torch.randn(8, 30, device=device).t(), torch.randn(3, 16, device=device)[:, ::2], torch.randn(8, 3, device=device).t()
    assert torch.equal(fused.sum_rows(y, places, plus), fused.sum_rows(y.contiguous(), places.contiguous(), plus.contiguous()))
    leaf = x.clone().requires_grad_()
    given = [(places, [y, -y]), (places.contiguous(), [y.contiguous(), -y.contiguous()]), (places, [y.contiguous(), -y])]
    for p, gradients in given:
        assert not torch.autograd.grad(fused.spread_rows(leaf, p), leaf, gradients)[0].any()
        assert torch.equal(torch.autograd.grad(fused.spread_rows(leaf, p)[0], leaf, gradients[0])[0], fused.sum_rows(y.contiguous(), places))
    assert torch.equal(fused.spread_rows(x, places)[0], fused.spread_rows(x.contiguous(), places.contiguous())[0])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("spread_rows", (torch.zeros(4, 8).double(), torch.zeros(4, 2, dtype=torch.int64)), "float64"),
        ("spread_rows", (torch.zeros(4, 8), torch.zeros(3, 2, dtype=torch.int64)), r"x must be \[3, D\]"),
        ("spread_rows", (torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int32)), "int32"),
        ("spread_rows", (torch.zeros(4, 8), torch.zeros(4, 0, dtype=torch.int64)), "K >= 1"),
        ("sum_rows", (torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64)), r"x must be \[8, D\]"),
        ("sum_rows", (torch.zeros(8, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 7)), r"plus must be torch.float32 \[4, 8\]"),
        ("sum_rows", (torch.zeros(8, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 8).half()), "float16"),
        ("order_pairs", (torch.zeros(8, dtype=torch.int64), 3), r"int64 \[N, K\]"),
        ("order_pairs", (torch.zeros(8, 2, dtype=torch.int32), 3), "int32"),
    ],
)
def test_what_does_not_fit_is_refused(fused: Any, name: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(fused, name)(*arguments)


@pytest.mark.parametrize("wanted", ["all", "weights only"])
def test_experts_agree_with_float64(device: str, fused: Any, wanted: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(moe=MoEConfig(n_routed_experts=5, num_experts_per_tok=3, moe_intermediate_size=16))
    x, weights, plus, probe = torch.randn(60, 24), torch.rand(60, 3), torch.randn(60, 24), torch.randn(60, 24)
    chosen, results = torch.rand(60, 4).topk(3).indices.to(device), []  # no token goes to the last expert
    weights[::7] = 0.0
    for operations, dtype in ((fused, torch.float32), (None, torch.float64)):
        torch.manual_seed(1)
        layer = Experts(config, 0.5, operations).to(device, dtype)
        inputs = [t.to(device, dtype).requires_grad_(wanted == "all") for t in (x, plus)] + [weights.to(device, dtype).requires_grad_()]
        with poisoned_outputs():
            y = layer(inputs[0], chosen, inputs[2], inputs[1])
            leaves = [t for t in (*inputs, *layer.parameters()) if t.requires_grad]
            results.append([y.detach(), *torch.autograd.grad(y, leaves, probe.to(device, dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert norm_error(ours, theirs) <= 1e-6


def test_the_gradients_of_gate_and_up_are_not_summed_beforehand(device: str, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton_fused import expert_rows

    config, sums, original = tiny_config(moe=MoEConfig(n_routed_experts=4, moe_intermediate_size=16)), [], expert_rows._sum

    def recorded(x: Tensor, also: Tensor | None, places: Tensor, plus: Tensor | None) -> Tensor:
        sums.append((also is not None, plus is not None))
        return original(x, also, places, plus)

    monkeypatch.setattr(expert_rows, "_sum", recorded)
    x, chosen = torch.randn(9, 24, device=device, requires_grad=True), torch.zeros(9, 2, dtype=torch.int64, device=device)
    Experts(config, 0.5, fused).to(device)(x, chosen, torch.rand(9, 2, device=device), x).sum().backward()
    assert sums == [(False, True), (True, False)]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("shared", [0, 1])
def test_a_layer_is_as_close_to_float32_as_with_the_plain_operations(device: str, fused: Any, hashed: bool, shared: int) -> None:
    """Under autocast to bf16. Each sum is rounded at most as often, but the interpreter's rounding is twice as coarse."""
    config = tiny_config(moe=MoEConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=shared))
    row = Row(PackedLayout.from_lengths([70, 9], 90, device=device), RotaryTables(config), {0}, torch.float32)
    torch.manual_seed(0)
    x, ids, probe = torch.randn(90, 24, device=device), torch.randint(0, 61, (90,), device=device), torch.randn(90, 24, device=device)
    results = []
    for operations, autocast in ((None, False), (fused, True), (None, True)):
        torch.manual_seed(1)
        layer, leaf = MoE(config, 1, hashed, 0.5, operations).to(device), x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y, _ = layer(leaf, ids, row)
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        results.append([y.detach(), *torch.autograd.grad(y.float(), [leaf, *layer.parameters()], probe)])
    for exact, ours, plain in zip(*results, strict=True):
        assert norm_error(ours, exact) <= (2.4 if device == "cpu" else 1.2) * norm_error(plain, exact) + 1e-6


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_compiled_ahead_nothing_spills_on_sm90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_expert_rows"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == {"count_kernel": 3, "place_kernel": 3, "spread_kernel": 3, "sum_kernel": 9}
    assert all(r["stack"] == 0 and r["atomics"] == 0 for r in compiled), compiled
    rows = [r for r in compiled if r["geometry"] == "small" and r["kernel"] in ("spread_kernel", "sum_kernel")]
    assert all(r["wide"] >= 4 for r in rows), rows  # one access of 16 bytes a thread and row
