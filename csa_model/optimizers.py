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

# Eight steps pull every singular value near 1, two more with a contracting polynomial put it there: 1.0000 to 1.0005 for full-rank matrices.
NEWTON_SCHULZ_COEFFICIENTS: tuple[tuple[float, float, float], ...] = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
MUON_UPDATE_RMS = 0.18  # root mean square of one update at lr 1, that of AdamW in practice: one learning rate serves both algorithms
_ALGORITHMS = ("muon", "adamw")
Shape = tuple[int, int]


def orthogonalize(matrices: Tensor, coefficients: Sequence[tuple[float, float, float]] = NEWTON_SCHULZ_COEFFICIENTS, eps: float = 1e-30) -> Tensor:
    """Nearest semi-orthogonal matrix of each matrix of a stack, by Newton-Schulz iterations.

    Args:
        matrices: [B, n, m], each orthogonalised by itself. The dtype of the iteration is that of the input.
        coefficients: (a, b, c) per step of X <- aX + b(XX^T)X + c(XX^T)^2 X.
        eps: floor of the Frobenius norm; an all-zero matrix stays zero.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The norm in fp32 at least: squares of small bf16 gradients would lose their low bits.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / norm.clamp(min=eps)).to(matrices.dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True)
class _Stack:
    """Matrices [k, n, m] of one parameter and their update."""

    target: Tensor
    update: Tensor
    lr: float


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
    batch of larger ones.

    Raises ValueError for an unknown algorithm, a Muon parameter that is no matrix, or a sharded parameter (orthogonalisation needs whole matrices).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        update_rms: float = MUON_UPDATE_RMS,
        coefficients: Sequence[tuple[float, float, float]] = NEWTON_SCHULZ_COEFFICIENTS,
        newton_schulz_dtype: torch.dtype | None = None,
    ) -> None:
        self.update_rms = update_rms
        self.coefficients = tuple(coefficients)
        self.newton_schulz_dtype = newton_schulz_dtype
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
            if algorithm == "muon" and (p.ndim not in (2, 3) or p.shape[0] % blocks or (p.ndim == 3 and blocks != 1)):
                shape = f"{tuple(p.shape)} in {blocks} block(s)"
                raise ValueError(f"parameter group {name!r}: Muon takes [n, m] or [E, n, m], got {shape}; use algorithm='adamw'")

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
        stacks: dict[tuple[torch.device, torch.dtype], dict[Shape, list[_Stack]]] = defaultdict(lambda: defaultdict(list))
        for group in groups:
            pairs = [(p, b) for p, b in zip(group["params"], group["matrices"], strict=True) if p.grad is not None]
            if not pairs:
                continue
            params = [p for p, _ in pairs]
            grads = [p.grad for p in params]
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            updates = torch._foreach_add(grads, buffers, alpha=group["momentum"])  # Nesterov
            torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            for (p, blocks), update in zip(pairs, updates, strict=True):
                target, update = (t if t.ndim == 3 else t.view(blocks, -1, t.shape[1]) for t in (p, update))
                stacks[p.device, p.dtype][target.shape[1], target.shape[2]].append(_Stack(target, update, group["lr"]))
        for (device, dtype), of_shape in stacks.items():
            work = self.newton_schulz_dtype or (torch.bfloat16 if device.type == "cuda" else dtype)
            counts = {shape: sum(len(s.update) for s in members) for shape, members in of_shape.items()}
            together = batches(counts, padded_elements(device))
            # the longest first: the host launches the others while the device is at it
            for size in sorted(together, key=lambda s: -s[0] * math.prod(s) * sum(counts[shape] for shape in together[s])):
                shapes = together[size]
                self._step_batch(size, {shape: of_shape[shape] for shape in shapes}, work, device)

    def _step_batch(self, size: Shape, of_shape: dict[Shape, list[_Stack]], work: torch.dtype, device: torch.device) -> None:
        """One orthogonalisation of everything in `of_shape`, each matrix in the corner of one of `size`. Every loop is a few launches per shape."""
        counts = [sum(len(s.update) for s in members) for members in of_shape.values()]
        padded = any(sorted(shape) != list(size) for shape in of_shape)
        batch = (torch.zeros if padded else torch.empty)(sum(counts), *size, dtype=work, device=device)
        for (shape, members), slot in zip(of_shape.items(), batch.split(counts), strict=True):
            corner = _corner(slot, shape)
            packed = corner if corner.is_contiguous() else torch.empty(corner.shape, dtype=work, device=device)
            torch._foreach_copy_(packed.split([len(s.update) for s in members]), [s.update for s in members])
            if packed is not corner:
                corner.copy_(packed)
        for (shape, members), slot in zip(of_shape.items(), orthogonalize(batch, self.coefficients).split(counts), strict=True):
            directions = _corner(slot, shape).contiguous().split([len(s.update) for s in members])
            torch._foreach_copy_([s.update for s in members], directions)  # back to the parameters' dtype
            for lr in {s.lr for s in members}:
                chosen = [s for s in members if s.lr == lr]
                scale = -lr * self.update_rms * math.sqrt(max(shape))
                torch._foreach_add_([s.target for s in chosen], [s.update for s in chosen], alpha=scale)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                # A host integer: a step kept on the device would have to be read back in every update.
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
        grads = [p.grad for p in params]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        (beta1, beta2), lr = group["betas"], group["lr"]
        torch._foreach_mul_(params, 1.0 - lr * group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1.0 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, [math.sqrt(1.0 - beta2 ** s["step"]) for s in states])
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, [-lr / (1.0 - beta1 ** s["step"]) for s in states])


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
    return MuonAdamW(groups)
