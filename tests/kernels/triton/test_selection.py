# SPDX-License-Identifier: Apache-2.0
"""Selection: exact top-k, ties to the lower id, ascending, whatever the chunk and however long the row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import PackedLayout, get_backend
from tests.kernels.oracle import masks, oracle_scores, oracle_select


def integer_indexer(tokens: int, entries: int, heads: int, dim: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers: scores are exact in every precision and ties are common."""
    g = torch.Generator().manual_seed(seed)
    draw = [torch.randint(-2, 3, shape, generator=g).float().to(device) for shape in ((tokens, heads, dim), (entries, dim), (tokens, heads))]
    return draw[0], draw[1], draw[2]


@pytest.mark.parametrize("topk", [3, 8, 40])
def test_ids_are_those_of_the_oracle_under_ties(device: str, topk: int) -> None:
    lengths, tokens = [41, 0, 1, 3, 22], 70  # three tokens of padding
    layout = PackedLayout.from_lengths(lengths, tokens, device=device)
    q, k, w = integer_indexer(tokens, layout.num_compressed(4) + 2, 3, 16, device)
    w[7] = 0  # all scores equal
    visible = masks(lengths, tokens, k.shape[0], 4, 1)[1]
    expected = oracle_select(oracle_scores(q.cpu(), k.cpu(), w.cpu(), visible), topk)
    got = get_backend("triton").select(q, k, w, layout, 4, topk)
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu(), expected)


def test_chunks_of_the_buffer_do_not_show(device: str) -> None:
    from kernels.triton_fused.selection import select_entries

    layout = PackedLayout.from_lengths([30, 18], device=device)
    q, k, w = integer_indexer(48, 11, 2, 16, device, 1)
    bounds = (layout.entry_start(4), layout.visible_compressed(4))
    one, scores = select_entries(q, k, w, *bounds, 3, 4, 7, with_scores=True)
    many, _ = select_entries(q, k, w, *bounds, 3, 4, 7, budget=1)  # chunks of 32 rows
    assert torch.equal(one, many)
    exact = (torch.relu(torch.einsum("thd,cd->thc", q, k)) * w[..., None]).sum(1)
    exact = torch.where(one >= 0, exact.gather(1, one.clamp(min=0).long()), -torch.inf)
    assert torch.equal(scores, exact)  # integers: the scores kept for the loss are those of the ids


def test_every_row_is_taken_by_one_of_the_launches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton_fused import selection

    monkeypatch.setattr(selection, "SPANS", ((32, 1), (64, 1), (128, 1)))  # and longer rows
    rows, topk, before = 130, 8, 21
    q, k, w = integer_indexer(rows, rows + before, 1, 16, device, 4)
    visible = torch.arange(before + 1, before + 1 + rows, dtype=torch.int32, device=device)
    scores = torch.relu(torch.einsum("thd,cd->thc", q, k))[:, 0] * w
    scores = scores.masked_fill(torch.arange(rows + before, device=device)[None] >= visible[:, None], -torch.inf)
    expected = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :topk].sort(1).values.int()
    for kept in (False, True):
        got, chosen = selection.select_entries(q, k, w, torch.zeros_like(visible), visible, topk, 1, rows + before, before, kept, budget=1)
        assert torch.equal(got, expected)
        assert chosen is None or torch.equal(chosen, scores.gather(1, expected.long()))


@pytest.mark.parametrize("topk", [40, 512, 2048])
def test_rows_of_every_length_choose_what_a_stable_sort_does(device: str, topk: int) -> None:
    from kernels.triton_fused.selection import _take_chunk

    visible = torch.tensor([30, 511, 513, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 8193, 16384, 16385, 16500], dtype=torch.int32)
    scores = torch.randn(len(visible), 16512, generator=torch.Generator().manual_seed(topk)).round(decimals=2)
    start = torch.arange(len(visible), dtype=torch.int32)
    ids = torch.full((len(visible), topk), -7, dtype=torch.int32, device=device)
    kept = torch.zeros(len(visible), topk, device=device)
    _take_chunk(scores.to(device), ids, kept, start.to(device), visible.to(device), 0, len(visible), 16500)
    for row, count in enumerate(visible.tolist()):
        expected = torch.sort(scores[row, :count], descending=True, stable=True).indices[:topk].sort().values
        blank = topk - len(expected)
        assert torch.equal(ids[row].cpu(), torch.cat([(expected + row).int(), torch.full((blank,), -1, dtype=torch.int32)])), count
        assert torch.equal(kept[row].cpu(), torch.cat([scores[row, expected], torch.full((blank,), -torch.inf)])), count


def test_chunks_fit_the_grid_however_many_short_documents_there_are() -> None:
    pytest.importorskip("triton")
    from kernels.triton_fused.index_scores import score_tiling
    from kernels.triton_fused.selection import chunk_rows

    for columns in (1, 20, 32, 100):
        assert chunk_rows(2**31 - 1, columns) / score_tiling(64, 128, torch.bfloat16, columns).rows <= 65535


def test_slice_of_query_rows_gets_the_ids_of_the_whole(device: str) -> None:
    layout = PackedLayout.from_lengths([22, 12], device=device)
    q, k, w = integer_indexer(34, 8, 2, 16, device, 2)
    backend = get_backend("triton")
    whole = backend.select(q, k, w, layout, 4, 4)
    part = layout.query_slice(17, 29)
    assert torch.equal(backend.select(q[17:29], k, w[17:29], part, 4, 4), whole[17:29])


@pytest.mark.parametrize(("entries", "topk"), [(0, 4), (2, 7)])
def test_exactly_k_columns_without_enough_entries(device: str, entries: int, topk: int) -> None:
    layout = PackedLayout.from_lengths([4 * entries + 3], device=device)
    q, k, w = integer_indexer(layout.num_tokens, entries, 2, 16, device)
    ids = get_backend("triton").select(q, k, w, layout, 4, topk)
    assert ids.shape == (layout.num_tokens, topk)
    visible = layout.visible_compressed(4)[:, None]
    slot = torch.arange(topk, device=device)[None]
    assert torch.equal(ids, torch.where(slot < visible, slot, -1).int())


def test_rows_beyond_the_registers_choose_like_rows_within(device: str) -> None:
    from kernels.triton_fused.row_select import long_row_kernel

    g = torch.Generator().manual_seed(3)
    scores = torch.randn(5, 512, generator=g).round(decimals=1)
    scores[1] = 0.0
    scores[2, ::2] = -0.0
    scores[2, 1::2] = 0.0  # both zeros are one value
    scores[3] *= 1e-30
    visible = torch.tensor([500, 333, 444, 512, 20], dtype=torch.int32)
    start = torch.tensor([0, 5, 7, 9, 1], dtype=torch.int32)
    ids = torch.full((5, 40), -7, dtype=torch.int32, device=device)
    kept = torch.zeros(5, 40, device=device)
    long_row_kernel[(5,)](scores.to(device), ids, kept, start.to(device), visible.to(device), 0, 512, 40, K=40, BLOCK=128, EMIT=True)
    for row in range(4):
        order = torch.sort(scores[row, : visible[row]], descending=True, stable=True).indices[:40]
        assert torch.equal(ids[row].cpu(), (order.sort().values + start[row]).int()), row
        assert torch.equal(kept[row].cpu(), scores[row, order.sort().values]), row
    assert (ids[4] == -7).all()  # a short row belongs to another launch


def in_parts(scores: Tensor, visible: Tensor, start: Tensor, topk: int, part: int, most: int, device: str) -> tuple[Tensor, Tensor]:
    """ids and kept scores of `parts_kernel`, with two rows before and behind that nobody may touch."""
    from kernels.triton_fused.row_select import parts_kernel

    rows, columns = scores.shape
    ids = torch.full((rows + 4, topk), -7, dtype=torch.int32, device=device)
    kept = torch.zeros(rows + 4, topk, device=device)
    bounds = (start.to(device), visible.to(device))
    block_k = 1 << (topk - 1).bit_length()
    options = {"K": topk, "BLOCK_K": block_k, "PART": part, "FEWEST": 1, "MOST": most, "BLOCK": 32, "SHORT": True, "EMIT": True}
    parts_kernel[(rows,)](scores.to(device), ids[2:-2], kept[2:-2], *bounds, 0, columns, topk, **options)
    assert (ids[[0, 1, -2, -1]] == -7).all()
    return ids[2:-2].cpu(), kept[2:-2].cpu()


@pytest.mark.parametrize(("topk", "part"), [(20, 64), (32, 32), (33, 64), (1, 32), (64, 64)])
def test_rows_in_parts_choose_what_a_stable_sort_does(device: str, topk: int, part: int) -> None:
    g = torch.Generator().manual_seed(topk)
    scores = torch.randn(12, 256, generator=g)
    scores[1:4] = scores[1:4].round(decimals=1)
    scores[4] = 0.0
    scores[5, ::2] = -0.0  # both zeros are one value
    scores[5, 1::2] = 0.0
    scores[6] *= 1e-38  # some of them have no full mantissa
    scores[7] = scores[7].round().clamp(-1, 0)  # more than K of the largest
    scores[8] = scores[8].exp() * 1e30
    scores[9] = -scores[9].abs().mul(8).exp()
    visible = torch.tensor([256, 255, 129, 128, 250, 251, 240, 222, 100, 97, 66, topk], dtype=torch.int32)
    start = torch.arange(12, dtype=torch.int32) * 3
    for row, count in enumerate(visible.tolist()):
        scores[row, count:] = torch.nan if row % 2 else torch.inf  # memory that nobody wrote
    ids, kept = in_parts(scores, visible, start, topk, part, 256 // part, device)
    for row, count in enumerate(visible.tolist()):
        expected = torch.sort(scores[row, :count], descending=True, stable=True).indices[:topk].sort().values
        assert torch.equal(ids[row], (expected + start[row]).int()), row
        assert torch.equal(kept[row], scores[row, expected]), row


def test_scores_that_are_not_finite_choose_k_ids_and_touch_no_other_row(device: str) -> None:
    scores = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    scores[0, 5] = scores[2, ::2] = torch.inf
    scores[1, [3, 9]] = scores[3, ::2] = scores[3, 1::4] = -torch.inf
    scores[4, 7] = scores[5, :] = torch.nan  # the largest of all, as in torch.topk
    start, visible = torch.zeros(6, dtype=torch.int32), torch.full((6,), 60, dtype=torch.int32)
    ids, kept = in_parts(scores, visible, start, 20, 32, 2, device)
    for row in range(6):
        expected = torch.sort(scores[row, :60], descending=True, stable=True).indices[:20].sort().values
        assert torch.equal(ids[row], expected.int()), row
        assert torch.equal(kept[row].nan_to_num(9.0), scores[row, expected].nan_to_num(9.0)), row


def test_no_gradient_and_no_copy_of_the_graph(device: str) -> None:
    layout = PackedLayout.from_lengths([12], device=device)
    q, k, w = (t.requires_grad_() for t in integer_indexer(12, 3, 1, 16, device))
    assert not get_backend("triton").select(q, k, w, layout, 4, 2).requires_grad


def test_what_does_not_fit_is_refused(device: str) -> None:
    layout = PackedLayout.from_lengths([12], device=device)
    q, k, w = integer_indexer(12, 3, 1, 16, device)
    backend = get_backend("triton")
    with pytest.raises(ValueError, match=r"0\.\.2048"):
        backend.select(q, k, w, layout, 4, 4000)
    with pytest.raises(ValueError, match="needs 3"):
        backend.select(q, k[:2], w, layout, 4, 2)
    with pytest.raises(ValueError, match="float64"):
        backend.select(q.double(), k.double(), w, layout, 4, 2)
    with pytest.raises(ValueError, match="one dtype"):
        backend.select(q, k.bfloat16(), w, layout, 4, 2)
