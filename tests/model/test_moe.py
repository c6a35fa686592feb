# SPDX-License-Identifier: Apache-2.0
"""Routing, experts, balance."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from csa_model import moe
from csa_model.config import MoEConfig
from csa_model.moe import Experts, Gate, MoE, SwiGLU, clamped_swiglu, grouped_linear, update_router_biases
from csa_model.row import RotaryTables, Row
from kernels import PackedLayout
from tests.model.helpers import tiny_config

CONFIG = tiny_config()
E, K = CONFIG.moe.n_routed_experts, CONFIG.moe.num_experts_per_tok


def gate(hashed: bool = False) -> Gate:
    torch.manual_seed(0)
    made = Gate(CONFIG, hashed)
    with torch.no_grad():
        made.weight.mul_(30.0)
    return made


def row_of(lengths: list[int], padding: int = 0) -> Row:
    return Row(PackedLayout.from_lengths(lengths, sum(lengths) + padding), RotaryTables(CONFIG), {0}, torch.float32)


def test_weights_are_scores_without_bias_normalised_and_scaled() -> None:
    router, x, ids = gate(), torch.randn(40, 24), torch.zeros(40, dtype=torch.int64)
    scores, experts, weights = router(x, ids)
    torch.testing.assert_close(scores, torch.nn.functional.softplus(x @ router.weight.t()).sqrt())
    torch.testing.assert_close(weights.sum(-1), torch.full((40,), CONFIG.moe.routed_scaling_factor))
    torch.testing.assert_close(weights[:, 0] / weights[:, 1], scores.gather(1, experts)[:, 0] / scores.gather(1, experts)[:, 1])
    router.bias[3] = 100.0
    moved = router(x, ids)
    assert (moved[1] == 3).any(-1).all()
    same = [t for t in range(40) if set(moved[1][t].tolist()) == set(experts[t].tolist())]
    assert same
    torch.testing.assert_close(moved[2][same].sort(-1).values, weights[same].sort(-1).values)


def test_no_gradient_to_the_bias_and_hash_layers_have_none() -> None:
    router = gate()
    router(torch.randn(4, 24), torch.zeros(4, dtype=torch.int64))[2].square().sum().backward()
    assert not router.bias.requires_grad
    assert router.weight.grad is not None
    assert set(dict(gate(hashed=True).named_buffers())) == {"tid2eid"}
    assert set(dict(router.named_buffers())) == {"bias"}


def test_hash_table_holds_distinct_experts_spread_evenly_and_follows_the_seed() -> None:
    config = tiny_config(vocab_size=4000, moe=MoEConfig(n_routed_experts=8, num_experts_per_tok=3))
    torch.manual_seed(3)
    table = Gate(config, hashed=True).tid2eid
    torch.manual_seed(3)
    assert torch.equal(Gate(config, hashed=True).tid2eid, table)
    assert not torch.equal(Gate(config, hashed=True).tid2eid, table)
    assert table.dtype == torch.int64
    assert (table.sort(-1).values.diff(dim=-1) > 0).all()
    load = torch.bincount(table.flatten(), minlength=8) / table.numel()
    assert (load - 1 / 8).abs().max() < 0.01
    pairs = {tuple(sorted(p)) for row in table.tolist() for p in itertools.combinations(row, 2)}
    assert len(pairs) == 28  # neighbouring ids share no pattern: every pair of experts occurs


def test_hash_layer_chooses_by_token_id_alone() -> None:
    router, ids = gate(hashed=True), torch.tensor([7, 3, 7])
    _, experts, weights = router(torch.randn(3, 24), ids)
    assert torch.equal(experts, router.tid2eid[ids])
    assert not torch.equal(weights[0], weights[2])


def test_router_survives_extreme_logits() -> None:
    """softplus is exactly 0 in fp32 below -104, where sqrt has no finite gradient."""
    router = gate()
    with torch.no_grad():
        router.weight.copy_(torch.linspace(-3000, 3000, E)[:, None].expand(-1, 24))
    x = torch.ones(2, 24, requires_grad=True)
    scores, _, weights = router(x, torch.zeros(2, dtype=torch.int64))
    (scores.sum() + weights.square().sum()).backward()
    assert x.grad is not None
    assert all(t.isfinite().all() for t in (scores, weights, x.grad, router.weight.grad))


def test_router_runs_in_float32_under_autocast() -> None:
    router, x, ids = gate(), torch.randn(40, 24), torch.zeros(40, dtype=torch.int64)
    exact = router(x, ids)
    with torch.autocast("cpu", torch.bfloat16):
        for ours, theirs in zip(router(x, ids), exact, strict=True):
            assert torch.equal(ours, theirs)


def test_swiglu_clamps_gate_above_and_up_on_both_sides() -> None:
    gates, ups = torch.tensor([-50.0, 2.0, 50.0, 50.0]), torch.tensor([3.0, -50.0, 50.0, -50.0])
    expected = torch.nn.functional.silu(torch.tensor([-50.0, 2.0, 10.0, 10.0])) * torch.tensor([3.0, -10.0, 10.0, -10.0])
    assert torch.equal(clamped_swiglu(gates, ups, 10.0), expected)


def test_swiglu_activation_runs_in_float32() -> None:
    gates, ups = torch.randn(99).bfloat16(), torch.randn(99).bfloat16()
    assert torch.equal(clamped_swiglu(gates, ups, 10.0), clamped_swiglu(gates.float(), ups.float(), 10.0).bfloat16())


def loop(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for t in range(len(x)):
        rows.append(
            sum(w * (experts.w2[e] @ clamped_swiglu(experts.w1[e] @ x[t], experts.w3[e] @ x[t], 10.0)) for e, w in zip(chosen[t], weights[t]))
        )
    return torch.stack(rows)  # type: ignore[arg-type]


def test_experts_equal_a_loop_over_tokens_with_all_gradients() -> None:
    torch.manual_seed(0)
    experts = Experts(CONFIG, 0.5).double()
    x, weights = torch.randn(30, 24, dtype=torch.float64, requires_grad=True), torch.rand(30, K, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(30, E).topk(K).indices
    chosen[chosen == 2] = 4  # an expert without tokens; duplicates in a row are only added up here
    inputs = (x, weights, experts.w1, experts.w2, experts.w3)
    probe = torch.randn(30, 24, dtype=torch.float64)
    ours, theirs = experts(x, chosen, weights), loop(experts, x, chosen, weights)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad((ours * probe).sum(), inputs), torch.autograd.grad((theirs * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_grouped_gemm_and_loop_are_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    experts, x = Experts(tiny_config(moe=MoEConfig(n_routed_experts=4, moe_intermediate_size=16)), 0.5), torch.randn(48, 24)
    chosen, weights = torch.rand(48, 4).topk(2).indices, torch.rand(48, 2)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(moe, "grouped_gemm_applies", lambda x, weight, grouped=grouped: grouped)
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(x, chosen, weights)
        results.append(
            [y.detach().float(), *(g.float() for g in torch.autograd.grad(y.float().square().sum(), [experts.w1, experts.w2, experts.w3]))]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_grouped_linear_takes_empty_groups() -> None:
    x, weight = torch.randn(6, 3, requires_grad=True), torch.randn(4, 2, 3, requires_grad=True)
    y = grouped_linear(x, weight, torch.tensor([0, 6, 6, 6], dtype=torch.int32))
    torch.testing.assert_close(y, x @ weight[1].t())
    y.sum().backward()
    assert weight.grad is not None
    assert not weight.grad[[0, 2, 3]].any()


def test_balance_is_a_mean_over_each_document() -> None:
    router, lengths = gate(), [5, 0, 11, 1]
    row, x = row_of(lengths, padding=4), torch.randn(21, 24)
    router.bias.copy_(torch.linspace(-1, 1, E))  # the routing that happened, bias included, gives f
    scores, experts, _ = router(x, torch.zeros(21, dtype=torch.int64))
    counts, balance_sum = router.balance(scores, experts, row)
    expected, start = torch.zeros(()), 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        if length:
            f = torch.bincount(experts[part].flatten(), minlength=E) * E / (K * length)
            expected = expected + (f * (scores[part] / scores[part].sum(-1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(balance_sum, expected)
    assert torch.equal(counts, torch.bincount(experts[:17].flatten(), minlength=E))
    assert counts.dtype == torch.int64


def test_gradient_of_the_balance_is_exact() -> None:
    row, generator = row_of([5, 0, 11, 1], padding=4), torch.Generator().manual_seed(0)
    scores = (torch.rand(21, E, generator=generator, dtype=torch.float64) + 0.1).requires_grad_()
    experts = scores.detach().topk(K).indices
    assert torch.autograd.gradcheck(lambda s: gate().balance(s, experts, row)[1], (scores,))
    (slope,) = torch.autograd.grad(gate().balance(scores, experts, row)[1], scores)
    assert not slope[17:].any()
    assert slope[:17].any(-1).all()


@pytest.mark.parametrize("number", [5, 300])
def test_pairs_are_ordered_by_expert_and_then_by_token(number: int) -> None:
    chosen = torch.rand(400, number, generator=torch.Generator().manual_seed(0)).topk(3).indices
    chosen[chosen == 2] = 4
    order = moe._Order(chosen, number)
    flat = chosen.flatten()
    assert order.pair.tolist() == sorted(range(1200), key=lambda p: (int(flat[p]), p))
    assert torch.equal(order.token, order.pair // 3)
    assert torch.equal(order.pair[order.place], torch.arange(1200))
    assert order.end.dtype == torch.int32
    assert torch.equal(order.end, torch.bincount(flat, minlength=number).cumsum(0).int())


def test_balanced_routing_costs_one_per_document() -> None:
    router = gate()
    scores, experts = torch.ones(E, E), torch.stack([torch.arange(E), torch.arange(E).roll(1)], 1)
    assert router.balance(scores, experts, row_of([E]))[1].item() == pytest.approx(1.0)


def test_padding_takes_no_part() -> None:
    torch.manual_seed(0)
    layer = MoE(CONFIG, 1, False, 0.5)
    assert layer.shared_experts is not None
    x = torch.randn(9, 24)
    y, record = layer(x, torch.zeros(9, dtype=torch.int64), row_of([6], padding=3))
    assert record is not None
    assert record.counts.sum() == 6 * K
    torch.testing.assert_close(y[6:], layer.shared_experts(x[6:]))
    alone, record_alone = layer(x[:6], torch.zeros(6, dtype=torch.int64), row_of([6]))
    torch.testing.assert_close(y[:6], alone)
    assert record_alone is not None
    assert torch.equal(record.counts, record_alone.counts)


def test_bias_moves_towards_the_mean_load() -> None:
    router = gate()
    update_router_biases([router], torch.tensor([[10, 0, 4, 3, 3]]), 0.25)
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.25, 0.25]
    update_router_biases([router], torch.tensor([[0, 0, 0, 0, 0]]), 0.25)
    assert router.bias.tolist() == [-0.25, 0.25, 0.0, 0.25, 0.25]


def test_biases_even_out_the_load() -> None:
    router, x, ids = gate(), torch.randn(400, 24) + 0.5, torch.zeros(400, dtype=torch.int64)
    loads = []
    for _ in range(300):
        counts = torch.bincount(router(x, ids)[1].flatten(), minlength=E)
        loads.append((counts.max() / counts.float().mean()).item())
        update_router_biases([router], counts[None], 0.01)
    assert loads[0] > 1.3
    assert loads[-1] < 1.05


def test_shared_expert_has_the_width_of_its_count() -> None:
    layer = MoE(tiny_config(moe=MoEConfig(n_shared_experts=2, moe_intermediate_size=7)), 1, False, 0.02)
    assert isinstance(layer.shared_experts, SwiGLU)
    assert layer.shared_experts.w1.weight.shape == (14, 24)
    assert MoE(tiny_config(moe=MoEConfig(n_shared_experts=0)), 1, False, 0.02).shared_experts is None
