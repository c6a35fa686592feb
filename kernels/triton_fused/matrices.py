# SPDX-License-Identifier: Apache-2.0
"""What surrounds an iteration on many matrices of one shape, in few passes over memory: momentum, unit norm and change of dtype on the way into one
batch, decay and update of the parameters on the way back. Both turn what the batch holds turned.

    buffer <- momentum * buffer + grad        u = grad + momentum * buffer        out <- u / max(|u|, eps)
    param  <- param - rate * (decay * param + scale * update)
    polynomial = a I + b G + c G^2, of what the iteration multiplies by, in one kernel

The matrices lie in many tensors. A kernel finds them by a table of their addresses, so one launch serves all of a shape. What changes from step to
step, the rate, is read from the device, so that a CUDA graph can repeat the launches.

Legend: B matrices of n rows and m columns, in tensors of k each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two

TILE = 64  # rows and columns of a program
SUMS = 256  # sums of squares that a program reads at once: those of a matrix of a million elements


@triton.jit
def _place(rows, columns, TILE: tl.constexpr):
    """Matrix, rows [TILE, 1] and columns [1, TILE] of a program, and which of them there are."""
    across = tl.cdiv(columns, TILE)
    tiles = tl.cdiv(rows, TILE) * across
    tile = tl.program_id(0) % tiles
    row = (tile // across * TILE + tl.arange(0, TILE))[:, None]
    column = (tile % across * TILE + tl.arange(0, TILE))[None, :]
    return (tl.program_id(0) // tiles).to(tl.int64), row, column, (row < rows) & (column < columns)


@triton.jit
def _address(TABLE, matrix, LIKE, ALIGNED: tl.constexpr):
    """Pointer to the first element of a matrix of the dtype of LIKE."""
    at = tl.load(TABLE + matrix).to(tl.pointer_type(LIKE.dtype.element_ty))
    return tl.multiple_of(at, 16) if ALIGNED else at


@triton.jit
def momentum_kernel(
    GRADS, BUFFERS, LIKE, OUT, SQUARES, momentum, rows, columns, to_matrix, to_row, to_column, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """Buffers, and `out` before the division. SQUARES [B * tiles]: sums of squares of the tiles. Program: (matrix, tile of rows, of columns).

    GRADS and BUFFERS are tables. to_*: strides of OUT; the one along rows or columns is 1, which Triton knows.
    """
    matrix, row, column, real = _place(rows, columns, TILE)
    offset = row * columns + column
    grad = tl.load(_address(GRADS, matrix, LIKE, ALIGNED) + offset, mask=real, other=0.0).to(tl.float32)
    at = _address(BUFFERS, matrix, LIKE, ALIGNED) + offset
    buffer = momentum * tl.load(at, mask=real, other=0.0).to(tl.float32) + grad
    tl.store(at, buffer.to(LIKE.dtype.element_ty), mask=real)
    update = grad + momentum * buffer
    tl.store(OUT + matrix * to_matrix + row * to_row + column * to_column, update.to(OUT.dtype.element_ty), mask=real)
    tl.store(SQUARES + tl.program_id(0), tl.sum(tl.sum(update * update, 1), 0))


@triton.jit(do_not_specialize=["tiles"])
def divide_kernel(OUT, SQUARES, tiles, eps, rows, columns, to_matrix, to_row, to_column, SUMS: tl.constexpr, TILE: tl.constexpr):
    """OUT over the norms of its matrices, in place. Programs as for `momentum_kernel`."""
    matrix, row, column, real = _place(rows, columns, TILE)
    at = OUT + matrix * to_matrix + row * to_row + column * to_column
    x = tl.load(at, mask=real, other=0.0).to(tl.float32)
    squares = tl.zeros([SUMS], tl.float32)
    for first in range(0, tiles, SUMS):
        tile = first + tl.arange(0, SUMS)
        squares += tl.load(SQUARES + matrix * tiles + tile, mask=tile < tiles, other=0.0)
    x = x / tl.maximum(tl.sqrt(tl.sum(squares, 0)), eps)
    tl.store(at, x.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def decay_and_add_kernel(
    PARAMS, LIKE, UPDATES, RATE, decay, scale, rows, columns, from_matrix, from_row, from_column, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """PARAMS is a table; from_*: strides of UPDATES; RATE: one number. Programs as for `momentum_kernel`."""
    matrix, row, column, real = _place(rows, columns, TILE)
    update = tl.load(UPDATES + matrix * from_matrix + row * from_row + column * from_column, mask=real, other=0.0).to(tl.float32)
    at = _address(PARAMS, matrix, LIKE, ALIGNED) + (row * columns + column)
    param = tl.load(at, mask=real, other=0.0).to(tl.float32)
    tl.store(at, (param - tl.load(RATE) * (decay * param + scale * update)).to(LIKE.dtype.element_ty), mask=real)


@triton.jit
def polynomial_kernel(GRAM, OUT, a, b, c, N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """aI + bG + cG^2 of matrices GRAM [B, N, N]. Program: (matrix, block of rows, block of columns), those of a matrix one after the other."""
    across: tl.constexpr = (N + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) % (across * across)
    first = (tl.program_id(0) // (across * across)).to(tl.int64) * (N * N)
    row = (tile // across * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = (tile % across * BLOCK + tl.arange(0, BLOCK))[None, :]
    square = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, N, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        if N % BLOCK == 0:
            left = tl.load(GRAM + first + row * N + inner[None, :])
            right = tl.load(GRAM + first + inner[:, None] * N + column)
        else:
            left = tl.load(GRAM + first + row * N + inner[None, :], mask=(row < N) & (inner < N)[None, :], other=0.0)
            right = tl.load(GRAM + first + inner[:, None] * N + column, mask=(inner < N)[:, None] & (column < N), other=0.0)
        square = tl.dot(left, right, square, input_precision="ieee")
    real = (row < N) & (column < N)
    at = first + row * N + column
    result = c * square + b * tl.load(GRAM + at, mask=real, other=0.0).to(tl.float32) + tl.where(row == column, a, 0.0)
    tl.store(OUT + at, result.to(OUT.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Matrices:
    """Matrices [n, m] of one dtype and device in many tensors, which must stay where they are: `table` int64 [B] holds the address of each."""

    tensors: tuple[Tensor, ...]
    table: Tensor
    aligned: bool  # every matrix begins at a multiple of 16 bytes

    @property
    def shape(self) -> torch.Size:
        """[n, m]."""
        return self.tensors[0].shape[1:]


def at_their_addresses(tensors: Sequence[Tensor]) -> Matrices:
    """The matrices of stacks [k, n, m] of one shape [n, m], contiguous, in one of bfloat16, float16 and float32.

    The host waits for nothing.

    Raises:
        ValueError: no stack, or shapes, dtypes or strides that do not fit.
        RuntimeError: within the capture of a CUDA graph, which could take no addresses from the host.
    """
    if not tensors:
        raise ValueError("no stack of matrices was given")
    shape, dtype, device = tensors[0].shape[1:], tensors[0].dtype, tensors[0].device
    if any(t.dim() != 3 or t.shape[1:] != shape or t.dtype != dtype or not t.is_contiguous() for t in tensors) or dtype not in DTYPES:
        got = ", ".join(f"{list(t.shape)} with strides {t.stride()} in {t.dtype}" for t in tensors)
        raise ValueError(f"contiguous stacks [k, n, m] of one shape [n, m] and one dtype of {', '.join(map(str, DTYPES))} are needed, got {got}")
    if any(t.device != device for t in tensors):
        raise ValueError(f"matrices of one table must be on one device, got {', '.join(sorted({str(t.device) for t in tensors}))}")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph cannot take addresses from the host: call at_their_addresses before the capture")
    size = shape.numel() * tensors[0].element_size()
    places = tuple((t.data_ptr(), t.shape[0]) for t in tensors)
    aligned = all(first % 16 == 0 and (count < 2 or size % 16 == 0) for first, count in places)
    return Matrices(tuple(tensors), _table(places, size, device), aligned)


@lru_cache(maxsize=256)  # parameters and momentum stay where they are, and where gradients do not, they often come back
def _table(places: tuple[tuple[int, int], ...], size: int, device: torch.device) -> Tensor:
    """Addresses int64 [B] of matrices of `size` bytes each, of tensors (address, number of matrices)."""
    addresses = [first + i * size for first, count in places for i in range(count)]
    # from pinned memory: the host waits for nothing
    return torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _check(batch: Tensor, *lists: Matrices) -> None:
    shape = batch.shape[1:]
    if batch.dim() != 3 or batch.dtype not in DTYPES or (1 not in batch.stride()[1:] and shape.numel() > 1):
        legal = ", ".join(map(str, DTYPES))
        raise ValueError(
            f"a batch must be [B, n, m] whose rows or columns lie together, in {legal}, got {list(batch.shape)} with strides {batch.stride()} "
            f"in {batch.dtype}"
        )
    dtypes = {matrices.tensors[0].dtype for matrices in lists}
    if len(dtypes) > 1 or any(matrices.shape != shape or len(matrices.table) != len(batch) for matrices in lists):
        got = ", ".join(f"{len(matrices.table)} matrices {list(matrices.shape)} in {matrices.tensors[0].dtype}" for matrices in lists)
        raise ValueError(f"{len(batch)} matrices {list(shape)} of one dtype are needed, got {got}")


def gather_momentum(grads: Matrices, buffers: Matrices, momentum: float, out: Tensor, eps: float) -> None:
    """buffers <- momentum * buffers + grads, then out <- each matrix of grads + momentum * buffers over max(its Frobenius norm, eps).

    The norm is that in fp32, summed in a fixed order; `out` is rounded before the division and after it.

    Args:
        grads, buffers: of one dtype, as many as `out` has.
        out: [B, n, m] in bfloat16, float16 or float32, with rows or columns that lie together: part of larger matrices, or turned.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check(out, grads, buffers)
    if not out.numel():
        return
    count, rows, columns = out.shape
    tiles = ceil_div(rows, TILE) * ceil_div(columns, TILE)
    squares = torch.empty(count * tiles, dtype=torch.float32, device=out.device)
    aligned = grads.aligned and buffers.aligned
    where = (rows, columns, *out.stride())
    with on_device_of(out):
        operands = (grads.table, buffers.table, grads.tensors[0], out, squares, float(momentum), *where)
        momentum_kernel[(count * tiles,)](*operands, ALIGNED=aligned, TILE=TILE, num_warps=4)
        divide_kernel[(count * tiles,)](out, squares, tiles, eps, *where, SUMS=SUMS, TILE=TILE, num_warps=4)


def decay_and_add(params: Matrices, updates: Tensor, rate: Tensor, decay: float, scale: float) -> None:
    """params <- params - rate * (decay * params + scale * updates).

    Args:
        updates: [B, n, m] as the `out` of `gather_momentum`. rate: float32, one number on the device.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check(updates, params)
    if rate.dtype != torch.float32 or rate.numel() != 1 or rate.device != updates.device:
        raise ValueError(f"rate must be one float32 on {updates.device}, got {list(rate.shape)} in {rate.dtype} on {rate.device}")
    if not updates.numel():
        return
    count, rows, columns = updates.shape
    operands = (params.table, params.tensors[0], updates, rate, float(decay), float(scale), rows, columns, *updates.stride())
    with on_device_of(updates):
        decay_and_add_kernel[(count * ceil_div(rows, TILE) * ceil_div(columns, TILE),)](*operands, ALIGNED=params.aligned, TILE=TILE, num_warps=4)


def matrix_polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """aI + bG + cG^2 of each matrix of `gram` [B, n, n], contiguous, in bfloat16, float16 or float32: summed in fp32, rounded once.

    Raises:
        ValueError: shape, dtype or strides that do not fit.
    """
    if gram.dim() != 3 or gram.shape[1] != gram.shape[2] or gram.dtype not in DTYPES or not gram.is_contiguous():
        legal = ", ".join(map(str, DTYPES))
        raise ValueError(f"gram must be [B, n, n] and contiguous in {legal}, got {list(gram.shape)} with strides {gram.stride()} in {gram.dtype}")
    out = torch.empty_like(gram)
    if gram.numel():
        count, n, _ = gram.shape
        block = min(128 if n > 128 and gram.element_size() == 2 else 64, max(16, power_of_two(n)))
        sizes = {"N": n, "BLOCK": block, "BLOCK_K": min(64, block), "num_warps": 8 if block == 128 else 4, "num_stages": 3, "maxnreg": 128}
        with on_device_of(gram):
            polynomial_kernel[(count * ceil_div(n, block) ** 2,)](gram, out, float(a), float(b), float(c), **sizes)
    return out
