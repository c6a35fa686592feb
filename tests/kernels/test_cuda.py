# SPDX-License-Identifier: Apache-2.0
"""The unfused backend on a GPU: the numbers of the CPU, and no step that waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ALL_VISIBLE, get_backend
from tests.kernels.cases import Case, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
unfused = get_backend("unfused")


def on_device(case: Case, device: str) -> Case:
    moved = (x.detach().clone().to(device) for x in (*case.attention, *case.index))
    return Case(case.lengths, case.layout.to(device), case.ratio, case.window, case.scale, *moved)


def step(case: Case, support: Any, recompute_lse: bool = False) -> list[Tensor]:
    out, lse, kl_sum, stats = unfused.attend_with_indexer_loss(*case.index, support, *case.attention, *case.tail)
    if recompute_lse:
        kl_sum, _ = unfused.indexer_loss(*case.index, support, *case.attention, None, *case.tail)
    grads = torch.autograd.grad(out.square().sum() + kl_sum, case.leaves())
    return [out, lse, kl_sum, stats.rows, *grads]


@pytest.mark.parametrize("dense", [False, True])
def test_equals_the_cpu(dense: bool) -> None:
    cpu = make_case([90, 3, 250], padding=5, window=16, surplus=2)
    gpu = on_device(cpu, "cuda")
    ids = unfused.select(*cpu.index, cpu.layout, 4, 8)
    device_ids = unfused.select(*gpu.index, gpu.layout, 4, 8)
    assert torch.equal(ids, device_ids.cpu())
    one = step(cpu.require_grad(), ALL_VISIBLE if dense else ids, recompute_lse=True)
    two = step(gpu.require_grad(), ALL_VISIBLE if dense else device_ids, recompute_lse=True)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dense", [False, True])
def test_a_step_never_waits_for_the_device(dense: bool) -> None:
    case = on_device(make_case([90, 3, 250], padding=5, window=16, dtype=torch.float32), "cuda").require_grad()
    ids = ALL_VISIBLE if dense else unfused.select(*case.index, case.layout, 4, 8)
    step(case, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(case, ids)
        unfused.select(*case.index, case.layout, 4, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_float32_ties_go_to_the_lower_id_on_the_device_too() -> None:
    case = on_device(make_case([400], dtype=torch.float32), "cuda")
    rounded = [(x * 1.5).round() for x in case.index]
    assert torch.equal(unfused.select(*rounded, case.layout, 4, 7).cpu(), unfused.select(*(x.cpu() for x in rounded), case.layout.to("cpu"), 4, 7))
