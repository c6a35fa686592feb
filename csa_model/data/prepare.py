# SPDX-License-Identifier: Apache-2.0
"""Make a token file for `data=memmap` from text.

    python -m csa_model.data.prepare --input book.txt --out tokens/book.bin
    python -m csa_model.data.prepare --input my_texts/ --out tokens/my.bin --tokenizer bpe --vocab-size 8192
    python -m csa_model.data.prepare --input my_texts/ --out tokens/my.bin --tokenizer tokenizer.json --eos-token "</s>"

Writes the token file, its side-car FILE.json and the tokenizer FILE.tokenizer.json, then says which options train on it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from csa_model.config import ConfigError
from csa_model.data.text import read_stdlib, read_text_files
from csa_model.data.token_file import SideCar, sidecar_path, write_token_file
from csa_model.data.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    BytesTokenizer,
    Tokenizer,
    deepseek_v4_tokenizer,
    digest,
    encode_documents,
    load_tokenizer,
)


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 8192,
    eos_token: str = END_OF_TEXT,
    dtype: str | None = None,
    overwrite: bool = False,
) -> SideCar:
    """Tokenise a text file, a folder of text files or "stdlib" into `out`, a document per file.

    `tokenizer` is "bpe" (trained here), "bytes", "deepseek_v4", or a byte-level tokenizer.json whose `eos_token` ends a document. ConfigError names
    what is wrong.
    """
    out = Path(out)
    tokenizer_path = Path(f"{out}.tokenizer.json")
    existing = [str(path) for path in (out, sidecar_path(out), tokenizer_path) if path.exists()]
    if existing and not overwrite:
        raise ConfigError(f"{', '.join(existing)} exists already; take another --out, or --overwrite")
    corpus = read_stdlib() if source == "stdlib" else read_text_files(source)
    texts = [document.text for document in corpus.documents]
    made: Tokenizer
    if tokenizer == "bpe":
        made = BPETokenizer.train(texts, vocab_size)
    elif tokenizer == "bytes":
        made = BytesTokenizer()
    elif tokenizer == "deepseek_v4":
        made = deepseek_v4_tokenizer()
    elif Path(tokenizer).is_file():
        made = load_tokenizer(tokenizer, eos_token)
    else:
        raise ConfigError(f"--tokenizer {tokenizer} is not legal; legal: bpe, bytes, deepseek_v4, or the path of a tokenizer.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made.save(tokenizer_path)
        return write_token_file(
            out,
            encode_documents(made, texts),
            vocab=made.vocab_size,
            eos=made.eos,
            dtype=dtype,
            token_bytes=made.token_bytes(),
            tokenizer=tokenizer_path.name,
            tokenizer_sha256=digest(made),
            eos_token=made.eos_token if isinstance(made, BPETokenizer) else None,
        )
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m csa_model.data.prepare", description="Make a token file for data=memmap from text.")
    parser.add_argument("--input", required=True, help="a UTF-8 text file, a folder of such files (a document per file), or stdlib")
    parser.add_argument("--out", required=True, help="the token file to write; its side-car is FILE.json, the tokenizer FILE.tokenizer.json")
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        help="bpe: trained on the input (default); bytes; deepseek_v4 (needs the extra hf); or the path of a byte-level tokenizer.json",
    )
    parser.add_argument("--vocab-size", type=int, default=8192, help="ids of a trained BPE (default 8192)")
    parser.add_argument("--eos-token", default=END_OF_TEXT, help=f"token of a given tokenizer.json that ends a document (default {END_OF_TEXT})")
    parser.add_argument("--dtype", choices=("uint16", "uint32"), help="default: the smallest that holds the vocabulary")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    try:
        sidecar = prepare(
            options.input,
            options.out,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size,
            eos_token=options.eos_token,
            dtype=options.dtype,
            overwrite=options.overwrite,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {sidecar.tokens} tokens, {sidecar.dtype}, vocabulary {sidecar.vocab}, sha256 {sidecar.sha256}")
    print(f"train on it with: python train.py data=memmap data.path={options.out} model.vocab_size={sidecar.vocab}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
