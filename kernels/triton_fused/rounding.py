# SPDX-License-Identifier: Apache-2.0
"""Integer helpers of the host code. Those of Triton do the same and cost two microseconds a call, several dozen times a layer."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, for b > 0."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
