# SPDX-License-Identifier: Apache-2.0
"""Attention over sink, window and compressed entries in one softmax, keys equal to values.

Forward and backward walk over chunks of query rows; the backward recomputes the probabilities from the saved lse, so that nothing of size
[rows, keys] outlives its chunk. Legend: R rows of a chunk, H heads, D head dim, K keys of a source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from kernels.backend import AllVisible, Selection
from kernels.layout import PackedLayout
from kernels.unfused.checks import check_entries, check_selection, check_sink, check_tensor, compute_dtype, full_precision
from kernels.unfused.keys import KeyChunk, KeySource, WindowKeys, entry_keys, row_chunks


def attend(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Selection | None,
    sink: Tensor,
    layout: PackedLayout,
    ratio: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `Backend.attend`. Saves its inputs, out and lse for the backward. Raises ValueError for shapes that do not fit the layout."""
    heads, dim, device = q.shape[1], q.shape[2], layout.device
    dtype = compute_dtype(q, window_kv, compressed_kv)
    check_tensor("q", q, (layout.num_rows, None, None), device)
    check_tensor("window_kv", window_kv, (layout.num_tokens, dim), device)
    check_sink(sink, heads, dtype, device)
    check_selection("selected", selected, layout)
    if window < 0:
        raise ValueError(f"window must be >= 0, got {window}")
    if compressed_kv is None:
        selected = None
    else:
        check_tensor("compressed_kv", compressed_kv, (None, dim), device)
        if selected is not None:
            check_entries("compressed_kv", compressed_kv, layout, ratio)
    ids = selected if isinstance(selected, Tensor) else None
    dense = isinstance(selected, AllVisible)
    out, lse = _Attend.apply(q, window_kv, compressed_kv, ids, sink, layout, ratio, window, scale, dense)
    return out, lse


def key_sources(
    window_kv: Tensor, compressed_kv: Tensor | None, selected: Selection | None, layout: PackedLayout, ratio: int, window: int, dtype: torch.dtype
) -> list[KeySource | None]:
    """Window source and compressed source in the compute dtype; None where a row can have no key of that kind."""
    tokens = WindowKeys(window_kv.to(dtype), layout, window) if window > 0 else None
    if compressed_kv is None or selected is None or compressed_kv.shape[0] == 0 or (isinstance(selected, Tensor) and selected.shape[1] == 0):
        return [tokens, None]
    return [tokens, entry_keys(compressed_kv.to(dtype), selected, layout, ratio)]


def biased_logits(keys: KeyChunk, scaled_q: Tensor) -> Tensor:
    """[R, H, K]: logits, -inf where the row may not read the key."""
    return keys.dot(scaled_q).add_(keys.bias[:, None, :])


def softmax_parts(logits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Replaces each [R, H, K] by exp(logit - maximum over all) in place; returns their sum [R, H] and the lse [R, H] (-inf without a key)."""
    top = torch.stack([part.amax(-1) for part in logits]).amax(0)
    top = torch.where(top == -torch.inf, 0, top)
    total = torch.stack([part.sub_(top[..., None]).exp_().sum(-1) for part in logits]).sum(0)
    return total, top + total.log()


def add_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """log(exp(lse) + exp(sink)) for lse [R, H], sink [H], infinities included. (torch.logaddexp does the same without vector instructions.)"""
    return torch.where(lse == -torch.inf, sink, lse - logsigmoid(lse - sink))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor | None,
        ids: Tensor | None,
        sink: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
        dense: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q, window_kv, compressed_kv)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
        with full_precision(q.device):
            selected = AllVisible.ALL_VISIBLE if dense else ids
            sources = [s for s in key_sources(window_kv, compressed_kv, selected, layout, ratio, window, dtype) if s is not None]
            for start, stop in row_chunks(layout, [(source, q.shape[1]) for source in sources]):
                chunks = [c for c in (s.chunk(start, stop) for s in sources) if c.bias.shape[1] > 0]
                if not chunks:
                    continue
                scaled_q = q[start:stop].to(dtype) * scale
                parts = [biased_logits(chunk, scaled_q) for chunk in chunks]
                total, chunk_lse = softmax_parts(parts)
                # the share that the sink leaves to the keys; of no key at all it would be 0 / 0
                share = torch.where(chunk_lse == -torch.inf, 0, torch.sigmoid(chunk_lse - sink.to(dtype)) / total)
                mixed = torch.stack([chunk.mix(part) for chunk, part in zip(chunks, parts, strict=True)]).sum(0)
                out[start:stop] = torch.where(share[..., None] == 0, 0, mixed * share[..., None])
                lse[start:stop] = chunk_lse
        ctx.save_for_backward(q, window_kv, compressed_kv, ids, sink, out, lse)
        ctx.arguments = (layout, ratio, window, scale, dense)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        q, window_kv, compressed_kv, ids, sink, out, lse = ctx.saved_tensors
        layout, ratio, window, scale, dense = ctx.arguments
        dtype, heads = lse.dtype, q.shape[1]
        grad_q, grad_sink = torch.zeros_like(q), torch.zeros(heads, dtype=dtype, device=q.device)
        with full_precision(q.device):
            selected = AllVisible.ALL_VISIBLE if dense else ids
            all_sources = key_sources(window_kv, compressed_kv, selected, layout, ratio, window, dtype)
            sources = [s for s in all_sources if s is not None]
            grads = [s.new_grad() for s in sources]
            for start, stop in row_chunks(layout, [(source, 3 * heads) for source in sources]):
                chunk_lse = lse[start:stop]
                filled = (chunk_lse != -torch.inf)[..., None]
                total = torch.where(filled[..., 0], add_sink(chunk_lse, sink.to(dtype)), 0)[..., None]
                # a row without a key gives nothing, whatever stands in its query and its incoming gradient
                scaled_q = torch.where(filled, q[start:stop].to(dtype) * scale, 0)
                grad = torch.where(filled, grad_out[start:stop].to(dtype), 0)
                delta = (grad * out[start:stop].to(dtype)).sum(-1, keepdim=True)
                sink_share = torch.where(filled, torch.sigmoid(sink.to(dtype)[:, None] - chunk_lse[..., None]), 0)
                grad_sink -= (sink_share * delta).sum((0, 2))
                q_and_grad = torch.cat([scaled_q, grad], 1)
                chunk_grad_q = torch.zeros_like(scaled_q)
                for source, key_grad in zip(sources, grads, strict=True):
                    keys = source.chunk(start, stop)
                    both = keys.dot(q_and_grad)
                    upper, lower = both[:, :heads], both[:, heads:]  # logits and d p, then d logits and p: each beside what it multiplies
                    p = (upper + keys.bias[:, None, :]).sub_(total).exp_()
                    upper.copy_(lower.sub_(delta).mul_(p))
                    lower.copy_(p)
                    chunk_grad_q += keys.mix(upper)
                    keys.add_outer(key_grad, both, q_and_grad)
                grad_q[start:stop] = chunk_grad_q * scale
            done = iter(source.finish(grad) for source, grad in zip(sources, grads, strict=True))
            grad_window, grad_compressed = (next(done) if source is not None else None for source in all_sources)
        grad_window = torch.zeros_like(window_kv) if grad_window is None else grad_window.to(window_kv.dtype)
        if compressed_kv is not None:
            grad_compressed = torch.zeros_like(compressed_kv) if grad_compressed is None else grad_compressed.to(compressed_kv.dtype)
        return grad_q, grad_window, grad_compressed, None, grad_sink.to(sink.dtype), None, None, None, None, None
