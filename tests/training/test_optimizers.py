# SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW in one optimizer."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from csa_model import muon, optimizers
from csa_model.config import OptimizerConfig
from csa_model.muon import NEWTON_SCHULZ_COEFFICIENTS, Coefficients, batches, orthogonalize
from csa_model.optimizers import MuonAdamW, build_optimizer

MUON = {"name": "m", "algorithm": "muon"}


def _parameters(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def _give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (24, 256), (40, 40), (1, 17)])
def test_orthogonalised_matrix_has_unit_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    out = orthogonalize(matrix)[0]
    # A nearly singular square matrix needs more steps than 8 for its least singular value, so the bound is on the mean square.
    assert out.square().mean().sqrt().item() * math.sqrt(max(shape)) == pytest.approx(1.0, abs=1e-3 if shape[0] != shape[1] else 2e-2)
    if shape[0] != shape[1]:
        assert (torch.linalg.svdvals(out) - 1).abs().max() < 2e-3


def _by_definition(x: Tensor) -> Tensor:
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=1e-30)
    for a, b, c in NEWTON_SCHULZ_COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def _spectrum(*values: float, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, len(values), generator=generator, dtype=torch.float64))[0] for n in (len(values), 40))
    return (left * torch.tensor(values, dtype=torch.float64)) @ right.mT


def _cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "random": torch.randn(24, 40, generator=generator, dtype=torch.float64),
        "low rank": torch.randn(24, 3, generator=generator, dtype=torch.float64) @ torch.randn(3, 40, generator=generator, dtype=torch.float64),
        "ill-conditioned": _spectrum(*[10 ** (-i / 8) for i in range(24)]),
        "one large": _spectrum(1.0, *[0.01] * 23),
        "padded": torch.nn.functional.pad(torch.randn(20, 33, generator=generator, dtype=torch.float64), (0, 7, 0, 4)),
        "zero": torch.zeros(24, 40, dtype=torch.float64),
    }


def test_iteration_is_its_polynomial() -> None:
    matrices = torch.stack(list(_cases().values()))
    before = matrices.clone()
    expected = _by_definition(matrices)
    torch.testing.assert_close(orthogonalize(matrices), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(orthogonalize(matrices.mT), expected.mT, rtol=1e-9, atol=1e-10)
    assert torch.equal(matrices, before)
    for name, (matrix, theirs) in zip(_cases(), zip(matrices.float(), expected, strict=True), strict=True):
        difference = (orthogonalize(matrix[None])[0] - theirs).norm()
        # what is singular but for rounding grows by a^8 = 20,000: there the rounding of fp32 shows
        assert difference <= (2e-2 if name == "low rank" else 1e-4) * theirs.norm(), name


@pytest.mark.parametrize("name", ["random", "ill-conditioned", "one large", "padded"])
def test_bfloat16_iteration_has_unit_singular_values(name: str) -> None:
    matrix = _cases()[name]
    values = torch.linalg.svdvals(orthogonalize(matrix[None].bfloat16())[0].double())
    rank = 20 if name == "padded" else 24
    assert (values[:rank] - 1).abs().max() < 0.01
    assert not values[rank:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_and_columns_of_zeros_stay_exactly_zero(dtype: torch.dtype) -> None:
    padded, nothing = orthogonalize(torch.stack([_cases()["padded"], _cases()["zero"]]).to(dtype))
    assert padded[:20, :33].all()
    assert not padded[20:].any()
    assert not padded[:, 33:].any()
    assert not nothing.any()


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_are_normalised_with_one_rounding(turned: bool) -> None:
    (matrices,) = _parameters((3, 40, 24))
    matrices = matrices.detach() * torch.tensor([1.0, 1e-12, 0.0]).view(3, 1, 1)
    exact = matrices.double()
    exact = exact / torch.linalg.vector_norm(exact, dim=(1, 2), keepdim=True).clamp(min=1e-30)
    batch = torch.full((3, 30, 50), 7.0, dtype=torch.bfloat16)
    out = batch[:, :24, :40].mT if turned else torch.full((3, 40, 24), 7.0, dtype=torch.bfloat16)
    muon.normalize(matrices, out)
    assert ((out.double() - exact).abs() <= 1.0001 * 2**-8 * exact.abs()).all()  # half the distance of neighbours
    if turned:
        assert (batch[:, 24:] == 7).all()
        assert (batch[:, :, 40:] == 7).all()


def test_parameters_of_one_scale_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, float, float]] = []
    apply = optimizers._decay_and_add

    def spy(params: list[Tensor], updates: list[Tensor], decay: float, scale: float) -> None:
        calls.append((len(params), decay, scale))
        apply(params, updates, decay, scale)

    monkeypatch.setattr(optimizers, "_decay_and_add", spy)
    params = _parameters((8, 16), (16, 4), (2, 16, 16), (8, 32), (16, 2))
    _give_gradients(params, 1)
    MuonAdamW([{**MUON, "params": params[:4], "lr": 0.1, "weight_decay": 0.2}, {**MUON, "params": params[4:], "lr": 0.1}]).step()
    assert [count for count, *_ in calls] == [3, 1, 1]  # sides of 16, of 32, and without decay
    assert [scale for *_, scale in calls] == pytest.approx([0.018 * 4, 0.018 * 32**0.5, 0.018 * 4])


def test_iteration_copies_no_operand() -> None:
    matrices = _cases()["random"][None].float()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        orthogonalize(matrices)
    events = list(profiler.events())
    names, steps = [event.name for event in events], len(NEWTON_SCHULZ_COEFFICIENTS)
    assert (names.count("aten::bmm"), names.count("aten::baddbmm")) == (2 * steps, steps)
    copied = [event.input_shapes[0] for event in events if event.name == "aten::copy_"]
    assert not [shape for shape in copied if shape]  # numbers without axes are what is added to the diagonals


def test_update_has_root_mean_square_018_times_lr() -> None:
    (p,) = _parameters((32, 64))
    before = p.detach().clone()
    _give_gradients([p], 1)
    MuonAdamW([{**MUON, "params": [p], "lr": 0.5}]).step()
    assert (p.detach() - before).square().mean().sqrt().item() == pytest.approx(0.18 * 0.5, rel=1e-3)


def test_decay_is_decoupled_and_scaled_by_the_learning_rate() -> None:
    (p,) = _parameters((8, 8))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    MuonAdamW([{**MUON, "params": [p], "lr": 0.5, "weight_decay": 0.1}]).step()
    torch.testing.assert_close(p.detach(), before * (1 - 0.05))


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 0.02), (torch.bfloat16, 0.04)])
def test_equals_torch_muon_at_its_own_settings(shape: tuple[int, int], dtype: torch.dtype | None, tolerance: float) -> None:
    ours, theirs = _parameters(shape)[0], _parameters(shape)[0]
    coefficients = ((3.4445, -4.7750, 2.0315),) * 5
    group = {**MUON, "params": [ours], "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = MuonAdamW([group], update_rms=0.2, coefficients=coefficients, newton_schulz_dtype=dtype)
    oracle = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        before = theirs.detach().clone()
        for p, o in ((ours, optimizer), (theirs, oracle)):
            _give_gradients([p], step)
            o.step()
        update = (theirs.detach() - before).norm()
        # the oracle iterates in bfloat16 only and rounds elsewhere; its five steps magnify roundings, for they stop short of 1
        assert (ours - theirs).norm() < tolerance * update * (step + 1)


def test_one_batch_of_stacks_blocks_and_single_matrices_equals_a_loop() -> None:
    shapes = [(16, 24), (24, 16), (4, 16, 24), (3, 24, 16), (32, 24), (5, 7)]
    blocks = [1, 1, 1, 1, 2, 1]  # the fifth holds two matrices [16, 24] as blocks of rows
    batched, single = _parameters(*shapes, dtype=torch.float64), _parameters(*shapes, dtype=torch.float64)
    optimizer = MuonAdamW([{**MUON, "params": batched, "matrices": blocks, "lr": 0.1}])
    buffers = [torch.zeros_like(p) for p in single]
    for step in range(3):
        _give_gradients(batched, step)
        _give_gradients(single, step)
        optimizer.step()
        with torch.no_grad():
            for p, buffer, count in zip(single, buffers, blocks, strict=True):
                buffer.mul_(0.95).add_(p.grad)
                update = p.grad + 0.95 * buffer
                for target, matrix in zip(_matrices(p, count), _matrices(update, count), strict=True):
                    target.sub_(0.1 * 0.18 * math.sqrt(max(matrix.shape)) * orthogonalize(matrix[None])[0])
    for p, q in zip(batched, single, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def _matrices(t: Tensor, blocks: int) -> list[Tensor]:
    return list(t) if t.ndim == 3 else list(t.detach().chunk(blocks))


def test_small_batches_join_the_next_larger_one_up_to_the_limit() -> None:
    counts = {(16, 24): 2, (24, 16): 3, (8, 24): 4, (4, 8): 5, (64, 8): 1}
    apart = {(16, 24): [(16, 24), (24, 16)], (8, 24): [(8, 24)], (4, 8): [(4, 8)], (8, 64): [(64, 8)]}
    assert batches(counts, 0) == apart
    assert batches(counts, 5 * 8 * 24 - 1) == apart
    assert batches(counts, 5 * 8 * 24) == {(16, 24): [(16, 24), (24, 16)], (8, 24): [(8, 24), (4, 8)], (8, 64): [(64, 8)]}
    assert batches(counts, 9 * 16 * 24) == {(16, 24): [(16, 24), (24, 16), (8, 24), (4, 8)], (8, 64): [(64, 8)]}
    assert batches({(8, 8): 1}, 10**9) == {(8, 8): [(8, 8)]}


def test_padding_changes_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(16, 24), (4, 24, 16), (12, 7), (5, 9), (2, 9, 5), (32, 30)]
    blocks, results, sizes = [1, 1, 3, 1, 1, 2], [], []

    def spy(batch: Tensor, coefficients: Coefficients) -> Tensor:  # without a backend's form
        sizes[-1].append(tuple(batch.shape))
        return iterate(batch, coefficients)

    iterate = muon.newton_schulz
    monkeypatch.setattr(muon, "newton_schulz", spy)
    for limit in (0, 10**6):
        sizes.append([])
        monkeypatch.setattr(muon, "padded_elements", lambda device, limit=limit: limit)
        params = _parameters(*shapes, dtype=torch.float64)
        groups = [
            {**MUON, "params": params[:3], "matrices": blocks[:3], "lr": 0.1},
            {**MUON, "params": params[3:], "matrices": blocks[3:], "lr": 0.3},
        ]
        optimizer = MuonAdamW(groups)
        for step in range(2):
            _give_gradients(params, step)
            optimizer.step()
        results.append(params)
    assert len(sizes[0]) == 2 * 4
    assert sizes[1] == 2 * [(13, 16, 30)]
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def test_every_group_has_its_own_momentum_rate_and_decay() -> None:
    options = [(0.1, 0.2, 0.95), (0.1, 0.0, 0.95), (0.3, 0.2, 0.5), (0.3, 0.2, 0.0), (0.0, 0.2, 0.9)]
    ours, plain = _parameters(*[(6, 9)] * 5, (9, 6), dtype=torch.float64), _parameters(*[(6, 9)] * 5, (9, 6), dtype=torch.float64)
    members, options = [[p] for p in ours[:5]], [*options, options[0]]
    members[0].append(ours[5])
    start, keys = ours[4].detach().clone(), ("lr", "weight_decay", "momentum")
    optimizer = MuonAdamW([{**MUON, "params": ps, **dict(zip(keys, o, strict=True))} for ps, o in zip(members, options, strict=False)])
    buffers = [torch.zeros_like(p) for p in plain]
    for step in range(3):
        _give_gradients(ours, step)
        _give_gradients(plain, step)
        given = [p.grad.clone() for p in ours]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, given, strict=True))
        with torch.no_grad():
            for p, buffer, (lr, decay, momentum) in zip(plain, buffers, options, strict=True):
                buffer.mul_(momentum).add_(p.grad)
                direction = orthogonalize((p.grad + momentum * buffer)[None])[0]
                p.mul_(1 - lr * decay).sub_(lr * 0.18 * 3 * direction)
    for p, q, buffer in zip(ours, plain, buffers, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], buffer, rtol=1e-12, atol=1e-14)
    assert torch.equal(ours[4], start)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_gradients_may_lie_in_memory_as_they_like(algorithm: str) -> None:
    results = []
    for transposed in (False, True):
        (p,) = _parameters((6, 9))
        _give_gradients([p], 1)
        if transposed:
            p.grad = p.grad.mT.contiguous().mT
        MuonAdamW([{"name": "x", "algorithm": algorithm, "params": [p], "lr": 0.1}]).step()
        results.append(p)
    assert torch.equal(*results)


def test_an_expert_without_tokens_moves_nothing_and_disturbs_no_other() -> None:
    (stack,) = _parameters((3, 8, 12))
    (alone,) = _parameters((3, 8, 12))
    _give_gradients([stack, alone], 1)
    alone.grad = stack.grad.clone()
    stack.grad[1] = 0
    before = stack.detach().clone()
    for p in (stack, alone):
        MuonAdamW([{**MUON, "params": [p], "lr": 0.1}]).step()
    assert torch.equal(stack[1], before[1])
    torch.testing.assert_close(stack[::2], alone[::2])


@pytest.mark.parametrize("size", [1e-15, 1e-18, 1e-22, 1e-25, 1e-29, 1e-35])
def test_a_momentum_that_has_all_but_decayed_does_not_overflow(size: float) -> None:
    """An expert that has had no token for hundreds of steps: its squares are no number of fp32 any more, its momentum still is."""
    (stack,) = _parameters((3, 8, 12))
    optimizer = MuonAdamW([{**MUON, "params": [stack], "lr": 0.1}])
    _give_gradients([stack], 1)
    optimizer.step()
    optimizer.state[stack]["momentum_buffer"][1] = size * torch.randn(8, 12, generator=torch.Generator().manual_seed(2))
    stack.grad[1] = 0
    before = stack.detach().clone()
    optimizer.step()
    assert torch.isfinite(stack).all()
    assert (stack[1] - before[1]).abs().max() < 0.1


def test_copies_make_the_same_steps() -> None:
    (stack,) = _parameters((3, 8, 12))
    _give_gradients([stack], 1)
    optimizer = MuonAdamW([{**MUON, "params": [stack], "lr": 0.1}], update_rms=0.5, newton_schulz_dtype=torch.float64)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (twin,) = copied.param_groups[0]["params"]
        twin.grad = stack.grad.clone()
        copied.step()
        fresh = stack.detach().clone().requires_grad_()
        fresh.grad = stack.grad.clone()
        MuonAdamW([{**MUON, "params": [fresh], "lr": 0.1}], update_rms=0.5, newton_schulz_dtype=torch.float64).step()
        assert torch.equal(twin, fresh)


def test_adamw_groups_equal_torch_adamw() -> None:
    shapes = [(7,), (5, 3)]
    ours, theirs = _parameters(*shapes, dtype=torch.float64), _parameters(*shapes, dtype=torch.float64)
    optimizer = MuonAdamW([{"name": "a", "algorithm": "adamw", "params": ours, "lr": 0.01, "weight_decay": 0.1}])
    oracle = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-20)
    for step in range(5):
        for params, o in ((ours, optimizer), (theirs, oracle)):
            _give_gradients(params, step)
            if step == 2:
                params[0].grad = None  # its step count then lags behind its neighbour's
            o.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_adamw_in_single_precision_follows_double() -> None:
    results = {}
    for dtype in (torch.float32, torch.float64):
        params = _parameters((40,), (6, 5))
        for p in params:
            p.data = p.data.to(dtype)
        optimizer = MuonAdamW([{"name": "a", "algorithm": "adamw", "params": params, "lr": 0.01, "weight_decay": 0.1}])
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            params[1].grad[0] = 0  # an embedding that no token reads: it decays and moves in no other way
            optimizer.step()
        results[dtype] = [p.detach().double() for p in params]
    for single, double in zip(*results.values(), strict=True):
        torch.testing.assert_close(single, double, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(results[torch.float64][1][0], _parameters((40,), (6, 5))[1][0].detach().double() * (1 - 1e-3) ** 6)


def test_state_is_what_checkpoints_hold() -> None:
    params = _parameters((2, 6, 8), (9,))
    optimizer = MuonAdamW([{**MUON, "params": params[:1]}, {"name": "a", "algorithm": "adamw", "params": params[1:]}])
    for step in range(2):
        _give_gradients(params, step)
        optimizer.step()
    muon, adamw = optimizer.state_dict()["state"].values()
    assert {key: value.shape for key, value in muon.items()} == {"momentum_buffer": (2, 6, 8)}
    assert set(adamw) == {"step", "exp_avg", "exp_avg_sq"}
    assert type(adamw["step"]) is int
    assert adamw["step"] == 2


def test_state_round_trip_continues_bit_for_bit(tmp_path) -> None:
    def make() -> tuple[list[nn.Parameter], MuonAdamW]:
        params = _parameters((2, 6, 8), (6, 8), (9,))
        return params, MuonAdamW([{**MUON, "params": params[:2]}, {"name": "a", "algorithm": "adamw", "params": params[2:]}])

    straight, optimizer = make()
    for step in range(4):
        _give_gradients(straight, step)
        optimizer.step()
        if step == 1:
            torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in straight]}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed, other = make()
    with torch.no_grad():
        for p, value in zip(resumed, saved["params"], strict=True):
            p.copy_(value)
    other.load_state_dict(saved["optimizer"])
    for step in (2, 3):
        _give_gradients(resumed, step)
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_steps_on_a_gpu_follow_those_on_the_cpu() -> None:
    shapes = [(64, 96), (3, 96, 64), (5, 7), (64, 96), (33,), (7, 5), (1,)]  # the small one joins a larger batch on the GPU
    results = []
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(p.detach().to(device)) for p in _parameters(*shapes)]
        groups = [
            {**MUON, "params": params[:3], "matrices": [2, 1, 1], "lr": 0.1, "weight_decay": 0.2},
            {**MUON, "params": params[3:4], "lr": 0.3, "momentum": 0.0},
            {"name": "a", "algorithm": "adamw", "params": params[4:], "lr": 0.01, "weight_decay": 0.1},
        ]
        optimizer = MuonAdamW(groups, newton_schulz_dtype=torch.float32)
        for step in range(3):
            host = _parameters(*shapes, seed=10 + step)
            for p, given in zip(params, host, strict=True):
                p.grad = given.detach().to(device)
            params[0].grad = params[0].grad.mT.contiguous().mT
            if step == 1:
                params[5].grad = None
            optimizer.step()
        results.append([p.detach().cpu() for p in params])
        assert [optimizer.state[p]["step"] for p in params[4:]] == [3, 2, 3]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_refuses_what_it_cannot_update() -> None:
    with pytest.raises(ValueError, match="algorithm='sgd' is not legal; legal values: muon, adamw"):
        MuonAdamW([{"name": "x", "algorithm": "sgd", "params": _parameters((2, 2))}])
    with pytest.raises(ValueError, match="use algorithm='adamw'"):
        MuonAdamW([{**MUON, "params": _parameters((4,))}])
    with pytest.raises(ValueError, match="in 3 block"):
        MuonAdamW([{**MUON, "params": _parameters((4, 4)), "matrices": [3]}])
    with pytest.raises(ValueError, match="not contiguous, with strides"):
        MuonAdamW([{"name": "x", "algorithm": "adamw", "params": [nn.Parameter(torch.zeros(3, 4).mT)]}])
    with pytest.raises(ValueError, match="update_rms=0 is not legal"):
        MuonAdamW([{**MUON, "params": _parameters((4, 4))}], update_rms=0)


def test_a_decoder_with_everything_frozen_has_no_optimizer() -> None:
    class Frozen(nn.Linear):
        config = type("config", (), {"o_groups": 2})

        def indexer_parameters(self) -> list[tuple[str, nn.Parameter]]:
            return []

    with pytest.raises(ValueError, match="every parameter is frozen"):
        build_optimizer(Frozen(2, 2).requires_grad_(False), OptimizerConfig())


def test_a_step_count_that_came_as_a_tensor_goes_on_as_a_number() -> None:
    results = []
    for kind in (int, torch.tensor):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
        optimizer = MuonAdamW([{"name": "v", "algorithm": "adamw", "params": params, "lr": 0.1}])
        for _ in range(2):
            for p in params:
                p.grad = torch.ones(3)
                if optimizer.state[p]:
                    optimizer.state[p]["step"] = kind(optimizer.state[p]["step"])
            optimizer.step()
        assert [type(optimizer.state[p]["step"]) for p in params] == [int, int]
        results.append(torch.stack([p.detach() for p in params]))
    assert torch.equal(*results)
