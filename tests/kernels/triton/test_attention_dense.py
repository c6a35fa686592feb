# SPDX-License-Identifier: Apache-2.0
"""The form whose rows share key tiles: where it is chosen, its agreement with the float64 oracle, and that nothing unreadable leaks within a tile."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton_fused import dense_attention
from kernels.triton_fused.attend_backward import attend_backward
from kernels.triton_fused.attend_forward import attend_forward
from tests.kernels.triton.test_attention import TOLERANCE, Problem, assert_agrees, distance, fill_new_memory_with_nan

# Tiles of 64 rows: 64 / heads queries, rounded down to a power of two. Documents that end within a tile, at its border, of 0 and 1 tokens, and
# shorter than the ratio; padding that fills a tile, shares one with the last document, or is alone behind a full one.
PACKED = [(3, 0, 1, 13, 0, 2, 1, 9), (8, 8, 16), (1,) * 15 + (5, 1), (31, 2)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the dense host functions that ran."""
    ran: list[str] = []

    def counted(function):
        def run(*args):
            ran.append(function.__name__)
            return function(*args)

        return run

    for function in (dense_attention.dense_forward, dense_attention.dense_backward):
        monkeypatch.setattr(dense_attention, function.__name__, counted(function))
    return ran


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> list[str]:
    """The form for every dtype and head count, so that it can be checked in float32."""
    monkeypatch.setattr(dense_attention, "prefers_dense", lambda *args: True)
    return launches


@pytest.mark.parametrize(
    ("heads", "dim", "topk", "dtype", "expected"),
    [
        (8, 64, None, torch.float16, True),
        (32, 128, None, torch.float16, True),
        (8, 64, 3, torch.float16, False),
        (33, 16, None, torch.float16, False),
        (2, 136, None, torch.float16, False),
        (8, 64, None, torch.float32, False),
    ],
)
def test_chosen_for_few_heads_without_ids(device, launches, heads: int, dim: int, topk: int | None, dtype: torch.dtype, expected: bool) -> None:
    problem = Problem((4,), heads, dim, topk, dtype=dtype, device=device)
    problem.run()
    assert launches == (["dense_forward", "dense_backward"] if expected else [])
    launches.clear()
    problem.selected = None if topk is None else problem.selected
    problem.run()
    assert bool(launches) == expected, "the window alone is shared as well"


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("lengths", PACKED)
def test_packed_documents_agree_with_float64(device, everywhere, lengths: tuple[int, ...], window: int) -> None:
    for padding, heads, ratio in ((0, 8, 4), (7, 12, 3)):
        assert_agrees(Problem(lengths, heads, 24, padding=padding, window=window, ratio=ratio, device=device), TOLERANCE[torch.float32])
    assert set(everywhere) == {"dense_forward", "dense_backward"}


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (20, 30), (64, 16)])
def test_head_counts_and_dims_agree_with_float64(device, everywhere, heads: int, dim: int) -> None:
    assert_agrees(Problem((9, 0, 1, 14), heads, dim, padding=3, device=device), TOLERANCE[torch.float32])


def test_several_tiles_of_keys_agree_with_float64(device, everywhere) -> None:
    """Entries and window reach over three tiles of 64, which begin at no document's border."""
    assert_agrees(Problem((37, 150), 3, 16, padding=2, ratio=1, window=75, device=device), TOLERANCE[torch.float32])


def test_window_alone_agrees_with_float64(device, everywhere) -> None:
    problem = Problem((2, 40), 4, 32, window=35, device=device)
    problem.selected = None
    assert_agrees(problem, TOLERANCE[torch.float32])


def test_low_precision_agrees_with_float64(device, launches) -> None:
    for dtype in (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16):
        assert_agrees(Problem((4, 0, 1, 29), 5, 32, padding=1, dtype=dtype, device=device), TOLERANCE[dtype])
    assert launches


def test_no_entry_at_all(device, everywhere) -> None:
    problem = Problem((3, 2), 2, 16, surplus=0, device=device)
    assert problem.compressed_kv.shape[0] == 0
    assert_agrees(problem, TOLERANCE[torch.float32])


def test_rows_without_a_key_give_zero(device, everywhere) -> None:
    """Window 0 and no visible entry: out 0, lse -inf, every gradient 0, whatever the sink is."""
    problem = Problem((6, 1), 3, 16, window=0, ratio=8, padding=2, device=device)
    problem.sink = torch.tensor([-math.inf, 0.0, math.inf], device=device)
    (out, lse), gradients = problem.run()
    assert torch.isneginf(lse).all()
    for tensor in (out, *gradients[:4]):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_extreme_sinks_and_logits(device, everywhere) -> None:
    problem = Problem((12, 9), 6, 16, device=device)
    problem.sink = torch.tensor([math.inf, -math.inf, 1e4, -1e4, 200.0, -200.0], device=device)
    (out, lse), gradients = problem.run()
    result, expected = problem.oracle()
    assert distance(out, result.out) < 3e-6
    assert distance(lse, result.lse) < 3e-6
    for actual, wanted in zip(gradients[:3], expected[:3], strict=True):
        assert distance(actual, torch.nan_to_num(wanted)) < 1e-5
    problem.sink = torch.zeros(6, device=device)
    problem.q = problem.q * 100
    assert_agrees(problem, 1e-4)


def test_results_do_not_depend_on_what_memory_held(device, everywhere, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem((4, 0, 1, 7), 5, 96, padding=2, device=device)
    expected = problem.run()
    fill_new_memory_with_nan(monkeypatch)
    actual = problem.run()
    for a, b in zip((*actual[0], *actual[1][:4]), (*expected[0], *expected[1][:4]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_same(device: str, actual, expected) -> None:
    """Bit-equal; on a GPU the gradients of the keys add up in any order."""
    (out, lse), (dq, d_window, d_entries, d_sink, _) = actual
    (out2, lse2), (dq2, d_window2, d_entries2, d_sink2, _) = expected
    for a, b in ((out, out2), (lse, lse2), (dq, dq2), (d_sink, d_sink2)):
        assert torch.equal(a, b)
    for a, b in ((d_window, d_window2), (d_entries, d_entries2)):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b) if device == "cpu" else torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize(("lengths", "padding", "window"), [((13, 0, 5), 3, 5), ((13, 0, 1, 8), 9, 0), ((5, 11), 16, 20)])
def test_padding_and_surplus_entries_do_not_leak_within_a_tile(device, everywhere, lengths, padding: int, window: int, garbage: float) -> None:
    """0 times NaN is NaN: padding rows share their tile with the last document, surplus entries theirs with the last real ones."""
    problem = Problem(lengths, 8, 16, padding=padding, window=window, device=device)
    clean = problem.run()
    problem.q[-padding:] = problem.window_kv[-padding:] = problem.grad_out[-padding:] = problem.compressed_kv[-2:] = garbage
    dirty = problem.run()
    assert_same(device, dirty, clean)
    for tensor in (dirty[0][0], dirty[1][0], dirty[1][1]):
        assert not tensor[-padding:].any(), "out and the gradients of padding are 0"


def test_rows_without_a_key_between_documents_do_not_leak(device, everywhere) -> None:
    """Window 0: the first rows of a document see no entry and share a tile with the rows before and behind them; no token is read at all."""
    problem = Problem((6, 5, 7), 4, 16, window=0, device=device)
    clean = problem.run()
    empty = torch.isneginf(clean[0][1]).all(1)
    assert empty.tolist() == [position < 3 for length in problem.lengths for position in range(length)]
    problem.window_kv[:] = math.nan
    problem.q[empty] = math.nan
    problem.grad_out[empty] = math.inf
    assert_same(device, problem.run(), clean)


def test_keys_around_a_slice_of_rows_do_not_leak(device, everywhere) -> None:
    """Rows [10, 17) of two documents: what precedes their window and their document, and what follows their last token, is not read."""
    problem = Problem((9, 4, 13), 8, 16, padding=1, window=3, device=device)
    rows = slice(10, 17)
    where = (problem.host_layout.query_slice(10, 17).to(device), problem.ratio, problem.window, problem.scale)

    def run():
        inputs = (problem.q[rows], problem.window_kv, problem.compressed_kv, problem.selected, problem.sink)
        out, lse = attend_forward(*inputs, *where)
        return (out, lse), attend_backward(problem.grad_out[rows], *inputs, out, lse, *where)

    clean = run()
    whole = problem.run()[0]
    torch.testing.assert_close(clean[0][0], whole[0][rows])
    torch.testing.assert_close(clean[0][1], whole[1][rows])
    problem.window_kv[:9] = problem.window_kv[17:] = math.nan  # row 10 is the second of its document, which begins at 9
    problem.compressed_kv[:2] = problem.compressed_kv[4:] = math.nan  # 2 entries of the first document, 1 of the second, 1 visible to row 16
    assert_same(device, run(), clean)


def test_deterministic_mode_takes_the_deterministic_kernels(device, launches) -> None:
    """The additions of the dense backward have no fixed order."""
    problem = Problem((4, 0, 1, 29), 8, 32, padding=1, dtype=torch.float16, device=device)
    assert_agrees(problem, TOLERANCE[torch.float16], deterministic=True)
    assert set(launches) == {"dense_forward"}
    first = problem.run(deterministic=True)[1]
    for _ in range(2):
        for a, b in zip(problem.run(deterministic=True)[1][:4], first[:4], strict=True):
            assert torch.equal(a, b)
