# SPDX-License-Identifier: Apache-2.0
"""Attention in Triton against the float64 oracle: outputs, every gradient, and the teacher that the backward emits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import ALL_VISIBLE, PackedLayout
from tests.kernels.oracle import OracleResult, masks, oracle_layer

pytest.importorskip("triton")

from kernels.triton_fused import attend_forward as forward_module
from kernels.triton_fused import portable_backward as backward_module
from kernels.triton_fused.attend_backward import attend_backward
from kernels.triton_fused.attend_forward import attend_forward
from kernels.triton_fused.rows import RowBounds, RowPlan

# The largest |difference| / |reference| in 2-norms. float32: some dozen roundings of 6e-8. Below it: P and dS are rounded before their products.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
RATIO, WINDOW = 4, 5


class Problem:
    """Random inputs on a device for documents of these lengths."""

    def __init__(
        self, lengths, heads, dim, topk=None, *, padding=0, ratio=RATIO, window=WINDOW, dtype=torch.float32, device="cpu", seed=0, surplus=2
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths, self.ratio, self.window, self.scale = tuple(lengths), ratio, window, dim**-0.5
        self.host_layout = PackedLayout.from_lengths(lengths, sum(lengths) + padding)
        self.layout = self.host_layout.to(device)
        tokens, entries = self.layout.num_tokens, self.layout.num_compressed(ratio) + surplus

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype).to(device)

        self.q, self.window_kv, self.compressed_kv = normal(tokens, heads, dim), normal(tokens, dim), normal(entries, dim)
        self.grad_out, self.sink = normal(tokens, heads, dim), torch.randn(heads, generator=draw).to(device)
        self.selected: Tensor | object | None = ALL_VISIBLE
        if topk is not None:
            # distinct ids in any order: visible ones, ones of other documents and of the future, and ones outside [0, C) on both sides
            pool = max(entries + 4, topk)
            ids = torch.stack([torch.randperm(pool, generator=draw)[:topk] - 2 for _ in range(tokens)]) if tokens else torch.zeros(0, topk)
            self.selected = ids.to(torch.int32).to(device)

    def run(self, **options) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
        where = (self.layout, self.ratio, self.window, self.scale)
        inputs = (self.q, self.window_kv, self.compressed_kv, self.selected, self.sink)
        out, lse = attend_forward(*inputs, *where)
        return (out, lse), attend_backward(self.grad_out, *inputs, out, lse, *where, **options)

    def oracle(self) -> tuple[OracleResult, tuple[Tensor, ...]]:
        leaves = [t.detach().cpu().double().requires_grad_() for t in (self.q, self.window_kv, self.compressed_kv, self.sink)]
        selected = self.selected.cpu() if isinstance(self.selected, Tensor) else self.selected
        result = oracle_layer(*leaves[:3], selected, leaves[3], self.lengths, self.ratio, self.window, self.scale)
        gradients = torch.autograd.grad(result.out, leaves, self.grad_out.cpu().double(), allow_unused=True, materialize_grads=True)
        return result, gradients

    def head_sums(self, lse: Tensor) -> Tensor:
        """[T, K] sum over heads of the probabilities of the selected entries, in float64; 0 where an id is invalid."""
        assert isinstance(self.selected, Tensor)
        ids = self.selected.cpu().long()
        entries = self.compressed_kv.shape[0]
        _, visible = masks(self.lengths, self.layout.num_tokens, entries, self.ratio, self.window)
        inside = (ids >= 0) & (ids < entries)
        valid = inside & visible.gather(1, ids.clamp(0, entries - 1))
        logits = torch.einsum("thd,tkd->thk", self.q.cpu().double(), self.compressed_kv.cpu().double()[ids.clamp(0, entries - 1)]) * self.scale
        total = torch.logaddexp(lse, self.sink.cpu().double()[None])[..., None]
        p = torch.where(torch.isfinite(total), torch.exp(logits - total), 0)
        return torch.where(valid[:, None], p, 0).sum(1)


def distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach().double()
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all(), "not finite"
    norm, difference = float(expected.norm()), float((actual - expected).norm())
    return difference / norm if norm > 1e-30 else difference


def assert_agrees(problem: Problem, tolerance: float, **options) -> None:
    (out, lse), (dq, d_window, d_entries, d_sink, teacher) = problem.run(emit_teacher=True, **options)
    result, gradients = problem.oracle()
    expected_lse = result.lse.detach()
    assert torch.equal(torch.isneginf(lse.cpu()), torch.isneginf(expected_lse)), "rows without keys have lse -inf, and no others"
    finite = torch.isfinite(expected_lse)
    assert distance(torch.where(finite, lse.cpu(), 0), torch.where(finite, expected_lse, 0)) < tolerance
    assert distance(out, result.out) < tolerance, "out"
    for name, actual, expected in zip(("dq", "d_window_kv", "d_compressed_kv", "d_sink"), (dq, d_window, d_entries, d_sink), gradients, strict=True):
        assert distance(actual, expected) < tolerance, name
    if isinstance(problem.selected, Tensor):
        assert teacher is not None
        assert distance(teacher, problem.head_sums(expected_lse)) < tolerance, "teacher"
    else:
        assert teacher is None


# heads beside a power of two, a head dim of each padded kind; documents: one, several with an empty and a 1-token one and padding behind them
@pytest.mark.parametrize(
    ("lengths", "padding", "heads", "dim", "topk"),
    [
        ((23,), 0, 1, 16, 3),
        ((9, 0, 1, 14), 3, 8, 64, 9),
        ((9, 0, 1, 14), 0, 12, 96, 40),
        ((6, 7), 2, 20, 32, 6),
        ((5, 11), 1, 3, 192, 4),
    ],
)
def test_selected_entries_agree_with_float64(device, lengths, padding, heads, dim, topk) -> None:
    """Ids in any order, with holes, of other documents, of the future and out of range; fewer and more slots than visible entries."""
    assert_agrees(Problem(lengths, heads, dim, topk, padding=padding, device=device), TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [0, 5])
def test_all_visible_entries_agree_with_float64(device, window: int) -> None:
    problem = Problem((2, 17, 5), 4, 32, None, padding=2, window=window, ratio=3, device=device)
    assert_agrees(problem, TOLERANCE[torch.float32])


def test_window_alone_agrees_with_float64(device) -> None:
    problem = Problem((2, 40), 4, 32, None, window=35, device=device)
    problem.selected = None
    assert_agrees(problem, TOLERANCE[torch.float32])


def test_no_entry_at_all_gives_zero_gradients(device) -> None:
    problem = Problem((3, 2), 2, 16, 4, surplus=0, device=device)
    assert problem.compressed_kv.shape[0] == 0
    (out, _), (dq, _, d_entries, _, teacher) = problem.run(emit_teacher=True)
    assert torch.isfinite(out).all()
    assert torch.isfinite(dq).all()
    assert d_entries is not None
    assert d_entries.shape == (0, 16)
    assert teacher is not None
    assert not teacher.any()


def test_rows_without_a_key_give_zero(device) -> None:
    """Window 0 and no valid id: out 0, lse -inf, every gradient 0, whatever the sink is."""
    problem = Problem((6,), 3, 16, 4, window=0, device=device)
    problem.selected = torch.full((6, 4), -1, dtype=torch.int32, device=device)
    problem.sink = torch.tensor([-math.inf, 0.0, math.inf], device=device)
    (out, lse), gradients = problem.run(emit_teacher=True)
    assert torch.isneginf(lse).all()
    for tensor in (out, *gradients):
        assert tensor is not None
        assert not tensor.any()
        assert torch.isfinite(tensor).all()


def test_padding_does_not_reach_the_gradient_of_the_sink(device) -> None:
    problem = Problem((7,), 3, 16, 4, padding=4, device=device)
    expected = problem.run()[1]
    problem.grad_out[7:] = math.nan
    for actual, wanted in zip(problem.run()[1][1:4], expected[1:4], strict=True):
        assert torch.equal(actual, wanted)


def test_extreme_sinks_and_logits(device) -> None:
    """Sinks of +-inf, +-1e4 and +-200; logits of some hundred."""
    problem = Problem((12, 9), 6, 16, 5, device=device)
    problem.sink = torch.tensor([math.inf, -math.inf, 1e4, -1e4, 200.0, -200.0], device=device)
    (out, lse), gradients = problem.run(emit_teacher=True)
    result, expected = problem.oracle()
    assert distance(out, result.out) < 3e-6
    assert distance(lse, result.lse) < 3e-6
    for actual, wanted in zip(gradients[:3], expected[:3], strict=True):
        assert actual is not None
        assert distance(actual, torch.nan_to_num(wanted)) < 1e-5
    assert not gradients[3][0].any(), "an infinite sink has no gradient"
    problem.sink = torch.zeros(6, device=device)
    problem.q = problem.q * 100
    assert_agrees(problem, 1e-4)


def fill_new_memory_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(empty):
        def fill(*args, **kwargs):
            tensor = empty(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(-(2**31) + 1)

        return fill

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def test_results_do_not_depend_on_what_memory_held(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of every result is written: buffers that start as NaN leave none behind."""
    problem = Problem((4, 0, 1, 7), 5, 96, 6, padding=2, device=device)
    expected = problem.run(emit_teacher=True)
    fill_new_memory_with_nan(monkeypatch)
    actual = problem.run(emit_teacher=True)
    for a, b in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rows_of_a_slice_equal_those_of_the_whole(device) -> None:
    """Query rows [5, 17) against the keys of the whole row: the same rows of out, and gradients that add up to the whole."""
    problem = Problem((9, 0, 1, 10), 4, 32, 6, device=device)
    where = (problem.ratio, problem.window, problem.scale)
    (out, _), whole = problem.run(emit_teacher=True)
    rows = problem.layout.num_tokens
    parts = []
    for start, stop in ((0, 5), (5, 17), (17, rows)):
        layout = problem.host_layout.query_slice(start, stop).to(device)
        assert isinstance(problem.selected, Tensor)
        inputs = (problem.q[start:stop], problem.window_kv, problem.compressed_kv, problem.selected[start:stop], problem.sink)
        part_out, part_lse = attend_forward(*inputs, layout, *where)
        torch.testing.assert_close(part_out, out[start:stop])
        parts.append(attend_backward(problem.grad_out[start:stop], *inputs, part_out, part_lse, layout, *where, emit_teacher=True))
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), whole[0])
    torch.testing.assert_close(torch.cat([p[4] for p in parts]), whole[4])
    for i in (1, 2, 3):
        torch.testing.assert_close(sum(p[i] for p in parts), whole[i], rtol=1e-5, atol=1e-5)


def test_many_queries_on_the_same_entries_add_up(device) -> None:
    """64 identical queries choose the same 8 entries: a gradient that loses an addition shows."""
    problem = Problem((64,), 1, 16, 8, ratio=1, window=1, device=device)
    problem.q = problem.q[:1].expand(64, -1, -1).contiguous()
    problem.grad_out = problem.grad_out[:1].expand(64, -1, -1).contiguous()
    problem.selected = torch.arange(8, dtype=torch.int32, device=device).expand(64, 8).contiguous()
    assert_agrees(problem, TOLERANCE[torch.float32])


def test_deterministic_form_agrees_and_repeats(device) -> None:
    """Bit-equal from run to run, and as exact as the fp32 additions."""
    problem = Problem((4, 0, 1, 9), 5, 32, 6, padding=1, device=device)
    assert_agrees(problem, TOLERANCE[torch.float32], deterministic=True)
    first = problem.run(emit_teacher=True, deterministic=True)[1]
    for _ in range(1 if device == "cpu" else 5):
        for a, b in zip(problem.run(emit_teacher=True, deterministic=True)[1], first, strict=True):
            assert torch.equal(a, b)


def test_deterministic_form_shows_inputs_that_are_not_finite(device) -> None:
    """Integers have no NaN; the gradients of the keys must not look healthy."""
    problem = Problem((8,), 2, 16, 4, device=device)
    problem.grad_out[3, 1, 2] = math.nan
    d_window = problem.run(deterministic=True)[1][1]
    assert torch.isnan(d_window).any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, 1e30])
def test_what_stands_in_padding_and_surplus_entries_does_not_matter(device, deterministic: bool, garbage: float) -> None:
    problem = Problem((4, 0, 1, 9), 3, 16, 6, padding=2, device=device)
    clean = problem.run(deterministic=deterministic)[1]
    problem.q[-2:] = problem.window_kv[-2:] = problem.compressed_kv[-2:] = garbage
    for got, expected in zip(problem.run(deterministic=deterministic)[1][:4], clean, strict=False):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_step_of_the_deterministic_form_cannot_overflow() -> None:
    """All rows add the largest contribution that the inputs allow to one key, and the sum stays below 2^63."""
    g, x, k = torch.full((1000, 2, 16), 3.0), torch.full((1000, 2, 16), 5.0), torch.full((1000, 16), 7.0)
    bounds = RowBounds.of(PackedLayout.from_lengths([1000]), 4, 8, False)
    plan = RowPlan(torch.stack([bounds.window_start, *[torch.zeros_like(bounds.visible)] * 3], 1), torch.empty(0))
    step = backward_module.fixed_point_step(g, x, k, None, bounds, plan, 0.25)
    contribution = 2 * (3.0 + 2 * 16 * 3.0 * 7.0 * 0.25 * 5.0)
    assert 2**61 <= 1000 * contribution / float(step) <= 2**62
    assert float(torch.log2(step)) == round(float(torch.log2(step)))


def test_low_precision_inputs_keep_fp32_accumulation(device) -> None:
    for dtype in (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16):
        assert_agrees(Problem((4, 0, 1, 9), 5, 32, 6, padding=1, dtype=dtype, device=device), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "q", p.q[:-1]), "rows"),
        (lambda p: setattr(p, "window_kv", p.window_kv[:-1]), "window_kv"),
        (lambda p: setattr(p, "window_kv", p.window_kv.double()), "one dtype"),
        (lambda p: setattr(p, "compressed_kv", p.compressed_kv[:, :-1]), "compressed_kv"),
        (lambda p: setattr(p, "selected", p.selected.long()), "int32"),
        (lambda p: setattr(p, "sink", p.sink[:-1]), "sink"),
    ],
)
def test_operands_that_do_not_fit_are_refused(device, change, message: str) -> None:
    problem = Problem((9,), 2, 16, 3, device=device)
    change(problem)
    with pytest.raises(ValueError, match=message):
        problem.run()


def test_implementation_says_why_the_portable_kernels_run() -> None:
    assert "interpreter" in forward_module.implementation(torch.empty(1, 64, 512))
    from kernels.triton_fused import hopper

    assert hopper.refusal(64, 512, torch.bfloat16, (8, 0)) is not None
    assert "128 heads" in str(hopper.refusal(32, 512, torch.bfloat16, (9, 0)))
    assert "float32" in str(hopper.refusal(64, 512, torch.float32, (9, 0)))
    assert hopper.refusal(64, 512, torch.bfloat16, (9, 0)) == hopper.GLUON_REFUSAL
    assert hopper.gluon_refusal("3.9.1+git1234") is None
    assert "3.10.0" in str(hopper.gluon_refusal("3.10.0")), "portable kernels instead, and the reason is told"
