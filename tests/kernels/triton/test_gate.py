# SPDX-License-Identifier: Apache-2.0
"""The gate itself: it covers what it promises, and it turns red where a result is wrong."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.csa_gate_cases import FACTORS, MOST_CASES, Inputs, ids_of, inputs_of, pairwise_cases
from benchmarks.csa_gate_checks import (
    exact_d_score,
    exact_scores,
    judge,
    key_masks,
    poisoned_outputs,
    reference_once,
    rounding_yardstick,
    selection_failures,
)
from kernels import get_backend

SMALL = dataclasses.replace(
    pairwise_cases()[0], documents="empty", heads=2, head_dim=16, indexer=(2, 16), topk="below", window=8, ids="shuffled_holes", dtype=torch.bfloat16
)


def test_every_pair_of_levels_occurs_within_the_allowed_number_of_cases() -> None:
    cases = pairwise_cases()
    assert len(cases) <= MOST_CASES
    for a, b in itertools.combinations(FACTORS, 2):
        wanted = set(itertools.product(FACTORS[a], FACTORS[b]))
        assert {(getattr(c, a), getattr(c, b)) for c in cases} == wanted, (a, b)


@pytest.fixture(scope="module")
def judged() -> tuple[Inputs, dict[str, Tensor], dict[str, Tensor]]:
    x = inputs_of(SMALL, "cpu", 3)
    chosen = get_backend("unfused").select(x.index_q, x.index_k, x.index_w, x.layout, x.ratio, x.topk)
    x.selected = ids_of(SMALL, x, chosen, 3)
    exact = reference_once(x, "full_csa")
    return x, exact, rounding_yardstick(x, exact, exact_d_score(x, "full_csa"))


def test_float64_and_the_yardstick_itself_are_green(judged: tuple) -> None:
    x, exact, yardstick = judged
    assert judge(x, exact, exact, yardstick, 4.0)["failures"] == []
    assert judge(x, exact | yardstick, exact, yardstick, 4.0)["failures"] == []


@pytest.mark.parametrize("name", ["out", "d_q", "d_window_kv", "d_compressed_kv", "d_index_q", "d_index_k", "d_index_w"])
@pytest.mark.parametrize("damage", ["one row lost", "one NaN", "2 % too large"])
def test_damaged_result_is_red(judged: tuple, name: str, damage: str) -> None:
    x, exact, yardstick = judged
    wrong = exact[name].clone()
    row = wrong.reshape(wrong.shape[0], -1).norm(dim=1).argmax()
    if damage == "one row lost":
        wrong[row] = 0
    elif damage == "one NaN":
        wrong[row].view(-1)[0] = float("nan")
    else:
        wrong *= 1.02
    assert judge(x, exact | {name: wrong}, exact, yardstick, 4.0)["failures"]


def test_wrong_scalars_and_lse_are_red(judged: tuple) -> None:
    x, exact, yardstick = judged
    shifted = torch.where(exact["lse"].isfinite(), exact["lse"] * 1.4426950408889634, exact["lse"])  # base 2
    for wrong in ({"kl": exact["kl"] * 1.01}, {"rows": exact["rows"] + 1}, {"lse": shifted}, {"lse": exact["lse"].nan_to_num(neginf=-1e30)}):
        assert judge(x, exact | wrong, exact, yardstick, 4.0)["failures"]


def test_holes_hold_no_entry_that_the_row_may_see(judged: tuple) -> None:
    x, _, _ = judged
    attended = key_masks(x)[1].sum(1)
    assert (attended < x.layout.visible_compressed(x.ratio).clamp(max=x.topk)).any()
    assert (x.selected >= x.compressed_kv.shape[0]).any()


def test_wrong_selection_is_red() -> None:
    x = inputs_of(SMALL, "cpu", 4)
    ids = get_backend("unfused").select(x.index_q, x.index_k, x.index_w, x.layout, x.ratio, x.topk)
    scores = exact_scores(x.index_q, x.index_k, x.index_w)
    bounds = (x.layout.entry_start(x.ratio), x.layout.visible_compressed(x.ratio))
    assert selection_failures(ids, scores, *bounds) == []
    row = int(bounds[1].argmax())
    missing = next(j for j in range(int(bounds[0][row]), int(bounds[0][row] + bounds[1][row])) if j not in ids[row].tolist())
    for damage in (-1, missing, x.index_k.shape[0] - 1 if row < 200 else 0):
        wrong = ids.clone()
        wrong[row, 0] = damage
        assert selection_failures(wrong, scores, *bounds), damage
    swapped = ids.clone()
    swapped[row] = ids[row].flip(0)
    assert selection_failures(swapped, scores, *bounds)


def test_poison_reaches_every_empty_tensor_and_ends() -> None:
    with poisoned_outputs():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.int32)).eq(2**31 - 1).all()
    assert torch.empty.__name__ == "empty"
