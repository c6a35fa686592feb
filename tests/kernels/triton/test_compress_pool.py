# SPDX-License-Identifier: Apache-2.0
"""The fused pooling of the compressor against the plain functions of csa_model in float64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model.compressor import Compressor
from csa_model.layers import at_least_fp32
from csa_model.row import CompressedWindows, RotaryTables, Row
from kernels import PackedLayout, RowOperations
from tests.model.helpers import tiny_config

# A few times what one rounding of the result costs: 1.7e-3 of the norm in bfloat16, 2e-4 in float16. The interpreter truncates to bfloat16 instead.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}
DOCUMENTS = [0, 1, 3, 4, 5, 8, 0, 21, 16, 2, 6]  # for windows of 4: none, one, more, with and without a tail


@pytest.fixture
def fused(device: str) -> RowOperations:
    from kernels.triton_fused.row_operations import TritonRowOperations

    return TritonRowOperations()


def plain(projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
    """The pooling of a compressor without a backend, from its projections [C * m, 2 * width]."""
    dim = ape.shape[1] // 2 if overlap else ape.shape[1]
    compressor = Compressor(1, dim, ape.shape[0], 1e-6, 1.0)
    assert compressor.overlap == overlap
    values, gates = at_least_fp32(projected).unflatten(0, (-1, ape.shape[0])).chunk(2, dim=-1)
    return compressor.pool(values, gates + ape, starts_document)


def gradients(function: Callable[..., Tensor], projected: Tensor, ape: Tensor, grad: Tensor) -> list[Tensor]:
    """The result of `function`, and its gradients to both operands; what a kernel does not write shows as NaN."""
    leaves = [projected.detach().requires_grad_(), ape.detach().requires_grad_()]
    with poisoned_outputs():
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def compare(fused: RowOperations, projected: Tensor, ape: Tensor, starts: Tensor, overlap: bool) -> None:
    grad = torch.randn(starts.shape[0], ape.shape[1] // (2 if overlap else 1), device=projected.device).to(projected.dtype)
    ours = gradients(lambda p, a: fused.pool_windows(p, a, starts, overlap), projected, ape, grad)
    exact = gradients(lambda p, a: plain(p, a, starts, overlap), projected.double(), ape.double(), grad)
    assert [t.dtype for t in ours] == [projected.dtype, projected.dtype, ape.dtype]
    for a, b in zip(ours, exact, strict=True):
        assert a.shape == b.shape
        assert norm_error(a, b) <= TOLERANCE[projected.dtype]
    again = gradients(lambda p, a: fused.pool_windows(p, a, starts, overlap), projected, ape, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def operands(lengths: list[int], ratio: int, dim: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Projections with large gates, position bias, beginnings of documents, overlap; of a row with 3 tokens of padding."""
    torch.manual_seed(0)
    windows = CompressedWindows.of(PackedLayout.from_lengths(lengths, sum(lengths) + 3, device=device), ratio)
    overlap = ratio == 4
    width = 2 * dim if overlap else dim
    projected = torch.randn(windows.starts_document.shape[0] * ratio, 2 * width, device=device)
    projected[:, width:] *= 3
    return projected.to(dtype), torch.randn(ratio, width, device=device), windows.starts_document, overlap


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("ratio", "dim", "lengths"),
    [
        (4, 24, DOCUMENTS),
        (4, 16, [4, 1, 7] * 70),  # more entries than a tile holds
        (4, 96, [41]),  # three blocks of dims
        (4, 8, [3, 3, 1]),  # no entry at all
        (4, 8, [7]),  # one
        (5, 24, DOCUMENTS),  # a ratio that is no power of two
        (8, 72, DOCUMENTS),
        (16, 20, [16, 50, 3, 33]),  # two lanes
        (20, 20, [19, 61, 45]),  # four, of which some have no slot in some step
        (128, 40, [127, 128, 400]),
        (300, 12, [1500, 299, 700]),  # more slots than a tile holds
    ],
)
def test_pooling_and_its_gradients(device: str, fused: RowOperations, ratio: int, dim: int, lengths: list[int], dtype: torch.dtype) -> None:
    compare(fused, *operands(lengths, ratio, dim, dtype, device))


@pytest.mark.parametrize(("ratio", "lengths"), [(4, [9, 40, 4, 3, 30] * 3), (16, [200, 70, 16]), (300, [2400])])
def test_programs_with_several_tiles_and_a_single_one_add_up(
    device: str, fused: RowOperations, monkeypatch: pytest.MonkeyPatch, ratio: int, lengths: list[int]
) -> None:
    from kernels.triton_fused import compress_pool

    case = operands(lengths, ratio, 12 if ratio == 300 else 40, torch.float32, device)
    for programs in (8, 1):
        monkeypatch.setattr(compress_pool, "PROGRAMS", programs)
        compare(fused, *case)


def test_what_stands_before_a_document_is_not_read(device: str, fused: RowOperations) -> None:
    """NaN in the halves that no entry pools, and behind gates of -inf, reaches neither an entry nor a gradient."""
    projected, ape, starts, overlap = operands(DOCUMENTS, 4, 24, torch.float32, device)
    halves = projected.unflatten(0, (-1, 4)).unflatten(-1, (2, 2, 24))  # [C, m, values or gates, half, D]
    serves_nobody = torch.cat([starts[1:], starts[:1]])
    assert 1 < int(serves_nobody.sum()) < len(starts)
    clean, dirty = projected.clone(), projected.clone()
    for tensor, value in ((clean, 0.0), (dirty, float("nan"))):
        view = tensor.view(halves.shape)
        view[serves_nobody, :, :, 0] = value
        view[:, 2, 1] = -torch.inf
        view[:, 2, 0] = value
    grad = torch.randn(len(starts), 24, device=device)
    ours = gradients(lambda p, a: fused.pool_windows(p, a, starts, overlap), dirty, ape, grad)
    exact = gradients(lambda p, a: plain(p, a, starts, overlap), clean.double(), ape.double(), grad)
    assert (exact[1].view(halves.shape)[serves_nobody, :, :, 0] == 0).all()
    for a, b in zip(ours, exact, strict=True):
        assert norm_error(a, b) <= TOLERANCE[torch.float32]


def test_nothing_stands_before_the_first_entry_of_a_row(device: str, fused: RowOperations) -> None:
    projected, ape, starts, overlap = operands([24], 4, 16, torch.float32, device)
    unmarked, grad = torch.zeros_like(starts), torch.randn(len(starts), 16, device=device)
    results = [gradients(lambda p, a, s=s: fused.pool_windows(p, a, s, overlap), projected, ape, grad) for s in (starts, unmarked)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gates_of_any_size_stay_finite(device: str, fused: RowOperations) -> None:
    projected, ape, starts, overlap = operands([300, 500], 128, 16, torch.float32, device)
    projected[:, 16:] = projected[:, 16:] * 1e4 + 3e4
    grad = torch.randn(starts.shape[0], 16, device=device)
    ours = gradients(lambda p, a: fused.pool_windows(p, a, starts, overlap), projected, ape.zero_(), grad)
    exact = gradients(lambda p, a: plain(p, a, starts, overlap), projected.double(), ape.double(), grad)
    for a, b in zip(ours, exact, strict=True):
        # one slot takes nearly all of the weight, so that the gradient of its gate is a difference that fp32 may round to 0: absolute, not relative
        assert (a - b).norm() <= 1e-6 * grad.norm() * projected[:, :16].abs().max()


def test_a_nan_gate_shows(device: str, fused: RowOperations) -> None:
    projected, ape, starts, overlap = operands([24], 4, 16, torch.float32, device)
    projected[5, 32 + 16] = float("nan")  # second half: token 5 for its own entry, 1
    out = fused.pool_windows(projected, ape, starts, overlap)
    assert out.isnan().nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projected": torch.zeros(8, 64, dtype=torch.float64)}, "float64"),
        ({"projected": torch.zeros(8, 32)}, r"= \[8, 64\], got \[8, 32\]"),
        ({"projected": torch.zeros(4, 64)}, r"= \[8, 64\], got \[4, 64\]"),
        ({"ape": torch.zeros(4, 3)}, r"ape must be \[m, 2D\]"),
        ({"starts_document": torch.ones(2)}, "bool"),
    ],
)
def test_what_does_not_fit_is_refused(fused: RowOperations, changes: dict[str, Tensor], message: str) -> None:
    arguments = {"projected": torch.zeros(8, 64), "ape": torch.zeros(4, 32), "starts_document": torch.ones(2, dtype=torch.bool)} | changes
    with pytest.raises(ValueError, match=message):
        fused.pool_windows(**arguments, overlap=True)


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize("lengths", [[16, 8], [8, 16, 11], [9, 3, 0, 1, 16, 8, 7], [3]])  # whole row, its beginning, gathered rows, no entry
def test_a_compressor_with_it_is_the_plain_one(device: str, fused: RowOperations, ratio: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    ours, exact = Compressor(10, 16, ratio, 1e-6, 0.5, fused).to(device), Compressor(10, 16, ratio, 1e-6, 0.5).to(device, torch.float64)
    torch.nn.init.normal_(ours.ape)
    exact.load_state_dict(ours.state_dict())
    layout = PackedLayout.from_lengths(lengths, device=device)
    x, grad, results = torch.randn(sum(lengths), 10, device=device), None, []
    for module, dtype in ((ours, torch.float32), (exact, torch.float64)):
        row, leaf = Row(layout, RotaryTables(tiny_config()), {ratio}, dtype), x.to(dtype).requires_grad_()
        out = module(leaf, row)
        grad = torch.randn_like(out) if grad is None else grad.to(dtype)
        results.append([out.detach(), *torch.autograd.grad(out, [leaf, *module.parameters()], grad)])
    for a, b in zip(*results, strict=True):
        assert norm_error(a, b) <= 3 * TOLERANCE[torch.float32]


def test_autocast_and_recomputation_repeat_bit_for_bit_and_weights_get_their_own_gradients(device: str, fused: RowOperations) -> None:
    torch.manual_seed(0)
    module = Compressor(24, 16, 4, 1e-6, 0.3, fused).to(device)
    x, results = torch.randn(23, 24, device=device).bfloat16(), []
    row = Row(PackedLayout.from_lengths([9, 14], device=device), RotaryTables(tiny_config()), {4}, torch.float32)
    for recompute in (False, True, False):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            out = checkpoint(module, leaf, row, use_reentrant=False) if recompute else module(leaf, row)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
        results.append([out.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
