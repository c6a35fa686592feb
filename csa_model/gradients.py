# SPDX-License-Identifier: Apache-2.0
"""Gradient norms, clipping by group, and the guard against gradients that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity. The message names the first parameters concerned and the optimizer step."""


def clip_by_norm(parameters: Named, max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` down to a joint norm of at most `max_norm` (0 or less: leave them); returns the norm before, fp32 [].

    Stays on the device: nothing waits for the value.
    """
    with_grad = [p for _, p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    if max_norm > 0 and with_grad:
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


class FiniteGuard:
    """Stops the run at the first gradient that is not finite.

    On the CPU at once, before the optimizer step. On CUDA reading a value would make the host wait for the device in every step, so the per-parameter
    norms travel to the host while the device goes on, and are read one optimizer step later. `settle` reads what is still under way: call it before
    weights are saved, so that no checkpoint ever holds a poisoned step.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, list[str], Tensor, torch.cuda.Event] | None = None

    def check(self, parameters: Named, norms: list[Tensor], step: int) -> None:
        """Check the gradients of `parameters`, whose group norms are `norms`, in optimizer step `step` (1-based).

        Raises NonFiniteGradientError for this step, or on CUDA for the step before.
        """
        if not norms or norms[0].device.type != "cuda":
            if not all(bool(torch.isfinite(norm)) for norm in norms):
                named = [(name, p.grad) for name, p in parameters if p.grad is not None]
                _raise([name for name, grad in named if not torch.isfinite(grad).all()], step)
            return
        self.settle()
        named = [(name, p.grad) for name, p in parameters if p.grad is not None]
        per_parameter = torch.stack(torch._foreach_norm([grad for _, grad in named]))
        host = torch.empty(per_parameter.shape, dtype=per_parameter.dtype, pin_memory=True)
        host.copy_(per_parameter, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (step, [name for name, _ in named], host, event)

    def settle(self) -> None:
        """Read the check that is under way, if any."""
        if self._pending is None:
            return
        step, names, norms, event = self._pending
        self._pending = None
        event.synchronize()  # recorded a whole optimizer step ago
        finite = torch.isfinite(norms).tolist()
        _raise([name for name, good in zip(names, finite, strict=True) if not good], step)


def _raise(names: list[str], step: int) -> None:
    if names:
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise NonFiniteGradientError(
            f"the gradient of {shown} is not finite in optimizer step {step}; the run stops. "
            "Lower optimizer.lr, lengthen scheduler.warmup_steps, or look at the batch of that step; checkpoints of earlier steps are sound"
        )
