# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that a host function launches for sm_90, on a machine without a GPU, and read off what the compiler did.

The host function runs on ordinary CPU tensors, whose contents do not matter; each launch inside it is compiled with exactly the specialisation
that the launch would have and is not run. Must not be used in a process where TRITON_INTERPRET=1 was set when the kernels were imported.

    with compiling_for_sm90() as kernels:
        attend_forward(q, ...)
    for kernel in kernels: print(kernel.name, kernel.registers, kernel.stack_bytes, kernel.count("HGMMA"))
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled specialisation. stack_bytes: local memory a thread, which is where spilled registers go. sass: its disassembly."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    constants: dict[str, Any]
    sass: str

    def count(self, instruction: str) -> int:
        """How often an instruction stands in the disassembly; HGMMA is the warp-group matrix product, WARPGROUP its waits, LDL a spill reload."""
        return len(re.findall(rf"\b{instruction}", self.sass))


class _HostOnlyDriver:
    """Answers what a launch asks of the driver before it compiles; there is no device behind it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout


def _inspect(name: str, binary: bytes, metadata: Any, constants: dict[str, Any]) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(binary)
    try:
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", file.name))
        assert usage is not None, f"no resource usage reported for {name}"
        sass = _tool("nvdisasm", "-c", file.name)
    finally:
        os.unlink(file.name)
    return CompiledKernel(name, int(usage[1]), int(usage[2]), metadata.shared, metadata.num_warps, constants, sass)


@contextlib.contextmanager
def compiling_for_sm90() -> Iterator[list[CompiledKernel]]:
    """Inside: every Triton or Gluon launch is compiled for sm_90 instead of run. The list fills with one entry per distinct specialisation."""
    compiled: list[CompiledKernel] = []
    seen: set[str] = set()
    previous_run, previous_driver = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = previous_run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
            constants = {p.name: bound[p.name] for p in self.params if p.is_constexpr and p.name in bound}
            compiled.append(_inspect(self.fn.__name__, kernel.asm["cubin"], kernel.metadata, constants))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_HostOnlyDriver())
    try:
        yield compiled
    finally:
        JITFunction.run = previous_run
        driver._active = previous_driver
