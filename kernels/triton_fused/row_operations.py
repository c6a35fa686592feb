# SPDX-License-Identifier: Apache-2.0
"""The Triton form of `RowOperations`."""

from __future__ import annotations

from torch import Tensor

from kernels.triton_fused import hyper_maps, norm_rotate, swiglu


class TritonRowOperations:
    """Norms, rotations and the maps of hyper-connections, one kernel each way; differentiable once."""

    streams: tuple[int, ...] = hyper_maps.STREAMS

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor | None = None) -> Tensor:
        """See `norm_rotate.norm_rotate`."""
        return norm_rotate.norm_rotate(x, weight, eps, rotation)

    def rotate(self, x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
        """See `norm_rotate.rotate`."""
        return norm_rotate.rotate(x, rotation, inverse)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
        """See `swiglu.swiglu`."""
        return swiglu.swiglu(gate, up, limit, weight)

    def hyper_maps(self, mix: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `hyper_maps.hyper_maps`."""
        return hyper_maps.hyper_maps(mix, scale, base, iterations, eps)
