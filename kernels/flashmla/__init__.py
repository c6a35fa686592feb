# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse prefill as the attention forward: found, probed, adapted, and given a backward. Importing this needs neither it nor Triton."""

from __future__ import annotations

from kernels.flashmla.backend import FlashMLABackend

__all__ = ["FlashMLABackend"]
