# SPDX-License-Identifier: Apache-2.0
"""A layout whose shapes and host values do not depend on the documents, for a CUDA graph that is captured once and replayed for other documents."""

from __future__ import annotations

import copy

import torch

from kernels.layout import PackedLayout, _checked_ratio


class StaticLayout(PackedLayout):
    """PackedLayout with room for any documents of one row length: the device knows them, the host only bounds.

    Behind the last document stand empty ones up to `max_documents`. `num_compressed` is floor(T / m): entries behind those of the documents belong to
    nobody, no row sees them. `longest_document` is `longest`. What only the host could tell exactly raises TypeError.

    Args:
        num_tokens: T of every row; max_documents: N; longest: tokens of the longest document that will ever be loaded.

    Raises:
        ValueError: a size that is negative or beyond int32.
    """

    def __init__(self, num_tokens: int, max_documents: int, longest: int, device: torch.device | str = "cpu") -> None:
        if not 0 <= num_tokens < 2**31 or max_documents < 1 or longest < 0:
            raise ValueError(f"need 0 <= num_tokens < 2**31, max_documents >= 1 and longest >= 0, got {num_tokens}, {max_documents} and {longest}")
        self.num_tokens = self.num_rows = num_tokens
        self.first_row = 0
        self.max_documents = max_documents
        self._longest = min(longest, num_tokens)
        self._bounds = []
        self._cache = {}
        self.cu_seqlens = torch.zeros(max_documents + 1, dtype=torch.int32, device=device)
        self.document_of_token = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
        self.position_of_token = torch.zeros(num_tokens, dtype=torch.int32, device=device)

    def holds(self, layout: PackedLayout) -> bool:
        """Whether `load` takes this layout."""
        sizes = layout.num_tokens == self.num_tokens and layout.num_rows == layout.num_tokens
        return sizes and len(layout.lengths) <= self.max_documents and layout.longest_document() <= self._longest

    def load(self, layout: PackedLayout) -> None:
        """Copy the documents of `layout` into the tensors of this one; nothing waits for the device. ValueError for one that it does not hold."""
        if not self.holds(layout):
            raise ValueError(
                f"a row of {layout.num_tokens} tokens with {len(layout.lengths)} documents of up to {layout.longest_document()} tokens does not fit "
                f"one of {self.num_tokens} tokens with up to {self.max_documents} documents of up to {self._longest} tokens"
            )
        used = layout.cu_seqlens.shape[0]
        self.cu_seqlens[:used].copy_(layout.cu_seqlens, non_blocking=True)
        self.cu_seqlens[used:] = layout.num_real_tokens
        self.document_of_token.copy_(layout.document_of_token, non_blocking=True)
        self.position_of_token.copy_(layout.position_of_token, non_blocking=True)
        self._cache = {}

    def renewed(self) -> StaticLayout:
        """The same tensors without anything that was derived from them: what is derived anew is computed anew when a graph is replayed."""
        other = copy.copy(self)
        other._cache = {}
        return other

    def num_compressed(self, ratio: int) -> int:
        """C of every row, whatever its documents: floor(T / m)."""
        return self.num_tokens // _checked_ratio(ratio)

    def longest_document(self) -> int:
        """Bound on the tokens of a document."""
        return self._longest

    def entry_range(self, start: int, stop: int, ratio: int) -> tuple[int, int]:
        """All entries: which of them the rows [start, stop) see, the device alone knows."""
        return 0, self.num_compressed(ratio)

    def windows_come_first(self, ratio: int) -> bool:
        """False: that depends on the documents."""
        return False

    @property
    def lengths(self) -> tuple[int, ...]:
        raise TypeError("the lengths of the documents of a StaticLayout are known to the device alone")

    @property
    def num_real_tokens(self) -> int:
        raise TypeError("the number of real tokens of a StaticLayout is known to the device alone")

    def num_query_rows(self, ratio: int) -> int:
        raise TypeError("the number of query rows of a StaticLayout is known to the device alone; the divisors of the losses come with the batch")

    def __repr__(self) -> str:
        return (
            f"StaticLayout(documents<={self.max_documents}, num_tokens={self.num_tokens}, rows=[{self.first_row}, {self.first_row + self.num_rows}))"
        )

    def _mapped(self, function: object) -> PackedLayout:
        raise TypeError("a StaticLayout stays where its tensors are: a graph holds their addresses")


def pad_documents(count: int) -> int:
    """Room for `count` documents and as many more, in powers of two: rows of a corpus vary, and every new size is another graph."""
    return max(64, 1 << (2 * count - 1).bit_length())
