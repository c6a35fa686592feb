# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused row operations for sm_90 and prints one JSON line per kernel: run by test_row_operations_ahead.py in a process of its own, since
a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused import hyper_maps
from kernels.triton_fused.row_operations import TritonRowOperations
from tests.kernels.triton.aot import compiling_for_sm90

ROWS = [((40, 64, 512), 64, False), ((40, 512), 64, True), ((40, 7168), 0, True)]  # queries, keys, a block's norm: shape, rotated dims, weight


def main() -> None:
    fused = TritonRowOperations()
    with compiling_for_sm90() as kernels:
        for streams in (4, 8):
            rows = streams * (2 + streams)
            grads = [torch.zeros(40, *shape) for shape in ((streams,), (streams,), (streams, streams))]
            hyper_maps.maps_backward(torch.zeros(40, rows), torch.zeros(3), torch.zeros(rows), *grads, 20, 1e-6)
        for shape, turned, weighted in ROWS:
            x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.zeros(shape[-1], requires_grad=True) if weighted else None
            rotation = torch.zeros(shape[0], turned // 2, dtype=torch.complex64) if turned else None
            out = fused.norm_rotate(x, weight, 1e-6, rotation)
            torch.autograd.grad(out, [x] + [weight] * weighted, torch.zeros_like(out))
            if rotation is not None:
                fused.rotate(x, rotation, inverse=True)
    for kernel in kernels:
        record = {"kernel": kernel.name, "constants": str(kernel.constants), "stack": kernel.stack_bytes, "barriers": kernel.count("BAR")}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
