# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csa_model.config import ConfigError
from csa_model.data import token_file
from csa_model.data.token_file import SideCar, file_sha256, open_token_file, sidecar_path, tokenizer_of, write_token_file
from csa_model.data.tokenizers import BPETokenizer, BytesTokenizer, digest
from tests.data.helpers import EOS, VOCAB, documents_of, token_file_of


def edit(path: Path, **entries: Any) -> None:
    """Change entries of the side-car; None removes one."""
    content = {**json.loads(sidecar_path(path).read_text()), **entries}
    sidecar_path(path).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_what_was_written_is_read(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    documents = documents_of([5, 1, 30])
    written = write_token_file(path, documents, vocab=VOCAB, eos=EOS, dtype=dtype)
    opened = open_token_file(path)
    assert opened.sidecar == written == SideCar(dtype, 36, VOCAB, EOS, file_sha256(path))
    assert opened.ids.tolist() == np.concatenate(documents).tolist()
    assert opened.document_bounds().tolist() == [0, 5, 6, 36]
    assert path.stat().st_size == 36 * int(dtype[4:]) // 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tokens.bin", "tokens.bin.json"]


def test_a_last_document_needs_no_end(tmp_path: Path) -> None:
    write_token_file(tmp_path / "t", [np.array([5, 6, EOS, 7])], vocab=VOCAB, eos=EOS)
    assert open_token_file(tmp_path / "t").document_bounds().tolist() == [0, 3, 4]


def test_the_smallest_dtype_is_taken_and_a_larger_vocabulary_needs_the_larger(tmp_path: Path) -> None:
    assert write_token_file(tmp_path / "a", [np.array([65535])], vocab=1 << 16, eos=0).dtype == "uint16"
    assert write_token_file(tmp_path / "b", [np.array([65536])], vocab=(1 << 16) + 1, eos=0).dtype == "uint32"
    assert open_token_file(tmp_path / "b").ids.tolist() == [65536]
    with pytest.raises(ConfigError, match=r"vocab=65537 does not fit uint16.*uint32"):
        write_token_file(tmp_path / "c", [np.array([1])], vocab=(1 << 16) + 1, eos=0, dtype="uint16")


def test_large_files_are_checked_and_cut_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "CHUNK", 7)
    opened = token_file_of(tmp_path / "t", [7, 14, 3, 1, 20])
    assert opened.document_bounds().tolist() == [0, 7, 21, 24, 25, 45]
    edit(tmp_path / "t", vocab=int(opened.ids[7:].max()), token_bytes=None)
    at = int(opened.ids.argmax())
    with pytest.raises(ConfigError, match=f"token {at} has the id {int(opened.ids.max())}"):
        open_token_file(tmp_path / "t")


def test_a_file_of_another_dtype_is_refused(tmp_path: Path) -> None:
    """A uint32 file read as uint16 would give plausible ids."""
    path = tmp_path / "tokens.bin"
    token_file_of(path, [5, 6], dtype="uint32")
    edit(path, dtype="uint16")
    with pytest.raises(ConfigError, match=r"tokens.bin has 44 bytes.*11 tokens of uint16 = 22 bytes.*another dtype"):
        open_token_file(path)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_truncated_file_is_refused(tmp_path: Path, missing: int) -> None:
    """A file truncated by one byte; and by one whole token."""
    path = tmp_path / "tokens.bin"
    token_file_of(path, [5, 6])
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(ConfigError, match=rf"has {22 - missing} bytes.*= 22 bytes.*truncated"):
        open_token_file(path)


def test_a_changed_token_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    token_file_of(path, [5, 6])
    content = bytearray(path.read_bytes())
    content[4] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"sha256 .* side-car says"):
        open_token_file(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"dtype": "float32"}, "dtype='float32' is not legal; legal: uint16, uint32"),
        ({"dtype": ["uint16"]}, "is not legal; legal: uint16, uint32"),
        ({"dtype": None}, "lacks dtype"),
        ({"vocab": None, "eos": None}, "lacks vocab, eos"),
        ({"vocab": 70000}, "vocab=70000 does not fit uint16"),
        ({"vocab": "300"}, "vocab='300' must be a whole number"),
        ({"eos": 300}, "eos=300 is not below vocab=300"),
        ({"eos": -1}, "eos=-1 must be a whole number >= 0"),
        ({"tokens": 12}, "promises 12 tokens"),
        ({"format": "other"}, "is not of the format 'csa-tokens-1'"),
        ({"token_bytes": [1, 2]}, "token_bytes must be a list of 300"),
        ({"token_bytes": [1 << 31] * 300}, "token_bytes must be a list of 300"),
        ({"sha256": 5}, "sha256=5 must be a string"),
        ({"vocabulary": 3}, "unknown keys vocabulary"),
    ],
)
def test_a_bad_side_car_is_refused_by_name(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    path = tmp_path / "tokens.bin"
    token_file_of(path, [5, 6])
    edit(path, **entries)
    with pytest.raises(ConfigError) as error:
        open_token_file(path)
    assert message in str(error.value)
    assert "tokens.bin" in str(error.value)


@pytest.mark.parametrize("key", ["tokens", "vocab", "eos", "train_documents"])
def test_a_number_of_the_side_car_may_not_be_null(tmp_path: Path, key: str) -> None:
    path = tmp_path / "tokens.bin"
    token_file_of(path, [5, 6])
    sidecar_path(path).write_text(json.dumps({**json.loads(sidecar_path(path).read_text()), key: None}))
    with pytest.raises(ConfigError, match=f"tokens.bin.json: {key}=None must be a whole number"):
        open_token_file(path)


def test_a_missing_or_unreadable_side_car_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with pytest.raises(ConfigError, match=r"is not a file.*prepare"):
        open_token_file(path)
    path.write_bytes(b"\0\0")
    with pytest.raises(ConfigError, match=r"has no side-car .*tokens.bin.json"):
        open_token_file(path)
    sidecar_path(path).write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        open_token_file(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "t", [], vocab=VOCAB, eos=EOS)
    with pytest.raises(ConfigError, match="holds no token"):
        open_token_file(tmp_path / "t")


def test_a_failed_write_leaves_nothing_that_could_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with pytest.raises(ConfigError, match=r"ids lie in 1..300; legal: 0..299"):
        write_token_file(path, [np.array([1, 300])], vocab=VOCAB, eos=EOS)
    with pytest.raises(ConfigError, match=r"ids lie in -1..1"):
        write_token_file(path, [np.array([1, -1])], vocab=VOCAB, eos=EOS)
    assert list(tmp_path.iterdir()) == []


def test_a_token_file_pickles_as_its_path(tmp_path: Path) -> None:
    opened = token_file_of(tmp_path / "t", [50_000])
    ids = opened.ids.tolist()
    pickled = pickle.dumps(opened)
    assert len(pickled) < 5000
    assert pickle.loads(pickled).ids.tolist() == ids


def test_the_named_tokenizer_must_be_the_one_that_made_the_tokens(tmp_path: Path) -> None:
    made = BPETokenizer.train(["some text of some words"], 262)
    made.save(tmp_path / "tok.json")
    path = tmp_path / "t"
    write_token_file(path, [np.array([1, made.eos])], vocab=made.vocab_size, eos=made.eos, tokenizer="tok.json", tokenizer_sha256=digest(made))
    found = tokenizer_of(open_token_file(path))
    assert found is not None
    assert digest(found) == digest(made)
    BPETokenizer.train(["other text with other words"], 262).save(tmp_path / "tok.json")
    with pytest.raises(ConfigError, match=r"tok.json is not the tokenizer that made"):
        tokenizer_of(open_token_file(path))
    BytesTokenizer().save(tmp_path / "tok.json")
    edit(path, tokenizer_sha256=None)
    with pytest.raises(ConfigError, match="has 257 ids and eos 256"):
        tokenizer_of(open_token_file(path))
    (tmp_path / "tok.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer file .*tok.json"):
        tokenizer_of(open_token_file(path))
    assert tokenizer_of(token_file_of(tmp_path / "none", [5])) is None
