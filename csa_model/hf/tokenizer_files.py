# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a run as the files that transformers' AutoTokenizer reads."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from csa_model.config import ConfigError, ModelConfig
from csa_model.data.recall import RecallTokenizer
from csa_model.data.tokenizers import END_OF_TEXT, BPETokenizer, BytesTokenizer, Tokenizer

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
COPIED = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")  # what an import takes along


def tokenizer_files(tokenizer: Tokenizer, model: ModelConfig) -> dict[str, str]:
    """File name -> content. The ids are those that the model was trained on; ConfigError for a tokenizer with more ids than the model."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer makes {tokenizer.vocab_size} ids, more than model.vocab_size={model.vocab_size}: it is not that of this model"
        )
    if isinstance(tokenizer, BPETokenizer):
        content, eos = tokenizer.serialized(), tokenizer.eos_token
    elif isinstance(tokenizer, BytesTokenizer):
        content, eos = _bytes_as_bpe().to_str(), END_OF_TEXT
    elif isinstance(tokenizer, RecallTokenizer):
        content, eos = _symbols(tokenizer.names).to_str(), tokenizer.names[tokenizer.eos]
    else:
        raise ConfigError(f"{type(tokenizer).__name__} has no form that transformers reads; export with --no-tokenizer")
    scaling = model.rope_scaling
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(scaling.factor * scaling.original_max_position_embeddings),
    }
    return {TOKENIZER: content, TOKENIZER_CONFIG: json.dumps(settings, indent=2) + "\n"}


def _bytes_as_bpe() -> tokenizers.Tokenizer:
    """Byte values as ids: byte-level BPE without merges."""
    codec = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = codec, decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    assert made.token_to_id(END_OF_TEXT) == BytesTokenizer.eos
    return made


def _byte_characters() -> list[str]:
    """The printable character of each byte value in byte-level BPE: itself where printable, else from U+0100 on in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _symbols(names: list[str]) -> tokenizers.Tokenizer:
    """Symbols separated by spaces, in the order of their ids."""
    made = tokenizers.Tokenizer(models.WordLevel(vocab={name: i for i, name in enumerate(names)}, unk_token=names[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def read_files(folder: Path) -> dict[str, str]:
    """The tokenizer files of an exported directory; {} where it has none."""
    return {name: (folder / name).read_text(encoding="utf-8") for name in COPIED if (folder / name).is_file()}
