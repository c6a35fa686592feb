# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused router for sm_90 and prints one JSON line per kernel: run by test_route.py in a process of its own, since a process that
interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.route import route
from tests.kernels.triton.aot import compiling_for_sm90


def main() -> None:
    with compiling_for_sm90() as kernels:
        for experts, topk, hashed in ((16, 3, False), (256, 8, False), (16, 3, True)):
            logits = torch.zeros(64, experts, requires_grad=True)
            given = torch.zeros(64, topk, dtype=torch.int64) if hashed else None
            scores, _, weights = route(logits, None if hashed else torch.zeros(experts), given, topk, 1.5)
            torch.autograd.grad((weights.sum() if hashed else scores.sum() + weights.sum()), logits)
    for kernel in kernels:
        print(json.dumps({"kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers}), flush=True)


if __name__ == "__main__":
    main()
