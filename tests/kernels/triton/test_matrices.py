# SPDX-License-Identifier: Apache-2.0
"""The passes around the iteration of the optimizer against float64, within the optimizer, and compiled ahead of time for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model.optimizers import MuonAdamW
from tests.again import Again
from tests.kernels.triton.conftest import HAS_TRITON

ROOT = Path(__file__).parents[3]
SHARED_LIMIT = 227 * 1024
SHAPES = [(5, 7), (7, 5), (1, 17), (17, 1), (70, 130), (130, 70), (24, 200), (64, 64)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 1e-2}  # the interpreter cuts off where hardware rounds to bfloat16


@pytest.fixture
def matrices(device: str) -> ModuleType:
    from kernels.triton_fused import matrices

    return matrices


def _stacks(device: str, shape: tuple[int, int], dtype: torch.dtype, seed: int, first: int = 0) -> list[Tensor]:
    """Stacks of 2, 1 and 3 matrices, `first` elements behind the beginning of memory, NaN around each."""
    generator = torch.Generator().manual_seed(seed)
    stacks = []
    for count in (2, 1, 3):
        size = count * shape[0] * shape[1]
        memory = torch.full((first + size + 8192,), float("nan"), dtype=dtype, device=device)
        memory[first : first + size] = torch.randn(size, generator=generator).to(device, dtype)
        stacks.append(memory[first : first + size].view(count, *shape))
    return stacks


def _corner(device: str, shape: tuple[int, int], dtype: torch.dtype, margin: int) -> tuple[Tensor, Tensor]:
    """A batch full of 7 of wide matrices, and the part of it that holds six of `shape`."""
    batch = torch.full((6, min(shape) + margin, max(shape) + margin), 7.0, dtype=dtype, device=device)
    corner = batch[:, : min(shape), : max(shape)]
    return batch, corner.mT if shape[0] > shape[1] else corner


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("margin", "first"), [(0, 0), (3, 1)])
def test_momentum_and_unit_norm(
    device: str, matrices: ModuleType, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], work: torch.dtype, margin: int, first: int
) -> None:
    monkeypatch.setattr(matrices, "SUMS", 4)
    grads, buffers = (_stacks(device, shape, torch.float32, seed, first) for seed in (1, 2))
    grads[2][1], buffers[2][1] = 0, 0  # an expert without tokens
    given, before = (torch.cat(stacks).double() for stacks in (grads, buffers))
    batch, out = _corner(device, shape, work, margin)
    at = [matrices.at_their_addresses(stacks) for stacks in (grads, buffers)]
    with poisoned_outputs():
        matrices.gather_momentum(*at, 0.9, out, 1e-30)
    expected = given + 0.9 * before
    torch.testing.assert_close(torch.cat(buffers).double(), 0.9 * before + given, rtol=1e-6, atol=1e-6)
    update = given + 0.9 * (0.9 * before + given)
    expected = update / update.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
    for ours, theirs in zip(out, expected, strict=True):
        assert (ours.double() - theirs).norm() <= TOLERANCE[work] * theirs.norm()
    assert torch.equal(torch.cat(grads).double(), given)
    out.fill_(7)
    assert (batch == 7).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("work", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("margin", "first"), [(0, 0), (3, 1)])
def test_decay_and_update(device: str, matrices: ModuleType, shape: tuple[int, int], work: torch.dtype, margin: int, first: int) -> None:
    params = _stacks(device, shape, torch.float32, 3, first)
    before = torch.cat(params).double()
    _, updates = _corner(device, shape, work, margin)
    updates.copy_(torch.randn(6, *shape, generator=torch.Generator().manual_seed(4)).to(device))
    rate, at = torch.tensor(0.5, device=device), matrices.at_their_addresses(params)
    matrices.decay_and_add(at, updates, rate, 0.5, 1.0)
    torch.testing.assert_close(torch.cat(params).double(), 0.75 * before - 0.5 * updates.double(), rtol=1e-6, atol=1e-6)
    kept = torch.cat(params)
    matrices.decay_and_add(at, updates, rate, 0.0, 0.0)
    matrices.decay_and_add(at, updates, rate.zero_(), 0.5, 1.0)
    assert torch.equal(torch.cat(params), kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision(device: str, matrices: ModuleType, dtype: torch.dtype) -> None:
    grads, buffers, params = (_stacks(device, (20, 36), dtype, seed) for seed in (1, 2, 3))
    update = torch.cat(grads).double() + 0.9 * (0.9 * torch.cat(buffers).double() + torch.cat(grads).double())
    before = torch.cat(params).double()
    _, out = _corner(device, (20, 36), torch.float32, 0)
    at = [matrices.at_their_addresses(stacks) for stacks in (grads, buffers, params)]
    matrices.gather_momentum(*at[:2], 0.9, out, 1e-30)
    expected = update / update.square().sum((1, 2), keepdim=True).sqrt()
    assert norm_error(out, expected) <= 1e-6
    matrices.decay_and_add(at[2], out, torch.tensor(1.0, device=device), 0.25, 5.0)
    assert norm_error(torch.cat(params), 0.75 * before - 5 * expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("n", [1, 16, 24, 64, 100, 128, 130, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_polynomial(device: str, matrices: ModuleType, n: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no product in bfloat16")
    x = torch.randn(2, n, n + 8, generator=torch.Generator().manual_seed(n)).to(device)
    x /= x.square().sum((1, 2), keepdim=True).sqrt() / 2
    memory = torch.full((2 * n * n + 65536,), float("nan"), dtype=dtype, device=device)
    gram = memory[: 2 * n * n].view(2, n, n)
    gram.copy_(x @ x.mT)
    with poisoned_outputs():
        result = matrices.matrix_polynomial(gram, 3.4445, -4.775, 2.0315)
    exact = gram.double()
    expected = 3.4445 * torch.eye(n, device=device, dtype=torch.float64) - 4.775 * exact + 2.0315 * exact @ exact
    assert result.dtype == dtype
    assert norm_error(result, expected) <= TOLERANCE[dtype]
    assert torch.equal(result, matrices.matrix_polynomial(gram, 3.4445, -4.775, 2.0315))


def test_one_matrix_may_stand_first_with_any_stride_between_matrices(device: str, matrices: ModuleType) -> None:
    """A tensor of one matrix is contiguous whatever that stride is."""
    first = torch.randn(6, 1, 8, device=device).transpose(0, 1)
    assert first.is_contiguous()
    assert first.stride(0) == 8
    grads = [first, torch.randn(2, 6, 8, device=device)]
    out = torch.empty(3, 6, 8, device=device)
    at = [matrices.at_their_addresses(stacks) for stacks in (grads, [torch.zeros_like(g) for g in grads])]
    matrices.gather_momentum(*at, 0.0, out, 1e-16)
    expected = torch.cat(grads)
    torch.testing.assert_close(out, expected / expected.norm(dim=(1, 2), keepdim=True))


@pytest.mark.parametrize("size", [1e-15, 1e-22, 1e-29])
def test_what_has_all_but_decayed_is_not_blown_up(device: str, matrices: ModuleType, size: float) -> None:
    from csa_model.muon import NORM_FLOOR

    grads, buffers = [torch.zeros(1, 8, 8, device=device)], [size * torch.randn(1, 8, 8, device=device)]
    out = torch.empty(1, 8, 8, device=device)
    matrices.gather_momentum(*(matrices.at_their_addresses(stacks) for stacks in (grads, buffers)), 0.95, out, NORM_FLOOR)
    assert out.norm() <= 1 + 1e-5


def test_nothing_to_do(device: str, matrices: ModuleType) -> None:
    nothing = matrices.at_their_addresses([torch.empty(0, 3, 5, device=device)])
    matrices.gather_momentum(nothing, nothing, 0.9, torch.empty(0, 3, 5, device=device), 1e-30)
    matrices.decay_and_add(nothing, torch.empty(0, 3, 5, device=device), torch.ones(1, device=device), 0.1, 0.1)
    assert matrices.matrix_polynomial(torch.empty(0, 3, 3, device=device), 1, 2, 3).shape == (0, 3, 3)


def test_refuses_what_does_not_fit(device: str, matrices: ModuleType) -> None:
    def stack(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros(shape, device=device, dtype=dtype)]

    for stacks in (
        [],
        [stack(2, 4, 6)[0], stack(2, 6, 4)[0]],
        [stack(2, 4, 6)[0], stack(2, 4, 6, dtype=torch.bfloat16)[0]],
        [stack(2, 6, 4)[0].mT],
        stack(4, 6),
        stack(2, 4, 6, dtype=torch.float64),
    ):
        with pytest.raises(ValueError, match=r"no stack|contiguous stacks .* of one shape"):
            matrices.at_their_addresses(stacks)
    at = matrices.at_their_addresses
    (out,) = stack(2, 4, 6)
    rate = torch.ones(1, device=device)
    for grads, buffers in ((stack(1, 4, 6), stack(2, 4, 6)), (stack(2, 4, 6), stack(2, 6, 4)), (stack(2, 4, 6), stack(2, 4, 6, dtype=torch.float16))):
        with pytest.raises(ValueError, match=r"2 matrices \[4, 6\] of one dtype"):
            matrices.gather_momentum(at(grads), at(buffers), 0.9, out, 1e-30)
    with pytest.raises(ValueError, match="rows or columns lie together"):
        matrices.decay_and_add(at(stack(2, 4, 6)), torch.zeros(2, 8, 12, device=device)[:, ::2, ::2], rate, 0.1, 0.1)
    with pytest.raises(ValueError, match=r"in torch\.float64"):
        matrices.decay_and_add(at(stack(2, 4, 6)), out.double(), rate, 0.1, 0.1)
    for wrong in (rate.double(), torch.ones(2, device=device)):
        with pytest.raises(ValueError, match="rate must be one float32"):
            matrices.decay_and_add(at(stack(2, 4, 6)), out, wrong, 0.1, 0.1)
    for (gram,) in (stack(2, 4, 6), stack(4, 4), stack(2, 4, 4, dtype=torch.float64), [stack(2, 4, 4)[0].mT]):
        with pytest.raises(ValueError, match=r"gram must be \[B, n, n\] and contiguous"):
            matrices.matrix_polynomial(gram, 1, 2, 3)


def _optimizer(device: str, fused: Any, work: torch.dtype) -> tuple[list[nn.Parameter], MuonAdamW]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 24), (24, 16), (4, 16, 24), (3, 24, 16), (32, 24), (5, 7), (2, 16, 24), (24,)]
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    groups = [
        {"name": "a", "algorithm": "muon", "params": params[:5], "matrices": [1, 1, 1, 1, 2], "lr": 0.1, "weight_decay": 0.1},
        {"name": "b", "algorithm": "muon", "params": params[5:7], "lr": 0.3, "momentum": 0.0},
        {"name": "c", "algorithm": "adamw", "params": params[7:], "lr": 0.1},
    ]
    return params, MuonAdamW(groups, newton_schulz_dtype=work, fused=fused)


@pytest.mark.parametrize(("work", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("limit", [0, 10**6])
def test_an_optimizer_with_them_makes_the_same_steps(
    device: str, matrices: ModuleType, monkeypatch: pytest.MonkeyPatch, work: torch.dtype, tolerance: float, limit: int
) -> None:
    from csa_model import muon
    from kernels.triton_fused.row_operations import TritonRowOperations

    monkeypatch.setattr(muon, "padded_elements", lambda device: limit)
    no_product = work == torch.bfloat16 and device == "cpu"  # the interpreter has none
    monkeypatch.setattr(muon, "FUSED_ELEMENTS", 0 if no_product or limit else 2**22)
    results = []
    for fused, again in ((None, False), (TritonRowOperations(), False), (TritonRowOperations(), True)):
        params, optimizer = _optimizer(device, fused, work)
        if again:
            optimizer.repeat = repeat = Again()
        start, places = [p.detach().clone() for p in params], [torch.empty_like(p) for p in params]
        for step in range(4):
            generator = torch.Generator().manual_seed(10 + step)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            for p, place in zip(params, places, strict=True):
                p.grad = place.copy_(torch.randn(p.shape, generator=generator))
            params[0].grad = params[0].grad.mT.contiguous().mT
            params[2].grad[1] = 0
            if step == 1:
                params[3].grad = None
            given = [None if p.grad is None else p.grad.clone() for p in params]
            optimizer.step()
            assert all(p.grad is g or torch.equal(p.grad, g) for p, g in zip(params, given, strict=True))
        moved = [p.detach() - before for p, before in zip(params, start, strict=True)]
        results.append(moved + [optimizer.state[p]["momentum_buffer"] for p in params[:7]])
    for plain, ours, repeated in zip(*results, strict=True):
        assert norm_error(ours, plain) <= tolerance
        assert torch.equal(ours, repeated)
    assert len(repeat.made) == (0 if work == torch.float16 else 4)


@pytest.mark.parametrize("change", [{"matrices": [1, 1, 1, 1, 1]}, {"momentum": 0.5}])
def test_other_blocks_or_another_momentum_are_prepared_anew(device: str, matrices: ModuleType, change: dict[str, Any]) -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    params, optimizer = _optimizer(device, TritonRowOperations(), torch.float32)
    optimizer.repeat = again = Again()
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    known = len(again.made)
    optimizer.param_groups[0].update(change)
    optimizer.step()
    assert len(again.made) == known + 1


def test_a_matrix_of_float64_takes_the_plain_form(device: str, matrices: ModuleType) -> None:
    from kernels.triton_fused.row_operations import TritonRowOperations

    results = []
    for fused in (None, TritonRowOperations()):
        p = nn.Parameter(torch.arange(24.0, dtype=torch.float64, device=device).view(4, 6))
        p.grad = p.detach().cos()
        MuonAdamW([{"name": "m", "algorithm": "muon", "params": [p]}], newton_schulz_dtype=torch.float32, fused=fused).step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_ahead_of_time_nothing_spills_and_every_access_has_16_bytes() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_matrices"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    polynomials = [r for r in compiled if r["kernel"] == "polynomial_kernel"]
    compiled = [r for r in compiled if r["kernel"] != "polynomial_kernel"]
    assert Counter(r["kernel"] for r in compiled) == dict.fromkeys(("momentum_kernel", "divide_kernel", "decay_and_add_kernel"), 8)
    assert len(polynomials) == 10
    for r in polynomials:
        assert r["stack"] == 0, r
        assert r["registers"] <= 128, r  # of at most 256 threads: two programs a multiprocessor
        assert r["shared"] <= SHARED_LIMIT // 2, r
        if "bfloat16" in r["work"]:
            assert r["HGMMA" if r["n"] > 32 else "HMMA"] > 0, r
            assert r["WARPGROUP"] <= r["HGMMA"], r  # a wait around every product would serialise them
    elements = 64 * 64 // 128  # of a thread
    for r in compiled:
        assert r["stack"] == 0, r
        batch = elements // (8 if "bfloat16" in r["work"] else 4)
        loads = {"momentum_kernel": 2 * elements // 4, "divide_kernel": batch, "decay_and_add_kernel": elements // 4 + batch}
        stores = {"momentum_kernel": elements // 4 + batch, "divide_kernel": batch, "decay_and_add_kernel": elements // 4}
        assert r["wide"] == loads[r["kernel"]], r
        assert r["wide stores"] == stores[r["kernel"]], r
        assert r["stores"] == stores[r["kernel"]] + (r["kernel"] == "momentum_kernel"), r  # and the sum of squares
