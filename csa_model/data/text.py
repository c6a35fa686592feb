# SPDX-License-Identifier: Apache-2.0
"""Text corpora: the interpreter's own standard library, or any file or folder. A document per file, equal files once; tokens are cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from csa_model.config import ConfigError, DataConfig
from csa_model.data.token_file import TokenFile, open_token_file, tokenizer_of, write_token_file
from csa_model.data.tokenizers import BPETokenizer, BytesTokenizer, Tokenizer, deepseek_v4_tokenizer, digest, encode_documents

log = logging.getLogger(__name__)

CACHE_VERSION = 1  # raise when the meaning of a cache folder changes
SPLIT_SALT = b"csa validation split"
STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests"})


@dataclass(frozen=True)
class Document:
    name: str  # path below the corpus folder
    text: str
    sha256: bytes  # of the UTF-8 bytes


@dataclass(frozen=True)
class TextCorpus:
    documents: tuple[Document, ...]  # sorted by path, without copies
    skipped: tuple[str, ...]  # "path: reason"

    @property
    def sha256(self) -> str:
        """Hash of the documents' contents in their order, whatever the files are called."""
        return hashlib.sha256(b"".join(document.sha256 for document in self.documents)).hexdigest()


def read_stdlib() -> TextCorpus:
    """Every `*.py` of the running interpreter's standard library, without tests and installed packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise ConfigError(f"data=stdlib: the standard library folder {folder} does not exist; use data=text_files data.path=FOLDER")
    corpus = _read_files(folder, lambda path: path.suffix == ".py", STDLIB_EXCLUDED)
    if not corpus.documents:
        raise ConfigError(f"data=stdlib: {folder} holds no readable *.py (an interpreter without sources?); use data=text_files data.path=FOLDER")
    return corpus


def read_text_files(path: str | Path) -> TextCorpus:
    """One text file, or every text file below a folder. Hidden, empty, binary and undecodable files are skipped and named.

    ConfigError when nothing is left.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"data.path={path} does not exist; legal: a text file, or a folder of text files (UTF-8)")
    corpus = _read_files(path, lambda _: True, frozenset())
    if not corpus.documents:
        why = "; ".join(corpus.skipped[:5]) or "it is empty"
        raise ConfigError(f"data.path={path} holds no readable text ({why}); legal: a text file, or a folder of text files (UTF-8)")
    if corpus.skipped:
        shown = "; ".join(corpus.skipped[:10])
        log.warning("data.path=%s: %d files skipped: %s%s", path, len(corpus.skipped), shown, " ..." if len(corpus.skipped) > 10 else "")
    return corpus


def is_validation(digest: bytes, fraction: float) -> bool:
    """Whether the document with this sha256 is held out: a pure function of the document, so the split survives added files and other seeds."""
    return int.from_bytes(hashlib.sha256(SPLIT_SALT + digest).digest()[:8], "big") < fraction * 2**64


def split_digests(digests: Sequence[bytes], fraction: float) -> list[bool]:
    """`is_validation` of each document, with at least one document on either side. Needs two documents or more."""
    held_out = [is_validation(digest, fraction) for digest in digests]
    order = sorted(range(len(digests)), key=lambda i: hashlib.sha256(SPLIT_SALT + digests[i]).digest())
    if not any(held_out):
        held_out[order[0]] = True
    if all(held_out):
        held_out[order[-1]] = False
    return held_out


def tokenized(corpus: TextCorpus, config: DataConfig) -> tuple[TokenFile, Tokenizer]:
    """Tokens of the corpus, training documents first, and the tokenizer, trained on these alone. Both from data.cache_dir if they are there.

    The cache folder is named by a hash of all it depends on and appears as a whole or not at all: parallel jobs and crashes leave no half one.
    A folder that fails its checksums is built again.
    """
    settings = [CACHE_VERSION, corpus.sha256, config.tokenizer.name, config.tokenizer.vocab_size, config.validation_fraction]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    folder = Path(config.cache_dir) / f"{config.name}-{key}"
    if folder.exists():
        try:
            return _open_cache(folder)
        except ConfigError as error:
            log.warning("the token cache %s is damaged and is built again: %s", folder, error)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _build(corpus, config, draft)
            _put_in_place(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"data.cache_dir={config.cache_dir} cannot be written: {error}") from error
    return _open_cache(folder)


def _read_files(root: Path, wanted: Callable[[Path], bool], excluded: frozenset[str]) -> TextCorpus:
    single = root.is_file()
    files = [root] if single else []
    for folder, folders, names in os.walk(root):  # nothing for a file
        folders[:] = [f for f in folders if f not in excluded and not f.startswith(".")]
        files += [Path(folder) / name for name in names]
    if single:
        root = root.parent
    documents, skipped = [], []
    first_of: dict[bytes, str] = {}
    for path in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if not wanted(path):
            continue
        try:
            text, digest = _read_file(path, hidden=path.name.startswith(".") and not single)
            if digest in first_of:
                raise ValueError(f"same content as {first_of[digest]}")
        except (OSError, ValueError) as error:
            skipped.append(f"{name}: {error.strerror if isinstance(error, OSError) else error}")
            continue
        first_of[digest] = name
        documents.append(Document(name, text, digest))
    return TextCorpus(tuple(documents), tuple(skipped))


def _read_file(path: Path, hidden: bool) -> tuple[str, bytes]:
    if hidden:
        raise ValueError("hidden")
    if not path.is_file():  # reading a pipe would never end
        raise ValueError("not a regular file")
    raw = path.read_bytes()
    if not raw:
        raise ValueError("empty")
    if b"\0" in raw:
        raise ValueError("binary (holds a zero byte)")
    try:
        return raw.decode(), hashlib.sha256(raw).digest()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error


def _split(corpus: TextCorpus, fraction: float) -> tuple[list[str], list[str]]:
    texts = [document.text for document in corpus.documents]
    if len(texts) == 1:  # the end of the only document is held out, from a line start if there is one
        text = texts[0]
        cut = max(1, int(len(text) * (1 - fraction)))
        cut = text.rfind("\n", cut - cut // 10, cut) + 1 or cut
        return [text[:cut]], [text[cut:]]
    held_out = split_digests([document.sha256 for document in corpus.documents], fraction)
    train = [text for text, out in zip(texts, held_out, strict=True) if not out]
    return train, [text for text, out in zip(texts, held_out, strict=True) if out]


def _build(corpus: TextCorpus, config: DataConfig, folder: Path) -> None:
    train, validation = _split(corpus, config.validation_fraction)
    tokenizer: Tokenizer
    if config.tokenizer.name == "bytes":
        tokenizer = BytesTokenizer()
    elif config.tokenizer.name == "deepseek_v4":
        tokenizer = deepseek_v4_tokenizer()
    else:
        tokenizer = BPETokenizer.train(train, config.tokenizer.vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    write_token_file(
        folder / "tokens.bin",
        encode_documents(tokenizer, [*train, *validation]),
        vocab=tokenizer.vocab_size,
        eos=tokenizer.eos,
        token_bytes=tokenizer.token_bytes(),
        tokenizer="tokenizer.json",
        tokenizer_sha256=digest(tokenizer),
        eos_token=tokenizer.eos_token if isinstance(tokenizer, BPETokenizer) else None,
        train_documents=len(train),
    )


def _open_cache(folder: Path) -> tuple[TokenFile, Tokenizer]:
    token_file = open_token_file(folder / "tokens.bin")
    tokenizer = tokenizer_of(token_file)
    if tokenizer is None:
        raise ConfigError(f"{folder}/tokens.bin names no tokenizer")
    return token_file, tokenizer


def _put_in_place(draft: Path, folder: Path) -> None:
    """Rename the finished draft. Where another job was faster its folder stays, unless it is damaged."""
    while True:
        try:
            os.rename(draft, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        with contextlib.suppress(ConfigError):
            _open_cache(folder)
            return
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as bin_, contextlib.suppress(FileNotFoundError):
            os.rename(folder, Path(bin_) / "damaged")
