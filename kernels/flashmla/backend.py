# SPDX-License-Identifier: Apache-2.0
"""FlashMLABackend: FlashMLA's forward, selection and indexer loss of the Triton kernels, a backward of our own or cuDNN's.

Legend: R query rows, T tokens, C compressed entries, H heads, D head dim, K slots of the selection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.backend import ALL_VISIBLE, Backend, BackendUnsupported, Geometry, IndexerStats, RowOperations, Selection, Teacher
from kernels.flashmla import adapt
from kernels.flashmla.autograd import Attend, AttendAndTeach, Call
from kernels.flashmla.cudnn_backward import REMEDY, CudnnBackward, find_cudnn_backward, refuse_deterministic
from kernels.flashmla.forward import flashmla_forward
from kernels.flashmla.parts import Parts, triton_parts, with_backward
from kernels.flashmla.probe import Convention, probe
from kernels.flashmla.providers import Provider, find_provider
from kernels.flashmla.rules import OTHER_BACKENDS, SM90, ArchitectureRules, padding_cost, rules_of
from kernels.layout import PackedLayout
from kernels.unfused.checks import check_entries, check_selection, check_sink, check_tensor, compute_dtype
from kernels.unfused.select import check_indexer_inputs

BACKWARDS = ("triton", "cudnn")
_ANSWERS: dict[tuple[object, ...], Convention] = {}  # the probe asks once per process
_PROBED_BACKWARDS: set[tuple[object, ...]] = set()


class FlashMLABackend(Backend):
    """CSA, HCA and window-only layers with FlashMLA's sparse prefill as the forward. bfloat16, Hopper (Blackwell: rules only, never run).

    Args:
        backward: "triton" (ours; emits the teacher as it goes) or "cudnn" (the SM90 sparse backward of the cuDNN frontend; the teacher is a pass).
        provider, parts, capability: in place of what this machine offers.
    """

    name = "flashmla"

    def __init__(
        self,
        backward: str = "triton",
        *,
        provider: Provider | Callable[[], tuple[Provider, list[str]]] = find_provider,
        parts: Parts | Callable[[], Parts] = triton_parts,
        capability: tuple[int, int] | None = None,
    ) -> None:
        if backward not in BACKWARDS:
            raise ValueError(f"backward={backward!r} is not legal for backend 'flashmla'; legal: {', '.join(BACKWARDS)}")
        self._backward = backward
        self._provider_or_search, self._parts_or_builder = provider, parts
        self._capability = capability
        self._provider: Provider | None = None
        self._parts: Parts | None = None
        self._passed_over: list[str] = []
        self._geometry: Geometry | None = None

    def require(self, geometry: Geometry) -> None:
        """See `Backend.require`. Loads the packages and probes them: what cannot be honoured or understood is refused here, not in a step."""
        provider = self._provider_or_search if isinstance(self._provider_or_search, Provider) else None
        self._check_machine(geometry.device_type, provider)
        device = _device_of_this_process(geometry.device_type)
        rules = self._rules(device)
        padded = rules.padded_heads(geometry.heads)
        if geometry.head_dim > rules.head_dim:
            raise BackendUnsupported(f"FlashMLA takes head_dim up to {rules.head_dim}, the model has {geometry.head_dim}", OTHER_BACKENDS)
        legal = provider.dtypes if provider is not None else (torch.bfloat16,)
        if geometry.dtype not in legal:
            raise BackendUnsupported(
                f"FlashMLA computes in bfloat16, the attention of this model would run in {str(geometry.dtype).removeprefix('torch.')}",
                f"trainer.precision=bf16-mixed, or {OTHER_BACKENDS}",
            )
        parts = self._load()
        backward = parts.attention_backward
        parts.base.require(geometry)
        self._convention(rules, padded, device)
        if isinstance(backward, CudnnBackward) and geometry.needs_grad:
            refuse_deterministic()
            self._probe_backward(backward, rules, geometry, device)
        self._geometry = geometry

    def describe(self) -> dict[str, str]:
        """Composition, versions, answers of the probe and cost of the padding, for the geometry of the last `require` (default: 64 heads of 512)."""
        try:
            return self._composition()
        except BackendUnsupported as refusal:
            return {"attend": f"not available: {refusal}"}

    def _composition(self) -> dict[str, str]:
        parts, provider = self._load(), self._found()
        geometry = self._geometry or Geometry(heads=64, head_dim=512, window=128, topk=512, dtype=torch.bfloat16, device_type=provider.device_type)
        device = _device_of_this_process(geometry.device_type)
        rules = self._rules(device)
        convention = self._convention(rules, rules.padded_heads(geometry.heads), device)
        status = "" if rules.confirmed else f"; the rules of {rules.name} have never been run"
        passed = f" (passed over: {'; '.join(self._passed_over)})" if self._passed_over else ""
        teacher = "emitted by the attention backward (full_csa over selected entries), else the pair"
        base = parts.base.describe()
        return {
            "select": base["select"],
            "attend": f"FlashMLA sparse prefill on {rules.name} from {provider.description}{passed}, {convention.describe()}{status}",
            "attend backward": parts.backward_name,
            "indexer_loss": base["indexer_loss"],
            "attend_with_indexer_loss": "the pair: teacher as a pass after the forward" if parts.teaching_backward is None else f"teacher {teacher}",
            "padding": padding_cost(rules, geometry.heads, geometry.head_dim, (geometry.topk or 0) + geometry.window),
            "row operations": base.get("row operations", "PyTorch"),
        }

    def capturable(self) -> bool:
        """See `Backend.capturable`: FlashMLA's op and both backwards have been captured and replayed."""
        return True

    def row_operations(self) -> RowOperations | None:
        """See `Backend.row_operations`: those of the Triton kernels."""
        return self._load().base.row_operations()

    def select(self, index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: PackedLayout, ratio: int, topk: int) -> Tensor:
        """See `Backend.select`."""
        return self._load().base.select(index_q, index_k, index_w, layout, ratio, topk)

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
        call = self._call(q, window_kv, compressed_kv, selected, sink, layout, ratio, window, scale)
        ids = selected.to(torch.int32) if isinstance(selected, Tensor) else None
        out, lse = Attend.apply(q, window_kv, compressed_kv, ids, sink, call)
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
        """See `Backend.indexer_loss`. The full lse of the teacher is logaddexp(lse, sink); no partial lse is ever asked of FlashMLA."""
        if lse is None and teacher == "full_csa":
            with torch.no_grad():
                lse = self.attend(q, window_kv, compressed_kv, support, sink, layout, ratio, window, scale)[1]
        return self._load().base.indexer_loss(
            index_q, index_k, index_w, support, q, window_kv, compressed_kv, sink, lse, layout, ratio, window, scale, teacher, head_group
        )

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
        """See `Backend.attend_with_indexer_loss`. Our backward with full_csa over ids: kl_sum is 0 and stats holds the value after the backward."""
        parts = self._load()
        emits = teacher == "full_csa" and isinstance(selected, Tensor) and adapt.reads_entries(compressed_kv, selected) and head_group is None
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (index_q, index_k, index_w))
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (q, window_kv, compressed_kv, sink))
        if parts.teaching_backward is None or not (emits and learns and trains):
            return super().attend_with_indexer_loss(
                index_q, index_k, index_w, selected, q, window_kv, compressed_kv, sink, layout, ratio, window, scale, teacher, head_group
            )
        assert isinstance(selected, Tensor)
        check_indexer_inputs(index_q, index_k, index_w, layout, ratio)
        call = self._call(q, window_kv, compressed_kv, selected, sink, layout, ratio, window, scale)
        scores = parts.known_scores(selected, index_q, index_k, index_w) if parts.known_scores is not None else None
        value = torch.zeros((), dtype=compute_dtype(q), device=q.device)
        ids = selected.to(torch.int32)
        out, lse, kl_sum = AttendAndTeach.apply(index_q, index_k, index_w, scores, q, window_kv, compressed_kv, ids, sink, value, call)
        return out, lse.detach(), kl_sum, IndexerStats(value, (layout.visible_compressed(ratio) > 0).sum())

    def _call(
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
    ) -> Call:
        rules = self._rules(layout.device)
        provider = self._found()
        _check_operands(provider, q, window_kv, compressed_kv, selected, sink, layout, ratio, rules)
        convention = self._convention(rules, rules.padded_heads(q.shape[1]), layout.device)
        forward = partial(flashmla_forward, provider, convention, rules, layout=layout, ratio=ratio, window=window, scale=scale)
        return Call(forward, self._load(), layout, ratio, window, scale, selected is ALL_VISIBLE)

    def _check_machine(self, device_type: str, provider: Provider | None) -> None:
        wanted = "cuda" if provider is None else provider.device_type
        if wanted == "cuda" and not torch.cuda.is_available():
            why = f"PyTorch {torch.__version__} is built without CUDA" if torch.version.cuda is None else "no GPU is visible"
            raise BackendUnsupported(
                f"backend 'flashmla' needs an NVIDIA GPU (H100, H200) and a CUDA build of PyTorch: {why}",
                "a machine with a Hopper GPU, or backend=unfused, which runs anywhere",
            )
        if device_type != wanted:
            raise BackendUnsupported(
                f"backend 'flashmla' runs on {wanted} tensors, the model is on {device_type!r}",
                "trainer.accelerator=gpu, or backend=unfused, which runs anywhere",
            )

    def _rules(self, device: torch.device) -> ArchitectureRules:
        if self._capability is None:
            self._check_machine(device.type, None)
            return rules_of(torch.cuda.get_device_capability(device))
        return rules_of(self._capability)

    def _found(self) -> Provider:
        if self._provider is None:
            if isinstance(self._provider_or_search, Provider):
                self._provider = self._provider_or_search
            else:
                self._provider, self._passed_over = self._provider_or_search()
        return self._provider

    def _load(self) -> Parts:
        if self._parts is None:
            try:
                parts = self._parts_or_builder if isinstance(self._parts_or_builder, Parts) else self._parts_or_builder()
            except ModuleNotFoundError as error:
                reason = f"backend 'flashmla' takes selection, indexer loss and backward from the Triton kernels, and {error.name!r} is not installed"
                raise BackendUnsupported(reason, "pip install 'triton>=3.6', or backend=unfused, which runs anywhere") from error
            if self._backward == "cudnn" and not isinstance(self._parts_or_builder, Parts):
                backward = find_cudnn_backward()
                parts = with_backward(parts, backward, backward.description)
            self._parts = parts
        return self._parts

    def _probe_backward(self, backward: CudnnBackward, rules: ArchitectureRules, geometry: Geometry, device: torch.device) -> None:
        if rules is not SM90:
            raise BackendUnsupported(f"backend.backward=cudnn is built for SM90, this device is {rules.name}", REMEDY)
        key = (backward.function, rules.padded_heads(geometry.heads), device)
        if key not in _PROBED_BACKWARDS:
            backward.probe(rules.padded_heads(geometry.heads), device, geometry.dtype)
            _PROBED_BACKWARDS.add(key)

    def _convention(self, rules: ArchitectureRules, padded_heads: int, device: torch.device) -> Convention:
        provider = self._found()
        index = device.index if device.index is not None or device.type != "cuda" else torch.cuda.current_device()
        key = (provider, rules, padded_heads, device.type, index)
        if key not in _ANSWERS:
            _ANSWERS[key] = probe(provider, rules, padded_heads, device)
        return _ANSWERS[key]


def _device_of_this_process(device_type: str) -> torch.device:
    """Where the model will be, known before it is there: launchers tell each process its card by LOCAL_RANK."""
    local = os.environ.get("LOCAL_RANK", "")
    if device_type != "cuda" or not local.isdigit() or int(local) >= torch.cuda.device_count():
        return torch.device(device_type)
    return torch.device("cuda", int(local))


def _check_operands(
    provider: Provider,
    q: Tensor,
    window_kv: Tensor,
    compressed_kv: Tensor | None,
    selected: Selection | None,
    sink: Tensor,
    layout: PackedLayout,
    ratio: int,
    rules: ArchitectureRules,
) -> None:
    check_tensor("q", q, (layout.num_rows, None, None), layout.device)
    check_tensor("window_kv", window_kv, (layout.num_tokens, q.shape[2]), layout.device)
    if compressed_kv is not None:
        check_tensor("compressed_kv", compressed_kv, (None, q.shape[2]), layout.device)
        if selected is not None:
            check_entries("compressed_kv", compressed_kv, layout, ratio)
    check_sink(sink, q.shape[1], torch.float32, layout.device)
    check_selection("selected", selected, layout)
    if q.shape[2] > rules.head_dim:
        raise ValueError(f"q has {q.shape[2]} columns; FlashMLA takes up to {rules.head_dim}")
    if q.dtype not in provider.dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in provider.dtypes)
        raise ValueError(f"q is {q.dtype}; FlashMLA takes {names}. {OTHER_BACKENDS} takes more")
    for name, tensor in (("window_kv", window_kv), ("compressed_kv", compressed_kv)):
        if tensor is not None and tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and q is {q.dtype}; the kernels take one dtype for both")
