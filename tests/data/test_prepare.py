# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from csa_model.config import DataConfig
from csa_model.data.corpus import build_corpus
from csa_model.data.prepare import main
from csa_model.data.text import read_text_files
from csa_model.data.token_file import open_token_file
from csa_model.data.tokenizers import END_OF_TEXT
from tests.data.helpers import write_texts


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_prepared_text_trains_with_bits_per_byte(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "new" / "tokens.bin"
    assert main(["--input", str(folder), "--out", str(out), "--tokenizer", tokenizer, "--vocab-size", "290"]) == 0
    printed = capsys.readouterr().out
    vocab = 290 if tokenizer == "bpe" else 257
    assert f"python train.py data=memmap data.path={out} model.vocab_size={vocab}" in printed
    config = DataConfig(name="memmap", path=str(out), sequence_length=32, tokens_per_batch=64, validation_fraction=0.3)
    corpus = build_corpus(config, vocab_size=vocab, seed=1)
    assert corpus.tokenizer is not None
    assert corpus.info.tokenizer == tokenizer
    assert corpus.info.bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert corpus.info.unigram_bits_per_byte is not None
    file = open_token_file(out)
    bounds = file.document_bounds()
    texts = [corpus.tokenizer.decode(file.ids[a : b - 1].tolist()) for a, b in itertools.pairwise(bounds)]
    assert texts == [document.text for document in read_text_files(folder).documents]


def test_a_given_tokenizer_and_dtype_are_used(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    assert main(["--input", str(folder), "--out", str(tmp_path / "a.bin"), "--vocab-size", "280"]) == 0
    given = str(tmp_path / "a.bin.tokenizer.json")
    options = ["--input", str(folder / "00.txt"), "--out", str(tmp_path / "b.bin"), "--tokenizer", given, "--dtype", "uint32"]
    assert main([*options, "--eos-token", END_OF_TEXT]) == 0
    a, b = open_token_file(tmp_path / "a.bin"), open_token_file(tmp_path / "b.bin")
    assert (a.sidecar.dtype, b.sidecar.dtype) == ("uint16", "uint32")
    assert b.ids.tolist() == a.ids[: b.sidecar.tokens].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "MISSING"], "does not exist"),
        (["--tokenizer", "gpt9"], "--tokenizer gpt9 is not legal; legal: bpe, bytes"),
        (["--vocab-size", "100"], "legal: >= 257"),
        (["--tokenizer", "TEXT"], "is not a tokenizer.json"),
    ],
)
def test_bad_options_end_with_one_message(tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_texts(tmp_path / "texts")
    names = {"MISSING": str(tmp_path / "missing"), "TEXT": str(folder / "00.txt")}
    options = ["--input", str(folder), "--out", str(tmp_path / "t.bin"), *(names.get(option, option) for option in options)]
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert not (tmp_path / "t.bin.json").exists()


def test_existing_files_are_kept_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "t.bin"
    out.write_bytes(b"mine")
    options = ["--input", str(folder), "--out", str(out), "--vocab-size", "280"]
    assert main(options) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    assert main([*options, "--overwrite"]) == 0
    open_token_file(out)
