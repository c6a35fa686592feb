# SPDX-License-Identifier: Apache-2.0
"""Paired differences over seeds, with Student-t intervals, and their wording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class PairedDifference:
    """Mean of first - second over n pairs. sd, low and high (interval at `confidence`) are None for fewer than two pairs."""

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    confidence: float

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def words(self, first: str, second: str) -> str:
        """What may be said of this difference: no more than the interval does."""
        if self.low is None or self.high is None:
            return "one seed, no interval"
        if self.mean == 0 and self.sd == 0:
            return f"identical in all {self.n} seeds"
        if not self.excludes_zero:
            return "no difference seen"
        return f"{first} {'higher' if self.mean > 0 else 'lower'} than {second}"


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Mean difference of paired values and its Student-t interval with n - 1 degrees of freedom.

    Raises ValueError for unequal lengths, no pair, or a value that is not finite: which seeds count is the caller's decision.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired values need equal lengths of at least one, got {len(first)} and {len(second)}")
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("paired values must be finite")
    differences = a - b
    n, mean = len(differences), float(differences.mean())
    if n == 1:
        return PairedDifference(n, mean, None, None, None, confidence)
    sd = float(differences.std(ddof=1))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * sd / math.sqrt(n)
    return PairedDifference(n, mean, sd, mean - half, mean + half, confidence)
