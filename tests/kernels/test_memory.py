# SPDX-License-Identifier: Apache-2.0
"""Proof that nothing of size [rows, keys, heads] is saved for the backward or alive at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import ALL_VISIBLE, get_backend
from kernels.unfused.keys import CHUNK_ELEMENTS
from tests.kernels.cases import Case, make_case

unfused = get_backend("unfused")


def layer(tokens: int) -> tuple[Case, Tensor]:
    case = make_case([tokens], window=32, heads=4, dim=16, index_heads=4, index_dim=16, dtype=torch.float32).require_grad()
    return case, unfused.select(*case.index, case.layout, 4, 24)


def loss(case: Case, support: Any, lse: Tensor | None = None) -> Tensor:
    return unfused.indexer_loss(*case.index, support, *case.attention, lse, *case.tail)[0]


def attention(case: Case, support: Any, lse: Tensor | None = None) -> Tensor:
    return unfused.attend(*case.attention[:3], support, case.sink, *case.tail)[0].sum()


def saved_shapes(function: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return saved


class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_saves_inputs_ids_and_row_statistics_only(dense: bool) -> None:
    case, ids = layer(256)
    for lse in (None, torch.zeros(256, 4)):
        shapes = saved_shapes(lambda lse=lse: loss(case, ALL_VISIBLE if dense else ids, lse))
        inputs = {tuple(x.shape) for x in case.leaves()}
        assert len(shapes) >= 5
        assert set(shapes) <= inputs | {tuple(ids.shape), (256, 4), (256, 2)}


@pytest.mark.parametrize("dense", [False, True])
def test_attention_saves_inputs_ids_out_and_lse_only(dense: bool) -> None:
    case, ids = layer(256)
    shapes = saved_shapes(lambda: unfused.attend(*case.attention[:3], ALL_VISIBLE if dense else ids, case.sink, *case.tail)[0])
    inputs = {tuple(x.shape) for x in case.attention}
    assert len(shapes) >= 5
    assert set(shapes) <= inputs | {tuple(ids.shape), (256, 4)}


@pytest.mark.parametrize("operation", [attention, loss])
@pytest.mark.parametrize("dense", [False, True])
def test_no_tensor_of_a_step_outgrows_one_chunk(operation: Callable[..., Tensor], dense: bool) -> None:
    """Neither the heads nor the index heads ever multiply [tokens, entries]."""
    case, ids = layer(4096)
    full = 4096 * 1024 * 4
    with LargestTensor() as largest:
        operation(case, ALL_VISIBLE if dense else ids).backward()
    assert largest.elements <= CHUNK_ELEMENTS["cpu"] < full / 4


def test_select_never_holds_the_scores_of_all_rows() -> None:
    case, _ = layer(4096)
    with LargestTensor() as largest:
        unfused.select(*case.index, case.layout, 4, 24)
    assert largest.elements <= CHUNK_ELEMENTS["cpu"] < 4096 * 1024


def test_both_teachers_need_the_same_memory() -> None:
    """`full_csa` adds nothing of the size of the support."""
    case, ids = layer(1024)
    sizes = []
    for teacher in ("full_csa", "compressed_only"):
        _, lse = unfused.attend(*case.attention[:3], ids, case.sink, *case.tail)
        with LargestTensor() as largest:
            unfused.indexer_loss(*case.index, ids, *case.attention, lse, *case.tail, teacher=teacher)[0].backward()  # type: ignore[arg-type]
        sizes.append(largest.elements)
    assert sizes[0] == sizes[1]
