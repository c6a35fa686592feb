# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa_model.data.batch import IGNORED, StepCounts
from csa_model.data.packing import OPEN_ROWS, Piece, pack, permutation, plan_epoch, plan_rows, query_rows
from tests.data.helpers import same

RATIOS = (4, 8)


def test_documents_of_one_token_stay_documents_of_their_own() -> None:
    """Against boundaries inferred from decreasing positions, which merge one-token documents."""
    batch = pack([[1, 2, 3], [4], [5], [6, 7, 8, 9, 10]], None, RATIOS)
    assert batch.layout.cu_seqlens.tolist() == [0, 3, 4, 5, 10]
    assert batch.layout.compressed_cu_seqlens(4).diff().tolist() == [0, 0, 0, 1]
    assert batch.layout.position_of_token.tolist() == [0, 1, 2, 0, 0, 0, 1, 2, 3, 4]
    assert batch.targets.tolist() == [2, 3, IGNORED, IGNORED, IGNORED, 7, 8, 9, 10, IGNORED]
    assert batch.step == StepCounts(tokens=6, mtp_tokens=4, documents=4, query_rows={4: 2, 8: 0})


def test_padding_changes_no_token_target_or_count() -> None:
    """Against padded boundaries passed as real ones."""
    documents = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    tight, padded = pack(documents, None, RATIOS), pack(documents, 12, RATIOS)
    with_empty = pack([documents[0], [], documents[1], []], 12, RATIOS)
    for batch in (padded, with_empty):
        assert batch.step == tight.step
        for key, fill in (("tokens", 0), ("targets", IGNORED), ("mtp_targets", IGNORED)):
            assert getattr(batch, key)[:9].equal(getattr(tight, key))
            assert getattr(batch, key)[9:].tolist() == [fill] * 3
        assert batch.layout.document_of_token[9:].tolist() == [-1] * 3
        assert batch.layout.position_of_token[:9].equal(tight.layout.position_of_token)
    assert with_empty.layout.num_query_rows(4) == tight.layout.num_query_rows(4) == 3


def test_a_row_without_any_target_counts_nothing() -> None:
    """A mean over no labels would be 0/0; here the divisor is that of the step, and 0 for such a row."""
    for batch in (pack([[3], [4]], 4, RATIOS), pack([], 4, RATIOS)):
        assert batch.targets.tolist() == [IGNORED] * 4
        assert (batch.step.tokens, batch.step.mtp_tokens, batch.target_bytes) == (0, 0, 0)
    assert pack([], 4, RATIOS).step == StepCounts(0, 0, 0, {4: 0, 8: 0})


def test_counts_of_micro_batches_add_up_to_those_of_the_joint_row() -> None:
    """Against a mean of means under accumulation with unequal token counts (10 and 2 tokens)."""
    long, short = list(range(1, 12)), [1, 2, 3]
    joint = pack([long, short], None, RATIOS).step
    parts = pack([long], None, RATIOS).step + pack([short], None, RATIOS).step
    assert joint == parts
    assert joint.tokens == 12


def test_counts_of_different_ratios_do_not_add() -> None:
    with pytest.raises(ValueError, match="different ratios"):
        _ = StepCounts(1, 1, 1, {4: 1}) + StepCounts(1, 1, 1, {8: 1})


def test_the_last_targets_of_a_piece_look_into_the_rest_of_its_document() -> None:
    document = np.arange(10, 17)
    first, last = Piece.cut(document, 0, 4), Piece.cut(document, 4, 7)
    assert first.targets.tolist() == [11, 12, 13, 14]
    assert first.mtp_targets.tolist() == [12, 13, 14, 15]
    assert last.targets.tolist() == [15, 16, IGNORED]
    assert last.mtp_targets.tolist() == [16, IGNORED, IGNORED]
    batch = pack([last, first], 8, RATIOS)
    assert batch.targets.tolist() == [15, 16, IGNORED, 11, 12, 13, 14, IGNORED]


def test_target_bytes_are_those_of_the_counted_targets() -> None:
    sizes = np.array([0, 1, 10, 100, 1000])
    pieces = [Piece.cut(np.array([1, 2, 3]), 0, 3, sizes), Piece.cut(np.array([4, 4, 3, 1]), 0, 2, sizes)]
    assert pack(pieces, 8, RATIOS).target_bytes == (10 + 100) + (1000 + 100)


def test_pieces_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens do not fit into a row of 4"):
        pack([[1, 2, 3], [4, 5]], 4, RATIOS)


def test_a_batch_survives_pickling_and_moving() -> None:
    batch = pack([[1, 2, 3], [4, 5]], 8, RATIOS)
    assert same(pickle.loads(pickle.dumps(batch)), batch)
    assert same(batch.to("cpu"), batch)
    assert batch.to("meta").layout.cu_seqlens.device.type == batch.to("meta").targets.device.type == "meta"


def test_dtypes_are_those_promised() -> None:
    piece = Piece(np.array([1, 2]), np.array([2, IGNORED]), np.array([IGNORED, IGNORED]), 0, np.array([5, -1]))
    batch = pack([piece], 4, RATIOS)
    assert batch.tokens.dtype == batch.targets.dtype == batch.mtp_targets.dtype == torch.int64
    assert batch.distance is not None
    assert batch.distance.dtype == torch.int32
    assert batch.distance.tolist() == [5, -1, -1, -1]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 20), st.sampled_from([1, 4, 5, 128]))
@settings(deadline=None, max_examples=60)
def test_counts_are_those_of_the_layout_and_the_targets(lengths: list[int], padding: int, ratio: int) -> None:
    documents = [np.arange(1, n + 1) for n in lengths]
    batch = pack(documents, sum(lengths) + padding, [ratio])
    assert batch.step.tokens == int((batch.targets >= 0).sum()) == sum(max(0, n - 1) for n in lengths)
    assert batch.step.mtp_tokens == int((batch.mtp_targets >= 0).sum()) == sum(max(0, n - 2) for n in lengths)
    assert batch.step.documents == sum(n > 0 for n in lengths)
    assert batch.step.query_rows == {ratio: batch.layout.num_query_rows(ratio)} == {ratio: int((batch.layout.visible_compressed(ratio) > 0).sum())}
    assert not ((batch.mtp_targets >= 0) & (batch.targets < 0)).any()
    assert batch.layout.num_tokens == len(batch.tokens) == sum(lengths) + padding


@given(st.lists(st.integers(1, 32), min_size=1, max_size=200), st.integers(32, 70), st.integers(0, 5), st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_a_plan_holds_every_piece_once_and_overfills_no_row(lengths: list[int], row_tokens: int, seed: int, epoch: int) -> None:
    sizes = np.array(lengths)
    plan = plan_epoch(sizes, row_tokens, seed, epoch)
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    fill = [int(sizes[plan.pieces_of(row)].sum()) for row in range(plan.rows)]
    assert min(fill) > 0
    assert max(fill) <= row_tokens
    assert sum(2 * f <= row_tokens for f in fill) <= 1  # two such rows would have been one


@given(st.integers(0, 300), st.integers(0, 1000), st.integers(0, 1000))
@settings(deadline=None, max_examples=50)
def test_a_permutation_is_one(n: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(n, seed, epoch).tolist()) == list(range(n))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    assert permutation(8, 1, 0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]  # for ever: a resumed run may meet a newer numpy
    assert permutation(8, 1, 1).tolist() == [5, 6, 3, 0, 7, 2, 1, 4]
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_first_fit_by_hand() -> None:
    plan = plan_rows(np.array([6, 5, 4, 3, 10, 2]), np.arange(6), 10)
    # 6 | 5 opens a second row, 4 fills the first, 3 joins 5, 10 is a row of its own, 2 fills 5 + 3
    assert [plan.pieces_of(row).tolist() for row in range(plan.rows)] == [[0, 2], [4], [1, 3, 5]]


def test_the_fullest_row_closes_when_too_many_are_open() -> None:
    sizes = np.array([6] * OPEN_ROWS + [7, 4, 1])
    sizes[3] = 8
    plan = plan_rows(sizes, np.arange(len(sizes)), 10)
    rows = [plan.pieces_of(row).tolist() for row in range(plan.rows)]
    assert rows[0] == [3]  # closed for the 7, so the 1 at the end no longer finds it
    assert [0, OPEN_ROWS + 1] in rows
    assert [1, OPEN_ROWS + 2] in rows


def test_long_pieces_waste_little() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(256, rng.integers(1, 900, 4000))
    plan = plan_epoch(lengths, 1024, 1, 0)
    assert lengths.sum() / (plan.rows * 1024) > 0.98


def test_query_rows_begin_with_the_last_token_of_the_first_entry() -> None:
    assert query_rows(np.array([0, 3, 4, 5, 9]), 4).tolist() == [0, 0, 1, 2, 6]
