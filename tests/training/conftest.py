# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_helpers import ActedGraph, ActedPart, OfTheDevice, tensors_of

from csa_model import lit_module
from csa_model.training_graph import TrainingGraph


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def acted_parts() -> list[ActedPart]:
    """The graphs beside those of `acted`."""
    return []


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch, acted_parts: list[ActedPart]) -> list[ActedGraph]:
    """The graphs that were captured, as trainer.cuda_graph=always does from the third micro-batch on."""
    graphs: list[ActedGraph] = []

    def capture(self: TrainingGraph, function: Any, device: torch.device, pool: Any = None) -> tuple[Any, Any]:
        if pool is not None:
            assert pool is graphs[-1]
            acted_parts.append(ActedPart(function))
            graphs[-1].parts.append(acted_parts[-1])
            return acted_parts[-1], acted_parts[-1].result
        result = function()
        for t in tensors_of(result):  # a capture runs nothing
            t.zero_()
        graphs.append(ActedGraph(function, result))
        return graphs[-1], result

    monkeypatch.setattr(TrainingGraph, "_capture", capture)
    monkeypatch.setattr(lit_module, "choose_graph", lambda config, backend, device: (config.trainer.cuda_graph == "always", ""))
    monkeypatch.setattr(lit_module, "choose_backend", lambda config, mode: (OfTheDevice(), ""))
    return graphs
