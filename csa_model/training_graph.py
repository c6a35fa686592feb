# SPDX-License-Identifier: Apache-2.0
"""Forward, losses and backward of one micro-batch as a CUDA graph: the host launches it as one thing, where it would launch thousands of kernels.

A graph repeats its kernels with the same shapes and addresses. So the row is copied into tensors that stay, its documents reach the device only
(`StaticLayout`), and the divisors of the losses are read from the device. Clipping and the optimizer's update are graphs of their own beside it;
logging, validation and diagnostics stay outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from csa_model.config import ExperimentConfig
from csa_model.data.batch import IGNORED, Divisors, PackedBatch
from csa_model.losses import LossTerms
from csa_model.moe import RouterRecord, grouped_gemm_takes
from kernels import Backend, BackendUnsupported, StaticLayout
from kernels.static_layout import pad_documents

T = TypeVar("T")
PLAIN_STEPS = 2  # before the capture: kernels are compiled and libraries make their handles, neither of which a capture allows


@dataclass(frozen=True)
class MicroStep:
    """What one forward and backward leaves: detached losses, router loads, and the gradient of each parameter (None: it took no part)."""

    terms: LossTerms
    router: list[RouterRecord]
    gradients: list[Tensor | None]


class CaptureFailed(RuntimeError):
    """A training step could not be captured; the message is that of the cause."""


Compute = Callable[[PackedBatch, Divisors], tuple[LossTerms, list[RouterRecord]]]


class Prepared(Protocol):
    """A part of the optimizer step on tensors that stay where they are."""

    def load(self) -> None:
        """Bring what changes from step to step to the device."""

    def run(self) -> Any:
        """Launch kernels, the same ones every time, and wait for nothing."""


@dataclass
class _Beside:
    """A prepared part, and its graph and result once it has been captured."""

    key: Hashable
    prepared: Prepared
    captured: tuple[torch.cuda.CUDAGraph, Any] | None = None
    refused: bool = False


class _Room:
    """The tensors that a graph reads: one row, its documents, its divisors."""

    def __init__(self, batch: PackedBatch, documents: int, longest: int) -> None:
        device, ignored = batch.tokens.device, torch.full_like(batch.targets, IGNORED)
        self.layout = StaticLayout(batch.layout.num_tokens, documents, longest, device)
        self.batch = PackedBatch(torch.zeros_like(batch.tokens), ignored, ignored.clone(), self.layout, batch.step, 0)
        self.ratios = tuple(batch.step.query_rows)
        self.divisors = torch.ones(3 + len(self.ratios), dtype=torch.float32, device=device)

    def load(self, batch: PackedBatch) -> None:
        """Copy a row into the room; nothing waits for the device."""
        for name in ("tokens", "targets", "mtp_targets"):
            getattr(self.batch, name).copy_(getattr(batch, name), non_blocking=True)
        self.layout.load(batch.layout)
        counts = batch.step.divisors()
        numbers = [counts.tokens, counts.mtp_tokens, counts.documents, *(counts.query_rows[ratio] for ratio in self.ratios)]
        values = torch.tensor(numbers, dtype=torch.float32)
        self.divisors.copy_(values.pin_memory() if self.divisors.is_cuda else values, non_blocking=True)

    def contents(self) -> tuple[PackedBatch, Divisors]:
        """The row that was loaded last, with nothing derived from its documents yet."""
        tokens, mtp_tokens, documents, *rows = self.divisors.unbind()
        return (
            dataclasses.replace(self.batch, layout=self.layout.renewed()),
            Divisors(tokens, mtp_tokens, documents, dict(zip(self.ratios, rows, strict=True))),
        )


class TrainingGraph:
    """Runs micro-batches: the first ones plainly, then by replaying a graph of `compute` and of the backward of its loss.

    Args:
        compute: the forward and the losses of a batch whose layout is a StaticLayout, and whose loss is `terms.total`. It may wait for nothing, and
            what it decides on the host it decides once.
        module: what `compute` runs. Its parameters that require a gradient are differentiated, in the order of `parameters`; the gradients lie in
            tensors that the next micro-batch overwrites.
        longest: tokens of the longest document that is expected.

    A row with other sizes than those before (tokens, more or longer documents than there is room for) makes new tensors and another graph; so does a
    module whose tensors have moved, as after a second `Trainer.fit`, or that freezes others, and another numeric mode of torch. Hooks and
    attributes that change later are not noticed. Under anomaly detection every step is a plain one.

    Raises:
        BackendUnsupported: a module or parameter has hooks, which a graph would not call; said before the first micro-batch is computed.
        CaptureFailed: something in the step cannot be captured, or memory is too little. The micro-batch was not computed.
    """

    def __init__(self, compute: Compute, module: nn.Module, longest: int) -> None:
        self.compute, self.module, self.longest = compute, module, longest
        self.parameters: list[nn.Parameter] = []
        self._watched: list[Tensor]
        self._state: tuple[object, ...]
        self._room: _Room | None
        self._captured: tuple[torch.cuda.CUDAGraph, MicroStep] | None
        self._stream: torch.cuda.Stream | None  # of the captures: memory is used again on the stream that it was taken on only
        self._beside: dict[str, _Beside]
        self._sums: dict[nn.Parameter, Tensor]
        self._plain_steps: int
        self.hidden_bytes: int  # allocated in the graph's own memory, beyond what the allocator counts
        self.release()

    def release(self) -> None:
        """Give back the graph and its memory; the next micro-batch begins anew. Gradients in that memory keep it until they are dropped."""
        self.__dict__.update(_nothing_yet())

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module, or a process that is spawned, captures for itself."""
        return self.__dict__ | _nothing_yet()

    @property
    def captured(self) -> bool:
        """Whether the last micro-batch was a replay."""
        return self._captured is not None

    def run(self, batch: PackedBatch) -> MicroStep:
        """One micro-batch on the device of `batch`. The result belongs to the graph: read or copy it before the next call."""
        if self._room is None or not self._room.layout.holds(batch.layout) or self._state_now() != self._state:
            self._room = self._room_for(batch)
        self._room.load(batch)
        if torch.is_anomaly_enabled():  # which reads a value at every node of the backward
            return self._step(self._room)
        if self._captured is None and self._plain_steps < PLAIN_STEPS:
            self._plain_steps += 1
            return self._step(self._room)
        if self._captured is None:
            try:
                room = self._room
                self._captured = self._capture(lambda: self._step(room), room.divisors.device)
            except Exception as error:
                raise CaptureFailed(_cause(error)) from error
        graph, result = self._captured
        graph.replay()
        return result

    def beside(self, name: str, key: Hashable, prepare: Callable[[], Prepared]) -> Any:
        """`load`, then `run` of what `prepare` makes, and the result of `run`; from the second call with the same `key` on as a graph.

        That graph takes its temporary memory from that of the micro-batch and of other parts, so the result belongs to it: read or copy it before the
        next part or micro-batch.
        As long as the micro-batches are plain ones, so is this.

        Args:
            key: equal only where `prepare` would make the same again: addresses of the tensors that are read and written, and numbers that are
                not loaded.

        Raises:
            CaptureFailed: `run` cannot be captured. Nothing was loaded or computed; from the next call on it runs plainly, until the micro-batch is
                captured anew.
        """
        if self._room is None or self._captured is None or torch.is_anomaly_enabled():
            prepared = prepare()
            prepared.load()
            return prepared.run()
        known = self._beside.get(name)
        first = known is None or known.key != key
        if known is None or known.key != key:
            known = self._beside[name] = _Beside(key, prepare(), refused=known is not None and known.refused)
        if known.captured is None and not first and not known.refused:
            try:
                known.captured = self._capture(known.prepared.run, self._room.divisors.device, self._captured[0].pool())
            except Exception as error:
                known.refused = True
                raise CaptureFailed(f"{name}: {_cause(error)}") from error
        known.prepared.load()
        if known.captured is None:
            return known.prepared.run()
        graph, result = known.captured
        graph.replay()
        return result

    def hand_over(self, gradients: Sequence[Tensor | None], more: bool) -> None:
        """Add the gradients of a micro-batch to `.grad`. `more`: more micro-batches belong to the step, so they are summed in memory of its own."""
        pairs = [(p, g) for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        known = [(p.grad, g) for p, g in pairs if p.grad is not None]
        new = [(p, g) for p, g in pairs if p.grad is None]
        if new and not more:
            for p, g in new:
                p.grad = g
        elif new:  # the same memory in every step, so that what is beside can be a graph
            for p, g in new:
                p.grad = self._sums.get(p)
                if p.grad is None:
                    p.grad = self._sums[p] = torch.empty_like(g)
            torch._foreach_copy_([p.grad for p, _ in new if p.grad is not None], [g for _, g in new])
        if known:
            torch._foreach_add_([grad for grad, _ in known], [g for _, g in known])

    def _state_now(self) -> tuple[object, ...]:
        """What a graph has taken for granted about the module."""
        modes = (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cuda"))
        return *modes, self.module.training, *((t.data_ptr(), t.requires_grad) for t in self._watched)

    def _room_for(self, batch: PackedBatch) -> _Room:
        known = self._room.layout.max_documents if self._room is not None else 0
        self.release()
        _refuse_hooks(self.module)
        self._watched = [*self.module.parameters(), *self.module.buffers()]
        self._state = self._state_now()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.longest = max(self.longest, batch.layout.longest_document())
        return _Room(batch, max(known, pad_documents(len(batch.layout.lengths))), self.longest)

    def _step(self, room: _Room) -> MicroStep:
        """Forward and backward of the loaded row."""
        batch, divisors = room.contents()
        with torch.enable_grad():
            terms, router = self.compute(batch, divisors)
        # not under autocast, where the backward of a plain training step does not run either
        with torch.autocast(batch.tokens.device.type, enabled=False):
            gradients = torch.autograd.grad(terms.total, self.parameters, allow_unused=True)
        terms.total = terms.total.detach()
        router = [dataclasses.replace(record, balance_sum=record.balance_sum.detach()) for record in router]
        return MicroStep(terms, router, _as_optimizers_expect(self.parameters, gradients))

    def _capture(self, function: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of `function` and its result; `pool`: memory that it shares with graphs which are replayed in turn with it."""
        failure = None
        graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # weights that autocast has rounded before are not those of the steps to come: the graph must round them itself
        torch.clear_autocast_cache()
        torch.cuda.reset_peak_memory_stats(device)
        try:
            # thread_local: other threads, such as one that pins memory for the next rows, may go on
            with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    result = function()
                except Exception as error:
                    failure = error
                    raise
        except Exception:
            # ending a broken capture raises too, in place of what broke it, and leaves its stream the current one
            torch.cuda.set_stream(outside)
            if failure is not None:
                raise failure from None
            raise
        finally:
            torch.clear_autocast_cache()
        # graphs that share their memory share what is temporary in it
        self.hidden_bytes = max(self.hidden_bytes, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)  # from now on the peak is that of the rest, beside the graph's memory
        return graph, result


def _nothing_yet() -> dict[str, Any]:
    nothing: dict[str, Any] = {"_watched": [], "_state": (), "_room": None, "_captured": None, "_stream": None, "_beside": {}, "_sums": {}}
    return nothing | {"_plain_steps": 0, "hidden_bytes": 0}


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _refuse_hooks(module: nn.Module) -> None:
    named: list[tuple[str, object, tuple[str, ...]]] = []
    named += [
        (f"module {n or 'decoder'}", m, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))
        for n, m in module.named_modules()
    ]
    named += [(f"parameter {n}", p, ("_backward_hooks", "_post_accumulate_grad_hooks")) for n, p in module.named_parameters()]
    found = [name for name, owner, kinds in named if any(getattr(owner, kind, None) for kind in kinds)]
    if found:
        raise BackendUnsupported(f"hooks on {', '.join(found[:4])} would not run in a CUDA graph of the training step", "trainer.cuda_graph=never")


def _as_optimizers_expect(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each gradient in a memory of its own with the strides of its parameter, as autograd accumulates them into `.grad`."""
    seen: set[int] = set()
    result: list[Tensor | None] = []
    for p, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and (gradient.stride() != p.stride() or gradient.data_ptr() in seen):
            gradient = torch.empty_like(p).copy_(gradient)
        if gradient is not None:
            seen.add(gradient.data_ptr())
        result.append(gradient)
    return result


def copied(record: T) -> T:
    """A record of losses or router loads in tensors of its own, which no later micro-batch overwrites."""
    result: T = _copied(record)
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{field.name: _copied(getattr(value, field.name)) for field in dataclasses.fields(value)})
    return value


def choose_graph(config: ExperimentConfig, backend: Backend, device_type: str) -> tuple[bool, str]:
    """Whether the micro-batches of training run as a CUDA graph, and the choice in words.

    Raises:
        BackendUnsupported: `trainer.cuda_graph=always` and something forbids it.
    """
    wanted = config.trainer.cuda_graph
    obstacle = "trainer.cuda_graph=never" if wanted == "never" else _obstacle(config, backend, device_type)
    if not obstacle:
        return True, f"forward and backward are one launch, from micro-batch {PLAIN_STEPS + 1} on"
    if wanted == "always":
        remedy = "trainer.cuda_graph=auto, which takes a graph where it can"
        raise BackendUnsupported(f"trainer.cuda_graph=always cannot be honoured: {obstacle}", remedy)
    return False, f"none: {obstacle}"


def _obstacle(config: ExperimentConfig, backend: Backend, device_type: str) -> str:
    trainer, moe = config.trainer, config.model.moe
    if device_type != "cuda":
        return "the model does not run on an NVIDIA GPU"
    if trainer.strategy != "auto":
        return f"trainer.strategy={trainer.strategy} sums gradients over processes inside the backward"
    if config.compile:
        return "compile=true"
    if trainer.profiler == "pytorch":
        return "trainer.profiler=pytorch looks into every module"
    if not backend.capturable():
        return f"backend={backend.name} asks the host for the lengths of the documents"
    dtype = torch.bfloat16 if trainer.precision == "bf16-mixed" else torch.float32
    if moe.enabled and not grouped_gemm_takes(device_type, dtype, moe.moe_intermediate_size, config.model.hidden_size):
        return (
            "the experts run one matrix product each, of sizes that the host must know "
            "(trainer.precision=bf16-mixed and widths that 8 divides would group them)"
        )
    return ""
