# SPDX-License-Identifier: Apache-2.0
"""TritonBackend: argument checks and choices; the work is in ops.py and training_op.py.

Legend: R query rows, T tokens, C compressed entries, H heads, D head dim, HI/DI index heads / index head dim, K slots of the selection.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.backend import ALL_VISIBLE, Backend, BackendUnsupported, Geometry, IndexerStats, RowOperations, Selection, Teacher
from kernels.layout import PackedLayout
from kernels.triton_fused import flop_formulas, ops, requirements
from kernels.triton_fused.attend_forward import implementation, reads_entries
from kernels.triton_fused.row_operations import TritonRowOperations
from kernels.triton_fused.rows import RowBounds
from kernels.triton_fused.training_op import DirectAttendAndTeach, attend_and_teach
from kernels.unfused.checks import check_entries, check_selection, check_sink, check_tensor
from kernels.unfused.select import check_indexer_inputs
from kernels.unfused.teacher import check_teacher

__all__ = ["TritonBackend", "flop_formulas"]


class TritonBackend(Backend):
    """Fused kernels for NVIDIA GPUs: tensor-core matrix products with fp32 accumulation, nothing of size [tokens, entries]."""

    name = "triton"

    def __init__(self) -> None:
        self._geometry: Geometry | None = None
        self._scores: Any = WeakTensorKeyDictionary()
        self._rows: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a process that is spawned, starts with what `require` was told and without the caches, which know tensors by identity."""
        return _restored, (self._geometry,)

    def require(self, geometry: Geometry) -> None:
        """See `Backend.require`; the requirements stand in requirements.py."""
        requirements.check_machine(geometry.device_type)
        requirements.check_geometry(geometry)
        self._geometry = geometry

    def describe(self) -> dict[str, str]:
        """Implementation of each operation, for the geometry of the last `require` if there was one."""
        version = f"Triton {triton.__version__}" + (", interpreter" if requirements.interpreted() else "")
        geometry = self._geometry or Geometry(heads=64, head_dim=512, window=128, dtype=torch.bfloat16)
        device = "cuda" if torch.cuda.is_available() and not requirements.interpreted() else "cpu"
        attention = implementation(torch.empty(0, geometry.heads, geometry.head_dim, dtype=geometry.dtype, device=device))
        rows, streams = self.row_operations(), ", ".join(map(str, TritonRowOperations.streams))
        fused = f"norms, rotation, hyper-connections of {streams} streams, pooling, router, experts' rows, SwiGLU, head with its loss"
        return {
            "select": f"chunked index scores and exact top-k, plain Triton kernels, {version}",
            "attend": f"{attention}, {version}",
            "indexer_loss": f"log-space teacher, plain Triton kernels, {version}",
            "attend_with_indexer_loss": f"teacher emitted by the attention backward (full_csa over selected entries, else the pair), {version}",
            "row operations": "PyTorch" if rows is None else f"{fused}: plain Triton kernels, {version}",
        }

    def row_operations(self) -> RowOperations | None:
        """See `Backend.row_operations`. On a GPU only: the interpreter would be no faster than PyTorch."""
        return TritonRowOperations() if self._geometry is not None and self._geometry.device_type == "cuda" else None

    def capturable(self) -> bool:
        """See `Backend.capturable`."""
        return True

    def select(self, index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: PackedLayout, ratio: int, topk: int) -> Tensor:
        """See `Backend.select`. ValueError for shapes that do not fit the layout or topk outside 0..2048.

        Where the scores will be differentiated, those of the chosen entries are kept until the ids are dropped: the loss needs them.
        """
        _check_indexer(index_q, index_k, index_w, layout, ratio)
        if not 0 <= topk <= 2048:
            raise ValueError(f"topk must be in 0..2048, got {topk}; backend=unfused takes any")
        start, visible = layout.entry_start(ratio), layout.visible_compressed(ratio)
        with_scores = _differentiated(index_q, index_k, index_w) and not torch.compiler.is_compiling()
        operands = (index_q.detach(), index_k.detach(), index_w.detach())
        choose = ops.select if ops.dispatched() else ops.select_now
        with torch.no_grad():
            ids, scores = choose(*operands, start, visible, topk, ratio, _longest(layout, ratio, index_k), layout.first_row, with_scores)
        if with_scores:
            # the tensors are kept as well: were their memory given to others, those could not be told from them
            self._scores[ids] = (scores, operands, _state(ids, *operands))
        return ids

    def _query_rows(self, visible: Tensor) -> Tensor:
        """int64 []: rows that see an entry; counted once for a layout, whose `visible` is one tensor for all layers."""
        if torch.compiler.is_compiling():
            return (visible > 0).sum()
        if visible not in self._rows:
            with torch.inference_mode(False):
                self._rows[visible] = (visible > 0).sum()
        return self._rows[visible]

    def _known_scores(self, ids: Tensor, index_q: Tensor, index_k: Tensor, index_w: Tensor) -> Tensor | None:
        """Scores that `select` kept for exactly these ids, if neither they nor the indexer's tensors have changed since."""
        if torch.compiler.is_compiling() or ids not in self._scores:
            return None
        scores, _, state = self._scores[ids]
        return scores if state == _state(ids, index_q, index_k, index_w) else None

    def attend(
        self,
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
        """See `Backend.attend`. ValueError for shapes and dtypes that do not fit together."""
        _check_attention(q, window_kv, compressed_kv, selected, sink, layout, ratio)
        reads = ops.Reads.NOTHING
        if reads_entries(compressed_kv, selected):
            reads = ops.Reads.ALL_VISIBLE if selected is ALL_VISIBLE else ops.Reads.SELECTED
        bounds = RowBounds.of(layout, ratio, window, reads != ops.Reads.NOTHING)
        ids = selected.to(torch.int32) if isinstance(selected, Tensor) else None
        attend = ops.attend if ops.dispatched() else ops.DirectAttend.apply
        out, lse = attend(
            q,
            window_kv,
            compressed_kv,
            ids,
            sink,
            bounds.window_start,
            bounds.entry_start,
            bounds.visible,
            bounds.first_row,
            window,
            scale,
            int(reads),
        )
        return out, lse.detach()

    def indexer_loss(
        self,
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
        """See `Backend.indexer_loss`. ValueError for shapes that do not fit, BackendUnsupported for a head_group."""
        _check_loss(index_q, index_k, index_w, support, q, window_kv, compressed_kv, sink, layout, ratio, teacher, head_group)
        q, window_kv, compressed_kv, sink = (t.detach() for t in (q, window_kv, compressed_kv, sink))
        if lse is not None:
            check_tensor("lse", lse, (layout.num_rows, q.shape[1]), layout.device)
        elif teacher == "full_csa":
            with torch.no_grad():
                lse = self.attend(q, window_kv, compressed_kv, support, sink, layout, ratio, window, scale)[1]
        known = lse.detach() if lse is not None and teacher == "full_csa" else None
        start, visible = layout.entry_start(ratio), layout.visible_compressed(ratio)
        rows = self._query_rows(visible)
        if isinstance(support, Tensor):
            scores = self._known_scores(support, index_q, index_k, index_w)
            kl_sum, _ = ops.sparse_indexer_loss(
                index_q, index_k, index_w, support.to(torch.int32), scores, q, compressed_kv, sink, known, start, visible, scale
            )
            return kl_sum, rows
        with torch.no_grad():
            if known is None:
                # over the entries alone: an attention without window
                normaliser = self.attend(q, window_kv, compressed_kv, ALL_VISIBLE, sink, layout, ratio, 0, scale)[1]
            else:
                normaliser = torch.logaddexp(known.float(), sink.float())
        with_grad = _differentiated(index_q, index_k, index_w)
        longest = _longest(layout, ratio, index_k)
        operands = (index_q, index_k, index_w, q, compressed_kv, normaliser, start, visible, scale, ratio, longest, layout.first_row, with_grad)
        return ops.dense_indexer_loss(*operands)[0], rows

    def attend_with_indexer_loss(
        self,
        index_q: Tensor,
        index_k: Tensor,
        index_w: Tensor,
        selected: Selection,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        sink: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
        teacher: Teacher = "full_csa",
        head_group: object | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, IndexerStats]:
        """See `Backend.attend_with_indexer_loss`. One function for full_csa over ids where both parts will be differentiated: kl_sum is 0 and
        stats holds the value after the backward. Anything else takes the pair, with the value in both; so does torch.compile, whose graphs cannot
        return a tensor that their backward fills."""
        emits = teacher == "full_csa" and isinstance(selected, Tensor) and reads_entries(compressed_kv, selected)
        differentiated = _differentiated(index_q, index_k, index_w) and _differentiated(q, window_kv, compressed_kv, sink)
        if not (emits and differentiated) or torch.compiler.is_compiling():
            return super().attend_with_indexer_loss(
                index_q, index_k, index_w, selected, q, window_kv, compressed_kv, sink, layout, ratio, window, scale, teacher, head_group
            )
        assert isinstance(selected, Tensor)
        _check_loss(index_q, index_k, index_w, selected, q, window_kv, compressed_kv, sink, layout, ratio, teacher, head_group)
        bounds = RowBounds.of(layout, ratio, window, True)
        value = torch.zeros((), dtype=torch.float32, device=q.device)
        scores = self._known_scores(selected, index_q, index_k, index_w)
        tensors = (index_q, index_k, index_w, selected.to(torch.int32), scores, q, window_kv, compressed_kv, sink)
        function = attend_and_teach if ops.dispatched() else DirectAttendAndTeach.apply
        out, lse, kl_sum = function(*tensors, bounds.window_start, bounds.entry_start, bounds.visible, value, bounds.first_row, window, scale)
        return out, lse.detach(), kl_sum, IndexerStats(value, self._query_rows(bounds.visible))


def _restored(geometry: Geometry | None) -> TritonBackend:
    backend = TritonBackend()
    backend._geometry = geometry
    return backend


def _longest(layout: PackedLayout, ratio: int, index_k: Tensor) -> int:
    """Host bound on the entries that a row sees. While compiling, one that does not depend on the documents, or every batch would recompile."""
    return index_k.shape[0] if torch.compiler.is_compiling() else layout.longest_document() // ratio


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _state(*tensors: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from another living one, and from itself after a change in place. One made under inference_mode counts no changes."""
    return tuple((t.data_ptr(), -1 if t.is_inference() else t._version, t.dtype, t.shape, t.stride()) for t in tensors)


def _same_dtype(first: str, a: Tensor, **others: Tensor | None) -> None:
    if a.dtype not in requirements.DTYPES:
        raise ValueError(f"{first} is {a.dtype}; backend 'triton' takes {', '.join(map(str, requirements.DTYPES))}; backend=unfused takes any")
    for name, b in others.items():
        if b is not None and b.dtype != a.dtype:
            raise ValueError(f"{name} is {b.dtype} and {first} is {a.dtype}; the kernels take one dtype for both")


def _check_indexer(index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: PackedLayout, ratio: int) -> None:
    check_indexer_inputs(index_q, index_k, index_w, layout, ratio)
    _same_dtype("index_q", index_q, index_k=index_k)


def _check_attention(
    q: Tensor, window_kv: Tensor, compressed_kv: Tensor | None, selected: Selection | None, sink: Tensor, layout: PackedLayout, ratio: int
) -> None:
    check_tensor("q", q, (layout.num_rows, None, None), layout.device)
    check_tensor("window_kv", window_kv, (layout.num_tokens, q.shape[2]), layout.device)
    if compressed_kv is not None:
        check_tensor("compressed_kv", compressed_kv, (None, q.shape[2]), layout.device)
        if selected is not None:
            check_entries("compressed_kv", compressed_kv, layout, ratio)
    check_sink(sink, q.shape[1], torch.float32, layout.device)
    check_selection("selected", selected, layout)
    _same_dtype("q", q, window_kv=window_kv, compressed_kv=compressed_kv)


def _check_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_w: Tensor,
    support: Selection,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor,
    sink: Tensor,
    layout: PackedLayout,
    ratio: int,
    teacher: str,
    head_group: object | None,
) -> None:
    if head_group is not None:
        raise BackendUnsupported("the teacher's sum over sharded heads is not built (head_group is set)", "head_group=None: all heads on every rank")
    check_teacher(teacher)
    _check_indexer(index_q, index_k, index_w, layout, ratio)
    _check_attention(q, window_kv, compressed_kv, support, sink, layout, ratio)
