# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse prefill in plain PyTorch, in every convention that a version has had, and in some that none should have.

The stubs refuse the shapes that the real op refuses, so that a wrong adaptation cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels.backend import Selection
from kernels.flashmla.parts import AttentionGradients, Parts
from kernels.flashmla.providers import Provider, provider_of
from kernels.layout import PackedLayout
from kernels.unfused import UnfusedBackend
from kernels.unfused.attend import _Attend


def sparse_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    sink: Tensor | None,
    *,
    base: float = math.e,
    sink_in_lse: bool = False,
    empty: float = math.inf,
    masks: bool = True,
    leaks: bool = False,
    steps: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, maximum, lse. `leaks`: masked ids still multiply the key that they point at by 0."""
    heads, slots = q.shape[1], indices.shape[2]
    if heads not in (64, 128):
        raise RuntimeError(f"Unsupported h_q: {heads}")
    if q.shape[2] != 512 or kv.shape[1:] != (1, 512) or indices.shape[:2] != (q.shape[0], 1) or indices.dtype != torch.int32:
        raise RuntimeError(f"wrong shape: q {list(q.shape)} kv {list(kv.shape)} indices {indices.dtype} {list(indices.shape)}")
    if slots == 0 or slots % steps or not (q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()):
        raise RuntimeError(f"{slots} ids, or a tensor that is not contiguous")
    if sink is not None and (sink.dtype != torch.float32 or sink.shape != (heads,)):
        raise RuntimeError("attn_sink must be float32 [h_q]")
    ids = indices[:, 0]
    valid = (ids >= 0) & (ids < kv.shape[0]) if masks else torch.ones_like(ids, dtype=torch.bool)
    compute = torch.promote_types(q.dtype, torch.float32)
    keys = kv[ids.clamp(0, kv.shape[0] - 1).long(), 0].to(compute)
    if not leaks:
        keys = torch.where(valid[..., None], keys, 0)
    logits = (torch.einsum("rhd,rsd->rhs", q.to(compute), keys) * sm_scale).masked_fill(~valid[:, None], -math.inf)
    lse = torch.logsumexp(logits, -1)
    some = valid.any(-1)
    weights = torch.where(some[:, None, None], torch.exp(logits - torch.where(some[:, None], lse, 0)[..., None]), 0)
    out = torch.einsum("rhs,rsd->rhd", weights, keys)
    if sink is not None:
        out = out * torch.where(some[:, None], torch.sigmoid(lse - sink), 0)[..., None]
        if sink_in_lse:
            lse = torch.logaddexp(lse, sink.to(lse.dtype))
    lse = torch.where(some[:, None], lse / math.log(base), empty)
    return out.to(q.dtype), logits.amax(-1), lse


def new_api(**convention: Any) -> Callable[..., Any]:
    """The function as `flash_mla` has it since January 2026."""

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        assert d_v == 512
        assert topk_length is None
        return sparse_prefill(q, kv, indices, sm_scale, attn_sink, **convention)

    return flash_mla_sparse_fwd


def old_api(**convention: Any) -> Callable[..., Any]:
    """The function of September 2025: no sink, base-2 lse."""

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        assert d_v == 512
        return sparse_prefill(q, kv, indices, sm_scale, None, **{"base": 2.0, **convention})

    return flash_mla_sparse_fwd


def indexer_api(**convention: Any) -> Callable[..., Any]:
    """The function of the branch that can return a partial lse: four values only when asked for it."""

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, indexer_topk=0):
        out, top, lse = sparse_prefill(q, kv, indices, sm_scale, attn_sink, **convention)
        assert indexer_topk == 0, "a partial lse is never asked for"
        return out, top, lse, torch.full_like(lse, math.inf)

    return flash_mla_sparse_fwd


def stub_provider(function: Callable[..., Any], dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)) -> Provider:
    return provider_of("stub", "1.0", function, device_type="cpu", dtypes=dtypes)


def unfused_backward(
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
    """The backward of the unfused attention on the out and lse that it is given: wrong ones give wrong gradients."""
    ids = selected if isinstance(selected, Tensor) else None
    dense = selected is not None and ids is None and compressed_kv is not None
    context = SimpleNamespace(saved_tensors=(q, window_kv, compressed_kv, ids, sink, out, lse), arguments=(layout, ratio, window, scale, dense))
    dq, d_window, d_entries, _, d_sink, *_ = _Attend.backward(context, grad_out, None)
    return dq, d_window, d_entries, d_sink


def unfused_teaching(grad_out, grad_kl, index, scores, q, window_kv, compressed_kv, selected, sink, out, lse, kl_value, *shape):
    """Both gradients by the unfused backend, on the out and lse given."""
    attention = unfused_backward(grad_out, q, window_kv, compressed_kv, selected, sink, out, lse, *shape)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in index]
        kl, _ = UnfusedBackend().indexer_loss(*leaves, selected, q, window_kv, compressed_kv, sink, lse, *shape)
        gradients = torch.autograd.grad(kl, leaves, grad_kl.to(kl.dtype))
    kl_value.copy_(kl.detach())
    return *gradients, *attention


def unfused_parts(teaching: bool = True) -> Parts:
    return Parts(UnfusedBackend(), unfused_backward, "unfused", unfused_teaching if teaching else None)
