# SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW in one optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from csa_model import optimizers
from csa_model.config import OptimizerConfig
from csa_model.optimizers import MuonAdamW, batches, build_optimizer, orthogonalize

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
def test_equals_torch_muon_at_its_own_settings(shape: tuple[int, int]) -> None:
    ours, theirs = _parameters(shape)[0], _parameters(shape)[0]
    coefficients = ((3.4445, -4.7750, 2.0315),) * 5
    group = {**MUON, "params": [ours], "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = MuonAdamW([group], update_rms=0.2, coefficients=coefficients, newton_schulz_dtype=torch.bfloat16)
    oracle = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        before = theirs.detach().clone()
        for p, o in ((ours, optimizer), (theirs, oracle)):
            _give_gradients([p], step)
            o.step()
        update = (theirs.detach() - before).abs().max()
        assert (ours - theirs).abs().max() < 0.02 * update * (step + 1)  # the oracle iterates in bfloat16 only


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

    def spy(matrices: Tensor, *args: object) -> Tensor:
        sizes[-1].append(tuple(matrices.shape))
        return orthogonalize(matrices)

    monkeypatch.setattr(optimizers, "orthogonalize", spy)
    for limit in (0, 10**6):
        sizes.append([])
        monkeypatch.setattr(optimizers, "padded_elements", lambda device, limit=limit: limit)
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


def test_refuses_what_it_cannot_update() -> None:
    with pytest.raises(ValueError, match="algorithm='sgd' is not legal; legal values: muon, adamw"):
        MuonAdamW([{"name": "x", "algorithm": "sgd", "params": _parameters((2, 2))}])
    with pytest.raises(ValueError, match="use algorithm='adamw'"):
        MuonAdamW([{**MUON, "params": _parameters((4,))}])
    with pytest.raises(ValueError, match="in 3 block"):
        MuonAdamW([{**MUON, "params": _parameters((4, 4)), "matrices": [3]}])


def test_a_decoder_with_everything_frozen_has_no_optimizer() -> None:
    class Frozen(nn.Linear):
        config = type("config", (), {"o_groups": 2})

        def indexer_parameters(self) -> list[tuple[str, nn.Parameter]]:
            return []

    with pytest.raises(ValueError, match="every parameter is frozen"):
        build_optimizer(Frozen(2, 2).requires_grad_(False), OptimizerConfig())
