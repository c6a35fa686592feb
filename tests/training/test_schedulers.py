# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules."""

from __future__ import annotations

import pytest
import torch

from csa_model.config import SchedulerConfig
from csa_model.schedulers import build_scheduler, learning_rate_factor


def test_warm_up_is_linear_and_its_first_step_learns() -> None:
    factor = learning_rate_factor(SchedulerConfig(name="constant", warmup_steps=4), 100)
    assert [factor(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate_factor(SchedulerConfig(warmup_steps=0), 10)(0) == 1.0


def test_cosine_falls_to_the_floor_at_max_steps_and_stays() -> None:
    factor = learning_rate_factor(SchedulerConfig(name="cosine", warmup_steps=10, min_lr_ratio=0.1), 110)
    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.55)
    assert factor(110) == pytest.approx(0.1)
    assert factor(500) == pytest.approx(0.1)


def test_wsd_is_stable_until_the_last_decay_steps() -> None:
    factor = learning_rate_factor(SchedulerConfig(name="wsd", warmup_steps=2, decay_steps=10, min_lr_ratio=0.2), 50)
    assert factor(40) == 1.0
    assert factor(45) == pytest.approx(0.6)
    assert factor(50) == pytest.approx(0.2)


def test_scheduler_keeps_the_ratio_between_groups() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.25)]
    optimizer = torch.optim.SGD(groups)
    scheduler = build_scheduler(optimizer, SchedulerConfig(name="constant", warmup_steps=2), 10)
    assert scheduler.get_last_lr() == [0.5, 0.125]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0, 0.25]
