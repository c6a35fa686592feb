# SPDX-License-Identifier: Apache-2.0
"""Tensor mathematics of compressed sparse attention and its indexer: no modules, no configuration, usable alone."""

from __future__ import annotations

from kernels.backend import ALL_VISIBLE, Backend, BackendUnsupported, Geometry, IndexerStats, RowOperations, available_backends, get_backend
from kernels.layout import PackedLayout
from kernels.static_layout import StaticLayout

__all__ = [
    "ALL_VISIBLE",
    "Backend",
    "BackendUnsupported",
    "Geometry",
    "IndexerStats",
    "PackedLayout",
    "RowOperations",
    "StaticLayout",
    "available_backends",
    "get_backend",
]
