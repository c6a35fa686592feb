# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused pooling of the compressor for sm_90 and prints one JSON line per kernel: run by test_compress_pool_ahead.py in a process of its
own, since a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.row_operations import TritonRowOperations
from tests.kernels.triton.aot import compiling_for_sm90

# ratio, dim, dtype: CSA entries and index keys, HCA entries; other ratios; more slots than a tile holds; fp32
SIZES = [
    (4, 512, torch.bfloat16),
    (4, 96, torch.bfloat16),
    (128, 512, torch.bfloat16),
    (20, 96, torch.bfloat16),
    (300, 512, torch.bfloat16),
    (4, 512, torch.float32),
    (128, 512, torch.float32),
]


def main() -> None:
    fused = TritonRowOperations()
    for ratio, dim, dtype in SIZES:
        overlap = ratio == 4
        width = 2 * dim if overlap else dim
        with compiling_for_sm90() as kernels:
            projected = torch.zeros(40 * ratio, 2 * width, dtype=dtype, requires_grad=True)
            ape = torch.zeros(ratio, width, requires_grad=True)
            out = fused.pool_windows(projected, ape, torch.zeros(40, dtype=torch.bool), overlap)
            torch.autograd.grad(out, [projected, ape], torch.zeros_like(out))
        for kernel in kernels:
            record = {"kernel": kernel.name, "ratio": ratio, "dtype": str(dtype), "stack": kernel.stack_bytes, "registers": kernel.registers}
            print(json.dumps(record | {"barriers": kernel.count("BAR"), "atomics": kernel.count("ATOM") + kernel.count("RED")}), flush=True)


if __name__ == "__main__":
    main()
