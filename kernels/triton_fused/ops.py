# SPDX-License-Identifier: Apache-2.0
"""The kernels as operators of PyTorch, so that torch.compile, FLOP counters and autograd see them: plain tensors in, plain tensors out.

A layout cannot pass an operator; its per-row bounds do: `window_start`, `entry_start`, `visible`, int32 [R].
`reads` says which entries a row attends to: one of the values of Reads.

Legend: R query rows, T tokens, C compressed entries, H heads, D head dim, HI/DI index heads / index head dim, K slots of the selection.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused.attend_backward import attend_backward_rows
from kernels.triton_fused.attend_forward import attend_forward_rows
from kernels.triton_fused.indexer_dense import dense_loss
from kernels.triton_fused.indexer_sparse import sparse_loss
from kernels.triton_fused.rows import RowBounds
from kernels.triton_fused.selection import select_entries
from kernels.triton_fused.teacher import sparse_teacher

NAMESPACE = "csa_triton"


class Reads(enum.IntEnum):
    """Which compressed entries a row attends to."""

    NOTHING = 0
    SELECTED = 1
    ALL_VISIBLE = 2


def dispatched() -> bool:
    """Whether somebody looks at operators: a compiler, or a dispatch mode such as a FLOP counter. Nobody else pays for their dispatch."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


_HERE = contextlib.nullcontext()


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launches go to the current device, which need not be the one that holds the tensors. Where it is, nothing is switched: a step launches
    hundreds of kernels."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


def select_now(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    topk: int,
    ratio: int,
    longest: int,
    first_token: int,
    with_scores: bool,
) -> tuple[Tensor, Tensor]:
    """int32 [R, K], and the scores fp32 [R, K] (empty without `with_scores`); see `selection.select_entries`."""
    with on_device_of(index_q):
        index_q, index_k, index_w = index_q.contiguous(), index_k.contiguous(), index_w.contiguous()
        ids, scores = select_entries(index_q, index_k, index_w, entry_start, visible, topk, ratio, longest, first_token, with_scores)
        return ids, torch.empty(0, device=ids.device) if scores is None else scores


select = torch.library.custom_op(f"{NAMESPACE}::select", select_now, mutates_args=())


@select.register_fake
def _(index_q, index_k, index_w, entry_start, visible, topk, ratio, longest, first_token, with_scores):
    shape = (index_q.shape[0], topk)
    return index_q.new_empty(shape, dtype=torch.int32), index_q.new_empty(shape if with_scores else (0,), dtype=torch.float32)


def _entries(compressed_kv: Tensor | None, selected: Tensor | None, reads: int) -> tuple[Tensor | None, Tensor | None]:
    """What the attention kernels take: no entries, entries with ids, or entries without ids for all visible ones."""
    if reads == Reads.NOTHING:
        return None, None
    return compressed_kv, selected if reads == Reads.SELECTED else None


def _attend(
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    window_start: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    first_row: int,
    window: int,
    scale: float,
    reads: int,
) -> tuple[Tensor, Tensor]:
    """out [R, H, D], lse fp32 [R, H]; see `attend_forward.attend_forward_rows`."""
    bounds = RowBounds(window_start, entry_start, visible, first_row, window)
    with on_device_of(q):
        return attend_forward_rows(q, window_kv, *_entries(compressed_kv, selected, reads), sink, bounds, scale)


attend = torch.library.custom_op(f"{NAMESPACE}::attend", _attend, mutates_args=())


@attend.register_fake
def _(q, window_kv, compressed_kv, selected, sink, window_start, entry_start, visible, first_row, window, scale, reads):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


def _attention_gradients(
    grad_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: RowBounds,
    scale: float,
    reads: int,
    emit_teacher: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, d_window_kv, d_compressed_kv (empty without one), d_sink, teacher sums; no two of them share memory."""
    entries, ids = _entries(compressed_kv, selected, reads)
    deterministic = torch.are_deterministic_algorithms_enabled()
    dq, d_window, d_entries, d_sink, teacher = attend_backward_rows(
        grad_out, q, window_kv, entries, ids, sink, out, lse, bounds, scale, emit_teacher=emit_teacher, deterministic=deterministic
    )
    if d_entries is None:
        d_entries = torch.zeros_like(compressed_kv) if compressed_kv is not None else q.new_empty(0)
    elif d_entries.untyped_storage().data_ptr() == d_window.untyped_storage().data_ptr():
        d_entries = d_entries.clone()
    return dq, d_window.contiguous(), d_entries.contiguous(), d_sink, teacher


def _attend_backward(
    grad_out: Tensor,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    out: Tensor,
    lse: Tensor,
    window_start: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    first_row: int,
    window: int,
    scale: float,
    reads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, d_window_kv, d_compressed_kv (empty without compressed_kv), d_sink fp32."""
    bounds = RowBounds(window_start, entry_start, visible, first_row, window)
    with on_device_of(q):
        return _attention_gradients(grad_out, q, window_kv, compressed_kv, selected, sink, out, lse, bounds, scale, reads, False)[:4]


def _fake_attention_gradients(q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, sink: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, window_kv)]
    entries = q.new_empty(0) if compressed_kv is None else torch.empty_like(compressed_kv, memory_format=torch.contiguous_format)
    return like[0], like[1], entries, torch.empty_like(sink, dtype=torch.float32)


attend_backward = torch.library.custom_op(f"{NAMESPACE}::attend_backward", _attend_backward, mutates_args=())


@attend_backward.register_fake
def _(grad_out, q, window_kv, compressed_kv, selected, sink, *rest):
    return _fake_attention_gradients(q, window_kv, compressed_kv, sink)


def _attend_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output, *inputs[5:8])
    ctx.constants = inputs[8:]


def _attend_gradients(function: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    q, window_kv, compressed_kv, selected, sink, *rest = ctx.saved_tensors
    dq, d_window, d_entries, d_sink = function(grad_out, q, window_kv, compressed_kv, selected, sink, *rest, *ctx.constants)
    return dq, d_window, None if compressed_kv is None else d_entries, None, d_sink, *(None,) * 7


def _attend_autograd(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    return _attend_gradients(attend_backward, ctx, grad_out)


attend.register_autograd(_attend_autograd, setup_context=_attend_context)


class DirectAttend(torch.autograd.Function):
    """`attend` without the operators' dispatch; see `dispatched`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _attend(*inputs)
        _attend_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        return _attend_gradients(_attend_backward, ctx, grad_out)


@torch.library.custom_op(f"{NAMESPACE}::sparse_indexer_loss", mutates_args=())
def sparse_indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    support: Tensor,
    scores: Tensor | None,
    q: Tensor,
    compressed_kv: Tensor,
    sink: Tensor,
    lse: Tensor | None,
    entry_start: Tensor,
    visible: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """kl_sum fp32 [] and the teacher fp32 [R, K]. `lse` None means the compressed_only teacher; `scores`: those of the support where known."""
    with on_device_of(q):
        index_q, index_k, index_w, support, q, compressed_kv = (t.contiguous() for t in (index_q, index_k, index_w, support, q, compressed_kv))
        known = None if lse is None else lse.float().contiguous()
        teacher = sparse_teacher(q, compressed_kv, support, sink.float().contiguous(), known, entry_start, visible, scale)
        kl, _ = sparse_loss(index_q, index_k, index_w, support, teacher, entry_start, visible, scores=scores)
        return kl.sum(), teacher


@sparse_indexer_loss.register_fake
def _(index_q, index_k, index_w, support, scores, q, *rest):
    return q.new_empty((), dtype=torch.float32), q.new_empty(support.shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::sparse_indexer_gradient", mutates_args=())
def sparse_indexer_gradient(
    grad_kl: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    support: Tensor,
    scores: Tensor | None,
    teacher: Tensor,
    entry_start: Tensor,
    visible: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """d index_q, d index_k, d index_w of grad_kl * kl_sum; what is not known of the scores is recomputed."""
    with on_device_of(index_q):
        index_q, index_k, index_w, support = (t.contiguous() for t in (index_q, index_k, index_w, support))
        deterministic = torch.are_deterministic_algorithms_enabled()
        _, gradients = sparse_loss(
            index_q, index_k, index_w, support, teacher.contiguous(), entry_start, visible, grad_kl.float(), deterministic, scores=scores
        )
        assert gradients is not None
        return gradients.index_q, gradients.index_k, gradients.index_w


@sparse_indexer_gradient.register_fake
def _(grad_kl, index_q, index_k, index_w, *rest):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (index_q, index_k, index_w))


def _sparse_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], output[1], inputs[9], inputs[10])


def _sparse_autograd(ctx: Any, grad_kl: Tensor, grad_teacher: Tensor) -> tuple[Any, ...]:
    return *sparse_indexer_gradient(grad_kl, *ctx.saved_tensors), *(None,) * 9


sparse_indexer_loss.register_autograd(_sparse_autograd, setup_context=_sparse_context)


@torch.library.custom_op(f"{NAMESPACE}::dense_indexer_loss", mutates_args=())
def dense_indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    q: Tensor,
    compressed_kv: Tensor,
    normaliser: Tensor,
    entry_start: Tensor,
    visible: Tensor,
    scale: float,
    ratio: int,
    longest: int,
    first_token: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """kl_sum fp32 [] and its gradients to index_q, index_k, index_w (empty without `with_grad`).

    The gradients come with the value, since the teacher over all entries costs more than everything else here; they take the place of index_q
    in what is kept for the backward.
    """
    with on_device_of(q):
        index_q, index_k, index_w, q, compressed_kv = (t.contiguous() for t in (index_q, index_k, index_w, q, compressed_kv))
        kl, gradients = dense_loss(
            index_q, index_k, index_w, q, compressed_kv, normaliser.contiguous(), entry_start, visible, scale, ratio, longest, first_token, with_grad
        )
        if gradients is None:
            return kl.sum(), index_q.new_empty(0), index_k.new_empty(0), index_w.new_empty(0)
        return kl.sum(), gradients.index_q, gradients.index_k, gradients.index_w


@dense_indexer_loss.register_fake
def _(index_q, index_k, index_w, q, compressed_kv, normaliser, entry_start, visible, scale, ratio, longest, first_token, with_grad):
    shapes = [t.shape if with_grad else (0,) for t in (index_q, index_k, index_w)]
    gradients = [t.new_empty(shape) for t, shape in zip((index_q, index_k, index_w), shapes, strict=True)]
    return q.new_empty((), dtype=torch.float32), *gradients


def _dense_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])


def _dense_autograd(ctx: Any, grad_kl: Tensor, *grad_gradients: Tensor) -> tuple[Any, ...]:
    # in fp32: a tensor without dimensions would take the dtype of the other one first
    return *((grad_kl * g.float()).to(g.dtype) for g in ctx.saved_tensors), *(None,) * 10


dense_indexer_loss.register_autograd(_dense_autograd, setup_context=_dense_context)
