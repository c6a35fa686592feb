# SPDX-License-Identifier: Apache-2.0
"""KL from the teacher to the indexer over all visible entries, and its gradient: for the warm-up of the indexer under dense attention.

Chunks of query rows go through two bounded fp32 buffers [rows of the chunk, entries]: the log of the teacher's head sum, and the index scores,
which become d loss / d score in place. No tensor has a head axis beside the entry axis. d index_k is summed in a fixed order: the result is the
same bits from run to run.

Legend: R query rows, H heads, D head dim, HI index heads, DI index head dim, C compressed entries of the whole row, S columns of the buffers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.index_scores import write_scores
from kernels.triton_fused.indexer_sparse import IndexerGradients, head_block
from kernels.triton_fused.rounding import ceil_div, power_of_two
from kernels.triton_fused.selection import chunk_rows
from kernels.triton_fused.teacher import dim_chunk, relative_normaliser, safe_top

PROGRAMS = 264  # two per multiprocessor of an H200: into so many parts the sum over query rows is cut


@triton.jit
def head_sum_kernel(
    Q,
    KEYS,
    Z,
    ENTRY_START,
    VISIBLE,
    LOG_SUMS,
    first_row,
    columns,
    C,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """log of the sum over heads of exp(logit - Z) for one row and one tile of its entries."""
    line = tl.program_id(0)
    row = (first_row + line).to(tl.int64)
    count = tl.load(VISIBLE + row)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.program_id(1) * BLOCK_N < count:
        entry = tl.load(ENTRY_START + row) + column
        valid = (column < count) & (entry < C)
        head = tl.arange(0, BLOCK_H)
        real = head < H
        dim = tl.arange(0, CHUNK)
        z = relative_normaliser(tl.load(Z + row * H + head, mask=real, other=float("inf")), real)
        logits = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
        for d0 in tl.static_range(0, D, CHUNK):
            inside = d0 + dim < D
            k = tl.load(KEYS + entry.to(tl.int64)[:, None] * D + d0 + dim[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
            q = tl.load(Q + row * (H * D) + head[:, None] * D + d0 + dim[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            logits = tl.dot(k, tl.trans(q), logits, input_precision=PRECISION)
        relative = tl.where(real[None, :], logits * scale - z[None, :], float("-inf"))
        high = safe_top(tl.max(relative, 1))
        head_sum = high + tl.log(tl.sum(tl.exp(relative - high[:, None]), 1))
        tl.store(LOG_SUMS + line.to(tl.int64) * columns + column, head_sum, mask=valid)


@triton.jit
def row_kernel(SCORES, LOG_SUMS, VISIBLE, KL, first_row, columns, C, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr):
    """KL of one row; turns its scores into softmax - teacher."""
    line = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(VISIBLE + first_row + line), C)
    lane = tl.arange(0, BLOCK)
    score_top = tl.full([], float("-inf"), tl.float32)
    score_sum = tl.zeros([], tl.float32)
    log_top = tl.full([], float("-inf"), tl.float32)
    log_sum = tl.zeros([], tl.float32)
    for n in range(0, count, BLOCK):
        inside = n + lane < count
        score = tl.load(SCORES + line * columns + n + lane, mask=inside, other=float("-inf"))
        log_t = tl.load(LOG_SUMS + line * columns + n + lane, mask=inside, other=float("-inf"))
        new_score_top = tl.maximum(score_top, tl.max(score, 0))
        score_sum = score_sum * tl.exp(score_top - safe_top(new_score_top)) + tl.sum(tl.exp(score - safe_top(new_score_top)), 0)
        score_top = new_score_top
        new_log_top = tl.maximum(log_top, tl.max(log_t, 0))
        log_sum = log_sum * tl.exp(log_top - safe_top(new_log_top)) + tl.sum(tl.exp(log_t - safe_top(new_log_top)), 0)
        log_top = new_log_top
    student_norm = safe_top(score_top) + tl.log(score_sum)
    teacher_norm = safe_top(log_top) + tl.log(log_sum)
    kl = tl.zeros([], tl.float32)
    for n in range(0, count, BLOCK):
        inside = n + lane < count
        log_student = tl.load(SCORES + line * columns + n + lane, mask=inside, other=0.0) - student_norm
        log_t = tl.load(LOG_SUMS + line * columns + n + lane, mask=inside, other=float("-inf")) - teacher_norm
        t = tl.exp(log_t)
        kl += tl.sum(tl.where(t > 0.0, t * (tl.where(t > 0.0, log_t, 0.0) - log_student), 0.0), 0)
        if WITH_GRAD:
            tl.store(SCORES + line * columns + n + lane, tl.exp(log_student) - t, mask=inside)
    tl.store(KL + first_row + line, kl)


@triton.jit
def query_gradient_kernel(
    Q,
    KEYS,
    WEIGHTS,
    D_SCORES,
    ENTRY_START,
    VISIBLE,
    D_Q,
    D_WEIGHTS,
    first_row,
    columns,
    C,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """d index_q and d index_w of one row and one block of heads."""
    line = tl.program_id(0).to(tl.int64)
    row = first_row + line
    count = tl.load(VISIBLE + row)
    start = tl.load(ENTRY_START + row)
    lane = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    for h0 in tl.static_range(0, HI, BLOCK_H):
        q, w = head_block(Q, WEIGHTS, row, h0, HI, DI, BLOCK_H, BLOCK_D)
        dq = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        d_weight = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for n in range(0, count, BLOCK_N):
            valid = (n + lane < count) & (start + n + lane < C)
            entry = (start + n + lane).to(tl.int64)
            k = tl.load(KEYS + entry[:, None] * DI + dim[None, :], mask=valid[:, None] & (dim < DI)[None, :], other=0.0)
            g = tl.load(D_SCORES + line * columns + n + lane, mask=valid, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            d_weight += tl.maximum(s, 0.0) * g[None, :]
            ds = tl.where(s > 0.0, w[:, None] * g[None, :], 0.0).to(k.dtype)
            dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        head = h0 + tl.arange(0, BLOCK_H)
        mask = (head < HI)[:, None] & (dim < DI)[None, :]
        tl.store(D_Q + row * (HI * DI) + head[:, None] * DI + dim[None, :], dq.to(D_Q.dtype.element_ty), mask=mask)
        tl.store(D_WEIGHTS + row * HI + head, tl.sum(d_weight, 1).to(D_WEIGHTS.dtype.element_ty), mask=head < HI)


@triton.jit
def key_gradient_kernel(
    Q,
    KEYS,
    WEIGHTS,
    D_SCORES,
    ENTRY_START,
    VISIBLE,
    PARTS,
    first_row,
    stop_row,
    columns,
    C,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds to PARTS [parts, C, DI] what every parts-th row of the chunk gives to one tile of keys."""
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    mask = (entry < C)[:, None] & (dim < DI)[None, :]
    k = tl.load(KEYS + entry.to(tl.int64)[:, None] * DI + dim[None, :], mask=mask, other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for line in range(tl.program_id(1), stop_row - first_row, tl.num_programs(1)):
        wide_line = tl.zeros([], tl.int64) + line  # a plain integer where an interpreter runs the loop
        row = first_row + wide_line
        start = tl.load(ENTRY_START + row)
        column = entry - start
        valid = (column >= 0) & (column < tl.load(VISIBLE + row)) & (entry < C)
        if tl.max(valid.to(tl.int32), 0) > 0:
            g = tl.load(D_SCORES + wide_line * columns + column, mask=valid, other=0.0)
            for h0 in tl.static_range(0, HI, BLOCK_H):
                q, w = head_block(Q, WEIGHTS, row, h0, HI, DI, BLOCK_H, BLOCK_D)
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                ds = tl.where(s > 0.0, w[None, :] * g[:, None], 0.0).to(k.dtype)
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    address = PARTS + (tl.program_id(1).to(tl.int64) * C + entry.to(tl.int64))[:, None] * DI + dim[None, :]
    tl.store(address, tl.load(address, mask=mask, other=0.0) + dk, mask=mask)


def dense_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    compressed_kv: Tensor,
    normaliser: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    scale: float,
    ratio: int,
    longest: int,
    first_token: int = 0,
    with_grad: bool = True,
    budget: int = 64 << 20,
) -> tuple[Tensor, IndexerGradients | None]:
    """KL per row fp32 [R] over all visible entries, and the gradients of its sum if asked for.

    Args:
        index_q: [R, HI, DI]; index_k: [C, DI]; index_w: [R, HI]; q: [R, H, D]; compressed_kv: [C, D].
        normaliser: fp32 [R, H], Z of the teacher: logaddexp(lse, sink) for full_csa, the logsumexp over the entries for compressed_only.
        longest: host bound on `visible`; budget: bytes of each of the two buffers.
    """
    rows, index_heads, index_dim = index_q.shape
    widest = min(longest, index_k.shape[0])
    kl = torch.zeros(rows, dtype=torch.float32, device=index_q.device)
    d_q, d_w = (torch.zeros_like(t) for t in (index_q, index_w)) if with_grad else (index_q, index_w)
    entries = index_k.shape[0]
    shape = _loss_shape(index_heads, index_dim, index_q.dtype)
    key_tiles = ceil_div(max(1, entries), shape["BLOCK_N"])
    parts = torch.zeros(max(1, PROGRAMS // key_tiles) if with_grad else 0, *index_k.shape, dtype=torch.float32, device=index_k.device)
    size = chunk_rows(rows, widest, budget)
    for first in range(0, rows, max(1, size)):
        stop = min(rows, first + size)
        columns = min(widest, (first_token + stop) // ratio)
        if columns == 0:
            continue
        scores = torch.empty(stop - first, columns, dtype=torch.float32, device=index_q.device)
        log_sums = torch.empty_like(scores)
        write_scores(index_q, index_k, index_w, entry_start, visible, scores, first, stop)
        _write_head_sums(q, compressed_kv, normaliser, entry_start, visible, log_sums, first, scale)
        row_kernel[(stop - first,)](scores, log_sums, visible, kl, first, columns, entries, WITH_GRAD=with_grad, BLOCK=1024, num_warps=4)
        if with_grad:
            common = (index_q, index_k, index_w, scores, entry_start, visible)
            query_gradient_kernel[(stop - first,)](*common, d_q, d_w, first, columns, entries, HI=index_heads, DI=index_dim, **shape)
            key_gradient_kernel[(key_tiles, parts.shape[0])](*common, parts, first, stop, columns, entries, HI=index_heads, DI=index_dim, **shape)
    if not with_grad:
        return kl, None
    return kl, IndexerGradients(d_q, parts.sum(0).to(index_k.dtype), d_w)


def _loss_shape(heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile and launch options shared by both gradient kernels."""
    padded, block_d = max(16, power_of_two(heads)), max(16, power_of_two(dim))
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_D": block_d, "BLOCK_N": 16, "PRECISION": "ieee", "num_warps": 4, "num_stages": 1}
    block = {"BLOCK_H": min(padded, 64), "BLOCK_D": block_d, "PRECISION": "tf32"}
    return block | ({"BLOCK_N": 64, "num_warps": 4, "num_stages": 2} if block_d <= 128 else {"BLOCK_N": 32, "num_warps": 8, "num_stages": 1})


def _write_head_sums(
    q: Tensor, compressed_kv: Tensor, normaliser: Tensor, entry_start: Tensor, visible: Tensor, log_sums: Tensor, first: int, scale: float
) -> None:
    heads, dim = q.shape[1:]
    wide = q.element_size() == 2
    block_h, block_n = max(16, power_of_two(heads)), 64 if wide else 16
    chunk = dim_chunk(dim)
    lines, columns = log_sums.shape
    head_sum_kernel[(lines, ceil_div(columns, block_n))](
        q,
        compressed_kv,
        normaliser,
        entry_start,
        visible,
        log_sums,
        first,
        columns,
        compressed_kv.shape[0],
        scale,
        H=heads,
        D=dim,
        BLOCK_H=block_h,
        CHUNK=chunk,
        BLOCK_N=block_n,
        PRECISION="tf32" if wide else "ieee",
        num_warps=4 if block_h <= 64 else 8,
        num_stages=2 if wide else 1,
    )
