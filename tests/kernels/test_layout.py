# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import PackedLayout
from tests.kernels.oracle import masks


def test_counts_of_the_documented_example() -> None:
    layout = PackedLayout.from_lengths([5, 3, 9])
    assert layout.num_tokens == 17
    assert layout.compressed_cu_seqlens(4).diff().tolist() == [1, 0, 2]
    assert layout.compressed_cu_seqlens(4).tolist() == [0, 1, 1, 3]


def test_one_token_documents_keep_their_boundaries() -> None:
    """Documents of 3, 1, 1, 5 tokens."""
    layout = PackedLayout.from_lengths([3, 1, 1, 5])
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 5, 10]
    assert layout.compressed_cu_seqlens(4).diff().tolist() == [0, 0, 0, 1]
    assert layout.position_of_token.tolist() == [0, 1, 2, 0, 0, 0, 1, 2, 3, 4]


def test_ten_queries_at_ratio_four_see_0001111222() -> None:
    assert PackedLayout.from_lengths([10]).visible_compressed(4).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(0, 11), max_size=6), st.integers(0, 5), st.integers(1, 6), st.integers(0, 7))
def test_windows_and_visible_entries_agree_with_the_definition(lengths: list[int], padding: int, ratio: int, window: int) -> None:
    layout = PackedLayout.from_lengths(lengths, num_tokens=sum(lengths) + padding)
    entries = layout.num_compressed(ratio)
    win, vis = masks(lengths, layout.num_tokens, entries, ratio, window)
    got = torch.zeros_like(win)
    for row, ids in enumerate(layout.window_ids(window).tolist()):
        valid = [i for i in ids if i >= 0]
        assert len(set(valid)) == len(valid)
        got[row, valid] = True
    assert torch.equal(got, win)
    starts, counts = layout.entry_start(ratio), layout.visible_compressed(ratio)
    ids = torch.arange(entries)
    assert torch.equal((ids >= starts[:, None]) & (ids < (starts + counts)[:, None]), vis)
    assert layout.num_query_rows(ratio) == int(vis.any(1).sum())
    for start in range(layout.num_tokens):
        for stop in range(start + 1, layout.num_tokens + 1):
            low, high = layout.entry_range(start, stop, ratio)
            seen = vis[start:stop].any(0).nonzero().flatten().tolist()
            assert all(low <= j < high for j in seen)
            assert not seen or high == seen[-1] + 1


def test_padding_belongs_to_no_document() -> None:
    layout = PackedLayout.from_lengths([5], num_tokens=8)
    assert layout.document_of_token.tolist() == [0] * 5 + [-1] * 3
    assert layout.position_of_token.tolist()[5:] == [0, 0, 0]
    assert layout.visible_compressed(1).tolist()[5:] == [0, 0, 0]
    assert (layout.window_ids(4)[5:] == -1).all()


def test_every_index_tensor_is_int32() -> None:
    layout = PackedLayout(torch.tensor([0, 4, 9]), num_tokens=11)
    tensors = [layout.cu_seqlens, layout.document_of_token, layout.position_of_token, layout.compressed_cu_seqlens(4), layout.visible_compressed(4)]
    tensors += [layout.window_ids(3), layout.entry_start(4), layout.window_start(3), layout.token_ids]
    assert {t.dtype for t in tensors} == {torch.int32}


def test_both_constructors_agree() -> None:
    one, two = PackedLayout.from_lengths([5, 0, 7], num_tokens=20), PackedLayout(torch.tensor([0, 5, 5, 12], dtype=torch.int32), 20)
    assert one.lengths == two.lengths == (5, 0, 7)
    assert torch.equal(one.document_of_token, two.document_of_token)
    assert torch.equal(one.window_ids(3), two.window_ids(3))


def test_a_slice_of_queries_keeps_global_ids_and_positions() -> None:
    """A query slice knows its place in the whole row."""
    layout = PackedLayout.from_lengths([7, 12, 3], num_tokens=25)
    part = layout.query_slice(5, 16)
    assert (part.num_rows, part.num_tokens) == (11, 25)
    assert torch.equal(part.window_ids(4), layout.window_ids(4)[5:16])
    assert torch.equal(part.visible_compressed(4), layout.visible_compressed(4)[5:16])
    assert torch.equal(part.query_slice(3, 7).token_ids, layout.token_ids[8:12])
    assert part.entry_range(0, 11, 4) == layout.entry_range(5, 16, 4)


def test_survives_pickle_copy_and_a_move() -> None:
    layout = PackedLayout.from_lengths([5, 3])
    layout.window_ids(2)
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), layout.to("cpu")):
        assert other.lengths == (5, 3)
        assert torch.equal(other.window_ids(2), layout.window_ids(2))


def test_index_tensors_first_made_in_inference_mode_still_train() -> None:
    layout = PackedLayout.from_lengths([6])
    with torch.inference_mode():
        ids = layout.window_ids(2)
    assert not ids.is_inference()


@pytest.mark.parametrize(
    ("bounds", "num_tokens", "words"), [([1, 4], None, "start at 0"), ([0, 4, 3], None, "never decrease"), ([0, 4], 3, "smaller than the 4")]
)
def test_impossible_boundaries_are_refused(bounds: list[int], num_tokens: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackedLayout(torch.tensor(bounds), num_tokens)


def test_impossible_arguments_are_refused() -> None:
    layout = PackedLayout.from_lengths([4])
    with pytest.raises(ValueError, match="ratio must be >= 1"):
        layout.visible_compressed(0)
    with pytest.raises(ValueError, match="window must be >= 0"):
        layout.window_ids(-1)
    with pytest.raises(ValueError, match="lengths must be >= 0"):
        PackedLayout.from_lengths([3, -1])
    with pytest.raises(ValueError, match="outside the 4 rows"):
        layout.query_slice(2, 5)
    with pytest.raises(ValueError, match="integer tensor"):
        PackedLayout(torch.tensor([0.0, 3.0]))
