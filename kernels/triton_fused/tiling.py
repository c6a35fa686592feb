# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the plain Triton attention kernels, by head count, head dim and dtype.

The lines for up to 64 heads of 64 or 128 columns, for 64 of 256 and for 64 of 512 were timed on an H200 with Triton 3.6.0 (MEASURED.md): few warps
are faster even where they spill a little. The others were chosen so that nothing spills.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tiling:
    """One program's tile: heads x keys over `dim` columns (the head dim rounded up to a power of two)."""

    heads: int
    keys: int
    dim: int
    warps: int
    stages: int
    precision: str


def _precision(dtype: torch.dtype) -> str:
    # tf32, the default of a float32 product, keeps 10 bits: not what a caller who asks for float32 expects
    return "ieee" if dtype == torch.float32 else "tf32"


def forward_tiling(heads: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Tile of the forward. The matrix units take at least 16 rows, so fewer heads are padded."""
    dim = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return Tiling(16, 16 if dim >= 256 else 32, dim, 4, 1, "ieee")
    precision = _precision(dtype)
    if heads <= 16:
        if dim <= 128:
            return Tiling(16, 64 if dim == 128 else 32, dim, 1, 2 if dim == 128 else 3, precision)
        return Tiling(16, 32, dim, 4, 2, precision)
    if heads <= 32:
        return Tiling(32, 64 if dim == 64 else 32, dim, 1 if dim <= 128 else 4, 2, precision)
    return Tiling(64, 128 if dim <= 64 else 64, dim, 4 if dim <= 256 else 8, 2, precision)


def backward_tiling(heads: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Tile of the backward, which holds five tiles at once where the forward holds two."""
    dim = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return Tiling(16, 16, dim, 4 if dim < 512 else 8, 1, "ieee")
    precision = _precision(dtype)
    if heads <= 16:
        if dim <= 128:
            return Tiling(16, 32, dim, 1 if dim == 128 else 2, 1, precision)
        return Tiling(16, 32, dim, 4 if dim == 256 else 8, 1, precision)
    if heads <= 32 or dim == 512:  # 64 heads of 512 columns need 296 KiB of smem here
        return Tiling(32, 32, dim, 1 if dim <= 64 else 2 if dim == 128 else 8, 1, precision)
    return Tiling(64, 64 if dim <= 128 else 32, dim, 4 if dim <= 128 else 8, 1, precision)
