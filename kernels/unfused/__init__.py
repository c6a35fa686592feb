# SPDX-License-Identifier: Apache-2.0
"""The reference backend: readable PyTorch for float64, float32 and lower, on any device. Every fused operation is compared with it."""

from __future__ import annotations

import torch

from kernels.backend import Backend, BackendUnsupported, Geometry
from kernels.unfused.attend import attend
from kernels.unfused.indexer_loss import indexer_loss
from kernels.unfused.select import select
from kernels.unfused.teacher import indexer_kl, teacher_distribution

__all__ = ["UnfusedBackend", "indexer_kl", "teacher_distribution"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class UnfusedBackend(Backend):
    """Plain PyTorch, chunked over query rows, with hand-written backwards."""

    name = "unfused"
    select = staticmethod(select)
    attend = staticmethod(attend)
    indexer_loss = staticmethod(indexer_loss)

    def require(self, geometry: Geometry) -> None:
        """Every geometry runs; only a dtype that is not floating point is refused."""
        if geometry.dtype not in _DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise BackendUnsupported(f"backend 'unfused' has no arithmetic for {geometry.dtype}", f"one of {names}")

    def describe(self) -> dict[str, str]:
        version = f"PyTorch {torch.__version__}"
        return {
            "select": f"plain tensor operations, {version}",
            "attend": f"plain tensor operations, hand-written backward, {version}",
            "indexer_loss": f"plain tensor operations, hand-written backward, {version}",
        }
