# SPDX-License-Identifier: Apache-2.0
"""One step of MuonAdamW by a backend's passes: prepared once, for tensors that stay where they are, and then repeated.

What changes from step to step, learning rates and step counts, is read from the device. So `run` does the same every time, and a CUDA graph can
repeat it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csa_model import muon
from csa_model.muon import MuonSettings, Shape, corner, matrix_shape
from kernels import RowOperations

Groups = list[dict[str, Any]]
State = Mapping[Tensor, dict[str, Any]]
Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]  # parameters, gradients, first and second moments


def fits(groups: Groups, settings: MuonSettings) -> bool:
    """Whether the passes apply to all matrices: they know no float64, and round before they divide, which in float16 would lose updates."""
    of_muon = [p for group in groups if group["algorithm"] == "muon" for p in group["params"] if p.grad is not None]
    return all(p.dtype != torch.float64 and settings.dtype_of(p) in (torch.bfloat16, torch.float32) for p in of_muon)


def signature(groups: Groups, state: State) -> Hashable:
    """All that an update is prepared for: these groups and this state, where the tensors lie, and the options but for the learning rate."""
    parts: list[Hashable] = [id(groups), id(state)]
    for group in groups:
        parts.append((group["algorithm"], group["weight_decay"], group["momentum"], *group["betas"], group["eps"], *group["matrices"]))
        steps = []
        for p in group["params"]:
            if p.grad is None:
                parts.append(p.data_ptr())
                continue
            own = state.get(p, {})
            steps.append(int(own.get("step", 0)))
            parts.append((p.data_ptr(), p.grad.data_ptr(), p.grad.stride(), *(t.data_ptr() for t in own.values() if isinstance(t, Tensor))))
        parts.append(tuple(step - steps[0] for step in steps))  # which parameters share a step count
    return tuple(parts)


@dataclass(frozen=True)
class _Slot:
    """Matrices of one shape and one parameter group, as many as `count`, one after the other in a batch."""

    shape: Shape
    count: int
    grads: Any
    buffers: Any
    params: Any
    rate: Tensor
    momentum: float
    decay: float


@dataclass(frozen=True)
class _Batch:
    """Matrices that are iterated together; their updates exist in the batch alone."""

    size: Shape
    work: torch.dtype
    slots: list[_Slot]

    def run(self, fused: RowOperations, settings: MuonSettings) -> None:
        counts = [slot.count for slot in self.slots]
        device = self.slots[0].rate.device
        batch = muon.empty_batch(self.size, [slot.shape for slot in self.slots], sum(counts), self.work, device)
        for slot, part in zip(self.slots, batch.split(counts), strict=True):
            fused.gather_momentum(slot.grads, slot.buffers, slot.momentum, corner(part, slot.shape), muon.NORM_FLOOR)
        for slot, part in zip(self.slots, muon.newton_schulz(batch, settings.coefficients, fused).split(counts), strict=True):
            fused.decay_and_add(slot.params, corner(part, slot.shape), slot.rate, slot.decay, settings.scale(slot.shape))


class FusedUpdate:
    """One update of every parameter that has a gradient. `load` brings this step's numbers to the device, `run` only launches.

    Args:
        groups: parameter groups of MuonAdamW. state: its state per parameter, which is filled for parameters that come for the first time.
    """

    def __init__(self, groups: Groups, state: State, fused: RowOperations, settings: MuonSettings) -> None:
        self.fused, self.settings = fused, settings
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._groups, self._state = groups, state  # kept: their ids stand in the signature
        self._counted: list[list[Tensor]] = []  # parameters whose step counts are equal
        self._adamw: list[tuple[Lists, int, int, dict[str, Any]]] = []
        for number, group in enumerate(groups):
            if group["algorithm"] == "adamw":
                self._prepare_adamw(number, state)
        devices = {p.device for group in groups for p in group["params"] if p.grad is not None}
        size = len(groups) + len(self._counted)
        # every number on 16 bytes of its own: kernels are compiled for how the memory that they read is aligned
        self._numbers = {device: torch.zeros(size, 4, dtype=torch.float32, device=device) for device in devices}
        self._batches = self._prepare_muon(state)

    def load(self) -> None:
        """Count the step, and copy learning rates and step counts to the devices; the host waits for nothing."""
        counts = []
        for params in self._counted:
            counts.append(int(self._state[params[0]]["step"]) + 1)  # a number, whatever wrote the checkpoint
            for p in params:
                self._state[p]["step"] = counts[-1]
        values = [*(group["lr"] for group in self._groups), *counts]
        host = torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 4)
        for device, numbers in self._numbers.items():
            numbers.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)

    @torch.no_grad()
    def run(self) -> None:
        """The update, from the gradients where they were and with the numbers that were loaded last."""
        for ours, theirs in self._copies:
            ours.copy_(theirs)
        for batch in self._batches:
            batch.run(self.fused, self.settings)
        for (params, grads, means, squares), rate, count, options in self._adamw:
            numbers = self._numbers[params[0].device]
            steps = [numbers[count, 0]] * len(params)
            torch._fused_adamw_(params, grads, means, squares, [], steps, amsgrad=False, maximize=False, lr=numbers[rate, 0], **options)

    def _gradient(self, p: Tensor) -> Tensor:
        """The gradient of a parameter with its strides: the kernels walk through the memory of both alike."""
        assert p.grad is not None
        if p.grad.stride() == p.stride():
            return p.grad
        self._copies.append((torch.empty_like(p), p.grad))
        return self._copies[-1][0]

    def _prepare_adamw(self, number: int, state: State) -> None:
        group = self._groups[number]
        alike: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                if not state[p]:
                    # A host integer: a step kept on the device would have to be read back where it is saved or compared.
                    state[p].update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                alike[p.device, p.dtype, int(state[p]["step"])].append(p)
        beta1, beta2 = group["betas"]
        options = {"beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], "eps": group["eps"]}
        for params in alike.values():
            means, squares = ([state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq"))
            lists = ([p.detach() for p in params], [self._gradient(p) for p in params], means, squares)
            self._adamw.append((lists, number, len(self._groups) + len(self._counted), options))
            self._counted.append(params)

    def _prepare_muon(self, state: State) -> list[_Batch]:
        members: dict[tuple[torch.device, torch.dtype], dict[Shape, dict[int, list[Tensor]]]]
        members = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for number, group in enumerate(self._groups):
            if group["algorithm"] != "muon":
                continue
            for p, blocks in zip(group["params"], group["matrices"], strict=True):
                if p.grad is not None:
                    if "momentum_buffer" not in state[p]:
                        state[p]["momentum_buffer"] = torch.zeros_like(p)
                    members[p.device, p.dtype][matrix_shape(p, blocks)][number].append(p)
        result = []
        for (device, _), of_shape in members.items():
            counts = {shape: sum(p.numel() for ps in of.values() for p in ps) // max(1, shape[0] * shape[1]) for shape, of in of_shape.items()}
            for size, shapes in muon.batches(counts, muon.padded_elements(device)).items():
                slots = [self._slot(shape, number, params, state) for shape in shapes for number, params in of_shape[shape].items()]
                work = self.settings.dtype_of(next(iter(of_shape[shapes[0]].values()))[0])
                result.append(_Batch(size, work, slots))
        return result

    def _slot(self, shape: Shape, number: int, params: list[Tensor], state: State) -> _Slot:
        group = self._groups[number]
        grads, buffers, own = (
            self.fused.at_their_addresses(_stacks(tensors, shape))
            for tensors in ([self._gradient(p) for p in params], [state[p]["momentum_buffer"] for p in params], params)
        )
        count = sum(p.numel() for p in params) // max(1, shape[0] * shape[1])
        rate = self._numbers[params[0].device][number, 0]
        return _Slot(shape, count, grads, buffers, own, rate, group["momentum"], group["weight_decay"])


def _stacks(tensors: Iterable[Tensor], shape: Shape) -> list[Tensor]:
    """Every tensor as a stack of matrices of `shape`."""
    return [t.detach().view(t.numel() // max(1, shape[0] * shape[1]), *shape) for t in tensors]
