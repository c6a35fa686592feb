# SPDX-License-Identifier: Apache-2.0
"""The three ways a query meets its keys: a band of tokens (window), ids of its own (selected), one shared range (all visible entries).

Each source hands out chunks of query rows with the same four operations, so that attention and indexer loss are written once.

Legend: R query rows of a chunk, X vectors per row (heads), D width of a key, K keys per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.backend import AllVisible, Selection
from kernels.layout import PackedLayout

# Elements that the temporaries of one chunk may have: about a second-level cache on a CPU, enough to fill the card on a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 20}
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 26
_MIN_BLOCK = 16  # queries that share a band of tokens, at least
_SHORTEST_SHARED = 256


class KeyChunk(Protocol):
    """Keys of the rows [start, stop)."""

    bias: Tensor  # [R, K]: 0 where the row may read the key, -inf where not

    def dot(self, x: Tensor) -> Tensor:
        """[R, X, D] -> [R, X, K]: inner products with the keys."""

    def mix(self, p: Tensor) -> Tensor:
        """[R, X, K] -> [R, X, D]: sum of the keys weighted by p."""

    def add_outer(self, grad: Tensor, p: Tensor, x: Tensor) -> None:
        """grad of the keys += sum over rows and X of p [R, X, K] times x [R, X, D]. Same order of additions in every run on a CPU."""


class KeySource(Protocol):
    """All keys of one kind."""

    def elements_per_row(self, vectors: int) -> int:
        """Temporary elements per query row when `vectors` vectors per row meet the keys."""

    def chunk(self, start: int, stop: int) -> KeyChunk: ...

    def new_grad(self) -> Tensor:
        """Zeroed buffer for add_outer."""

    def finish(self, grad: Tensor) -> Tensor:
        """Buffer -> gradient in the shape of the keys."""


class _Band:
    def __init__(self, keys: Tensor, bias: Tensor, start: int, block: int, window: int, rows: int) -> None:
        self.bias, self._start, self._block, self._window, self._rows = bias, start, block, window, rows
        self._blocks = -(-rows // block)
        span = self._blocks * block + window - 1
        self._bands = keys[start : start + span].unfold(0, block + window - 1, block)  # [blocks, D, K], a view

    def _blocked(self, x: Tensor) -> Tensor:
        missing = self._blocks * self._block - self._rows
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.reshape(self._blocks, self._block * x.shape[1], x.shape[2])

    def dot(self, x: Tensor) -> Tensor:
        return torch.bmm(self._blocked(x), self._bands).view(-1, x.shape[1], self._bands.shape[2])[: self._rows]

    def mix(self, p: Tensor) -> Tensor:
        return torch.bmm(self._blocked(p), self._bands.transpose(1, 2)).view(-1, p.shape[1], self._bands.shape[1])[: self._rows]

    def add_outer(self, grad: Tensor, p: Tensor, x: Tensor) -> None:
        bands = torch.bmm(self._blocked(p).transpose(1, 2), self._blocked(x))  # [blocks, K, D]
        if self._blocks == 1:
            grad[self._start : self._start + bands.shape[1]] += bands[0]
            return
        before, total = self._window - 1, self._blocks * self._block
        grad[self._start + before : self._start + before + total].view(self._blocks, self._block, -1).add_(bands[:, before:])
        grad[self._start : self._start + total].view(self._blocks, self._block, -1)[:, :before] += bands[:, :before]


class WindowKeys:
    """Token keys [T, D]: a row reads its own token and the window - 1 before it within its document.

    A block of queries shares the band of tokens that any of them reads, which turns thousands of small gathers into one product.
    Keys that are not finite are taken out of the products and come back as a NaN logit of exactly the rows that read them.
    """

    def __init__(self, keys: Tensor, layout: PackedLayout, window: int) -> None:
        self._layout, self._window, self._block = layout, window, max(window, _MIN_BLOCK)
        finite = torch.isfinite(keys).all(-1)
        self._keys = pad(torch.where(finite[:, None], keys, 0), (0, 0, window - 1, self._block))
        self._poison = pad(torch.where(finite, 0.0, torch.nan).to(keys.dtype), (window - 1, self._block))
        self._start = layout.window_start(window)

    def elements_per_row(self, vectors: int) -> int:
        return vectors * (self._block + self._window - 1)

    def chunk(self, start: int, stop: int) -> _Band:
        rows, block, first = stop - start, min(self._block, stop - start), start + self._layout.first_row
        width = block + self._window - 1
        own = self._layout.token_ids[start:stop]
        band_start = own - torch.arange(rows, dtype=torch.int32, device=own.device) % block - (self._window - 1)
        ids = band_start[:, None] + torch.arange(width, dtype=torch.int32, device=own.device)
        seen = (ids >= self._start[start:stop, None]) & (ids <= own[:, None])
        blocks = -(-rows // block)
        poison = self._poison[first : first + blocks * block + self._window - 1].unfold(0, width, block)
        poison = poison[:, None].expand(-1, block, -1).reshape(-1, width)[:rows]
        return _Band(self._keys, torch.where(seen, poison, -torch.inf), first, block, self._window, rows)

    def new_grad(self) -> Tensor:
        return torch.zeros_like(self._keys)

    def finish(self, grad: Tensor) -> Tensor:
        return grad[self._window - 1 : grad.shape[0] - self._block]


class _Gathered:
    def __init__(self, keys: Tensor, ids: Tensor, bias: Tensor) -> None:
        self.bias, self._ids = bias, ids.reshape(-1)
        self._keys = keys.index_select(0, self._ids).view(*ids.shape, keys.shape[1])

    def dot(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self._keys.transpose(1, 2))

    def mix(self, p: Tensor) -> Tensor:
        return torch.bmm(p, self._keys)

    def add_outer(self, grad: Tensor, p: Tensor, x: Tensor) -> None:
        grad.index_add_(0, self._ids, torch.bmm(p.transpose(1, 2), x).view(-1, x.shape[2]))


class SelectedKeys:
    """Entry keys [C, D], read by ids [R, K]. Invalid ids read one extra key of zeros, so that whatever lies behind them cannot leak."""

    def __init__(self, keys: Tensor, ids: Tensor, layout: PackedLayout, ratio: int) -> None:
        start = layout.entry_start(ratio)[:, None]
        seen = (ids >= start) & (ids < start + layout.visible_compressed(ratio)[:, None])
        self._keys = pad(keys, (0, 0, 0, 1))
        self._ids = torch.where(seen, ids, keys.shape[0])
        self._none = keys.shape[0]

    def elements_per_row(self, vectors: int) -> int:
        return self._ids.shape[1] * (vectors + 2 * self._keys.shape[1])

    def chunk(self, start: int, stop: int) -> _Gathered:
        ids = self._ids[start:stop]
        zero = torch.zeros((), dtype=self._keys.dtype, device=ids.device)
        return _Gathered(self._keys, ids, torch.where(ids == self._none, -torch.inf, zero))

    def new_grad(self) -> Tensor:
        return torch.zeros_like(self._keys)

    def finish(self, grad: Tensor) -> Tensor:
        return grad[:-1]


class _Range:
    def __init__(self, keys: Tensor, bias: Tensor, first: int) -> None:
        self.bias, self._keys, self._first = bias, keys, first

    def dot(self, x: Tensor) -> Tensor:
        return torch.mm(x.flatten(0, 1), self._keys.t()).view(x.shape[0], x.shape[1], self._keys.shape[0])

    def mix(self, p: Tensor) -> Tensor:
        return torch.mm(p.flatten(0, 1), self._keys).view(p.shape[0], p.shape[1], self._keys.shape[1])

    def add_outer(self, grad: Tensor, p: Tensor, x: Tensor) -> None:
        grad[self._first : self._first + self._keys.shape[0]].addmm_(p.flatten(0, 1).t(), x.flatten(0, 1))


class VisibleKeys:
    """Entry keys [C, D]: a row reads every visible entry of its document. A chunk touches only the range that its documents span."""

    def __init__(self, keys: Tensor, layout: PackedLayout, ratio: int) -> None:
        self._layout, self._ratio = layout, ratio
        finite = torch.isfinite(keys).all(-1)
        self._keys = torch.where(finite[:, None], keys, 0)
        self._poison = torch.where(finite, 0.0, torch.nan).to(keys.dtype)
        self._start = layout.entry_start(ratio)
        self._stop = self._start + layout.visible_compressed(ratio)

    def elements_per_row(self, vectors: int) -> int:
        longest = self._layout.longest_document()
        return vectors * min(self._keys.shape[0], (longest + _shared_rows(self._layout)) // self._ratio + 1)

    def chunk(self, start: int, stop: int) -> _Range:
        first, last = self._layout.entry_range(start, stop, self._ratio)
        ids = torch.arange(first, last, dtype=torch.int32, device=self._keys.device)
        seen = (ids >= self._start[start:stop, None]) & (ids < self._stop[start:stop, None])
        return _Range(self._keys[first:last], torch.where(seen, self._poison[first:last], -torch.inf), first)

    def new_grad(self) -> Tensor:
        return torch.zeros_like(self._keys)

    def finish(self, grad: Tensor) -> Tensor:
        return grad


def entry_keys(keys: Tensor, ids: Selection, layout: PackedLayout, ratio: int) -> SelectedKeys | VisibleKeys:
    """Source of the compressed keys for ids [R, K] or ALL_VISIBLE."""
    return VisibleKeys(keys, layout, ratio) if isinstance(ids, AllVisible) else SelectedKeys(keys, ids, layout, ratio)


def _shared_rows(layout: PackedLayout) -> int:
    # rows of other documents in the chunk are wasted on a shared range, so a chunk is no longer than the longest document
    return max(_SHORTEST_SHARED, layout.longest_document())


def row_chunks(layout: PackedLayout, use: Sequence[tuple[KeySource, int]]) -> Iterator[tuple[int, int]]:
    """Row bounds of the chunks, padding left out, for sources that meet so many vectors per row.

    A function of shapes and lengths alone, so that equal runs add in an equal order.
    """
    rows = max(0, min(layout.num_rows, layout.num_real_tokens - layout.first_row))
    elements = sum(source.elements_per_row(vectors) for source, vectors in use)
    size = max(1, CHUNK_ELEMENTS.get(layout.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // max(1, elements))
    if any(isinstance(source, VisibleKeys) for source, _ in use):
        size = min(size, _shared_rows(layout))
    size -= size % _MIN_BLOCK if size > _MIN_BLOCK else 0
    for start in range(0, rows, size):
        yield start, min(rows, start + size)
