# SPDX-License-Identifier: Apache-2.0
"""`python -m kernels.doctor`: device, versions, and per backend what it can do here and why not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys

import torch

from kernels.backend import BackendUnsupported, Geometry, available_backends, get_backend

PACKAGES = ("torch", "triton", "sglang-kernel", "flash_mla", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "lightning")
# The two ends of what a run may ask for: the published layer and a layer of the small recipe model.
GEOMETRIES = {
    "64 heads of 512, top-k 512, bf16": Geometry(
        heads=64, head_dim=512, window=128, ratios=(0, 4, 128), topk=512, index_heads=64, index_head_dim=128, dtype=torch.bfloat16, teacher="full_csa"
    ),
    "8 heads of 64, top-k 64, bf16": Geometry(
        heads=8, head_dim=64, window=64, ratios=(0, 4, 128), topk=64, index_heads=8, index_head_dim=32, dtype=torch.bfloat16, teacher="full_csa"
    ),
    "4 heads of 32, top-k 8, fp32": Geometry(
        heads=4, head_dim=32, window=16, ratios=(0, 4), topk=8, index_heads=4, index_head_dim=16, dtype=torch.float32, teacher="full_csa"
    ),
}


def machine() -> list[str]:
    """Lines about interpreter, device and packages."""
    lines = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, CUDA build: {torch.version.cuda or 'none'}"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            lines.append(f"GPU {index}: {device.name}, compute capability {device.major}.{device.minor}, {device.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("GPU: none visible")
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    return [*lines, ", ".join(versions)]


def capabilities(name: str, device_type: str, **choices: str) -> list[str]:
    """Lines about one backend: which geometries it takes on this device, or why not, and what its operations are."""
    try:
        backend = get_backend(name, **choices)
    except BackendUnsupported as refusal:
        return [f"  no: {refusal}"]
    lines, reasons = [], []
    for label, geometry in GEOMETRIES.items():
        try:
            backend.require(dataclasses.replace(geometry, device_type=device_type))
            lines.append(f"  yes: {label}")
        except BackendUnsupported as refusal:
            lines.append(f"  no: {label}: {refusal}")
            reasons.append(str(refusal))
    if len(reasons) == len(GEOMETRIES) and len(set(reasons)) == 1:
        return [f"  no: {reasons[0]}"]
    graph = "yes, on one GPU under bf16-mixed" if backend.capturable() else "no"
    operations = backend.describe() | {"training step as a CUDA graph": graph}
    return [*lines, *(f"    {operation}: {implementation}" for operation, implementation in operations.items())]


def report() -> str:
    """The whole report."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    lines = machine()
    for name in available_backends():
        lines += [f"backend {name} ({device_type} tensors)", *capabilities(name, device_type)]
    lines += ["backend flashmla with backend.backward=cudnn", *capabilities("flashmla", device_type, backward="cudnn")]
    return "\n".join([*lines, "backend auto, the default", *(f"  {line}" for line in automatic(device_type))])


def automatic(device_type: str) -> list[str]:
    """Which backend backend=auto takes for each geometry."""
    if device_type == "cpu":
        return ["unfused: the model runs on the CPU"]
    lines = []
    for label, geometry in GEOMETRIES.items():
        try:
            get_backend("triton").require(dataclasses.replace(geometry, device_type=device_type))
            lines.append(f"triton: {label}")
        except BackendUnsupported as refusal:
            lines.append(f"unfused: {label}: {refusal.reason}")
    return lines


def main() -> int:
    print(report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
