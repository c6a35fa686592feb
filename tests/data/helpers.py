# SPDX-License-Identifier: Apache-2.0
"""Small corpora and comparisons shared by the data tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from csa_model.config import DataConfig, TokenizerConfig
from csa_model.data.batch import PackedBatch
from csa_model.data.corpus import TokenPieces
from csa_model.data.datamodule import CSADataModule
from csa_model.data.token_file import TokenFile, open_token_file, write_token_file

VOCAB = 300
EOS = 0


def documents_of(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Random documents, each ended by EOS, `lengths` tokens long with it."""
    rng = np.random.default_rng(seed)
    return [np.append(rng.integers(1, VOCAB, n - 1), EOS) for n in lengths]


def token_file_of(path: Path, lengths: list[int], seed: int = 0, **entries: object) -> TokenFile:
    sizes = np.arange(VOCAB) % 5
    sizes[EOS] = 0
    write_token_file(path, documents_of(lengths, seed), vocab=VOCAB, eos=EOS, token_bytes=sizes, **entries)  # type: ignore[arg-type]
    return open_token_file(path)


def source_of(path: Path, lengths: list[int], sequence_length: int, seed: int = 0) -> TokenPieces:
    """Pieces of all documents of a token file written to `path`."""
    file = token_file_of(path, lengths, seed)
    bounds = file.document_bounds()
    return TokenPieces(file, bounds[:-1], bounds[1:], sequence_length, file.sidecar.token_bytes)


def datamodule_of(folder: Path, lengths: list[int], **settings: object) -> CSADataModule:
    """A set-up data module over a token file of these document lengths; settings of DataConfig or of the module."""
    own = {key: settings.pop(key) for key in ("ratios", "accumulate", "seed", "max_steps") if key in settings}
    path = folder / "tokens.bin"
    token_file_of(path, lengths)
    defaults = {"sequence_length": 16, "tokens_per_batch": 32, "validation_fraction": 0.2, "validation_batches": 3}
    config = DataConfig(name="memmap", path=str(path), cache_dir=str(folder / "cache"), **{**defaults, **settings})  # type: ignore[arg-type]
    module = CSADataModule(config, **{"ratios": (0, 4, 8), "vocab_size": VOCAB, "accumulate": 1, "seed": 1, "max_steps": 10, **own})  # type: ignore[arg-type]
    module.setup("fit")
    return module


def text_config(folder: Path, path: Path | None, tokenizer: str = "bpe", vocab_size: int = 300, **settings: object) -> DataConfig:
    defaults = {"sequence_length": 32, "tokens_per_batch": 64, "validation_fraction": 0.2, "validation_batches": 2}
    return DataConfig(
        name="text_files",
        path=None if path is None else str(path),
        cache_dir=str(folder / "cache"),
        tokenizer=TokenizerConfig(tokenizer, vocab_size),  # type: ignore[arg-type]
        **{**defaults, **settings},  # type: ignore[arg-type]
    )


def write_texts(folder: Path, count: int = 12) -> Path:
    """A folder of small text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:02d}.txt").write_text(f"File {i}: " + " ".join(f"word{(i * 7 + j * j) % 23} ünïcode" for j in range(40)), encoding="utf-8")
    return folder


def same(a: PackedBatch, b: PackedBatch) -> bool:
    """Bit-equal batches, counts included."""
    tensors = all(torch.equal(getattr(a, key), getattr(b, key)) for key in ("tokens", "targets", "mtp_targets"))
    distance = (a.distance is None and b.distance is None) or (
        a.distance is not None and b.distance is not None and torch.equal(a.distance, b.distance)
    )
    return tensors and distance and a.layout.lengths == b.layout.lengths and a.step == b.step and a.target_bytes == b.target_bytes
