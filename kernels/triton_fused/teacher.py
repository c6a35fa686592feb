# SPDX-License-Identifier: Apache-2.0
"""The teacher over selected entries in log space, for both teachers: what neither sinks of 200 nor a compressed mass of 1e-30 can empty.

log t[r, j] = logsumexp over heads of (logit - Z), minus its own logsumexp over the row's support. Z is logaddexp(lse, sink) for full_csa and the
logsumexp over the support for compressed_only; the smallest Z of a row is taken off all of them, which cancels and keeps the digits of the rest.

Legend: R query rows, H heads, D head dim, K slots of the support, C compressed entries of the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import ceil_div, power_of_two

REDO_ROWS = 64  # rows whose sums one program looks at
UNDERFLOW = 2.0**-100  # an emitted row sum below this has lost digits of the entries that matter


@triton.jit
def tile_logits(
    ids, valid, KEYS, Q, held, row, scale, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):
    """Scaled logits [BLOCK_N, BLOCK_H] of one tile of gathered keys, -inf where the key is invalid; `held` is the whole q if it fits one chunk."""
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, CHUNK)
    line = KEYS + ids.to(tl.int64)[:, None] * D + dim[None, :]
    if CHUNK >= D:
        mask = valid[:, None] & (dim < D)[None, :]
        logits = tl.dot(tl.load(line, mask=mask, other=0.0), tl.trans(held), input_precision=PRECISION)
    else:
        logits = tl.zeros([ids.shape[0], BLOCK_H], tl.float32)
        for d0 in tl.static_range(0, D, CHUNK):
            k = tl.load(line + d0, mask=valid[:, None], other=0.0)
            q = tl.load(Q + row * (H * D) + head[:, None] * D + d0 + dim[None, :], mask=(head < H)[:, None], other=0.0)
            logits = tl.dot(k, tl.trans(q), logits, input_precision=PRECISION)
    return tl.where(valid[:, None], logits * scale, float("-inf"))


@triton.jit
def safe_top(top):
    """A maximum that can be subtracted: 0 where it is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def relative_normaliser(z, real):
    """Z minus its minimum over the real heads; 0 for all where that is not finite (all sinks +inf: the limit of equal ones)."""
    lowest = tl.min(tl.where(real, z, float("inf")), 0)
    finite = (lowest > float("-inf")) & (lowest < float("inf"))
    return tl.where(finite, z - tl.where(finite, lowest, 0.0), 0.0)


@triton.jit
def teacher_row(
    row,
    Q,
    KEYS,
    SUPPORT,
    SINK,
    LSE,
    ENTRY_START,
    VISIBLE,
    TEACHER,
    C,
    K,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FULL_CSA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes one row of the teacher."""
    first = tl.load(ENTRY_START + row)
    end = tl.minimum(first + tl.load(VISIBLE + row), C)
    slot = tl.arange(0, BLOCK_K)
    all_ids = tl.load(SUPPORT + row * K + slot, mask=slot < K, other=-1)
    present = (all_ids >= first) & (all_ids < end)
    extent = tl.max(tl.where(present, slot + 1, 0), 0)
    if extent > 0:
        head = tl.arange(0, BLOCK_H)
        real = head < H
        lane = tl.arange(0, BLOCK_N)
        if CHUNK >= D:
            dim = tl.arange(0, CHUNK)
            held = tl.load(Q + row * (H * D) + head[:, None] * D + dim[None, :], mask=real[:, None] & (dim < D)[None, :], other=0.0)
        else:
            held = 0.0
        if FULL_CSA:
            lse = tl.load(LSE + row * H + head, mask=real, other=0.0)
            sink = tl.load(SINK + head, mask=real, other=0.0)
            larger = tl.maximum(lse, sink)
            finite = (larger > float("-inf")) & (larger < float("inf"))
            shifted = tl.exp(lse - tl.where(finite, larger, 0.0)) + tl.exp(sink - tl.where(finite, larger, 0.0))
            z = tl.where(finite, larger + tl.log(shifted), larger)
        else:
            top = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_H], tl.float32)
            for n in range(0, extent, BLOCK_N):
                ids = tl.load(SUPPORT + row * K + n + lane, mask=n + lane < K, other=-1)
                valid = (ids >= first) & (ids < end)
                logits = tile_logits(ids, valid, KEYS, Q, held, row, scale, H, D, BLOCK_H, CHUNK, PRECISION)
                new_top = tl.maximum(top, tl.max(logits, 0))
                total = total * tl.exp(top - safe_top(new_top)) + tl.sum(tl.exp(logits - safe_top(new_top)[None, :]), 0)
                top = new_top
            z = top + tl.log(total)
        z = tl.where(real, relative_normaliser(z, real), float("inf"))
        for n in range(0, extent, BLOCK_N):
            ids = tl.load(SUPPORT + row * K + n + lane, mask=n + lane < K, other=-1)
            valid = (ids >= first) & (ids < end)
            logits = tile_logits(ids, valid, KEYS, Q, held, row, scale, H, D, BLOCK_H, CHUNK, PRECISION)
            relative = tl.where(valid[:, None], logits - z[None, :], float("-inf"))
            high = safe_top(tl.max(relative, 1))
            head_sum = high + tl.log(tl.sum(tl.exp(relative - high[:, None]), 1))
            tl.store(TEACHER + row * K + n + lane, tl.where(valid, head_sum, float("-inf")), mask=n + lane < K)
        tl.debug_barrier()  # the row was written by other threads of this program
        log_t = tl.load(TEACHER + row * K + slot, mask=present, other=float("-inf"))
        weight = tl.exp(log_t - safe_top(tl.max(log_t, 0)))
        tl.store(TEACHER + row * K + slot, weight / tl.sum(weight, 0), mask=slot < K)
    else:
        tl.store(TEACHER + row * K + slot, tl.zeros([BLOCK_K], tl.float32), mask=slot < K)


@triton.jit
def teacher_kernel(
    Q,
    KEYS,
    SUPPORT,
    SINK,
    LSE,
    ENTRY_START,
    VISIBLE,
    TEACHER,
    SUMS,
    rows,
    C,
    K,
    scale,
    underflow,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FULL_CSA: tl.constexpr,
    REDO: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row per program; with REDO the rows of a block whose emitted sum underflowed, which as a rule are none."""
    if REDO > 0:
        base = tl.program_id(0) * REDO
        block = base + tl.arange(0, REDO)
        lost = tl.load(SUMS + block, mask=block < rows, other=float("inf")) < underflow
        if tl.sum(lost.to(tl.int32), 0) > 0:
            for i in range(REDO):
                row = tl.zeros([], tl.int64) + base + i
                if tl.load(SUMS + row, mask=row < rows, other=float("inf")) < underflow:
                    teacher_row(
                        row, Q, KEYS, SUPPORT, SINK, LSE, ENTRY_START, VISIBLE, TEACHER, C, K, scale,
                        H, D, BLOCK_H, CHUNK, BLOCK_N, BLOCK_K, FULL_CSA, PRECISION,
                    )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)
        teacher_row(
            row, Q, KEYS, SUPPORT, SINK, LSE, ENTRY_START, VISIBLE, TEACHER, C, K, scale,
            H, D, BLOCK_H, CHUNK, BLOCK_N, BLOCK_K, FULL_CSA, PRECISION,
        )  # fmt: skip


@dataclass(frozen=True)
class TeacherTiling:
    """Keys of one product, columns multiplied at once, warps and pipeline stages."""

    keys: int
    chunk: int
    warps: int
    stages: int


def teacher_tiling(heads: int, dim: int, itemsize: int) -> TeacherTiling:
    """`heads`: rounded up to a power of two. Reading q again in chunks is faster than holding it: several programs then share a multiprocessor."""
    chunk = dim_chunk(dim)
    if itemsize == 4:
        return TeacherTiling(16, chunk, 4, 1)
    return TeacherTiling(64, chunk, 4 if heads <= 64 else 8, 1 if chunk < dim else 2)


def dim_chunk(dim: int) -> int:
    """Columns multiplied at once: all of a short row, else the largest power of two up to 64 that divides D."""
    whole = max(16, power_of_two(dim))
    divisor = dim & -dim
    if divisor < 16 or (whole <= 128 and whole == dim):
        return whole
    return min(divisor, 64)


def sparse_teacher(
    q: Tensor,
    compressed_kv: Tensor,
    support: Tensor,
    sink: Tensor,
    lse: Tensor | None,
    entry_start: Tensor,
    visible: Tensor,
    scale: float,
    emitted: Tensor | None = None,
    tiling: TeacherTiling | None = None,
) -> Tensor:
    """The teacher over `support`, fp32 [R, K], each row summing to 1; 0 in invalid slots and in rows without a valid one.

    Args:
        q: [R, H, D]; compressed_kv: [C, D]; support: int32 [R, K], any order, holes allowed.
        lse: fp32 [R, H] of the attention over the same support (without the sink) for full_csa; None for compressed_only.
        emitted: sums of probabilities from the attention backward, 0 in invalid slots. Given, only its rows that underflowed are computed anew, in
            place, and it is returned: its other rows keep whatever sum they have. Which rows these are is decided on the device.
    """
    rows, heads, dim = q.shape
    slots = support.shape[1]
    teacher = torch.empty(rows, slots, dtype=torch.float32, device=q.device) if emitted is None else emitted
    if rows == 0 or slots == 0:
        return teacher
    block_h = max(16, power_of_two(heads))
    tiles = tiling or teacher_tiling(block_h, dim, q.element_size())
    redo = 0 if emitted is None else REDO_ROWS
    teacher_kernel[(rows if emitted is None else ceil_div(rows, redo),)](
        q,
        compressed_kv,
        support,
        sink,
        sink if lse is None else lse,
        entry_start,
        visible,
        teacher,
        teacher if emitted is None else emitted.sum(-1),
        rows,
        compressed_kv.shape[0],
        slots,
        scale,
        UNDERFLOW,
        H=heads,
        D=dim,
        BLOCK_H=block_h,
        CHUNK=tiles.chunk,
        BLOCK_N=tiles.keys,
        BLOCK_K=max(16, power_of_two(slots)),
        FULL_CSA=lse is not None,
        REDO=redo,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return teacher
