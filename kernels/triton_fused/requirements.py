# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels need of machine, packages and geometry; each refusal says what is missing and what would work."""

from __future__ import annotations

import os

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from kernels.backend import BackendUnsupported, Geometry
from kernels.triton_fused.row_select import parts_kernel

TRITON_MINIMUM = (3, 6)
CAPABILITY_MINIMUM = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNFUSED = "backend=unfused, which runs anywhere"


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET=1, set before they were imported and still set."""
    return os.environ.get("TRITON_INTERPRET") == "1" and isinstance(parts_kernel, InterpretedFunction)


def triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


def check_machine(device_type: str) -> None:
    """BackendUnsupported unless kernels can be compiled and run on this machine."""
    if triton_version() < TRITON_MINIMUM:
        needed = ".".join(map(str, TRITON_MINIMUM))
        raise BackendUnsupported(
            f"backend 'triton' needs Triton >= {needed}, found {triton.__version__}", f"pip install 'triton>={needed}', or {UNFUSED}"
        )
    if interpreted():
        return
    if not torch.cuda.is_available():
        raise BackendUnsupported(
            "backend 'triton' needs an NVIDIA GPU and a CUDA build of PyTorch: "
            + (f"PyTorch {torch.__version__} is built without CUDA" if torch.version.cuda is None else "no GPU is visible")
            + ". TRITON_INTERPRET=1 runs the kernels on a CPU thousands of times slower and is for tests only",
            f"a machine with an NVIDIA GPU of compute capability 8.0 or newer, or {UNFUSED}",
        )
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY_MINIMUM:
        raise BackendUnsupported(
            f"backend 'triton' needs compute capability >= 8.0, {torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}",
            f"an Ampere GPU or newer, or {UNFUSED}",
        )
    if device_type != "cuda":
        raise BackendUnsupported(f"backend 'triton' runs on CUDA tensors, the model is on {device_type!r}", f"trainer.accelerator=gpu, or {UNFUSED}")


def check_geometry(geometry: Geometry) -> None:
    """BackendUnsupported for sizes and dtypes that the kernels do not take."""
    if geometry.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise BackendUnsupported(f"backend 'triton' has no kernels for {geometry.dtype}", f"one of {names}, or {UNFUSED}")
    _check_range("heads", geometry.heads, 1, 128)
    _check_range("head_dim", geometry.head_dim, 16, 512)
    if geometry.head_dim % 8:
        raise BackendUnsupported(
            f"head_dim={geometry.head_dim} is not a multiple of 8: rows of keys would not begin on 16 bytes", f"a multiple of 8, or {UNFUSED}"
        )
    if geometry.index_heads is not None:
        _check_range("index_heads", geometry.index_heads, 1, 128)
    if geometry.index_head_dim is not None:
        _check_range("index_head_dim", geometry.index_head_dim, 16, 256)
    if geometry.topk is not None:
        _check_range("topk", geometry.topk, 0, 2048)


def _check_range(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise BackendUnsupported(f"backend 'triton' takes {name} from {lowest} to {highest}, got {value}", f"a {name} in that range, or {UNFUSED}")
