# SPDX-License-Identifier: Apache-2.0
"""PackedLayout: where the documents of one packed row begin and end, and everything that follows from it.

Legend: T tokens in the row, N documents, R query rows (T unless the layout is a slice), C compressed entries, W window, m compression ratio.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class PackedLayout:
    """Documents packed head to tail into one row of `num_tokens` tokens; what lies behind the last document is padding.

    Document n holds the tokens [cu_seqlens[n], cu_seqlens[n + 1]); zero-length documents are legal. A fixed-shape batch is the case of equal
    lengths. Padding tokens have document -1, position 0, no visible entry and no window. All index tensors are int32 and live on `device`;
    the lengths also stay on the host, so that no step ever waits for the device to tell one.

    Args:
        cu_seqlens: integer [N + 1], starts at 0, never decreases. Building from a tensor on a device costs one copy to the host.
        num_tokens: T; default `cu_seqlens[-1]`.

    Raises:
        ValueError: boundaries that do not start at 0, decrease, or reach beyond `num_tokens`.
    """

    cu_seqlens: Tensor
    document_of_token: Tensor  # int32 [R]
    position_of_token: Tensor  # int32 [R], counted from the start of the document

    def __init__(self, cu_seqlens: Tensor, num_tokens: int | None = None) -> None:
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype.is_floating_point or cu_seqlens.dtype == torch.bool:
            raise ValueError(f"cu_seqlens must be an integer tensor [documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        bounds = [int(b) for b in cu_seqlens.tolist()]
        if bounds[0] != 0 or any(b < a for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens must start at 0 and never decrease, got {bounds[:16]}")
        total = bounds[-1] if num_tokens is None else num_tokens
        if total < bounds[-1]:
            raise ValueError(f"num_tokens={total} is smaller than the {bounds[-1]} tokens of the documents; legal: >= {bounds[-1]}")
        if total >= 2**31:
            raise ValueError(f"num_tokens={total} does not fit int32 ids; legal: < 2**31")
        self.num_tokens = total
        self.first_row = 0
        self.num_rows = total
        self._bounds = bounds
        self._cache: dict[tuple[str, int], Tensor] = {}
        lengths = torch.tensor([b - a for a, b in itertools.pairwise(bounds)], dtype=torch.int64)
        documents = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)
        starts = torch.tensor(bounds[:-1], dtype=torch.int32)[documents.long()]
        document, position = (torch.full((total,), fill, dtype=torch.int32) for fill in (-1, 0))
        document[: bounds[-1]] = documents
        position[: bounds[-1]] = torch.arange(bounds[-1], dtype=torch.int32) - starts
        device = cu_seqlens.device
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self.document_of_token = document.to(device, non_blocking=True)
        self.position_of_token = position.to(device, non_blocking=True)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], num_tokens: int | None = None, device: torch.device | str = "cpu") -> PackedLayout:
        """Layout of documents of these lengths; `num_tokens` beyond their sum is padding. ValueError for a negative length."""
        if any(length < 0 for length in lengths):
            raise ValueError(f"document lengths must be >= 0, got {list(lengths)[:16]}")
        bounds = [0, *itertools.accumulate(int(length) for length in lengths)]
        return cls(torch.tensor(bounds, dtype=torch.int64), num_tokens).to(device)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths, on the host."""
        return tuple(b - a for a, b in itertools.pairwise(self._bounds))

    @property
    def num_real_tokens(self) -> int:
        """Tokens that belong to a document; the padding begins here."""
        return self._bounds[-1]

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    def compressed_cu_seqlens(self, ratio: int) -> Tensor:
        """int32 [N + 1]: boundaries of each document's floor(length / m) compressed entries within the C entries of the row."""

        def build() -> Tensor:
            counts = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]) // ratio
            return torch.cat([self.cu_seqlens[:1], counts.cumsum(0, dtype=torch.int32)])

        return self._cached("compressed", _checked_ratio(ratio), build)

    def visible_compressed(self, ratio: int) -> Tensor:
        """int32 [R]: entries of its own document that a query sees, (position + 1) // m: an entry is visible once its last token is."""

        def build() -> Tensor:
            return torch.where(self.document_of_token >= 0, (self.position_of_token + 1) // ratio, 0)

        return self._cached("visible", _checked_ratio(ratio), build)

    def entry_start(self, ratio: int) -> Tensor:
        """int32 [R]: id of the first entry of the row's document; a query sees the ids [start, start + visible). 0 for padding."""

        def build() -> Tensor:
            starts = self.compressed_cu_seqlens(ratio)[self.document_of_token.clamp(min=0).long()]
            return torch.where(self.document_of_token >= 0, starts, 0)

        return self._cached("entry_start", _checked_ratio(ratio), build)

    def window_start(self, window: int) -> Tensor:
        """int32 [R]: first token id in the window of a row, whose window is [start, own id]; beyond the row (num_tokens) for padding."""

        def build() -> Tensor:
            reach = torch.minimum(self.position_of_token, torch.full_like(self.position_of_token, window - 1))
            return torch.where(self.document_of_token >= 0, self.token_ids - reach, self.num_tokens)

        return self._cached("window_start", _checked_window(window), build)

    def window_ids(self, window: int) -> Tensor:
        """int32 [R, W]: ascending global token ids, own position included, never of another document; -1 behind the last valid one."""

        def build() -> Tensor:
            ids = self.window_start(window)[:, None] + torch.arange(window, dtype=torch.int32, device=self.device)
            return torch.where(ids <= self.token_ids[:, None], ids, -1)

        return self._cached("window", _checked_window(window), build)

    @property
    def token_ids(self) -> Tensor:
        """int32 [R]: global token id of each row."""
        return self._cached("token_ids", 0, lambda: self._arange())

    def num_compressed(self, ratio: int) -> int:
        """C that the documents need, on the host: sum of floor(length / m)."""
        _checked_ratio(ratio)
        return sum(length // ratio for length in self.lengths)

    def num_query_rows(self, ratio: int) -> int:
        """Real rows with at least one visible entry, on the host: the divisor of the indexer loss of the whole row."""
        _checked_ratio(ratio)
        return sum(max(0, length - ratio + 1) for length in self.lengths)

    def longest_document(self) -> int:
        """Tokens of the longest document, 0 without one."""
        return max(self.lengths, default=0)

    def windows_come_first(self, ratio: int) -> bool:
        """Whether the windows of m tokens behind the compressed entries are, one after the other, the first rows; known on the host."""
        lengths = [length for length in self.lengths if length]
        while lengths and lengths[-1] < _checked_ratio(ratio):  # documents without an entry at the end
            lengths.pop()
        return all(length % ratio == 0 for length in lengths[:-1])

    def entry_range(self, start: int, stop: int, ratio: int) -> tuple[int, int]:
        """Host bounds [lo, hi) of all entry ids that any of the rows [start, stop) of this layout sees. Empty: lo == hi."""
        _checked_ratio(ratio)
        first, last = start + self.first_row, min(stop + self.first_row, self.num_real_tokens) - 1
        if first > last:
            return 0, 0
        first_doc, last_doc = (bisect.bisect_right(self._bounds, t) - 1 for t in (first, last))
        lengths = self.lengths
        lo = sum(length // ratio for length in lengths[:first_doc])
        hi = sum(length // ratio for length in lengths[:last_doc]) + (last - self._bounds[last_doc] + 1) // ratio
        return lo, max(lo, hi)

    def query_slice(self, start: int, stop: int) -> PackedLayout:
        """Layout of the queries [start, stop) alone, against the keys of the whole row: ids and positions stay global.

        Per-row tensors shrink to R = stop - start rows; `num_tokens` stays T. ValueError outside [0, R].
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(f"query slice [{start}, {stop}) is outside the {self.num_rows} rows of this layout")
        part = copy.copy(self)
        part._cache = {}
        part.first_row, part.num_rows = self.first_row + start, stop - start
        part.document_of_token = self.document_of_token[start:stop]
        part.position_of_token = self.position_of_token[start:stop]
        return part

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedLayout:
        """This layout with its tensors on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedLayout:
        """This layout with its tensors in page-locked host memory."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> PackedLayout:
        other = copy.copy(self)
        other.cu_seqlens = function(self.cu_seqlens)
        other.document_of_token = function(self.document_of_token)
        other.position_of_token = function(self.position_of_token)
        other._cache = {key: function(tensor) for key, tensor in self._cache.items()}
        return other

    def _arange(self) -> Tensor:
        return torch.arange(self.first_row, self.first_row + self.num_rows, dtype=torch.int32, device=self.device)

    def _cached(self, name: str, argument: int, build: Callable[[], Tensor]) -> Tensor:
        key = (name, argument)
        if key not in self._cache:
            # a tensor first made under inference_mode could not be saved for a later backward
            with torch.inference_mode(False), torch.no_grad():
                self._cache[key] = build()
        return self._cache[key]

    def __repr__(self) -> str:
        rows = f"[{self.first_row}, {self.first_row + self.num_rows})"
        return f"PackedLayout(documents={len(self._bounds) - 1}, num_tokens={self.num_tokens}, rows={rows})"


def _checked_ratio(ratio: int) -> int:
    if ratio < 1:
        raise ValueError(f"compression ratio must be >= 1, got {ratio}")
    return ratio


def _checked_window(window: int) -> int:
    if window < 0:
        raise ValueError(f"window must be >= 0, got {window}")
    return window
