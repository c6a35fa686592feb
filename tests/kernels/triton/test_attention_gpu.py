# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU: every kernel family against float32 mathematics on the device, long rows, and repetition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import ALL_VISIBLE, PackedLayout

pytest.importorskip("triton")

from kernels.triton_fused import dense_attention
from kernels.triton_fused.attend_backward import attend_backward
from kernels.triton_fused.attend_forward import attend_forward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

RATIO = 4
# Some 2.5 times what rounding P and dS to the dtype before their products costs in a reference (2.4e-3 and 3e-4 of the norm); fp32 has no such step.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}


class Inputs:
    def __init__(self, lengths, heads, dim, topk, *, padding=0, window=128, dtype=torch.bfloat16, ratio=RATIO, mode="ids") -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        self.layout = PackedLayout.from_lengths(lengths, sum(lengths) + padding, device="cuda")
        self.ratio, self.window, self.scale = ratio, window, dim**-0.5
        tokens, entries = self.layout.num_tokens, self.layout.num_compressed(ratio) + 3

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device="cuda").to(dtype)

        self.q, self.window_kv, self.compressed_kv, self.grad_out = normal(tokens, heads, dim), normal(tokens, dim), normal(entries, dim), None
        self.grad_out, self.sink = normal(tokens, heads, dim), torch.randn(heads, generator=draw, device="cuda")
        start, visible = self.layout.entry_start(ratio).long(), self.layout.visible_compressed(ratio).long()
        self.start, self.visible = start, visible
        if mode == "ids":
            offset = torch.rand(tokens, max(topk, int(visible.max())), generator=draw, device="cuda").argsort(-1)[:, :topk]
            ids = torch.where(offset < visible[:, None], start[:, None] + offset, -1 - offset)  # holes wherever the draw fell beyond the visible ones
            ids[:, 1::7] = entries + 5
            ids[tokens // 2] = -1
            self.selected = ids.to(torch.int32).contiguous()
        else:
            self.selected = ALL_VISIBLE if mode == "all" else None

    def where(self):
        return self.layout, self.ratio, self.window, self.scale

    def run(self, **options):
        inputs = (self.q, self.window_kv, self.compressed_kv, self.selected, self.sink)
        out, lse = attend_forward(*inputs, *self.where())
        return (out, lse), attend_backward(self.grad_out, *inputs, out, lse, *self.where(), **options)

    def keys_of(self, rows: Tensor) -> Tensor:
        """int64 [n, W + K]: index into [window_kv; compressed_kv] of every key of these rows, -1 where invalid."""
        token = self.layout.token_ids[rows].long()[:, None]
        window = token - torch.arange(self.window, device="cuda")
        window = torch.where(window >= self.layout.window_start(self.window)[rows].long()[:, None], window, -1)
        start, visible = self.start[rows, None], self.visible[rows, None]
        if isinstance(self.selected, Tensor):
            entry = self.selected[rows].long()
        elif self.selected is ALL_VISIBLE:
            entry = start + torch.arange(max(1, int(visible.max())), device="cuda")
        else:
            entry = torch.full_like(start, -1)
        valid = (entry >= start) & (entry < start + visible)
        return torch.cat([window, torch.where(valid, entry + self.layout.num_tokens, -1)], 1)

    def reference(self, rows: Tensor):
        """out, lse, dq, the gradient of all keys from these rows, and P summed over the heads, in fp32."""
        index = self.keys_of(rows)
        valid = (index >= 0)[:, None]
        keys = torch.cat([self.window_kv, self.compressed_kv]).float()[index.clamp(min=0)] * (index >= 0)[..., None]
        q, grad = self.q[rows].float(), self.grad_out[rows].float()
        logits = (torch.einsum("rhd,rkd->rhk", q, keys) * self.scale).masked_fill(~valid, -math.inf)
        lse = torch.logsumexp(logits, -1)
        p = torch.where(valid, torch.exp(logits - torch.logaddexp(lse, self.sink)[..., None]), 0)
        out = torch.einsum("rhk,rkd->rhd", p, keys)
        dp = torch.einsum("rhd,rkd->rhk", grad, keys)
        ds = p * (dp - (out * grad).sum(-1, keepdim=True)) * self.scale
        d_keys = torch.zeros(self.window_kv.shape[0] + self.compressed_kv.shape[0], q.shape[2], device="cuda")
        per_key = torch.einsum("rhk,rhd->rkd", ds, q) + torch.einsum("rhk,rhd->rkd", p, grad)
        d_keys.index_add_(0, index.clamp(min=0).reshape(-1), (per_key * (index >= 0)[..., None]).reshape(-1, q.shape[2]))
        return out, lse, torch.einsum("rhk,rkd->rhd", ds, keys), d_keys, p.sum(1)[:, self.window :]


def distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    assert torch.isfinite(actual).all()
    norm = float(expected.norm())
    return float((actual - expected).norm()) / (norm if norm > 1e-30 else 1.0)


def assert_agrees(inputs: Inputs, tolerance: float, **options) -> None:
    (out, lse), (dq, d_window, d_entries, _, teacher) = inputs.run(emit_teacher=True, **options)
    tokens = inputs.layout.num_tokens
    d_keys = torch.zeros(tokens + inputs.compressed_kv.shape[0], out.shape[2], device="cuda")
    for rows in torch.arange(tokens, device="cuda").split(256):
        expected_out, expected_lse, expected_dq, part, sums = inputs.reference(rows)
        d_keys += part
        finite = torch.isfinite(expected_lse)
        assert torch.equal(finite, torch.isfinite(lse[rows]))
        assert distance(out[rows], expected_out) < tolerance
        assert distance(torch.where(finite, lse[rows], 0), torch.where(finite, expected_lse, 0)) < 1e-5
        assert distance(dq[rows], expected_dq) < 2 * tolerance  # a row block of 256; the bound of the whole holds for the sum below
        if isinstance(inputs.selected, Tensor):
            assert distance(teacher[rows], sums) < 1e-4
    assert distance(d_window, d_keys[:tokens]) < tolerance
    assert distance(d_entries, d_keys[tokens:]) < tolerance


@pytest.mark.parametrize(
    ("heads", "dim", "topk", "dtype"),
    [
        (1, 16, 40, torch.float32),
        (8, 64, 64, torch.bfloat16),
        (12, 96, 33, torch.float16),
        (16, 128, 512, torch.bfloat16),
        (20, 192, 64, torch.bfloat16),
        (32, 512, 64, torch.bfloat16),
        (64, 64, 64, torch.bfloat16),
        (128, 128, 64, torch.bfloat16),
        (64, 512, 96, torch.bfloat16),  # from here on the kernels for SM90, where there is one
        (64, 512, 512, torch.float16),
        (128, 512, 96, torch.bfloat16),
    ],
)
def test_agrees_with_float32_mathematics(heads: int, dim: int, topk: int, dtype: torch.dtype) -> None:
    """One document beyond the selection, an empty one, one of a single token, odd lengths, padding; holes, ids out of range, a row without ids."""
    assert_agrees(Inputs((301, 0, 1, 290), heads, dim, topk, padding=9, dtype=dtype), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(8, 64, torch.bfloat16), (12, 96, torch.float16), (16, 128, torch.bfloat16), (32, 128, torch.bfloat16)]
)
@pytest.mark.parametrize(("mode", "window", "ratio"), [("all", 128, 16), ("all", 128, 4), ("all", 0, 4), ("none", 100, 4)])
def test_rows_that_share_their_keys(heads: int, dim: int, dtype: torch.dtype, mode: str, window: int, ratio: int) -> None:
    """No ids and few heads: tiles of queries of several documents, of documents of one token, one of padding alone, several tiles of entries."""
    assert dense_attention.prefers_dense(heads, dim, dtype)
    for lengths in ((301, 0, 1, 290), (5, 1, 0, 64, 3, 3, 700, 17)):
        inputs = Inputs(lengths, heads, dim, 0, padding=77, window=window, ratio=ratio, mode=mode, dtype=dtype)
        assert_agrees(inputs, TOLERANCE[dtype])
        (out, _), (dq, d_window, d_entries, d_sink, _) = inputs.run()
        inputs.q[-77:] = inputs.window_kv[-77:] = inputs.grad_out[-77:] = inputs.compressed_kv[-3:] = math.nan
        (out2, _), (dq2, d_window2, d_entries2, d_sink2, _) = inputs.run()
        assert torch.equal(out2, out), "what stands in padding does not matter"
        assert torch.equal(dq2, dq)
        assert torch.equal(d_sink2, d_sink)
        for actual, expected in ((d_window2, d_window), (d_entries2, d_entries)):
            assert distance(actual, expected) < 1e-3  # the order of the additions, after their rounding to the dtype


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(("mode", "window", "ratio"), [("all", 128, 16), ("none", 100, 4), ("all", 0, 4)])
def test_all_visible_entries_and_window_alone(heads: int, mode: str, window: int, ratio: int) -> None:
    inputs = Inputs((301, 2, 290), heads, 512 if heads == 64 else 64, 0, padding=9, window=window, ratio=ratio, mode=mode)
    assert_agrees(inputs, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (64, 512)])
def test_deterministic_form_repeats_bit_for_bit(heads: int, dim: int) -> None:
    inputs = Inputs((301, 0, 1, 290), heads, dim, 64, padding=9)
    first = inputs.run(emit_teacher=True, deterministic=True)[1]
    for _ in range(3):
        for a, b in zip(inputs.run(emit_teacher=True, deterministic=True)[1], first, strict=True):
            assert torch.equal(a, b)
    assert_agrees(inputs, TOLERANCE[torch.bfloat16], deterministic=True)


def test_warp_groups_do_not_race() -> None:
    """Out, dq and the emitted teacher have a fixed order of additions in every form: equal bits over many runs of full-length rows."""
    inputs = Inputs((2560,), 64, 512, 512)
    (out, lse), (dq, _, _, _, teacher) = inputs.run(emit_teacher=True)
    for _ in range(8):
        (out2, lse2), (dq2, _, _, _, teacher2) = inputs.run(emit_teacher=True)
        for a, b in ((out, out2), (lse, lse2), (dq, dq2), (teacher, teacher2)):
            assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim"), [(64, 512), (40, 512)])
def test_70_000_rows(heads: int, dim: int) -> None:
    """More rows than one grid dimension takes, element offsets beyond 2^31. 64 rows sampled, the last included."""
    inputs = Inputs((69_990, 3), heads, dim, 64, padding=7)
    (out, lse), (dq, _, _, _, teacher) = inputs.run(emit_teacher=True)
    rows = torch.cat([torch.linspace(0, 69_980, 62, device="cuda").long(), torch.tensor([69_992, 69_999], device="cuda")])
    expected_out, expected_lse, expected_dq, _, sums = inputs.reference(rows)
    assert distance(out[rows], expected_out) < TOLERANCE[torch.bfloat16]
    assert distance(torch.nan_to_num(lse[rows], neginf=0), torch.nan_to_num(expected_lse, neginf=0)) < 1e-5
    assert distance(dq[rows], expected_dq) < TOLERANCE[torch.bfloat16]
    assert distance(teacher[rows], sums) < 1e-4
