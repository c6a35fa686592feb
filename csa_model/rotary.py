# SPDX-License-Identifier: Apache-2.0
"""Interleaved partial rotary embedding, with YaRN for compressed layers.

The last r dims of a vector rotate in pairs (x_2i, x_2i+1) by the angle position * frequency_i. No magnitude scale is ever applied: the softmax scale
stays D^-0.5. Source: semantics of the released DeepSeek-V4 models; YaRN as in arXiv 2309.00071 without its temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from csa_model.config import RopeScaling
from csa_model.layers import RMSNorm, at_least_fp32, rms_norm
from kernels.backend import RowOperations

Rotation = Tensor  # complex [N, r/2]: cos + i sin of every angle; a pair of dims is a complex number too


def rotary_frequencies(dim: int, base: float, scaling: RopeScaling | None) -> list[float]:
    """The r/2 frequencies in radians per token; `scaling` None means plain RoPE.

    YaRN keeps a frequency that turns more than beta_fast times over the original context, divides one that turns less than beta_slow times by
    `factor`, and blends linearly in between. It applies at every length.
    """
    frequencies = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None:
        return frequencies

    def pair_index(turns: float) -> float:  # the (fractional) pair that turns this often over the original context
        return dim * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(pair_index(scaling.beta_fast)), 0)
    high: float = min(math.ceil(pair_index(scaling.beta_slow)), dim - 1)
    high = high + 0.001 if high == low else high
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return [f * (1 - t) + f / scaling.factor * t for f, t in zip(frequencies, ramp, strict=True)]


class RotaryTable:
    """Turns positions into rotations. Not a module: it has no state to save, cast or shard; its frequencies are copied to each device once."""

    def __init__(self, dim: int, base: float, scaling: RopeScaling | None) -> None:
        self.frequencies = rotary_frequencies(dim, base, scaling)
        self._on_device: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation of the positions [N], with parts of `dtype` (float32 or float64)."""
        key = (positions.device, dtype)
        if key not in self._on_device:
            with torch.inference_mode(False):  # an evaluation must not leave an inference tensor behind for training
                self._on_device[key] = torch.tensor(self.frequencies, dtype=dtype, device=positions.device)
        angles = positions.to(dtype)[:, None] * self._on_device[key]
        return torch.polar(torch.ones_like(angles), angles)


def _rotated(x: Tensor, turn: Tensor) -> Tensor:
    start = x.shape[-1] - 2 * turn.shape[-1]
    pairs = torch.view_as_complex(at_least_fp32(x[..., start:]).contiguous().unflatten(-1, (-1, 2)))
    out = x.clone(memory_format=torch.contiguous_format)
    out[..., start:] = torch.view_as_real(pairs * turn).flatten(-2)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, turn: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(turn)
        return _rotated(x, turn)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (turn,) = ctx.saved_tensors
        return _rotated(grad, turn.conj()), None


def rotate(x: Tensor, rotation: Rotation, inverse: bool = False, fused: RowOperations | None = None) -> Tensor:
    """Rotate the last r dims of x [N, D] or [N, H, D]; `inverse` by the opposite angle.

    Out of place always: the attention saves its output for the backward pass, so undoing the rotation inside that tensor would corrupt gradients.
    fp32 mathematics, result in the dtype of x. `fused`: the backend's form of it, if it has one.
    """
    if fused is not None:
        return fused.rotate(x, rotation, inverse)
    turn = rotation.conj() if inverse else rotation
    return _Rotate.apply(x, turn[:, None] if x.dim() == 3 else turn)


def norm_rotate(x: Tensor, norm: RMSNorm | None, eps: float, rotation: Rotation, fused: RowOperations | None) -> Tensor:
    """`norm` (None: an RMS norm without weight), then `rotate`. The fused form rounds once, the other between the two as well."""
    if fused is not None:
        return fused.norm_rotate(x, None if norm is None else norm.weight, eps, rotation)
    return rotate(rms_norm(x, None, eps) if norm is None else norm(x), rotation)
