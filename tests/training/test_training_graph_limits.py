# SPDX-License-Identifier: Apache-2.0
"""Where a graph ends, is refused, or fails: what is said, what goes on without one, and what is given back."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from graph_helpers import ROWS, ActedGraph, ActedPart, assert_trained_alike, fit
from training_helpers import make_config, make_module, make_rows, make_trainer

from csa_model import lit_module, training_graph
from csa_model.training_graph import TrainingGraph
from kernels import BackendUnsupported


def test_after_training_the_memory_is_given_back_and_the_module_can_be_copied(acted: list[ActedGraph]) -> None:
    held = []

    class Look(L.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            held.append((pl_module.graph.captured, copy.deepcopy(pl_module.graph).captured, copy.deepcopy(pl_module.graph)._room))

    module, _, _ = fit("always", callbacks=[Look()])
    assert held == [(True, False, None)]
    assert (module.graph.captured, module.graph._room, module.graph.hidden_bytes) == (False, None, 0)


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
    def capture(self: TrainingGraph, function: Any, device: Any, pool: Any = None) -> Any:
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


def test_a_part_that_cannot_be_captured_runs_plainly_under_auto_and_stops_always(
    acted: list[ActedGraph], acted_parts: list[ActedPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lit_module, "choose_graph", lambda config, backend, device: (config.trainer.cuda_graph != "never", ""))
    plain, captures = fit("never"), TrainingGraph._capture

    def capture(self: TrainingGraph, function: Any, device: Any, pool: Any = None) -> Any:
        if pool is not None:
            raise torch.OutOfMemoryError("too much\nand more")
        return captures(self, function, device)

    monkeypatch.setattr(TrainingGraph, "_capture", capture)
    words = "norms and clipping: OutOfMemoryError: too much"
    with pytest.warns(UserWarning, match=f"without a CUDA graph of one part: {words}") as warned:
        assert_trained_alike(plain, fit("auto"))
    assert len([w for w in warned if words in str(w.message)]) == 1
    assert len(acted) == 1
    assert acted[0].replays == len(ROWS) - 2
    with pytest.raises(BackendUnsupported, match=f"always cannot be honoured: {words}"):
        fit("always")


def test_after_a_capture_that_failed_the_cause_is_told_and_the_stream_is_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a broken capture raises in place of what broke it, from inside torch's context manager, which then does not restore the stream."""
    streams = ["outside"]

    class Broken:
        def __init__(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> None:
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
