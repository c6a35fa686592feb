# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused balance loss for sm_90 and prints one JSON line per kernel: run by test_expert_load.py in a process of its own, since a process
that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.expert_load import balance
from tests.kernels.triton.aot import compiling_for_sm90


def main() -> None:
    with compiling_for_sm90() as kernels:
        for number, topk in ((16, 3), (512, 8), (5, 1)):
            balance(torch.ones(64, number), torch.zeros(64, topk, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), torch.ones(3))
    for kernel in kernels:
        print(json.dumps({"kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers}), flush=True)


if __name__ == "__main__":
    main()
