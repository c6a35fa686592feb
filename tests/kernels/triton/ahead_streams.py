# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused hyper-connections for sm_90 and prints one JSON line per kernel: run by test_stream_mix_ahead.py in a process of its own, since
a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.row_operations import TritonRowOperations
from tests.kernels.triton.aot import compiling_for_sm90

# streams, hidden, dtype, tokens (those choose the tile of the projection)
SIZES = [
    (4, 512, torch.bfloat16, 40),
    (4, 4096, torch.bfloat16, 16384),
    (4, 1008, torch.float32, 8192),
    (8, 512, torch.bfloat16, 40),
    (8, 512, torch.float32, 40),
    (1, 528, torch.bfloat16, 40),
]


def main() -> None:
    fused = TritonRowOperations()
    for n, d, dtype, tokens in SIZES:
        with compiling_for_sm90() as kernels:
            # of the big tensors only the shape matters
            streams = torch.zeros(1, dtype=dtype).expand(tokens, n, d) if tokens > 40 else torch.zeros(tokens, n, d, dtype=dtype)
            streams = streams.requires_grad_()
            for rows, scales in ((n * (2 + n), 3), (n, 1)):
                leaves = [torch.zeros(shape, requires_grad=True) for shape in ((rows, n * d), (scales,), (rows,))]
                if scales == 1:
                    out = fused.collapse_streams(streams, *leaves, 1e-6, 1e-6)
                else:
                    x, put_back = fused.around_sublayer(streams, *leaves, 20, 1e-6, 1e-6)
                    out = put_back(x)
                torch.autograd.grad(out, [streams, *leaves], torch.zeros_like(out))
        for kernel in kernels:
            record = {"kernel": kernel.name, "size": f"{n} x {d} {dtype}", "stack": kernel.stack_bytes, "registers": kernel.registers}
            print(json.dumps(record | {i: kernel.count(i) for i in ("HMMA", "HGMMA", "BAR")}), flush=True)


if __name__ == "__main__":
    main()
