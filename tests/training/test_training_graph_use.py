# SPDX-License-Identifier: Apache-2.0
"""What a graph may not disturb in training, with a graph that is acted out on the CPU."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from graph_helpers import ROWS, WARMUP, ActedGraph, ActedPart, Watcher, assert_trained_alike, fit
from training_helpers import MODEL, StopAt, loader, make_config, make_module, make_rows, make_trainer

from csa_model import lit_module
from csa_model.config import HyperConnectionsConfig, MTPConfig


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_norms_and_clipping_are_replayed_beside(acted: list[ActedGraph], acted_parts: list[ActedPart], accumulate: int) -> None:
    """With gradients that are clipped: from the second step after the capture on, in memory that the next micro-batch overwrites."""
    rows = [*ROWS, *ROWS[:5]]
    settings = {"accumulate_grad_batches": accumulate, "max_steps": len(rows) // accumulate}
    kept: list[torch.Tensor] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            kept.append(pl_module._norms.get("train/grad_norm", torch.zeros(())))  # for later

    runs = [fit(choice, rows=rows, settings=settings, optimizer={"max_grad_norm": 1e-3}, callbacks=[Keep()]) for choice in ("never", "always")]
    assert_trained_alike(*runs)
    assert [float(norm) for norm in kept[len(rows) :]] == pytest.approx([float(norm) for norm in kept[: len(rows)]], rel=1e-4)
    assert min(runs[1][2].norms) > 0.1
    assert max(runs[1][2].clipped[accumulate - 1 :: accumulate]) < 0.1  # the indexers have their own limit
    plain_steps = 3 if accumulate == 1 else 2
    assert [part.replays for part in acted_parts] == [settings["max_steps"] - plain_steps]


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


def test_zeroing_gradients_in_place_does_not_empty_the_memory_of_the_graph(acted: list[ActedGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lit_module.CSALitModule, "optimizer_zero_grad", lambda self, epoch, batch, optimizer: optimizer.zero_grad(set_to_none=False))
    assert_trained_alike(*(fit(choice, rows=ROWS[:5]) for choice in ("never", "always")))
