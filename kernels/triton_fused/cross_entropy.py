# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of a linear head, summed over rows, with its gradients formed while the logits are there: nothing of their size is kept.
From forward to backward the gradients wait in fp32: [T, d] and [V, d].

    z = hidden @ weight.T        loss = sum over rows of logsumexp(z) - z[target]        dz = softmax(z) - onehot(target)

The forward takes the rows in chunks: it writes their logits in fp32 into one buffer, a kernel turns each row into its loss and dz, and two matrix
products turn dz into the gradients of hidden and weight for an incoming gradient of 1. The backward multiplies them by the incoming one, a scalar.
Each row of logits is written and read once (8 bytes a logit), dz is written once and read by both products (2 + 4 bytes in bfloat16).

Roundings of the gradients: dz to the dtype of the operands, then sums in fp32 that stay fp32 until the backward has scaled them and rounds once to
the dtype of hidden or weight. The plain form rounds as often; it scales dz before rounding it. float16 would lose small probabilities in it, so there
dz is stored times 2^14, which the backward takes out again.

Legend: T rows, d features, V classes; S >= V the distance between rows of logits, so that each begins on 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two

LOGIT_ELEMENTS = 2**25  # fp32 logits at once: 128 MiB
GRADIENT_ELEMENTS = 2**27  # of dz at once, 256 MiB in bfloat16; each time that rows need more, the gradient of the weight is read and written again
WHOLE_ROW = 32768  # columns that a program holds in registers
LONG_BLOCK = 8192  # columns that it takes at a time where there are more
GRADIENT_SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**14, torch.float32: 1.0}
LOWEST = tl.constexpr(-3.4e38)  # finite: its distance to itself is 0


@triton.jit(do_not_specialize=["first"])
def row_loss_kernel(
    LOGITS, TARGETS, LOSSES, GRAD, first, ignored, scale, WITH_GRAD: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
):
    """Loss and gradient of one row, held in registers between the two."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGETS + first + row)
    counted, valid = target != ignored, (target >= 0) & (target < V)
    end = tl.where(counted, S, 0)  # a row that does not count is not read
    column = tl.arange(0, BLOCK)
    # the bound S and not V lets a thread load 16 bytes at a time; what lies between the two is anything
    z = tl.load(LOGITS + row * S + column, mask=column < end, other=0.0)
    z_target = tl.load(LOGITS + row * S + target, mask=valid & counted, other=float("nan"))
    z = tl.where(column < V, z, float("-inf"))
    top = tl.max(z, 0)
    weight = tl.exp(z - top)
    total = tl.sum(weight, 0)
    tl.store(LOSSES + first + row, tl.where(counted, tl.log(total) + (top - z_target), 0.0))
    if WITH_GRAD:
        grad = weight * tl.where(valid, scale / total, float("nan")) - tl.where(column == target, scale, 0.0)
        grad = tl.where(counted, grad, 0.0)
        tl.store(GRAD + row * S + column, grad.to(GRAD.dtype.element_ty), mask=column < S)


@triton.jit(do_not_specialize=["first"])
def long_row_loss_kernel(
    LOGITS, TARGETS, LOSSES, GRAD, first, ignored, scale, WITH_GRAD: tl.constexpr, V: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for a row that registers do not hold: it is read twice, the second time from its end, which the cache still has."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGETS + first + row)
    counted, valid = target != ignored, (target >= 0) & (target < V)
    end = tl.where(counted, S, 0)  # a row that does not count is not read
    z_target = tl.load(LOGITS + row * S + target, mask=valid & counted, other=float("nan"))
    # each lane by itself: maximum so far, and the sum relative to it. One exponential a logit: of the lower of the two minus the higher
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(LOGITS + row * S + column, mask=column < end, other=0.0)
        z = tl.where(column < V, z, float("-inf"))
        ratio = tl.exp(-tl.abs(z - top))
        total = tl.where(z > top, total * ratio + 1.0, total + ratio)
        top = tl.maximum(top, z)
    highest = tl.max(top, 0)
    all_of_it = tl.sum(total * tl.exp(top - highest), 0)
    tl.store(LOSSES + first + row, tl.where(counted, tl.log(all_of_it) + (highest - z_target), 0.0))
    if WITH_GRAD:
        factor = tl.where(valid, scale / all_of_it, float("nan"))
        for i in range((V + BLOCK - 1) // BLOCK):
            column = ((V + BLOCK - 1) // BLOCK - 1 - i) * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(LOGITS + row * S + column, mask=column < end, other=0.0)
            grad = tl.exp(z - highest) * factor - tl.where(column == target, scale, 0.0)
            grad = tl.where(counted, grad, 0.0)
            tl.store(GRAD + row * S + column, grad.to(GRAD.dtype.element_ty), mask=column < S)


def _launch(logits: Tensor, targets: Tensor, losses: Tensor, grad: Tensor | None, first: int, classes: int, ignored: int, scale: float) -> None:
    """Losses of rows `first`, ... of `targets` from their logits [R, S], and their gradients into `grad` [R, S]."""
    whole = classes <= WHOLE_ROW
    block = power_of_two(classes) if whole else LONG_BLOCK
    warps = max(4, min(16, block // 1024))  # 32 numbers a thread, 64 in the widest rows
    kernel = row_loss_kernel if whole else long_row_loss_kernel
    kernel[(logits.shape[0],)](
        logits, targets, losses, logits if grad is None else grad, first, ignored, scale,
        WITH_GRAD=grad is not None, V=classes, S=logits.stride(0), BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, fp32, of matrices of one dtype. Only CUDA multiplies rounded ones as they are and returns fp32."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=torch.float32, out=out) if a.is_cuda else torch.mm(a.float(), b.float(), out=out)


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, dtype: torch.dtype, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and in fp32 and times GRADIENT_SCALE those gradients of hidden and weight that are wanted."""
    rows, classes, device = hidden.shape[0], weight.shape[0], hidden.device
    hidden, weight, targets = hidden.to(dtype).contiguous(), weight.to(dtype).contiguous(), targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    d_hidden = torch.empty(hidden.shape, dtype=torch.float32, device=device) if wanted[0] else None
    d_weight = torch.empty(weight.shape, dtype=torch.float32, device=device) if wanted[1] else None
    stride = 8 * ceil_div(classes, 8)
    group = min(rows, max(1, GRADIENT_ELEMENTS // stride)) if any(wanted) else rows
    chunk = min(group, max(1, LOGIT_ELEMENTS // stride))
    logits = torch.empty(chunk, stride, dtype=torch.float32, device=device)
    grads = torch.empty(group, stride, dtype=dtype, device=device) if any(wanted) else None
    for start in range(0, rows, max(1, group)):
        end = min(rows, start + group)
        for first in range(start, end, chunk):
            last = min(end, first + chunk)
            z = logits[: last - first]
            _multiply(hidden[first:last], weight.t(), z[:, :classes])
            _launch(
                z, targets, losses, None if grads is None else grads[first - start : last - start], first, classes, ignored, GRADIENT_SCALE[dtype]
            )
        if grads is None:
            continue
        dz = grads[: end - start, :classes]
        if d_hidden is not None:
            _multiply(dz, weight, d_hidden[start:end])
        if d_weight is not None and start == 0:
            _multiply(dz.t(), hidden[start:end], d_weight)
        elif d_weight is not None:
            d_weight += _multiply(dz.t(), hidden[start:end], torch.empty_like(d_weight))
    if d_weight is not None and rows == 0:
        d_weight.zero_()
    return losses.sum(), d_hidden, d_weight


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, dtype: torch.dtype) -> Tensor:
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        with on_device_of(hidden), torch.autocast(hidden.device.type, enabled=False):
            loss, d_hidden, d_weight = _loss_and_gradients(hidden, weight, targets, ignored, dtype, wanted)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes, ctx.scale = (hidden.dtype, weight.dtype), GRADIENT_SCALE[dtype]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        factor = grad if ctx.scale == 1.0 else grad / ctx.scale
        scaled = [
            None if total is None else torch.mul(total, factor, out=torch.empty(total.shape, dtype=dtype, device=total.device))
            for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return scaled[0], scaled[1], None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Sum over rows of the cross entropy of hidden @ weight.T, fp32 []; the same bits every time.

    Under autocast both operands are rounded to its dtype, else they are taken in fp32; products are summed in fp32 and logits never rounded. Where no
    gradient can be asked for, only the loss is computed. Nothing waits for the device.

    Args:
        hidden: [T, d] and weight: [V, d], each in one of bfloat16, float16 and float32.
        targets: int64 [T]; rows of `ignored` count nothing and have gradient 0. Any other target outside [0, V) makes the loss NaN, and the
            gradients, since the host does not look at the values.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(f"hidden must be [T, d] and weight [V, d], got {list(hidden.shape)} and {list(weight.shape)}")
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(f"hidden and weight must be in one of {', '.join(map(str, DTYPES))}, got {hidden.dtype} and {weight.dtype}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{hidden.shape[0]}], got {list(targets.shape)} in {targets.dtype}")
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, ignored, dtype)
        return loss
    with on_device_of(hidden), torch.no_grad(), torch.autocast(kind, enabled=False):
        return _loss_and_gradients(hidden, weight, targets, ignored, dtype, (False, False))[0]
