# SPDX-License-Identifier: Apache-2.0
"""Synthetic key-value recall: bindings `key value` spread over unpredictable filler, each asked back once at a controlled distance.

A document has one length, max(distances) + 2 + 12 * pairs: enough that a place for every pair always exists. Its keys are distinct. Each pair stands
twice: the binding, and `distance` tokens later the asked key followed by the value again. Only that second value is a target, predicted at the asked
key; all other tokens cannot be predicted and do not count, and neither do MTP targets (the token after the value is filler). Distances go round
through the list, so each is asked equally often over the documents.

Ids: 0 padding, then the filler, the keys, the values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csa_model.config import ConfigError, RecallConfig
from csa_model.data.batch import IGNORED
from csa_model.data.packing import Piece

FILLER = 32  # distinct filler tokens
VALIDATION_SEED = 0  # validation documents are the same for every seed of a run


class RecallTokenizer:
    """Names for the symbols: `.` padding, `f3` filler, `k3` key, `v3` value, separated by spaces."""

    eos = 0

    def __init__(self, config: RecallConfig) -> None:
        self.names = [
            ".",
            *(f"f{i}" for i in range(FILLER)),
            *(f"k{i}" for i in range(config.key_space)),
            *(f"v{i}" for i in range(config.value_space)),
        ]
        self.vocab_size = len(self.names)
        self._ids = {name: i for i, name in enumerate(self.names)}

    def encode(self, text: str) -> list[int]:
        """ValueError for a symbol that does not exist."""
        unknown = [name for name in text.split() if name not in self._ids]
        if unknown:
            raise ValueError(f"unknown symbols {unknown[:5]}; legal: {self.names[0]} {self.names[1]} ... {self.names[-1]}")
        return [self._ids[name] for name in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.names[i] for i in ids)

    def token_bytes(self) -> NDArray[np.int32]:
        return np.zeros(self.vocab_size, dtype=np.int32)

    def serialized(self) -> str:
        return json.dumps({"tokenizer": "recall", "names": self.names})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.serialized())


class RecallPieces:
    """A PieceSource whose documents are made when asked for: document i is a pure function of (config, seed, split, i)."""

    def __init__(self, config: RecallConfig, documents: int, seed: int, validation: bool = False) -> None:
        self.config, self.validation = config, validation
        self.seed = VALIDATION_SEED if validation else seed
        self.lengths = np.full(documents, document_length(config), dtype=np.int64)
        self.targets = np.full(documents, config.pairs, dtype=np.int64)
        self.mtp_targets = np.zeros(documents, dtype=np.int64)

    def piece(self, index: int) -> Piece:
        config = self.config
        words = _Words([self.seed, int(self.validation), index])
        n = document_length(config)
        first_key, first_value = 1 + FILLER, 1 + FILLER + config.key_space
        tokens = 1 + words.below(FILLER, n)
        targets, distance = np.full(n, IGNORED), np.full(n, -1)
        keys = first_key + np.argsort(words.raw(config.key_space), kind="stable")[: config.pairs]
        values = first_value + words.below(config.value_space, config.pairs)
        # which distance comes first goes round with the documents, so every distance is asked equally often
        distances = [config.distances[(index * config.pairs + i) % len(config.distances)] for i in range(config.pairs)]
        free = np.ones(n, dtype=bool)
        for i in sorted(range(config.pairs), key=lambda i: -distances[i]):
            d = distances[i]
            room = free[:-1] & free[1:]  # a pair fits at this position
            places = np.flatnonzero(room[: n - 1 - d] & room[d:])
            at = int(places[words.below(len(places), 1)[0]])
            for start in (at, at + d):
                tokens[start], tokens[start + 1] = keys[i], values[i]
                free[start : start + 2] = False
            targets[at + d], distance[at + d] = values[i], d
        return Piece(tokens, targets, np.full(n, IGNORED), 0, distance)


def document_length(config: RecallConfig) -> int:
    """Tokens of every document. A placed pair occupies 4 tokens and so rules out at most 12 starting places of another one."""
    return max(config.distances) + 2 + 12 * config.pairs


def check_recall(config: RecallConfig, sequence_length: int, vocab_size: int) -> None:
    """ConfigError for a task that cannot be made or does not fit the model."""
    for key in ("pairs", "key_space", "value_space", "documents"):
        if getattr(config, key) < 1:
            raise ConfigError(f"data.recall.{key}={getattr(config, key)} is not legal; legal: >= 1")
    if not config.distances or min(config.distances) < 2:
        raise ConfigError(f"data.recall.distances={list(config.distances)} is not legal; legal: one or more distances >= 2 (a binding is two tokens)")
    if config.pairs > config.key_space:
        raise ConfigError(f"data.recall.pairs={config.pairs} needs as many distinct keys; data.recall.key_space={config.key_space} is too small")
    length = document_length(config)
    if length > sequence_length:
        raise ConfigError(
            f"data.recall: a document has max(distances) + 2 + 12 * pairs = {length} tokens, more than data.sequence_length={sequence_length}; "
            f"use fewer pairs, shorter distances or data.sequence_length={length}"
        )
    vocab = 1 + FILLER + config.key_space + config.value_space
    if vocab > vocab_size:
        raise ConfigError(
            f"data.recall: {vocab} symbols (1 + {FILLER} filler + key_space + value_space) do not fit model.vocab_size={vocab_size}; "
            f"legal: >= {vocab}"
        )


def recall_sha256(config: RecallConfig, seed: int) -> str:
    """Identity of the task: its settings and seed, and the first documents as they really come out."""
    sha = hashlib.sha256(json.dumps([vars(config), seed, FILLER]).encode())
    for validation in (False, True):
        pieces = RecallPieces(config, 8, seed, validation)
        for index in range(8):
            sha.update(pieces.piece(index).tokens.astype("<i8").tobytes())
    return sha.hexdigest()


def uniform_loss(config: RecallConfig) -> float:
    """Nats per answer of a guess among all values, which is the unigram model of the answers."""
    return math.log(config.value_space)


class _Words:
    """Random words whose stream numpy guarantees for ever (raw generator output, unlike Generator.integers)."""

    def __init__(self, entropy: list[int]) -> None:
        self._generator = np.random.PCG64(np.random.SeedSequence(entropy))

    def raw(self, n: int) -> NDArray[np.uint64]:
        return self._generator.random_raw(n)

    def below(self, limit: int, n: int) -> NDArray[np.int64]:
        return (self.raw(n) % np.uint64(limit)).astype(np.int64)
