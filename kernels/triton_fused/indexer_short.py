# SPDX-License-Identifier: Apache-2.0
"""The sparse indexer loss of neighbouring rows of one document that see no more entries than they may select: they all share the first entries.

One program: some query rows. A tile of keys is loaded once for all of them, and its gradient, summed over them, goes to memory once. In a document of
up to top-k * ratio tokens every row is such a row. Whether the rows of a group are is read off their support and written for `loss_kernel`, which
leaves them out.

Legend: R query rows, T rows of a group, K slots of the support, C compressed entries of the whole row, HI index heads, DI index head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.rounding import ceil_div, power_of_two
from kernels.triton_fused.teacher import safe_top


@triton.jit
def short_loss_kernel(
    Q,
    KEYS,
    WEIGHTS,
    SUPPORT,
    TEACHER,
    ENTRY_START,
    VISIBLE,
    GRAD,
    SCORES,
    SCRATCH,
    KL,
    D_Q,
    D_KEYS,
    D_WEIGHTS,
    DONE,
    rows,
    C,
    K,
    HI: tl.constexpr,
    DI: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # long rows first
    row = group * BLOCK_T + tl.arange(0, BLOCK_T)
    start = tl.load(ENTRY_START + row, mask=row < rows, other=0)
    seen = tl.minimum(tl.load(VISIBLE + row, mask=row < rows, other=0), C - start)
    first = tl.max(tl.where(seen > 0, start, 0), 0)
    extent = tl.max(seen, 0)
    shared = extent <= K
    slot = tl.arange(0, BLOCK_K)
    cell = row[:, None] * K + slot[None, :]
    inside = (row < rows)[:, None] & (slot < K)[None, :]
    present = slot[None, :] < seen[:, None]
    if shared:
        ids = tl.load(SUPPORT + cell, mask=inside & present, other=0)
        strange = inside & present & (ids != first + slot[None, :])
        shared = tl.max(tl.max(strange.to(tl.int32), 1), 0) == 0
    tl.store(DONE + group, shared.to(tl.int32))
    if shared:
        present = present & inside
        score = tl.load(SCORES + cell, mask=present, other=float("-inf"))
        high = safe_top(tl.max(score, 1))
        spread = tl.exp(score - high[:, None])
        total = tl.sum(spread, 1)
        weight = tl.load(TEACHER + cell, mask=present, other=0.0)
        mass = tl.sum(weight, 1)
        teacher = tl.where((mass > 0.0)[:, None], weight / tl.where(mass > 0.0, mass, 1.0)[:, None], 0.0)
        some = teacher > 0.0
        log_student = tl.where(present, score - (high + tl.log(total))[:, None], 0.0)
        kl = tl.where(some, teacher * (tl.log(tl.where(some, teacher, 1.0)) - log_student), 0.0)
        tl.store(KL + row, tl.sum(kl, 1), mask=row < rows)
        taught = tl.where(mass > 0.0, 1.0, 0.0)
        d_score = tl.where(present, (spread / tl.where(total > 0.0, total, 1.0)[:, None] - teacher) * taught[:, None], 0.0)
        # the weight of the loss comes behind the products: it may be small enough to push their fp16 operands out of range
        grad = tl.load(GRAD).to(tl.float32)
        tl.store(SCRATCH + cell, d_score, mask=inside)
        tl.debug_barrier()  # the rows are read by other threads of this program
        lane = tl.arange(0, BLOCK_T * BLOCK_H)
        head = lane % BLOCK_H
        query = group * BLOCK_T + lane // BLOCK_H
        real = (query < rows) & (head < HI)
        dim = tl.arange(0, BLOCK_D)
        line = (query * HI + head)[:, None] * DI + dim[None, :]
        mask = real[:, None] & (dim < DI)[None, :]
        q = tl.load(Q + line, mask=mask, other=0.0)
        w = tl.load(WEIGHTS + query * HI + head, mask=real, other=0.0).to(tl.float32)
        dq = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_D], tl.float32)
        # every eighth key falls on the same thread in the layout of a matrix product
        d_weight = tl.zeros([BLOCK_T * BLOCK_H, 8], tl.float32)
        column = tl.arange(0, BLOCK_N)
        for n in range(0, extent, BLOCK_N):
            key = n + column
            address = (first + key).to(tl.int64)[:, None] * DI + dim[None, :]
            valid = (key < extent)[:, None] & (dim < DI)[None, :]
            k = tl.load(KEYS + address, mask=valid, other=0.0)
            # behind what a row sees stand zeros
            g = tl.load(SCRATCH + row[:, None] * K + key[None, :], mask=(row < rows)[:, None] & (key < K)[None, :], other=0.0)[:, None, :]
            s = tl.reshape(tl.dot(q, tl.trans(k), input_precision=PRECISION), (BLOCK_T, BLOCK_H, BLOCK_N))
            d_weight += tl.sum(tl.reshape(tl.maximum(s, 0.0) * g, (BLOCK_T * BLOCK_H, BLOCK_N // 8, 8)), 1)
            ds = tl.where(s > 0.0, tl.reshape(w, (BLOCK_T, BLOCK_H))[:, :, None] * g, 0.0).to(k.dtype)
            ds = tl.reshape(ds, (BLOCK_T * BLOCK_H, BLOCK_N))
            dq = tl.dot(ds, k, dq, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * grad
            tl.atomic_add(D_KEYS + address, dk, mask=valid, sem="relaxed")
        tl.store(D_Q + line, (dq * grad).to(D_Q.dtype.element_ty), mask=mask)
        tl.store(D_WEIGHTS + query * HI + head, (tl.sum(d_weight, 1) * grad).to(D_WEIGHTS.dtype.element_ty), mask=real)


def short_row_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    support: Tensor,
    teacher: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    grad: Tensor,
    scores: Tensor,
    scratch: Tensor,
    kl: Tensor,
    d_q: Tensor,
    d_keys: Tensor,
    d_w: Tensor,
    together: int,
    keys: int,
    warps: int,
) -> Tensor:
    """int32 [ceil(R / T)]: which groups of T = `together` rows are done, that is, share their entries. The tensors are those of `sparse_loss`.

    Writes kl, d_q and d_w of these rows and adds to d_keys fp32 [C, DI].
    keys: those of one product; warps: of a program.
    """
    rows, heads, dim = index_q.shape
    slots = support.shape[1]
    done = torch.empty(ceil_div(rows, together), dtype=torch.int32, device=index_q.device)
    short_loss_kernel[(done.shape[0],)](
        index_q,
        index_k,
        index_w,
        support,
        teacher,
        entry_start,
        visible,
        grad,
        scores,
        scratch,
        kl,
        d_q,
        d_keys,
        d_w,
        done,
        rows,
        index_k.shape[0],
        slots,
        HI=heads,
        DI=dim,
        BLOCK_T=together,
        BLOCK_H=power_of_two(heads),
        BLOCK_D=max(16, power_of_two(dim)),
        BLOCK_N=keys,
        BLOCK_K=max(16, power_of_two(slots)),
        PRECISION="ieee" if index_q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=2,
    )
    return done
