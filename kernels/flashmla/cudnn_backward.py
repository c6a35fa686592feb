# SPDX-License-Identifier: Apache-2.0
"""The attention backward on the cuDNN frontend's sparse backward for SM90, `backend.backward=cudnn`.

Its wrapper changed between 1.25, 1.26, 1.29 and 1.32: arguments came in, defaults moved, and up to 1.29 the kernel masks no invalid id and does not
return from an empty list. So its arguments are read off the installed version and each is passed by keyword, ids are compacted and never empty, and
the probe compares its gradients with float64 before anything is trained.

Legend: R query rows, N keys (tokens, then entries), H heads, D head dim, S ids per query.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.backend import BackendUnsupported, Selection
from kernels.flashmla import adapt
from kernels.flashmla.parts import AttentionGradients
from kernels.flashmla.rules import SM90, ArchitectureRules
from kernels.layout import PackedLayout

KNOWN_VERSIONS = "nvidia-cudnn-frontend 1.25, 1.26, 1.29 and 1.32 with nvidia-cutlass-dsl"
REMEDY = "backend.backward=triton, the default, which needs neither cuDNN nor its frontend"
WRAPPER = "sparse_attention_backward_wrapper"
LARGE = 1e30  # in place of an infinity, which would meet another one in a difference
OPERANDS = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
# Optional arguments of any known version, or of its sibling wrappers, with the value that means what we want on SM90.
EXPLICIT: Mapping[str, Any] = {
    "softmax_scale": None,  # set by every call: the default follows the padded head dim
    "topk_length": None,  # set by every call: without it, up to 1.29, padding ids are read
    "dq": None,
    "dkv": None,
    "block_tile": 64,
    "stream": None,  # the current one
    "deterministic": False,  # since 1.29, SM100 only
    "workspace": None,  # since 1.29
    "q_cluster_mode": "off",  # since 1.32, SM100 only
    "topk_indices_global": True,  # siblings: always global in 1.25, local by default since 1.26
    "q_causal_offsets": 0,  # siblings: bottom-right in 1.25, top-left since 1.26; our ids hold the causality
}
SET_BY_CALL = ("softmax_scale", "topk_length")
TOLERANCE = 2e-2


class CudnnBackward:
    """An AttentionBackward (see parts.py) on `function`. BackendUnsupported for a list of arguments that is not known."""

    def __init__(self, function: Callable[..., Any], version: str, rules: ArchitectureRules = SM90) -> None:
        self.function, self.version, self.rules = function, version, rules
        self.description = f"cuDNN frontend {version}, sparse attention backward for SM90, not deterministic"
        self.names = _argument_names(function, version)

    def __call__(
        self,
        grad_out: Tensor,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor | None,
        selected: Selection | None,
        sink: Tensor,
        out: Tensor,
        lse: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
    ) -> AttentionGradients:
        """See AttentionBackward. BackendUnsupported where deterministic algorithms are asked for."""
        refuse_deterministic()
        heads, dim = q.shape[1:]
        tokens = window_kv.shape[0]
        entries = compressed_kv if adapt.reads_entries(compressed_kv, selected) else None
        count = 0 if entries is None else entries.shape[0]
        padded = self.rules.padded_heads(heads)
        keys = adapt.key_table(window_kv, entries, self.rules.head_dim)
        d_query, d_keys, d_sink = [], None, torch.zeros_like(sink, dtype=torch.float32)
        for first, last, slots in adapt.row_chunks(count, selected, layout, ratio, window, self.rules, padded):
            rows = slice(first, last)
            if slots == 0:
                d_query.append(torch.zeros_like(q[rows]))
                continue
            ids = adapt.global_ids(first, last, slots, count, selected, layout, ratio, window)
            dq, dkv, d_sink_part = self.gradients(q[rows], keys, out[rows], grad_out[rows].to(q.dtype), lse[rows], sink, ids, scale)
            d_query.append(dq)
            d_sink += d_sink_part
            # more than one chunk: their sum in float32
            d_keys = dkv if d_keys is None else d_keys.float() + dkv.float()
        d_all = torch.zeros_like(keys) if d_keys is None else d_keys.to(window_kv.dtype)
        d_window = d_all[:tokens, :dim].contiguous()
        d_entries = None if entries is None else d_all[tokens:, :dim].contiguous()
        return d_query[0] if len(d_query) == 1 else torch.cat([q[:0], *d_query]), d_window, d_entries, d_sink

    def gradients(
        self, q: Tensor, keys: Tensor, out: Tensor, grad_out: Tensor, lse: Tensor, sink: Tensor, ids: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq [R, H, D], d_keys [N, 512], d_sink fp32 [H] of one launch; ids int32 [R, S] with -1 anywhere."""
        heads, dim = q.shape[1:]
        padded, columns = self.rules.padded_heads(heads), self.rules.head_dim
        compact, length = compact_ids(ids)
        full_lse = torch.where(torch.isinf(lse), LARGE, lse).float()
        given = {
            "q": adapt.padded_queries(q, padded, columns),
            "kv": keys,
            "out": adapt.padded_queries(out, padded, columns),
            "dout": adapt.padded_queries(grad_out, padded, columns),
            "lse": pad(full_lse, (0, padded - heads), value=LARGE).contiguous(),
            "attn_sink": adapt.padded_sink(sink, padded).clamp(-LARGE, LARGE),
            "topk_idxs": compact,
            "softmax_scale": scale,
            "topk_length": length,
            "q_causal_offsets": torch.zeros(1, dtype=torch.int32, device=q.device),
        }
        with adapt.on_device(q.device):
            results = self.function(**{name: given.get(name, EXPLICIT.get(name)) for name in self.names})
        try:
            dq, dkv, d_sink = results["dq"], results["dkv"], results["d_sink"]
        except (TypeError, KeyError) as error:
            raise BackendUnsupported(f"cuDNN frontend {self.version} does not return dq, dkv and d_sink by name", REMEDY) from error
        return dq[:, :heads, :dim].contiguous(), dkv, d_sink[:heads].float()

    def probe(self, heads: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        """Gradients of a small case against float64, at two scales: ids with holes, an empty row. BackendUnsupported with the numbers seen."""
        rows, count, slots = 24, 192, 128
        generator = torch.Generator().manual_seed(6)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        # the upper half of the keys has the larger ids: an id taken for a local one, or cut by a causal mask, cannot go unseen
        ids = torch.rand(rows, count, generator=generator).argsort(1)[:, :slots].int()
        ids[torch.rand(rows, slots, generator=generator) < 0.3] = -1
        ids[11] = -1
        ids = ids.to(device)
        dim = self.rules.head_dim
        q, keys, grad = draw(rows, heads, dim), draw(count, dim), draw(rows, heads, dim)
        sink = torch.linspace(-1, 2, heads, dtype=torch.float32, device=device)
        for scale in (dim**-0.5, 0.37 * dim**-0.5):  # the same shapes twice: a scale kept from the first call shows
            out, lse, exact = _exact_gradients(q, keys, grad, sink, ids, scale)
            try:
                got = self.gradients(q, keys, out.to(dtype), grad, lse.float(), sink, ids, scale)
                seen = [_norm_error(a.double(), b) for a, b in zip(got, exact, strict=True)]
            except (RuntimeError, TypeError, ValueError, AssertionError) as error:
                if isinstance(error, BackendUnsupported):
                    raise
                line = (str(error).strip().splitlines() or [""])[0][:200]
                raise BackendUnsupported(f"the probe of cuDNN frontend {self.version} failed: {type(error).__name__}: {line}", REMEDY) from error
            if not max(seen) < TOLERANCE or (got[0][11] != 0).any():
                errors = ", ".join(f"{name} {error:.2e}" for name, error in zip(("dq", "dkv", "d_sink"), seen, strict=True))
                raise BackendUnsupported(
                    f"the probe does not understand cuDNN frontend {self.version}: relative errors {errors} at scale {scale:.4f}; known are "
                    f"{KNOWN_VERSIONS} within {TOLERANCE}",
                    REMEDY,
                )


def find_cudnn_backward(load: Callable[[str], Any] = importlib.import_module) -> CudnnBackward:
    """The wrapper of the installed cuDNN frontend. BackendUnsupported where there is none or its arguments are not known."""
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        function = getattr(load("cudnn.deepseek_sparse_attention").DSA, WRAPPER)
    except Exception as error:  # its packages fail in many ways: absent, another CUDA, another DSL
        line = (str(error).strip().splitlines() or [""])[0][:160]
        raise BackendUnsupported(
            f"backend.backward=cudnn needs the cuDNN frontend's sparse attention backward; it does not import ({type(error).__name__}: {line})",
            f"pip install nvidia-cudnn-frontend==1.32.0 nvidia-cutlass-dsl, or {REMEDY}",
        ) from error
    return CudnnBackward(function, version)


def refuse_deterministic() -> None:
    """BackendUnsupported where deterministic algorithms are asked for: the kernel adds d_keys in any order."""
    if torch.are_deterministic_algorithms_enabled():
        raise BackendUnsupported("backend.backward=cudnn has no deterministic mode on SM90, and deterministic algorithms are asked for", REMEDY)


def compact_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Valid ids first, 0 behind them, and their number int32 [R], at least 1: a row without one reads key 0 with probability 0."""
    valid = ids >= 0
    slot = torch.where(valid, valid.cumsum(1) - 1, ids.shape[1])
    moved = torch.zeros(ids.shape[0], ids.shape[1] + 1, dtype=torch.int32, device=ids.device).scatter_(1, slot, ids)
    return moved[:, :-1].contiguous(), valid.sum(1, dtype=torch.int32).clamp(min=1)


def _argument_names(function: Callable[..., Any], version: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BackendUnsupported(f"cuDNN frontend {version}: {WRAPPER} does not show its arguments", f"{KNOWN_VERSIONS}, or {REMEDY}") from error
    names = tuple(p.name for p in parameters)
    missing = [name for name in (*OPERANDS, *SET_BY_CALL) if name not in names]
    unknown = [name for name in names if name not in OPERANDS and name not in EXPLICIT]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has the unknown argument {', '.join(unknown)}, whose default could mean anything"
        raise BackendUnsupported(f"cuDNN frontend {version}: {WRAPPER} {what}", f"{KNOWN_VERSIONS}, or {REMEDY}")
    return names


def _exact_gradients(
    q: Tensor, keys: Tensor, grad: Tensor, sink: Tensor, ids: Tensor, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """out, lse and (dq, d_keys, d_sink) in float64 by autograd; a row without ids gives 0."""
    leaves = [t.detach().double().requires_grad_() for t in (q, keys, sink)]
    query, key, leaf_sink = leaves
    valid = ids >= 0
    gathered = key[ids.clamp(min=0).long()]
    logits = (torch.einsum("rhd,rsd->rhs", query, gathered) * scale).masked_fill(~valid[:, None], -math.inf)
    joint = torch.softmax(torch.cat([logits, leaf_sink[None, :, None].expand(q.shape[0], -1, 1)], -1), -1)
    out = torch.einsum("rhs,rsd->rhd", joint[..., :-1], gathered)
    dq, d_keys, d_sink = torch.autograd.grad(out, leaves, grad.double())
    return out.detach(), torch.logsumexp(logits.detach(), -1), (dq, d_keys, d_sink)


def _norm_error(got: Tensor, exact: Tensor) -> float:
    error = ((got - exact).norm() / exact.norm()).item()
    return error if error == error else math.inf
