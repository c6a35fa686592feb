# SPDX-License-Identifier: Apache-2.0
"""What the attention backward needs before it starts, from one pass over out and its gradient.

    delta[r, h] = sum_d out * grad_out            the row constant of the softmax backward
    z[r, h]     = logaddexp(lse, sink)            the full log denominator; kept times log2(e)
    d_sink[h]   = - sum_r exp(sink - z) * delta

Legend: R query rows, H heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.column_sum import column_sum

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_kernel(
    OUT,
    GRAD_OUT,
    LSE,
    SINK,
    Z_LOG2,
    DELTA,
    PARTIAL_SINK,
    rows,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    head_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(0) // head_blocks
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    real = (head < H)[:, None] & (dim < D)[None, :]
    sink = tl.load(SINK + head, mask=head < H, other=0.0)
    d_sink = tl.zeros([BLOCK_H], tl.float32)
    for i in range(ROWS):
        row = block.to(tl.int64) * ROWS + i
        # a vector: the interpreter of Triton 3.9 makes no mask of a vector and a scalar
        inside = (head < H) & (row + tl.zeros([BLOCK_H], tl.int64) < rows)
        here = real & inside[:, None]
        offset = row * (H * D) + head[:, None] * D + dim[None, :]
        out = tl.load(OUT + offset, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(GRAD_OUT + offset, mask=here, other=0.0).to(tl.float32)
        delta = tl.sum(out * grad, 1)
        lse = tl.load(LSE + row * H + head, mask=inside, other=0.0)
        top = tl.maximum(lse, sink)
        low = tl.minimum(lse, sink)
        # equal infinities have no difference
        gap = tl.where(low == top, 0.0, low - top)
        z = top + tl.log(1.0 + tl.exp(gap))
        tl.store(DELTA + row * H + head, delta, mask=inside)
        tl.store(Z_LOG2 + row * H + head, z * LOG2_E, mask=inside)
        # a row without keys has no part in it, whatever stands in the gradient of its out
        d_sink -= tl.where(lse == float("-inf"), 0.0, tl.where(sink == z, 1.0, tl.exp(sink - z)) * delta)
    tl.store(PARTIAL_SINK + block.to(tl.int64) * H + head, d_sink, mask=head < H)


def prepare_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z times log2(e) fp32 [R, H], delta fp32 [R, H], d_sink fp32 [H]. The sum over rows has a fixed order: bit-equal from run to run."""
    rows, heads, dim = out.shape
    z_log2 = torch.empty(rows, heads, dtype=torch.float32, device=out.device)
    delta = torch.empty_like(z_log2)
    if rows == 0:
        return z_log2, delta, torch.zeros(heads, dtype=torch.float32, device=out.device)
    block_d = triton.next_power_of_2(dim)
    block_h = min(triton.next_power_of_2(heads), max(1, 8192 // block_d))
    per_program = 1  # more would share a load of the sink and cost a third of the bandwidth
    blocks = triton.cdiv(rows, per_program)
    partial = torch.empty(blocks, heads, dtype=torch.float32, device=out.device)
    prepare_kernel[(blocks * triton.cdiv(heads, block_h),)](
        out, grad_out, lse, sink, z_log2, delta, partial, rows, H=heads, D=dim, BLOCK_H=block_h, BLOCK_D=block_d, ROWS=per_program, num_warps=4
    )
    return z_log2, delta, column_sum(partial)
