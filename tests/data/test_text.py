# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from csa_model.config import ConfigError, DataConfig
from csa_model.data import text
from csa_model.data.text import is_validation, read_stdlib, read_text_files, split_digests, tokenized
from csa_model.data.token_file import sidecar_path
from tests.data.helpers import text_config, write_texts


def test_the_standard_library_is_read_without_tests_and_packages() -> None:
    corpus = read_stdlib()
    names = [document.name for document in corpus.documents]
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))
    assert len({document.sha256 for document in corpus.documents}) == len(names)
    assert len(corpus.sha256) == 64
    assert any("same content as" in line for line in corpus.skipped)


def test_an_interpreter_without_sources_is_told_what_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for folder, reason in [("lib", "holds no readable"), ("missing", "does not exist")]:
        monkeypatch.setattr("sysconfig.get_paths", lambda folder=folder: {"stdlib": str(tmp_path / folder)})
        with pytest.raises(ConfigError, match=rf"{reason}.*data=text_files data.path="):
            read_stdlib()


def test_files_that_are_no_text_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "texts"
    (folder / "sub" / ".git").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"first\r\nline")
    (folder / "sub" / "b").write_bytes("ünïcode".encode())
    (folder / "copy.txt").write_bytes(b"first\r\nline")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "zero.bin").write_bytes(b"a\0b")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"x")
    (folder / "sub" / ".git" / "config").write_bytes(b"x")
    os.mkfifo(folder / "pipe")
    with caplog.at_level(logging.WARNING):
        corpus = read_text_files(folder)
    assert [(document.name, document.text) for document in corpus.documents] == [("a.txt", "first\r\nline"), ("sub/b", "ünïcode")]
    assert corpus.skipped == (
        ".hidden: hidden",
        "copy.txt: same content as a.txt",
        "empty.txt: empty",
        "latin.txt: not UTF-8 (byte 3)",
        "pipe: not a regular file",
        "zero.bin: binary (holds a zero byte)",
    )
    assert "6 files skipped" in caplog.text
    assert "latin.txt: not UTF-8" in caplog.text


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser reads everything")
def test_a_file_without_permission_is_skipped(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", 2)
    (tmp_path / "texts" / "00.txt").chmod(0)
    assert read_text_files(tmp_path / "texts").skipped == ("00.txt: Permission denied",)


def test_one_file_is_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / ".book"
    path.write_text("hello")
    assert [document.text for document in read_text_files(path).documents] == ["hello"]


@pytest.mark.parametrize("kind", ["missing", "empty", "binary"])
def test_a_path_without_text_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "texts"
    if kind != "missing":
        path.mkdir()
    if kind == "binary":
        (path / "x.bin").write_bytes(b"\xff\xfe\0")
    reason = {"missing": "does not exist", "empty": "it is empty", "binary": "x.bin: binary"}[kind]
    with pytest.raises(ConfigError, match=rf"data.path={path} .*{reason}.*legal: a text file, or a folder"):
        read_text_files(path)


def test_the_corpus_hash_follows_the_content_and_not_the_names(tmp_path: Path) -> None:
    one, two = write_texts(tmp_path / "one"), write_texts(tmp_path / "two")
    assert read_text_files(one).sha256 == read_text_files(two).sha256
    (two / "00.txt").write_text("changed")
    assert read_text_files(one).sha256 != read_text_files(two).sha256


def test_the_split_is_a_property_of_each_document() -> None:
    digests = [bytes([i, j]) * 16 for i in range(40) for j in range(50)]
    held_out = split_digests(digests, 0.05)
    assert held_out == [is_validation(digest, 0.05) for digest in digests]
    assert 60 <= sum(held_out) <= 140
    assert split_digests(digests[::-1], 0.05) == held_out[::-1]
    assert all(more for less, more in zip(held_out, split_digests(digests, 0.2), strict=True) if less)


def test_either_side_of_the_split_gets_a_document() -> None:
    for fraction in (1e-9, 0.5, 1 - 1e-9):
        for n in (2, 3, 7):
            held_out = split_digests([bytes([i]) for i in range(n)], fraction)
            assert 0 < sum(held_out) < n


def test_tokens_come_from_the_cache_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = read_text_files(write_texts(tmp_path / "texts"))
    config = text_config(tmp_path, tmp_path / "texts")
    file, tokenizer = tokenized(corpus, config)
    monkeypatch.setattr(text, "_build", None)
    again, same = tokenized(corpus, config)
    assert again.ids.tolist() == file.ids.tolist()
    assert same.serialized() == tokenizer.serialized()
    bounds = file.document_bounds()
    texts = [tokenizer.decode(file.ids[a : b - 1].tolist()) for a, b in itertools.pairwise(bounds)]
    assert sorted(texts) == sorted(document.text for document in corpus.documents)
    train = file.sidecar.train_documents
    assert train is not None
    held_out = {document.text for document in corpus.documents if is_validation(document.sha256, 0.2)}
    assert set(texts[train:]) == held_out != set()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [file.path.parent.name]


def test_every_setting_that_changes_tokens_has_a_cache_of_its_own(tmp_path: Path) -> None:
    corpus = read_text_files(write_texts(tmp_path / "texts"))
    configs = [
        text_config(tmp_path, None),
        text_config(tmp_path, None, tokenizer="bytes"),
        text_config(tmp_path, None, vocab_size=280),
        text_config(tmp_path, None, validation_fraction=0.5),
    ]
    folders = {tokenized(corpus, config)[0].path.parent for config in configs}
    (tmp_path / "texts" / "new.txt").write_text("more")
    folders.add(tokenized(read_text_files(tmp_path / "texts"), configs[0])[0].path.parent)
    assert len(folders) == 5
    assert tokenized(corpus, text_config(tmp_path, None, sequence_length=8))[0].path.parent in folders


def test_the_tokenizer_learns_from_the_training_split_alone(tmp_path: Path) -> None:
    corpus = read_text_files(write_texts(tmp_path / "texts"))
    held_out = next(document for document in corpus.documents if is_validation(document.sha256, 0.2))
    _, tokenizer = tokenized(corpus, text_config(tmp_path, None))
    without = [document.text for document in corpus.documents if not is_validation(document.sha256, 0.2)]
    assert held_out.text not in without
    assert tokenizer.serialized() == text.BPETokenizer.train(without, 300).serialized()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no side-car", "half tokenizer", "other tokenizer", "empty folder"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    corpus = read_text_files(write_texts(tmp_path / "texts"))
    config = text_config(tmp_path, tmp_path / "texts")
    file, tokenizer = tokenized(corpus, config)
    right = file.ids.tolist()
    path, tokenizer_path = file.path, file.path.parent / "tokenizer.json"
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-2])
    elif damage == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "half tokenizer":
        tokenizer_path.write_text(tokenizer.serialized()[:100])
    elif damage == "other tokenizer":
        tokenizer_path.write_text(tokenizer.serialized().replace("word", "ward"))
    elif damage == "no side-car":
        sidecar_path(path).unlink()
    else:
        for entry in path.parent.iterdir():
            entry.unlink()
    with caplog.at_level(logging.WARNING):
        again, same = tokenized(corpus, config)
    assert "is damaged and is built again" in caplog.text
    assert again.ids.tolist() == right
    assert same.serialized() == tokenizer.serialized()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_crash_while_building_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = read_text_files(write_texts(tmp_path / "texts"))
    config = text_config(tmp_path, None)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text, "write_token_file", crash)
        with pytest.raises(KeyboardInterrupt):
            tokenized(corpus, config)
    assert list((tmp_path / "cache").iterdir()) == []
    tokenized(corpus, config)


def _build(folder: str, start: float) -> None:
    corpus = read_text_files(Path(folder) / "texts")
    while time.time() < start:
        time.sleep(0.001)
    file, _ = tokenized(corpus, text_config(Path(folder), None))
    sys.exit(0 if file.ids[-1] == file.sidecar.eos else 1)


def test_parallel_jobs_may_build_the_same_cache(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    context = multiprocessing.get_context("fork")
    start = time.time() + 0.3
    jobs = [context.Process(target=_build, args=(str(tmp_path), start)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 4
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    corpus = read_text_files(write_texts(tmp_path / "texts"))
    with pytest.raises(ConfigError, match=rf"data.cache_dir={tmp_path}/cache cannot be written"):
        tokenized(corpus, text_config(tmp_path, None))


def test_the_only_document_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    config = DataConfig(name="text_files", path=str(path), cache_dir=str(tmp_path / "cache"), validation_fraction=0.1)
    file, tokenizer = tokenized(read_text_files(path), config)
    bounds = file.document_bounds()
    train, validation = (tokenizer.decode(file.ids[a : b - 1].tolist()) for a, b in itertools.pairwise(bounds))
    assert train + validation == path.read_text()
    assert validation.startswith("line 9")
    assert 0.08 < len(validation) / len(train + validation) < 0.13
