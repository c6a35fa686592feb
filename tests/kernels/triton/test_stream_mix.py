# SPDX-License-Identifier: Apache-2.0
"""Fused hyper-connections against the plain modules of csa_model in float64: values, gradients, and what autograd may do with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.csa_gate_checks import norm_error, poisoned_outputs
from csa_model.config import HyperConnectionsConfig
from csa_model.hyper_connections import HyperConnection, HyperHead
from kernels import RowOperations
from tests.model.helpers import tiny_config

# A few roundings of the dtype. The weight vectors' gradients are sums over all tokens. The interpreter truncates to bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NAMES = ("x", "new", "d_streams", "d_gain", "d_fn", "d_scale", "d_base")


@pytest.fixture
def fused(device: str) -> RowOperations:
    from kernels.triton_fused.row_operations import TritonRowOperations

    return TritonRowOperations()


def connection(fused: RowOperations | None, device: str, n: int, d: int, iterations: int = 4, eps: float = 1e-3) -> HyperConnection:
    """A connection whose maps depend on the streams."""
    torch.manual_seed(1)
    hyper = HyperConnectionsConfig(hc_mult=n, hc_sinkhorn_iters=iterations, hc_eps=eps)
    module = HyperConnection(tiny_config(hidden_size=d, hyper_connections=hyper), fused)
    torch.nn.init.normal_(module.fn, std=(n * d) ** -0.5)
    torch.nn.init.normal_(module.scale)
    torch.nn.init.normal_(module.base)
    return module.to(device)


def inputs(tokens: int, n: int, d: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Streams of different sizes, a gain, and the gradients of x and of the new streams."""
    torch.manual_seed(2)
    streams = torch.randn(tokens, n, d) * torch.logspace(-1, 1, tokens)[:, None, None]
    tensors = streams, torch.randn(d), torch.randn(tokens, d), torch.randn(tokens, n, d)
    return tuple(t.to(device, dtype) for t in tensors)  # type: ignore[return-value]


def through(module: HyperConnection, streams: Tensor, gain: Tensor, d_x: Tensor, d_new: Tensor) -> list[Tensor]:
    """x, the new streams and all gradients of a sublayer y = x * gain."""
    leaves = [streams.detach().requires_grad_(), gain.detach().requires_grad_(), module.fn, module.scale, module.base]
    with poisoned_outputs():
        x, put_back = module.around(leaves[0])
        new = put_back(x * leaves[1])
        return [x, new, *torch.autograd.grad([x, new], leaves, [d_x, d_new])]


def agree(ours: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        assert a.dtype == (torch.float32 if name in NAMES[-3:] else dtype)
        assert norm_error(a.detach(), b.detach()) <= TOLERANCE[dtype], (name, norm_error(a.detach(), b.detach()))


@pytest.mark.parametrize(
    ("tokens", "n", "d", "dtype"),
    [
        (37, 4, 64, torch.float32),  # no tile is full
        (64, 4, 16, torch.float32),  # one that is
        (9, 4, 7, torch.float32),  # no width of anything
        (1, 4, 24, torch.float32),
        (70, 2, 48, torch.float32),
        (9, 1, 40, torch.float32),
        (19, 8, 144, torch.float32),
        (5, 4, 528, torch.float32),  # several chunks of every kernel
        (33, 4, 272, torch.bfloat16),
        (17, 8, 32, torch.float16),
    ],
)
def test_a_sublayer_is_the_plain_one(device: str, fused: RowOperations, tokens: int, n: int, d: int, dtype: torch.dtype) -> None:
    ours, exact = connection(fused, device, n, d), connection(None, device, n, d).double()
    assert ours.fused is fused
    tensors = inputs(tokens, n, d, dtype, device)
    agree(through(ours, *tensors), through(exact, *(t.double() for t in tensors)), dtype)


def test_shares_of_the_tokens_add_up_in_a_fixed_order(device: str, fused: RowOperations, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton_fused import stream_mix

    tensors = inputs(101, 4, 48, torch.float32, device)
    exact = through(connection(None, device, 4, 48).double(), *(t.double() for t in tensors))
    for programs in (1, 4, 528):
        monkeypatch.setattr(stream_mix, "PROGRAMS", programs)
        ours = through(connection(fused, device, 4, 48), *tensors)
        agree(ours, exact, torch.float32)
        again = through(connection(fused, device, 4, 48), *tensors)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("use", ["x", "new", "both new"])
def test_every_output_may_be_used_alone_or_twice(device: str, fused: RowOperations, use: str) -> None:
    streams, y, d_x, d_new = inputs(11, 4, 24, torch.float32, device)[:4]
    y = torch.randn_like(d_x)
    results = []
    for module, dtype in ((connection(fused, device, 4, 24), torch.float32), (connection(None, device, 4, 24).double(), torch.float64)):
        leaves = [streams.to(dtype).requires_grad_(), y.to(dtype).requires_grad_(), module.fn, module.scale, module.base]
        x, put_back = module.around(leaves[0])
        loss = (x * d_x.to(dtype)).sum() if use == "x" else (put_back(leaves[1]) * d_new.to(dtype)).sum()
        if use == "both new":
            loss = loss + put_back(leaves[1].square()).square().sum()
        results.append(torch.autograd.grad(loss, leaves, allow_unused=use == "x"))
    for ours, exact in zip(*results, strict=True):
        assert (ours is None) == (exact is None)
        assert ours is None or norm_error(ours, exact) <= TOLERANCE[torch.float32]


def test_frozen_parts_get_no_gradient_and_leave_the_others(device: str, fused: RowOperations) -> None:
    tensors = inputs(11, 4, 24, torch.float32, device)
    everything = through(connection(fused, device, 4, 24), *tensors)
    module = connection(fused, device, 4, 24)
    module.fn.requires_grad_(False)
    x, put_back = module.around(tensors[0])  # streams that need no gradient, as behind a frozen embedding
    grads = torch.autograd.grad([x, put_back(x * tensors[1])], [module.scale, module.base], list(tensors[2:]))
    assert all(torch.equal(a, b) for a, b in zip(grads, everything[-2:], strict=True))
    with torch.no_grad():
        assert torch.equal(module.around(tensors[0])[0], everything[0])


def test_streams_that_are_one_embedding_repeated(device: str, fused: RowOperations) -> None:
    embedding, gain, d_x, d_new = inputs(13, 4, 24, torch.float32, device)
    results = []
    for module, dtype in ((connection(fused, device, 4, 24), torch.float32), (connection(None, device, 4, 24).double(), torch.float64)):
        leaf = embedding[:, 0].to(dtype).requires_grad_()
        x, put_back = module.around(leaf[:, None].expand(-1, 4, -1))
        y = (x * gain.to(dtype)).t().contiguous().t()  # strided
        (grad,) = torch.autograd.grad([x, put_back(y)], [leaf], [d_x.to(dtype), d_new.transpose(0, 1).contiguous().transpose(0, 1).to(dtype)])
        results.append(grad)
    assert norm_error(*results) <= TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_maps_stay_finite_and_nearly_doubly_stochastic(device: str, fused: RowOperations) -> None:
    module = connection(fused, device, 4, 24, iterations=20, eps=1e-6)
    with torch.no_grad():
        module.scale.fill_(200.0)
    streams, _, d_x, d_new = inputs(21, 4, 24, torch.float32, device)
    x, put_back = module.around(streams.requires_grad_())
    new = put_back(x)
    grads = torch.autograd.grad([x, new], [streams, module.fn, module.scale, module.base], [d_x, d_new])
    assert all(t.isfinite().all() for t in (x, new, *grads))
    with torch.no_grad():
        ones = torch.ones_like(streams)  # every new stream is then its column of comb, summed
        module.scale[:2], module.base[:8] = 0.0, 0.0
        assert (module.around(ones)[1](torch.zeros_like(x)) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("iterations", [1, 20])
def test_any_number_of_normalisations(device: str, fused: RowOperations, iterations: int) -> None:
    tensors = inputs(9, 4, 24, torch.float32, device)
    ours, exact = connection(fused, device, 4, 24, iterations), connection(None, device, 4, 24, iterations).double()
    agree(through(ours, *tensors), through(exact, *(t.double() for t in tensors)), torch.float32)


def test_no_tokens(device: str, fused: RowOperations) -> None:
    grads = through(connection(fused, device, 4, 24), *inputs(0, 4, 24, torch.float32, device))
    assert [tuple(g.shape) for g in grads[:4]] == [(0, 24), (0, 4, 24), (0, 4, 24), (24,)]
    assert not any(g.any() for g in grads[4:])
    head = HyperHead(tiny_config(), fused).to(device)
    streams = torch.zeros(0, 4, 24, device=device, requires_grad=True)
    assert not any(g.any() for g in torch.autograd.grad(head(streams).sum(), [streams, *head.parameters()]))


@pytest.mark.parametrize(("n", "d", "dtype"), [(4, 40, torch.float32), (8, 24, torch.float32), (1, 16, torch.float32), (4, 272, torch.bfloat16)])
def test_the_closing_head_is_the_plain_one(device: str, fused: RowOperations, n: int, d: int, dtype: torch.dtype) -> None:
    streams, _, d_x, _ = inputs(35, n, d, dtype, device)
    results = []
    for backend, kind in ((fused, dtype), (None, torch.float64)):
        torch.manual_seed(3)
        head = HyperHead(tiny_config(hidden_size=d, hyper_connections=HyperConnectionsConfig(hc_mult=n, hc_eps=0.03)), backend).to(device)
        for p in head.parameters():
            torch.nn.init.normal_(p, std=(n * d) ** -0.5 if p is head.fn else 1.0)
        if backend is None:
            head.double()
        leaf = streams.detach().to(kind).requires_grad_()
        with poisoned_outputs():
            x = head(leaf)
            results.append([x.detach(), *torch.autograd.grad(x, [leaf, *head.parameters()], d_x.to(kind))])
    assert results[0][0].dtype == dtype
    for ours, exact in zip(*results, strict=True):
        assert norm_error(ours, exact) <= TOLERANCE[dtype]


def test_autocast_and_recomputation_repeat_bit_for_bit(device: str, fused: RowOperations) -> None:
    module = connection(fused, device, 4, 24)
    streams = torch.randn(7, 4, 24, device=device).bfloat16()

    def sublayer(streams: Tensor, weight: Tensor) -> Tensor:
        x, put_back = module.around(streams)
        return put_back(fused.norm_rotate(x, weight, 1e-6))

    results = []
    for recompute in (False, True, False):
        leaves = [streams.clone().requires_grad_(), torch.ones(24, device=device, requires_grad=True)]
        with torch.autocast(device, torch.bfloat16):
            out = checkpoint(sublayer, *leaves, use_reentrant=False) if recompute else sublayer(*leaves)
        assert out.dtype == torch.bfloat16
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [*leaves, module.fn, module.scale, module.base])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_compiler_and_other_numbers_of_streams_get_the_plain_form(device: str, fused: RowOperations, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hyper_connections=HyperConnectionsConfig(hc_mult=3))
    assert HyperConnection(config, fused).fused is None
    assert HyperHead(config, fused).fused is None
    module, head, streams = connection(fused, device, 4, 24), HyperHead(tiny_config(), fused).to(device), torch.randn(5, 4, 24, device=device)
    fast = [module.around(streams)[0], head(streams)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for name in ("around_sublayer", "collapse_streams"):
        monkeypatch.setattr(type(fused), name, None)
    for a, b in zip(fast, [module.around(streams)[0], head(streams)], strict=True):
        torch.testing.assert_close(a, b)


def test_a_grid_takes_any_number_of_tokens(device: str, fused: RowOperations, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first dimension of a grid goes beyond 65,535."""
    from kernels.triton_fused import column_sum, hyper_maps, stream_kernels

    grids = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids[self.name] = grid
            return lambda *operands, **sizes: None

    for module in (stream_kernels, hyper_maps, column_sum):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel(name))
    tokens, n, d = 2**20, 8, 48
    leaves = [torch.empty(shape, device="meta", requires_grad=True) for shape in ((tokens, n, d), (n * (2 + n), n * d), (3,), (n * (2 + n),))]
    x, put_back = fused.around_sublayer(*leaves, 2, 1e-6, 1e-6)
    out = put_back(x)
    torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert len(grids) == 9
    assert all(size <= 65_535 for grid in grids.values() for size in grid[1:]), grids


def sublayer_of(f: RowOperations, n: int, d: int = 8, **changed: Tensor) -> Callable[[Tensor], Tensor]:
    rows = n * (2 + n)
    operands = {"streams": torch.zeros(2, n, d), "fn": torch.zeros(rows, n * d), "scale": torch.zeros(3), "base": torch.zeros(rows)} | changed
    return f.around_sublayer(*operands.values(), 2, 1e-6, 1e-6)[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: sublayer_of(f, 3), "1, 2, 4, 8 streams"),
        (lambda f: sublayer_of(f, 4, streams=torch.zeros(2, 4, 8).double()), "float64"),
        (lambda f: sublayer_of(f, 4, streams=torch.zeros(2, 32)), r"\[T, n, d\]"),
        (lambda f: sublayer_of(f, 4, fn=torch.zeros(24, 31)), r"fn must be \[24, 32\]"),
        (lambda f: sublayer_of(f, 4, scale=torch.zeros(1)), r"scale \[3\]"),
        (lambda f: sublayer_of(f, 4, base=torch.zeros(24).half()), "must be float32"),
        (lambda f: sublayer_of(f, 4)(torch.zeros(2, 7)), r"must be \[2, 8\]"),
        (lambda f: f.around_sublayer(torch.zeros(2, 1, 8), torch.zeros(3, 8), torch.zeros(3), torch.zeros(3), 0, 1e-6, 1e-6), "1 or more"),
        (
            lambda f: f.collapse_streams(torch.zeros(2, 4, 8), torch.zeros(24, 32), torch.zeros(1), torch.zeros(4), 1e-6, 1e-6),
            r"fn must be \[4, 32\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(device: str, fused: RowOperations, call: Callable[[RowOperations], object], message: str) -> None:
    with torch.device(device), pytest.raises(ValueError, match=message):
        call(fused)
