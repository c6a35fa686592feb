# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for the rest, as one torch optimizer (DeepSeek-V4 report, sections 2.4 and 4.2.2).

One object, so that Lightning's automatic optimization, a single scheduler and one optimizer state in the checkpoint suffice. Every parameter group
carries a `name` (shown beside its learning rate) and an `algorithm`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from csa_model import fused_update, muon
from csa_model.config import OptimizerConfig
from csa_model.muon import MUON_UPDATE_RMS, NEWTON_SCHULZ_COEFFICIENTS, Coefficients, MuonSettings, Shape, matrix_shape
from kernels import RowOperations

_ALGORITHMS = ("muon", "adamw")


class Repeat(Protocol):
    """Runs what `prepare` makes, or made for the same key before; see `TrainingGraph.beside`."""

    def __call__(self, name: str, key: Hashable, prepare: Callable[[], Any], /) -> Any:
        """The result of its `run`, after its `load`."""


@dataclass(frozen=True)
class _Member:
    """A Muon parameter, the options of its group, and how many matrices it holds."""

    parameter: Tensor
    group: dict[str, Any]
    matrices: int


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Gradients with the strides of their parameters: the fused kernels walk through the memory of both alike."""
    grads = [(p, p.grad) for p in params if p.grad is not None]
    return [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in grads]


def _nesterov(updates: list[Tensor], grads: list[Tensor], buffers: list[Tensor], momentum: float) -> None:
    """buffers <- momentum * buffers + grads, then updates <- grads + momentum * buffers, in one pass over memory.

    Args:
        updates: zeros, from which the fused kernel takes -1 times the step.
    """
    if momentum == 0:  # which the fused kernel refuses
        torch._foreach_copy_(buffers, grads)
        torch._foreach_copy_(updates, grads)
        return
    options: dict[str, Any] = {"dampening": 0.0, "nesterov": True, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(updates, grads, buffers, weight_decay=0.0, momentum=momentum, lr=-1.0, **options)


def _decay_and_add(params: list[Tensor], updates: list[Tensor], decay: float, scale: float) -> None:
    """params <- params - scale * (updates + decay * params), in one pass over memory."""
    options: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(params, updates, [], weight_decay=decay, lr=scale, **options)


class MuonAdamW(torch.optim.Optimizer):
    """Muon or AdamW per parameter group.

    Group options: `name`; `algorithm` ("muon" or "adamw"); `lr`; `weight_decay` (decoupled); for Muon `momentum` and `matrices`, for AdamW `betas`
    and `eps`. A Muon parameter is a matrix [n, m], a stack [E, n, m] of which every matrix is orthogonalised by itself, or a matrix that holds
    `matrices[i]` equal blocks of rows, orthogonalised one by one (the grouped output projection: its groups read different inputs). Matrices of one
    shape, of whatever parameter, are iterated as one batch, in bfloat16 on CUDA and in the parameter's dtype elsewhere; on CUDA small ones join a
    batch of larger ones. `fused`: a backend's form of the passes around the iteration, taken unless a matrix is float64 or iterated in another dtype
    than bfloat16 and float32. `repeat`, an attribute: with `fused`, may run an update that is prepared already, as a CUDA graph for instance; copies
    of the optimizer do without.

    Raises ValueError for an unknown algorithm, a Muon parameter that is no matrix, a parameter that is not contiguous, a sharded parameter
    (orthogonalisation needs whole matrices), or `update_rms` that is not positive.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        update_rms: float = MUON_UPDATE_RMS,
        coefficients: Coefficients = NEWTON_SCHULZ_COEFFICIENTS,
        newton_schulz_dtype: torch.dtype | None = None,
        fused: RowOperations | None = None,
    ) -> None:
        if not update_rms > 0:
            raise ValueError(f"update_rms={update_rms} is not legal; it must be above 0")
        self.settings = MuonSettings(update_rms, tuple(coefficients), newton_schulz_dtype)
        self.fused = fused
        self.repeat: Repeat | None = None
        defaults = {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-20, "matrices": None}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        algorithm, name = param_group.get("algorithm"), param_group.get("name")
        if algorithm not in _ALGORITHMS:
            raise ValueError(f"parameter group {name!r}: algorithm={algorithm!r} is not legal; legal values: {', '.join(_ALGORITHMS)}")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["matrices"] is None:
            group["matrices"] = [1] * len(group["params"])
        for p, blocks in zip(group["params"], group["matrices"], strict=True):
            if hasattr(p, "placements"):  # a DTensor, without importing torch.distributed.tensor for everybody else
                raise ValueError(f"parameter group {name!r} holds a sharded parameter; MuonAdamW needs whole matrices: use trainer=ddp")
            if not p.is_contiguous():
                raise ValueError(f"parameter group {name!r} holds a parameter {tuple(p.shape)} that is not contiguous, with strides {p.stride()}")
            if algorithm == "muon" and (p.ndim not in (2, 3) or p.shape[0] % blocks or (p.ndim == 3 and blocks != 1)):
                shape = f"{tuple(p.shape)} in {blocks} block(s)"
                raise ValueError(f"parameter group {name!r}: Muon takes [n, m] or [E, n, m], got {shape}; use algorithm='adamw'")

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps what torch's own would drop."""
        return super().__getstate__() | {"settings": self.settings, "fused": self.fused, "repeat": None}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.fused is not None and fused_update.fits(self.param_groups, self.settings):
            self._step_fused(self.fused)
            return loss
        self._step_muon([g for g in self.param_groups if g["algorithm"] == "muon"])
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
        return loss

    def _step_fused(self, fused: RowOperations) -> None:
        def prepare() -> fused_update.FusedUpdate:
            return fused_update.FusedUpdate(self.param_groups, self.state, fused, self.settings)

        if self.repeat is not None:
            self.repeat("the optimizer's update", fused_update.signature(self.param_groups, self.state), prepare)
            return
        update = prepare()
        update.load()
        update.run()

    def _step_muon(self, groups: list[dict[str, Any]]) -> None:
        places: dict[tuple[torch.device, torch.dtype], dict[Shape, list[_Member]]] = defaultdict(lambda: defaultdict(list))
        for group in groups:
            for p, blocks in zip(group["params"], group["matrices"], strict=True):
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                places[p.device, p.dtype][matrix_shape(p, blocks)].append(_Member(p, group, p.shape[0] if p.ndim == 3 else blocks))
        for (device, _), of_shape in places.items():
            counts = {shape: sum(member.matrices for member in members) for shape, members in of_shape.items()}
            self._update(of_shape, muon.batches(counts, muon.padded_elements(device)))

    def _update(self, of_shape: Mapping[Shape, list[_Member]], together: Mapping[Shape, list[Shape]]) -> None:
        """One update of the parameters of one device and dtype, iterated in batches `together`."""
        # The updates of one shape lie one after the other, so that one launch packs them into a batch and another unpacks them.
        counts = {shape: sum(member.matrices for member in members) for shape, members in of_shape.items()}
        like = next(iter(of_shape.values()))[0].parameter
        sizes = [counts[shape] * shape[0] * shape[1] for shape in counts]
        blocks = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device).split(sizes)
        updates = {shape: block.view(counts[shape], *shape) for shape, block in zip(counts, blocks, strict=True)}
        parts = {shape: _parts(updates[shape], members) for shape, members in of_shape.items()}
        self._gather_momentum([pair for shape, members in of_shape.items() for pair in zip(members, parts[shape], strict=True)])
        for size, shapes in together.items():
            work = self.settings.dtype_of(like)
            muon.orthogonalize_together(size, {shape: updates[shape] for shape in shapes}, work, self.settings.coefficients)
        self._apply([(self.settings.scale(shape), *pair) for shape, members in of_shape.items() for pair in zip(members, parts[shape], strict=True)])

    def _gather_momentum(self, pairs: list[tuple[_Member, Tensor]]) -> None:
        """Momentum and updates of parameters of one device and dtype, each with its update, which is zero before."""
        for momentum in {member.group["momentum"] for member, _ in pairs}:
            chosen = [(member.parameter, update) for member, update in pairs if member.group["momentum"] == momentum]
            params = [p for p, _ in chosen]
            _nesterov([update for _, update in chosen], _gradients(params), [self.state[p]["momentum_buffer"] for p in params], momentum)

    def _apply(self, updates: list[tuple[float, _Member, Tensor]]) -> None:
        """Decay and orthogonalised updates of parameters of one device and dtype, each with the factor of its matrices."""
        alike: dict[tuple[float, float, float], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for scale, member, update in updates:
            alike[scale, member.group["lr"], member.group["weight_decay"]].append((member.parameter, update))
        for (scale, lr, decay), pairs in alike.items():
            _decay_and_add([p for p, _ in pairs], [update for _, update in pairs], decay / scale, lr * scale)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        alike: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                # A host integer: a step kept on the device would have to be read back in every update.
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] = int(state["step"]) + 1  # a number, whatever wrote the checkpoint
            alike[p.device, p.dtype, state["step"]].append(p)
        beta1, beta2 = group["betas"]
        options = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], "eps": group["eps"]}
        for (device, _, step), params in alike.items():
            means, squares = ([self.state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq"))
            steps = [torch.full((), step, dtype=torch.float32, device=device)] * len(params)  # filled by a kernel: the host waits for nothing
            torch._fused_adamw_(params, _gradients(params), means, squares, [], steps, amsgrad=False, maximize=False, **options)


def _parts(updates: Tensor, members: list[_Member]) -> list[Tensor]:
    """The updates [sum of matrices, n, m] of `members`, each in the shape of its parameter."""
    parts = updates.split([member.matrices for member in members])
    return [part.view_as(member.parameter) for part, member in zip(parts, members, strict=True)]


def parameter_groups(decoder: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The decoder's trainable parameters in named groups; a group without members is left out.

    - trunk_matrices: every weight of a linear map, routers and hyper-connection maps included; each expert and each output group by itself.
    - embeddings: embedding and head (AdamW).
    - trunk_vectors: norms, sinks, position biases, hyper-connection scales and bases (AdamW, no decay).
    - indexer_matrices, indexer_vectors: the same for the indexers. No decay: it would pull the index scores towards uniform and bias the fit.

    Parameters with requires_grad False are left out, so that weight decay cannot move what is frozen.
    """
    indexer = {id(p) for _, p in decoder.indexer_parameters()}  # type: ignore[operator]
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {
        name: [] for name in ("trunk_matrices", "embeddings", "trunk_vectors", "indexer_matrices", "indexer_vectors")
    }
    for name, p in decoder.named_parameters():
        if not p.requires_grad:
            continue
        owner = "indexer" if id(p) in indexer else "trunk"
        leaf = name.rsplit(".", 1)[-1]
        if name in ("embed.weight", "head.weight"):
            groups["embeddings"].append((name, p))
        elif p.ndim >= 2 and leaf != "ape":
            groups[f"{owner}_matrices"].append((name, p))
        else:
            groups[f"{owner}_vectors"].append((name, p))
    o_groups = int(decoder.config.o_groups)  # type: ignore[union-attr, arg-type]
    result = []
    for name, members in groups.items():
        if not members:
            continue
        by_muon = config.name == "muon_adamw" and name.endswith("matrices")
        group: dict[str, Any] = {
            "name": name,
            "params": [p for _, p in members],
            "algorithm": "muon" if by_muon else "adamw",
            "lr": config.lr * (config.indexer_lr_multiplier if name.startswith("indexer") else 1.0),
            "weight_decay": config.weight_decay if name in ("trunk_matrices", "embeddings") else 0.0,
            "momentum": config.muon_momentum,
            "betas": tuple(config.betas),
            "eps": config.eps,
        }
        if by_muon:
            group["matrices"] = [o_groups if n.endswith(("attn.wo_a", "attn.wo_a.weight")) else 1 for n, _ in members]
        result.append(group)
    return result


def build_optimizer(decoder: nn.Module, config: OptimizerConfig) -> MuonAdamW:
    """The optimizer of `decoder`. Raises ValueError when every parameter is frozen."""
    groups = parameter_groups(decoder, config)
    if not groups:
        raise ValueError("every parameter is frozen: nothing to optimise; a stage with train_only_indexer needs teacher=full_csa or compressed_only")
    return MuonAdamW(groups, fused=decoder.fused)  # type: ignore[arg-type]
