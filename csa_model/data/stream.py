# SPDX-License-Identifier: Apache-2.0
"""The infinite stream of training rows and the loaders' datasets.

Row n of the stream is known from (seed, n) alone: epochs are planned one after the other and each plan is a pure function of (seed, epoch). So a run
that has consumed c rows continues with row c, whatever its workers, ranks or number of restarts.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from csa_model.data.batch import PackedBatch, StepCounts
from csa_model.data.packing import EpochPlan, Piece, pack, plan_epoch, query_rows

PLANS_KEPT = 2  # the epoch in use and its neighbour
VALIDATION_SEED = 0  # validation rows are the same for every seed of a run


class PieceSource(Protocol):
    """Pieces by number, with their sizes known without reading a token. Arrays int64 [pieces]; every length is at least 1."""

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]  # counted LM targets of each piece
    mtp_targets: NDArray[np.int64]  # counted MTP targets of each piece

    def piece(self, index: int) -> Piece: ...


@dataclass
class _PlannedEpoch:
    plan: EpochPlan
    totals: NDArray[np.int64]  # [rows + 1, 3 + ratios], running sums of the counts of the rows


class RowStream:
    """Plans of the training rows. Reads lengths only; pickles without its cached plans."""

    def __init__(self, source: PieceSource, row_tokens: int, ratios: Sequence[int], seed: int) -> None:
        self.row_tokens, self.ratios, self.seed = row_tokens, tuple(ratios), seed
        self._lengths = source.lengths
        per_piece = [source.targets, source.mtp_targets, np.ones_like(source.lengths)]
        self._per_piece = np.stack(per_piece + [query_rows(source.lengths, ratio) for ratio in self.ratios], axis=1)
        self._first_rows = [0]  # stream row at which each planned epoch begins, and the end of the last one
        self._plans: OrderedDict[int, _PlannedEpoch] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": OrderedDict()}

    def pieces_of(self, row: int) -> NDArray[np.int64]:
        """Numbers of the pieces in stream row `row`, in their order."""
        epoch = self.epoch_of(row)
        return self._epoch(epoch).plan.pieces_of(row - self._first_rows[epoch])

    def counts(self, first: int, stop: int) -> StepCounts:
        """Counts of the stream rows first..stop-1 together, from the plan alone."""
        total = np.zeros(self._per_piece.shape[1], dtype=np.int64)
        while first < stop:
            epoch = self.epoch_of(first)
            begin, end = self._first_rows[epoch], self._first_rows[epoch + 1]
            totals = self._epoch(epoch).totals
            total += totals[min(stop, end) - begin] - totals[first - begin]
            first = end
        tokens, mtp_tokens, documents, *rows = total.tolist()
        return StepCounts(tokens, mtp_tokens, documents, dict(zip(self.ratios, rows, strict=True)))

    def epoch_of(self, row: int) -> int:
        """The pass over the training pieces in which stream row `row` lies, from 0."""
        while self._first_rows[-1] <= row:
            self._epoch(len(self._first_rows) - 1)
        return int(np.searchsorted(self._first_rows, row, side="right")) - 1

    def rows_of_epoch(self, epoch: int) -> int:
        return self._epoch(epoch).plan.rows

    def _epoch(self, epoch: int) -> _PlannedEpoch:
        if epoch in self._plans:
            self._plans.move_to_end(epoch)
            return self._plans[epoch]
        plan = plan_epoch(self._lengths, self.row_tokens, self.seed, epoch)
        running = np.zeros((len(plan.order) + 1, self._per_piece.shape[1]), dtype=np.int64)
        np.cumsum(self._per_piece[plan.order], axis=0, out=running[1:])
        planned = self._plans[epoch] = _PlannedEpoch(plan, running[plan.starts])
        if epoch == len(self._first_rows) - 1:
            self._first_rows.append(self._first_rows[-1] + plan.rows)
        while len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        return planned


class TrainRows(IterableDataset[PackedBatch]):
    """Rows of the infinite stream for one rank, from row `start` on. Rank r of w takes rows start + i * w + r; workers take turns.

    Micro-batches i * accumulate .. (i + 1) * accumulate - 1 of all ranks make one optimizer step, and every batch carries the counts of its step.
    """

    def __init__(self, source: PieceSource, stream: RowStream, *, rank: int = 0, world_size: int = 1, accumulate: int = 1, start: int = 0) -> None:
        self.source, self.stream = source, stream
        self.rank, self.world_size, self.accumulate, self.start = rank, world_size, accumulate, start

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in itertools.count(first, stride):
            yield self.batch(i)

    def batch(self, index: int) -> PackedBatch:
        """Micro-batch `index` of this rank, counted from `start`."""
        row = self.start + index * self.world_size + self.rank
        group = self.accumulate * self.world_size
        first = self.start + index // self.accumulate * group
        pieces = [self.source.piece(int(p)) for p in self.stream.pieces_of(row)]
        return pack(pieces, self.stream.row_tokens, self.stream.ratios, step=self.stream.counts(first, first + group))


class ValidationRows:
    """The first `limit` rows of the fixed validation packing, shared out over the ranks. `step` counts each row alone.

    Rank r of w takes rows r, r + w, ... Every rank yields equally many, since collectives inside a forward pass would hang otherwise: where the rows
    do not divide, the last ranks get a row of padding, which counts nothing. So no sample is seen twice and none is lost, whatever the world size.
    It is its own loader: a DataLoader would get Lightning's DistributedSampler, which repeats samples.
    """

    def __init__(self, source: PieceSource, row_tokens: int, ratios: Sequence[int], limit: int, rank: int = 0, world_size: int = 1) -> None:
        self.source, self.row_tokens, self.ratios = source, row_tokens, tuple(ratios)
        self.rank, self.world_size = rank, world_size
        self.plan = plan_epoch(source.lengths, row_tokens, VALIDATION_SEED, 0)
        self.rows = min(limit, self.plan.rows)

    def __len__(self) -> int:
        return -(-self.rows // self.world_size)

    def __iter__(self) -> Iterator[PackedBatch]:
        for index in range(len(self)):
            yield self.batch(index)

    def batch(self, index: int) -> PackedBatch:
        row = index * self.world_size + self.rank
        numbers = self.plan.pieces_of(row).tolist() if row < self.rows else []
        return pack([self.source.piece(p) for p in numbers], self.row_tokens, self.ratios)
