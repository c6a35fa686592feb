# SPDX-License-Identifier: Apache-2.0
"""A training graph that is acted out on the CPU: its memory is written over by every replay, as on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from training_helpers import loader, make_config, make_module, make_rows, make_trainer

from csa_model.config import StageConfig
from csa_model.training_graph import MicroStep
from kernels import PackedLayout, StaticLayout
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


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in the results of a micro-batch."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, list) else []


class ActedPart:
    """A graph beside: its result is there with the first replay, and gone with the next micro-batch."""

    def __init__(self, run: Any) -> None:
        self.run, self.replays = run, 0
        self.result: dict[str, Any] = {}

    def replay(self) -> None:
        self.replays += 1
        self.result.update(self.run() or {})

    def overwrite(self) -> None:
        for value in self.result.values():
            for t in value:
                if isinstance(t, Tensor):
                    t.fill_(float("nan"))


class ActedGraph:
    """Writes the results of the loaded row to where those of the first one are."""

    def __init__(self, run: Any, result: MicroStep) -> None:
        self.run, self.result, self.replays = run, result, 0
        self.parts: list[ActedPart] = []

    def pool(self) -> ActedGraph:
        return self

    def replay(self) -> None:
        self.replays += 1
        for part in self.parts:
            part.overwrite()
        kept, new = tensors_of(self.result), tensors_of(self.run())
        assert len(kept) == len(new)
        for a, b in zip(kept, new, strict=True):
            a.copy_(b)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'CUDAGraph' object")


class Watcher(L.Callback):
    """Norms of the gradients and metrics as callbacks see them; `scale`: changes the gradients as one may."""

    def __init__(self, scale: float | None = None) -> None:
        self.scale, self.norms, self.clipped, self.losses = scale, [], [], []

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
        self.clipped.append(self._norm(pl_module))


def fit(choice: str, watcher: Watcher | None = None, rows: Any = ROWS, module: Any = None, stage: Any = None, **options: Any) -> Any:
    """A run of the tiny decoder in float64; its module, its trainer and what callbacks saw."""
    settings = {"max_steps": len(rows), **options.pop("settings", {})}
    config = make_config(options.pop("teacher", "full_csa"), stage, options.pop("model", None), cuda_graph=choice, **settings)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **options.pop("optimizer", {})))
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
    assert b_seen.clipped == pytest.approx(a_seen.clipped, rel=1e-4)
    assert [float(x) for x in b_seen.losses] == pytest.approx([float(x) for x in a_seen.losses], rel=1e-5)
    assert a_trainer.callback_metrics.keys() == b_trainer.callback_metrics.keys()
    for name, value in a_trainer.callback_metrics.items():
        assert float(b_trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
