# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa_model.config import ConfigError, DataConfig, RecallConfig
from csa_model.data.batch import IGNORED
from csa_model.data.corpus import build_corpus
from csa_model.data.packing import pack
from csa_model.data.recall import FILLER, RecallPieces, RecallTokenizer, check_recall, document_length, recall_sha256
from csa_model.data.stream import RowStream, TrainRows, ValidationRows
from tests.data.helpers import same

TASK = RecallConfig()


def config_of(**settings: object) -> DataConfig:
    return DataConfig(name="recall", recall=RecallConfig(**settings))  # type: ignore[arg-type]


@given(
    st.integers(1, 12),
    st.lists(st.integers(2, 60), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 10_000),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_every_answer_stands_after_its_key_at_the_asked_distance(pairs: int, distances: list[int], seed: int, index: int, validation: bool) -> None:
    task = RecallConfig(pairs=pairs, key_space=16, value_space=5, distances=tuple(distances))
    piece = RecallPieces(task, 10_001, seed, validation).piece(index)
    assert len(piece.tokens) == document_length(task)
    asked = np.flatnonzero(piece.targets != IGNORED)
    assert len(asked) == pairs
    assert piece.distance is not None
    assert np.flatnonzero(piece.distance != -1).tolist() == asked.tolist()
    first_key, first_value = 1 + FILLER, 1 + FILLER + 16
    keys = []
    for at in asked:
        d = int(piece.distance[at])
        assert d in distances
        assert piece.tokens[at] == piece.tokens[at - d]
        assert first_key <= piece.tokens[at] < first_value
        assert piece.targets[at] == piece.tokens[at + 1] == piece.tokens[at - d + 1]
        assert piece.targets[at] >= first_value
        keys.append(int(piece.tokens[at]))
    assert len(set(keys)) == pairs
    # nothing else looks like a key or a value, so the binding is the only source of the answer
    assert int((piece.tokens >= first_key).sum()) == 4 * pairs
    assert piece.tokens.min() >= 1
    assert piece.tokens.max() < first_value + 5


def test_a_document_is_a_function_of_seed_split_and_number() -> None:
    def document(seed: int, index: int, validation: bool = False) -> list[int]:
        return RecallPieces(TASK, 100, seed, validation).piece(index).tokens.tolist()

    assert document(1, 7) == document(1, 7)
    assert len({tuple(d) for d in (document(1, 7), document(1, 8), document(2, 7), document(1, 7, True))}) == 4
    assert document(1, 7, True) == document(2, 7, True)  # every seed is judged by the same validation documents
    assert document(1, 0)[:12] == [32, 7, 14, 19, 10, 9, 5, 11, 11, 3, 22, 5]  # for ever: numpy guarantees raw words


def test_every_distance_is_asked_equally_often() -> None:
    pieces = RecallPieces(RecallConfig(pairs=2, distances=(4, 9, 20)), 30, 1)
    asked = Counter(int(d) for i in range(30) for d in pieces.piece(i).distance[pieces.piece(i).distance >= 0])
    assert asked == {4: 20, 9: 20, 20: 20}


def test_only_answers_count() -> None:
    pieces = RecallPieces(TASK, 9, 1)
    batch = pack([pieces.piece(i) for i in range(9)], 2048, (4,))
    assert batch.step.tokens == 9 * TASK.pairs == int(pieces.targets.sum())
    assert batch.step.mtp_tokens == batch.target_bytes == 0
    assert batch.step.query_rows == {4: 9 * (document_length(TASK) - 3)}
    assert batch.distance is not None
    assert (batch.distance >= 0).equal(batch.targets != IGNORED)
    rows = TrainRows(pieces, RowStream(pieces, 2048, (4,), 1))
    row = next(iter(rows))
    assert row.step == pack([pieces.piece(int(p)) for p in rows.stream.pieces_of(0)], 2048, (4,)).step


def test_the_corpus_fills_the_validation_rows_and_has_no_bytes() -> None:
    config = config_of()
    corpus = build_corpus(config, vocab_size=1024, seed=3)
    length = config.tokens_per_batch
    rows = list(ValidationRows(corpus.validation, length, (4,), config.validation_batches))
    assert len(rows) == config.validation_batches
    assert {row.layout.num_real_tokens for row in rows} == {length // document_length(TASK) * document_length(TASK)}
    assert corpus.info.bytes is corpus.info.unigram_bits_per_byte is None
    assert corpus.info.unigram_loss == math.log(TASK.value_space)
    assert corpus.info.train_documents == TASK.documents
    assert corpus.tokenizer is not None
    assert corpus.info.vocab_size == corpus.tokenizer.vocab_size == 1 + FILLER + 64 + 64


def test_the_hash_follows_settings_and_seed() -> None:
    hashes = {recall_sha256(task, seed) for task in (TASK, RecallConfig(pairs=4), RecallConfig(documents=5)) for seed in (1, 2)}
    assert len(hashes) == 6
    assert recall_sha256(RecallConfig(), 1) in hashes


def test_symbols_have_names() -> None:
    tokenizer = RecallTokenizer(RecallConfig(key_space=2, value_space=2))
    assert tokenizer.decode([0, 1, 32, 33, 34, 35, 36]) == ". f0 f31 k0 k1 v0 v1"
    assert tokenizer.encode("k1 v1 f0") == [34, 36, 1]
    with pytest.raises(ValueError, match="unknown symbols"):
        tokenizer.encode("k2")


@pytest.mark.parametrize(
    ("settings", "sequence_length", "vocab", "message"),
    [
        ({"pairs": 0}, 256, 1024, "data.recall.pairs=0"),
        ({"documents": 0}, 256, 1024, "data.recall.documents=0"),
        ({"distances": ()}, 256, 1024, "data.recall.distances=\\[\\]"),
        ({"distances": (1, 5)}, 256, 1024, "distances >= 2"),
        ({"pairs": 8, "key_space": 7}, 256, 1024, "data.recall.key_space=7 is too small"),
        ({}, 225, 1024, "= 226 tokens, more than data.sequence_length=225.*data.sequence_length=226"),
        ({}, 256, 160, "161 symbols .* do not fit model.vocab_size=160"),
    ],
)
def test_impossible_tasks_are_refused(settings: dict[str, object], sequence_length: int, vocab: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_recall(RecallConfig(**settings), sequence_length, vocab)  # type: ignore[arg-type]
    check_recall(TASK, 226, 161)


def test_rows_are_the_same_whatever_came_before() -> None:
    pieces = RecallPieces(TASK, 50, 1)
    straight = [TrainRows(pieces, RowStream(pieces, 512, (4,), 1)).batch(i) for i in range(5)]
    assert same(TrainRows(pieces, RowStream(pieces, 512, (4,), 1), start=4).batch(0), straight[4])
