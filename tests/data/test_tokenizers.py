# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from csa_model.config import ConfigError
from csa_model.data import tokenizers as ours
from csa_model.data.tokenizers import END_OF_TEXT, BPETokenizer, BytesTokenizer, Tokenizer, digest, encode_documents, load_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "The quick brown fox, ünïcode 漢字 🙂\r\n\ttabs" * 10]
BPE = BPETokenizer.train(TEXTS, 300)
BYTES = BytesTokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])


@BOTH
@given(st.text(max_size=60))
@settings(deadline=None, max_examples=60)
def test_text_comes_back_and_every_byte_is_counted(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode(errors="ignore").decode()  # no lone surrogates
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.eos not in ids


@BOTH
def test_text_that_spells_the_end_of_a_document_does_not_end_it(tokenizer: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b"
    assert tokenizer.eos not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (document,) = encode_documents(tokenizer, [text])
    assert (document == tokenizer.eos).nonzero()[0].tolist() == [len(document) - 1]


def test_tokens_that_are_parts_of_a_character_count_their_raw_bytes() -> None:
    single = BPETokenizer.train(["abc"], 257)  # no merges that would join the bytes of 🙂
    ids = single.encode("🙂")
    assert single.token_bytes()[ids].tolist() == [1, 1, 1, 1]
    assert single.decode(ids[:2]) == "�"
    assert single.token_bytes()[single.eos] == 0


def test_training_is_repeatable_and_bounded_by_vocab_size() -> None:
    assert digest(BPETokenizer.train(TEXTS, 300)) == digest(BPE)
    assert BPE.vocab_size == 300
    assert BPETokenizer.train(["abab"], 5000).vocab_size < 300  # a small corpus does not fill it
    with pytest.raises(ConfigError, match=r"vocab_size=256.*legal: >= 257"):
        BPETokenizer.train(TEXTS, 256)


@BOTH
def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    loaded = load_tokenizer(tmp_path / "t.json")
    assert digest(loaded) == digest(tokenizer)
    assert loaded.encode(TEXTS[1] + END_OF_TEXT) == tokenizer.encode(TEXTS[1] + END_OF_TEXT)
    assert (loaded.vocab_size, loaded.eos) == (tokenizer.vocab_size, tokenizer.eos)
    assert loaded.token_bytes().tolist() == tokenizer.token_bytes().tolist()


@BOTH
def test_documents_are_encoded_as_texts_are(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "PART", 50)  # long texts are encoded in parts
    texts = [TEXTS[0], "", "no line end " * 20, TEXTS[1]]
    documents = list(encode_documents(tokenizer, texts))
    assert [tokenizer.decode(d[:-1].tolist()) for d in documents] == texts
    assert [d[:-1].tolist() for d in documents] == [tokenizer.encode(text) for text in texts]
    assert all(d[-1] == tokenizer.eos for d in documents)


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    missing, junk, words = tmp_path / "missing.json", tmp_path / "junk.json", tmp_path / "words.json"
    junk.write_text('{"model": ')
    words.write_text(tokenizers.Tokenizer(models.WordLevel({END_OF_TEXT: 0, "hello world": 1}, END_OF_TEXT)).to_str())
    for path, reason in [(missing, "cannot read"), (junk, "not a tokenizer.json"), (words, "not byte-level")]:
        with pytest.raises(ConfigError, match=rf"{path.name}.*{reason}|{reason}.*{path.name}"):
            load_tokenizer(path)
    BPE.save(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="has no token '</s>'"):
        load_tokenizer(tmp_path / "t.json", "</s>")


def test_special_tokens_anywhere_in_the_vocabulary_have_no_bytes(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.add_special_tokens(["<pad>", "</s>"])
    model.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json", "</s>")
    assert (loaded.vocab_size, loaded.eos) == (259, 258)
    assert loaded.token_bytes()[[alphabet.index("a"), 256, 257, 258]].tolist() == [1, 2, 0, 0]
    assert loaded.encode("ab</s>")[0] == 256
    assert 258 not in loaded.encode("ab</s>")


def test_a_fork_after_training_is_silent_and_does_not_hang(capfd: pytest.CaptureFixture[str]) -> None:
    BPETokenizer.train(TEXTS, 300)
    process = multiprocessing.get_context("fork").Process(target=BPETokenizer.train, args=(TEXTS, 300))
    process.start()
    process.join(30)  # waiting for the parent's threads would never end
    process.kill()
    assert process.exitcode == 0
    assert "TOKENIZERS_PARALLELISM" not in capfd.readouterr().err
    assert "TOKENIZERS_PARALLELISM" in os.environ


def test_ids_of_bytes_are_the_bytes() -> None:
    (document,) = encode_documents(BYTES, ["aÿ"])
    assert document.tolist() == [97, 0xC3, 0xBF, 256]
    assert document.dtype == np.int64
