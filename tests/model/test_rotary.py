# SPDX-License-Identifier: Apache-2.0
"""Rotary tables and the rotation itself."""

from __future__ import annotations

import math

import pytest
import torch

from csa_model.config import RopeScaling
from csa_model.rotary import RotaryTable, rotary_frequencies, rotate


def test_plain_frequencies_are_powers_of_the_base() -> None:
    assert rotary_frequencies(8, 10_000.0, None) == pytest.approx([1.0, 0.1, 0.01, 0.001])


@pytest.mark.parametrize(
    ("base", "factor", "low", "high", "smallest"), [(160_000.0, 16.0, 15, 25, 5.68e-7), (40_000.0, 4.0, 17, 28, 8.70e-6)], ids=["released", "other"]
)
def test_yarn_keeps_fast_frequencies_and_divides_slow_ones(base: float, factor: float, low: int, high: int, smallest: float) -> None:
    plain = rotary_frequencies(64, base, None)
    scaled = rotary_frequencies(64, base, RopeScaling(factor=factor))
    ratios = [p / s for p, s in zip(plain, scaled, strict=True)]
    assert ratios[: low + 1] == pytest.approx([1.0] * (low + 1))
    assert 1.0 < ratios[low + 1] < factor
    assert 1.0 < ratios[high - 1] < factor
    assert ratios[high:] == pytest.approx([factor] * (32 - high))
    assert min(scaled) == pytest.approx(smallest, rel=2e-3)


def test_pairs_are_neighbours_among_the_last_dims() -> None:
    """The pairing is interleaved; a basis vector turns into its neighbour, never into a dim half the width away."""
    rotation = RotaryTable(4, 10_000.0, None)(torch.tensor([3]), torch.float64)
    for dim, partner, sign, frequency in ((2, 3, 1, 1.0), (3, 2, -1, 1.0), (4, 5, 1, 0.01), (5, 4, -1, 0.01)):
        x = torch.zeros(1, 6, dtype=torch.float64)
        x[0, dim] = 1.0
        expected = torch.zeros_like(x)
        expected[0, dim], expected[0, partner] = math.cos(3 * frequency), sign * math.sin(3 * frequency)
        torch.testing.assert_close(rotate(x, rotation), expected)


def test_dims_before_the_rotary_ones_stay() -> None:
    x = torch.randn(5, 3, 10)
    rotated = rotate(x, RotaryTable(4, 100.0, None)(torch.arange(5), torch.float32))
    assert torch.equal(rotated[..., :6], x[..., :6])
    assert not torch.equal(rotated[1:, :, 6:], x[1:, :, 6:])


def test_products_depend_on_the_distance_only() -> None:
    """The same two vectors at positions (5, 3) and (105, 103)."""
    table = RotaryTable(8, 160_000.0, RopeScaling(original_max_position_embeddings=512))
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    near, far = (
        (rotate(q, table(torch.tensor([a]), torch.float32)) * rotate(k, table(torch.tensor([b]), torch.float32))).sum()
        for a, b in ((5, 3), (105, 103))
    )
    assert abs(near - far) < 1e-5
    unequal = (rotate(q, table(torch.tensor([105]), torch.float32)) * rotate(k, table(torch.tensor([3]), torch.float32))).sum()
    assert abs(near - unequal) > 1e-2


def test_inverse_undoes_it_without_touching_its_input() -> None:
    x = torch.randn(6, 2, 9, dtype=torch.float64)
    kept, rotation = x.clone(), RotaryTable(6, 10_000.0, None)(torch.arange(6), torch.float64)
    torch.testing.assert_close(rotate(rotate(x, rotation), rotation, inverse=True), x)
    assert torch.equal(x, kept)


def test_gradients() -> None:
    x = torch.randn(4, 2, 7, dtype=torch.float64, requires_grad=True)
    rotation = RotaryTable(4, 10_000.0, None)(torch.arange(4), torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation), (x,))
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation, inverse=True), (x,))


def test_low_precision_input_rotates_in_float32() -> None:
    x = torch.randn(64, 8).bfloat16()
    rotation = RotaryTable(8, 10_000.0, None)(torch.arange(64), torch.float32)
    assert torch.equal(rotate(x, rotation), rotate(x.float(), rotation).bfloat16())


def test_table_first_used_under_inference_mode_serves_training() -> None:
    table = RotaryTable(4, 10_000.0, None)
    with torch.inference_mode():
        table(torch.arange(3), torch.float32)
    x = torch.randn(3, 4, requires_grad=True)
    rotate(x, table(torch.arange(3), torch.float32)).sum().backward()
    assert x.grad is not None
