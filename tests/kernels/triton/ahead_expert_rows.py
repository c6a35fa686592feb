# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels between tokens and experts for sm_90 and prints one JSON line per kernel: run by test_expert_rows.py in a process of its own,
since a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.expert_rows import order_pairs, spread_rows, sum_rows
from tests.kernels.triton.aot import compiling_for_sm90

GEOMETRIES = {"small": (16, 3, 512, torch.bfloat16), "many experts": (512, 8, 4096, torch.bfloat16), "odd": (5, 1, 333, torch.float32)}


def main() -> None:
    for name, (number, topk, width, dtype) in GEOMETRIES.items():
        with compiling_for_sm90() as kernels:
            order_pairs(torch.zeros(64, topk, dtype=torch.int64), number)
            place = torch.arange(64 * topk).view(64, topk)
            x, plus = (torch.zeros(64, width, dtype=dtype, requires_grad=True) for _ in range(2))
            one, other = spread_rows(x, place)
            out = sum_rows(one, place, plus)
            sum_rows(one, place)
            torch.autograd.grad([out, other], [x, plus], [torch.zeros_like(out), torch.zeros_like(other)])
        for kernel in kernels:
            record = {"geometry": name, "kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers}
            counts = {
                "wide": kernel.count(r"LDG\.E\.128") + kernel.count(r"STG\.E\.128"),
                "atomics": kernel.count("RED(?!UX)") + kernel.count("ATOM"),
            }
            print(json.dumps(record | counts), flush=True)


if __name__ == "__main__":
    main()
