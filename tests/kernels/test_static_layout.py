# SPDX-License-Identifier: Apache-2.0
"""A StaticLayout derives on the device what the exact layout of the loaded documents derives, and refuses what only the host could tell."""

from __future__ import annotations

import itertools

import pytest
import torch

from csa_model.row import CompressedWindows
from kernels import PackedLayout, StaticLayout
from kernels.static_layout import pad_documents

TOKENS, DOCUMENTS, LONGEST = 40, 12, 38
ROWS: dict[str, tuple[int, ...]] = {
    "one": (38,),
    "many": (9, 4, 1, 8, 12, 6),
    "zero-length": (0, 5, 0, 0, 16, 3, 0),
    "padding": (7, 5),
    "shorter than a window": (3, 3, 3, 3, 1),
    "empty row": (0,),
    "no document": (),
    "all of it": (20, 20),
}
RATIOS = (1, 4, 8, 128)
WINDOWS = (0, 1, 5, 64)


def exact_layout(lengths: tuple[int, ...], tokens: int = TOKENS) -> PackedLayout:
    return PackedLayout.from_lengths(lengths, tokens)


def static_layout(*rows: tuple[int, ...]) -> StaticLayout:
    """A StaticLayout into which these rows were loaded, one after the other; what is derived was derived for each of them."""
    layout = StaticLayout(TOKENS, DOCUMENTS, LONGEST)
    for lengths in rows:
        layout.load(exact_layout(lengths))
        derive(layout)
    return layout


def derive(layout: PackedLayout) -> dict[str, torch.Tensor]:
    """Everything of one number per row that a layout derives."""
    derived = {"document": layout.document_of_token, "position": layout.position_of_token, "token_ids": layout.token_ids}
    for ratio in RATIOS:
        derived[f"entry_start/{ratio}"] = layout.entry_start(ratio)
        derived[f"visible_compressed/{ratio}"] = layout.visible_compressed(ratio)
    for window in WINDOWS:
        derived[f"window_start/{window}"] = layout.window_start(window)
        derived[f"window_ids/{window}"] = layout.window_ids(window)
    return derived


def assert_is(layout: PackedLayout, exact: PackedLayout) -> None:
    """Every tensor of `layout` equals that of the exact layout; behind its documents stand empty ones."""
    got, wanted = derive(layout), derive(exact)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype == torch.int32, name
        assert torch.equal(got[name], value), name
    for ratio in RATIOS:
        boundaries = exact.compressed_cu_seqlens(ratio)
        count = boundaries.numel()
        assert torch.equal(layout.compressed_cu_seqlens(ratio)[:count], boundaries)
        assert (layout.compressed_cu_seqlens(ratio)[count:] == exact.num_compressed(ratio)).all()
        assert layout.num_compressed(ratio) >= exact.num_compressed(ratio)
    count = exact.cu_seqlens.numel()
    assert torch.equal(layout.cu_seqlens[:count], exact.cu_seqlens)
    assert (layout.cu_seqlens[count:] == exact.num_real_tokens).all()


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_derived_tensors_are_those_of_the_exact_layout(lengths: tuple[int, ...]) -> None:
    assert_is(static_layout(lengths), exact_layout(lengths))


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["one", "many", "padding", "empty row", "no document"], 2)))
def test_nothing_of_the_row_before_is_left(before: str, after: str) -> None:
    layout = static_layout(ROWS[before], ROWS[after])
    assert_is(layout, exact_layout(ROWS[after]))


def test_host_values_are_bounds_that_the_documents_cannot_change() -> None:
    layout = StaticLayout(TOKENS, DOCUMENTS, LONGEST)
    for lengths in ROWS.values():
        layout.load(exact_layout(lengths))
        assert [layout.num_compressed(ratio) for ratio in RATIOS] == [40, 10, 5, 0]
        assert layout.longest_document() == LONGEST
        assert layout.entry_range(3, 7, 4) == (0, 10)
        assert layout.entry_range(5, 5, 4)[0] == 0
        assert not layout.windows_come_first(4)
        assert (layout.num_rows, layout.num_tokens, layout.first_row) == (TOKENS, TOKENS, 0)


def test_a_bound_beyond_the_row_is_the_row() -> None:
    assert StaticLayout(16, 1, 10**9).longest_document() == 16


def test_tensors_stay_where_they_are() -> None:
    """A graph holds their addresses."""
    layout = StaticLayout(TOKENS, DOCUMENTS, LONGEST)
    tensors = (layout.cu_seqlens, layout.document_of_token, layout.position_of_token)
    addresses = [t.data_ptr() for t in tensors]
    for lengths in ROWS.values():
        layout.load(exact_layout(lengths))
    kept = (layout.cu_seqlens, layout.document_of_token, layout.position_of_token)
    assert all(a is b for a, b in zip(tensors, kept, strict=True))
    assert [t.data_ptr() for t in kept] == addresses


def test_a_loaded_layout_may_change_afterwards() -> None:
    exact = exact_layout(ROWS["many"])
    layout = StaticLayout(TOKENS, DOCUMENTS, LONGEST)
    layout.load(exact)
    for tensor in (exact.cu_seqlens, exact.document_of_token, exact.position_of_token):
        tensor.fill_(-5)
    assert_is(layout, exact_layout(ROWS["many"]))


def test_renewed_shares_the_documents_and_nothing_that_was_derived() -> None:
    layout = static_layout(ROWS["many"])
    assert layout._cache
    again = layout.renewed()
    assert isinstance(again, StaticLayout)
    assert not again._cache
    assert again.cu_seqlens is layout.cu_seqlens
    assert again.document_of_token is layout.document_of_token
    assert again.position_of_token is layout.position_of_token
    assert again.entry_start(4) is not layout.entry_start(4)
    again.window_start(7)
    assert ("window", 7) not in layout._cache
    assert_is(again, exact_layout(ROWS["many"]))
    layout.load(exact_layout(ROWS["padding"]))
    assert_is(layout.renewed(), exact_layout(ROWS["padding"]))


@pytest.mark.parametrize("bounds", [(0, 40), (0, 7), (5, 23), (13, 14), (39, 40), (9, 9)])
@pytest.mark.parametrize("name", ["many", "padding", "zero-length"])
def test_a_slice_of_queries_is_that_of_the_exact_layout(name: str, bounds: tuple[int, int]) -> None:
    layout, exact = static_layout(ROWS[name]).query_slice(*bounds), exact_layout(ROWS[name]).query_slice(*bounds)
    assert (layout.num_rows, layout.first_row, layout.num_tokens) == (exact.num_rows, exact.first_row, exact.num_tokens)
    assert_is(layout, exact)
    low, high = exact.entry_range(0, exact.num_rows, 4)
    bound = layout.entry_range(0, layout.num_rows, 4)
    assert bound[0] <= low
    assert high <= bound[1]
    if layout.num_rows > 2:
        assert_is(layout.query_slice(1, 2), exact.query_slice(1, 2))
    assert f"[{bounds[0]}, {bounds[1]})" in repr(layout)


def test_a_slice_outside_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the 40 rows"):
        static_layout(ROWS["many"]).query_slice(0, 41)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda layout: layout.lengths, "lengths .* device alone"),
        (lambda layout: layout.num_real_tokens, "real tokens .* device alone"),
        (lambda layout: layout.num_query_rows(4), "query rows .* come with the batch"),
        (lambda layout: layout.to("cpu"), "stays where its tensors are"),
        (lambda layout: layout.pin_memory(), "stays where its tensors are"),
    ],
    ids=["lengths", "num_real_tokens", "num_query_rows", "to", "pin_memory"],
)
def test_what_only_the_host_could_tell_is_refused(ask, words: str) -> None:
    layout = static_layout(ROWS["many"])
    for asked in (layout, layout.renewed(), layout.query_slice(2, 9)):
        with pytest.raises(TypeError, match=words):
            ask(asked)


@pytest.mark.parametrize(
    "row",
    [
        exact_layout((9,), TOKENS + 1),
        exact_layout((9,), TOKENS - 1),
        exact_layout((1,) * (DOCUMENTS + 1)),
        exact_layout((LONGEST + 1,)),
        exact_layout((9, 9)).query_slice(0, 20),
    ],
    ids=["longer row", "shorter row", "more documents", "longer document", "slice"],
)
def test_a_row_that_does_not_fit_is_refused_before_anything_is_changed(row: PackedLayout) -> None:
    layout = static_layout(ROWS["many"])
    assert not layout.holds(row)
    with pytest.raises(ValueError, match=r"does not fit one of 40 tokens with up to 12 documents of up to 38 tokens") as refusal:
        layout.load(row)
    assert f"a row of {row.num_tokens} tokens with {len(row.lengths)} documents of up to {max(row.lengths)} tokens" in str(refusal.value)
    assert_is(layout, exact_layout(ROWS["many"]))


def test_a_row_that_just_fits_is_taken() -> None:
    layout = StaticLayout(TOKENS, DOCUMENTS, LONGEST)
    for lengths in ((1,) * DOCUMENTS, (LONGEST,)):
        assert layout.holds(exact_layout(lengths))
        layout.load(exact_layout(lengths))
        assert_is(layout, exact_layout(lengths))


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (2**31, 1, 1), (8, 0, 1), (8, 1, -1)])
def test_sizes_that_mean_nothing_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        StaticLayout(*sizes)


@pytest.mark.parametrize("ratio", [0, -4])
def test_a_ratio_that_means_nothing_is_refused(ratio: int) -> None:
    layout = static_layout(ROWS["many"])
    for ask in (layout.num_compressed, layout.entry_start, lambda r: layout.entry_range(0, 4, r)):
        with pytest.raises(ValueError, match="ratio must be >= 1"):
            ask(ratio)


@pytest.mark.parametrize(
    ("count", "room"), [(0, 64), (1, 64), (31, 64), (32, 64), (33, 128), (64, 128), (65, 256), (100, 256), (128, 256), (1000, 2048), (1024, 2048)]
)
def test_room_for_twice_the_documents_in_powers_of_two(count: int, room: int) -> None:
    assert pad_documents(count) == room


def test_there_is_room_for_twice_the_documents_of_any_count() -> None:
    for count in range(3000):
        room = pad_documents(count)
        assert 2 * count <= room <= max(64, 4 * count)
        assert room & (room - 1) == 0


@pytest.mark.parametrize(
    ("lengths", "ratio", "first"),
    [
        ((8, 4), 4, True),
        ((8, 5), 4, True),  # the tail of the last document alone is left out
        ((8, 4, 3, 2), 4, True),  # documents without an entry at the end
        ((8, 0, 4), 4, True),
        ((5, 4), 4, False),
        ((3, 8), 4, False),
        ((3,), 4, True),
        ((), 4, True),
        ((8, 4), 8, True),
        ((4, 8), 8, False),
    ],
)
def test_windows_come_first_where_no_token_before_the_last_window_is_left_out(lengths: tuple[int, ...], ratio: int, first: bool) -> None:
    layout = exact_layout(lengths)
    assert layout.windows_come_first(ratio) == first
    windows = CompressedWindows.of(layout, ratio)
    assert windows.are_head == first
    assert torch.equal(windows.token_ids, torch.arange(windows.token_ids.numel())) == first


def listed_windows(lengths: tuple[int, ...], ratio: int) -> list[int]:
    """Token ids of every full window of `ratio` tokens of each document, one by one."""
    ids, start = [], 0
    for length in lengths:
        ids += range(start, start + length // ratio * ratio)
        start += length
    return ids


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_exact_windows_come_first_and_no_token_twice(lengths: tuple[int, ...], ratio: int) -> None:
    exact = CompressedWindows.of(exact_layout(lengths), ratio)
    static = CompressedWindows.of(static_layout(lengths), ratio)
    entries = exact.position.numel()
    assert exact.token_ids.tolist() == listed_windows(lengths, ratio)
    assert static.token_ids.shape == (TOKENS // ratio * ratio,)
    assert static.token_ids[: entries * ratio].tolist() == exact.token_ids.tolist()
    assert torch.equal(static.position[:entries], exact.position)
    assert torch.equal(static.starts_document[:entries], exact.starts_document)
    assert static.position.shape == static.starts_document.shape == (TOKENS // ratio,)
    assert static.token_ids.unique().numel() == static.token_ids.numel()
    assert ((static.token_ids >= 0) & (static.token_ids < TOKENS)).all()
    assert not static.are_head


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_rows_of_windows_and_their_gradients_are_the_exact_ones(lengths: tuple[int, ...], ratio: int) -> None:
    """A gradient of 0 for the windows that belong to nobody leaves the gradient of every token as it was."""
    x = torch.arange(TOKENS * 3, dtype=torch.float64).view(TOKENS, 3)
    results = []
    for layout in (exact_layout(lengths), static_layout(lengths)):
        leaf = x.clone().requires_grad_()
        rows = CompressedWindows.of(layout, ratio).rows_of(leaf)
        count = len(listed_windows(lengths, ratio))
        weight = torch.zeros(rows.shape, dtype=rows.dtype)
        weight[:count] = 1 + torch.arange(count, dtype=rows.dtype)[:, None]
        (rows * weight).sum().backward()
        assert leaf.grad is not None
        results.append((rows.detach()[:count], leaf.grad))
    for got, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(got, wanted)
