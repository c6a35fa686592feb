# SPDX-License-Identifier: Apache-2.0
"""From a data config to training and validation pieces, whatever the corpus: stdlib, text_files, memmap, recall."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csa_model.config import DEEPSEEK_V4_VOCAB, ConfigError, DataConfig
from csa_model.data.packing import Piece
from csa_model.data.recall import RecallPieces, RecallTokenizer, check_recall, document_length, recall_sha256, uniform_loss
from csa_model.data.stream import PieceSource, ValidationRows
from csa_model.data.text import TextCorpus, read_stdlib, read_text_files, split_digests, tokenized
from csa_model.data.token_file import TokenFile, open_token_file, tokenizer_of
from csa_model.data.tokenizers import SMALLEST_VOCAB, BytesTokenizer, Tokenizer, digest


@dataclass(frozen=True)
class CorpusInfo:
    """What the figures of a run depend on. The unigram figures are those of the validation targets that the run evaluates."""

    name: str
    sha256: str
    tokenizer: str  # bpe, bytes, recall, or "none" for a token file without one
    tokenizer_sha256: str | None
    vocab_size: int
    documents: int
    train_documents: int
    validation_documents: int
    tokens: int
    train_tokens: int
    validation_tokens: int
    bytes: int | None  # UTF-8 bytes of all tokens; None where tokens have no bytes, and so are bits per byte
    unigram_loss: float  # nats per target, add-one unigram model of the training tokens
    unigram_bits_per_byte: float | None
    skipped: tuple[str, ...] = ()  # files that were not used, "path: reason"


class TokenPieces:
    """A PieceSource over documents of a token file, each cut from its start into pieces of at most `sequence_length` tokens."""

    def __init__(
        self,
        token_file: TokenFile,
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
        sequence_length: int,
        token_bytes: NDArray[np.int32] | None,
    ) -> None:
        """Document i holds the ids [starts[i], stops[i]) of the file; documents are not empty."""
        self.token_file, self.token_bytes = token_file, token_bytes
        per_document = -(-(stops - starts) // sequence_length)
        self._stops = np.repeat(stops, per_document)  # of the whole document, into which the last targets look
        nth = np.arange(len(self._stops)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
        self._starts = np.repeat(starts, per_document) + nth * sequence_length
        self.lengths = np.minimum(sequence_length, self._stops - self._starts)
        self.targets = np.minimum(self.lengths, self._stops - self._starts - 1)
        self.mtp_targets = np.minimum(self.lengths, np.maximum(0, self._stops - self._starts - 2))

    def piece(self, index: int) -> Piece:
        start = int(self._starts[index])
        length = int(self.lengths[index])
        document = self.token_file.ids[start : min(start + length + 2, int(self._stops[index]))]
        return Piece.cut(document, 0, length, self.token_bytes)


@dataclass(frozen=True)
class Corpus:
    train: PieceSource
    validation: PieceSource
    tokenizer: Tokenizer | None
    info: CorpusInfo


def check_data(config: DataConfig, vocab_size: int, seed: int) -> None:
    """All that can be refused without reading data. ConfigError names the key and the legal values."""
    if seed < 0:
        raise ConfigError(f"the data seed {seed} is not legal; legal: >= 0")
    for key, least in (("sequence_length", 1), ("tokens_per_batch", 1), ("validation_batches", 1), ("num_workers", 0)):
        if getattr(config, key) < least:
            raise ConfigError(f"data.{key}={getattr(config, key)} is not legal; legal: >= {least}")
    if config.sequence_length > config.tokens_per_batch:
        raise ConfigError(
            f"data.sequence_length={config.sequence_length} does not fit a row; legal: at most data.tokens_per_batch={config.tokens_per_batch}"
        )
    if not 0 < config.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction={config.validation_fraction} is not legal; legal: above 0 and below 1")
    if config.name in ("text_files", "memmap") and not config.path:
        what = "a text file or a folder of text files" if config.name == "text_files" else "a token file with its side-car"
        raise ConfigError(f"data={config.name} needs data.path={what}")
    if config.name == "recall":
        check_recall(config.recall, config.sequence_length, vocab_size)
    if config.name in ("stdlib", "text_files"):
        if config.tokenizer.vocab_size < SMALLEST_VOCAB:
            raise ConfigError(
                f"data.tokenizer.vocab_size={config.tokenizer.vocab_size} is not legal; "
                f"legal: >= {SMALLEST_VOCAB} (256 bytes and the end of a document)"
            )
        needed = {"bytes": SMALLEST_VOCAB, "deepseek_v4": DEEPSEEK_V4_VOCAB}.get(config.tokenizer.name, config.tokenizer.vocab_size)
        if needed > vocab_size:
            raise ConfigError(
                f"data.tokenizer={config.tokenizer.name} makes {needed} ids, more than model.vocab_size={vocab_size}; "
                f"use model.vocab_size={needed} or a smaller data.tokenizer.vocab_size"
            )


def build_corpus(config: DataConfig, *, vocab_size: int, seed: int) -> Corpus:
    """Read, tokenise (or take from the cache), split. ConfigError for anything that cannot be read or does not fit the model."""
    check_data(config, vocab_size, seed)
    if config.name == "recall":
        return _recall_corpus(config, seed)
    if config.name == "memmap":
        assert config.path is not None
        token_file = open_token_file(config.path)
        _check_vocab(token_file, vocab_size)
        return _token_corpus(config, token_file, tokenizer_of(token_file), token_file.sidecar.sha256, ())
    texts = read_texts(config)
    token_file, tokenizer = tokenized(texts, config)
    return _token_corpus(config, token_file, tokenizer, texts.sha256, texts.skipped)


def read_texts(config: DataConfig) -> TextCorpus:
    """Documents of a text corpus (stdlib, text_files)."""
    if config.name == "stdlib":
        return read_stdlib()
    assert config.path is not None
    return read_text_files(config.path)


def unigram_loss(train_counts: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """Nats per token of targets with counts `targets` [vocab] under the add-one unigram model of `train_counts` [vocab]."""
    log_p = np.log(train_counts + 1.0) - math.log(float(train_counts.sum()) + len(train_counts))
    return float(-(targets * log_p).sum() / targets.sum())


def _check_vocab(token_file: TokenFile, vocab_size: int) -> None:
    vocab = token_file.sidecar.vocab
    if vocab > vocab_size:
        largest = max(int(chunk.max()) for _, chunk in token_file.chunks())
        raise ConfigError(
            f"{token_file.path} holds ids of a vocabulary of {vocab} (largest id {largest}), more than model.vocab_size={vocab_size}; "
            f"use model.vocab_size={vocab}"
        )


def _recall_corpus(config: DataConfig, seed: int) -> Corpus:
    task = config.recall
    length = document_length(task)
    held_out = config.validation_batches * (config.tokens_per_batch // length)
    tokenizer = RecallTokenizer(task)
    info = CorpusInfo(
        name="recall",
        sha256=recall_sha256(task, seed),
        tokenizer="recall",
        tokenizer_sha256=digest(tokenizer),
        vocab_size=tokenizer.vocab_size,
        documents=task.documents + held_out,
        train_documents=task.documents,
        validation_documents=held_out,
        tokens=(task.documents + held_out) * length,
        train_tokens=task.documents * length,
        validation_tokens=held_out * length,
        bytes=None,
        unigram_loss=uniform_loss(task),
        unigram_bits_per_byte=None,
    )
    return Corpus(RecallPieces(task, task.documents, seed), RecallPieces(task, held_out, seed, validation=True), tokenizer, info)


def _token_corpus(config: DataConfig, token_file: TokenFile, tokenizer: Tokenizer | None, sha256: str, skipped: Sequence[str]) -> Corpus:
    starts, stops, held_out = _split(token_file, config.validation_fraction)
    sizes = token_file.sidecar.token_bytes
    train = TokenPieces(token_file, starts[~held_out], stops[~held_out], config.sequence_length, sizes)
    validation = TokenPieces(token_file, starts[held_out], stops[held_out], config.sequence_length, sizes)
    for what, source in (("training", train), ("validation", validation)):
        if source.targets.sum() == 0:
            raise ConfigError(
                f"the {what} split of {config.path or config.name} has no token to predict "
                f"({int(held_out.sum())} of {len(starts)} documents are validation); use more text or another data.validation_fraction"
            )
    vocab = token_file.sidecar.vocab
    train_counts = _counts(token_file, starts, stops, ~held_out, vocab)
    targets = np.zeros(vocab, dtype=np.int64)
    target_bytes = 0
    for batch in ValidationRows(validation, config.tokens_per_batch, (), config.validation_batches):
        targets += np.bincount(batch.targets[batch.targets >= 0].numpy(), minlength=vocab)
        target_bytes += batch.target_bytes
    loss = unigram_loss(train_counts, targets)
    lengths = stops - starts
    info = CorpusInfo(
        name=config.name,
        sha256=sha256,
        tokenizer=_tokenizer_name(tokenizer),
        tokenizer_sha256=None if tokenizer is None else digest(tokenizer),
        vocab_size=vocab,
        documents=len(starts),
        train_documents=int((~held_out).sum()),
        validation_documents=int(held_out.sum()),
        tokens=int(lengths.sum()),
        train_tokens=int(lengths[~held_out].sum()),
        validation_tokens=int(lengths[held_out].sum()),
        bytes=None if sizes is None else sum(int(sizes[chunk].sum()) for _, chunk in token_file.chunks()),
        unigram_loss=loss,
        unigram_bits_per_byte=loss * float(targets.sum()) / math.log(2) / target_bytes if target_bytes else None,
        skipped=tuple(skipped),
    )
    return Corpus(train, validation, tokenizer, info)


def _tokenizer_name(tokenizer: Tokenizer | None) -> str:
    return "none" if tokenizer is None else "bytes" if isinstance(tokenizer, BytesTokenizer) else "bpe"


def _split(token_file: TokenFile, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Starts and stops of the documents and which are validation."""
    bounds = token_file.document_bounds()
    starts, stops = bounds[:-1], bounds[1:]
    train = token_file.sidecar.train_documents
    if train is not None:
        return starts, stops, np.arange(len(starts)) >= train
    if len(starts) == 1:  # the end of the only document is held out
        cut = min(max(1, int(stops[0] * (1 - fraction))), int(stops[0]) - 1)
        return np.array([0, cut]), np.array([cut, stops[0]]), np.array([False, True])
    digests = [hashlib.sha256(token_file.ids[a:b].tobytes()).digest() for a, b in zip(starts, stops, strict=True)]
    return starts, stops, np.array(split_digests(digests, fraction))


def _counts(token_file: TokenFile, starts: NDArray[np.int64], stops: NDArray[np.int64], wanted: NDArray[np.bool_], vocab: int) -> NDArray[np.int64]:
    """How often each id stands in the wanted documents; neighbours are read together."""
    counts = np.zeros(vocab, dtype=np.int64)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        for _, chunk in token_file.chunks(int(starts[first]), int(stops[last - 1])):
            counts += np.bincount(chunk, minlength=vocab)
    return counts
