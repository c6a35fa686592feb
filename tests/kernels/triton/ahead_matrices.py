# SPDX-License-Identifier: Apache-2.0
"""Compiles the passes around an iteration on matrices for sm_90 and prints one JSON line per kernel: run by test_matrices.py in a process of its own,
since a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.matrices import at_their_addresses, decay_and_add, gather_momentum, matrix_polynomial
from tests.kernels.triton.aot import compiling_for_sm90

SHAPES = [(256, 512), (512, 256), (24, 2048), (4096, 128)]


def main() -> None:
    for shape in SHAPES:
        for work in (torch.bfloat16, torch.float32):
            grads, buffers, params = (at_their_addresses([torch.zeros(3, *shape)]) for _ in range(3))
            batch = torch.zeros(3, *sorted(shape), dtype=work)
            out = batch.mT if shape[0] > shape[1] else batch
            with compiling_for_sm90() as kernels:
                gather_momentum(grads, buffers, 0.95, out, 1e-30)
                decay_and_add(params, out, torch.zeros(1), 0.1, 0.1)
            for kernel in kernels:
                record = {"shape": shape, "work": str(work), "kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers}
                counts = {"wide": kernel.count(r"LDG\.E\.128"), "stores": kernel.count("STG"), "wide stores": kernel.count(r"STG\.E\.128")}
                print(json.dumps(record | counts), flush=True)
    for n in (24, 128, 256, 512, 1008):
        for work in (torch.bfloat16, torch.float32):
            with compiling_for_sm90() as kernels:
                matrix_polynomial(torch.zeros(3, n, n, dtype=work), 2.0, -1.5, 0.5)
            for kernel in kernels:
                record = {"n": n, "work": str(work), "kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers}
                products = {i: kernel.count(i) for i in ("HMMA", "HGMMA", "WARPGROUP")}
                print(json.dumps(record | products | {"shared": kernel.shared_bytes}), flush=True)


if __name__ == "__main__":
    main()
