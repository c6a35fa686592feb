# SPDX-License-Identifier: Apache-2.0
"""What a graph may not disturb in training, with a graph that is acted out on the CPU: its memory is written over by every replay, as on a GPU.

And what a graph asks of the model, whatever parts it has: the same operations on the same shapes for every row, and no value read by the host.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from training_helpers import MODEL, loader, make_config, make_module, make_rows, make_trainer

from csa_model import lit_module, moe, training_graph
from csa_model.config import HyperConnectionsConfig, MTPConfig, StageConfig
from csa_model.data.batch import PackedBatch
from csa_model.training_graph import MicroStep, TrainingGraph
from kernels import BackendUnsupported, PackedLayout, StaticLayout
from kernels.unfused import UnfusedBackend

ROWS = [[40, 7], [30, 18], [48], [3, 3, 3, 3, 3, 3], [47, 1], [20, 20], [11, 30]]
WARMUP = StageConfig("indexer_warmup", "dense", "dense", True)


def out_of_sight(function: Any) -> Any:
    """What stands for a kernel may look at the values."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **named)

    return run


class OfTheDevice(UnfusedBackend):
    """Takes a StaticLayout: reads its documents back and drops the entries of nobody."""

    def capturable(self) -> bool:
        return True

    @staticmethod
    def _exact(arguments: tuple[Any, ...], entries: tuple[int, ...]) -> list[Any]:
        at = next(i for i, a in enumerate(arguments) if isinstance(a, PackedLayout))
        if not isinstance(arguments[at], StaticLayout):
            return list(arguments)
        layout, ratio = PackedLayout(arguments[at].cu_seqlens, arguments[at].num_tokens), arguments[at + 1]
        count = layout.num_compressed(ratio) if ratio else 0
        return [layout if i == at else a[:count] if i in entries and a is not None else a for i, a in enumerate(arguments)]

    @out_of_sight
    def select(self, *arguments: Any) -> Any:  # type: ignore[override]
        return super().select(*self._exact(arguments, (1,)))

    @out_of_sight
    def attend(self, *arguments: Any) -> Any:  # type: ignore[override]
        return super().attend(*self._exact(arguments, (2,)))

    @out_of_sight
    def indexer_loss(self, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        return super().indexer_loss(*self._exact(arguments, (1, 6)), **named)


class Stand(OfTheDevice):
    """The shapes of the operations, each of a fixed list of steps, and everything differentiated that they differentiate."""

    def select(self, index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: Any, ratio: int, topk: int) -> Any:
        return torch.zeros(layout.num_rows, topk, dtype=torch.int32) + layout.entry_start(ratio)[:, None]

    def attend(self, q: Tensor, window_kv: Tensor, compressed_kv: Any, selected: Any, sink: Tensor, layout: Any, *shape: Any) -> Any:
        keys = window_kv.mean(0) if compressed_kv is None else torch.cat([window_kv, compressed_kv]).mean(0)
        return q * keys * sink[:, None].to(q.dtype), q.detach().float().sum(-1) + layout.window_start(shape[1])[:, None]

    def indexer_loss(self, index_q: Tensor, index_k: Tensor, index_w: Tensor, *others: Any, **named: Any) -> Any:
        layout, ratio = others[6], others[7]
        return index_q.float().mean() + index_k.float().mean() + index_w.float().mean(), (layout.visible_compressed(ratio) > 0).sum()


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in the results of a micro-batch."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, list) else []


class ActedGraph:
    """Writes the results of the loaded row to where those of the first one are."""

    def __init__(self, run: Any, result: MicroStep) -> None:
        self.run, self.result, self.replays = run, result, 0

    def replay(self) -> None:
        self.replays += 1
        kept, new = tensors_of(self.result), tensors_of(self.run())
        assert len(kept) == len(new)
        for a, b in zip(kept, new, strict=True):
            a.copy_(b)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'CUDAGraph' object")


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[ActedGraph]:
    """The graphs that were captured, as trainer.cuda_graph=always does from the third micro-batch on."""
    graphs: list[ActedGraph] = []

    def capture(self: TrainingGraph, room: Any) -> tuple[Any, MicroStep]:
        result = self._step(room)
        for t in tensors_of(result):  # a capture runs nothing
            t.zero_()
        graphs.append(ActedGraph(lambda: self._step(room), result))
        return graphs[-1], result

    monkeypatch.setattr(TrainingGraph, "_capture", capture)
    monkeypatch.setattr(lit_module, "choose_graph", lambda config, backend, device: (config.trainer.cuda_graph == "always", ""))
    monkeypatch.setattr(lit_module, "choose_backend", lambda config, mode: (OfTheDevice(), ""))
    return graphs


class Watcher(L.Callback):
    """Norms of the gradients and metrics as callbacks see them; `scale`: changes the gradients as one may."""

    def __init__(self, scale: float | None = None) -> None:
        self.scale, self.norms, self.losses = scale, [], []

    @staticmethod
    def _norm(module: Any) -> float:
        return float(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.norms.append(self._norm(pl_module))
        for p in pl_module.parameters():
            if self.scale is not None and p.grad is not None:
                p.grad.mul_(self.scale)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(self._norm(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])  # kept beyond the step


def fit(choice: str, watcher: Watcher | None = None, rows: Any = ROWS, module: Any = None, stage: Any = None, **options: Any) -> Any:
    """A run of the tiny decoder in float64; its module, its trainer and what callbacks saw."""
    settings = {"max_steps": len(rows), **options.pop("settings", {})}
    config = make_config(options.pop("teacher", "full_csa"), stage, options.pop("model", None), cuda_graph=choice, **settings)
    watcher = watcher or Watcher()
    module = module or make_module(config).double()
    callbacks = [watcher, *options.pop("callbacks", [])]
    validation = options.pop("validation", None)
    checkpoint = options.pop("ckpt_path", None)
    trainer = make_trainer(config, callbacks=callbacks, **options)
    batches = make_rows(rows, accumulate=config.trainer.accumulate_grad_batches)
    trainer.fit(module, loader(batches), *([validation] if validation else []), ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    return module, trainer, watcher


def assert_trained_alike(plain: Any, graph: Any) -> None:
    (a, a_trainer, a_seen), (b, b_trainer, b_seen) = plain, graph
    assert a.graph is None
    assert b.graph is not None
    for (name, p), (_, q) in zip(a.decoder.state_dict().items(), b.decoder.state_dict().items(), strict=True):
        assert (p.double() - q.double()).norm() <= 1e-4 * p.double().norm() + 1e-9, name  # divisors are rounded, Muon makes much of it
    assert b_seen.norms == pytest.approx(a_seen.norms, rel=1e-4)
    assert [float(x) for x in b_seen.losses] == pytest.approx([float(x) for x in a_seen.losses], rel=1e-5)
    assert a_trainer.callback_metrics.keys() == b_trainer.callback_metrics.keys()
    for name, value in a_trainer.callback_metrics.items():
        assert float(b_trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_callbacks_see_and_change_gradients_as_without_a_graph(acted: list[ActedGraph], accumulate: int, scale: float | None) -> None:
    """Seven micro-batches: with 2 or 3 to a step the last group is incomplete, and its step is taken at the end of the epoch."""
    settings = {"accumulate_grad_batches": accumulate, "max_steps": -(-len(ROWS) // accumulate)}
    runs = [fit(choice, Watcher(scale), settings=settings, max_epochs=1) for choice in ("never", "always")]
    assert_trained_alike(*runs)
    assert len(acted) == 1
    assert acted[0].replays == len(ROWS) - 2
    assert runs[1][1].global_step == settings["max_steps"]


@pytest.mark.parametrize(
    "options",
    [
        {"teacher": "none"},
        {"teacher": "compressed_only"},
        {"stage": WARMUP},
        {"model": {"moe": dataclasses.replace(MODEL.moe, enabled=False)}},
        {"model": {"mtp": MTPConfig(enabled=False)}},
        {"model": {"hyper_connections": HyperConnectionsConfig(enabled=False)}},
        {"model": {"tie_word_embeddings": True}},
        {"model": {"recompute": True}},
    ],
    ids=lambda o: str(next(iter(o.get("model", o)))),
)
def test_parts_of_a_model_train_as_without_a_graph(acted: list[ActedGraph], options: dict[str, Any]) -> None:
    assert_trained_alike(*(fit(choice, rows=ROWS[:5], **copy.deepcopy(options)) for choice in ("never", "always")))
    assert len(acted) == 1


def test_validation_between_steps_changes_nothing(acted: list[ActedGraph]) -> None:
    """It runs plainly, on rows of other sizes, under inference_mode, while the graph's memory holds the results of a step."""
    validation = loader(make_rows([[9, 30], [60]], num_tokens=64, seed=3))
    options = {"val_check_interval": 1, "limit_val_batches": 2, "check_val_every_n_epoch": None}
    runs = [fit(choice, validation=validation, **options) for choice in ("never", "always")]
    assert_trained_alike(*runs)
    assert "val/loss" in runs[1][1].callback_metrics


def test_a_resumed_run_goes_on_as_without_a_graph(acted: list[ActedGraph], tmp_path: Path) -> None:
    """From weights and optimizer state that were loaded, with no gradient yet, and through two plain steps again."""
    path = tmp_path / "middle.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4 and not path.exists():
                trainer.save_checkpoint(path)

    fit("always", callbacks=[Save()])
    assert len(acted) == 1
    runs = [fit(choice, ckpt_path=path, rows=[*ROWS, *ROWS], settings={"max_steps": 8}) for choice in ("never", "always")]
    assert_trained_alike(*runs)
    assert runs[1][1].global_step == 8
    assert [graph.replays for graph in acted] == [5, 2]


class StopAt(L.Callback):
    def __init__(self, micro_batch: int, error: BaseException) -> None:
        self.micro_batch, self.error = micro_batch, error

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.micro_batch -= 1
        if self.micro_batch == 0:
            raise self.error


def test_a_run_that_broke_off_within_a_step_leaves_nothing_of_it(acted: list[ActedGraph]) -> None:
    """The next fit of the same module begins its step anew: half of one was accumulated, in memory that the graph does not own."""
    settings = {"accumulate_grad_batches": 2, "max_steps": 3}
    runs = []
    for choice in ("never", "always"):
        config = make_config(cuda_graph=choice, **settings)
        module = make_module(config).double()
        trainer = make_trainer(config, callbacks=[StopAt(5, RuntimeError("broken off"))])
        with pytest.raises(RuntimeError, match="broken off"):
            trainer.fit(module, loader(make_rows(ROWS, accumulate=2)))
        assert trainer.global_step == 2
        assert any(p.grad is not None for p in module.parameters())
        runs.append(fit(choice, module=module, settings=settings))
    assert_trained_alike(*runs)


def test_rows_of_other_sizes_between_the_others(acted: list[ActedGraph]) -> None:
    """A shorter row, more documents than there is room for, and back: each makes another graph, none repeats what the one before did."""
    runs = []
    for choice in ("never", "always"):
        config = make_config(cuda_graph=choice, max_steps=13)
        module = make_module(config).double()
        rows = make_rows(ROWS[:4]) + make_rows([[20, 9], [8] * 4, [32], [5, 5]], num_tokens=32) + make_rows([*ROWS[:2], [1] * 40, *ROWS[2:4]])
        trainer, watcher = make_trainer(config, callbacks=[watcher := Watcher()]), watcher
        trainer.fit(module, loader(rows))
        runs.append((module, trainer, watcher))
    assert_trained_alike(*runs)
    assert len(acted) == 3


def test_a_parameter_that_takes_no_part_keeps_no_gradient(acted: list[ActedGraph]) -> None:
    """AdamW would decay a weight whose gradient is 0, and leave one alone that has none."""
    missing = []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            missing.append([name for name, p in pl_module.named_parameters() if p.grad is None])

    for choice in ("never", "always"):
        fit(choice, rows=ROWS[:5], callbacks=[Look()], stage=WARMUP)
    assert missing[0]
    assert all(names == missing[0] for names in missing)


def test_a_module_that_was_never_captured_is_copied_whole(acted: list[ActedGraph]) -> None:
    """Averages of weights copy the module before training begins; the copy differentiates its own parameters."""
    module = make_module(make_config(cuda_graph="always"))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        own = {id(p) for p in other.parameters()}
        assert {id(p) for p in other.graph.parameters} <= own
        assert not own & {id(p) for p in module.parameters()}
        assert other.graph.compute.__self__ is other


def test_counts_beyond_the_integers_of_float32_divide_within_rounding(acted: list[ActedGraph]) -> None:
    """16,777,217 predicted tokens in a step are no float32; a loss is none the worse for the half of a unit in the last place."""
    module = make_module(make_config(cuda_graph="always"))
    module.trainer = make_trainer(make_config())
    (row,) = make_rows([[40, 7]])
    counts = dataclasses.replace(row.step, tokens=2**24 + 1, mtp_tokens=2**24 + 3, query_rows=dict.fromkeys(row.step.query_rows, 2**26 + 5))
    row = dataclasses.replace(row, step=counts)
    step = module.graph.run(row)
    exact, _ = module._losses(row, row.step.divisors())
    assert float(step.terms.total) == pytest.approx(float(exact.total), rel=1e-6)
    means = step.terms.means(row.step, module.config)
    assert float(means["train/lm_loss"]) == pytest.approx(float(exact.lm_sum) / (2**24 + 1), rel=1e-6)


class Trace(TorchDispatchMode):
    """Operations and the shapes of their results; one by which the host would read a value is an error."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "repeat_interleave.Tensor", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        mask = name.startswith("index.Tensor") and any(i is not None and i.dtype == torch.bool for i in arguments[1])
        if mask or name.startswith(self.READS):
            raise AssertionError(f"the host reads a tensor: {function}")
        result = function(*arguments, **(named or {}))
        self.operations.append((name, [(t.shape, t.stride(), t.dtype) for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]))
        return result

    def __enter__(self) -> Trace:
        super().__enter__()
        torch.Tensor.tolist = _refused_tolist  # type: ignore[assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        del torch.Tensor.tolist
        super().__exit__(*error)


def _refused_tolist(tensor: Tensor) -> Any:
    assert not torch._C._len_torch_dispatch_stack(), "the host reads a tensor: tolist"
    return torch._C.TensorBase.tolist(tensor)


@pytest.fixture
def experts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' products on the CPU read their sizes; on a GPU torch's grouped product does not."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(moe._GroupedLinear, name, staticmethod(out_of_sight(getattr(moe._GroupedLinear, name))))


@pytest.mark.parametrize(
    ("teacher", "stage", "model"),
    [
        ("full_csa", StageConfig(), {}),
        ("compressed_only", StageConfig(), {"recompute": True}),
        ("none", StageConfig(), {"tie_word_embeddings": True}),
        ("full_csa", WARMUP, {}),
        ("full_csa", StageConfig(), {"moe": dataclasses.replace(MODEL.moe, enabled=False)}),
        ("full_csa", StageConfig(), {"mtp": MTPConfig(enabled=False), "hyper_connections": HyperConnectionsConfig(enabled=False)}),
        ("full_csa", StageConfig(), {"index_topk": None}),
    ],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.usefixtures("acted", "experts_of_a_gpu")
def test_every_row_runs_the_same_operations_and_the_host_reads_nothing(
    teacher: str, stage: Any, model: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lit_module, "choose_backend", lambda config, mode: (Stand(), ""))
    module = make_module(make_config(teacher, stage, model, cuda_graph="always"))
    module.trainer = make_trainer(make_config())
    rows = make_rows([[40, 8], [3, 3, 1], [1] * 30, [48]])
    traces = []
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        module.graph.run(rows[0])  # what is made once is made
        room = module.graph._room
        for row in rows:
            with Trace():
                room.load(row)
            for _ in range(2):  # of what the first time derived from the documents, the second derives all anew
                torch.clear_autocast_cache()
                with Trace() as trace:
                    module.graph._step(room)
                traces.append(trace.operations)
    assert len(traces[0]) > 100
    for number, trace in enumerate(traces):
        assert len(trace) == len(traces[0]), number
        for got, wanted in zip(trace, traces[0], strict=True):
            assert got == wanted, number


def test_loading_a_row_reads_nothing_of_the_row_before() -> None:
    """Whatever is in the room, the next row is all there is."""
    rows = make_rows([[1] * 30, [40, 7]])
    used = training_graph._Room(rows[0], 64, 48)
    used.load(rows[0])
    used.load(rows[1])
    fresh = training_graph._Room(rows[0], 64, 48)
    fresh.load(rows[1])

    def content(room: Any) -> list[Tensor]:
        batch, divisors = room.contents()
        assert isinstance(batch, PackedBatch)
        layout = batch.layout
        numbers = [divisors.tokens, divisors.mtp_tokens, divisors.documents, *divisors.query_rows.values()]
        return [batch.tokens, batch.targets, batch.mtp_targets, layout.cu_seqlens, layout.document_of_token, layout.position_of_token, *numbers]

    assert all(torch.equal(a, b) for a, b in zip(content(used), content(fresh), strict=True))
    counts = rows[1].step
    assert [float(x) for x in used.divisors] == [counts.tokens, counts.mtp_tokens, counts.documents, *counts.query_rows.values()]


def test_after_training_the_memory_is_given_back_and_the_module_can_be_copied(acted: list[ActedGraph]) -> None:
    held = []

    class Look(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            held.append((pl_module.graph.captured, copy.deepcopy(pl_module.graph).captured, copy.deepcopy(pl_module.graph)._room))

    module, _, _ = fit("always", callbacks=[Look()])
    assert held == [(True, False, None)]
    assert (module.graph.captured, module.graph._room, module.graph.hidden_bytes) == (False, None, 0)


def test_zeroing_gradients_in_place_does_not_empty_the_memory_of_the_graph(acted: list[ActedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lit_module.CSALitModule, "optimizer_zero_grad", lambda self, epoch, batch, optimizer: optimizer.zero_grad(set_to_none=False))
    assert_trained_alike(*(fit(choice, rows=ROWS[:5]) for choice in ("never", "always")))


@pytest.mark.usefixtures("acted")
def test_hooks_are_refused_before_they_are_lost() -> None:
    (row,) = make_rows([[40, 7]])
    for hook in (
        lambda decoder: decoder.layers[1].register_forward_hook(lambda *a: None),
        lambda decoder: decoder.embed.weight.register_hook(lambda g: g),
        lambda decoder: decoder.embed.weight.register_post_accumulate_grad_hook(lambda p: None),
    ):
        module = make_module(make_config(cuda_graph="always"))
        module.trainer = make_trainer(make_config())
        hook(module.decoder)
        with pytest.raises(BackendUnsupported, match=r"hooks on .*(layers\.1|embed\.weight).*cuda_graph=never"):
            module.graph.run(row)


def test_under_anomaly_detection_no_step_is_replayed(acted: list[ActedGraph]) -> None:
    assert_trained_alike(*(fit(choice, rows=ROWS[:4], detect_anomaly=True) for choice in ("never", "always")))
    assert not acted


@pytest.mark.usefixtures("acted")
def test_a_trainer_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module(make_config(cuda_graph="always"))
    module.trainer = make_trainer(make_config())
    module.on_fit_start()
    monkeypatch.setattr(type(module.trainer), "world_size", 2)
    with pytest.raises(BackendUnsupported, match="2 processes"):
        module.on_fit_start()


@pytest.mark.parametrize("reason", ["capture", "hook"])
def test_where_there_can_be_no_graph_auto_goes_on_without_and_always_stops(
    reason: str, acted: list[ActedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: TrainingGraph, room: Any) -> Any:
        raise torch.OutOfMemoryError("too much\nand more")

    def run(choice: str, accumulate: int) -> Any:
        module = make_module(make_config(cuda_graph=choice, accumulate_grad_batches=accumulate)).double()
        if reason == "hook":
            module.decoder.norm.register_forward_hook(lambda *a: None)
        return fit(choice, module=module, settings={"accumulate_grad_batches": accumulate, "max_steps": 3})

    if reason == "capture":
        monkeypatch.setattr(TrainingGraph, "_capture", capture)
    monkeypatch.setattr(lit_module, "choose_graph", lambda config, backend, device: (config.trainer.cuda_graph != "never", ""))
    words = "OutOfMemoryError: too much" if reason == "capture" else "hooks on module norm"
    for accumulate in (1, 2):
        plain = run("never", accumulate)
        with pytest.warns(UserWarning, match=f"without a CUDA graph: {words}"):
            module, trainer, seen = run("auto", accumulate)
        assert module.graph is None
        assert words in module.graph_choice
        module.graph = "gone"
        assert_trained_alike(plain, (module, trainer, seen))
    with pytest.raises(BackendUnsupported, match=f"always cannot be honoured: {words}"):
        run("always", 1)


def test_after_a_capture_that_failed_the_cause_is_told_and_the_stream_is_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a broken capture raises in place of what broke it, from inside torch's context manager, which then does not restore the stream."""
    streams = ["outside"]

    class Broken:
        def __init__(self, graph: Any, stream: Any, capture_error_mode: str) -> None:
            streams.append(stream)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None:
            raise RuntimeError("the capture was invalidated")

    class Device:
        def __init__(self, device: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: Any) -> None: ...

    stand_ins = {
        "CUDAGraph": lambda: object(), "graph": Broken, "device": Device, "Stream": lambda device: "of the capture",
        "current_stream": lambda device: streams[-1], "set_stream": streams.append, "reset_peak_memory_stats": lambda device: None,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def compute(batch: Any, divisors: Any) -> Any:
        raise torch.OutOfMemoryError("too much")

    module = torch.nn.Linear(2, 2)
    graph = TrainingGraph(compute, module, 48)
    monkeypatch.setattr(training_graph, "PLAIN_STEPS", 0)
    with pytest.raises(training_graph.CaptureFailed, match="OutOfMemoryError: too much"):
        graph.run(make_rows([[40, 7]])[0])
    assert streams == ["outside", "of the capture", "outside"]
    assert not graph.captured
