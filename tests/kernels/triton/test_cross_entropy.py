# SPDX-License-Identifier: Apache-2.0
"""The fused linear cross entropy against the plain one in float64, chunked, frozen, ignored and invalid, and compiled ahead of time for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model.config import MTPConfig
from csa_model.layers import linear_rounded
from csa_model.losses import cross_entropy_sum
from kernels import PackedLayout, RowOperations
from kernels.unfused import UnfusedBackend
from tests.kernels.triton.conftest import HAS_TRITON, INTERPRETED
from tests.model.helpers import SPARSE, build, next_of, plain_config, random_tokens

IGNORED = -100
NAMES = ("loss", "hidden", "weight")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Errors are those of float64 on operands rounded alike. The plain form may have rounded nothing in a handful of numbers: then what the order of fp32
# sums brings, and one rounding of the gradient, needs no explanation.
FACTOR, LOSS_FLOOR = 1.5, 3e-7
FLOOR = {torch.float32: 3e-6, torch.float16: 1.5e-4, torch.bfloat16: 1e-3}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def fused(device: str) -> Any:
    from kernels.triton_fused import cross_entropy

    return cross_entropy


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(linear_rounded(hidden, weight), targets, ignore_index=IGNORED, reduction="sum")


def inputs(device: str, rows: int, classes: int, features: int = 24, ignored: tuple[int, ...] = (), height: float = 2.0) -> list[Tensor]:
    """hidden, weight, targets; logits of about `height`."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, features), torch.randn(classes, features) * height / features**0.5
    targets = torch.randint(0, classes, (rows,))
    if rows > 2:
        targets[0], targets[2] = 0, classes - 1
    targets[list(ignored)] = IGNORED
    return [t.to(device) for t in (hidden, weight, targets)]


def differentiated(function: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype, upstream: float) -> list[Tensor]:
    """Loss, and gradients of `upstream` times it, under autocast to `dtype` (float32 and float64: without autocast)."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast(hidden.device.type, dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
        loss = function(hidden, weight)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight], torch.full_like(loss, upstream))]


def compare(fused: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, upstream: float = 0.3) -> None:
    hidden = hidden.to(dtype)
    with poisoned_outputs():
        ours = differentiated(lambda h, w: fused.linear_cross_entropy(h, w, targets, IGNORED), hidden, weight, dtype, upstream)
    theirs = differentiated(lambda h, w: plain(h, w, targets), hidden, weight, dtype, upstream)
    exact = differentiated(lambda h, w: plain(h, w, targets), hidden.double(), weight.to(dtype).double(), torch.float64, upstream)
    assert [t.dtype for t in ours] == [torch.float32, dtype, torch.float32]
    # the interpreter truncates to bfloat16 instead of rounding, which doubles the error
    factor = FACTOR * (2 if INTERPRETED and dtype == torch.bfloat16 else 1)
    floors = (LOSS_FLOOR, FLOOR[dtype], FLOOR[dtype])
    for name, floor, value, other, reference in zip(NAMES, floors, ours, theirs, exact, strict=True):
        assert value.shape == reference.shape
        error, yardstick = norm_error(value, reference), norm_error(other, reference)
        assert error <= max(factor * yardstick, floor), (name, error, yardstick)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes", "ignored"),
    [
        (13, 1000, (1, 4)),  # no power of two, rows of whole 16 bytes
        (37, 1003, (0, 36)),  # rows padded to 1,008
        (1, 64, ()),
        (5, 3, (2,)),
        (3, 32769, ()),  # the first width that registers do not hold
        (4, 40001, (1,)),
    ],
)
def test_value_and_gradients(device: str, fused: Any, rows: int, classes: int, ignored: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(fused, *inputs(device, rows, classes, ignored=ignored), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole", [True, False])
def test_logits_of_300(device: str, fused: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, whole: bool) -> None:
    if not whole:
        monkeypatch.setattr(fused, "WHOLE_ROW", 64)
        monkeypatch.setattr(fused, "LONG_BLOCK", 128)
    hidden, weight, targets = inputs(device, 9, 1000, height=100.0)
    logits = hidden @ weight.T
    assert logits.max() > 300
    assert logits.min() < -300
    targets[4], targets[5] = logits[4].argmax(), logits[5].argmin()
    compare(fused, hidden, weight, targets, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("logits", "gradients"),
    [(8 * 1008, 2**27), (3 * 1008, 8 * 1008), (1, 1), (3 * 1008 + 5, 37 * 1008)],  # rows a chunk: 8 of 37; 3 of 8 of 37; 1 of 1; 3 of 37
)
def test_chunks_give_what_the_whole_gives(
    device: str, fused: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, logits: int, gradients: int
) -> None:
    hidden, weight, targets = inputs(device, 37, 1003, ignored=(0, 8, 20))

    def step() -> list[Tensor]:
        with poisoned_outputs():
            return differentiated(lambda h, w: fused.linear_cross_entropy(h, w, targets, IGNORED), hidden.to(dtype), weight, dtype, 1.0)

    whole, again = step(), step()
    monkeypatch.setattr(fused, "LOGIT_ELEMENTS", logits)
    monkeypatch.setattr(fused, "GRADIENT_ELEMENTS", gradients)
    largest: list[int] = []
    launch = fused._launch
    monkeypatch.setattr(fused, "_launch", lambda z, *rest: (largest.append(z.numel()), launch(z, *rest)))
    for name, chunked, one, other in zip(NAMES, step(), whole, again, strict=True):
        assert torch.equal(one, other), name
        # another size of a matrix product may sum in another order, and the last bit of a rounded number tip over
        assert norm_error(chunked, one) <= (3e-6 if name == "loss" or dtype == torch.float32 else 2e-4), name
    assert max(largest) <= max(1008, logits)
    assert len(largest) > 1


def test_rows_that_are_ignored_leave_no_trace(device: str, fused: Any) -> None:
    hidden, weight, targets = inputs(device, 6, 100, ignored=(0, 1, 2, 3, 4, 5))
    with poisoned_outputs():
        results = differentiated(lambda h, w: fused.linear_cross_entropy(h, w, targets, IGNORED), hidden, weight, torch.float32, 1.0)
        empty = differentiated(lambda h, w: fused.linear_cross_entropy(h, w, targets[:0], IGNORED), hidden[:0], weight, torch.float32, 1.0)
    assert [float(t.abs().sum()) for t in (*results, *empty)] == [0.0] * 6
    # another number may mean ignored, and a row of it need not be finite
    targets[:] = torch.tensor([3, 7, 99, 7, 0, 7], device=device)
    hidden[1] = torch.inf
    loss = fused.linear_cross_entropy(hidden, weight, targets, 7)
    torch.testing.assert_close(loss, plain(hidden[[0, 2, 4]], weight, targets[[0, 2, 4]]))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("target", [-1, 100, -101, 2**40])
def test_a_target_that_is_no_class_makes_loss_and_gradients_nan(
    device: str, fused: Any, monkeypatch: pytest.MonkeyPatch, target: int, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(fused, "WHOLE_ROW", 16)
        monkeypatch.setattr(fused, "LONG_BLOCK", 32)
    hidden, weight, targets = inputs(device, 6, 100)
    targets[3] = target
    loss, d_hidden, d_weight = differentiated(lambda h, w: fused.linear_cross_entropy(h, w, targets, IGNORED), hidden, weight, torch.float32, 1.0)
    assert loss.isnan()
    assert d_weight.isnan().all()
    assert d_hidden.isnan().all(1).tolist() == [False, False, False, True, False, False]
    assert not d_hidden[[0, 1, 2, 4, 5]].isnan().any()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(device: str, fused: Any, monkeypatch: pytest.MonkeyPatch, value: float, whole: bool) -> None:
    if not whole:
        monkeypatch.setattr(fused, "WHOLE_ROW", 16)
        monkeypatch.setattr(fused, "LONG_BLOCK", 32)
    hidden, weight, targets = inputs(device, 5, 100, features=8)
    hidden, weight = hidden.abs(), weight.abs()
    weight[[5, 77]] = value  # in the first block of a long row, and in a later one
    results = [f(hidden, weight, targets) for f in (lambda h, w, t: fused.linear_cross_entropy(h, w, t, IGNORED), plain)]
    torch.testing.assert_close(*results, equal_nan=True)
    assert results[0].isnan() == (value != -torch.inf)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
def test_only_what_is_wanted_is_computed(device: str, fused: Any, monkeypatch: pytest.MonkeyPatch, wanted: tuple[bool, bool]) -> None:
    hidden, weight, targets = inputs(device, 13, 1000, ignored=(3,))
    expected = differentiated(lambda h, w: plain(h, w, targets), hidden, weight, torch.float32, 1.0)
    with_grad: list[bool] = []
    launch = fused._launch
    monkeypatch.setattr(fused, "_launch", lambda z, t, losses, grad, *rest: (with_grad.append(grad is not None), launch(z, t, losses, grad, *rest)))
    leaves = [t.clone().requires_grad_(w) for t, w in zip((hidden, weight), wanted, strict=True)]
    with FlopCounterMode(display=False) as forward:
        loss = fused.linear_cross_entropy(*leaves, targets, IGNORED)
    assert loss.requires_grad == any(wanted)
    assert with_grad == [any(wanted)]
    assert forward.get_total_flops() == (1 + sum(wanted)) * 2 * 13 * 1000 * 24
    torch.testing.assert_close(loss.detach(), expected[0])
    if any(wanted):
        with FlopCounterMode(display=False) as backward:
            loss.backward(retain_graph=True)
            loss.backward(torch.tensor(2.0, device=device))  # a second time over the same graph, with another factor
        assert backward.get_total_flops() == 0
    for leaf, gradient, w in zip(leaves, expected[1:], wanted, strict=True):
        assert (leaf.grad is not None) == w
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, 3 * gradient)
    with_grad.clear()
    with torch.no_grad():
        torch.testing.assert_close(fused.linear_cross_entropy(*leaves, targets, IGNORED), expected[0])
    assert with_grad == [False]


def test_strided_operands_and_one_tensor_for_two_uses(device: str, fused: Any) -> None:
    hidden, weight, targets = inputs(device, 12, 50)
    wide, tall = torch.cat([hidden, hidden], 1), torch.cat([weight, weight]).requires_grad_()
    both = torch.stack([targets, targets], 1)
    results = []
    for function in (lambda h, w, t: fused.linear_cross_entropy(h, w, t, IGNORED), plain):
        loss = function(tall[:12] * 1.5, tall[::2], both[:, 0]) + function(wide[:, :24], tall[1::2], targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, tall)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


class FusedRows(UnfusedBackend):
    """The reference's attention with the fused operations around it."""

    def row_operations(self) -> RowOperations:
        from kernels.triton_fused.row_operations import TritonRowOperations

        return TritonRowOperations()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_losses_of_a_decoder_are_the_plain_ones(
    device: str, fused: Any, monkeypatch: pytest.MonkeyPatch, tied: bool, dtype: torch.dtype
) -> None:
    """The head serves two losses, and with tied embeddings the tokens as well: its gradient is the sum of all."""
    config = plain_config(mtp=MTPConfig(), num_hidden_layers=1, compress_ratios=(0, 0), tie_word_embeddings=tied)
    lengths, tokens = [9, 1, 2], random_tokens(13).to(device)
    targets, calls, results = next_of(tokens, lengths), [], []
    once = fused.linear_cross_entropy
    monkeypatch.setattr(fused, "linear_cross_entropy", lambda *operands: calls.append(operands[3]) or once(*operands))
    for plain_losses in (False, True):
        monkeypatch.setattr("tests.model.helpers.get_backend", lambda name: FusedRows())
        decoder = build(config).to(device)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            out = decoder(tokens, PackedLayout.from_lengths(lengths, 13, device=device), SPARSE, targets)
            if plain_losses:
                decoder.fused = None
            loss = cross_entropy_sum(decoder, out.hidden, targets) + 0.3 * cross_entropy_sum(decoder, out.mtp_hidden, targets.roll(-1))
        (loss / 10).backward()
        results.append({"loss": loss.detach()} | {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
    assert calls == [IGNORED, IGNORED]
    assert results[0].keys() == results[1].keys()
    assert ("head.weight" in results[0]) != tied
    for name, theirs in results[1].items():
        assert norm_error(results[0][name], theirs) <= (1e-5 if dtype == torch.float32 else 2e-2), name


class NothingIsRead(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), func
        return func(*args, **(kwargs or {}))


def test_the_host_reads_no_value(device: str, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_launch", lambda *operands: None)  # the interpreter reads them all
    monkeypatch.setattr(fused, "GRADIENT_ELEMENTS", 4 * 1000)
    hidden, weight, targets = inputs(device, 13, 1000, ignored=(3,))
    with NothingIsRead():
        differentiated(lambda h, w: fused.linear_cross_entropy(h, w, targets, IGNORED), hidden, weight, torch.bfloat16, 1.0)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (((4, 8), (5, 7), (4,)), (torch.float32, torch.float32, torch.int64), r"\[4, 8\] and \[5, 7\]"),
        (((4, 8), (0, 8), (4,)), (torch.float32, torch.float32, torch.int64), r"\[0, 8\]"),
        (((2, 4, 8), (5, 8), (4,)), (torch.float32, torch.float32, torch.int64), r"hidden must be \[T, d\]"),
        (((4, 8), (5, 8), (4,)), (torch.float64, torch.float32, torch.int64), "float64"),
        (((4, 8), (5, 8), (3,)), (torch.float32, torch.float32, torch.int64), r"targets must be int64 \[4\], got \[3\]"),
        (((4, 8), (5, 8), (4,)), (torch.float32, torch.float32, torch.int32), "int32"),
    ],
)
def test_what_does_not_fit_is_refused(device: str, fused: Any, shapes: Any, dtypes: Any, message: str) -> None:
    operands = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=message):
        fused.linear_cross_entropy(*operands, IGNORED)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_compiled_ahead_nothing_spills_on_sm90_and_rows_move_16_bytes_at_a_time() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.ahead_cross_entropy"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    compiled = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(r["kernel"] for r in compiled) == {"row_loss_kernel": 6, "long_row_loss_kernel": 2}
    for r in compiled:
        assert r["stack"] == 0, r
        assert r["STG"] == 1 + r["STG of 16 bytes"], r  # the loss; the gradient eight numbers at a time
        assert (r["STG of 16 bytes"] > 0) == r["with_grad"], r
        # a row is loaded four numbers at a time, once if registers hold it: 32 lanes a warp
        times = 1 + r["with_grad"] if r["kernel"].startswith("long") else 1
        width = 8192 if r["kernel"].startswith("long") else max(1024, 1 << (r["V"] - 1).bit_length())
        assert r["LDG of 16 bytes"] == times * width // (4 * 32 * r["warps"]), r
