# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import ALL_VISIBLE, PackedLayout, get_backend
from kernels.unfused.attend import add_sink
from tests.kernels.cases import TOLERANCE, Case, chunk_elements, make_case
from tests.kernels.oracle import oracle_layer

unfused = get_backend("unfused")
INFINITY = math.inf


def chosen(case: Case, kind: str, topk: int, seed: int = 0) -> Any:
    """Ids as a hostile caller would give them: any order, holes, ids beyond both ends, invisible ids, every valid one at most once."""
    if kind != "ids":
        return {"all": ALL_VISIBLE, "none": None}[kind]
    generator = torch.Generator().manual_seed(seed)
    entries = case.compressed_kv.shape[0]
    rows = []
    for _ in range(case.layout.num_tokens):
        ids = torch.randperm(entries + 4, generator=generator)[:topk] - 2
        rows.append(torch.cat([ids, torch.full((topk - ids.numel(),), -1)]))
    return torch.stack(rows).int() if rows else torch.zeros(0, topk, dtype=torch.int32)


def gradients(out: Tensor, weight: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    found = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True) if out.requires_grad else [None] * len(inputs)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=4),
    padding=st.integers(0, 3),
    ratio=st.integers(1, 6),
    window=st.sampled_from([0, 1, 2, 5, 17, 50]),
    heads=st.integers(1, 4),
    dim=st.integers(1, 6),
    topk=st.integers(0, 9),
    kind=st.sampled_from(["ids", "all", "none"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    chunk=st.sampled_from([1, 400, 3000, 1 << 21]),
    sinks=st.lists(st.sampled_from([0.0, -1.5, 3.0, 1e4, -1e4, INFINITY, -INFINITY]), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle_forward_and_backward(
    lengths: list[int],
    padding: int,
    ratio: int,
    window: int,
    heads: int,
    dim: int,
    topk: int,
    kind: str,
    dtype: torch.dtype,
    chunk: int,
    sinks: list[float],
    seed: int,
) -> None:
    case = make_case(lengths, padding=padding, ratio=ratio, window=window, heads=heads, dim=dim, surplus=2, dtype=dtype, seed=seed)
    case.sink.copy_(torch.tensor(sinks[:heads]))
    case.require_grad()
    selected = chosen(case, kind, topk, seed)
    with chunk_elements(chunk):
        out, lse = unfused.attend(*case.attention[:3], selected, case.sink, *case.tail)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
        got = gradients(out, weight, case.attention)
    if case.layout.num_tokens == 0:
        assert out.shape == (0, heads, dim)
        return
    reference = oracle_layer(*case.attention[:3], selected, case.sink, lengths, ratio, window, case.scale)
    tolerance = TOLERANCE[dtype]
    assert out.dtype == dtype
    assert lse.dtype == dtype
    assert not lse.requires_grad
    torch.testing.assert_close(out.double(), reference.out, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), reference.lse, rtol=tolerance, atol=tolerance)
    for name, mine, oracle in zip(
        ["q", "window_kv", "compressed_kv", "sink"], got, gradients(reference.out, weight.double(), case.attention), strict=True
    ):
        torch.testing.assert_close(mine.double(), oracle.double(), rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["ids", "all", "none", "no keys"])
@pytest.mark.parametrize("window", [0, 4])
def test_gradcheck(kind: str, window: int) -> None:
    case = make_case([6, 1, 9], padding=1, ratio=2, window=window, heads=2, dim=2, surplus=1).require_grad()
    selected = chosen(case, kind, 3) if kind != "no keys" else None
    if isinstance(selected, Tensor):
        selected[12:14] = -1  # rows without a selected entry

    def function(q: Tensor, window_kv: Tensor, compressed_kv: Tensor, sink: Tensor) -> Tensor:
        return unfused.attend(q, window_kv, None if kind == "no keys" else compressed_kv, selected, sink, *case.tail)[0]

    with chunk_elements(250):
        assert torch.autograd.gradcheck(function, case.attention)


@pytest.mark.parametrize("infinite", [INFINITY, -INFINITY, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_sinks_leave_finite_gradients(infinite: float, dtype: torch.dtype) -> None:
    case = make_case([9, 3], padding=1, dtype=dtype, window=0)
    case.sink[1] = infinite
    case.require_grad()
    out, _ = unfused.attend(*case.attention[:3], ALL_VISIBLE, case.sink, *case.tail)
    got = torch.autograd.grad(out.square().sum(), case.attention)
    assert all(torch.isfinite(g).all() for g in got)
    if infinite > 0:
        assert (out[:, 1] == 0).all()
        assert (got[0][:, 1] == 0).all()
    assert got[3][1] == 0


def test_a_row_without_keys_gives_exactly_nothing() -> None:
    """Ids all -1, a query whose logit to key 0 would be 120; and nothing becomes 0 / 0."""
    case = make_case([8], window=0, dtype=torch.float32)
    case.q[5] = case.compressed_kv[0] * (120 / case.scale / case.compressed_kv[0].square().sum())
    ids = torch.tensor([[0, 1]] * 8, dtype=torch.int32)
    everything = unfused.attend(*case.attention[:3], ids, case.sink, *case.tail)[0]
    ids[5] = -1
    case.require_grad()
    out, lse = unfused.attend(*case.attention[:3], ids, case.sink, *case.tail)
    assert (out[5] == 0).all()
    assert (lse[5] == -INFINITY).all()
    grad_out = torch.zeros_like(out)
    grad_out[5] = INFINITY
    assert all((g == 0).all() for g in torch.autograd.grad(out, case.attention, grad_out, retain_graph=True))
    assert torch.equal(out[[3, 4, 6, 7]], everything[[3, 4, 6, 7]])


@pytest.mark.parametrize("beyond", [0, 5, 2**31 - 1 - 4])
def test_ids_beyond_the_keys_count_as_none(beyond: int) -> None:
    """Ids of exactly n_keys and more are masked like -1."""
    case = make_case([16], dtype=torch.float64).require_grad()
    entries = case.compressed_kv.shape[0]
    outside, none = torch.tensor([[0, entries + beyond, -7, 2]] * 16, dtype=torch.int32), torch.tensor([[0, -1, -1, 2]] * 16, dtype=torch.int32)
    one, two = (unfused.attend(*case.attention[:3], ids, case.sink, *case.tail)[0] for ids in (outside, none))
    assert torch.equal(one, two)
    for a, b in zip(*(torch.autograd.grad(out.sum(), case.attention) for out in (one, two)), strict=True):
        assert torch.equal(a, b)


def test_two_halves_of_the_keys_merge_by_their_natural_lse() -> None:
    """The lse of both parts in the same base."""
    case = make_case([40], window=4, dtype=torch.float32)
    case.sink.fill_(-INFINITY)
    whole, whole_lse = unfused.attend(*case.attention[:3], ALL_VISIBLE, case.sink, *case.tail)
    first, first_lse = unfused.attend(*case.attention[:3], None, case.sink, *case.tail)
    second, second_lse = unfused.attend(*case.attention[:3], ALL_VISIBLE, case.sink, case.layout, 4, 0, case.scale)
    joint = torch.logaddexp(first_lse, second_lse)
    merged = first * (first_lse - joint).exp()[..., None] + second * (second_lse - joint).exp()[..., None]
    torch.testing.assert_close(joint, whole_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-5)


def test_lse_is_natural_log_and_leaves_the_sink_out() -> None:
    layout = PackedLayout.from_lengths([128])
    out, lse = unfused.attend(torch.zeros(128, 1, 2), torch.ones(128, 2), None, None, torch.tensor([math.log(128)]), layout, 4, 128, 1.0)
    assert lse[-1, 0].item() == pytest.approx(math.log(128), abs=1e-6)
    torch.testing.assert_close(out[-1, 0], torch.full((2,), 0.5))


def test_adding_the_sink_is_exact_at_every_infinity() -> None:
    values = torch.tensor([-INFINITY, -1e4, -3.0, 0.0, 20.0, 1e4, INFINITY], dtype=torch.float64)
    lse = values[:-1, None].expand(-1, values.numel())
    torch.testing.assert_close(add_sink(lse, values), torch.logaddexp(lse, values), rtol=1e-15, atol=0)


def test_the_window_holds_its_own_row_and_w_minus_one_before() -> None:
    """Window 4 reads t-3, not t-4."""
    case = make_case([12], window=4)
    base = unfused.attend(case.q, case.window_kv, None, None, case.sink, *case.tail)[0][9]
    for back, moves in ((0, True), (3, True), (4, False)):
        changed = case.window_kv.clone()
        changed[9 - back] += 1
        out = unfused.attend(case.q, changed, None, None, case.sink, *case.tail)[0][9]
        assert torch.equal(out, base) != moves


@pytest.mark.parametrize("kind", ["ids", "all"])
def test_a_slice_of_queries_equals_the_rows_of_the_whole(kind: str) -> None:
    """Queries 16..31 of a 32-token sequence."""
    case = make_case([32], window=5)
    selected = chosen(case, kind, 4)
    whole, whole_lse = unfused.attend(*case.attention[:3], selected, case.sink, *case.tail)
    part = selected[16:] if isinstance(selected, Tensor) else selected
    out, lse = unfused.attend(case.q[16:], *case.attention[1:3], part, case.sink, case.layout.query_slice(16, 32), *case.tail[1:])
    torch.testing.assert_close(out, whole[16:], rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse[16:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["ids", "all"])
def test_low_precision_inputs_are_computed_in_float32(kind: str) -> None:
    case = make_case([50, 30], window=8, dtype=torch.bfloat16)
    selected = chosen(case, kind, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = unfused.attend(*case.attention[:3], selected, case.sink, *case.tail)
    reference = oracle_layer(*case.attention[:3], selected, case.sink, case.lengths, 4, 8, case.scale)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(lse.double(), reference.lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), reference.out, rtol=2**-8, atol=1e-6)


def test_float64_queries_take_a_float32_sink_and_a_rounded_sink_is_refused() -> None:
    """A bf16 sink raises."""
    case = make_case([9])
    out, lse = unfused.attend(*case.attention[:3], None, case.sink.float(), *case.tail)
    assert out.dtype == lse.dtype == torch.float64
    with pytest.raises(ValueError, match="sink must be float32"):
        unfused.attend(*case.attention[:3], None, case.sink.bfloat16(), *case.tail)


def test_shapes_that_do_not_fit_the_layout_are_named() -> None:
    case = make_case([9])
    with pytest.raises(ValueError, match=r"q must have shape \[9"):
        unfused.attend(case.q[:8], *case.attention[1:3], None, case.sink, *case.tail)
    with pytest.raises(ValueError, match=r"compressed_kv has 1 entries, the layout needs 2"):
        unfused.attend(case.q, case.window_kv, case.compressed_kv[:1], ALL_VISIBLE, case.sink, *case.tail)
    with pytest.raises(ValueError, match=r"selected must be int32"):
        unfused.attend(*case.attention[:3], torch.zeros(9, 2), case.sink, *case.tail)
