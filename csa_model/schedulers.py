# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: pure functions of the optimizer step, with lengths from the configuration only."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from csa_model.config import SchedulerConfig


def learning_rate_factor(config: SchedulerConfig, max_steps: int) -> Callable[[int], float]:
    """Factor of the peak learning rate in optimizer step `step` (0-based).

    Linear warm-up over `warmup_steps` (the first step already learns), then by name: `cosine` falls to `min_lr_ratio` at `max_steps`; `wsd` stays
    at 1 and falls linearly to `min_lr_ratio` over the last `decay_steps`; `constant` stays at 1.
    """
    warmup, floor = config.warmup_steps, config.min_lr_ratio

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "cosine":
            progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if config.name == "wsd" and config.decay_steps > 0:
            progress = min(1.0, max(0.0, (step - (max_steps - config.decay_steps)) / config.decay_steps))
            return 1.0 - (1.0 - floor) * progress
        return 1.0

    return factor


def build_scheduler(optimizer: Optimizer, config: SchedulerConfig, max_steps: int) -> LambdaLR:
    """`learning_rate_factor` applied to every group of `optimizer`; step it once per optimizer step."""
    return LambdaLR(optimizer, learning_rate_factor(config, max_steps))
