# SPDX-License-Identifier: Apache-2.0
"""KL from the teacher to the indexer over selected entries, and its gradient to index_q, index_k, index_w; products are recomputed.

One program: one query row. It scores the selected entries where the selection has not kept the scores, turns the row into
d loss / d score = softmax - teacher, and walks the entries again for the gradients. Sums over query
rows (d index_k) go through fp32 additions in memory, or, deterministic, through integer ones, whose order does not matter.

Legend: R query rows, K slots of the support, C compressed entries of the whole row, HI index heads, DI index head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import power_of_two
from kernels.triton_fused.teacher import safe_top
from kernels.triton_fused.tuples import appended


@dataclass(frozen=True)
class LossTiling:
    """Heads x keys of one product, warps and pipeline stages.

    chunk: head dims of one product, all if 0. registers: most of a thread, as many as there are if 0.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    chunk: int = 0
    registers: int = 0


def loss_tiling(heads: int, head_dim: int, dtype: torch.dtype, deterministic: bool = False) -> LossTiling:
    """Measured on an H200 with Triton 3.6.0 for 64 heads of 128; the others keep the accumulators within the registers."""
    padded = max(16, power_of_two(heads))
    dim = max(16, power_of_two(head_dim))
    if dtype == torch.float32:
        return LossTiling(16, 16, 4, 1)
    if padded <= 32:
        return LossTiling(padded, 64 if dim <= 128 else 32, 4, 2)
    if (heads, head_dim) == (64, 128):
        # three programs a multiprocessor instead of two; integer sums need the registers themselves: held to 168, every product would be waited for
        return LossTiling(64, 64, 4, 1, chunk=64, registers=0 if deterministic else 168)
    return LossTiling(64, 64, 4, 1) if dim <= 128 else LossTiling(64, 32, 8, 1)


@triton.jit
def gather_keys(SUPPORT, KEYS, row, n, first, end, K, DI: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """ids [BLOCK_N], their validity and their keys, CHUNKS times [BLOCK_N, CHUNK], 0 where invalid."""
    slot = n + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, CHUNK)
    ids = tl.load(SUPPORT + row * K + slot, mask=slot < K, other=-1)
    valid = (ids >= first) & (ids < end)
    line = KEYS + ids.to(tl.int64)[:, None] * DI + dim[None, :]
    keys = ()
    for c in tl.static_range(CHUNKS):
        keys = appended(keys, tl.load(line + c * CHUNK, mask=valid[:, None] & (c * CHUNK + dim < DI)[None, :], other=0.0))
    return ids, valid, keys


@triton.jit
def head_block(Q, WEIGHTS, row, h0: tl.constexpr, HI: tl.constexpr, DI: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Index queries [BLOCK_H, BLOCK_D] and weights [BLOCK_H] of the heads from h0, 0 beyond the last."""
    q, w = head_chunks(Q, WEIGHTS, row, h0, HI, DI, BLOCK_H, BLOCK_D, 1)
    return q[0], w


@triton.jit
def head_chunks(
    Q, WEIGHTS, row, h0: tl.constexpr, HI: tl.constexpr, DI: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Index queries, CHUNKS times [BLOCK_H, CHUNK], and weights [BLOCK_H] of the heads from h0, 0 beyond the last."""
    head = h0 + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, CHUNK)
    line = Q + row * (HI * DI) + head[:, None] * DI + dim[None, :]
    q = ()
    for c in tl.static_range(CHUNKS):
        q = appended(q, tl.load(line + c * CHUNK, mask=(head < HI)[:, None] & (c * CHUNK + dim < DI)[None, :], other=0.0))
    return q, tl.load(WEIGHTS + row * HI + head, mask=head < HI, other=0.0).to(tl.float32)


@triton.jit
def head_products(q, k, CHUNKS: tl.constexpr, PRECISION: tl.constexpr):
    """q . k [BLOCK_H, BLOCK_N], summed over the chunks of the head dim."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
    for c in tl.static_range(1, CHUNKS):
        s = tl.dot(q[c], tl.trans(k[c]), s, input_precision=PRECISION)
    return s


@triton.jit
def loss_kernel(
    Q,
    KEYS,
    WEIGHTS,
    SUPPORT,
    TEACHER,
    ENTRY_START,
    VISIBLE,
    GRAD,
    UNIT,
    SCORES,
    SCRATCH,
    KL,
    D_Q,
    D_KEYS,
    D_WEIGHTS,
    rows,
    C,
    K,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORES_GIVEN: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    DETERMINISTIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = (rows - 1 - tl.program_id(0)).to(tl.int64)  # long rows first
    first = tl.load(ENTRY_START + row)
    end = tl.minimum(first + tl.load(VISIBLE + row), C)
    slot = tl.arange(0, BLOCK_K)
    all_ids = tl.load(SUPPORT + row * K + slot, mask=slot < K, other=-1)
    present = (all_ids >= first) & (all_ids < end)
    extent = tl.max(tl.where(present, slot + 1, 0), 0)
    if HI <= BLOCK_H:
        q, w = head_chunks(Q, WEIGHTS, row, 0, HI, DI, BLOCK_H, CHUNK, CHUNKS)
    if not SCORES_GIVEN:
        for n in range(0, extent, BLOCK_N):
            ids, valid, k = gather_keys(SUPPORT, KEYS, row, n, first, end, K, DI, CHUNK, CHUNKS, BLOCK_N)
            score = tl.zeros([BLOCK_N], tl.float32)
            for h0 in tl.static_range(0, HI, BLOCK_H):
                if HI > BLOCK_H:
                    q, w = head_chunks(Q, WEIGHTS, row, h0, HI, DI, BLOCK_H, CHUNK, CHUNKS)
                s = head_products(q, k, CHUNKS, PRECISION)
                score += tl.sum(tl.maximum(s, 0.0) * w[:, None], 0)
            tl.store(SCORES + row * K + n + tl.arange(0, BLOCK_N), score, mask=n + tl.arange(0, BLOCK_N) < K)
        tl.debug_barrier()  # the row was written by other threads of this program
    score = tl.load(SCORES + row * K + slot, mask=present, other=float("-inf"))
    high = safe_top(tl.max(score, 0))
    spread = tl.exp(score - high)
    total = tl.sum(spread, 0)
    weight = tl.load(TEACHER + row * K + slot, mask=present, other=0.0)
    mass = tl.sum(weight, 0)
    teacher = tl.where(mass > 0.0, weight / tl.where(mass > 0.0, mass, 1.0), 0.0)
    some = teacher > 0.0
    log_student = tl.where(present, score - high - tl.log(total), 0.0)
    kl = tl.where(some, teacher * (tl.log(tl.where(some, teacher, 1.0)) - log_student), 0.0)
    tl.store(KL + row, tl.sum(kl, 0))
    if WITH_GRAD:
        # a row without any teacher gives no gradient: softmax - 0 would push every score
        taught = tl.where(mass > 0.0, 1.0, 0.0)
        d_score = tl.where(present, (spread / tl.where(total > 0.0, total, 1.0) - teacher) * taught, 0.0)
        # the weight of the loss comes behind the products: it may be small enough to push their fp16 operands out of range
        grad = tl.load(GRAD).to(tl.float32)
        tl.store(SCRATCH + row * K + slot, d_score, mask=slot < K)
        tl.debug_barrier()
        if DETERMINISTIC:
            unit = tl.load(UNIT)
        dim = tl.arange(0, CHUNK)
        for h0 in tl.static_range(0, HI, BLOCK_H):
            if HI > BLOCK_H:
                q, w = head_chunks(Q, WEIGHTS, row, h0, HI, DI, BLOCK_H, CHUNK, CHUNKS)
            dq = ()
            for _ in tl.static_range(CHUNKS):
                dq = appended(dq, tl.zeros([BLOCK_H, CHUNK], tl.float32))
            # every eighth key falls on the same thread in the layout of a matrix product; those sums are taken as they come, the rest once at the
            # end: a sum across threads per tile costs a quarter of the time
            d_weight = tl.zeros([BLOCK_H, 8], tl.float32)
            for n in range(0, extent, BLOCK_N):
                ids, valid, k = gather_keys(SUPPORT, KEYS, row, n, first, end, K, DI, CHUNK, CHUNKS, BLOCK_N)
                g = tl.load(SCRATCH + row * K + n + tl.arange(0, BLOCK_N), mask=valid, other=0.0)
                s = head_products(q, k, CHUNKS, PRECISION)
                d_weight += tl.sum(tl.reshape(tl.maximum(s, 0.0) * g[None, :], (BLOCK_H, BLOCK_N // 8, 8)), 1)
                ds = tl.where(s > 0.0, w[:, None] * g[None, :], 0.0).to(k[0].dtype)
                sums = ()
                for c in tl.static_range(CHUNKS):
                    sums = appended(sums, tl.dot(ds, k[c], dq[c], input_precision=PRECISION))
                dq = sums
                address = D_KEYS + ids.to(tl.int64)[:, None] * DI + dim[None, :]
                for c in tl.static_range(CHUNKS):
                    dk = tl.dot(tl.trans(ds), q[c], input_precision=PRECISION) * grad
                    inside = valid[:, None] & (c * CHUNK + dim < DI)[None, :]
                    if DETERMINISTIC:
                        tl.atomic_add(address + c * CHUNK, (dk * unit).to(tl.int64), mask=inside, sem="relaxed")
                    else:
                        tl.atomic_add(address + c * CHUNK, dk, mask=inside, sem="relaxed")
            head = h0 + tl.arange(0, BLOCK_H)
            line = D_Q + row * (HI * DI) + head[:, None] * DI + dim[None, :]
            for c in tl.static_range(CHUNKS):
                mask = (head < HI)[:, None] & (c * CHUNK + dim < DI)[None, :]
                tl.store(line + c * CHUNK, (dq[c] * grad).to(D_Q.dtype.element_ty), mask=mask)
            tl.store(D_WEIGHTS + row * HI + head, (tl.sum(d_weight, 1) * grad).to(D_WEIGHTS.dtype.element_ty), mask=head < HI)


def integer_unit(index_q: Tensor, index_w: Tensor, visible: Tensor, grad: Tensor) -> Tensor:
    """fp32 []: a power of two by which every contribution to d index_k can be multiplied so that no sum over all rows leaves int64.

    A contribution is at most HI * max|w| * max|q| * |grad|, since |softmax - teacher| <= 1. Rows that see no entry do not count. NaN where an input
    is not finite, which the result then shows.
    """
    rows, heads = index_w.shape
    sees = visible > 0
    q, w = (torch.where(sees, t.flatten(1).abs().amax(1), 0).amax().double() for t in (index_q, index_w))
    largest = w * q * grad.abs().double() * (heads * max(1, rows))
    exponent = torch.floor(torch.log2(2.0**62 / largest.clamp(min=2.0**-60)))
    return torch.where(torch.isfinite(largest), torch.exp2(exponent.clamp(-126, 126)), float("nan")).float()


@dataclass(frozen=True)
class IndexerGradients:
    """d index_q and d index_w in the dtype of their tensors, d index_k in the dtype of index_k."""

    index_q: Tensor
    index_k: Tensor
    index_w: Tensor


def sparse_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    support: Tensor,
    teacher: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    grad: Tensor | None = None,
    deterministic: bool = False,
    scores: Tensor | None = None,
    overwrite_teacher: bool = False,
    tiling: LossTiling | None = None,
) -> tuple[Tensor, IndexerGradients | None]:
    """KL per row fp32 [R], and the gradients for an incoming gradient `grad` [] of their sum (None without one).

    Args:
        index_q: [R, HI, DI]; index_k: [C, DI]; index_w: [R, HI].
        support: int32 [R, K], any order, holes allowed; entry_start, visible: int32 [R].
        teacher: fp32 [R, K], nonnegative weights of any sum; what stands in invalid slots is not read.
        scores: fp32 [R, K], the scores of the support where they are known already.
        overwrite_teacher: the memory of `teacher` may hold d loss / d score in the meantime.
    """
    rows, heads, dim = index_q.shape
    slots = support.shape[1]
    kl = torch.zeros(rows, dtype=torch.float32, device=index_q.device)
    gradients = None
    sums = index_k
    unit = kl
    if grad is not None:
        deterministic = deterministic and rows > 0 and index_q.numel() > 0
        unit = integer_unit(index_q, index_w, visible, grad) if deterministic else grad
        sums = torch.zeros(index_k.shape, dtype=torch.int64 if deterministic else torch.float32, device=index_k.device)
    if rows == 0 or slots == 0 or index_k.shape[0] == 0:
        if grad is not None:
            gradients = IndexerGradients(torch.zeros_like(index_q), torch.zeros_like(index_k), torch.zeros_like(index_w))
        return kl, gradients
    tiles = tiling or loss_tiling(heads, dim, index_q.dtype, deterministic and grad is not None)
    d_q = index_q if grad is None else torch.empty_like(index_q)
    d_w = index_w if grad is None else torch.empty_like(index_w)
    known = scores if scores is not None else torch.empty(rows, slots, dtype=torch.float32, device=index_q.device)
    scratch = known  # its scores are not needed behind the softmax
    if scores is not None and grad is not None:
        scratch = teacher if overwrite_teacher else torch.empty_like(known)
    chunk = tiles.chunk or max(16, power_of_two(dim))
    loss_kernel[(rows,)](
        index_q,
        index_k,
        index_w,
        support,
        teacher,
        entry_start,
        visible,
        kl if grad is None else grad,
        unit,
        known,
        scratch,
        kl,
        d_q,
        sums,
        d_w,
        rows,
        index_k.shape[0],
        slots,
        HI=heads,
        DI=dim,
        BLOCK_H=tiles.heads,
        CHUNK=chunk,
        CHUNKS=max(16, power_of_two(dim)) // chunk,
        BLOCK_N=tiles.keys,
        BLOCK_K=max(16, power_of_two(slots)),
        SCORES_GIVEN=scores is not None,
        WITH_GRAD=grad is not None,
        DETERMINISTIC=deterministic and grad is not None,
        PRECISION="ieee" if index_q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers or None,
    )
    if grad is not None:
        d_k = (sums.double() / unit.double()) if deterministic else sums
        gradients = IndexerGradients(d_q, d_k.to(index_k.dtype), d_w)
    return kl, gradients
