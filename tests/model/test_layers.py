# SPDX-License-Identifier: Apache-2.0
"""Norms and the precision rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from csa_model.layers import RMSNorm, grouped_projection, linear_fp32, linear_rounded, rms_norm


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


def test_rounded_linear_rounds_operands_and_gradient_and_nothing_else() -> None:
    x, weight, probe = torch.randn(40, 64, requires_grad=True), torch.randn(24, 64, requires_grad=True), torch.randn(40, 24)
    assert torch.equal(linear_rounded(x, weight), linear_fp32(x, weight))  # no autocast
    rounded_x, rounded_weight, rounded_probe = (t.detach().bfloat16().double() for t in (x, weight, probe))
    for inside in (False, True):  # a backward inside the context too
        for dtype in (torch.float32, torch.bfloat16):
            leaf = x.detach().to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = linear_rounded(leaf, weight)
                gradients = torch.autograd.grad(y, (leaf, weight), probe) if inside else None
            grad_x, grad_weight = gradients or torch.autograd.grad(y, (leaf, weight), probe)
            assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (torch.float32, dtype, torch.float32)
            torch.testing.assert_close(y.double(), rounded_x @ rounded_weight.t(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad_weight.double(), rounded_probe.t() @ rounded_x, rtol=1e-5, atol=1e-5)
            tolerance = 1e-5 if dtype == torch.float32 else 2**-8
            torch.testing.assert_close(grad_x.double(), rounded_probe @ rounded_weight, rtol=tolerance, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        exact = x.detach().double()
        assert torch.equal(linear_rounded(exact, weight.double()), exact @ weight.double().t())


@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_projection_equals_an_einsum_with_its_gradients(autocast: bool) -> None:
    dtype = torch.bfloat16 if autocast else torch.float64
    x, weight, probe = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((7, 3, 10), (3, 4, 10), (7, 3, 4)))
    results = []
    for exact in (False, True):
        a, w = x.to(torch.float64 if exact else dtype).requires_grad_(), weight.to(torch.float32 if autocast and not exact else torch.float64)
        w.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not exact):
            y = torch.einsum("tgi,goi->tgo", a, w) if exact else grouped_projection(a, w)
        results.append([y, *torch.autograd.grad(y, (a, w), probe.to(y.dtype))])
        assert exact or all(t.is_contiguous() for t in results[0])
    assert [t.dtype for t in results[0]] == ([torch.bfloat16, torch.bfloat16, torch.float32] if autocast else [torch.float64] * 3)
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= (2**-8 if autocast else 1e-14) * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible")
def test_rounded_linear_on_the_gpu_follows_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        x, weight, probe = (torch.randn(*shape, generator=generator).to(device) for shape in ((300, 96), (257, 96), (300, 257)))
        x, weight = x.bfloat16().requires_grad_(), weight.requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = linear_rounded(x, weight)
        results.append([t.cpu() for t in (y, *torch.autograd.grad(y, (x, weight), probe))])
    for ours, cpu in zip(*reversed(results), strict=True):
        assert ours.dtype == cpu.dtype
        torch.testing.assert_close(ours, cpu, rtol=2**-7 if cpu.dtype == torch.bfloat16 else 1e-4, atol=1e-4)  # a rounding may fall the other way


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
