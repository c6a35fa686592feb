# SPDX-License-Identifier: Apache-2.0
"""Teacher in log space, KL and its gradients, sparse and dense, and the training form that gets the teacher from the attention backward."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.csa_gate_cases import Inputs, random_inputs
from benchmarks.csa_gate_checks import GRADIENTS, norm_error, poisoned_outputs, reference_once, train_once
from kernels import ALL_VISIBLE, get_backend
from kernels.unfused import teacher_distribution


def layer(device: str, lengths: tuple[int, ...] = (22, 0, 1, 6), heads: int = 3, dim: int = 16, indexer: tuple[int, int] = (2, 16)) -> Inputs:
    """A small layer with holes and an empty row in its selection, top-5 of at most 6 entries."""
    x = random_inputs(list(lengths), sum(lengths) + 2, heads, dim, indexer, 5, 6, 4, torch.float32, device, 0)
    ids = get_backend("unfused").select(x.index_q, x.index_k, x.index_w, x.layout, 4, 5)
    ids = ids[:, [3, 0, 4, 1, 2]].contiguous()
    ids[10] = -1
    ids[20 % len(ids), 1] = x.compressed_kv.shape[0] + 3
    x.selected = ids
    return x


def exact_teacher(x: Inputs, teacher: str) -> tuple[Tensor, Tensor]:
    """The float64 teacher [T, K] over `selected` and the lse of the attention, from logits alone."""
    assert isinstance(x.selected, Tensor)
    first, visible = x.layout.entry_start(4)[:, None], x.layout.visible_compressed(4)[:, None]
    valid = (x.selected >= first) & (x.selected < first + visible)
    keys = x.compressed_kv[x.selected.clamp(0, x.compressed_kv.shape[0] - 1).long()].double()
    logits = torch.einsum("thd,tkd->thk", x.q.double(), keys) * x.scale
    window = x.layout.window_ids(x.window)
    window_logits = torch.einsum("thd,twd->thw", x.q.double(), x.window_kv[window.clamp(min=0).long()].double()) * x.scale
    window_lse = torch.logsumexp(window_logits.masked_fill((window < 0)[:, None], -math.inf), -1)
    lse = torch.logaddexp(window_lse, torch.logsumexp(logits.masked_fill(~valid[:, None], -math.inf), -1))
    return teacher_distribution(logits, torch.logaddexp(window_lse, x.sink.double()), valid, teacher), lse


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
@pytest.mark.parametrize("sinks", ["normal", "+200", "mixed", "all +inf"])
def test_teacher_is_a_distribution_however_little_mass_is_left(device: str, teacher: str, sinks: str) -> None:
    from kernels.triton_fused.teacher import sparse_teacher

    x = layer(device, lengths=(22, 6))
    if sinks == "+200":
        x.sink = x.sink + 200
    elif sinks == "mixed":
        x.sink = torch.tensor([math.inf, -math.inf, 200.0], device=device)
    elif sinks == "all +inf":
        x.sink = torch.full_like(x.sink, math.inf)
    exact, lse = exact_teacher(x, teacher)
    known = lse.float() if teacher == "full_csa" else None
    with poisoned_outputs():
        got = sparse_teacher(x.q, x.compressed_kv, x.selected, x.sink, known, x.layout.entry_start(4), x.layout.visible_compressed(4), x.scale)
    assert (got.double() - exact).abs().max() < 1e-5


def test_only_rows_that_underflowed_are_done_again(device: str) -> None:
    from kernels.triton_fused.teacher import UNDERFLOW, sparse_teacher

    x = layer(device, lengths=(22, 6))
    exact, lse = exact_teacher(x, "full_csa")
    emitted = (exact * 3).float()
    emitted[15:] *= 1e-45  # all of it lost
    emitted[14] *= UNDERFLOW / 4
    before = emitted.clone()
    bounds = (x.layout.entry_start(4), x.layout.visible_compressed(4))
    got = sparse_teacher(x.q, x.compressed_kv, x.selected, x.sink, lse.float(), *bounds, x.scale, emitted=emitted)
    assert got is emitted
    assert torch.equal(got[:14], before[:14])
    assert (got[14:].double() - exact[14:]).abs().max() < 1e-5


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
@pytest.mark.parametrize("support", ["sparse", "dense"])
def test_loss_and_gradients_are_those_of_float64(device: str, teacher: str, support: str) -> None:
    x = layer(device, heads=5, dim=24, indexer=(20, 24))
    ids = ALL_VISIBLE if support == "dense" else x.selected
    results = []
    for name, dtype in (("triton", torch.float32), ("unfused", torch.float64)):
        p = x.as_dtype(dtype)
        operands = (p["q"], p["window_kv"], p["compressed_kv"], p["sink"], None, x.layout, 4, x.window, x.scale)
        kl_sum, rows = get_backend(name).indexer_loss(p["index_q"], p["index_k"], p["index_w"], ids, *operands, teacher)
        (0.3 * kl_sum).backward()
        assert all(p[n].grad is None for n in ("q", "window_kv", "compressed_kv", "sink"))
        results.append([kl_sum.detach(), rows] + [p[n].grad for n in ("index_q", "index_k", "index_w")])
    for got, exact in zip(*results):
        assert norm_error(got, exact) < 3e-6
    # the last entry of index_k beyond the layout does not exist; each row's gradient of the scores sums to 0
    assert results[0][0] > 0


@pytest.mark.parametrize(("support", "exponent"), [("sparse", 0), ("dense", 12)])
def test_small_weight_of_the_loss_costs_no_digits(device: str, support: str, exponent: int) -> None:
    """fp16 ends at 6e-8: the weight must neither be part of an operand of a product nor be rounded itself."""
    x = layer(device, lengths=(20,))
    ids = ALL_VISIBLE if support == "dense" else x.selected
    indexer = [x.index_q * 16, x.index_k * 16, x.index_w * 2.0 ** (exponent - 8)]
    leaves = [t.half().requires_grad_() for t in indexer[:2]] + [indexer[2].requires_grad_()]
    operands = (ids, x.q, x.window_kv, x.compressed_kv, x.sink, None, x.layout, 4, x.window, x.scale)
    kl_sum, _ = get_backend("triton").indexer_loss(*leaves, *operands)
    whole = torch.autograd.grad(kl_sum, leaves, retain_graph=True)
    weight = 2.0 ** (-14 - exponent) / 3
    small = torch.autograd.grad(weight * kl_sum, leaves)
    for got, unit in zip(small, whole):
        expected = weight * unit.double()
        assert expected.abs().max() > 5e-7
        assert torch.allclose(got.double(), expected, rtol=2e-3, atol=6e-8 if got.dtype == torch.half else 0)


def test_integer_sums_give_the_same_gradient(device: str) -> None:
    from kernels.triton_fused.indexer_sparse import sparse_loss

    x = layer(device)
    exact, _ = exact_teacher(x, "full_csa")
    arguments = (x.index_q, x.index_k, x.index_w, x.selected, exact.float(), x.layout.entry_start(4), x.layout.visible_compressed(4))
    grad = torch.tensor(1e-3, device=device)
    plain, integer = (sparse_loss(*arguments, grad, deterministic)[1] for deterministic in (False, True))
    assert norm_error(integer.index_k, plain.index_k) < 1e-6
    assert torch.equal(integer.index_q, plain.index_q)
    x.index_q[:3] = torch.nan  # rows that see no entry
    assert torch.equal(sparse_loss(*arguments, grad, True)[1].index_k, integer.index_k)
    x.index_q[8] = torch.nan  # a row that does
    assert sparse_loss(*arguments, grad, True)[1].index_k.isnan().any()


@pytest.mark.parametrize("dim", [24, 32])
def test_chunks_of_the_head_dim_give_the_same_gradient(device: str, dim: int) -> None:
    from kernels.triton_fused.indexer_sparse import LossTiling, sparse_loss

    g = torch.Generator().manual_seed(dim)
    rows, entries, slots = 9, 50, 40
    q, k, w = (torch.randn(*shape, generator=g).to(device) for shape in ((rows, 5, dim), (entries, dim), (rows, 5)))
    visible = torch.randint(1, entries + 1, (rows,), generator=g, dtype=torch.int32)
    support = torch.stack([torch.randperm(entries, generator=g)[:slots] for _ in range(rows)]).int()
    support = torch.where(support < visible[:, None], support, -1)
    teacher = torch.rand(rows, slots, generator=g).to(device)
    bounds = (torch.zeros_like(visible).to(device), visible.to(device))
    arguments = (q, k, w, support.to(device), teacher, *bounds, torch.tensor(0.5, device=device))
    kl, plain = sparse_loss(*arguments, tiling=LossTiling(16, 16, 4, 1))
    for tiling in (LossTiling(16, 32, 4, 1, chunk=16), LossTiling(16, 16, 4, 1, chunk=16, registers=168)):
        value, got = sparse_loss(*arguments, tiling=tiling)
        assert norm_error(value, kl) < 1e-6
        for name in ("index_q", "index_k", "index_w"):
            assert norm_error(getattr(got, name), getattr(plain, name)) < 2e-6, (tiling, name)


@pytest.mark.parametrize("sinks", [0.0, 200.0])
def test_training_form_is_the_float64_step(device: str, sinks: float) -> None:
    x = layer(device)
    x.sink = x.sink * (sinks == 0) + sinks  # at 200 every emitted sum underflows
    exact = reference_once(x, "full_csa")
    with poisoned_outputs():
        got = train_once(get_backend("triton"), x, x.leaves(), "full_csa")
    for name in ("out", "kl", "rows", *("d_" + n for n in GRADIENTS)):
        # next to a sink of 200 the attention itself is below the range of fp32; the indexer learns all the same
        lost = sinks and not name.startswith(("kl", "rows", "d_index"))
        assert (not got[name].any()) if lost else norm_error(got[name], exact[name]) < 5e-6, name
    assert torch.equal(got["lse"].isfinite(), exact["lse"].isfinite())


def test_training_form_shows_the_loss_after_the_backward(device: str) -> None:
    x = layer(device, lengths=(14,))
    p = x.leaves()
    operands = (x.selected, p["q"], p["window_kv"], p["compressed_kv"], p["sink"], x.layout, 4, x.window, x.scale)
    indexer = (p["index_q"], p["index_k"], p["index_w"])
    backend = get_backend("triton")
    out, lse, kl_sum, stats = backend.attend_with_indexer_loss(*indexer, *operands)
    assert kl_sum.item() == 0
    assert kl_sum.requires_grad
    assert not lse.requires_grad
    (out.sum() + 0 * kl_sum).backward()
    assert all(t.grad is not None and not t.grad.any() for t in indexer)  # coefficient 0: zero, not None
    with torch.no_grad():
        plain = backend.attend_with_indexer_loss(*indexer, *operands)
    assert torch.allclose(stats.kl_sum, plain[2], rtol=1e-5)
    assert plain[2].item() == plain[3].kl_sum.item() > 0
    assert int(stats.rows) == int(plain[3].rows) == 11  # 14 tokens, of which 3 see no entry


@pytest.mark.parametrize("counted", [False, True])
def test_loss_is_shown_under_checkpointing_and_by_a_second_backward(device: str, counted: bool) -> None:
    x = layer(device, lengths=(14,))
    p = x.leaves()
    operands = (x.selected, p["q"], p["window_kv"], p["compressed_kv"], p["sink"], x.layout, 4, x.window, x.scale)
    indexer = (p["index_q"], p["index_k"], p["index_w"])
    backend = get_backend("triton")
    kept = []

    def block() -> tuple[Tensor, Tensor]:
        out, _, kl_sum, stats = backend.attend_with_indexer_loss(*indexer, *operands)
        kept.append(stats)
        return out, kl_sum

    # a FLOP counter sends the call through the operator, everything else directly
    with FlopCounterMode(display=False) if counted else contextlib.nullcontext():
        out, kl_sum = checkpoint(block, use_reentrant=False)
        (out.sum() + kl_sum).backward(retain_graph=True)
    expected = backend.indexer_loss(*(t.detach() for t in indexer), *operands[:5], None, *operands[5:])[0]
    assert torch.allclose(kept[0].kl_sum, expected, rtol=1e-5)
    first = [t.grad.clone() for t in indexer]
    if not counted:
        kl_sum.backward()
        assert torch.allclose(kept[0].kl_sum, expected, rtol=1e-5)
        assert all(torch.allclose(t.grad, 2 * g, rtol=1e-5, atol=1e-7) for t, g in zip(indexer, first))


def test_language_loss_reaches_no_indexer_parameter(device: str) -> None:
    x = layer(device, lengths=(14,))
    p = x.leaves()
    operands = (x.selected, p["q"], p["window_kv"], p["compressed_kv"], p["sink"], x.layout, 4, x.window, x.scale)
    out, _, _, _ = get_backend("triton").attend_with_indexer_loss(p["index_q"], p["index_k"], p["index_w"], *operands)
    out.square().sum().backward()
    for name in ("index_q", "index_k", "index_w"):
        assert p[name].grad is None or not p[name].grad.any()
    assert p["q"].grad.any()


def test_layer_without_entries_trains(device: str) -> None:
    x = random_inputs([3, 2], 6, 2, 16, (2, 16), 4, 3, 4, torch.float32, device, 1)
    assert x.compressed_kv.shape[0] == 0
    for x.selected in (torch.full((6, 4), -1, dtype=torch.int32, device=device), ALL_VISIBLE):
        got, exact = train_once(get_backend("triton"), x, x.leaves(), "full_csa"), reference_once(x, "full_csa")
        assert got["kl"] == 0
        assert int(got["rows"]) == 0
        assert norm_error(got["d_q"], exact["d_q"]) < 3e-6


def test_kept_scores_serve_only_the_tensors_they_are_of(device: str) -> None:
    x = layer(device, lengths=(20,))
    backend = get_backend("triton")
    p = x.leaves()
    operands = (p["q"], p["window_kv"], p["compressed_kv"], p["sink"], None, x.layout, 4, x.window, x.scale)
    indexer = (p["index_q"], p["index_k"], p["index_w"])
    ids = backend.select(*indexer, x.layout, 4, 3)
    kept, _ = backend.indexer_loss(*indexer, ids, *operands)
    again, _ = backend.indexer_loss(*indexer, ids.clone(), *operands)
    assert torch.allclose(kept, again, rtol=1e-5)
    with torch.no_grad():
        p["index_k"] *= 2
    changed, _ = backend.indexer_loss(*indexer, ids, *operands)
    expected, _ = backend.indexer_loss(*indexer, ids.clone(), *operands)
    assert torch.allclose(changed, expected, rtol=1e-5)
    assert not torch.allclose(changed, kept, rtol=1e-2)


def test_kept_scores_do_not_pass_to_tensors_in_the_same_memory(device: str) -> None:
    x = layer(device, lengths=(20,))
    backend = get_backend("triton")
    p = x.leaves()
    operands = (p["q"], p["window_kv"], p["compressed_kv"], p["sink"], None, x.layout, 4, x.window, x.scale)
    kept = 2 * p["index_q"]
    address = kept.data_ptr()
    ids = backend.select(kept, p["index_k"], p["index_w"], x.layout, 4, 3)
    del kept
    others = [-3 * p["index_q"] for _ in range(20)]  # an allocator hands memory that was given back out first
    other = next((t for t in others if t.data_ptr() == address), others[0])
    got, _ = backend.indexer_loss(other, p["index_k"], p["index_w"], ids, *operands)
    expected, _ = backend.indexer_loss(other, p["index_k"], p["index_w"], ids.clone(), *operands)
    assert torch.allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
def test_evaluation_under_inference_mode_is_that_under_no_grad(device: str, teacher: str) -> None:
    x = layer(device, lengths=(20,))
    backend = get_backend("triton")
    operands = (x.q, x.window_kv, x.compressed_kv, x.sink, x.layout, 4, x.window, x.scale, teacher)
    results = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            indexer = tuple(1 * t for t in (x.index_q, x.index_k, x.index_w))
            ids = backend.select(*indexer, x.layout, 4, 3)
            out, lse, kl_sum, stats = backend.attend_with_indexer_loss(*indexer, ids, *operands)
            results.append((ids, out, lse, kl_sum, stats.rows))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
