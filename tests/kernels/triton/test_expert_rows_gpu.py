# SPDX-License-Identifier: Apache-2.0
"""The work around the experts at sizes of a training step and beyond 2^31 numbers, repeated, and within a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csa_model.config import MoEConfig
from csa_model.moe import Experts, Gate, MoE, _Order
from csa_model.row import RotaryTables, Row
from kernels import PackedLayout
from tests.model.helpers import plain_config

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize(("tokens", "number", "topk"), [(4096, 16, 3), (65536, 16, 3), (16384, 256, 8), (30000, 512, 1)])
def test_order_and_load_of_many_pairs(tokens: int, number: int, topk: int) -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    torch.manual_seed(0)
    fused, scores = TritonRowOperations(), torch.rand(tokens, number, device="cuda") + 0.1
    experts = torch.rand(tokens, number, device="cuda").square().topk(topk).indices
    pair, place, end = fused.order_pairs(experts, number)
    expected = _Order(experts, number)
    assert torch.equal(pair, expected.pair)
    assert torch.equal(place, expected.place.view(tokens, topk))
    assert torch.equal(end, expected.end)
    config = plain_config(moe=MoEConfig(n_routed_experts=number, num_experts_per_tok=topk))
    lengths = [tokens // 2, 100, 0, 1, tokens // 4]
    row = Row(PackedLayout.from_lengths(lengths, tokens, device="cuda"), RotaryTables(config), {0}, torch.float32)
    results = []
    for operations, dtype in ((fused, torch.float32), (None, torch.float64)):
        leaf = scores.to(dtype, copy=True).requires_grad_()
        counts, balance_sum = Gate(config, False, operations).cuda().balance(leaf, experts, row)
        results.append((counts, balance_sum.detach().double(), torch.autograd.grad(balance_sum, leaf)[0].double()))
    (counts, value, slope), (exact_counts, exact_value, exact_slope) = results
    assert torch.equal(counts, exact_counts)
    torch.testing.assert_close(value, exact_value, rtol=1e-6, atol=0.0)
    assert (slope - exact_slope).norm() <= 1e-5 * exact_slope.norm()


def test_offsets_beyond_31_bits() -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    fused, tokens, topk, width = TritonRowOperations(), 40000, 8, 8192
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    places = torch.randperm(tokens * topk, device="cuda").view(tokens, topk)
    spread, _ = fused.spread_rows(x, places)
    for k in range(topk):
        assert torch.equal(spread[places[::97, k]], x[::97])
    assert torch.equal(fused.sum_rows(spread, places, x), (9.0 * x.float()).bfloat16())


def layer_and_row(tokens: int) -> tuple[MoE, Row]:
    from kernels.triton_fused.row_operations import TritonRowOperations

    torch.manual_seed(0)
    config = plain_config(hidden_size=512, moe=MoEConfig(n_routed_experts=16, num_experts_per_tok=3, moe_intermediate_size=256))
    row = Row(PackedLayout.from_lengths([tokens // 2, tokens // 3], tokens, device="cuda"), RotaryTables(config), {0}, torch.float32)
    layer = MoE(config, 1, False, 0.02, TritonRowOperations()).cuda()
    _ = row.document_index, row.document_lengths
    return layer, row


def step(layer: MoE, row: Row, x: Tensor, ids: Tensor, probe: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y, record = layer(x, ids, row)
    assert record is not None
    gradients = torch.autograd.grad([y, record.balance_sum], [x, *layer.parameters()], [probe.to(y.dtype), torch.ones_like(record.balance_sum)])
    return [y.detach(), record.counts, *gradients]


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_a_step_repeats_bit_for_bit_and_as_a_graph_that_waits_for_nothing(tokens: int) -> None:
    layer, row = layer_and_row(tokens)
    inputs = [torch.randn(tokens, 512, device="cuda").requires_grad_(), torch.zeros(tokens, dtype=torch.int64, device="cuda")]
    inputs.append(torch.randn(tokens, 512, device="cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first, second = step(layer, row, *inputs), step(layer, row, *inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, row, *inputs)
    graph.replay()
    for one, two, replayed in zip(first, second, captured, strict=True):
        assert torch.equal(one, two)
        difference = (one.float() - replayed.float()).norm()  # the libraries may choose other matrix products for a graph
        assert difference <= 1e-2 * one.float().norm()


def test_a_layer_of_the_size_of_a_step_is_as_close_to_float32_as_with_the_plain_operations() -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    torch.manual_seed(0)
    config = plain_config(hidden_size=512, moe=MoEConfig(n_routed_experts=16, num_experts_per_tok=3, moe_intermediate_size=256))
    x, weights, probe, plus = (torch.randn(4096, n, device="cuda") for n in (512, 3, 512, 512))
    chosen, results = torch.rand(4096, 15, device="cuda").topk(3).indices, []  # no token goes to the last expert
    layer = Experts(config, 0.02).cuda()
    for operations, autocast in ((None, False), (TritonRowOperations(), True), (None, True)):
        layer.fused = operations
        leaves = [t.clone().requires_grad_() for t in (x, weights, plus)]
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = layer(leaves[0], chosen, leaves[1], leaves[2].to(torch.bfloat16 if autocast else torch.float32))
        results.append([y.detach(), *torch.autograd.grad(y.float(), [*leaves, *layer.parameters()], probe)])
    for exact, ours, plain in zip(*results, strict=True):
        errors = [float((t.float() - exact).norm() / exact.norm()) for t in (ours, plain)]
        assert errors[0] <= 1.2 * errors[1] + 1e-6, errors
