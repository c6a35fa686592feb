# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: the doubly stochastic map, its gradient, and what the whole reduces to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, fx

from csa_model.config import HyperConnectionsConfig
from csa_model.hyper_connections import HyperConnection, HyperHead, sinkhorn
from csa_model.layers import rms_norm
from tests.model.helpers import build, logits_of, plain_config, random_tokens, tiny_config


def unrolled(logits: Tensor, iterations: int, eps: float) -> Tensor:
    matrix = logits.softmax(1) + eps
    matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(0, keepdim=True) + eps)
    return matrix


def test_sums_are_one() -> None:
    logits = torch.randn(4, 4, 500, generator=torch.Generator().manual_seed(0))
    matrix = sinkhorn(logits, 20, 1e-6)
    assert (matrix >= 0).all()
    assert (matrix.sum(0) - 1).abs().max() < 3e-6  # columns: the last step, up to its eps
    assert (matrix.sum(1) - 1).abs().max() < 2e-3


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_gradient_goes_through_every_iteration(iterations: int) -> None:
    logits = torch.randn(3, 3, 7, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sinkhorn(logits, iterations, 1e-6), unrolled(logits, iterations, 1e-6))
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, iterations, 1e-3), (logits,))


def test_gradient_in_float32_is_that_of_autograd() -> None:
    logits = (3 * torch.randn(4, 4, 300)).requires_grad_()
    weight = torch.randn(4, 4, 300)
    (ours,) = torch.autograd.grad((sinkhorn(logits, 20, 1e-6) * weight).sum(), logits)
    (exact,) = torch.autograd.grad((unrolled(logits.double(), 20, 1e-6) * weight).sum(), logits)
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_module_gradients() -> None:
    torch.manual_seed(0)
    module = HyperConnection(tiny_config(hidden_size=5, hyper_connections=HyperConnectionsConfig(hc_mult=3))).double()
    streams, y = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(module.scale)

    def through(streams: Tensor, y: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        x, write, mix = module.collapse(streams)
        return x, module.expand(streams, y, write, mix)

    assert torch.autograd.gradcheck(through, (streams, y, module.fn, module.scale, module.base))


def test_neutral_maps_leave_a_plain_residual_block() -> None:
    """Equal streams, read 1/4 each, write 1, identity mix: x is the stream and every stream becomes stream + y."""
    module = HyperConnection(tiny_config())
    stream, y = torch.randn(9, 24), torch.randn(9, 24)
    streams = stream[:, None].expand(-1, 4, -1)
    with torch.no_grad():
        module.scale.zero_()
        module.base[:4] = torch.logit(torch.tensor(0.25))
        module.base[8:] = (200 * torch.eye(4)).flatten()
    x, write, mix = module.collapse(streams)
    torch.testing.assert_close(x, stream, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.expand(streams, y, write, mix), streams + y[:, None], rtol=1e-4, atol=1e-4)


def test_mix_sends_source_to_target() -> None:
    """The first axis of the mix is the source stream: the map is applied transposed."""
    module = HyperConnection(tiny_config())
    streams, mix = torch.randn(6, 4, 24), torch.zeros(4, 4, 6)
    mix[0, 2] = 1.0  # stream 0 flows into stream 2
    out = module.expand(streams, torch.zeros(6, 24), torch.ones(6, 4), mix)
    assert torch.equal(out[:, 2], streams[:, 0])
    assert not out[:, [0, 1, 3]].any()


def test_untrained_maps_without_input_dependence_make_a_plain_decoder() -> None:
    """Zero scales: all streams stay equal, X' = y + mean X. With every norm's scale invariance that is the plain decoder to within eps."""
    config = tiny_config(
        hyper_connections=HyperConnectionsConfig(init_scale=0.0), moe=plain_config().moe, mtp=dataclasses.replace(tiny_config().mtp, enabled=False)
    )
    connected, plain = build(config, shake=False), build(plain_config(), shake=False)
    plain.load_state_dict({name: value for name, value in connected.state_dict().items() if ".hc_" not in name and not name.startswith("hc_head")})
    with torch.no_grad():  # larger activations, so that the eps inside the norms stops mattering
        for decoder in (connected, plain):
            decoder.embed.weight.mul_(50.0)
    tokens = random_tokens(30)
    torch.testing.assert_close(logits_of(connected, tokens), logits_of(plain, tokens), rtol=1e-3, atol=1e-4)


def test_maps_and_mixing_run_in_float32_on_bf16_streams() -> None:
    torch.manual_seed(0)
    module, head = HyperConnection(tiny_config()), HyperHead(tiny_config())
    for part in (module, head):
        torch.nn.init.normal_(part.scale)
    streams, y = torch.randn(50, 4, 24).bfloat16(), torch.randn(50, 24).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        x, write, mix = module.collapse(streams)
        out, hidden = module.expand(streams, y, write, mix), head(streams)
    exact_x, exact_write, exact_mix = module.collapse(streams.float())
    assert write.dtype == mix.dtype == torch.float32
    assert torch.equal(write, exact_write)
    assert torch.equal(mix, exact_mix)
    assert torch.equal(x, exact_x.bfloat16())
    assert torch.equal(out, module.expand(streams.float(), y.float(), write, mix).bfloat16())
    assert torch.equal(hidden, head(streams.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_sees_plain_operations_in_the_head_and_keeps_the_gradients(dtype: torch.dtype) -> None:
    """With torch 2.11 the head's custom Functions got gradients of exactly 0 in fp32."""
    torch._dynamo.reset()
    seen: list[str] = []

    def record(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    start, probe, results = torch.randn(6, 4, 24).to(dtype), torch.randn(6, 24).to(dtype), []
    for compiled in (False, True):
        torch.manual_seed(0)
        head, streams = HyperHead(tiny_config()), start.clone().requires_grad_()
        if compiled:
            head.compile(backend=record)
        results.append(torch.autograd.grad(head(streams), (streams, head.fn, head.scale, head.base), probe))
    assert seen
    assert not [name for name in seen if "autograd_function" in name]
    torch.testing.assert_close(results[1], results[0])


def test_the_compiled_head_under_autocast_has_gradients_in_float32() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    head, streams, probe = HyperHead(tiny_config()), torch.randn(60, 4, 24).bfloat16(), torch.randn(60, 24).bfloat16()
    results = []
    for compiled in (False, True):
        if compiled:
            head.compile(backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16):
            out = head(streams)
        results.append(torch.autograd.grad(out, (head.fn, head.scale, head.base), probe))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("function", ["projection", "sinkhorn", "norm"])
def test_a_second_derivative_is_refused(function: str) -> None:
    """These keep for the backward what they have computed: a derivative of it would be missing."""
    x = torch.randn(4, 4, 24, requires_grad=True)
    if function == "projection":
        out = HyperConnection(tiny_config()).maps(x)[0]
    else:
        out = sinkhorn(x, 2, 1e-3) if function == "sinkhorn" else rms_norm(x, None, 1e-6)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
