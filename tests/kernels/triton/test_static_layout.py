# SPDX-License-Identifier: Apache-2.0
"""Rows whose documents the device alone knows: ids, outputs and gradients are those of the exact layout, whatever stands in entries of nobody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.csa_gate_cases import Inputs, random_inputs
from benchmarks.csa_gate_checks import GRADIENTS, norm_error, poisoned_outputs, train_once
from kernels import ALL_VISIBLE, PackedLayout, StaticLayout, get_backend
from kernels.triton_fused import dense_attention

# Sums over the rows that read a key may come in another order, and are rounded to the dtype; all else is the same arithmetic on the same numbers.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3}
SUMMED = ("d_window_kv", "d_compressed_kv", "d_index_k")
ENTRIES = ("compressed_kv", "index_k")
GARBAGE = {torch.float32: 1e30, torch.float16: 3e4}  # finite, and beyond all that stands elsewhere

# one document; several, of which some are shorter than the ratio, empty or of one token, and padding behind; nothing that has an entry
ROWS: dict[str, tuple[tuple[int, ...], int]] = {
    "one": ((18,), 0),
    "packed": ((13, 0, 3, 1, 6, 2), 3),
    "no entry": ((3, 3, 1), 2),
}


def pair(row: str, ratio: int, device: str, *, heads: int = 3, dtype: torch.dtype = torch.float32, **sizes: Any) -> tuple[Inputs, Inputs]:
    """The same numbers on the exact layout and on a StaticLayout, whose C = T // ratio entries end with large ones that belong to nobody."""
    lengths, padding = ROWS[row]
    options = {"head_dim": 16, "indexer": (2, 16), "topk": 3, "window": 4, **sizes}
    exact = random_inputs(list(lengths), sum(lengths) + padding, heads, ratio=ratio, dtype=dtype, device=device, seed=5, **options)
    tokens = exact.layout.num_tokens
    layout = StaticLayout(tokens, len(lengths) + 3, tokens, device)
    assert layout.longest_document() >= exact.layout.longest_document()
    # another row first: nothing of it may be left
    layout.load(PackedLayout.from_lengths((1, tokens - 1), tokens, device=device))
    layout.entry_start(ratio), layout.visible_compressed(ratio), layout.window_start(exact.window)
    layout.load(exact.layout)
    static = dataclasses.replace(exact, layout=layout)
    for name in ENTRIES:
        entries = getattr(exact, name)
        nobody = torch.full((tokens // ratio - entries.shape[0], entries.shape[1]), GARBAGE[dtype], dtype=dtype, device=device)
        nobody[:, ::2] *= -1
        setattr(static, name, torch.cat([entries, nobody]))
    return exact, static


def assert_same(exact: dict[str, Tensor], static: dict[str, Tensor], dtype: torch.dtype, layout: PackedLayout, ratio: int) -> None:
    """Equal within the order of sums; entries of nobody have a gradient of exactly 0."""
    assert exact.keys() == static.keys()
    for name, wanted in exact.items():
        got = static[name]
        if name.removeprefix("d_") in ENTRIES:
            entries = layout.num_compressed(ratio)
            assert (got[entries:] == 0).all(), f"{name} of nobody"
            got = got[:entries]
        assert got.shape == wanted.shape
        assert torch.isfinite(got[torch.isfinite(wanted)]).all(), name
        if name in SUMMED:
            assert norm_error(got, wanted) <= TOLERANCE[dtype], name
        else:
            assert torch.equal(got, wanted), name


def attended(x: Inputs, selected: Any, entries: bool = True) -> dict[str, Tensor]:
    """out, lse and the gradients of an attention."""
    leaves = {name: getattr(x, name).detach().clone().requires_grad_() for name in GRADIENTS[:4]}
    operands = (leaves["q"], leaves["window_kv"], leaves["compressed_kv"] if entries else None, selected, leaves["sink"])
    with poisoned_outputs():
        out, lse = get_backend("triton").attend(*operands, x.layout, x.ratio, x.window, x.scale)
        out.backward(x.grad_out)
    gradients = {f"d_{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"out": out.detach(), "lse": lse} | gradients


def disturbed(exact: Inputs, topk: int = 8) -> Tensor:
    """Ids in any order with holes, and between them ids of other documents, of the future and of entries that belong to nobody."""
    generator = torch.Generator().manual_seed(1)
    tokens = exact.layout.num_tokens
    pool = max(tokens // exact.ratio + 2, topk)
    ids = torch.stack([torch.randperm(pool, generator=generator)[:topk] - 1 for _ in range(tokens)]).int()
    return ids.to(exact.layout.device)


@pytest.mark.parametrize(("topk", "learns"), [(0, True), (1, False), (3, True), (3, False), (40, True)])
@pytest.mark.parametrize("row", ROWS)
def test_selection_gives_the_same_ids(device: str, row: str, topk: int, learns: bool) -> None:
    exact, static = pair(row, 4, device)
    chosen = []
    for x in (exact, static):
        backend = get_backend("triton")
        index = [t.clone().requires_grad_(learns) for t in (x.index_q, x.index_k, x.index_w)]
        with poisoned_outputs():
            ids = backend.select(*index, x.layout, x.ratio, topk)
        scores = backend._known_scores(ids, *index)  # type: ignore[attr-defined]
        chosen.append((ids, scores))
    assert torch.equal(chosen[0][0], chosen[1][0])
    assert (chosen[0][0] < exact.index_k.shape[0]).all()
    assert (chosen[0][1] is not None) == (chosen[1][1] is not None) == learns
    if learns:
        present = chosen[0][0] >= 0
        assert torch.equal(chosen[0][1][present], chosen[1][1][present])


def test_a_bound_far_beyond_the_longest_document_selects_the_same(device: str) -> None:
    """The bound decides how many parts a row is searched in, and how wide the buffer is."""
    lengths, tokens = (20, 3, 13), 2400
    exact = random_inputs(list(lengths), tokens, 1, 16, (1, 16), 4, 4, 2, torch.float32, device, 5)
    ids = []
    for longest in (20, 2400):
        layout = StaticLayout(tokens, 3, longest, device)
        layout.load(exact.layout)
        index_k = torch.cat([exact.index_k, torch.full((tokens // 2 - exact.index_k.shape[0], 16), GARBAGE[torch.float32], device=device)])
        rows = slice(0, 38)  # the rest is padding
        layout_of_rows = layout.query_slice(0, 38)
        ids.append(get_backend("triton").select(exact.index_q[rows], index_k, exact.index_w[rows], layout_of_rows, 2, 4))
    wanted = get_backend("triton").select(exact.index_q[:38], exact.index_k, exact.index_w[:38], exact.layout.query_slice(0, 38), 2, 4)
    assert all(torch.equal(got, wanted) for got in ids)


@pytest.mark.parametrize("reads", ["selected", "all visible", "no entry", "no entries at all"])
@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("row", ROWS)
def test_attention_and_its_gradients_are_the_same(device: str, row: str, ratio: int, reads: str) -> None:
    exact, static = pair(row, ratio, device)
    selected = {"selected": disturbed(exact), "all visible": ALL_VISIBLE}.get(reads)
    results = [attended(x, selected, reads != "no entries at all") for x in (exact, static)]
    assert_same(*results, torch.float32, exact.layout, ratio)


def test_attention_at_ratio_128(device: str) -> None:
    """Documents shorter than the ratio among longer ones; most of the room for entries is filled by the tokens of no window."""
    lengths = (130, 0, 100, 128)
    exact = random_inputs(list(lengths), 520, 2, 16, (1, 16), 2, 4, 128, torch.float32, device, 2)
    layout = StaticLayout(520, 8, 400, device)
    layout.load(exact.layout)
    static = dataclasses.replace(exact, layout=layout)
    static.compressed_kv = torch.cat([exact.compressed_kv, torch.full((2, 16), GARBAGE[torch.float32], device=device)])
    rows = (124, 132), (354, 362)  # where the first entry of a document comes into sight
    for first, last in rows:
        results = []
        for x in (exact, static):
            part = {name: getattr(x, name)[first:last] for name in ("q", "grad_out")}
            results.append(attended(dataclasses.replace(x, layout=x.layout.query_slice(first, last), **part), ALL_VISIBLE))
        assert_same(*results, torch.float32, exact.layout, 128)
        assert (results[0]["d_compressed_kv"] != 0).any()


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("heads", [2, 12])
def test_few_heads_share_the_keys_of_their_rows(device: str, monkeypatch: pytest.MonkeyPatch, heads: int, row: str, ratio: int) -> None:
    ran = []
    for name in ("dense_forward", "dense_backward"):
        function = getattr(dense_attention, name)
        monkeypatch.setattr(dense_attention, name, lambda *a, function=function: (ran.append(function.__name__), function(*a))[1])
    exact, static = pair(row, ratio, device, heads=heads, dtype=torch.float16)
    for selected in (ALL_VISIBLE, None):
        ran.clear()
        results = [attended(x, selected) for x in (exact, static)]
        assert ran == ["dense_forward", "dense_backward"] * 2
        assert_same(*results, torch.float16, exact.layout, ratio)


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
@pytest.mark.parametrize("ids", ["selected", "disturbed", "all visible"])
@pytest.mark.parametrize("row", ["packed", "no entry"])
def test_a_training_step_is_the_same(device: str, row: str, ids: str, teacher: str) -> None:
    exact, static = pair(row, 4, device)
    results = []
    for x in (exact, static):
        backend, leaves = get_backend("triton"), x.leaves()
        x.selected = {"all visible": ALL_VISIBLE, "disturbed": disturbed(exact)}.get(ids)
        with poisoned_outputs():
            if x.selected is None:  # as a layer does it: the scores of the selection are used again
                x.selected = backend.select(*(leaves[name] for name in GRADIENTS[4:]), x.layout, x.ratio, x.topk)
            results.append(train_once(backend, x, leaves, teacher))
    assert_same(*results, torch.float32, exact.layout, 4)
    if row != "no entry":
        assert results[0]["kl"] > 0


@pytest.mark.parametrize("ids", ["selected", "all visible"])
def test_deterministic_sums_are_the_same_bits(device: str, ids: str) -> None:
    """The unit of the integer sums may not follow what stands in entries of nobody."""
    exact, static = pair("packed", 4, device)
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for x in (exact, static):
            x.selected = ALL_VISIBLE if ids == "all visible" else disturbed(exact)
            results.append(train_once(get_backend("triton"), x, x.leaves(), "full_csa"))
    finally:
        torch.use_deterministic_algorithms(False)
    entries = exact.index_k.shape[0]
    for name, wanted in results[0].items():
        if ids == "all visible" and name == "d_index_k":
            assert norm_error(results[1][name][:entries], wanted) <= TOLERANCE[torch.float32]  # as many partial sums as there are tiles of entries
            continue
        assert torch.equal(results[1][name][:entries] if name.removeprefix("d_") in ENTRIES else results[1][name], wanted), name


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
@pytest.mark.parametrize("support", ["sparse", "dense"])
@pytest.mark.parametrize("row", ROWS)
def test_the_loss_alone_is_the_same(device: str, row: str, support: str, teacher: str) -> None:
    exact, static = pair(row, 4, device)
    results = []
    for x in (exact, static):
        leaves = x.leaves()
        index = [leaves[name] for name in ("index_q", "index_k", "index_w")]
        ids = ALL_VISIBLE if support == "dense" else disturbed(exact)
        operands = (ids, x.q, x.window_kv, x.compressed_kv, x.sink, None, x.layout, x.ratio, x.window, x.scale)
        with poisoned_outputs():
            kl, rows = get_backend("triton").indexer_loss(*index, *operands, teacher)
            (0.3 * kl).backward()
        gradients = {f"d_{name}": leaves[name].grad for name in ("index_q", "index_k", "index_w")}
        results.append({"kl": kl.detach(), "rows": rows, **gradients})
    assert_same(*results, torch.float32, exact.layout, 4)
    assert int(results[1]["rows"]) == exact.layout.num_query_rows(4)


def test_a_slice_of_queries_trains_the_same(device: str) -> None:
    exact, static = pair("packed", 4, device)
    results = []
    for x in (exact, static):
        rows = {name: getattr(x, name)[5:16] for name in ("q", "index_q", "index_w", "grad_out")}
        part = dataclasses.replace(x, layout=x.layout.query_slice(5, 16), **rows)
        part.selected = disturbed(exact)[5:16]
        results.append(train_once(get_backend("triton"), part, part.leaves(), "full_csa"))
    assert_same(*results, torch.float32, exact.layout, 4)


def test_the_query_rows_are_counted_for_the_documents_that_are_loaded(device: str) -> None:
    """A layout is loaded anew for every row: the count that a backend keeps for one may not be that of the row before."""
    _, static = pair("packed", 4, device)
    backend = get_backend("triton")
    layout = static.layout
    assert isinstance(layout, StaticLayout)
    for lengths in ((13, 0, 3, 1, 6, 2), (4, 20), (24,)):
        row = PackedLayout.from_lengths(lengths, layout.num_tokens, device=device)
        layout.load(row)
        loaded = layout.renewed()
        operands = (static.q, static.window_kv, static.compressed_kv, static.sink, None, loaded, 4, 4, static.scale)
        _, rows = backend.indexer_loss(static.index_q, static.index_k, static.index_w, ALL_VISIBLE, *operands)
        assert int(rows) == row.num_query_rows(4)
