# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ALL_VISIBLE, BackendUnsupported, PackedLayout, get_backend
from kernels.unfused import indexer_kl, teacher_distribution
from tests.kernels.cases import TOLERANCE, Case, chunk_elements, make_case
from tests.kernels.oracle import oracle_layer
from tests.kernels.test_attend import chosen

unfused = get_backend("unfused")
LN3 = math.log(3)


def loss(case: Case, support: Any, teacher: str = "full_csa", lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return unfused.indexer_loss(*case.index, support, *case.attention, lse, *case.tail, teacher=teacher)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    padding=st.integers(1, 3),
    ratio=st.integers(1, 6),
    window=st.sampled_from([0, 1, 5, 17]),
    topk=st.integers(0, 9),
    kind=st.sampled_from(["ids", "all"]),
    teacher=st.sampled_from(["full_csa", "compressed_only"]),
    give_lse=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    chunk=st.sampled_from([1, 500, 1 << 21]),
    sinks=st.lists(st.sampled_from([0.0, -1.5, 3.0, 200.0, -1e4, math.inf, -math.inf]), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle_forward_and_backward(
    lengths: list[int],
    padding: int,
    ratio: int,
    window: int,
    topk: int,
    kind: str,
    teacher: str,
    give_lse: bool,
    dtype: torch.dtype,
    chunk: int,
    sinks: list[float],
    seed: int,
) -> None:
    case = make_case(lengths, padding=padding, ratio=ratio, window=window, surplus=2, dtype=dtype, seed=seed)
    case.sink.copy_(torch.tensor([min(s, 200.0) for s in sinks]))
    case.require_grad()
    support = chosen(case, kind, topk, seed)
    with chunk_elements(chunk):
        lse = unfused.attend(*case.attention[:3], support, case.sink, *case.tail)[1] if give_lse else None
        kl_sum, rows = loss(case, support, teacher, lse)
        (2.5 * kl_sum).backward()
    reference = oracle_layer(*case.attention[:3], support, case.sink, lengths, ratio, window, case.scale, case.index, teacher)
    assert (kl_sum.dtype, rows.dtype, int(rows)) == (dtype, torch.int64, reference.rows)
    tolerance = TOLERANCE[dtype] * (1 if dtype == torch.float64 else 20)
    torch.testing.assert_close(kl_sum.double(), reference.kl.sum(), rtol=tolerance, atol=tolerance)
    assert all(x.grad is None for x in case.attention)
    mine = [x.grad for x in case.index]
    wanted = torch.autograd.grad(2.5 * reference.kl.sum(), case.index) if reference.kl.requires_grad else [torch.zeros_like(x) for x in case.index]
    for got, oracle in zip(mine, wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), oracle.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["ids", "all"])
@pytest.mark.parametrize("window", [0, 5])
def test_a_given_lse_stands_for_the_recomputed_one(kind: str, window: int) -> None:
    case = make_case([30, 9], padding=2, window=window)
    case.sink.copy_(torch.tensor([3.0, -1.0, math.inf]))
    support = chosen(case, kind, 5)
    lse = unfused.attend(*case.attention[:3], support, case.sink, *case.tail)[1]
    recomputed = loss(case, support)[0]
    torch.testing.assert_close(loss(case, support, lse=lse)[0], recomputed, rtol=0, atol=1e-11)
    # and it is really the given one that counts
    assert abs(loss(case, support, lse=lse + torch.tensor([5.0, 0.0, 0.0]))[0] - recomputed) > 1e-3
    assert torch.equal(loss(case, support, "compressed_only", lse + 5)[0], loss(case, support, "compressed_only")[0])


@pytest.mark.parametrize("kind", ["ids", "all"])
@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
def test_gradcheck(kind: str, teacher: str) -> None:
    case = make_case([6, 1, 9], padding=1, ratio=2, surplus=1, index_dim=3).require_grad()
    support = chosen(case, kind, 4)
    if isinstance(support, Tensor):
        support[12:14] = -1

    def function(*index: Tensor) -> Tensor:
        return unfused.indexer_loss(*index, support, *case.attention, None, *case.tail, teacher=teacher)[0]  # type: ignore[arg-type]

    with chunk_elements(250):
        assert torch.autograd.gradcheck(function, case.index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("support", [ALL_VISIBLE, torch.tensor([[-1, -1], [1, 0]], dtype=torch.int32)])
def test_worked_example_through_the_whole_loss(dtype: torch.dtype, support: Any) -> None:
    """One row, two heads, compressed logits (ln 3, 0) and (0, ln 3): 1/2, 1/2 under compressed_only; sink ln 4 on head 0 gives 5/12, 7/12."""
    layout = PackedLayout.from_lengths([2])
    q = torch.tensor([[[0.0, 0.0]] * 2, [[LN3, 0.0], [0.0, LN3]]], dtype=dtype)
    keys = torch.eye(2, dtype=dtype)
    sink = torch.tensor([math.log(4), -math.inf], dtype=dtype)
    # one index head whose key 0 scores 1 and key 1 scores 0 for the query of row 1; row 0 sees entry 0 alone
    index_q = torch.tensor([[[0.0]], [[1.0]]], dtype=dtype)
    index_k, index_w = torch.tensor([[1.0], [0.0]], dtype=dtype), torch.ones(2, 1, dtype=dtype)
    student = torch.softmax(torch.tensor([1.0, 0.0], dtype=dtype), 0)
    for teacher, target in (("full_csa", (5 / 12, 7 / 12)), ("compressed_only", (0.5, 0.5))):
        index_w = index_w.detach().requires_grad_()
        kl, rows = unfused.indexer_loss(index_q, index_k, index_w, support, q, torch.zeros_like(keys), keys, sink, None, layout, 1, 0, 1.0, teacher)  # type: ignore[arg-type]
        wanted = sum(t * (math.log(t) - math.log(s)) for t, s in zip(target, student.tolist(), strict=True))
        assert kl.item() == pytest.approx(wanted, abs=1e-6)
        assert int(rows) == 2
        kl.backward()
        assert index_w.grad is not None
        assert index_w.grad[1, 0].item() == pytest.approx(student[0].item() - target[0], abs=1e-6)


def test_sinks_of_two_hundred_leave_gradient_rows_that_sum_to_zero_in_float32() -> None:
    # identity index keys and unit queries: d kl / d index_q is the gradient of each score
    layout, entries = PackedLayout.from_lengths([32]), 8
    case = make_case([32], dtype=torch.float32)
    case.sink.fill_(200.0)
    index_q = torch.ones(32, 1, entries, requires_grad=True)
    kl, _ = unfused.indexer_loss(index_q, torch.eye(entries), torch.ones(32, 1), ALL_VISIBLE, *case.attention, None, layout, *case.tail[1:])
    kl.backward()
    assert index_q.grad is not None
    grad = index_q.grad[:, 0]
    assert torch.isfinite(kl)
    torch.testing.assert_close(grad.sum(-1), torch.zeros(32), rtol=0, atol=1e-6)
    full = oracle_layer(*case.attention[:3], ALL_VISIBLE, case.sink, [32], 4, case.window, case.scale)
    torch.testing.assert_close(full.teacher.sum(-1)[3:], torch.ones(29, dtype=torch.float64))
    for row in range(3, 32):
        seen = (row + 1) // 4
        torch.testing.assert_close(grad[row, :seen].double(), 1 / seen - full.teacher[row, :seen], rtol=0, atol=1e-5)


def test_one_head_or_nothing_outside_the_support_makes_the_teachers_equal() -> None:
    one = make_case([30], heads=1).require_grad()
    bare = make_case([30], heads=3, window=0).require_grad()
    bare.sink.data.fill_(-math.inf)
    for case in (one, bare):
        torch.testing.assert_close(loss(case, ALL_VISIBLE)[0], loss(case, ALL_VISIBLE, "compressed_only")[0], rtol=0, atol=1e-11)
    several = make_case([30], heads=3)
    assert abs(loss(several, ALL_VISIBLE)[0] - loss(several, ALL_VISIBLE, "compressed_only")[0]) > 1e-3


def test_the_kl_moves_when_only_the_window_does() -> None:
    """A constant on the window logits alone changes full_csa and leaves compressed_only alone."""
    case = make_case([30], heads=3)
    before = [loss(case, ALL_VISIBLE, teacher)[0] for teacher in ("full_csa", "compressed_only")]
    case.window_kv += 0.7
    after = [loss(case, ALL_VISIBLE, teacher)[0] for teacher in ("full_csa", "compressed_only")]
    assert abs(after[0] - before[0]) > 1e-3
    assert torch.equal(after[1], before[1])


def test_an_unused_slot_never_reaches_the_last_key() -> None:
    """12 tokens, ratio 4, topk 8: entry 2 gets gradient from query 11 alone."""
    case = make_case([12]).require_grad()
    ids = unfused.select(*case.index, case.layout, 4, 8)
    early = ids.clone()
    early[11] = -1
    (grad,) = torch.autograd.grad(loss(case, early)[0], case.index_k)
    assert (grad[2] == 0).all()
    assert (torch.autograd.grad(loss(case, ids)[0], case.index_k)[0][2] != 0).any()


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("support", [ALL_VISIBLE, "ids"])
def test_without_any_entry_the_loss_is_zero_and_differentiable(length: int, support: Any) -> None:
    """3 tokens have no entry, KL 0; the graph is there all the same."""
    case = make_case([length]).require_grad()
    ids = torch.full((length, 2), -1, dtype=torch.int32) if support == "ids" else support
    kl, rows = loss(case, ids)
    assert kl.grad_fn is not None
    assert (kl.item(), rows.item()) == (0, 0)
    kl.backward()
    assert all(x.grad is not None and (x.grad == 0).all() for x in case.index)


def test_rows_count_visible_entries_whatever_the_support_holds() -> None:
    """No row with a target gives 0, not 0 / 0."""
    case = make_case([12, 3, 5], padding=4).require_grad()
    for support in (torch.full((24, 3), -1, dtype=torch.int32), torch.zeros(24, 0, dtype=torch.int32), ALL_VISIBLE):
        assert int(loss(case, support)[1]) == 9 + 0 + 2
    kl, _ = loss(case, torch.full((24, 3), -1, dtype=torch.int32))
    assert kl.item() == 0
    kl.backward()
    assert all((x.grad == 0).all() for x in case.index)


def test_coefficient_zero_gives_zero_gradients_not_none() -> None:
    case = make_case([20]).require_grad()
    (0.0 * loss(case, ALL_VISIBLE)[0]).backward()
    assert all(x.grad is not None and (x.grad == 0).all() for x in case.index)
    assert all(x.grad is None for x in case.attention)


def test_the_public_teacher_and_kl_compose_to_the_same_loss() -> None:
    case = make_case([23], window=3)
    ids = unfused.select(*case.index, case.layout, 4, 3)
    keys = case.compressed_kv[ids.clamp(min=0).long()]
    logits = torch.einsum("thd,tkd->thk", case.q, keys) * case.scale
    _, window_lse = unfused.attend(*case.attention[:2], None, None, case.sink, *case.tail)
    teacher = teacher_distribution(logits, torch.logaddexp(window_lse, case.sink), ids >= 0)
    index_keys = case.index_k[ids.clamp(min=0).long()]
    scores = (torch.einsum("thd,tkd->thk", case.index_q, index_keys).relu() * case.index_w[..., None]).sum(1)
    torch.testing.assert_close(indexer_kl(scores, teacher, ids >= 0).sum(), loss(case, ids)[0], rtol=0, atol=1e-11)


def test_warm_up_and_sparse_stage_meet_when_everything_is_selected() -> None:
    """The KL is continuous across the stage switch when top-k covers all visible entries."""
    case = make_case([30, 9], padding=2).require_grad()
    ids = unfused.select(*case.index, case.layout, 4, 50)
    torch.testing.assert_close(loss(case, ids)[0], loss(case, ALL_VISIBLE)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
def test_the_joint_call_equals_the_pair(teacher: str) -> None:
    case = make_case([30, 9], padding=2).require_grad()
    ids = unfused.select(*case.index, case.layout, 4, 3)
    out, lse, kl_sum, stats = unfused.attend_with_indexer_loss(*case.index, ids, *case.attention, *case.tail, teacher=teacher)  # type: ignore[arg-type]
    wanted_out, wanted_lse = unfused.attend(*case.attention[:3], ids, case.sink, *case.tail)
    wanted_kl, wanted_rows = loss(case, ids, teacher, wanted_lse)
    assert torch.equal(out, wanted_out)
    assert torch.equal(lse, wanted_lse)
    (out.sum() + 3 * kl_sum).backward()
    assert not stats.kl_sum.requires_grad
    torch.testing.assert_close(stats.kl_sum, wanted_kl.detach())
    assert torch.equal(stats.rows, wanted_rows)
    got = [x.grad for x in case.leaves()]
    case.require_grad()
    (wanted_out.sum() + 3 * wanted_kl).backward()
    for a, b in zip(got, [x.grad for x in case.leaves()], strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_the_attention_reaches_no_indexer_tensor_and_the_loss_nothing_else() -> None:
    case = make_case([30]).require_grad()
    ids = unfused.select(*case.index, case.layout, 4, 3)
    out, _, kl_sum, _ = unfused.attend_with_indexer_loss(*case.index, ids, *case.attention, *case.tail)
    assert all(g is None or (g == 0).all() for g in torch.autograd.grad(out.sum(), case.index, allow_unused=True, retain_graph=True))
    assert all(g is None or (g == 0).all() for g in torch.autograd.grad(kl_sum, case.attention, allow_unused=True))


def test_bf16_inputs_under_autocast_are_computed_in_float32() -> None:
    case = make_case([40], dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kl, _ = loss(case, ALL_VISIBLE)
    reference = oracle_layer(*case.attention[:3], ALL_VISIBLE, case.sink, [40], 4, 3, case.scale, case.index)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), reference.kl.sum(), rtol=1e-5, atol=0)


def test_sharded_heads_and_unknown_teachers_are_refused() -> None:
    case = make_case([9])
    with pytest.raises(BackendUnsupported, match="head_group"):
        unfused.indexer_loss(*case.index, ALL_VISIBLE, *case.attention, None, *case.tail, head_group=object())
    with pytest.raises(ValueError, match="full_csa, compressed_only"):
        loss(case, ALL_VISIBLE, "none")
    with pytest.raises(ValueError, match="index_k has 1 entries"):
        unfused.indexer_loss(case.index_q, case.index_k[:1], case.index_w, ALL_VISIBLE, *case.attention, None, *case.tail)
