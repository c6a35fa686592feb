# SPDX-License-Identifier: Apache-2.0
"""Fused Triton kernels: one file per operation. Importing this package needs Triton; `import kernels` does not."""

from __future__ import annotations

from kernels.triton_fused.backend import TritonBackend

__all__ = ["TritonBackend"]
