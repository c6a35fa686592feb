# SPDX-License-Identifier: Apache-2.0
"""Where FlashMLA's sparse prefill comes from: an importable `flash_mla` of either generation, else the op inside the wheel `sglang-kernel`.

A provider is a callable with a known list of arguments; what its numbers mean is for probe.py to find out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.backend import BackendUnsupported
from kernels.flashmla.rules import OTHER_BACKENDS

VALUE_COLUMNS = 512
# sglang-kernel by the torch that it was built for. 0.4.3 was run here; the others are what releases of sglang pin together.
SGLANG_KERNEL_FOR_TORCH = {"2.11": "0.4.3", "2.13": "0.4.7", "2.14": "0.4.10"}
# Every argument of any known version, and the value passed where a call does not set it. One that is not listed could mean anything.
ARGUMENTS: Mapping[str, Any] = {
    "q": None,
    "kv": None,
    "indices": None,
    "sm_scale": None,
    "d_v": VALUE_COLUMNS,
    "attn_sink": None,
    "topk_length": None,
    "indexer_topk": 0,  # a partial lse over the first ids; the teacher needs the whole one
    "out": None,
}
REQUIRED = ("q", "kv", "indices", "sm_scale")


class ProviderRejected(Exception):
    """A package is there, but its op cannot be used; the text says why."""


@dataclass(frozen=True)
class Provider:
    """One source of the op: `function` with the arguments `names`, passed by keyword."""

    name: str
    version: str
    function: Callable[..., Any]
    names: tuple[str, ...]
    device_type: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    @property
    def takes_sink(self) -> bool:
        return "attn_sink" in self.names

    @property
    def description(self) -> str:
        return f"{self.name} {self.version}" + ("" if self.takes_sink else " (old API, without a sink)")

    def __call__(self, q: Tensor, keys: Tensor, ids: Tensor, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """out [R, H, 512] and lse [R, H] as the op returns them.

        Args:
            q: [R, H, 512]; keys: [N, 512]; ids: int32 [R, S] into the keys; sink: fp32 [H], only where `takes_sink`.
        """
        if sink is not None and not self.takes_sink:
            raise ValueError(f"{self.description} takes no sink")
        given = {"q": q, "kv": keys[:, None], "indices": ids[:, None], "sm_scale": scale, "attn_sink": sink}
        results = self.function(**{name: given.get(name, ARGUMENTS[name]) for name in self.names})
        if not isinstance(results, (tuple, list)) or len(results) not in (3, 4):
            raise ProviderRejected(f"{self.description} returned {_shape_of(results)}; known are (out, maximum, lse) and one more lse behind them")
        out, lse = results[0], results[2]
        if out.shape != (*q.shape[:2], VALUE_COLUMNS) or lse.shape != q.shape[:2]:
            raise ProviderRejected(f"{self.description} returned out {list(out.shape)} and lse {list(lse.shape)} for queries {list(q.shape)}")
        return out, lse


def _shape_of(results: Any) -> str:
    if isinstance(results, (tuple, list)):
        return f"{len(results)} values"
    return f"a {type(results).__name__}"


def provider_of(name: str, version: str, function: Callable[..., Any], **properties: Any) -> Provider:
    """A provider of a Python function or an operator of PyTorch. ProviderRejected for a list of arguments that is not known."""
    names = _argument_names(name, function)
    missing, unknown = [n for n in REQUIRED if n not in names], [n for n in names if n not in ARGUMENTS]
    if missing:
        raise ProviderRejected(f"{name} {version}: the op lacks the argument {', '.join(missing)}; it has {', '.join(names)}")
    if unknown:
        raise ProviderRejected(f"{name} {version}: the op has the unknown argument {', '.join(unknown)}, whose default could mean anything")
    return Provider(name, version, function, names, **properties)


def _argument_names(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ProviderRejected(f"{name}: the op does not show its arguments ({error})") from error
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ProviderRejected(f"{name}: the op hides its arguments behind *args or **kwargs")
    return tuple(p.name for p in parameters)


def _version_of(distribution: str, module: object | None = None) -> str:
    for known in (distribution, distribution.replace("_", "-")):
        try:
            return importlib.metadata.version(known)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(module, "__version__", "of unknown version"))


def from_flash_mla() -> Provider:
    """The function of an importable `flash_mla`."""
    if importlib.util.find_spec("flash_mla") is None:
        raise ProviderRejected("flash_mla: not installed")
    try:
        module = importlib.import_module("flash_mla")
    except Exception as error:  # an extension built for another torch fails in many ways
        raise ProviderRejected(f"flash_mla: does not import with torch {torch.__version__} ({_first_line(error)})") from error
    version = _version_of("flash_mla", module)
    function = getattr(module, "flash_mla_sparse_fwd", None)
    if function is None:
        raise ProviderRejected(f"flash_mla {version}: has no flash_mla_sparse_fwd (the version on PyPI predates sparse attention)")
    return provider_of("flash_mla", version, function)


def from_sglang_kernel() -> Provider:
    """The op in the extension `flashmla_ops` of `sglang-kernel`, loaded by itself: the package as a whole wants much more."""
    spec = importlib.util.find_spec("sgl_kernel")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ProviderRejected("sglang-kernel: not installed")
    version = _version_of("sglang-kernel")
    libraries = [path for folder in folders for path in sorted(Path(folder).glob("flashmla_ops*.so"))]
    if not libraries:
        raise ProviderRejected(f"sglang-kernel {version}: has no flashmla_ops extension in {folders[0]}")
    try:
        torch.ops.load_library(str(libraries[0]))
    except Exception as error:  # OSError for a missing symbol, RuntimeError for a second registration
        raise ProviderRejected(
            f"sglang-kernel {version}: its flashmla_ops does not load with torch {torch.__version__} ({_first_line(error)})"
        ) from error
    function = getattr(getattr(torch.ops.sgl_kernel, "sparse_prefill_fwd", None), "default", None)
    if function is None:
        raise ProviderRejected(f"sglang-kernel {version}: its flashmla_ops has no sparse_prefill_fwd")
    return provider_of("sglang-kernel", version, function)


SOURCES: tuple[Callable[[], Provider], ...] = (from_flash_mla, from_sglang_kernel)


def find_provider(sources: Sequence[Callable[[], Provider]] = SOURCES) -> tuple[Provider, list[str]]:
    """The first source that works, and why the ones before it do not. BackendUnsupported if none does."""
    reasons: list[str] = []
    for source in sources:
        try:
            return source(), reasons
        except ProviderRejected as reason:
            reasons.append(str(reason))
    raise BackendUnsupported(f"backend 'flashmla' finds no FlashMLA sparse prefill: {'; '.join(reasons)}", f"{advice()}, or {OTHER_BACKENDS}")


def advice() -> str:
    """What to install for this torch."""
    series = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    wanted = SGLANG_KERNEL_FOR_TORCH.get(series)
    if wanted is not None:
        return f"pip install --no-deps sglang-kernel=={wanted} (built for torch {series}, CUDA 13)"
    pairs = ", ".join(f"sglang-kernel=={kernel} with torch {torch_series}" for torch_series, kernel in SGLANG_KERNEL_FOR_TORCH.items())
    return f"a torch that a wheel was built for (known pairs: {pairs}; this is torch {torch.__version__}), or a flash_mla built for this torch"


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # the loader's own words: which symbol or library is missing
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
