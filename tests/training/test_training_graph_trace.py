# SPDX-License-Identifier: Apache-2.0
"""What a graph asks of the model, whatever parts it has: the same operations on the same shapes for every row, and no value read by the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from graph_helpers import WARMUP, OfTheDevice, out_of_sight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import MODEL, make_config, make_module, make_rows, make_trainer

from csa_model import lit_module, moe, training_graph
from csa_model.config import HyperConnectionsConfig, MTPConfig, StageConfig
from csa_model.data.batch import PackedBatch


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
