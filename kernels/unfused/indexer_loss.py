# SPDX-License-Identifier: Apache-2.0
"""KL from the teacher to the indexer, as one function with a backward of its own.

The forward keeps three statistics per row and throws every [rows, keys] tensor away with its chunk; the backward recomputes them.
Legend: R rows of a chunk, H heads, HI index heads, K entries of the support.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.backend import AllVisible, BackendUnsupported, Selection, Teacher
from kernels.layout import PackedLayout
from kernels.unfused.attend import add_sink, biased_logits, key_sources, softmax_parts
from kernels.unfused.checks import check_entries, check_selection, check_sink, check_tensor, compute_dtype, full_precision
from kernels.unfused.keys import entry_keys, row_chunks
from kernels.unfused.select import check_indexer_inputs, index_scores
from kernels.unfused.teacher import check_teacher, log_head_sum, relative_normaliser


def indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    support: Selection,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor,
    sink: Tensor,
    lse: Tensor | None,
    layout: PackedLayout,
    ratio: int,
    window: int,
    scale: float,
    teacher: Teacher = "full_csa",
    head_group: object | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Backend.indexer_loss`. Raises ValueError for shapes that do not fit, BackendUnsupported for a head_group."""
    if head_group is not None:
        raise BackendUnsupported("the teacher's sum over sharded heads is not built (head_group is set)", "head_group=None: all heads on every rank")
    check_teacher(teacher)
    check_indexer_inputs(index_q, index_k, index_w, layout, ratio)
    heads, dim, device = q.shape[1], q.shape[2], layout.device
    dtype = compute_dtype(index_q, index_k, index_w, q, window_kv, compressed_kv)
    check_tensor("q", q, (layout.num_rows, None, None), device)
    check_tensor("window_kv", window_kv, (layout.num_tokens, dim), device)
    check_tensor("compressed_kv", compressed_kv, (None, dim), device)
    check_entries("compressed_kv", compressed_kv, layout, ratio)
    check_sink(sink, heads, dtype, device)
    check_selection("support", support, layout)
    if lse is not None:
        check_tensor("lse", lse, (layout.num_rows, heads), device)
    rows = (layout.visible_compressed(ratio) > 0).sum()
    ids = support if isinstance(support, Tensor) else None
    detached = [t.detach() for t in (q, window_kv, compressed_kv, sink)]
    known = None if lse is None else lse.detach()
    kl_sum = _IndexerLoss.apply(index_q, index_k, index_w, ids, *detached, known, layout, ratio, window, scale, teacher)
    return kl_sum, rows


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index_q: Tensor,
        index_k: Tensor,
        index_w: Tensor,
        ids: Tensor | None,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        sink: Tensor,
        lse: Tensor | None,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
        teacher: Teacher,
    ) -> Tensor:
        dtype = compute_dtype(index_q, index_k, index_w, q, window_kv, compressed_kv)
        kl_sum = torch.zeros((), dtype=dtype, device=q.device)
        # per row: relative Z of each head, log normaliser of the teacher, log normaliser of the student
        head_z = torch.zeros(q.shape[:2], dtype=dtype, device=q.device)
        norms = torch.zeros((q.shape[0], 2), dtype=dtype, device=q.device)
        ctx.arguments = (layout, ratio, scale)
        ctx.save_for_backward(index_q, index_k, index_w, ids, q, compressed_kv, head_z, norms)
        if _is_empty(ids, index_k, compressed_kv):
            return kl_sum
        support: Selection = AllVisible.ALL_VISIBLE if ids is None else ids
        recompute = teacher == "full_csa" and lse is None
        with full_precision(q.device):
            tokens, entries = key_sources(window_kv, compressed_kv, support, layout, ratio, window if recompute else 0, dtype)
            index_entries = entry_keys(index_k.to(dtype), support, layout, ratio)
            assert entries is not None
            use = [(entries, 2 * q.shape[1]), (index_entries, index_q.shape[1]), *([(tokens, q.shape[1])] if tokens is not None else [])]
            for start, stop in row_chunks(layout, use):
                rows = slice(start, stop)
                keys, index_keys = entries.chunk(start, stop), index_entries.chunk(start, stop)
                if keys.bias.shape[1] == 0:
                    continue
                scaled_q = q[rows].to(dtype) * scale
                logits = biased_logits(keys, scaled_q)
                if teacher == "compressed_only":
                    z = torch.logsumexp(logits, -1)
                elif lse is not None:
                    z = add_sink(lse[rows].to(dtype), sink.to(dtype))
                else:
                    parts = [logits.clone()] + ([biased_logits(tokens.chunk(start, stop), scaled_q)] if tokens is not None else [])
                    z = add_sink(softmax_parts(parts)[1], sink.to(dtype))
                head_z[rows] = relative_normaliser(z)
                log_t, teacher_norm = log_head_sum(logits, head_z[rows])
                log_t -= teacher_norm[:, None]
                scores = index_scores(index_keys, index_q[rows].to(dtype), index_w[rows].to(dtype))
                student_norm = torch.logsumexp(scores + index_keys.bias, -1)
                student_norm = torch.where(student_norm == -torch.inf, 0, student_norm)
                norms[rows, 0], norms[rows, 1] = teacher_norm, student_norm
                t = log_t.exp()
                # the scores of invalid slots are finite, so 0 * (score) stays 0; only log 0 needs care
                kl_sum += (torch.where(t == 0, 0, t * log_t) - t * (scores - student_norm[:, None])).sum()
        return kl_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        index_q, index_k, index_w, ids, q, compressed_kv, head_z, norms = ctx.saved_tensors
        layout, ratio, scale = ctx.arguments
        dtype = head_z.dtype
        grad_q, grad_k, grad_w = torch.zeros_like(index_q), torch.zeros_like(index_k), torch.zeros_like(index_w)
        if not _is_empty(ids, index_k, compressed_kv):
            support: Selection = AllVisible.ALL_VISIBLE if ids is None else ids
            with full_precision(q.device):
                entries = entry_keys(compressed_kv.to(dtype), support, layout, ratio)
                index_entries = entry_keys(index_k.to(dtype), support, layout, ratio)
                key_grad = index_entries.new_grad()
                for start, stop in row_chunks(layout, [(entries, 2 * q.shape[1]), (index_entries, 2 * index_q.shape[1])]):
                    rows = slice(start, stop)
                    keys, index_keys = entries.chunk(start, stop), index_entries.chunk(start, stop)
                    if keys.bias.shape[1] == 0:
                        continue
                    logits = biased_logits(keys, q[rows].to(dtype) * scale)
                    t = torch.exp(torch.logsumexp(logits.sub_(head_z[rows, :, None]), 1) - norms[rows, 0, None])
                    chunk_q, chunk_w = index_q[rows].to(dtype), index_w[rows].to(dtype)
                    active = index_keys.dot(chunk_q).relu_()
                    scores = torch.bmm(chunk_w[:, None, :], active)[:, 0]
                    d_score = (torch.exp(scores + index_keys.bias - norms[rows, 1, None]) - t) * grad
                    grad_w[rows] = torch.bmm(active, d_score[..., None])[..., 0]
                    d_dot = (active > 0) * chunk_w[..., None] * d_score[:, None, :]
                    grad_q[rows] = index_keys.mix(d_dot)
                    index_keys.add_outer(key_grad, d_dot, chunk_q)
                grad_k = index_entries.finish(key_grad).to(index_k.dtype)
        return grad_q, grad_k, grad_w, *[None] * 11


def _is_empty(ids: Tensor | None, index_k: Tensor, compressed_kv: Tensor) -> bool:
    return index_k.shape[0] == 0 or compressed_kv.shape[0] == 0 or (ids is not None and ids.shape[1] == 0)
