# SPDX-License-Identifier: Apache-2.0
"""What the CSA core is compared with: FlashMLA's forward with the cuDNN frontend's SM90 kernels, composed by us, and plain PyTorch autograd.

Both are optional packages. FlashMLA: the op inside the wheel `sglang-kernel` (installed, or its folder in FLASHMLA_DIR). cuDNN:
`nvidia-cudnn-frontend` with `nvidia-cutlass-dsl`. The composed path takes one document, ratio 4, 64 or 128 heads of 512 only.

Legend: T tokens, C entries, H heads, D head dim, HI/DI index heads / index head dim, K top-k, W window.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.csa_gate_cases import Inputs

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class StepResult:
    """out [T, H, D], mean KL per query row, gradients by name."""

    out: Tensor
    kl_mean: Tensor
    gradients: dict[str, Tensor]


def flashmla_missing() -> str | None:
    """Load FlashMLA's op; the reason if that fails."""
    folder = os.environ.get("FLASHMLA_DIR")
    if folder is None:
        spec = importlib.util.find_spec("sgl_kernel")
        if spec is None or not spec.submodule_search_locations:
            return "sglang-kernel is not installed and FLASHMLA_DIR is not set"
        folder = next(iter(spec.submodule_search_locations))
    library = Path(folder) / "flashmla_ops.abi3.so"
    if not library.exists():
        return f"{library} does not exist"
    torch.ops.load_library(str(library))
    return None


def cudnn_missing() -> str | None:
    """The reason why the cuDNN frontend's sparse-attention kernels cannot be imported."""
    try:
        from cudnn.deepseek_sparse_attention import DSA  # noqa: F401
    except Exception as error:
        return f"the cuDNN frontend cannot be imported: {type(error).__name__}: {str(error)[:120]}"
    return None


def composed_missing() -> str | None:
    """Why the composed path cannot run here, or None."""
    return flashmla_missing() or cudnn_missing()


def _flashmla(q: Tensor, keys: Tensor, ids: Tensor, scale: float, sink: Tensor) -> tuple[Tensor, Tensor]:
    """out and the natural-log lse without the sink (the op returns base 2)."""
    forward = torch.ops.sgl_kernel.sparse_prefill_fwd.default
    out, _, lse = forward(q, keys[:, None], ids[:, None], scale, 512, sink, None)
    return out, lse / LOG2_E


@dataclass(frozen=True)
class ComposedInputs:
    """One document in the form that these libraries take: keys side by side, window ids precomputed."""

    keys: Tensor
    window_ids: Tensor
    index_w: Tensor
    offsets: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, x: Inputs) -> ComposedInputs:
        tokens = x.q.shape[0]
        position = torch.arange(tokens, device=x.q.device)
        window = position[:, None] - torch.arange(x.window, device=x.q.device)[None]
        return cls(
            torch.cat([x.window_kv, x.compressed_kv]).contiguous(),
            torch.where(window >= 0, window, -1).int(),
            x.index_w.to(x.q.dtype),
            torch.zeros(1, dtype=torch.int32, device=x.q.device),
            ((position + 1) // x.ratio).int(),
        )

    def full_ids(self, ids: Tensor, tokens: int) -> Tensor:
        """Selected entries behind the tokens, then the window, padded to a multiple of 128."""
        full = torch.cat([torch.where(ids >= 0, ids + tokens, -1), self.window_ids], -1)
        return torch.nn.functional.pad(full, (0, -full.shape[-1] % 128), value=-1).contiguous()


def composed_pieces(x: Inputs, c: ComposedInputs) -> dict[str, Any]:
    """The calls of one step, each as a function of what came before, for timing them alone."""
    from cudnn.deepseek_sparse_attention import DSA

    tokens, heads = x.q.shape[:2]

    def scores() -> Tensor:
        operands = (x.index_q[None], x.index_k[None, :, None].contiguous(), c.index_w[None])
        return DSA.indexer_forward_wrapper(*operands, ratio=x.ratio, q_causal_offsets=c.offsets)["scores"].reshape(tokens, -1)

    def topk(score: Tensor) -> Tensor:
        return DSA.indexer_top_k_wrapper(score.contiguous(), c.lengths, x.topk)["indices"].int()

    def attend(full: Tensor) -> tuple[Tensor, Tensor]:
        return _flashmla(x.q, c.keys, full, x.scale, x.sink)

    def teacher(ids: Tensor, lse: Tensor) -> Tensor:
        z = torch.logaddexp(lse, x.sink[None])
        entries = c.keys[None, tokens:]
        return DSA.sparse_attn_score_recompute_wrapper(x.q[None], entries, z[None].contiguous(), ids[None], x.scale, qhead_per_kv_head=heads)[
            "target"
        ]

    def attend_backward(out: Tensor, lse: Tensor, full: Tensor) -> Any:
        return DSA.sparse_attention_backward_wrapper(x.q, c.keys, out, x.grad_out, lse.contiguous(), x.sink, full, softmax_scale=x.scale)

    def indexer_backward(ids: Tensor, target: Tensor, student: Tensor) -> Any:
        one = torch.ones(1, device=x.q.device)
        return DSA.indexer_backward_wrapper(
            x.index_q[None], c.index_w[None], x.index_k[None].contiguous(), target, student, ids[None].contiguous(), one
        )

    return {
        "scores": scores,
        "topk": topk,
        "attend": attend,
        "teacher": teacher,
        "attend_backward": attend_backward,
        "indexer_backward": indexer_backward,
    }


def composed_step(x: Inputs, c: ComposedInputs) -> StepResult:
    """Scores, top-k, attention, teacher, KL, attention backward, indexer backward."""
    call = composed_pieces(x, c)
    score = call["scores"]()
    ids = call["topk"](score)
    full = c.full_ids(ids, x.q.shape[0])
    out, lse = call["attend"](full)
    target = call["teacher"](ids, lse)
    chosen = torch.gather(score, 1, ids.clamp(min=0).long()).masked_fill(ids < 0, -1e30)
    student = torch.softmax(chosen, -1)[None].contiguous()
    kl = (target * (torch.log(target + 1e-10) - torch.log(student + 1e-10))).sum(-1)
    rows = (c.lengths > 0).sum()
    indexer = call["indexer_backward"](ids, target, student)
    attention = call["attend_backward"](out, lse, full)
    gradients = {"q": attention["dq"], "kv": attention["dkv"], "sink": attention["d_sink"]}
    if isinstance(indexer, dict):
        gradients |= {f"indexer/{name}": value for name, value in indexer.items() if isinstance(value, Tensor)}
    return StepResult(out, kl.sum() / rows, gradients)


def autograd_step(x: Inputs) -> StepResult:
    """The same step in plain PyTorch, every intermediate kept: what one writes first. One document."""
    names = ("q", "window_kv", "compressed_kv", "index_q", "index_k", "index_w", "sink")
    q, window_kv, compressed_kv, index_q, index_k, index_w, sink = (getattr(x, n).detach().requires_grad_() for n in names)
    tokens, entries = q.shape[0], index_k.shape[0]
    position = torch.arange(tokens, device=q.device)
    visible = torch.arange(entries, device=q.device)[None] < ((position + 1) // x.ratio)[:, None]
    score = (torch.relu(torch.einsum("thd,cd->thc", index_q, index_k)) * index_w.to(q.dtype)[..., None]).sum(1).float()
    value, ids = score.masked_fill(~visible, -math.inf).topk(min(x.topk, entries), -1)
    chosen = value > -math.inf
    window = position[:, None] - torch.arange(x.window, device=q.device)[None]
    keys = torch.cat([compressed_kv[ids], window_kv[window.clamp(min=0)]], 1)
    valid = torch.cat([chosen, window >= 0], 1)
    logits = (torch.einsum("thd,tkd->thk", q, keys).float() * x.scale).masked_fill(~valid[:, None], -math.inf)
    p = torch.exp(logits - torch.logaddexp(torch.logsumexp(logits, -1), sink)[..., None])
    out = torch.einsum("thk,tkd->thd", p.to(q.dtype), keys)
    target = p[..., : ids.shape[1]].detach().sum(1)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-30)
    some = chosen.any(-1, keepdim=True)
    log_student = torch.log_softmax(torch.where(some, value, 0), -1)
    kl = torch.where(chosen, torch.xlogy(target, target) - target * torch.where(chosen, log_student, 0), 0).sum(-1)
    kl_mean = kl.sum() / some.sum()
    leaves = (q, window_kv, compressed_kv, index_q, index_k, index_w, sink)
    gradients = torch.autograd.grad([out, kl_mean], leaves, [x.grad_out, torch.ones_like(kl_mean)])
    return StepResult(out.detach(), kl_mean.detach(), dict(zip(names, gradients)))
