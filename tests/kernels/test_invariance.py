# SPDX-License-Identifier: Apache-2.0
"""What must not change: results under packing, under changes of what a row may not see, and from run to run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import ALL_VISIBLE, PackedLayout, get_backend
from tests.kernels.cases import Case, chunk_elements, make_case

unfused = get_backend("unfused")
KINDS = ["sparse", "dense"]


def support_of(case: Case, kind: str, topk: int = 3) -> Any:
    return unfused.select(*case.index, case.layout, case.ratio, topk) if kind == "sparse" else ALL_VISIBLE


def step(case: Case, kind: str, topk: int = 3) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out, kl_sum, rows and all gradients of one training step of the layer."""
    case.require_grad()
    out, _, kl_sum, stats = unfused.attend_with_indexer_loss(*case.index, support_of(case, kind, topk), *case.attention, *case.tail)
    (out.square().sum() + kl_sum).backward()
    return out.detach(), kl_sum.detach(), stats.rows, [x.grad for x in case.leaves() if x.grad is not None]


def document(case: Case, n: int) -> Case:
    """Document n of the row as a row of its own."""
    a, b = case.layout.cu_seqlens.tolist()[n : n + 2]
    c, d = case.layout.compressed_cu_seqlens(case.ratio).tolist()[n : n + 2]
    token, entry = slice(a, b), slice(c, d)
    parts = [case.q[token], case.window_kv[token], case.compressed_kv[entry], case.sink]
    parts += [case.index_q[token], case.index_k[entry], case.index_w[token]]
    return Case((b - a,), PackedLayout.from_lengths([b - a]), *(case.ratio, case.window, case.scale), *(p.detach().clone() for p in parts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(20, 3, 40, 1), (16, 16, 16)])
def test_documents_packed_into_one_row_equal_rows_of_their_own(kind: str, lengths: tuple[int, ...]) -> None:
    """Outputs, KL, counts and gradients of 4 packed documents equal those of each alone; sums over rows add up."""
    case = make_case(lengths, padding=3, window=6, surplus=1)
    singles = [document(case, n) for n in range(len(lengths))]
    with chunk_elements(2000):
        out, kl_sum, rows, grads = step(case, kind)
    alone = [step(single, kind) for single in singles]
    torch.testing.assert_close(out[: sum(lengths)], torch.cat([a[0] for a in alone]), rtol=0, atol=1e-12)
    torch.testing.assert_close(kl_sum, sum((a[1] for a in alone), torch.zeros((), dtype=torch.float64)), rtol=0, atol=1e-11)
    assert int(rows) == sum(int(a[2]) for a in alone)
    for n, grad in enumerate(grads):
        joined = sum(a[3][n] for a in alone) if n == 3 else torch.cat([a[3][n] for a in alone])
        assert isinstance(joined, Tensor)
        torch.testing.assert_close(grad[: joined.shape[0]], joined, rtol=0, atol=1e-11)
        assert (grad[joined.shape[0] :] == 0).all()


def test_short_padding_documents_between_real_ones_change_nothing() -> None:
    """3 pad tokens between documents versus none, equal KL, rows and gradients."""
    plain = make_case([14, 9], window=5)
    a, b = slice(0, 14), slice(14, 23)

    def spread(x: Tensor) -> Tensor:
        return torch.cat([x[a], torch.full_like(x[:3], 7.0), x[b]]).detach().clone() if x.shape[0] == 23 else x.detach().clone()

    layout = PackedLayout.from_lengths([14, 3, 9])
    padded = Case((14, 3, 9), layout, 4, 5, plain.scale, *(spread(x) for x in (*plain.attention, *plain.index)))
    one, two = step(plain, "sparse"), step(padded, "sparse")
    torch.testing.assert_close(one[1], two[1], rtol=0, atol=1e-12)
    assert torch.equal(one[2], two[2])
    torch.testing.assert_close(torch.cat([two[0][a], two[0][17:]]), one[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(two[3][2], one[3][2], rtol=0, atol=1e-12)
    torch.testing.assert_close(two[3][5], one[3][5], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_leaks_from_behind_an_invalid_id_the_padding_or_another_document(kind: str, poison: float) -> None:
    """An unused slot reads nothing, not even times zero."""
    case = make_case([20, 23], padding=4, window=6, surplus=2, dtype=torch.float32)
    case.q[43:] = 1.0
    clean = step(case, kind)
    ids = support_of(case, kind)
    poisoned = Case(case.lengths, *case.tail, *(x.detach().clone() for x in (*case.attention, *case.index)))
    for per_token in (poisoned.q, poisoned.window_kv, poisoned.index_q, poisoned.index_w):
        per_token[43:] = poison  # padding
    for per_entry in (poisoned.compressed_kv, poisoned.index_k):
        per_entry[10:] = poison  # surplus
    dirty = step(poisoned, kind)
    for one, two in zip([*clean[:2], *clean[3]], [*dirty[:2], *dirty[3]], strict=True):
        assert torch.equal(one, two)
    # a whole document, in the forward: rows of the other stay bit-equal
    poisoned.window_kv.data[:20] = poison
    poisoned.compressed_kv.data[:5] = poison
    out, _ = unfused.attend(*poisoned.attention[:3], ids, poisoned.sink, *poisoned.tail)
    assert torch.equal(out[20:], clean[0][20:])
    assert torch.isnan(out[:20]).any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_that_is_not_finite_reaches_exactly_the_rows_that_read_it(kind: str) -> None:
    case = make_case([40], window=3, dtype=torch.float32)
    support = support_of(case, kind)
    case.compressed_kv[4] = math.nan
    case.window_kv[30] = math.inf
    out, _ = unfused.attend(*case.attention[:3], support, case.sink, *case.tail)
    reads = torch.arange(40) >= 19 if kind == "dense" else (support == 4).any(-1)
    reads |= (torch.arange(40) >= 30) & (torch.arange(40) < 33)
    assert torch.equal(torch.isnan(out).flatten(1).any(1), reads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_bit_equal_whatever_comes_later(kind: str) -> None:
    base = make_case([37, 20], window=6, dtype=torch.float32)
    out = unfused.attend(*base.attention[:3], support_of(base, kind), base.sink, *base.tail)[0]
    ids = unfused.select(*base.index, base.layout, 4, 3)
    for t in range(1, 37):
        entries = t // 4  # entry j is complete with token 4 j + 3
        changed = Case(base.lengths, *base.tail, *(x.clone() for x in (*base.attention, *base.index)))
        for per_token in (changed.q, changed.window_kv, changed.index_q, changed.index_w):
            per_token[t:] += 1
        for per_entry in (changed.compressed_kv, changed.index_k):
            per_entry[entries:] -= 2
        assert torch.equal(unfused.select(*changed.index, changed.layout, 4, 3)[:t], ids[:t])
        assert torch.equal(unfused.attend(*changed.attention[:3], support_of(changed, kind), changed.sink, *changed.tail)[0][:t], out[:t])


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_bit_equal_whatever_stands_before_it(kind: str) -> None:
    base, other = make_case([21, 30], window=6, dtype=torch.float32), make_case([21, 30], window=6, dtype=torch.float32, seed=1)
    for mine, foreign in zip((*base.attention, *base.index), (*other.attention, *other.index), strict=True):
        cut = 5 if mine.shape[0] == 12 else 21
        if mine.shape[0] > 3:
            foreign[cut:] = mine[cut:]
    other.sink.copy_(base.sink)
    ids = [support_of(case, "sparse") for case in (base, other)]
    assert torch.equal(ids[0][21:], ids[1][21:])
    outs = [unfused.attend(*case.attention[:3], support_of(case, kind), case.sink, *case.tail) for case in (base, other)]
    assert torch.equal(outs[0][0][21:], outs[1][0][21:])
    assert torch.equal(outs[0][1][21:], outs[1][1][21:])
    assert not torch.equal(outs[0][0][:21], outs[1][0][:21])


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_bit_equal(kind: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = []
        for _ in range(3):
            case = make_case([300, 212], window=16, heads=4, dim=16, index_dim=8, dtype=torch.float32)
            runs.append(step(case, kind, topk=16))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        for one, two in zip([*runs[0][:3], *runs[0][3]], [*other[:3], *other[3]], strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing_but_roundings(kind: str) -> None:
    results = []
    for elements in (1, 700, 5000, 1 << 21):
        case = make_case([50, 41], padding=1, window=20)
        with chunk_elements(elements):
            results.append(step(case, kind))
    for other in results[1:]:
        for one, two in zip([*results[0][:2], *results[0][3]], [*other[:2], *other[3]], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_numbers_with_activation_recomputation(kind: str) -> None:
    def layer(case: Case, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, window_kv, compressed_kv, sink, index_q, index_k, index_w = leaves
        support = unfused.select(index_q, index_k, index_w, case.layout, 4, 3) if kind == "sparse" else ALL_VISIBLE
        out, _, kl, _ = unfused.attend_with_indexer_loss(index_q, index_k, index_w, support, q, window_kv, compressed_kv, sink, *case.tail)
        return out, kl

    grads = []
    for recompute in (False, True):
        case = make_case([30, 9], window=5).require_grad()
        out, kl = checkpoint(layer, case, *case.leaves(), use_reentrant=False) if recompute else layer(case, *case.leaves())
        grads.append(torch.autograd.grad(out.square().sum() + kl, case.leaves()))
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)
