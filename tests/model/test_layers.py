# SPDX-License-Identifier: Apache-2.0
"""Norms and the precision rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from csa_model.layers import RMSNorm, linear_fp32, rms_norm


def test_norm_equals_torch_and_has_its_gradients() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))
    torch.testing.assert_close(rms_norm(x, None, 1e-6), F.rms_norm(x, (8,), None, 1e-6))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-2), (x,))


def test_norm_of_bf16_runs_in_float32() -> None:
    x = (100 * torch.randn(64, 96)).bfloat16()
    norm = RMSNorm(96, 1e-6)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), norm(x.float()).bfloat16())
    probe, gradients = torch.randn(64, 96).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):  # a backward inside the context must not round either
            gradients.append(torch.autograd.grad(norm(leaf), (leaf, norm.weight), probe.to(dtype)))
    assert torch.equal(gradients[0][0], gradients[1][0].bfloat16())
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_zero_rows_are_finite() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    rms_norm(x, None, 1e-6).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_fp32_linear_ignores_autocast() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    exact = x @ weight.t()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_fp32(x, weight), exact)
        assert F.linear(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_sees_plain_operations_and_keeps_the_gradients(dtype: torch.dtype) -> None:
    """With torch 2.11 the norm as a custom Function compiled in fp32, the dtype of its sums, got gradients of exactly 0."""
    torch._dynamo.reset()
    seen: list[str] = []

    def record(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    start, probe, results = torch.randn(6, 8).to(dtype), torch.randn(6, 8).to(dtype), []
    for compiled in (False, True):
        norm, x = RMSNorm(8, 1e-6), start.clone().requires_grad_()
        if compiled:
            norm.compile(backend=record)
        results.append(torch.autograd.grad(norm(x), (x, norm.weight), probe))
    assert seen
    assert not [name for name in seen if "autograd_function" in name]
    torch.testing.assert_close(results[1], results[0])
