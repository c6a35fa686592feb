# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import PackedLayout, get_backend
from kernels.unfused.select import top_ids
from tests.kernels.cases import chunk_elements, make_case
from tests.kernels.oracle import masks, oracle_scores, oracle_select

unfused = get_backend("unfused")


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 13),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([200, 1 << 21]),
    st.integers(0, 2**31),
)
def test_picks_the_best_visible_entries_with_ties_to_the_lower_id(
    lengths: list[int], padding: int, ratio: int, topk: int, dtype: torch.dtype, chunk: int, seed: int
) -> None:
    case = make_case(lengths, padding=padding, ratio=ratio, dtype=dtype, surplus=1, seed=seed)
    # small integers: every score is exact in both dtypes, and ties are everywhere
    index_q, index_k, index_w = ((t * 1.5).round() for t in case.index)
    with chunk_elements(chunk):
        got = unfused.select(index_q, index_k, index_w, case.layout, ratio, topk)
    _, visible = masks(lengths, case.layout.num_tokens, index_k.shape[0], ratio, 1)
    assert got.dtype == torch.int32
    assert torch.equal(got, oracle_select(oracle_scores(index_q, index_k, index_w, visible), topk))


def test_all_equal_scores_take_the_lowest_ids() -> None:
    layout = PackedLayout.from_lengths([40])
    for dtype in (torch.float32, torch.float64):
        ids = unfused.select(torch.zeros(40, 2, 3, dtype=dtype), torch.ones(10, 3, dtype=dtype), -torch.ones(40, 2, dtype=dtype), layout, 4, 3)
        assert ids[-1].tolist() == [0, 1, 2]
        assert ids[7].tolist() == [0, 1, -1]


def test_negative_zero_ties_with_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], dtype=dtype)
        assert top_ids(scores, torch.ones(1, 4, dtype=torch.bool), 2).tolist() == [[0, 1]]


def test_relu_acts_per_head_before_the_sum() -> None:
    """Dot products (+2, -5) with weights (1, 1) score 2; a sum first would give 0 and lose to 1."""
    layout = PackedLayout.from_lengths([2])
    index_q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]] * 2)
    index_k = torch.tensor([[1.0, 0.0], [2.0, -5.0]])
    assert unfused.select(index_q, index_k, torch.ones(2, 2), layout, 1, 1)[1].tolist() == [1]


def test_scores_of_bf16_inputs_keep_their_order() -> None:
    """300.0 against 300.5, which bf16 cannot tell apart."""
    layout = PackedLayout.from_lengths([2])
    index_k = torch.tensor([[300.0, 0.0], [300.0, 0.5]], dtype=torch.bfloat16)
    ids = unfused.select(torch.ones(2, 1, 2, dtype=torch.bfloat16), index_k, torch.ones(2, 1, dtype=torch.bfloat16), layout, 1, 1)
    assert ids[1].tolist() == [1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(unfused.select(torch.ones(2, 1, 2), index_k.float(), torch.ones(2, 1), layout, 1, 1), ids)


@pytest.mark.parametrize("length", [8, 3])
def test_more_slots_than_entries_select_everything(length: int) -> None:
    """Top-k larger than the number of keys."""
    case = make_case([length], dtype=torch.float32)
    ids = unfused.select(*case.index, case.layout, 4, 512)
    assert ids.shape == (length, 512)
    assert ids[-1][: length // 4].tolist() == list(range(length // 4))
    assert (ids[-1][length // 4 :] == -1).all()


def test_zero_slots_and_an_empty_row_are_legal() -> None:
    case = make_case([9])
    assert unfused.select(*case.index, case.layout, 4, 0).shape == (9, 0)
    empty = make_case([])
    assert unfused.select(*empty.index, empty.layout, 4, 3).shape == (0, 3)


def test_runs_without_gradient() -> None:
    case = make_case([9]).require_grad()
    assert not unfused.select(*case.index, case.layout, 4, 2).requires_grad


def test_a_score_of_minus_infinity_is_still_visible() -> None:
    layout = PackedLayout.from_lengths([1, 3])
    for dtype in (torch.float32, torch.float64):
        index_k = torch.tensor([[5.0], [1.0], [torch.finfo(dtype).max], [1.0]], dtype=dtype)
        ids = unfused.select(torch.full((4, 1, 1), 2.0, dtype=dtype), index_k, -torch.ones(4, 1, dtype=dtype), layout, 1, 3)
        assert ids[3].tolist() == [1, 2, 3]


def test_refuses_too_few_entries_and_a_negative_topk() -> None:
    case = make_case([9])
    with pytest.raises(ValueError, match="index_k has 1 entries, the layout needs 2"):
        unfused.select(case.index_q, case.index_k[:1], case.index_w, case.layout, 4, 2)
    with pytest.raises(ValueError, match="topk must be >= 0"):
        unfused.select(*case.index, case.layout, 4, -1)
