# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import itertools
import operator
import pickle
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from csa_model.data.batch import PackedBatch
from csa_model.data.packing import pack
from csa_model.data.stream import RowStream, TrainRows, ValidationRows
from tests.data.helpers import EOS, same, source_of

RATIOS = (4, 8)
LENGTHS = [5, 40, 1, 17, 3, 64, 9, 2, 33, 21, 12, 7]


def rows_of(tmp_path: Path, seed: int = 1, **options: int) -> TrainRows:
    source = source_of(tmp_path / "tokens.bin", LENGTHS, 16)
    return TrainRows(source, RowStream(source, 32, RATIOS, seed), **options)


def take(rows: TrainRows, n: int) -> list[PackedBatch]:
    return list(itertools.islice(rows, n))


def own_counts(rows: TrainRows, row: int):
    return pack([rows.source.piece(int(p)) for p in rows.stream.pieces_of(row)], 32, RATIOS).step


def test_the_plan_counts_what_the_packed_rows_hold(tmp_path: Path) -> None:
    """The divisor of an accumulated step is the count over all its micro-batches."""
    rows = rows_of(tmp_path)
    n = 3 * rows.stream.rows_of_epoch(0)  # over the ends of epochs
    own = [own_counts(rows, row) for row in range(n)]
    for first, stop in [(0, 1), (0, n), (2, 5), (n - 3, n), (4, 4)]:
        expected = functools.reduce(operator.add, own[first:stop]) if stop > first else None
        counts = rows.stream.counts(first, stop)
        assert counts == expected or (expected is None and counts.tokens == counts.documents == 0)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 3), (3, 1), (2, 2)])
def test_micro_batches_of_a_step_carry_the_counts_of_the_joint_row(tmp_path: Path, world_size: int, accumulate: int) -> None:
    ranks = [rows_of(tmp_path, rank=rank, world_size=world_size, accumulate=accumulate, start=4) for rank in range(world_size)]
    batches = [take(rows, 2 * accumulate) for rows in ranks]
    group = world_size * accumulate
    for step in range(2):
        pieces = [p for row in range(4 + step * group, 4 + (step + 1) * group) for p in ranks[0].stream.pieces_of(row).tolist()]
        joint = pack([ranks[0].source.piece(p) for p in pieces], 32 * group, RATIOS).step
        for rank in range(world_size):
            assert [batch.step for batch in batches[rank][step * accumulate : (step + 1) * accumulate]] == [joint] * accumulate


def test_an_epoch_shows_every_token_once(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    epoch = take(rows, rows.stream.rows_of_epoch(0))
    assert sum(batch.layout.num_real_tokens for batch in epoch) == sum(LENGTHS)
    assert sum(batch.step.tokens for batch in epoch) == sum(LENGTHS) - len(LENGTHS)  # all but the first token of each document
    assert sum(int((batch.targets == EOS).sum()) for batch in epoch) == len(LENGTHS) - 1  # the document of one token has no target
    assert max(max(batch.layout.lengths) for batch in epoch) == 16


def test_epochs_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    rows, other = rows_of(tmp_path), rows_of(tmp_path, seed=2)
    n = rows.stream.rows_of_epoch(0)
    first, second = take(rows, n), take(rows_of(tmp_path, start=n), n)
    assert not any(same(a, b) for a, b in zip(first, second, strict=True))
    assert not all(same(a, b) for a, b in zip(first, take(other, n), strict=True))
    assert rows.stream.epoch_of(n - 1) == 0
    assert rows.stream.epoch_of(n) == 1


def test_any_row_can_be_reached_directly(tmp_path: Path) -> None:
    straight = take(rows_of(tmp_path), 40)
    for start in (1, 7, 39):
        assert same(take(rows_of(tmp_path, start=start), 1)[0], straight[start])
    jumping = rows_of(tmp_path)
    assert [jumping.stream.pieces_of(n).tolist() for n in (39, 0, 39)] == [rows_of(tmp_path).stream.pieces_of(n).tolist() for n in (39, 0, 39)]


def test_ranks_share_the_rows_without_overlap(tmp_path: Path) -> None:
    straight = take(rows_of(tmp_path), 12)
    for world_size in (2, 3):
        shared = [take(rows_of(tmp_path, rank=rank, world_size=world_size), 12 // world_size) for rank in range(world_size)]
        for n, batch in enumerate(straight):
            other = shared[n % world_size][n // world_size]
            assert batch.tokens.equal(other.tokens)
            assert batch.layout.lengths == other.layout.lengths


def test_workers_change_nothing(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, accumulate=2, start=3)
    for workers in (1, 2):
        loaded = itertools.islice(DataLoader(rows, batch_size=None, num_workers=workers), 9)
        assert all(same(a, b) for a, b in zip(loaded, take(rows, 9), strict=True))


def test_a_worker_gets_the_path_and_not_the_tokens(tmp_path: Path) -> None:
    source = source_of(tmp_path / "tokens.bin", [40_000, 50], 4096)
    rows = TrainRows(source, RowStream(source, 4096, RATIOS, 1))
    before = take(rows, 3)
    pickled = pickle.dumps(rows)
    assert len(pickled) < 10_000
    assert all(same(a, b) for a, b in zip(before, take(pickle.loads(pickled), 3), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_rows_are_shared_without_repeats_or_losses(tmp_path: Path, world_size: int) -> None:
    """A sampler that repeats samples would make validation depend on the world size. Five documents of different length."""
    source = source_of(tmp_path / "tokens.bin", [5, 30, 17, 9, 26], 32)
    whole = list(ValidationRows(source, 32, RATIOS, 100))
    shares = [ValidationRows(source, 32, RATIOS, 100, rank, world_size) for rank in range(world_size)]
    lists = [list(share) for share in shares]
    assert {len(batches) for batches in lists} == {len(share) for share in shares} == {-(-len(whole) // world_size)}
    seen = [batch for turn in zip(*lists, strict=True) for batch in turn]
    assert all(same(a, b) for a, b in zip(seen, whole, strict=False))
    assert all(batch.step.documents == batch.step.tokens == batch.layout.num_real_tokens == 0 for batch in seen[len(whole) :])
    assert sum(batch.step.tokens for batch in seen) == 5 + 30 + 17 + 9 + 26 - 5


def test_validation_takes_the_first_rows_and_counts_each_alone(tmp_path: Path) -> None:
    source = source_of(tmp_path / "tokens.bin", LENGTHS, 16)
    few, all_rows = ValidationRows(source, 32, RATIOS, 2), ValidationRows(source, 32, RATIOS, 100)
    assert len(few) == 2
    assert len(all_rows) > 2
    assert all(same(a, b) for a, b in zip(few, all_rows, strict=False))
    for batch in all_rows:
        assert batch.step.tokens == int((batch.targets >= 0).sum())
