# SPDX-License-Identifier: Apache-2.0
"""Gradient norms, clipping by group, and the guard against gradients that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity. The message names the first parameters concerned and the optimizer step."""


def gradient_norms(parameters: Named) -> tuple[list[str], Tensor]:
    """Names of the parameters that have a gradient, and the norm of each, fp32 [P]. Stays on the device: nothing waits for the values."""
    with_grad = [(name, p.grad) for name, p in parameters if p.grad is not None]
    if not with_grad:
        return [], torch.zeros(0)
    return [name for name, _ in with_grad], torch.stack(torch._foreach_norm([grad for _, grad in with_grad])).float()


def clip_to_norm(parameters: Named, norm: Tensor, max_norm: float) -> None:
    """Scale the gradients of `parameters`, whose joint norm is `norm`, down to `max_norm`; 0 or less leaves them."""
    with_grad = [p for _, p in parameters if p.grad is not None]
    if max_norm > 0 and with_grad:
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)


class ClippedNorms:
    """Norms of the gradients of groups of parameters, which are then scaled down to the limit of their group: what `TrainingGraph.beside` repeats.

    Args:
        groups: name -> parameters and the limit of their joint norm, 0 or less for none.
    """

    def __init__(self, groups: Mapping[str, tuple[Named, float]]) -> None:
        self.groups = groups

    def load(self) -> None:
        """Nothing changes from step to step but the gradients."""

    def run(self) -> dict[str, tuple[list[str], Tensor, Tensor]]:
        """Names of a group's parameters that have a gradient, the norm of each [P] and the joint norm [], before clipping."""
        result = {}
        for name, (parameters, limit) in self.groups.items():
            names, norms = gradient_norms(parameters)
            result[name] = names, norms, torch.linalg.vector_norm(norms)
            clip_to_norm(parameters, result[name][2], limit)
        return result


class FiniteGuard:
    """Stops the run at the first gradient that is not finite.

    On the CPU at once, before the optimizer step. On CUDA reading a value would make the host wait for the device in every step, so the per-parameter
    norms travel to the host while the device goes on, and are read one optimizer step later. `settle` reads what is still under way: call it before
    weights are saved, so that no checkpoint ever holds a poisoned step.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, list[str], Tensor, torch.cuda.Event] | None = None

    def check(self, names: list[str], norms: Tensor, step: int) -> None:
        """Check the gradients `names` by their norms [P], before clipping, in optimizer step `step` (1-based).

        Raises NonFiniteGradientError for this step, or on CUDA for the step before.
        """
        if norms.device.type != "cuda":
            _raise_unless_finite(names, norms, step)
            return
        self.settle()
        host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        host.copy_(norms, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (step, names, host, event)

    def settle(self) -> None:
        """Read the check that is under way, if any."""
        if self._pending is None:
            return
        step, names, norms, event = self._pending
        self._pending = None
        event.synchronize()  # recorded a whole optimizer step ago
        _raise_unless_finite(names, norms, step)


def _raise_unless_finite(names: list[str], norms: Tensor, step: int) -> None:
    bad = [name for name, good in zip(names, torch.isfinite(norms).tolist(), strict=True) if not good]
    if bad:
        shown = ", ".join(bad[:8]) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        raise NonFiniteGradientError(
            f"the gradient of {shown} is not finite in optimizer step {step}; the run stops. "
            "Lower optimizer.lr, lengthen scheduler.warmup_steps, or look at the batch of that step; checkpoints of earlier steps are sound"
        )
