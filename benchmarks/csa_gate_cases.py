# SPDX-License-Identifier: Apache-2.0
"""The grid of the correctness gate and a pairwise cover of it: every pair of levels of two factors occurs in at least one case.

Legend: T tokens, C compressed entries, H heads, D head dim, HI/DI index heads / index head dim, K top-k, W window, m ratio.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import ALL_VISIBLE, PackedLayout

LENGTHS = {
    "one": ([515], 515),
    "odd": ([63, 111, 1, 200, 37], 412),
    "empty": ([0, 1, 250, 0, 3, 1, 130], 399),  # the rest is padding
    "equal": ([128, 128, 128], 384),
}
# Each level is kept for a reason: 12 and 96 are no powers of two, 128 heads need two blocks, 1 head makes both teachers equal.
FACTORS: dict[str, tuple] = {
    "documents": tuple(LENGTHS),
    "heads": (64, 1, 8, 12, 128),
    "head_dim": (512, 16, 64, 96, 128),
    "indexer": ((64, 128), (1, 16), (4, 32), (20, 96), (128, 256)),
    "topk": ("below", "at", "above"),
    "ids": ("selected", "shuffled_holes", "empty_rows", "all_visible", "nothing"),
    "sinks": ("normal", "+1e4", "-1e4", "+-inf", "+200"),
    "logits": (1, 300),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "teacher": ("full_csa", "compressed_only"),
    "window": (128, 0, 8, 33),
    "ratio": (4, 32),
}
MOST_CASES = 80


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    documents: str
    heads: int
    head_dim: int
    indexer: tuple[int, int]
    topk: str
    ids: str
    sinks: str
    logits: int
    dtype: torch.dtype
    teacher: str
    window: int
    ratio: int

    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        index = "x".join(map(str, self.indexer))
        return (
            f"{self.documents} H{self.heads} D{self.head_dim} I{index} K-{self.topk} {self.ids} sinks{self.sinks} logits{self.logits} {dtype} "
            f"{self.teacher} W{self.window} m{self.ratio}"
        )


def pairwise_cases() -> list[Case]:
    """A cover of all pairs, the same on every call: each case takes, factor by factor, the level with most pairs still open."""
    names = list(FACTORS)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(FACTORS[names[a]]))
        for j in range(len(FACTORS[names[b]]))
    }
    cases = []
    while open_pairs:
        (a, i), (b, j) = min(open_pairs)
        chosen = {a: i, b: j}
        for factor in range(len(names)):
            if factor in chosen:
                continue
            gains = []
            for level in range(len(FACTORS[names[factor]])):
                pairs = [tuple(sorted(((factor, level), (other, chosen[other])))) for other in chosen]
                gains.append((sum(pair in open_pairs for pair in pairs), -level))
            chosen[factor] = -max(gains)[1]
        open_pairs -= {((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(range(len(names)), 2)}
        cases.append(Case(**{name: FACTORS[name][chosen[k]] for k, name in enumerate(names)}))
    return cases


@dataclass
class Inputs:
    """Tensors of one layer in the dtype of the case; index_w and sink are fp32."""

    layout: PackedLayout
    ratio: int
    window: int
    topk: int
    scale: float
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor
    q: Tensor
    window_kv: Tensor
    compressed_kv: Tensor
    sink: Tensor
    grad_out: Tensor
    selected: object = None
    grad_kl: float = 0.625
    named: tuple[str, ...] = field(default=("index_q", "index_k", "index_w", "q", "window_kv", "compressed_kv", "sink"))

    def as_dtype(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Leaves that require gradients."""
        return {name: getattr(self, name).detach().to(dtype).clone().requires_grad_() for name in self.named}

    def leaves(self) -> dict[str, Tensor]:
        """Leaves that require gradients, each in its own dtype."""
        return {name: getattr(self, name).detach().clone().requires_grad_() for name in self.named}


def random_inputs(
    lengths: list[int],
    num_tokens: int,
    heads: int,
    head_dim: int,
    indexer: tuple[int, int],
    topk: int,
    window: int,
    ratio: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    logits: float = 1.0,
) -> Inputs:
    """Standard normal tensors; `logits` > 1 stretches the queries so that the largest attention logits reach about that size."""
    g = torch.Generator(device=device).manual_seed(seed)
    layout = PackedLayout.from_lengths(lengths, num_tokens, device=device)
    entries = layout.num_compressed(ratio)
    index_heads, index_dim = indexer

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    stretch = logits / 4 if logits > 1 else 1.0  # of a standard normal logit, about 4 is the largest
    return Inputs(
        layout=layout,
        ratio=ratio,
        window=window,
        topk=topk,
        scale=head_dim**-0.5,
        index_q=draw(num_tokens, index_heads, index_dim).to(dtype),
        index_k=draw(entries, index_dim).to(dtype),
        index_w=draw(num_tokens, index_heads) * (index_heads * index_dim) ** -0.5,
        q=(draw(num_tokens, heads, head_dim) * stretch).to(dtype),
        window_kv=draw(num_tokens, head_dim).to(dtype),
        compressed_kv=draw(entries, head_dim).to(dtype),
        sink=draw(heads),
        grad_out=draw(num_tokens, heads, head_dim).to(dtype),
    )


def inputs_of(case: Case, device: str, seed: int) -> Inputs:
    """Tensors of a case; `selected` stays for the caller to fill, see `ids_of`."""
    lengths, num_tokens = LENGTHS[case.documents]
    most = max(lengths) // case.ratio
    topk = {"below": max(1, min(most // 3, 48)), "at": max(1, most), "above": sum(lengths) // case.ratio + 5}[case.topk]
    x = random_inputs(
        lengths, num_tokens, case.heads, case.head_dim, case.indexer, topk, case.window, case.ratio, case.dtype, device, seed, float(case.logits)
    )
    if case.sinks in ("+1e4", "-1e4", "+200"):
        x.sink = x.sink + float(case.sinks)
    elif case.sinks == "+-inf":
        x.sink[0] = float("inf")
        x.sink[-1] = float("-inf")
    return x


def ids_of(case: Case, x: Inputs, chosen: Tensor, seed: int) -> object:
    """What `selected` holds: the ids of `select`, disturbed as the case says, or a marker."""
    if case.ids == "all_visible":
        return ALL_VISIBLE
    if case.ids == "nothing":
        return torch.full_like(chosen, -1)
    g = torch.Generator(device=chosen.device).manual_seed(seed)
    ids = chosen.clone()
    if case.ids == "shuffled_holes":
        order = torch.rand(ids.shape, device=ids.device, generator=g).argsort(-1)
        ids = ids.gather(1, order)
        # every kind of invalid id: padding, negative, beyond the entries, of the future or of another document
        invalid = torch.randint(-3, 3 * x.compressed_kv.shape[0] + 2, ids.shape, device=ids.device, generator=g, dtype=torch.int32)
        first, visible = x.layout.entry_start(x.ratio)[:, None], x.layout.visible_compressed(x.ratio)[:, None]
        invalid = torch.where((invalid >= first) & (invalid < first + visible), -1, invalid)
        ids = torch.where(torch.rand(ids.shape, device=ids.device, generator=g) < 0.3, invalid, ids)
    if case.ids == "empty_rows":
        ids[torch.rand(ids.shape[0], device=ids.device, generator=g) < 0.2] = -1
    return ids.contiguous()
