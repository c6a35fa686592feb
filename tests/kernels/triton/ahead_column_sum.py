# SPDX-License-Identifier: Apache-2.0
"""Compiles the sum over the first axis for sm_90 and prints one JSON line per kernel: run by test_column_sum.py in a process of its own, since a
process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.column_sum import column_sum
from tests.kernels.triton.aot import compiling_for_sm90

# norms, the fn of a hyper-connection, a position bias, sinks in two passes, and columns that leave room in a tile
SHAPES = [(512, 512), (256, 128), (32, 24, 2048), (33, 4, 1024), (16384, 32), (65536, 64), (20000, 24), (40, 7168)]


def main() -> None:
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            with compiling_for_sm90() as kernels:
                column_sum(torch.zeros(1).expand(shape).contiguous(), dtype)
            for kernel in kernels:
                record = {"shape": shape, "kernel": kernel.name, "stack": kernel.stack_bytes, "tile": kernel.constants}
                print(json.dumps(record | {"loads": kernel.count("LDG"), "wide": kernel.count(r"LDG\.E\.128")}), flush=True)


if __name__ == "__main__":
    main()
