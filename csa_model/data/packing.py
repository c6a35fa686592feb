# SPDX-License-Identifier: Apache-2.0
"""Pieces of documents, the plan that packs them into rows, and the packed row itself.

Packing rule of one epoch: the pieces are shuffled, then placed one after the other into the first open row that has room. At most OPEN_ROWS rows
are open; when none has room the fullest is closed (the older one on a tie). A row without room for the shortest piece closes at once, and rows stand
in the order in which they closed. A piece is never cut by packing and padding stands at the end of a row only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from csa_model.data.batch import IGNORED, PackedBatch, StepCounts
from kernels.layout import PackedLayout

OPEN_ROWS = 16


@dataclass(frozen=True)
class Piece:
    """At most data.sequence_length consecutive tokens of one document, and what each of them predicts. All arrays int64 [n]."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]  # next token of the document, also beyond the end of the piece; IGNORED where none counts
    mtp_targets: NDArray[np.int64]  # the token after the next
    target_bytes: int = 0  # UTF-8 bytes of the counted targets; 0 where a token has no bytes
    distance: NDArray[np.int64] | None = None  # recall only, see PackedBatch.distance

    @staticmethod
    def cut(document: NDArray[np.integer], start: int, stop: int, token_bytes: NDArray[np.integer] | None = None) -> Piece:
        """Tokens start..stop-1 of `document`. `token_bytes[id]` is the number of UTF-8 bytes that a token id stands for."""
        ahead = np.asarray(document[start : stop + 2], dtype=np.int64)
        n = stop - start
        targets, mtp_targets = np.full(n, IGNORED), np.full(n, IGNORED)
        targets[: len(ahead) - 1] = ahead[1 : n + 1]
        mtp_targets[: max(0, len(ahead) - 2)] = ahead[2 : n + 2]
        size = 0 if token_bytes is None else int(token_bytes[targets[targets != IGNORED]].sum())
        return Piece(ahead[:n], targets, mtp_targets, size)


def pack(
    pieces: Iterable[Piece | Sequence[int] | NDArray[np.integer]],
    num_tokens: int | None,
    ratios: Iterable[int],
    step: StepCounts | None = None,
) -> PackedBatch:
    """Lay pieces one after the other in a row of `num_tokens` tokens (None: no padding).

    A plain sequence of ids is a whole document. `ratios` are the compression ratios > 0 in use. `step` holds the counts of the whole optimizer step;
    None counts this row alone. ValueError when the pieces do not fit.
    """
    row = [piece if isinstance(piece, Piece) else Piece.cut(np.asarray(piece, dtype=np.int64), 0, len(piece)) for piece in pieces]
    lengths = [len(piece.tokens) for piece in row]
    used = sum(lengths)
    total = used if num_tokens is None else num_tokens
    if used > total:
        raise ValueError(f"{len(row)} pieces of {used} tokens do not fit into a row of {total} tokens; a row takes at most {total}")
    tokens = np.zeros(total, dtype=np.int64)
    targets, mtp_targets = np.full(total, IGNORED), np.full(total, IGNORED)
    distance = np.full(total, -1, dtype=np.int32) if any(piece.distance is not None for piece in row) else None
    position = 0
    for piece, length in zip(row, lengths, strict=True):
        here = slice(position, position + length)
        tokens[here], targets[here], mtp_targets[here] = piece.tokens, piece.targets, piece.mtp_targets
        if distance is not None and piece.distance is not None:
            distance[here] = piece.distance
        position += length
    if step is None:
        step = StepCounts(
            tokens=int((targets != IGNORED).sum()),
            mtp_tokens=int((mtp_targets != IGNORED).sum()),
            documents=sum(length > 0 for length in lengths),
            query_rows={ratio: int(query_rows(np.array(lengths, dtype=np.int64), ratio).sum()) for ratio in ratios},
        )
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        mtp_targets=torch.from_numpy(mtp_targets),
        layout=PackedLayout.from_lengths(lengths or [0], num_tokens=total),
        step=step,
        target_bytes=sum(piece.target_bytes for piece in row),
        distance=None if distance is None else torch.from_numpy(distance),
    )


def query_rows(lengths: NDArray[np.integer], ratio: int) -> NDArray[np.int64]:
    """Query rows of documents of these lengths that see at least one entry: the entry of positions 0..ratio-1 is visible from position ratio-1 on."""
    return np.maximum(0, lengths.astype(np.int64) - ratio + 1)


@dataclass(frozen=True)
class EpochPlan:
    """Which pieces stand in which row. Row r holds the pieces order[starts[r] : starts[r + 1]]."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def pieces_of(self, row: int) -> NDArray[np.int64]:
        return self.order[self.starts[row] : self.starts[row + 1]]


def plan_epoch(lengths: NDArray[np.integer], row_tokens: int, seed: int, epoch: int) -> EpochPlan:
    """The packing of one pass over all pieces: a pure function of its arguments, by the rule above. Lengths lie in 1..row_tokens."""
    return plan_rows(lengths, permutation(len(lengths), seed, epoch), row_tokens)


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A shuffle of range(n). Made of raw generator words, whose stream numpy guarantees for ever; `Generator.permutation` is free to change."""
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(words, kind="stable")


def plan_rows(lengths: NDArray[np.integer], order: NDArray[np.int64], row_tokens: int) -> EpochPlan:
    """First-fit of the pieces, in the given order, into rows of `row_tokens` tokens with at most OPEN_ROWS rows open."""
    closed: list[list[int]] = []
    shortest = int(lengths.min(initial=row_tokens))
    free: list[int] = []
    rows: list[list[int]] = []
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        i = next((i for i, room in enumerate(free) if room >= length), len(rows))
        if i == len(rows):
            if len(rows) == OPEN_ROWS:
                fullest = free.index(min(free))
                closed.append(rows.pop(fullest))
                free.pop(fullest)
                i -= 1
            rows.append([])
            free.append(row_tokens)
        rows[i].append(piece)
        free[i] -= length
        if free[i] < shortest:
            closed.append(rows.pop(i))
            free.pop(i)
    closed.extend(rows)
    starts = np.zeros(len(closed) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in closed], out=starts[1:])
    return EpochPlan(np.array([piece for row in closed for piece in row], dtype=np.int64), starts)
