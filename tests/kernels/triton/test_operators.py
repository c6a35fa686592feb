# SPDX-License-Identifier: Apache-2.0
"""The kernels as operators of PyTorch: opcheck, torch.compile in one graph, FLOPs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.csa_gate_cases import Inputs, random_inputs
from benchmarks.csa_gate_checks import GRADIENTS, norm_error
from kernels import ALL_VISIBLE, get_backend


@pytest.fixture
def x(device: str) -> Inputs:
    return random_inputs([13, 1], 14, 2, 16, (2, 16), 2, 4, 4, torch.float32, device, 0)


def test_opcheck_accepts_every_operator(x: Inputs) -> None:
    # with test_aot_dispatch_dynamic only on a GPU (the gate): the interpreter would need minutes
    from benchmarks.csa_gate_extremes import operator_failures

    assert operator_failures(x, get_backend("triton"), ("test_schema", "test_autograd_registration", "test_faketensor")) == []


@pytest.mark.parametrize("dense", [False, True])
def test_step_compiles_into_one_graph(x: Inputs, dense: bool) -> None:
    backend = get_backend("triton")

    def step(p: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        indexer = (p["index_q"], p["index_k"], p["index_w"])
        ids = ALL_VISIBLE if dense else backend.select(*indexer, x.layout, 4, 2)
        operands = (p["q"], p["window_kv"], p["compressed_kv"], p["sink"], x.layout, 4, x.window, x.scale)
        out, lse, kl_sum, stats = backend.attend_with_indexer_loss(*indexer, ids, *operands)
        return out * 2, lse, kl_sum, stats.kl_sum

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        p = x.leaves()
        out, lse, kl_sum, value = function(p)
        ((out * x.grad_out).sum() + 0.5 * kl_sum).backward()
        results.append({"out": out.detach(), "lse": lse, "value": value.detach()} | {n: p[n].grad for n in GRADIENTS})
    assert results[0]["value"] > 0
    for name, eager in results[0].items():
        assert norm_error(results[1][name], eager) < 1e-6, name


def test_flops_count_two_products_forward_and_five_backward(x: Inputs) -> None:
    backend = get_backend("triton")
    p = x.leaves()
    with FlopCounterMode(display=False) as counter:
        ids = backend.select(p["index_q"], p["index_k"], p["index_w"], x.layout, 4, 2)
        operands = (p["q"], p["window_kv"], p["compressed_kv"], p["sink"], x.layout, 4, x.window, x.scale)
        out, _, kl_sum, _ = backend.attend_with_indexer_loss(p["index_q"], p["index_k"], p["index_w"], ids, *operands)
    tokens, heads, dim = x.q.shape
    keys = x.window + 2
    scores = 2 * tokens * 2 * 16 * x.index_k.shape[0] / 2
    assert counter.get_total_flops() == scores + 2 * 2 * tokens * heads * dim * keys
    with FlopCounterMode(display=False) as counter:
        (out.sum() + kl_sum).backward()
    assert counter.get_total_flops() == 5 * 2 * tokens * heads * dim * keys + 3 * 2 * tokens * 2 * 16 * 2


def test_the_device_is_switched_only_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton_fused.ops import on_device_of

    class OnDevice:
        is_cuda, device = True, torch.device("cuda", 1)

        def get_device(self) -> int:
            return 1

    switched: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: switched.append(device) or contextlib.nullcontext())
    for current, expected in ((1, []), (0, [torch.device("cuda", 1)])):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        switched.clear()
        with on_device_of(OnDevice()):  # type: ignore[arg-type]
            pass
        assert switched == expected
    with on_device_of(torch.zeros(1)):
        pass
