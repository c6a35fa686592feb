# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.unfused import indexer_kl, teacher_distribution

LN3 = math.log(3)
TINY = [math.log(1e-30), math.log(2e-30)]


def random_row(heads: int, keys: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, heads, keys, generator=generator, dtype=torch.float64)
    rest = 3 * torch.randn(5, heads, generator=generator, dtype=torch.float64)
    valid = torch.rand(5, keys, generator=generator) < 0.7
    return logits.to(dtype), rest.to(dtype), valid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_worked_example(dtype: torch.dtype) -> None:
    """Two heads, compressed logits (ln 3, 0) and (0, ln 3); sink ln 4 on the first head, none on the second: 5/12 and 7/12."""
    logits = torch.tensor([[[LN3, 0.0], [0.0, LN3]]], dtype=dtype)
    sink = torch.tensor([[math.log(4), -math.inf]], dtype=dtype)
    valid = torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(teacher_distribution(logits, sink, valid), torch.tensor([[5 / 12, 7 / 12]], dtype=dtype))
    torch.testing.assert_close(teacher_distribution(logits, sink, valid, teacher="compressed_only"), torch.tensor([[0.5, 0.5]], dtype=dtype))


def test_a_tiny_compressed_mass_is_still_a_distribution() -> None:
    """Logits ln 1e-30 and ln 2e-30 beside a sink of 0 give (1/3, 2/3), KL to uniform 0.056633."""
    valid = torch.ones(1, 2, dtype=torch.bool)
    teacher = teacher_distribution(torch.tensor([[TINY]]), torch.zeros(1, 1), valid)
    torch.testing.assert_close(teacher, torch.tensor([[1 / 3, 2 / 3]]), rtol=1e-5, atol=0)
    assert indexer_kl(torch.zeros(1, 2), teacher, valid).item() == pytest.approx(0.056633, abs=5e-6)


@pytest.mark.parametrize("sinks", [(200.0, 200.0), (200.0, -200.0), (1e4, 1e4), (1e30, 1.0), (math.inf, 0.0), (math.inf, math.inf), (-math.inf, 5.0)])
def test_extreme_sinks_leave_a_distribution_and_exact_row_sums_of_the_gradient(sinks: tuple[float, float]) -> None:
    logits, _, _ = random_row(2, 6, 1, torch.float32)
    valid = torch.ones(5, 6, dtype=torch.bool)
    teacher = teacher_distribution(logits, torch.tensor(sinks).expand(5, 2), valid)
    torch.testing.assert_close(teacher.sum(-1), torch.ones(5), rtol=0, atol=1e-6)
    student = torch.randn(5, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(indexer_kl(student, teacher, valid).sum(), student)
    torch.testing.assert_close(grad.sum(-1), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, torch.softmax(student.detach(), -1) - teacher, rtol=0, atol=1e-6)


def test_equal_large_sinks_tend_to_the_limit() -> None:
    logits, _, _ = random_row(3, 6, 2)
    valid = torch.ones(5, 6, dtype=torch.bool)
    limit = torch.softmax(torch.logsumexp(logits, 1), -1)
    for sink in (1e3, 1e6, math.inf):
        torch.testing.assert_close(teacher_distribution(logits, torch.full((5, 3), sink, dtype=torch.float64), valid), limit, rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**31))
def test_invariants_of_the_quantity(heads: int, keys: int, seed: int) -> None:
    logits, rest, valid = random_row(heads, keys, seed)
    full, only = teacher_distribution(logits, rest, valid), teacher_distribution(logits, rest, valid, "compressed_only")
    for teacher in (full, only):
        torch.testing.assert_close(teacher.sum(-1), valid.any(-1).double(), rtol=0, atol=1e-12)
        assert (teacher[~valid] == 0).all()
    if heads == 1:
        torch.testing.assert_close(full, only, rtol=0, atol=1e-12)
    # no sink, no window
    torch.testing.assert_close(teacher_distribution(logits, torch.full_like(rest, -math.inf), valid), only, rtol=0, atol=1e-12)
    # a constant on everything of one head
    shift = torch.zeros(heads, dtype=torch.float64)
    shift[0] = 7.0
    torch.testing.assert_close(teacher_distribution(logits + shift[:, None], rest + shift, valid), full, rtol=0, atol=1e-12)
    # equal fractions of mass outside the support
    mass = torch.logsumexp(torch.where(valid[:, None], logits, -math.inf), -1)
    torch.testing.assert_close(teacher_distribution(logits, mass + 1.3, valid), only, rtol=0, atol=1e-12)


def test_a_larger_sink_moves_weight_away_from_its_head() -> None:
    logits = torch.tensor([[[5.0, 0.0], [0.0, 5.0]]], dtype=torch.float64)
    valid = torch.ones(1, 2, dtype=torch.bool)
    weights = [teacher_distribution(logits, torch.tensor([[s, 0.0]], dtype=torch.float64), valid)[0, 0].item() for s in (-5, 0, 5, 50, math.inf)]
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] == pytest.approx(torch.softmax(logits[0, 1], -1)[0].item())


def test_rows_without_a_valid_key_are_zero_in_value_and_gradient() -> None:
    logits, rest, _ = random_row(2, 4, 3)
    logits[:, :, 0] = math.nan  # whatever lies behind an invalid slot
    valid = torch.zeros(5, 4, dtype=torch.bool)
    valid[0, 1:] = True
    teacher = teacher_distribution(logits, torch.full_like(rest, -math.inf), valid)
    assert (teacher[1:] == 0).all()
    student = torch.full((5, 4), math.nan, dtype=torch.float64)
    student[0, 1:] = 1.0
    student.requires_grad_()
    kl = indexer_kl(student, torch.where(valid, teacher, math.nan), valid)
    (grad,) = torch.autograd.grad(kl.sum(), student)
    assert (kl[1:] == 0).all()
    assert (grad[1:] == 0).all()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(grad).all()


def test_kl_is_zero_only_for_the_teacher_itself() -> None:
    logits, rest, valid = random_row(3, 6, 4)
    valid[:, :2] = True
    teacher = teacher_distribution(logits, rest, valid)
    student = torch.where(valid, teacher.log(), 0)
    torch.testing.assert_close(indexer_kl(student + 3, teacher, valid), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (indexer_kl(student + torch.arange(6), teacher, valid) > 1e-3).all()


def test_the_teacher_is_never_differentiated() -> None:
    logits, rest, valid = random_row(2, 4, 5)
    teacher = teacher_distribution(logits.requires_grad_(), rest.requires_grad_(), valid)
    assert not teacher.requires_grad
    assert not indexer_kl(torch.zeros(5, 4), teacher.clone().requires_grad_(), valid).requires_grad


def test_unknown_teacher_names_the_legal_ones() -> None:
    logits, rest, valid = random_row(2, 4, 6)
    with pytest.raises(ValueError, match="full_csa, compressed_only"):
        teacher_distribution(logits, rest, valid, "full-csa")  # type: ignore[arg-type]


def test_heads_split_over_ranks_add_up_before_the_normalisation() -> None:
    """What ranks that hold different heads must exchange: the sum over their heads of the attention's probabilities, normalised after the sum."""
    logits, beside = torch.randn(6, 8, 5, dtype=torch.float64) * 3, torch.randn(6, 8, dtype=torch.float64) * 3
    valid = torch.rand(6, 5) < 0.7
    valid[:, 0] = True
    masked = logits.masked_fill(~valid[:, None], -torch.inf)
    of_head = (masked - torch.logaddexp(beside, masked.logsumexp(-1))[..., None]).exp()
    total = sum(part.sum(1) for part in of_head.split(2, dim=1))
    torch.testing.assert_close(teacher_distribution(logits, beside, valid), total / total.sum(-1, keepdim=True))  # type: ignore[union-attr]
