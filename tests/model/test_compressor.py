# SPDX-License-Identifier: Apache-2.0
"""Compressor: pooling, overlap, anchoring per document, positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csa_model.compressor import Compressor
from csa_model.layers import rms_norm
from csa_model.rotary import rotate
from csa_model.row import CompressedWindows, RotaryTables, Row
from kernels import PackedLayout
from tests.model.helpers import tiny_config

HIDDEN, DIM = 10, 12


def make(ratio: int, dtype: torch.dtype = torch.float64) -> Compressor:
    torch.manual_seed(ratio)
    compressor = Compressor(HIDDEN, DIM, ratio, 1e-6, 0.5).to(dtype)
    torch.nn.init.normal_(compressor.ape)
    return compressor


def row_of(lengths: list[int], ratio: int, padding: int = 0, offset: int = 0) -> Row:
    layout = PackedLayout.from_lengths(lengths, sum(lengths) + padding)
    return Row(layout, RotaryTables(tiny_config()), {ratio}, torch.float64, position_offset=offset)


def tokens(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("ratio", [4, 8])
def test_zero_gate_takes_the_mean_of_the_slots(ratio: int) -> None:
    compressor, x = make(ratio), tokens(27)
    for parameter in (compressor.wgate.weight, compressor.ape):
        torch.nn.init.zeros_(parameter)
    entries, row = compressor(x, row_of([27], ratio)), row_of([27], ratio)
    kv = x @ compressor.wkv.weight.t()
    for i in range(27 // ratio):
        own = kv[i * ratio : (i + 1) * ratio]
        slots = own[:, -DIM:]
        if ratio == 4 and i > 0:  # the first half of the channels, of the window before
            slots = torch.cat([kv[(i - 1) * ratio : i * ratio, :DIM], slots])
        assert len(slots) == (ratio if i == 0 or ratio != 4 else 2 * ratio)
        expected = rms_norm(slots.mean(0), compressor.norm.weight, 1e-6)
        torch.testing.assert_close(entries[i : i + 1], rotate(expected[None], row.entry_rotation(ratio)[i : i + 1]))


def test_position_bias_picks_a_slot_and_each_channel_its_own() -> None:
    compressor, x = make(4), tokens(12)
    torch.nn.init.zeros_(compressor.ape)
    with torch.no_grad():
        compressor.ape[2, :5] = 1e4  # previous half, channels 0-4: third token of the window before
        compressor.ape[1, DIM + 5 :] = 1e4  # own half, channels 5-11: second token of the own window
    values, gates = ((x @ layer.weight.t()).unflatten(0, (-1, 4)) for layer in (compressor.wkv, compressor.wgate))
    windows = row_of([12], 4).windows(4)
    pooled = compressor.pool(values, gates + compressor.ape, windows.starts_document)
    torch.testing.assert_close(pooled[1:, :5], values[:-1, 2, :5])
    torch.testing.assert_close(pooled[:, 5:], values[:, 1, DIM + 5 :])


def test_first_entry_of_a_document_gives_no_weight_to_a_missing_window() -> None:
    compressor, x = make(4), tokens(8)
    with torch.no_grad():
        compressor.ape[:, :DIM] = 50.0  # all weight would go to the previous window, were there one
    x.requires_grad_()
    entries = compressor(x, row_of([4, 4], 4))
    (grad,) = torch.autograd.grad(entries[1].sum(), x)
    assert torch.equal(grad[:4], torch.zeros_like(grad[:4]))
    torch.testing.assert_close(entries[1:], compressor(x[4:], row_of([4], 4)))


@pytest.mark.parametrize("ratio", [4, 8])
def test_documents_are_compressed_each_by_itself(ratio: int) -> None:
    compressor, lengths = make(ratio), [9, 3, 0, 1, 16, 8, 7]
    x = tokens(sum(lengths) + 6)
    packed = compressor(x, row_of(lengths, ratio, padding=6))
    alone = [compressor(part, row_of([len(part)], ratio)) for part in x[: sum(lengths)].split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone))


def test_windows_follow_the_layout() -> None:
    """Documents of 3, 1, 1, 5 tokens; one entry, made of the first four tokens of the last document."""
    layout = PackedLayout.from_lengths([3, 1, 1, 5])
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 5, 10]
    assert layout.compressed_cu_seqlens(4).diff().tolist() == [0, 0, 0, 1]
    assert layout.position_of_token.tolist() == [0, 1, 2, 0, 0, 0, 1, 2, 3, 4]
    windows = CompressedWindows.of(layout, 4)
    assert windows.token_ids.tolist() == [5, 6, 7, 8]
    assert windows.starts_document.tolist() == [True]
    assert CompressedWindows.of(PackedLayout.from_lengths([8, 2, 0, 13]), 4).position.tolist() == [0, 4, 0, 4, 8]


@pytest.mark.parametrize(
    ("lengths", "padding", "head"),
    [
        ([8, 4, 16], 0, True),  # the whole row
        ([8, 0, 4, 7, 2, 3], 5, True),  # its beginning: what follows the last window forms none
        ([3, 2], 1, True),  # nothing
        ([9, 8], 0, False),
        ([8, 1, 4], 0, False),
    ],
)
def test_rows_of_all_windows_are_not_copied_where_they_are_the_first(lengths: list[int], padding: int, head: bool) -> None:
    windows = row_of(lengths, 4, padding).windows(4)
    x = torch.randn(sum(lengths) + padding, 3, dtype=torch.float64, requires_grad=True)
    rows = windows.rows_of(x)
    assert torch.equal(rows, x[windows.token_ids])
    assert windows.are_head == (rows.data_ptr() == x.data_ptr() or not len(rows)) == head
    grad = torch.randn_like(rows)
    assert torch.equal(*(torch.autograd.grad(t, x, grad)[0] for t in (rows, x[windows.token_ids])))


def test_entries_stand_at_the_first_token_of_their_window() -> None:
    """Not at the number of the entry, and with the table of the compressed layers."""
    config, row = tiny_config(), row_of([5, 17], 4)
    expected = RotaryTables(config).compressed(torch.tensor([0, 0, 4, 8, 12]), torch.float64)
    torch.testing.assert_close(row.entry_rotation(4), expected)


def test_tail_forms_no_entry_and_gets_no_gradient() -> None:
    compressor, x = make(4), tokens(11).requires_grad_()
    entries = compressor(x, row_of([11], 4))
    assert entries.shape == (2, DIM)
    entries.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[8:], torch.zeros(3, HIDDEN, dtype=torch.float64))


def test_row_without_entries_still_reaches_every_parameter() -> None:
    compressor = make(4)
    entries = compressor(tokens(5), row_of([3, 2], 4))
    assert entries.shape == (0, DIM)
    entries.sum().backward()
    assert all(p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in compressor.parameters())


def test_gate_runs_in_float32_under_autocast() -> None:
    compressor, x = make(4, torch.float32), tokens(64).float()
    with torch.no_grad():
        compressor.ape.add_(300.0)  # in bf16 a step at 300 is 2: softmax over rounded gates would be far off
    exact = compressor(x, row_of([64], 4))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = compressor(x, row_of([64], 4))
    assert mixed.dtype == torch.bfloat16
    assert (mixed - exact).abs().max() < 0.06


@pytest.mark.parametrize("compiling", [False, True])
def test_a_backend_pools_and_a_compiler_gets_the_plain_form(monkeypatch: pytest.MonkeyPatch, compiling: bool) -> None:
    class Fused:
        pooled = 0

        def norm_rotate(self, x: Tensor, weight: Tensor, eps: float, rotation: Tensor) -> Tensor:
            return rotate(rms_norm(x, weight, eps), rotation)

        def pool_windows(self, projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
            self.pooled += 1
            values, gates = projected.unflatten(0, (-1, len(ape))).chunk(2, dim=-1)
            return compressor.pool(values, gates + ape, starts_document)

    compressor, x, row = make(4), tokens(27), row_of([9, 18], 4)
    exact = compressor(x, row)
    compressor.fused = Fused()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    torch.testing.assert_close(compressor(x, row), exact)
    assert compressor.fused.pooled == int(not compiling)
