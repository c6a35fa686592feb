# SPDX-License-Identifier: Apache-2.0
"""Training on rows whose documents the host does not know, plainly here and as a CUDA graph on a GPU, equals training on exact layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from graph_helpers import ROWS as SEVEN_ROWS
from graph_helpers import WARMUP, OfTheDevice
from training_helpers import MODEL, loader, make_config, make_module, make_rows, make_trainer

from csa_model import lit_module, training_graph
from csa_model.callbacks import PeakMemory
from csa_model.config import StageConfig
from csa_model.decoder import AttentionMode, geometry
from csa_model.training_graph import TrainingGraph, choose_graph, copied
from kernels import BackendUnsupported, get_backend

ROWS = SEVEN_ROWS[:6]


class AtTheEnd(L.Callback):
    """What the graph was when training ended; afterwards its memory is given back."""

    captured, hidden_bytes, documents, beside = False, 0, 0, ()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.graph is not None:
            self.captured, self.hidden_bytes = pl_module.graph.captured, pl_module.graph.hidden_bytes
            self.documents = pl_module.graph._room.layout.max_documents
            self.beside = {name for name, part in pl_module.graph._beside.items() if part.captured is not None}
        pl_module.at_the_end = self


def _fit(config: Any, rows: list[list[int]] = ROWS, callbacks: tuple[Any, ...] = (), **trainer: Any) -> tuple[Any, Any]:
    module = make_module(config)
    if config.trainer.accelerator == "cpu":
        module.double()  # Muon makes much of a rounding
    trainer = make_trainer(config, limit_val_batches=0, callbacks=[*callbacks, AtTheEnd()], **trainer)
    trainer.fit(module, loader(make_rows(rows)))
    return module, trainer


@pytest.fixture
def plain_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch goes through TrainingGraph, none is captured."""
    monkeypatch.setattr(training_graph, "PLAIN_STEPS", 10**9)
    monkeypatch.setattr(lit_module, "choose_graph", lambda config, backend, device: (config.trainer.cuda_graph == "always", ""))
    monkeypatch.setattr(lit_module, "choose_backend", lambda config, mode: (OfTheDevice(), ""))


@pytest.mark.parametrize(
    ("accumulate", "stage", "teacher", "model"),
    [
        (1, StageConfig(), "full_csa", {}),
        (2, StageConfig(), "compressed_only", {}),
        (1, WARMUP, "full_csa", {}),
        (2, StageConfig(), "none", {"recompute": True}),
    ],
)
@pytest.mark.usefixtures("plain_graph")
def test_rows_of_unknown_documents_train_the_same(accumulate: int, stage: StageConfig, teacher: str, model: dict[str, Any]) -> None:
    results = []
    for choice in ("never", "always"):
        config = make_config(teacher, stage, model, max_steps=6 // accumulate, accumulate_grad_batches=accumulate, cuda_graph=choice)
        # AdamW divides a gradient by its size; without a floor under it, rounding would move a scale like a gradient
        results.append(_fit(dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, eps=1e-8))))
    (plain, plain_trainer), (static, static_trainer) = results
    assert plain.graph is None
    assert static.graph is not None
    for (name, a), (_, b) in zip(plain.decoder.named_parameters(), static.decoder.named_parameters(), strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm() + 1e-9, name
    for name, value in plain_trainer.callback_metrics.items():
        assert float(static_trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    for a, b in zip(plain.buffers(), static.buffers(), strict=True):
        assert torch.equal(a, b)  # router biases


@pytest.mark.usefixtures("plain_graph")
def test_a_row_without_room_makes_new_room() -> None:
    config = make_config(cuda_graph="always")
    module = make_module(config)
    module.trainer = make_trainer(config)
    graph = TrainingGraph(module._losses, module.decoder, longest=10)
    few, many, long = make_rows([[9, 9], [1] * 100, [120]], num_tokens=128)
    for row, documents, longest in ((few, 64, 10), (many, 256, 10), (few, 256, 10), (long, 256, 120)):
        graph.run(row)
        assert graph._room is not None
        assert (graph._room.layout.max_documents, graph._room.layout.longest_document()) == (documents, longest)
    (other,) = make_rows([[30]], num_tokens=32)
    graph.run(other)
    assert graph._room.layout.num_tokens == 32


@pytest.mark.usefixtures("plain_graph")
def test_a_module_whose_tensors_moved_or_froze_makes_new_room() -> None:
    module = make_module(make_config(cuda_graph="always"))
    module.trainer = make_trainer(make_config())
    graph = TrainingGraph(module._losses, module.decoder, longest=48)
    (row,) = make_rows([[40, 7]])
    graph.run(row)
    before = graph._room
    graph.run(row)
    assert graph._room is before
    bias = next(module.decoder.buffers())
    bias.data = bias.data.clone()
    graph.run(row)
    assert graph._room is not before
    before = graph._room
    module.decoder.embed.requires_grad_(False)
    result = graph.run(row)
    assert graph._room is not before
    assert len(result.gradients) == sum(p.requires_grad for p in module.decoder.parameters())


def test_a_copy_shares_no_tensor() -> None:
    module = make_module(make_config())
    (row,) = make_rows([[40, 7]])
    module.trainer = make_trainer(make_config())
    terms, router = module._losses(row, row.step.divisors())
    (record, *_), again = copied(router), copied(terms)
    assert record.module is router[0].module
    assert record.counts is not router[0].counts
    assert again.indexer[1].kl_sum is not terms.indexer[1].kl_sum
    assert torch.equal(again.indexer[1].kl_sum, terms.indexer[1].kl_sum)


def test_gradients_are_summed_in_the_same_memory_in_every_step() -> None:
    module = torch.nn.Linear(2, 1)
    p, q = module.weight, module.bias
    graph = TrainingGraph(lambda *a: None, module, 48)  # type: ignore[arg-type, return-value]
    graph.parameters = [p, q]
    first, places = [torch.ones(1, 2), None], set()
    for _ in range(2):
        graph.hand_over(first, more=True)
        assert p.grad is not first[0]
        assert q.grad is None
        graph.hand_over([torch.ones(1, 2), torch.ones(1)], more=True)
        graph.hand_over([torch.ones(1, 2), torch.ones(1)], more=True)
        assert p.grad.tolist() == [[3.0, 3.0]]
        assert q.grad.tolist() == [2.0]
        assert first[0].tolist() == [[1.0, 1.0]]  # type: ignore[union-attr]
        places.add((p.grad.data_ptr(), q.grad.data_ptr()))
        module.zero_grad(set_to_none=True)
    assert len(places) == 1
    graph.hand_over(first, more=False)
    assert p.grad is first[0]


class _Part:
    """Adds up what was loaded."""

    def __init__(self) -> None:
        self.number, self.sum = 0, 0

    def load(self) -> None:
        self.number += 1

    def run(self) -> dict[str, Any]:
        self.sum += self.number
        return {"sum": [self.sum]}


def test_a_part_beside_is_prepared_once_for_a_key_and_then_replayed(acted: list[Any], acted_parts: list[Any]) -> None:
    module = make_module(make_config(cuda_graph="always"))
    module.trainer = make_trainer(make_config())
    (row,) = make_rows([[40, 7]])
    made: list[_Part] = []

    def step(key: str) -> int:
        module.graph.run(row)
        return int(module.graph.beside("sum", key, lambda: made.append(_Part()) or made[-1])["sum"][0])

    assert [step("a") for _ in range(2)] == [1, 1]  # beside plain micro-batches nothing is kept
    assert [step("a") for _ in range(4)] == [1, 3, 6, 10]
    assert (len(made), len(acted), [part.replays for part in acted_parts]) == (3, 1, [3])
    assert [step("b") for _ in range(2)] == [1, 3]
    assert (len(made), len(acted), [part.replays for part in acted_parts]) == (4, 1, [3, 1])
    module.decoder.embed.requires_grad_(False)  # the micro-batch is captured anew, so is what is beside it
    assert [step("b") for _ in range(5)] == [1, 1, 1, 3, 6]
    assert (len(made), len(acted), [part.replays for part in acted_parts]) == (7, 2, [3, 1, 2])


def test_gradients_come_as_optimizers_expect_them() -> None:
    p, q = torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(3, 2))
    shared = torch.ones(2, 3).t()
    first, second, none = training_graph._as_optimizers_expect([p, q, p], [shared, torch.ones(3, 2).expand(3, 2), None])
    assert none is None
    assert first is not None
    assert first.stride() == (2, 1)
    same = torch.ones(3, 2)
    first, second = training_graph._as_optimizers_expect([p, q], [same, same])  # type: ignore[misc]
    assert first.data_ptr() != second.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy": "ddp"}, "strategy=ddp"),
        ({"precision": "32-true"}, "bf16-mixed"),
        ({"backend": "unfused"}, "backend=unfused"),
        ({"compile": True}, "compile=true"),
        ({"profiler": "pytorch"}, "profiler=pytorch"),
        ({"device": "cpu"}, "NVIDIA GPU"),
    ],
)
def test_what_forbids_a_graph_is_said(change: dict[str, Any], words: str) -> None:
    change = dict(change)
    backend = get_backend("unfused") if change.pop("backend", None) else OfTheDevice()
    device, compiled = change.pop("device", "cuda"), change.pop("compile", False)
    config = make_config(**{"accelerator": "gpu", "precision": "bf16-mixed", **change})
    config = dataclasses.replace(config, compile=compiled)
    used, choice = choose_graph(config, backend, device)
    assert not used
    assert words in choice
    always = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, cuda_graph="always"))
    with pytest.raises(BackendUnsupported, match=words):
        choose_graph(always, backend, device)


def test_a_graph_is_taken_where_nothing_forbids_it() -> None:
    config = make_config(accelerator="gpu", precision="bf16-mixed")
    assert choose_graph(config, OfTheDevice(), "cuda")[0]
    never = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, cuda_graph="never"))
    assert choose_graph(never, OfTheDevice(), "cuda") == (False, "none: trainer.cuda_graph=never")


GPU_MODEL = {"head_dim": 16, "index_head_dim": 16, "hidden_size": 32}
GPU_ROWS = [*ROWS, [1] * 40 + [8], [24, 24], [48], [5] * 9]  # the 41 documents of one row stay within the 64 that there is room for


def _gpu_fit(
    choice: str, stage: StageConfig, teacher: str, accumulate: int, model: dict[str, Any], rows: list[list[int]] = GPU_ROWS, **backend: str
) -> tuple[Any, Any]:
    settings = {"accelerator": "gpu", "precision": "bf16-mixed", "accumulate_grad_batches": accumulate, "cuda_graph": choice}
    config = make_config(teacher, stage, {**GPU_MODEL, **model}, max_steps=len(rows) // accumulate, **settings)
    config = dataclasses.replace(config, backend=dataclasses.replace(config.backend, **{"name": "triton", **backend}))
    return _fit(config, rows, (PeakMemory(),), accelerator="gpu", deterministic=backend.get("backward") != "cudnn")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("accumulate", "stage", "teacher", "model"),
    [
        (1, StageConfig(), "full_csa", {}),
        (2, StageConfig(), "compressed_only", {}),
        (1, WARMUP, "full_csa", {}),
        (1, StageConfig(), "full_csa", {"recompute": True}),
    ],
)
def test_replayed_steps_equal_plain_ones(
    accumulate: int, stage: StageConfig, teacher: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, trainer = _gpu_fit("always", stage, teacher, accumulate, model)
    assert captured.at_the_end.captured
    assert captured.at_the_end.beside == {"norms and clipping", "the optimizer's update"}
    assert captured.at_the_end.hidden_bytes > 0
    assert not captured.graph.captured
    exact, _ = _gpu_fit("never", stage, teacher, accumulate, model)
    monkeypatch.setattr(training_graph, "PLAIN_STEPS", 10**9)
    plain, plain_trainer = _gpu_fit("always", stage, teacher, accumulate, model)
    assert not plain.at_the_end.captured
    assert not plain.at_the_end.beside
    for (name, a), (_, b), (_, c) in zip(*(m.decoder.named_parameters() for m in (captured, plain, exact)), strict=True):
        assert torch.equal(a, b), name
        assert (a - c).norm() <= 0.05 * c.norm() + 1e-3, name  # after steps of Muon in bf16; the sums differ in their last bits
    for name in ("train/loss", "train/grad_norm"):
        if name in plain_trainer.callback_metrics:
            assert torch.equal(trainer.callback_metrics[name], plain_trainer.callback_metrics[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("deterministic")
def test_a_row_with_more_documents_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*ROWS[:4], [1] * 48, *ROWS, [48]]
    monkeypatch.setattr(training_graph, "pad_documents", lambda count: 1 << (count - 1).bit_length())
    captured, _ = _gpu_fit("always", StageConfig(), "full_csa", 1, {}, rows)
    assert captured.at_the_end.captured
    assert captured.at_the_end.documents == 64
    monkeypatch.setattr(training_graph, "PLAIN_STEPS", 10**9)
    plain, _ = _gpu_fit("always", StageConfig(), "full_csa", 1, {}, rows)
    for (name, a), (_, b) in zip(captured.decoder.named_parameters(), plain.decoder.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("deterministic")
def test_a_second_fit_of_the_same_module_does_not_read_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    for plain_steps in (2, 10**9):
        monkeypatch.setattr(training_graph, "PLAIN_STEPS", plain_steps)
        module, _ = _gpu_fit("always", StageConfig(), "full_csa", 1, {})
        module.cpu()
        hold = torch.empty(2**22, device="cuda")  # takes the memory that the parameters were in
        trainer = make_trainer(module.config, accelerator="gpu", deterministic=True)
        trainer.fit(module, loader(make_rows(GPU_ROWS, seed=1)))
        del hold
        modules.append(module)
    for (name, a), (_, b) in zip(*(m.decoder.named_parameters() for m in modules), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("backward", ["triton", "cudnn"])
def test_replayed_steps_of_flashmla_follow_plain_ones(backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit with our backward; cuDNN's has no deterministic mode."""
    asked = geometry(dataclasses.replace(MODEL, **GPU_MODEL), MODEL.compress_ratios, "cuda", torch.bfloat16, AttentionMode("sparse", "sparse"))
    try:  # asked alone: a step that cannot be captured is refused in the same words, and must fail here
        get_backend("flashmla", backward=backward).require(asked)
    except BackendUnsupported as refusal:
        pytest.skip(f"FlashMLA or cuDNN is not installed for this torch, or this is no Hopper GPU: {refusal}")
    modules = []
    for plain_steps in (2, 10**9):
        monkeypatch.setattr(training_graph, "PLAIN_STEPS", plain_steps)
        module, _ = _gpu_fit("always", StageConfig(), "full_csa", 1, {}, name="flashmla", backward=backward)
        assert module.at_the_end.captured == (plain_steps == 2)
        modules.append(module)
    for (name, a), (_, b) in zip(*(m.decoder.named_parameters() for m in modules), strict=True):
        assert torch.equal(a, b) if backward == "triton" else (a - b).norm() <= 0.05 * b.norm() + 1e-3, name
