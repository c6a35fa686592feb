# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for the rest, as one torch optimizer (DeepSeek-V4 report, sections 2.4 and 4.2.2).

One object, so that Lightning's automatic optimization, a single scheduler and one optimizer state in the checkpoint suffice. Every parameter group
carries a `name` (shown beside its learning rate) and an `algorithm`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from csa_model.config import OptimizerConfig
from kernels import RowOperations

# Eight steps pull every singular value near 1, two more with a contracting polynomial put it there: 1.0000 to 1.0005 for full-rank matrices.
NEWTON_SCHULZ_COEFFICIENTS: Coefficients = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
MUON_UPDATE_RMS = 0.18  # root mean square of one update at lr 1, that of AdamW in practice: one learning rate serves both algorithms
# Of a matrix that is divided by its Frobenius norm: what is all zero stays zero. The momentum of an expert without tokens decays without end; below
# 1e-19 the squares of fp32 lose it, and divided by too small a norm it would overflow the iteration.
NORM_FLOOR = 1e-16
FUSED_ELEMENTS = 2**22  # of products XX^T: up to here launches take longer than passes over memory, so a backend fuses three of them
_ALGORITHMS = ("muon", "adamw")
Shape = tuple[int, int]
Coefficients = Sequence[tuple[float, float, float]]


def _normalize(matrices: Tensor, out: Tensor, eps: float = NORM_FLOOR) -> None:
    """out <- each matrix of a stack [B, n, m] over its Frobenius norm, rounded once to the dtype of `out`, without a copy in between."""
    # The norm in fp32 at least: squares of small bf16 gradients would lose their low bits.
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(matrices.dtype, torch.float32))
    torch.div(matrices, norm.clamp(min=eps), out=out)


def _newton_schulz(x: Tensor, coefficients: Coefficients, fused: RowOperations | None = None) -> Tensor:
    """X <- aX + b(XX^T)X + c(XX^T)^2 X for every (a, b, c) of `coefficients`, of matrices [B, n, m >= n] whose norm is at most 1."""
    for a, b, c in coefficients:
        gram = x @ x.mT
        if fused is not None and gram.numel() <= FUSED_ELEMENTS:
            x = fused.matrix_polynomial(gram, a, b, c) @ x
            continue
        # aI + bG + cG^2 as c (G + b/2c I)^2 + (a - b^2/4c) I: with beta other than 0, baddbmm would copy its input first, and this touches diagonals.
        gram.diagonal(dim1=-2, dim2=-1).add_(b / (2 * c))
        polynomial = torch.baddbmm(gram, gram, gram, beta=0, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a - b * b / (4 * c))
        x = polynomial @ x
    return x


@torch.no_grad()
def orthogonalize(matrices: Tensor, coefficients: Coefficients = NEWTON_SCHULZ_COEFFICIENTS, eps: float = NORM_FLOOR) -> Tensor:
    """Nearest semi-orthogonal matrix of each matrix of a stack, by Newton-Schulz iterations; not differentiable.

    Args:
        matrices: [B, n, m], each orthogonalised by itself. The dtype of the iteration is that of the input.
        coefficients: (a, b, c) per step of X <- aX + b(XX^T)X + c(XX^T)^2 X, c not 0.
        eps: floor of the Frobenius norm; an all-zero matrix stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    out = torch.empty_like(x)
    _normalize(x, out, eps)
    x = _newton_schulz(out, coefficients)
    return x.mT if tall else x


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


def padded_elements(device: torch.device) -> int:
    """Elements up to which matrices may be padded to join others: what a GPU iterates in less time than the host needs to launch one more batch."""
    return 2**22 if device.type == "cuda" else 0


def batches(counts: Mapping[Shape, int], limit: int) -> dict[Shape, list[Shape]]:
    """Which matrices are iterated together: size [rows, columns >= rows] of a batch -> the shapes [n, m] of its matrices.

    Shapes that differ only by transposition share a batch. A batch joins the next larger one that can hold its matrices, each padded with zeros, if
    that makes at most `limit` elements of it: rows and columns of zeros stay zero through every iteration and change nothing else.

    Args:
        counts: matrices of each shape.
    """
    shapes: dict[Shape, list[Shape]] = defaultdict(list)
    number: dict[Shape, int] = defaultdict(int)
    for shape, count in counts.items():
        size = (min(shape), max(shape))
        shapes[size].append(shape)
        number[size] += count
    for size in sorted(shapes, key=lambda s: (math.prod(s), s)):
        hosts = [s for s in shapes if s != size and s[0] >= size[0] and s[1] >= size[1]]
        host = min(hosts, key=lambda s: (math.prod(s), s), default=size)
        if host != size and number[size] * math.prod(host) <= limit:
            shapes[host] += shapes.pop(size)
            number[host] += number.pop(size)
    return dict(shapes)


def _corner(batch: Tensor, shape: Shape) -> Tensor:
    """The part of batch [B, rows, columns] that holds matrices of `shape`, as [B, n, m]."""
    corner = batch[:, : min(shape), : max(shape)]
    return corner.mT if shape[0] > shape[1] else corner


class MuonAdamW(torch.optim.Optimizer):
    """Muon or AdamW per parameter group.

    Group options: `name`; `algorithm` ("muon" or "adamw"); `lr`; `weight_decay` (decoupled); for Muon `momentum` and `matrices`, for AdamW `betas`
    and `eps`. A Muon parameter is a matrix [n, m], a stack [E, n, m] of which every matrix is orthogonalised by itself, or a matrix that holds
    `matrices[i]` equal blocks of rows, orthogonalised one by one (the grouped output projection: its groups read different inputs). Matrices of one
    shape, of whatever parameter, are iterated as one batch, in bfloat16 on CUDA and in the parameter's dtype elsewhere; on CUDA small ones join a
    batch of larger ones. `fused`: a backend's form of the passes around the iteration.

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
        self.update_rms = update_rms
        self.coefficients = tuple(coefficients)
        self.newton_schulz_dtype = newton_schulz_dtype
        self.fused = fused
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
        kept = ("update_rms", "coefficients", "newton_schulz_dtype", "fused")
        return super().__getstate__() | {name: getattr(self, name) for name in kept}

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
        self._step_muon([g for g in self.param_groups if g["algorithm"] == "muon"])
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
        return loss

    def _step_muon(self, groups: list[dict[str, Any]]) -> None:
        places: dict[tuple[torch.device, torch.dtype], dict[Shape, list[_Member]]] = defaultdict(lambda: defaultdict(list))
        for group in groups:
            for p, blocks in zip(group["params"], group["matrices"], strict=True):
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                matrices = p.shape[0] if p.ndim == 3 else blocks
                shape = (p.shape[-2] if p.ndim == 3 else p.shape[0] // blocks, p.shape[-1])
                places[p.device, p.dtype][shape].append(_Member(p, group, matrices))
        for (device, dtype), of_shape in places.items():
            counts = {shape: sum(member.matrices for member in members) for shape, members in of_shape.items()}
            together = batches(counts, padded_elements(device))
            # the longest first: the host launches the others while the device is at it
            order = sorted(together, key=lambda s: -s[0] * math.prod(s) * sum(counts[shape] for shape in together[s]))
            work = self.newton_schulz_dtype or (torch.bfloat16 if device.type == "cuda" else dtype)
            # the fused form rounds before it divides, which in float16 would lose updates
            if self.fused is None or work not in (torch.bfloat16, torch.float32):
                self._update(of_shape, {size: together[size] for size in order}, work)
                continue
            for size in order:
                self._update_fused(self.fused, size, {shape: of_shape[shape] for shape in together[size]}, work)

    def _update(self, of_shape: Mapping[Shape, list[_Member]], together: Mapping[Shape, list[Shape]], work: torch.dtype) -> None:
        """One update of the parameters of one device and dtype, iterated in batches `together`."""
        # The updates of one shape lie one after the other, so that one launch packs them into a batch and another unpacks them.
        counts = {shape: sum(member.matrices for member in members) for shape, members in of_shape.items()}
        like = next(iter(of_shape.values()))[0].parameter
        sizes = [counts[shape] * math.prod(shape) for shape in counts]
        blocks = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device).split(sizes)
        updates = {shape: block.view(counts[shape], *shape) for shape, block in zip(counts, blocks, strict=True)}
        parts = {shape: _parts(updates[shape], members) for shape, members in of_shape.items()}
        self._gather_momentum([pair for shape, members in of_shape.items() for pair in zip(members, parts[shape], strict=True)])
        for size, shapes in together.items():
            _orthogonalize_together(size, {shape: updates[shape] for shape in shapes}, work, self.coefficients)
        self._apply([(max(shape), *pair) for shape, members in of_shape.items() for pair in zip(members, parts[shape], strict=True)])

    def _update_fused(self, fused: RowOperations, size: Shape, of_shape: Mapping[Shape, list[_Member]], work: torch.dtype) -> None:
        """The same of parameters whose matrices make one batch of `size`; their updates exist in the batch alone."""
        alike: dict[tuple[Shape, float, float, float], list[_Member]] = defaultdict(list)
        for shape, members in of_shape.items():
            for member in members:
                alike[shape, member.group["momentum"], member.group["lr"], member.group["weight_decay"]].append(member)
        counts = [sum(member.matrices for member in members) for members in alike.values()]
        batch = _batch(size, of_shape, sum(counts), work, next(iter(alike.values()))[0].parameter.device)
        for ((shape, momentum, *_), members), slot in zip(alike.items(), batch.split(counts), strict=True):
            params = [member.parameter for member in members]
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            fused.gather_momentum(_stacks(_gradients(params), shape), _stacks(buffers, shape), momentum, _corner(slot, shape), NORM_FLOOR)
        for ((shape, _, lr, decay), members), slot in zip(alike.items(), _newton_schulz(batch, self.coefficients, fused).split(counts), strict=True):
            params = [member.parameter for member in members]
            fused.decay_and_add(_stacks(params, shape), _corner(slot, shape), lr * decay, lr * self.update_rms * math.sqrt(max(shape)))

    def _gather_momentum(self, pairs: list[tuple[_Member, Tensor]]) -> None:
        """Momentum and updates of parameters of one device and dtype, each with its update, which is zero before."""
        for momentum in {member.group["momentum"] for member, _ in pairs}:
            chosen = [(member.parameter, update) for member, update in pairs if member.group["momentum"] == momentum]
            params = [p for p, _ in chosen]
            _nesterov([update for _, update in chosen], _gradients(params), [self.state[p]["momentum_buffer"] for p in params], momentum)

    def _apply(self, updates: list[tuple[int, _Member, Tensor]]) -> None:
        """Decay and orthogonalised updates of parameters of one device and dtype, each with the longer side of its matrices."""
        alike: dict[tuple[int, float, float], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for longest, member, update in updates:
            alike[longest, member.group["lr"], member.group["weight_decay"]].append((member.parameter, update))
        for (longest, lr, decay), pairs in alike.items():
            rms = self.update_rms * math.sqrt(longest)
            _decay_and_add([p for p, _ in pairs], [update for _, update in pairs], decay / rms, lr * rms)

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


def _stacks(tensors: Iterable[Tensor], shape: Shape) -> list[Tensor]:
    """Every tensor as a stack of matrices of `shape`."""
    return [t.view(t.numel() // max(1, math.prod(shape)), *shape) for t in tensors]


def _batch(size: Shape, shapes: Iterable[Shape], count: int, work: torch.dtype, device: torch.device) -> Tensor:
    """[count, *size] for matrices of `shapes` in its corners, zeros where one is smaller."""
    padded = any(sorted(shape) != list(size) for shape in shapes)
    return (torch.zeros if padded else torch.empty)(count, *size, dtype=work, device=device)


def _orthogonalize_together(size: Shape, updates: Mapping[Shape, Tensor], work: torch.dtype, coefficients: Coefficients) -> None:
    """One orthogonalisation, in place, of stacks `updates` [k, n, m] of several shapes, each matrix in the corner of one of `size`."""
    counts = [len(stack) for stack in updates.values()]
    batch = _batch(size, updates, sum(counts), work, next(iter(updates.values())).device)
    for (shape, stack), slot in zip(updates.items(), batch.split(counts), strict=True):
        _normalize(stack, _corner(slot, shape))
    for (shape, stack), slot in zip(updates.items(), _newton_schulz(batch, coefficients).split(counts), strict=True):
        stack.copy_(_corner(slot, shape))


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
        muon = config.name == "muon_adamw" and name.endswith("matrices")
        group: dict[str, Any] = {
            "name": name,
            "params": [p for _, p in members],
            "algorithm": "muon" if muon else "adamw",
            "lr": config.lr * (config.indexer_lr_multiplier if name.startswith("indexer") else 1.0),
            "weight_decay": config.weight_decay if name in ("trunk_matrices", "embeddings") else 0.0,
            "momentum": config.muon_momentum,
            "betas": tuple(config.betas),
            "eps": config.eps,
        }
        if muon:
            group["matrices"] = [o_groups if n.endswith(("attn.wo_a", "attn.wo_a.weight")) else 1 for n, _ in members]
        result.append(group)
    return result


def build_optimizer(decoder: nn.Module, config: OptimizerConfig) -> MuonAdamW:
    """The optimizer of `decoder`. Raises ValueError when every parameter is frozen."""
    groups = parameter_groups(decoder, config)
    if not groups:
        raise ValueError("every parameter is frozen: nothing to optimise; a stage with train_only_indexer needs teacher=full_csa or compressed_only")
    return MuonAdamW(groups, fused=decoder.fused)  # type: ignore[arg-type]
