# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused SwiGLU for sm_90 and prints one JSON line per kernel: run by test_swiglu.py in a process of its own, since a process that
interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.swiglu import swiglu
from tests.kernels.triton.aot import compiling_for_sm90


def main() -> None:
    with compiling_for_sm90() as kernels:
        for width, weighted in ((256, True), (3000, False)):  # routed experts, and a wide dense layer
            leaves = [torch.zeros(64, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
            leaves += [torch.ones(64, 1, requires_grad=True)] * weighted
            out = swiglu(leaves[0], leaves[1], 10.0, *leaves[2:], source=torch.arange(64) if weighted else None)
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    for kernel in kernels:
        print(json.dumps({"kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers}), flush=True)


if __name__ == "__main__":
    main()
