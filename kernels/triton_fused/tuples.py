# SPDX-License-Identifier: Apache-2.0
"""Tuples of tensors inside kernels, one tensor per step of a static loop."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401, the interpreter asks for it


@triton.jit
def appended(items, item):
    """The tuple `items` with `item` behind them."""
    return items + (item,)  # noqa: RUF005, the language knows no starred items
