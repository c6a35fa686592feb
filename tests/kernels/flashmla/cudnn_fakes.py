# SPDX-License-Identifier: Apache-2.0
"""The sparse attention backward wrapper of four versions of the cuDNN frontend, in plain PyTorch, with the arguments and habits of each.

Up to 1.29 an invalid id within the length is read (NaN here) and an empty list never returns (an error here); 1.32 masks both. `sibling` stands for
a version whose wrapper has also the defaults that moved in its sibling wrappers.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _backward(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    attn_sink: Tensor,
    topk_idxs: Tensor,
    softmax_scale: float | None,
    topk_length: Tensor | None,
    *,
    masks: bool,
    allowed: Tensor | None = None,
) -> dict[str, Tensor]:
    rows, heads, dim = q.shape
    assert dim == 512
    assert heads in (64, 128)
    assert kv.shape[1] == dim
    assert out.shape == dout.shape == q.shape
    assert lse.shape == (rows, heads)
    assert topk_idxs.dtype == torch.int32
    assert topk_idxs.shape[1] % 64 == 0
    assert lse.dtype == attn_sink.dtype == torch.float32
    assert q.dtype == kv.dtype == out.dtype == dout.dtype
    assert all(t.is_contiguous() for t in (q, kv, out, dout, lse, attn_sink, topk_idxs))
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    slots = topk_idxs.shape[1]
    length = torch.full((rows,), slots) if topk_length is None else topk_length
    if not masks and (length <= 0).any():
        raise RuntimeError("the kernel does not return from an empty list")
    inside = torch.arange(slots)[None] < length[:, None]
    valid = (topk_idxs >= 0) & (topk_idxs < kv.shape[0])
    keys = kv[topk_idxs.clamp(0, kv.shape[0] - 1).long()]
    if not masks:
        keys = torch.where((inside & ~valid)[..., None], math.nan, keys)
    read = inside & (valid if masks else True)
    if allowed is not None:
        read = read & allowed
    logits = torch.einsum("rhd,rsd->rhs", q, keys) * scale
    z = torch.logaddexp(lse, attn_sink)
    assert torch.isfinite(z).all()
    p = torch.where(read[:, None], torch.exp(logits - z[..., None]), 0)
    delta = (out * dout).sum(-1)
    ds = p * (torch.einsum("rhd,rsd->rhs", dout, keys) - delta[..., None]) * scale
    keys = torch.where(read[..., None], keys, 0)
    d_keys = torch.einsum("rhs,rhd->rsd", ds, q) + torch.einsum("rhs,rhd->rsd", p, dout)
    dkv = torch.zeros_like(kv).index_add_(0, topk_idxs.clamp(0, kv.shape[0] - 1).long().flatten(), d_keys.flatten(0, 1))
    return {"dq": torch.einsum("rhs,rsd->rhd", ds, keys), "dkv": dkv, "d_sink": -(torch.exp(attn_sink - z) * delta).sum(0)}


def v1_25(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, dq=None, dkv=None, block_tile=64, stream=None):
    assert (dq, dkv, block_tile, stream) == (None, None, 64, None)
    return _backward(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length, masks=False)


def v1_26(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, dq=None, dkv=None, block_tile=64, stream=None):
    return v1_25(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length, dq, dkv, block_tile, stream)


def v1_29(
    q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, dq=None, dkv=None, block_tile=64, deterministic=False,
    stream=None, workspace=None,
):  # fmt: skip
    assert deterministic is False, "deterministic DSA backward requires SM100"
    assert workspace is None
    return v1_25(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length, dq, dkv, block_tile, stream)


def v1_32(
    q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, dq=None, dkv=None, block_tile=64, deterministic=False,
    stream=None, workspace=None, q_cluster_mode="off",
):  # fmt: skip
    assert (dq, dkv, block_tile, stream, workspace) == (None, None, 64, None, None)
    assert deterministic is False, "deterministic DSA backward requires SM100"
    assert q_cluster_mode == "off", "adaptive_pair requires SM100"
    return _backward(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale, topk_length, masks=True)


def sibling(
    q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, deterministic=True, block_tile=128,
    q_cluster_mode="adaptive_pair", topk_indices_global=False, q_causal_offsets=None,
):  # fmt: skip
    """Every default is one that we do not want."""
    assert deterministic is False, "deterministic DSA backward requires SM100"
    assert block_tile == 64, "block_tile 128 requires SM100"
    assert q_cluster_mode == "off", "adaptive_pair requires SM100"
    allowed = None
    if not topk_indices_global:
        topk_idxs = (topk_idxs + 3) % kv.shape[0]
    if q_causal_offsets is None:  # bottom-right: the last query sees the last key
        position = torch.arange(q.shape[0])[:, None] + kv.shape[0] - q.shape[0]
        allowed = topk_idxs <= position
    return _backward(q, kv, out, dout, lse, attn_sink, topk_idxs.int(), softmax_scale, topk_length, masks=True, allowed=allowed)


VERSIONS: dict[str, Callable[..., Any]] = {"1.25": v1_25, "1.26": v1_26, "1.29": v1_29, "1.32": v1_32, "sibling": sibling}


def without(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """`function` as it behaves for a caller who does not pass `argument`: its default stands."""

    @functools.wraps(function)
    def called(**arguments: Any) -> Any:
        return function(**{name: value for name, value in arguments.items() if name != argument})

    called.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return called
