# SPDX-License-Identifier: Apache-2.0
"""The backward for SM90 on a GPU: items that follow one another in one program, extreme sinks, slices of rows, repetition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import PackedLayout

pytest.importorskip("triton")

from kernels.triton_fused.attend_backward import attend_backward_rows
from kernels.triton_fused.attend_forward import attend_forward_rows, use_hopper
from kernels.triton_fused.rows import RowBounds

SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SM90, reason="no GPU of compute capability 9.0")]

DIM, WINDOW, RATIO, SCALE = 512, 128, 4, 512**-0.5


class Rows:
    """Random operands for documents of these lengths; ids with holes wherever a draw fell beyond the visible entries."""

    def __init__(self, lengths, heads: int, topk: int | None, *, padding: int = 0) -> None:
        draw = torch.Generator("cuda").manual_seed(1)
        layout = PackedLayout.from_lengths(lengths, sum(lengths) + padding, device="cuda")
        self.bounds, self.real = RowBounds.of(layout, RATIO, WINDOW, True), sum(lengths)
        tokens, entries = layout.num_tokens, max(1, layout.num_compressed(RATIO))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device="cuda").to(torch.bfloat16)

        self.q, self.grad_out, self.window_kv = normal(tokens, heads, DIM), normal(tokens, heads, DIM), normal(tokens, DIM)
        self.compressed_kv, self.sink = normal(entries, DIM), torch.randn(heads, generator=draw, device="cuda") + 3
        self.selected = None
        if topk is not None:
            start, visible = self.bounds.entry_start[:, None], self.bounds.visible[:, None]
            drawn = torch.rand(tokens, max(topk, entries), generator=draw, device="cuda").argsort(-1)[:, :topk]
            self.selected = torch.where(drawn < visible, start + drawn, -1).to(torch.int32).contiguous()

    def run(self, first: int = 0, stop: int | None = None, **options):
        """(out, lse), (dq, d_window_kv, d_compressed_kv, d_sink, teacher) of the rows first to stop."""
        part = slice(first, stop)
        bounds = RowBounds(self.bounds.window_start[part], self.bounds.entry_start[part], self.bounds.visible[part], first, WINDOW)
        q, selected = self.q[part], None if self.selected is None else self.selected[part]
        assert use_hopper(q)
        out, lse = attend_forward_rows(q, self.window_kv, self.compressed_kv, selected, self.sink, bounds, SCALE)
        operands = (self.grad_out[part], q, self.window_kv, self.compressed_kv, selected, self.sink, out, lse, bounds, SCALE)
        return (out, lse), attend_backward_rows(*operands, emit_teacher=True, **options)


def distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    assert torch.isfinite(actual).all()
    return float((actual - expected).norm()) / max(float(expected.norm()), 1e-30)


def sink_gradient(rows: Rows, out: Tensor, lse: Tensor) -> Tensor:
    """fp64 [H] from the kernel's own out and lse."""
    sink = rows.sink.double()[None].expand(lse.shape)
    share = torch.exp(sink - torch.logaddexp(lse.double(), sink))
    delta = (out[: rows.real].double() * rows.grad_out[: rows.real].double()).sum(-1)
    return -(share[: rows.real] * delta).sum(0)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(
    ("lengths", "topk", "padding"),
    [
        ((1,), 64, 0),  # one item or two in the whole launch
        ((131,), 64, 0),  # one item per program and less
        ((133, 0, 1, 7), 64, 5),  # some programs have two items
        ((700, 0, 1, 290), 512, 9),  # several items, from one tile to ten
        ((700, 290), None, 9),  # all visible entries: as many tiles as there are
    ],
)
def test_agrees_with_the_portable_kernels(heads: int, lengths, topk: int | None, padding: int) -> None:
    rows = Rows(lengths, heads, topk, padding=padding)
    (out, lse), (dq, d_window, d_entries, d_sink, teacher) = rows.run()
    _, expected = rows.run(deterministic=True)
    assert distance(d_sink, sink_gradient(rows, out, lse)) < 5e-6
    for actual, wanted in zip((dq, d_window, d_entries), expected[:3], strict=True):
        assert distance(actual, wanted) < 6e-3
    assert distance(d_sink, expected[3]) < 5e-6
    if teacher is not None:
        assert distance(teacher, expected[4]) < 1e-5


@pytest.mark.parametrize("heads", [64, 128])
def test_sinks_beyond_all_measure_and_padding_of_nan(heads: int) -> None:
    rows = Rows((301, 2), heads, 64, padding=6)
    rows.sink[:6] = torch.tensor([math.inf, -math.inf, 1e4, -1e4, 200.0, -200.0], device="cuda")
    _, before = rows.run()
    rows.grad_out[rows.real :] = math.nan
    (out, lse), (dq, d_window, d_entries, d_sink, _) = rows.run()
    assert not out[:, 0].any(), "nothing is left beside an infinite sink"
    assert not d_sink[:2].any()
    assert torch.equal(d_sink, before[3])
    assert torch.equal(dq[: rows.real], before[0][: rows.real])
    finite = torch.isfinite(rows.sink)
    assert distance(d_sink[finite], sink_gradient(rows, out, lse)[finite]) < 5e-6
    for tensor in (dq[: rows.real], d_window, d_entries):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("heads", [64, 128])
def test_a_slice_of_rows_gives_what_the_whole_gives(heads: int) -> None:
    """Every row by itself has the same bits, whichever program it falls to and whatever comes before it."""
    rows = Rows((520, 77), heads, 96)
    (out, lse), (dq, _, _, d_sink, teacher) = rows.run()
    parts = [rows.run(0, 211), rows.run(211, None)]
    assert torch.equal(torch.cat([part[0][0] for part in parts]), out)
    assert torch.equal(torch.cat([part[0][1] for part in parts]), lse)
    assert torch.equal(torch.cat([part[1][0] for part in parts]), dq)
    assert torch.equal(torch.cat([part[1][4] for part in parts]), teacher)
    assert distance(sum(part[1][3] for part in parts), d_sink) < 5e-6


@pytest.mark.parametrize(("heads", "topk"), [(64, 512), (64, None), (128, 512)])
def test_repeats_bit_for_bit_but_for_the_keys(heads: int, topk: int | None) -> None:
    rows = Rows((2560,), heads, topk)
    _, (dq, _, _, d_sink, teacher) = rows.run()
    for _ in range(8):
        _, (dq2, _, _, d_sink2, teacher2) = rows.run()
        assert torch.equal(dq2, dq)
        assert torch.equal(d_sink2, d_sink)
        assert topk is None or torch.equal(teacher2, teacher)
