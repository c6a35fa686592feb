# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused cross entropy for sm_90 and prints one JSON line per kernel: run by test_cross_entropy.py in a process of its own, since a
process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch

from kernels.triton_fused.cross_entropy import linear_cross_entropy
from tests.kernels.triton.aot import compiling_for_sm90


def main() -> None:
    with compiling_for_sm90() as kernels:
        for classes in (1003, 8192, 32768, 129280):  # padded rows; models here; the widest row in registers; DeepSeek-V4's vocabulary
            hidden, weight = torch.zeros(4, 16, requires_grad=True), torch.zeros(classes, 16, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), -100)
                linear_cross_entropy(hidden.detach(), weight.detach(), torch.zeros(4, dtype=torch.int64), -100)
    for kernel in kernels:
        counts = {f"{name} of 16 bytes": kernel.count(f"{name}.E.128") for name in ("LDG", "STG")} | {"STG": kernel.count("STG")}
        record = {"kernel": kernel.name, "stack": kernel.stack_bytes, "registers": kernel.registers, "warps": kernel.num_warps}
        print(json.dumps(record | counts | {"V": kernel.constants["V"], "with_grad": kernel.constants["WITH_GRAD"]}), flush=True)


if __name__ == "__main__":
    main()
