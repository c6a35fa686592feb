# SPDX-License-Identifier: Apache-2.0
"""Random layers for the kernel tests: inputs of every operation for a list of document lengths, and the tolerances by dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels.unfused.keys
from kernels import PackedLayout

# Largest difference to the float64 oracle for inputs of order 1: float64 from the order of additions, float32 a few hundred roundings of 6e-8.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


@dataclass
class Case:
    lengths: tuple[int, ...]
    layout: PackedLayout
    ratio: int
    window: int
    scale: float
    q: Tensor
    window_kv: Tensor
    compressed_kv: Tensor
    sink: Tensor
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor

    @property
    def attention(self) -> tuple[Tensor, ...]:
        """The differentiable inputs of attend."""
        return self.q, self.window_kv, self.compressed_kv, self.sink

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.index_q, self.index_k, self.index_w

    @property
    def tail(self) -> tuple[PackedLayout, int, int, float]:
        return self.layout, self.ratio, self.window, self.scale

    def leaves(self) -> list[Tensor]:
        return [*self.attention, *self.index]

    def require_grad(self) -> Case:
        for leaf in self.leaves():
            leaf.requires_grad_()
            leaf.grad = None
        return self


def make_case(
    lengths: Sequence[int],
    *,
    padding: int = 0,
    ratio: int = 4,
    window: int = 3,
    heads: int = 3,
    dim: int = 4,
    index_heads: int = 2,
    index_dim: int = 5,
    surplus: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Normal inputs. `surplus` entries stand behind those of the layout; `padding` tokens behind the documents."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    layout = PackedLayout.from_lengths(lengths, num_tokens=sum(lengths) + padding)
    tokens, entries = layout.num_tokens, layout.num_compressed(ratio) + surplus
    sink_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        tuple(lengths),
        layout,
        ratio,
        window,
        dim**-0.5,
        normal(tokens, heads, dim),
        normal(tokens, dim),
        normal(entries, dim),
        normal(heads).to(sink_dtype),
        normal(tokens, index_heads, index_dim),
        normal(entries, index_dim),
        normal(tokens, index_heads),
    )


@contextmanager
def chunk_elements(elements: int) -> Iterator[None]:
    """Small chunks, so that small cases cross their borders."""
    before = dict(kernels.unfused.keys.CHUNK_ELEMENTS)
    kernels.unfused.keys.CHUNK_ELEMENTS["cpu"] = elements
    try:
        yield
    finally:
        kernels.unfused.keys.CHUNK_ELEMENTS.update(before)
