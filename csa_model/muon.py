# SPDX-License-Identifier: Apache-2.0
"""Muon's iteration on batches of matrices (DeepSeek-V4 report, sections 2.4 and 4.2.2), and which matrices make one batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import RowOperations

Shape = tuple[int, int]
Coefficients = Sequence[tuple[float, float, float]]

# Eight steps pull every singular value near 1, two more with a contracting polynomial put it there: 1.0000 to 1.0005 for full-rank matrices.
NEWTON_SCHULZ_COEFFICIENTS: Coefficients = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
MUON_UPDATE_RMS = 0.18  # root mean square of one update at lr 1, that of AdamW in practice: one learning rate serves both algorithms
# Of a matrix that is divided by its Frobenius norm: what is all zero stays zero. The momentum of an expert without tokens decays without end; below
# 1e-19 the squares of fp32 lose it, and divided by too small a norm it would overflow the iteration.
NORM_FLOOR = 1e-16
FUSED_ELEMENTS = 2**22  # of products XX^T: up to here launches take longer than passes over memory, so a backend fuses three of them


@dataclass(frozen=True)
class MuonSettings:
    """What all Muon groups of an optimizer share; `dtype`: of the iteration, None for bfloat16 on CUDA and the parameter's dtype elsewhere."""

    update_rms: float = MUON_UPDATE_RMS
    coefficients: Coefficients = NEWTON_SCHULZ_COEFFICIENTS
    dtype: torch.dtype | None = None

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Dtype in which the matrices of a parameter are iterated."""
        return self.dtype or (torch.bfloat16 if parameter.device.type == "cuda" else parameter.dtype)

    def scale(self, shape: Shape) -> float:
        """Of an orthogonal matrix [n, m], so that the root mean square of an update at lr 1 is `update_rms`."""
        return self.update_rms * math.sqrt(max(shape))


def normalize(matrices: Tensor, out: Tensor, eps: float = NORM_FLOOR) -> None:
    """out <- each matrix of a stack [B, n, m] over its Frobenius norm, rounded once to the dtype of `out`, without a copy in between."""
    # The norm in fp32 at least: squares of small bf16 gradients would lose their low bits.
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(matrices.dtype, torch.float32))
    torch.div(matrices, norm.clamp(min=eps), out=out)


def newton_schulz(x: Tensor, coefficients: Coefficients, fused: RowOperations | None = None) -> Tensor:
    """X <- aX + b(XX^T)X + c(XX^T)^2 X for every (a, b, c) of `coefficients`, of matrices [B, n, m >= n] whose norm is at most 1."""
    for a, b, c in coefficients:
        gram = x @ x.mT
        if fused is not None and gram.numel() <= FUSED_ELEMENTS:
            x = fused.matrix_polynomial(gram, a, b, c) @ x
            continue
        # aI + bG + cG^2 as c (G + b/2c I)^2 + (a - b^2/4c) I: with beta other than 0, baddbmm would copy its input first, and this touches diagonals.
        gram.diagonal(dim1=-2, dim2=-1).add_(b / (2 * c))
        polynomial = torch.baddbmm(gram, gram, gram, beta=0, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a - b * b / (4 * c))
        x = polynomial @ x
    return x


@torch.no_grad()
def orthogonalize(matrices: Tensor, coefficients: Coefficients = NEWTON_SCHULZ_COEFFICIENTS, eps: float = NORM_FLOOR) -> Tensor:
    """Nearest semi-orthogonal matrix of each matrix of a stack, by Newton-Schulz iterations; not differentiable.

    Args:
        matrices: [B, n, m], each orthogonalised by itself. The dtype of the iteration is that of the input.
        coefficients: (a, b, c) per step of X <- aX + b(XX^T)X + c(XX^T)^2 X, c not 0.
        eps: floor of the Frobenius norm; an all-zero matrix stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    out = torch.empty_like(x)
    normalize(x, out, eps)
    x = newton_schulz(out, coefficients)
    return x.mT if tall else x


def orthogonalize_together(size: Shape, updates: Mapping[Shape, Tensor], work: torch.dtype, coefficients: Coefficients) -> None:
    """One orthogonalisation, in place, of stacks `updates` [k, n, m] of several shapes, each matrix in the corner of one of `size`."""
    counts = [len(stack) for stack in updates.values()]
    batch = empty_batch(size, updates, sum(counts), work, next(iter(updates.values())).device)
    for (shape, stack), slot in zip(updates.items(), batch.split(counts), strict=True):
        normalize(stack, corner(slot, shape))
    for (shape, stack), slot in zip(updates.items(), newton_schulz(batch, coefficients).split(counts), strict=True):
        stack.copy_(corner(slot, shape))


def matrix_shape(p: Tensor, blocks: int) -> Shape:
    """Shape [n, m] of the matrices of a Muon parameter: a matrix of `blocks` blocks of rows, or a stack [E, n, m]."""
    return (p.shape[-2] if p.ndim == 3 else p.shape[0] // blocks, p.shape[-1])


def padded_elements(device: torch.device) -> int:
    """Elements up to which matrices may be padded to join others: what a GPU iterates in less time than the host needs to launch one more batch."""
    return 2**22 if device.type == "cuda" else 0


def batches(counts: Mapping[Shape, int], limit: int) -> dict[Shape, list[Shape]]:
    """Which matrices are iterated together: size [rows, columns >= rows] of a batch -> the shapes [n, m] of its matrices.

    Shapes that differ only by transposition share a batch. A batch joins the next larger one that can hold its matrices, each padded with zeros, if
    that makes at most `limit` elements of it: rows and columns of zeros stay zero through every iteration and change nothing else. The batches that
    take longest come first, so that the host launches the others while the device is at them.

    Args:
        counts: matrices of each shape.
    """
    shapes: dict[Shape, list[Shape]] = defaultdict(list)
    number: dict[Shape, int] = defaultdict(int)
    for shape, count in counts.items():
        size = (min(shape), max(shape))
        shapes[size].append(shape)
        number[size] += count
    for size in sorted(shapes, key=lambda s: (math.prod(s), s)):
        hosts = [s for s in shapes if s != size and s[0] >= size[0] and s[1] >= size[1]]
        host = min(hosts, key=lambda s: (math.prod(s), s), default=size)
        if host != size and number[size] * math.prod(host) <= limit:
            shapes[host] += shapes.pop(size)
            number[host] += number.pop(size)
    return {size: shapes[size] for size in sorted(shapes, key=lambda s: -s[0] * math.prod(s) * number[s])}


def empty_batch(size: Shape, shapes: Iterable[Shape], count: int, work: torch.dtype, device: torch.device) -> Tensor:
    """[count, *size] for matrices of `shapes` in its corners, zeros where one is smaller."""
    padded = any(sorted(shape) != list(size) for shape in shapes)
    return (torch.zeros if padded else torch.empty)(count, *size, dtype=work, device=device)


def corner(batch: Tensor, shape: Shape) -> Tensor:
    """The part of batch [B, rows, columns] that holds matrices of `shape`, as [B, n, m]."""
    part = batch[:, : min(shape), : max(shape)]
    return part.mT if shape[0] > shape[1] else part
