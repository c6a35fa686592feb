# SPDX-License-Identifier: Apache-2.0
"""What a data loader hands to the training module: one packed row of T tokens and the exact divisors of its optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.layout import PackedLayout

IGNORED = -100  # target of a position that has no token to predict


@dataclass(frozen=True)
class Divisors:
    """What the losses are divided by, at least 1 each: StepCounts as numbers, or as fp32 scalars on the device where a CUDA graph reads them."""

    tokens: float | Tensor
    mtp_tokens: float | Tensor
    documents: float | Tensor
    query_rows: Mapping[int, float | Tensor]


@dataclass(frozen=True)
class StepCounts:
    """Divisors of the losses, as host integers over every micro-batch and every rank of one optimizer step.

    Losses are sums over rows; dividing each sum by the count of the whole step makes accumulation and data parallelism exact, however unequal the
    micro-batches are.
    """

    tokens: int  # positions whose next token is predicted (LM loss)
    mtp_tokens: int  # positions whose token after the next is predicted (MTP loss)
    documents: int  # documents with at least one token (balance loss)
    query_rows: dict[int, int]  # compression ratio -> real query rows that see at least one compressed entry (indexer loss)

    def divisors(self) -> Divisors:
        """What the sums of the losses are divided by: an empty count divides by 1, its sum is 0."""
        return Divisors(
            max(1, self.tokens), max(1, self.mtp_tokens), max(1, self.documents), {ratio: max(1, rows) for ratio, rows in self.query_rows.items()}
        )

    def __add__(self, other: StepCounts) -> StepCounts:
        """Counts of two disjoint sets of rows together. ValueError when they were counted for different ratios."""
        if self.query_rows.keys() != other.query_rows.keys():
            raise ValueError(f"cannot add counts of different ratios: {sorted(self.query_rows)} and {sorted(other.query_rows)}")
        return StepCounts(
            self.tokens + other.tokens,
            self.mtp_tokens + other.mtp_tokens,
            self.documents + other.documents,
            {ratio: rows + other.query_rows[ratio] for ratio, rows in self.query_rows.items()},
        )


@dataclass(frozen=True)
class PackedBatch:
    """One packed row, padding at its end. A "document" of the layout is a piece of a real document, at most data.sequence_length tokens long."""

    tokens: Tensor  # int64 [T], 0 in padding
    targets: Tensor  # int64 [T], next token of the same real document, IGNORED where there is none or it does not count
    mtp_targets: Tensor  # int64 [T], the token after the next, IGNORED where there is none or it does not count
    layout: PackedLayout
    step: StepCounts
    target_bytes: int  # UTF-8 bytes that the counted targets of this row stand for
    distance: Tensor | None = None  # int32 [T], recall: tokens between the asked key and its binding where the answer is predicted, -1 elsewhere

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch with every tensor on `device`; counts stay on the host."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            targets=self.targets.to(device, non_blocking=non_blocking),
            mtp_targets=self.mtp_targets.to(device, non_blocking=non_blocking),
            layout=self.layout.to(device, non_blocking),
            distance=None if self.distance is None else self.distance.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> PackedBatch:
        """The same batch with every tensor in page-locked host memory (called by torch's DataLoader)."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            targets=self.targets.pin_memory(),
            mtp_targets=self.mtp_targets.pin_memory(),
            layout=self.layout.pin_memory(),
            distance=None if self.distance is None else self.distance.pin_memory(),
        )
