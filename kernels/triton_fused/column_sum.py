# SPDX-License-Identifier: Apache-2.0
"""Sum over the first axis: what the programs of a backward kernel have summed each by itself, added up in a fixed order.

Columns are few or many, rows from one to one a token. So a program takes few columns and many rows, all its loads under way at once; what is tall and
narrow is first cut into shares of rows, whose sums are summed in the same way.

Legend: P rows, C columns of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import ceil_div, power_of_two

TILE = 4096  # numbers a program loads at once: 32 a thread, in loads of 16 bytes
ROWS = 512  # of a tile at most: 8 columns, a sector of 32 bytes of every row
SHARE = 128  # rows of a share at least
SHARES = 512  # at most
ONE_PASS = 1024  # rows that one program still sums
PROGRAMS = 132  # with so many column blocks every multiprocessor of an H100 has work without shares


@triton.jit(do_not_specialize=["rows", "share"])
def column_sum_kernel(PARTIAL, OUT, rows, share, C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """OUT [shares, C]. Program (b, s): columns of block b, rows of share s; `share` is a multiple of BLOCK_P."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.program_id(1).to(tl.int64) * share
    total = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for first in range(0, share, BLOCK_P):
        row = start + first + tl.arange(0, BLOCK_P)
        real = (row < rows)[:, None] & (column < C)[None, :]
        total += tl.load(PARTIAL + row[:, None] * C + column[None, :], mask=real, other=0.0)
    out = OUT + tl.program_id(1).to(tl.int64) * C + column
    tl.store(out, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=column < C)


def _blocks(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    block_p = min(ROWS, power_of_two(rows))
    return block_p, min(TILE // block_p, max(4, power_of_two(columns)))


def _summed(partial: Tensor, out: Tensor, rows: int, share: int) -> Tensor:
    """`out` [shares, C] filled with the sums of shares of `share` rows of `partial` [rows, C]."""
    shares, columns = out.shape
    block_p, block_c = _blocks(min(rows, share), columns)
    grid = (ceil_div(columns, block_c), shares)
    column_sum_kernel[grid](partial, out, rows, ceil_div(share, block_p) * block_p, C=columns, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4)
    return out


def column_sum(partial: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """partial.sum(0) in fp32, rounded once to `dtype`; bit-equal from run to run. Launches on the current device.

    Args:
        partial: fp32 [P, ...], contiguous. No rows sum to zeros.

    Raises:
        ValueError: another dtype, no axis, or gaps in memory.
    """
    if partial.dtype != torch.float32 or partial.dim() == 0 or not partial.is_contiguous():
        raise ValueError(f"partial must be float32 [P, ...] and contiguous, got {list(partial.shape)} in {partial.dtype}, strides {partial.stride()}")
    rows, shape = partial.shape[0], partial.shape[1:]
    columns = shape.numel()
    if rows == 0 or columns == 0:
        return torch.zeros(shape, dtype=dtype, device=partial.device)
    if rows == 1:
        return partial[0].to(dtype)
    if rows > ONE_PASS and ceil_div(columns, _blocks(rows, columns)[1]) < PROGRAMS:
        share = SHARE * power_of_two(ceil_div(rows, SHARE * SHARES))
        shares = ceil_div(rows, share)
        partial, rows = _summed(partial, torch.empty(shares, columns, dtype=torch.float32, device=partial.device), rows, share), shares
    out = torch.empty(1, columns, dtype=dtype, device=partial.device)
    return _summed(partial, out, rows, rows).view(shape)
