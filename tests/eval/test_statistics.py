# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from eval.statistics import paired_difference


def test_two_pairs_give_the_closed_form_interval() -> None:
    # one degree of freedom: Student's t is Cauchy, its 97.5 % quantile is tan(0.475 pi)
    found = paired_difference([1.0, 4.0], [0.5, 2.0])
    quantile, sd = math.tan(math.pi * 0.475), 1.5 / math.sqrt(2)
    assert found.mean == pytest.approx(1.25)
    assert found.sd == pytest.approx(sd)
    assert found.low == pytest.approx(1.25 - quantile * sd / math.sqrt(2))
    assert found.high == pytest.approx(1.25 + quantile * sd / math.sqrt(2))


def test_three_pairs_give_the_closed_form_interval() -> None:
    # two degrees of freedom: t_p = (2 p - 1) / sqrt(2 p (1 - p))
    p = 0.95
    quantile = (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    found = paired_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], confidence=0.9)
    assert found.high == pytest.approx(2 + quantile / math.sqrt(3))


def test_pairing_removes_what_the_seeds_share() -> None:
    first, second = [1.01, 5.01, 9.02], [1.0, 5.0, 9.0]
    found = paired_difference(first, second)
    assert found.sd == pytest.approx(math.sqrt(3) / 300)  # of the differences .01 .01 .02; the spread of either arm is 4


def test_words_claim_no_more_than_the_interval() -> None:
    assert "no interval" in paired_difference([1.0], [0.0]).words("a", "b")
    assert paired_difference([1.0], [0.0]).low is None
    assert paired_difference([1.0, -1.0], [0.0, 0.0]).words("a", "b") == "no difference seen"
    assert paired_difference([1.0, 1.001], [0.0, 0.0]).words("a", "b") == "a higher than b"
    assert paired_difference([0.0, 0.0], [1.0, 1.001]).words("a", "b") == "a lower than b"
    assert paired_difference([3.0, 4.0], [3.0, 4.0]).words("a", "b") == "identical in all 2 seeds"


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 2.0]), ([math.nan], [1.0]), ([math.inf, 1.0], [math.inf, 1.0])])
def test_what_is_no_pairing_is_refused(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError):
        paired_difference(first, second)
