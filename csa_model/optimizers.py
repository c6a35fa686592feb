# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for the rest, as one torch optimizer (DeepSeek-V4 report, sections 2.4 and 4.2.2).

One object, so that Lightning's automatic optimization, a single scheduler and one optimizer state in the checkpoint suffice. Every parameter group
carries a `name` (shown beside its learning rate) and an `algorithm`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from csa_model.config import OptimizerConfig

# Eight steps pull every singular value near 1, two more with a contracting polynomial put it there: 1.0000 to 1.0005 for full-rank matrices.
NEWTON_SCHULZ_COEFFICIENTS: tuple[tuple[float, float, float], ...] = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
MUON_UPDATE_RMS = 0.18  # root mean square of one update at lr 1, that of AdamW in practice: one learning rate serves both algorithms
_ALGORITHMS = ("muon", "adamw")


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


class MuonAdamW(torch.optim.Optimizer):
    """Muon or AdamW per parameter group.

    Group options: `name`; `algorithm` ("muon" or "adamw"); `lr`; `weight_decay` (decoupled); for Muon `momentum` and `matrices`, for AdamW `betas`
    and `eps`. A Muon parameter is a matrix [n, m], a stack [E, n, m] of which every matrix is orthogonalised by itself, or a matrix that holds
    `matrices[i]` equal blocks of rows, orthogonalised one by one (the grouped output projection: its groups read different inputs). Matrices of one
    shape, of whatever parameter, are iterated as one batch, in bfloat16 on CUDA and in the parameter's dtype elsewhere.

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
        buckets: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
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
                target, stack = (t if t.ndim == 3 else t.unflatten(0, (blocks, -1)) for t in (p, update))
                if stack.shape[-2] > stack.shape[-1]:
                    target, stack = target.mT, stack.mT
                buckets[(p.device, p.dtype, *stack.shape[-2:])].append((target, stack, group["lr"]))
        for (device, dtype, _, wide), members in buckets.items():
            work = self.newton_schulz_dtype or (torch.bfloat16 if device.type == "cuda" else dtype)
            batch = torch.cat([stack.to(work) for _, stack, _ in members])
            directions = orthogonalize(batch, self.coefficients).split([len(stack) for _, stack, _ in members])
            scale = self.update_rms * math.sqrt(wide)
            for (target, _, lr), direction in zip(members, directions, strict=True):
                target.add_(direction, alpha=-lr * scale)

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
