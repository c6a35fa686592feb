# SPDX-License-Identifier: Apache-2.0
"""Attention backward in plain Triton: any head count, any head dim up to 512, bf16, fp16 and fp32; emits the teacher as it goes.

One program: one query row and a block of its heads. It recomputes P, forms dS = P * (dP - delta) * scale, keeps dq, and adds the gradient of
every key it read to a buffer. The sum of P over the heads, which is the full_csa teacher before normalisation, costs a store.

Deterministic form: integer additions commute exactly, so that the contributions are added as int64 multiples of a power of two. Its size follows from
bounds on the inputs, far below the rounding of fp32 (see `fixed_point_step`).

Legend: R query rows, T tokens, C entries, H heads, D head dim, K slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.portable_forward import key_slots, tile_range
from kernels.triton_fused.rows import RowBounds, RowPlan
from kernels.triton_fused.tiling import Tiling, backward_tiling

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def backward_kernel(
    Q,
    GRAD_OUT,
    WINDOW_KV,
    COMPRESSED_KV,
    SELECTED,
    Z_LOG2,
    DELTA,
    BOUNDS,
    DQ,
    DKV,
    STEP,
    TEACHER,
    rows,
    first_row,
    tokens,
    K,
    window_tiles,
    scale_log2,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
    EMIT_TEACHER: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    row = (rows - 1 - pid // head_blocks).to(tl.int64)
    token = (row + first_row).to(tl.int32)
    head_block = pid % head_blocks
    head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    real = (head < H)[:, None] & (dim < D)[None, :]
    window_start = tl.load(BOUNDS + row * 4)
    entry_start = tl.load(BOUNDS + row * 4 + 1)
    entry_end = tl.load(BOUNDS + row * 4 + 2)
    extent = tl.load(BOUNDS + row * 4 + 3)
    row_offset = row * (H * D) + head[:, None] * D + dim[None, :]
    q = tl.load(Q + row_offset, mask=real, other=0.0)
    g = tl.load(GRAD_OUT + row_offset, mask=real, other=0.0)
    # padded heads: a denominator of +inf makes their P exactly 0
    z = tl.load(Z_LOG2 + row * H + head, mask=head < H, other=float("inf"))
    delta = tl.load(DELTA + row * H + head, mask=head < H, other=0.0)
    dq = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if DETERMINISTIC:
        per_step = 1.0 / tl.load(STEP)
    first_tile, last_tile = tile_range(token, window_start, extent, window_tiles, BLOCK_N)
    for tile in range(first_tile, last_tile):
        in_window, key_row, slot, valid = key_slots(
            tile, token, row, window_start, entry_start, entry_end, SELECTED, K, window_tiles, BLOCK_N, ALL_VISIBLE
        )
        offset = key_row.to(tl.int64) * D
        address = tl.where(in_window, WINDOW_KV + offset, COMPRESSED_KV + offset)
        key_mask = valid[:, None] & (dim < D)[None, :]
        k = tl.load(address[:, None] + dim[None, :], mask=key_mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(g, tl.trans(k), input_precision=PRECISION)
        p = tl.where(valid[None, :], tl.exp2(s * scale_log2 - z[:, None]), 0.0)
        ds = p * (dp - delta[:, None]) * scale
        if EMIT_TEACHER:
            teacher_row = (head_block.to(tl.int64) * rows + row) * K
            tl.store(TEACHER + teacher_row + slot, tl.sum(p, 0), mask=(slot >= 0) & (slot < K))
        p_low = p.to(k.dtype)
        ds_low = ds.to(k.dtype)
        dq = tl.dot(ds_low, k, dq, input_precision=PRECISION)
        dkv = tl.dot(tl.trans(p_low), g, input_precision=PRECISION)
        dkv = tl.dot(tl.trans(ds_low), q, dkv, input_precision=PRECISION)
        target = DKV + (offset + tl.where(in_window, 0, tokens).to(tl.int64) * D)[:, None] + dim[None, :]
        if DETERMINISTIC:
            tl.atomic_add(target, (dkv * per_step).to(tl.int64), mask=key_mask, sem="relaxed")
        else:
            tl.atomic_add(target, dkv, mask=key_mask, sem="relaxed")
    tl.store(DQ + row_offset, dq.to(DQ.dtype.element_ty), mask=real)


def fixed_point_step(
    grad_out: Tensor, q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, bounds: RowBounds, plan: RowPlan, scale: float
) -> Tensor:
    """fp32 [1]: the power of two whose multiples the deterministic form adds; NaN where an input is not finite, which the result then shows.

    With g, k, x the largest magnitudes of grad_out, keys and q: |dP| and |delta| are at most D g k, so that one contribution to a key is at most
    B = H (g + 2 D g k |scale| x); R rows add to a key at most once each. The step is B R / 2^62 rounded up to a power of two. Padding and entries
    that no row sees do not count, whatever stands there.
    """
    rows, heads, dim = q.shape
    first, tokens = bounds.first_row, window_kv.shape[0]

    def largest(tensor: Tensor, counts: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return torch.zeros((), dtype=torch.float64, device=q.device)
        per_line = torch.linalg.vector_norm(tensor.flatten(1), float("inf"), dim=1, dtype=torch.float32)
        return torch.where(counts, per_line, 0.0).amax().double()

    token = torch.arange(first, first + rows, dtype=torch.int32, device=q.device)
    in_window = plan.bounds[:, 0] <= token
    reads = in_window | (plan.bounds[:, 3] > 0)
    # what precedes the first row is no padding, which stands at the end; what follows the last row is not read
    read_tokens = torch.cat([reads.any().expand(first), in_window, in_window.new_zeros(tokens - first - rows)])
    g, x, k = largest(grad_out, reads), largest(q, reads), largest(window_kv, read_tokens)
    if compressed_kv is not None:
        k = torch.maximum(k, largest(compressed_kv, torch.arange(compressed_kv.shape[0], device=q.device) < plan.bounds[:, 2].amax()))
    bound = heads * g * (1 + 2 * dim * k * abs(scale) * x) * max(rows, 1)
    # a bound of 0 leaves nothing to add; any step will do. The floor keeps the step and its inverse in fp32's normal range
    step = torch.exp2(torch.ceil(torch.log2(bound.clamp(min=2.0**-60))) - 62)
    return torch.where(torch.isfinite(bound), step, float("nan")).float().reshape(1)


def portable_backward(
    grad_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    z_log2: Tensor,
    delta: Tensor,
    bounds: RowBounds,
    plan: RowPlan,
    scale: float,
    emit_teacher: bool,
    deterministic: bool,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq [R, H, D], dkv fp32 [T + C, D] (windows first), teacher_sum fp32 [R, K] or None. z_log2 and delta as `prepare_gradient` returns them."""
    rows, heads, dim = q.shape
    tokens, entries = window_kv.shape[0], 0 if compressed_kv is None else compressed_kv.shape[0]
    slots = 0 if selected is None else selected.shape[1]
    dq = torch.empty_like(q)
    dkv = torch.zeros(tokens + entries, dim, dtype=torch.int64 if deterministic else torch.float32, device=q.device)
    tiles = tiling or backward_tiling(heads, dim, q.dtype)
    head_blocks = triton.cdiv(heads, tiles.heads)
    teacher = torch.zeros(head_blocks, rows, slots, dtype=torch.float32, device=q.device) if emit_teacher else None
    step = fixed_point_step(grad_out, q, window_kv, compressed_kv, bounds, plan, scale) if deterministic and rows else delta
    if rows:
        backward_kernel[(rows * head_blocks,)](
            q,
            grad_out,
            window_kv,
            window_kv if compressed_kv is None else compressed_kv,
            bounds.visible if selected is None else selected,
            z_log2,
            delta,
            plan.bounds,
            dq,
            dkv,
            step,
            delta if teacher is None else teacher,
            rows,
            bounds.first_row,
            tokens,
            slots,
            triton.cdiv(bounds.window, tiles.keys),
            scale * LOG2_E.value,
            scale,
            H=heads,
            D=dim,
            BLOCK_H=tiles.heads,
            BLOCK_D=tiles.dim,
            BLOCK_N=tiles.keys,
            ALL_VISIBLE=selected is None,
            EMIT_TEACHER=emit_teacher and slots > 0,
            DETERMINISTIC=deterministic,
            PRECISION=tiles.precision,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    if deterministic:
        dkv = (dkv.double() * step.double()).float() if rows else dkv.float()
    if teacher is None:
        return dq, dkv, None
    return dq, dkv, teacher[0] if head_blocks == 1 else teacher.sum(0)
