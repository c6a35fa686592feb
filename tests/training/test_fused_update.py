# SPDX-License-Identifier: Apache-2.0
"""An optimizer step that is prepared once and repeated: AdamW's part, in which a backend's passes have no share. Theirs is in test_matrices.py."""

from __future__ import annotations

import torch
from torch import nn

from csa_model.optimizers import MuonAdamW
from tests.again import Again


def _parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def _adamw_of_a_backend(params: list[nn.Parameter], **options: float) -> tuple[MuonAdamW, Again]:
    """Its matrices aside, a backend takes no part in AdamW."""
    groups = [{"name": "a", "algorithm": "adamw", "params": params[:2], "lr": 0.01, **options}]
    groups += [{"name": "b", "algorithm": "adamw", "params": params[2:], "lr": 0.02, "betas": (0.8, 0.9)}]
    optimizer = MuonAdamW(groups, fused=object())  # type: ignore[arg-type]
    optimizer.repeat = again = Again()
    return optimizer, again


def test_a_prepared_update_takes_new_rates_and_counts_steps() -> None:
    """Rates of a schedule, a gradient that is missing for a step, and gradients that moved."""
    shapes = [(7,), (5, 3), (4, 2)]
    ours, theirs = _parameters(*shapes), _parameters(*shapes)
    optimizer, again = _adamw_of_a_backend(ours, weight_decay=0.1)
    groups = [{"params": theirs[:2], "lr": 0.01, "weight_decay": 0.1}, {"params": theirs[2:], "lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.0}]
    oracle = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-20)
    made, places = [], [torch.empty_like(p) for p in ours]
    for step in range(9):
        for params, o in ((ours, optimizer), (theirs, oracle)):
            _give_gradients(params, step)
            for group in o.param_groups:
                group["lr"] *= 0.8
        for p, place in zip(ours, places, strict=True):
            p.grad = place.copy_(p.grad)
        if step == 3:
            ours[0].grad = theirs[0].grad = None  # its step count then lags behind its neighbour's
        if step == 6:
            places[2] = torch.empty_like(ours[2])
            ours[2].grad = places[2].copy_(ours[2].grad)
        if step == 7:
            ours[1].grad = ours[1].grad.mT.contiguous().mT
        optimizer.step()
        oracle.step()
        made.append(len(again.made))
    # the first step makes the state; without a gradient, with it again, another place, other strides, and back
    assert made == [1, 2, 2, 3, 4, 4, 5, 6, 7]
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert [optimizer.state[p]["step"] for p in ours] == [8, 9, 9]


def test_an_update_is_prepared_anew_for_other_options_and_a_loaded_state() -> None:
    params = _parameters((7,), (5, 3), (4, 2))
    optimizer, again = _adamw_of_a_backend(params)
    _give_gradients(params, 1)
    for number, change in [
        (0, lambda: None),
        (1, lambda: optimizer.param_groups[1].update(weight_decay=0.2)),
        (1, lambda: optimizer.param_groups[0].update(betas=(0.7, 0.95))),
        (1, lambda: optimizer.param_groups[0].update(eps=1e-8)),
        (1, lambda: optimizer.load_state_dict(optimizer.state_dict())),
        (1, lambda: optimizer.state[params[0]].update(exp_avg=torch.zeros(7))),
        (1, lambda: setattr(params[2], "data", params[2].data.clone())),
        (0, lambda: optimizer.state.update({p: dict(optimizer.state[p]) for p in params})),  # which count on
    ]:
        optimizer.step()
        optimizer.step()
        known = len(again.made)
        change()
        optimizer.step()
        optimizer.step()
        assert len(again.made) - known == number
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[2], before[2])
    assert [optimizer.state[p]["step"] for p in params] == [33, 33, 33]
