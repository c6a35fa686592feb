# SPDX-License-Identifier: Apache-2.0
"""Flat token files: ids as little-endian uint16 or uint32, one document after the other, each ended by `eos`, and a JSON side-car.

`tokens.bin` has its side-car in `tokens.bin.json`:

    format        "csa-tokens-1"
    dtype         "uint16" | "uint32"
    tokens        number of ids in the file
    vocab         ids are < vocab
    eos           id that ends a document; a last document without it is legal
    sha256        of the token file
    token_bytes   optional, list [vocab]: UTF-8 bytes that each id stands for. Without it bits per byte is not available
    tokenizer     optional: file name of the tokenizer beside the token file
    tokenizer_sha256  optional, with `tokenizer`: its hash
    eos_token     optional: text of the eos token in that tokenizer
    train_documents  optional: the first so many documents are the training split, the rest validation. Without it documents are split by their hash
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csa_model.config import ConfigError
from csa_model.data.tokenizers import END_OF_TEXT, Tokenizer, digest, load_tokenizer

FORMAT = "csa-tokens-1"
DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
REQUIRED = ("format", "dtype", "tokens", "vocab", "eos", "sha256")
CHUNK = 1 << 22  # ids read at a time


@dataclass(frozen=True)
class SideCar:
    dtype: str
    tokens: int
    vocab: int
    eos: int
    sha256: str
    token_bytes: NDArray[np.int32] | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    eos_token: str | None = None
    train_documents: int | None = None


class TokenFile:
    """A read-only memory-mapped token file. Pickles as its path: a worker process maps the file again."""

    def __init__(self, path: str | Path, sidecar: SideCar) -> None:
        self.path, self.sidecar = Path(path), sidecar
        self._ids: NDArray[np.integer] | None = None

    @property
    def ids(self) -> NDArray[np.integer]:
        if self._ids is None:
            # an empty file cannot be mapped
            self._ids = np.memmap(self.path, DTYPES[self.sidecar.dtype], "r") if self.sidecar.tokens else np.zeros(0, DTYPES[self.sidecar.dtype])
        return self._ids

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}

    def document_bounds(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: document i holds the ids [bounds[i], bounds[i + 1]), its eos included."""
        ends = [start + 1 + np.flatnonzero(chunk == self.sidecar.eos) for start, chunk in self.chunks()]
        bounds = np.concatenate([[0], *ends]).astype(np.int64)
        return bounds if bounds[-1] == self.sidecar.tokens else np.append(bounds, self.sidecar.tokens)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, NDArray[np.integer]]]:
        """(first id number, ids) of consecutive parts."""
        stop = self.sidecar.tokens if stop is None else stop
        for at in range(start, stop, CHUNK):
            yield at, self.ids[at : min(at + CHUNK, stop)]


def sidecar_path(path: str | Path) -> Path:
    return Path(f"{path}.json")


def open_token_file(path: str | Path) -> TokenFile:
    """Open and check a token file against its side-car: size, sha256, every id. ConfigError names the file and what is wrong."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"data.path={path} is not a file; data=memmap reads a token file made by `python -m csa_model.data.prepare`")
    sidecar = _read_sidecar(path)
    itemsize = DTYPES[sidecar.dtype].itemsize
    size = path.stat().st_size
    if size != sidecar.tokens * itemsize:
        raise ConfigError(
            f"{path} has {size} bytes, but its side-car promises {sidecar.tokens} tokens of {sidecar.dtype} = {sidecar.tokens * itemsize} bytes: "
            "the file is truncated, or was written with another dtype; write it again with `python -m csa_model.data.prepare`"
        )
    if sidecar.tokens == 0:
        raise ConfigError(f"{path} holds no token")
    found = file_sha256(path)
    if found != sidecar.sha256:
        raise ConfigError(f"{path} has sha256 {found}, but its side-car says {sidecar.sha256}: the file or the side-car was changed")
    token_file = TokenFile(path, sidecar)
    for start, chunk in token_file.chunks():
        if int(chunk.max()) >= sidecar.vocab:
            at = start + int(np.argmax(chunk >= sidecar.vocab))
            raise ConfigError(
                f"{path}: token {at} has the id {int(chunk[at - start])}, but its side-car says vocab={sidecar.vocab}; legal: 0..{sidecar.vocab - 1}"
            )
    return token_file


def tokenizer_of(token_file: TokenFile) -> Tokenizer | None:
    """The tokenizer that the side-car names, if any. ConfigError when it is missing, not the one that made the tokens, or of another vocabulary."""
    sidecar = token_file.sidecar
    if sidecar.tokenizer is None:
        return None
    path = token_file.path.parent / sidecar.tokenizer
    tokenizer = load_tokenizer(path, sidecar.eos_token or END_OF_TEXT)
    if sidecar.tokenizer_sha256 not in (None, digest(tokenizer)):
        raise ConfigError(f"{path} is not the tokenizer that made {token_file.path}: its sha256 differs from the one in the side-car")
    if tokenizer.vocab_size != sidecar.vocab or tokenizer.eos != sidecar.eos:
        raise ConfigError(
            f"{path} has {tokenizer.vocab_size} ids and eos {tokenizer.eos}, "
            f"but the side-car of {token_file.path} says vocab={sidecar.vocab} eos={sidecar.eos}"
        )
    return tokenizer


def write_token_file(
    path: str | Path,
    documents: Iterable[NDArray[np.integer]],
    *,
    vocab: int,
    eos: int,
    dtype: str | None = None,
    token_bytes: NDArray[np.integer] | None = None,
    tokenizer: str | None = None,
    tokenizer_sha256: str | None = None,
    eos_token: str | None = None,
    train_documents: int | None = None,
) -> SideCar:
    """Write documents (ids with their eos) and the side-car, which is written last: a crash leaves a file without one, which nothing reads.

    `dtype` None takes the smallest that holds `vocab`. ConfigError when `vocab` does not fit `dtype` or an id is not in [0, vocab).
    """
    dtype = ("uint16" if vocab <= 1 << 16 else "uint32") if dtype is None else dtype
    _check_dtype(dtype, vocab, str(path))
    tokens = 0
    sha = hashlib.sha256()
    sidecar_path(path).unlink(missing_ok=True)
    with _replacing(path) as file:
        for ids in documents:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
                raise ConfigError(f"cannot write {path}: ids lie in {int(ids.min())}..{int(ids.max())}; legal: 0..{vocab - 1}")
            raw = ids.astype(DTYPES[dtype]).tobytes()
            sha.update(raw)
            file.write(raw)
            tokens += len(ids)
    sidecar = SideCar(
        dtype,
        tokens,
        vocab,
        eos,
        sha.hexdigest(),
        None if token_bytes is None else np.asarray(token_bytes, dtype=np.int32),
        tokenizer,
        tokenizer_sha256,
        eos_token,
        train_documents,
    )
    entries: dict[str, Any] = {"format": FORMAT}
    for key, value in vars(sidecar).items():
        if value is not None:
            entries[key] = value.tolist() if isinstance(value, np.ndarray) else value
    with _replacing(sidecar_path(path)) as file:
        file.write(json.dumps(entries).encode())
    return sidecar


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _replacing(path: str | Path) -> Iterator[Any]:
    """Write beside `path` and put the whole file there at the end."""
    draft = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _read_sidecar(path: Path) -> SideCar:
    where = sidecar_path(path)
    if not where.is_file():
        raise ConfigError(f"{path} has no side-car {where}; it names dtype, vocab, eos and sha256, without which ids cannot be read safely")
    try:
        entries = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the side-car {where} is not readable JSON: {error}") from error
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        raise ConfigError(f"the side-car {where} is not of the format {FORMAT!r}")
    missing = [key for key in REQUIRED if key not in entries]
    if missing:
        raise ConfigError(f"the side-car {where} lacks {', '.join(missing)}; required: {', '.join(REQUIRED)}")
    unknown = sorted(set(entries) - set(REQUIRED) - set(SideCar.__dataclass_fields__))
    if unknown:
        raise ConfigError(
            f"the side-car {where} has unknown keys {', '.join(unknown)}; legal: {', '.join(['format', *SideCar.__dataclass_fields__])}"
        )
    for key in ("sha256", "tokenizer", "tokenizer_sha256", "eos_token"):
        if not isinstance(entries.get(key, ""), str):
            raise ConfigError(f"{where}: {key}={entries[key]!r} must be a string")
    for key in ("tokens", "vocab", "eos", "train_documents"):
        value = entries.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{where}: {key}={value!r} must be a whole number >= 0")
    vocab = entries["vocab"]
    _check_dtype(entries["dtype"], vocab, str(where))
    if not entries["eos"] < vocab:
        raise ConfigError(f"{where}: eos={entries['eos']} is not below vocab={vocab}")
    sizes = entries.get("token_bytes")
    if sizes is not None:
        if not isinstance(sizes, list) or len(sizes) != vocab or not all(isinstance(s, int) and 0 <= s < 1 << 31 for s in sizes):
            raise ConfigError(f"{where}: token_bytes must be a list of {vocab} whole numbers >= 0 and < 2**31, one per id")
        sizes = np.array(sizes, dtype=np.int32)
    return SideCar(**{**{k: v for k, v in entries.items() if k != "format"}, "token_bytes": sizes})


def _check_dtype(dtype: Any, vocab: int, where: str) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"{where}: dtype={dtype!r} is not legal; legal: {', '.join(DTYPES)}")
    largest = np.iinfo(DTYPES[dtype]).max
    if vocab > largest + 1:
        raise ConfigError(f"{where}: vocab={vocab} does not fit {dtype}, which holds ids up to {largest}; use uint32")
