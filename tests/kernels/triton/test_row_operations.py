# SPDX-License-Identifier: Apache-2.0
"""Fused norms, rotations and hyper-connection maps against the plain functions of csa_model in float64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model import rotary
from csa_model.attention import Attention
from csa_model.compressor import Compressor
from csa_model.config import HyperConnectionsConfig
from csa_model.decoder import Decoder
from csa_model.hyper_connections import HyperConnection
from csa_model.indexer import Indexer
from csa_model.layers import RMSNorm, rms_norm
from kernels import PackedLayout, RowOperations, get_backend
from kernels.unfused import UnfusedBackend
from tests.kernels.triton.conftest import HAS_TRITON
from tests.model.helpers import SPARSE, build, next_of, random_tokens, tiny_config

if HAS_TRITON:
    from kernels.triton_fused import hyper_maps, norm_rotate

EPS = 1e-6
# A few times what one rounding of the result costs: 1.7e-3 of the norm in bfloat16, 2e-4 in float16. The interpreter truncates to bfloat16 instead.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 5e-3}


@pytest.fixture
def fused(device: str) -> RowOperations:
    from kernels.triton_fused.row_operations import TritonRowOperations

    return TritonRowOperations()


def rotation_of(tokens: int, pairs: int, device: str) -> Tensor:
    angles = 300 * torch.rand(tokens, pairs, dtype=torch.float64)
    return torch.polar(torch.ones_like(angles), angles).to(device)


def compare(ours: Callable[..., Tensor], exact: Callable[..., Tensor], tensors: list[Tensor], tolerance: float) -> None:
    """Value and gradients of `ours` in the dtypes of `tensors`, those of `exact` in float64."""
    results, grad = [], None
    for function, dtype in ((ours, None), (exact, torch.float64)):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
        with poisoned_outputs():
            out = function(*leaves)
            grad = torch.randn_like(out) if grad is None else grad.to(out.dtype)
            results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert results[0][0].dtype == tensors[0].dtype
    for a, b in zip(*results, strict=True):
        assert norm_error(a.detach(), b.detach()) <= tolerance


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((13, 3, 24), 8),  # three heads, a width that is no power of two, more than one block of rows
        ((5, 2, 16), 16),  # every dim rotates
        ((37, 96), 0),  # a norm alone
        ((1, 512), 64),
        ((3, 4, 7), 0),  # odd width
        ((2, 3000), 2),
        ((0, 3, 8), 4),
        ((0, 8), 0),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_in_one(device: str, fused: RowOperations, shape: tuple[int, ...], turned: int, weighted: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotation = rotation_of(shape[0], turned // 2, device) if turned else None
    tensors = [torch.randn(shape, device=device).to(dtype)] + [torch.randn(shape[-1], device=device)] * weighted

    def ours(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return fused.norm_rotate(x, weight, EPS, None if rotation is None else rotation.to(torch.complex64))

    def exact(x: Tensor, weight: Tensor | None = None) -> Tensor:
        out = rms_norm(x, weight, EPS)
        return out if rotation is None else rotary.rotate(out, rotation)

    compare(ours, exact, tensors, TOLERANCE[dtype])


def test_more_blocks_than_programs_and_more_sums_than_are_added_at_once_add_up(
    device: str, fused: RowOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_rotate, "PROGRAMS", 2)
    monkeypatch.setattr(hyper_maps, "PARTIALS", 2)
    torch.manual_seed(0)
    x, weight = torch.randn(23, 512, device=device), torch.randn(512, device=device)
    compare(lambda x, w: fused.norm_rotate(x, w, EPS), lambda x, w: rms_norm(x, w, EPS), [x, weight], TOLERANCE[torch.float32])
    compare_maps(device, 75, 4, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_alone_is_out_of_place_and_takes_strides(device: str, fused: RowOperations, dtype: torch.dtype, inverse: bool) -> None:
    torch.manual_seed(0)
    rotation = rotation_of(11, 5, device)
    x = torch.randn(3, 11, 24, device=device).to(dtype).transpose(0, 1)
    before = x.clone()
    compare(lambda x: fused.rotate(x, rotation.to(torch.complex64), inverse), lambda x: rotary.rotate(x, rotation, inverse), [x], TOLERANCE[dtype])
    assert torch.equal(x, before)
    assert torch.equal(fused.rotate(x, rotation.to(torch.complex64))[..., :14], x[..., :14])  # what does not turn passes bit for bit
    strided = torch.randn(11, 48, device=device).to(dtype)[:, ::2]
    compare(
        lambda x: fused.norm_rotate(x[:, None].expand(-1, 2, -1), None, EPS, rotation.to(torch.complex64)),
        lambda x: rotary.rotate(rms_norm(x[:, None].expand(-1, 2, -1), None, EPS), rotation),
        [strided],
        2 * TOLERANCE[dtype],
    )


def compare_maps(device: str, tokens: int, streams: int, iterations: int, eps: float = EPS) -> None:
    """The gradient of the maps from given gradients, against autograd in float64."""
    config = tiny_config(hyper_connections=HyperConnectionsConfig(hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=eps))
    rows = streams * (2 + streams)
    tensors = [2 * torch.randn(tokens, rows, device=device), 0.5 + torch.rand(3, device=device), torch.randn(rows, device=device)]
    grads = [torch.randn(tokens, *shape, device=device) for shape in ((streams,), (streams,), (streams, streams))]
    leaves = [t.double().requires_grad_() for t in tensors]
    read, write, comb = HyperConnection(config).maps_of(*leaves)
    exact = torch.autograd.grad((read, write, comb), leaves, [g.double() for g in (*grads[:2], grads[2].permute(1, 2, 0))])
    with poisoned_outputs():
        ours = hyper_maps.maps_backward(*tensors, *grads, iterations, eps)
    for a, b in zip(ours, exact, strict=True):
        assert norm_error(a, b) <= 2e-6


@pytest.mark.parametrize(("tokens", "streams", "iterations"), [(13, 4, 20), (1, 4, 20), (0, 4, 20), (5, 4, 1), (33, 1, 3), (11, 2, 20), (3, 8, 20)])
def test_gradient_of_the_maps(device: str, tokens: int, streams: int, iterations: int) -> None:
    torch.manual_seed(0)
    compare_maps(device, tokens, streams, iterations)


def test_gradient_of_the_maps_with_an_eps_that_shows(device: str) -> None:
    torch.manual_seed(0)
    compare_maps(device, 5, 4, 2, eps=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.norm_rotate(torch.zeros(2, 8, dtype=torch.float64), None, EPS), "float64"),
        (lambda f: f.norm_rotate(torch.zeros(2, 8), torch.ones(7), EPS), r"weight must be \[8\]"),
        (lambda f: f.rotate(torch.zeros(2, 8), torch.zeros(3, 2, dtype=torch.complex64)), r"complex64 \[2, r/2\]"),
        (lambda f: f.rotate(torch.zeros(2, 8), torch.zeros(2, 5, dtype=torch.complex64)), "last 10 of 8"),
    ],
)
def test_what_does_not_fit_is_refused(fused: RowOperations, call: Callable[[RowOperations], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(fused)


class FusedRows(UnfusedBackend):
    """The reference's attention with the fused operations around it."""

    def row_operations(self) -> RowOperations:
        from kernels.triton_fused.row_operations import TritonRowOperations

        return TritonRowOperations()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_decoder_step_is_the_plain_one(device: str, monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    connections = HyperConnectionsConfig(hc_sinkhorn_iters=3)
    config = tiny_config(recompute=recompute, num_hidden_layers=2, compress_ratios=(4, 8, 0), hyper_connections=connections)
    lengths, tokens = [9, 1, 2], random_tokens(13).to(device)
    targets = next_of(tokens, lengths)
    results = []
    for backend, dtype in ((FusedRows(), torch.float32), (UnfusedBackend(), torch.float64)):
        monkeypatch.setattr("tests.model.helpers.get_backend", lambda name, backend=backend: backend)
        decoder = build(config).to(device, dtype)
        out = decoder(tokens, PackedLayout.from_lengths(lengths, 13, device=device), SPARSE, targets)
        assert out.mtp_hidden is not None
        (out.hidden.square().mean() + out.mtp_hidden.square().mean() + sum(r.kl_sum for r in out.indexer)).backward()
        results.append({"hidden": out.hidden.detach()} | {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, exact in results[1].items():
        assert (results[0][name] - exact).abs().max() <= 3e-4 * exact.abs().max() + 1e-7, name


def test_a_model_built_for_a_gpu_takes_them_and_the_composition_says_so(device: str) -> None:
    for device_type, name in (("cuda", "norms, rotation, hyper-connections of 1, 2, 4, 8 streams"), ("cpu", "PyTorch")):
        if device_type == "cpu" and device != "cpu":
            continue  # there the backend takes tensors of the GPU only
        decoder = Decoder(tiny_config(index_head_dim=16), get_backend("triton"), device_type=device_type)
        parts = [m for m in decoder.modules() if isinstance(m, (RMSNorm, Compressor, Indexer, HyperConnection, Attention))]
        assert {m.fused is not None for m in parts} == {device_type == "cuda"}
        assert decoder.backend.describe()["row operations"].startswith(name)
