# SPDX-License-Identifier: Apache-2.0
"""The fused balance loss against the plain one of csa_model in float64, its load number by number; compiled ahead of time for sm_90."""

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
from csa_model.moe import Gate
from csa_model.row import RotaryTables, Row
from kernels import PackedLayout
from tests.kernels.triton.conftest import HAS_TRITON
from tests.model.helpers import tiny_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fused(device: str) -> Any:
    from kernels.triton_fused.row_operations import TritonRowOperations

    return TritonRowOperations()


@pytest.mark.parametrize(
    ("lengths", "padding"),
    [
        ([5, 0, 11, 1], 4),
        ([256], 0),
        ([100, 200, 0, 0, 90], 37),  # blocks with several documents, and a document of several blocks
        ([1] * 40, 0),
        ([0, 0], 70),
        ([], 0),
    ],
)
@pytest.mark.parametrize(("number", "topk"), [(5, 2), (16, 3), (100, 8), (1, 1)])
def test_values_load_and_gradient(device: str, fused: Any, lengths: list[int], padding: int, number: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    config, tokens = tiny_config(moe=MoEConfig(n_routed_experts=number, num_experts_per_tok=topk)), sum(lengths) + padding
    row = Row(PackedLayout.from_lengths(lengths, tokens, device=device), RotaryTables(config), {0}, torch.float32)
    scores = (torch.rand(tokens, number, generator=generator) + 0.1).to(device)
    experts, results = torch.rand(tokens, number, generator=generator).square().topk(topk).indices.to(device), []
    for operations, dtype in ((fused, torch.float32), (None, torch.float64)):
        leaf = scores.to(dtype, copy=True).requires_grad_()
        with poisoned_outputs():
            counts, balance_sum = Gate(config, False, operations).to(device).balance(leaf, experts, row)
            results.append((counts, balance_sum.detach(), *torch.autograd.grad(balance_sum, leaf, torch.full_like(balance_sum, 3.0))))
        assert balance_sum.dtype == dtype
    (counts, value, slope), (exact_counts, exact_value, exact_slope) = results
    assert counts.dtype == torch.int64
    assert torch.equal(counts, exact_counts)
    torch.testing.assert_close(value.double(), exact_value, rtol=1e-6, atol=0.0)
    # Per token the slopes are differences, 0 for a single expert, of numbers of up to the number of experts, over a sum of scores of 0.1 or more, and
    # the incoming gradient is 3.
    assert norm_error(slope, exact_slope) <= 1e-5 or float((slope - exact_slope).abs().max()) <= 2e-7 * number * 3 / 0.1
    _, load = fused.balance(scores, experts, row.document_index, row.document_lengths)
    expected = torch.zeros(len(lengths) + 1, number, dtype=torch.int32, device=device)
    for document, chosen in zip(row.document_index.tolist(), experts.tolist(), strict=True):
        for expert in chosen:
            expected[document, expert] += 1
    assert load.dtype == torch.int32
    assert torch.equal(load, expected)


def test_documents_need_no_order_and_tensors_need_not_lie_together(device: str, fused: Any) -> None:
    torch.manual_seed(0)
    scores, experts = (torch.rand(7, 300, device=device) + 0.1).t(), torch.randint(0, 7, (2, 300), device=device).t()
    document = torch.randint(0, 3, (300,), device=device)
    lengths = torch.tensor([90.0, 100.0, 110.0, torch.inf], device=device)
    one, load = fused.balance(scores, experts, document, lengths)
    order = document.argsort()
    other, same = fused.balance(scores[order].contiguous(), experts[order].contiguous(), document[order], lengths)
    assert torch.equal(load, same)
    torch.testing.assert_close(one, other)
    again = document.repeat_interleave(2)[::2]
    assert torch.equal(fused.balance(scores.contiguous(), experts.contiguous(), again, lengths)[0], one)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": torch.ones(4, 3).double()}, "float64"),
        ({"experts": torch.zeros(4, 2, dtype=torch.int32)}, "int32"),
        ({"experts": torch.zeros(3, 2, dtype=torch.int64)}, r"int64 \[4, K\]"),
        ({"document": torch.zeros(5, dtype=torch.int64)}, r"int64 \[4\]"),
        ({"document": torch.zeros(4, dtype=torch.int32)}, "int32"),
        ({"lengths": torch.ones(2).double()}, r"float32 \[N \+ 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(fused: Any, changed: dict[str, torch.Tensor], message: str) -> None:
    fits = {
        "scores": torch.ones(4, 3), "experts": torch.zeros(4, 2, dtype=torch.int64), "document": torch.zeros(4, dtype=torch.int64),
        "lengths": torch.ones(2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fused.balance(**(fits | changed))


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_compiled_ahead_nothing_spills_on_sm90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_expert_load"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == {"load_kernel": 3, "balance_kernel": 3}
    assert all(r["stack"] == 0 for r in compiled), compiled
