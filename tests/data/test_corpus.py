# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from csa_model.config import ConfigError, DataConfig, TokenizerConfig
from csa_model.data.corpus import build_corpus, check_data, unigram_loss
from csa_model.data.stream import ValidationRows
from tests.data.helpers import EOS, VOCAB, source_of, text_config, token_file_of, write_texts


def memmap_config(path: Path, **settings: object) -> DataConfig:
    defaults = {"sequence_length": 16, "tokens_per_batch": 32, "validation_fraction": 0.2, "validation_batches": 3}
    return DataConfig(name="memmap", path=str(path), **{**defaults, **settings})  # type: ignore[arg-type]


def test_pieces_hold_each_document_from_its_start(tmp_path: Path) -> None:
    source = source_of(tmp_path / "t", [16, 17, 40, 1, 2], 16)
    assert source.lengths.tolist() == [16, 16, 1, 16, 16, 8, 1, 2]
    assert source.targets.tolist() == [15, 16, 0, 16, 16, 7, 0, 1]
    assert source.mtp_targets.tolist() == [14, 15, 0, 16, 16, 6, 0, 0]
    for i in range(8):
        piece = source.piece(i)
        assert len(piece.tokens) == source.lengths[i]
        assert (piece.targets >= 0).sum() == source.targets[i]
        assert (piece.mtp_targets >= 0).sum() == source.mtp_targets[i]
    ids = source.token_file.ids
    assert np.concatenate([source.piece(i).tokens for i in range(8)]).tolist() == ids.tolist()
    assert source.piece(3).mtp_targets.tolist() == ids[35:51].tolist()


def test_text_is_split_by_document_and_measured_in_bytes(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    (folder / "junk").write_bytes(b"\xff")
    corpus = build_corpus(text_config(tmp_path, folder, vocab_size=280), vocab_size=300, seed=1)
    info = corpus.info
    files = sorted(folder.glob("*.txt"))
    assert info.documents == info.train_documents + info.validation_documents == len(files)
    assert info.validation_documents > 0
    assert info.tokens == info.train_tokens + info.validation_tokens == int(corpus.train.lengths.sum() + corpus.validation.lengths.sum())
    assert info.bytes == sum(file.stat().st_size for file in files)
    assert info.skipped == ("junk: not UTF-8 (byte 0)",)
    assert (info.name, info.tokenizer, info.vocab_size) == ("text_files", "bpe", 280)
    assert asdict(info)["sha256"] == info.sha256


def test_target_bytes_of_whole_documents_are_their_bytes(tmp_path: Path) -> None:
    """Bits per byte: every byte is counted but those of each document's first token, which nothing predicts."""
    folder = write_texts(tmp_path / "texts")
    for tokenizer in ("bpe", "bytes"):
        config = text_config(tmp_path, folder, tokenizer=tokenizer)
        corpus = build_corpus(config, vocab_size=300, seed=1)
        assert corpus.tokenizer is not None
        sizes = corpus.tokenizer.token_bytes()
        total = first = 0
        for row in ValidationRows(corpus.validation, 64, (), 10_000):
            total += row.target_bytes
        held_out = corpus.info.validation_tokens - corpus.info.validation_documents
        texts = {i: file.read_bytes() for i, file in enumerate(sorted(folder.glob("*.txt")))}
        file = corpus.validation.token_file  # type: ignore[attr-defined]
        bounds = file.document_bounds()[file.sidecar.train_documents :]
        documents = [file.ids[a:b] for a, b in itertools.pairwise(bounds)]
        assert sum(len(d) - 1 for d in documents) == held_out
        raw = [corpus.tokenizer.decode(d[:-1].tolist()).encode() for d in documents]
        assert all(r in texts.values() for r in raw)
        first = sum(int(sizes[d[0]]) for d in documents)
        assert total == sum(map(len, raw)) - first


def test_unigram_figures_by_hand() -> None:
    train, targets = np.array([0, 3, 1]), np.array([1, 2, 1])
    # add-one probabilities 1/7, 4/7, 2/7
    assert unigram_loss(train, targets) == pytest.approx(-(math.log(1 / 7) + 2 * math.log(4 / 7) + math.log(2 / 7)) / 4, rel=1e-12)


def test_unigram_figures_are_those_of_the_evaluated_targets(tmp_path: Path) -> None:
    token_file_of(tmp_path / "t", [9, 40, 7, 30, 25, 11, 33, 8, 21, 60])
    config = memmap_config(tmp_path / "t", validation_fraction=0.5)
    corpus = build_corpus(config, vocab_size=VOCAB, seed=1)
    rows = list(ValidationRows(corpus.validation, 32, (), 3))
    counts = np.ones(VOCAB)
    for i in range(len(corpus.train.lengths)):
        np.add.at(counts, corpus.train.piece(i).tokens, 1)
    nats = [-math.log(counts[t] / counts.sum()) for row in rows for t in row.targets.tolist() if t >= 0]
    assert corpus.info.unigram_loss == pytest.approx(np.mean(nats), rel=1e-9)
    assert corpus.info.unigram_bits_per_byte == pytest.approx(sum(nats) / math.log(2) / sum(row.target_bytes for row in rows), rel=1e-9)
    assert len(rows) == 3 < len(list(ValidationRows(corpus.validation, 32, (), 100)))


def test_a_memmap_is_split_the_same_way_for_every_seed_and_order(tmp_path: Path) -> None:
    token_file_of(tmp_path / "t", [9, 40, 7, 30, 25, 11, 33, 8, 21, 60])
    config = memmap_config(tmp_path / "t")
    one, two = (build_corpus(config, vocab_size=VOCAB, seed=seed) for seed in (1, 2))
    assert one.info == two.info
    documents = [tuple(one.validation.piece(i).tokens) for i in range(len(one.validation.lengths))]
    assert documents == [tuple(two.validation.piece(i).tokens) for i in range(len(two.validation.lengths))]
    assert one.info.train_documents + one.info.validation_documents == 10
    assert one.info.tokenizer == "none"
    assert one.tokenizer is None


def test_a_memmap_of_one_document_holds_out_its_end(tmp_path: Path) -> None:
    file = token_file_of(tmp_path / "t", [100])
    corpus = build_corpus(memmap_config(tmp_path / "t", sequence_length=32), vocab_size=VOCAB, seed=1)
    assert (corpus.info.train_tokens, corpus.info.validation_tokens) == (80, 20)
    assert corpus.validation.piece(0).tokens.tolist() == file.ids[80:].tolist()


def test_without_token_bytes_there_are_no_bits_per_byte(tmp_path: Path) -> None:
    path = tmp_path / "t"
    token_file_of(path, [20, 30, 40])
    sidecar = path.with_name("t.json")
    entries = sidecar.read_text()
    sidecar.write_text(entries[: entries.index(', "token_bytes"')] + "}")
    corpus = build_corpus(memmap_config(path), vocab_size=VOCAB, seed=1)
    assert corpus.info.bytes is corpus.info.unigram_bits_per_byte is None
    assert corpus.info.unigram_loss > 0
    assert next(iter(ValidationRows(corpus.validation, 32, (), 1))).target_bytes == 0


def test_ids_beyond_the_model_are_refused(tmp_path: Path) -> None:
    token_file_of(tmp_path / "t", [20, 30])
    with pytest.raises(
        ConfigError, match=r"t holds ids of a vocabulary of 300 \(largest id \d+\), more than model.vocab_size=299; use model.vocab_size=300"
    ):
        build_corpus(memmap_config(tmp_path / "t"), vocab_size=299, seed=1)


def test_a_split_without_a_target_is_refused(tmp_path: Path) -> None:
    token_file_of(tmp_path / "t", [1, 1, 1])
    with pytest.raises(ConfigError, match=r"split of .* has no token to predict"):
        build_corpus(memmap_config(tmp_path / "t"), vocab_size=VOCAB, seed=1)
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"split of .*x.txt has no token to predict"):
        build_corpus(text_config(tmp_path, tmp_path / "x.txt"), vocab_size=300, seed=1)


GOOD = DataConfig(name="text_files", path="x")


@pytest.mark.parametrize(
    ("change", "vocab", "message"),
    [
        (lambda c: replace(c, sequence_length=0), 1024, "data.sequence_length=0 is not legal; legal: >= 1"),
        (lambda c: replace(c, tokens_per_batch=0), 1024, "data.tokens_per_batch=0"),
        (
            lambda c: replace(c, sequence_length=4096),
            1024,
            f"data.sequence_length=4096 does not fit a row; legal: at most data.tokens_per_batch={GOOD.tokens_per_batch}",
        ),
        (lambda c: replace(c, validation_batches=0), 1024, "data.validation_batches=0"),
        (lambda c: replace(c, num_workers=-1), 1024, "data.num_workers=-1"),
        (lambda c: replace(c, validation_fraction=0.0), 1024, "data.validation_fraction=0.0"),
        (lambda c: replace(c, validation_fraction=1.0), 1024, "data.validation_fraction=1.0"),
        (lambda c: replace(c, path=None), 1024, "data=text_files needs data.path=a text file or a folder"),
        (lambda c: replace(c, name="memmap", path=None), 1024, "data=memmap needs data.path=a token file"),
        (lambda c: replace(c, tokenizer=TokenizerConfig("bpe", 256)), 1024, "data.tokenizer.vocab_size=256 is not legal; legal: >= 257"),
        (lambda c: c, 1000, "data.tokenizer=bpe makes 1024 ids, more than model.vocab_size=1000"),
        (lambda c: replace(c, tokenizer=TokenizerConfig("bytes", 1024)), 256, "data.tokenizer=bytes makes 257 ids"),
    ],
)
def test_impossible_settings_are_refused_without_reading(change: Callable[[DataConfig], DataConfig], vocab: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_data(change(GOOD), vocab, 1)
    assert message in str(error.value)
    check_data(GOOD, 1024, 0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed -1 is not legal"):
        check_data(GOOD, 1024, -1)


def test_no_document_is_in_both_splits(tmp_path: Path) -> None:
    token_file_of(tmp_path / "t", [9, 40, 7, 30, 25, 11, 33, 8, 21, 60])
    corpus = build_corpus(memmap_config(tmp_path / "t", sequence_length=32), vocab_size=VOCAB, seed=1)
    tokens = [sum(int((s.piece(i).tokens == EOS).sum()) for i in range(len(s.lengths))) for s in (corpus.train, corpus.validation)]
    assert tokens == [corpus.info.train_documents, corpus.info.validation_documents]
