# SPDX-License-Identifier: Apache-2.0
"""A checkpoint written as a Hugging Face directory: config.json, model.safetensors, generation_config.json and tokenizer files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from csa_model import launch, resume
from csa_model.config import ConfigError, ExperimentConfig, ModelConfig, from_mapping
from csa_model.data.datamodule import CSADataModule
from csa_model.data.tokenizers import END_OF_TEXT, Tokenizer, digest, load_tokenizer
from csa_model.hf.config_map import hf_config, own_config
from csa_model.hf.names import to_checkpoint
from csa_model.hf.tokenizer_files import tokenizer_files
from csa_model.run_dir import find_run

Form = Literal["hf", "own"]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
INSTEAD = "Name the run's tokenizer with --tokenizer FILE, or leave it out: --no-tokenizer"
TOKENIZER_KEY = "tokenizer_files"  # in checkpoints that an import wrote


@dataclass(frozen=True)
class Exported:
    """What was written: tensors that the class loads, MTP tensors that it ignores, files."""

    out: Path
    form: Form
    tensors: tuple[str, ...]
    mtp_tensors: tuple[str, ...]
    parameters: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """model, weights under the names of a Decoder, tokenizer files (None: to be made from the data section), the whole configuration."""

    config: ExperimentConfig
    weights: dict[str, Tensor]
    tokenizer_files: dict[str, str] | None

    @property
    def model(self) -> ModelConfig:
        return self.config.model


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint of a training run or of an import. Raises ConfigError for any other file."""
    stored, _ = resume.read_config(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    weights = {name.removeprefix("decoder."): value for name, value in content["state_dict"].items()}
    return Checkpoint(from_mapping(stored), weights, content.get(TOKENIZER_KEY))


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    form: Form = "hf",
    tokenizer: str | None = None,
    with_tokenizer: bool = True,
    cache_dir: str | None = None,
) -> Exported:
    """Write `checkpoint` (a file or run folder) as the new or empty folder `out`.

    Args:
        form: "hf" for transformers' DeepseekV4ForCausalLM, "own" for models that it cannot express: our tensor names and model section.
        tokenizer: a tokenizer.json to take; default: that of the run, made again from its data section and compared with what the run recorded.
        with_tokenizer: False leaves the tokenizer files out.

    Raises:
        ConfigError: the class cannot express the model (every reason), the checkpoint or the tokenizer cannot be read, `out` is not empty.
    """
    from safetensors.torch import save_file

    path = resume.resolve(str(checkpoint), None, key="--checkpoint")
    assert path is not None
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {out} exists and is no empty folder; name another one")
    found = read_checkpoint(path)
    make = hf_config if form == "hf" else own_config
    make(found.model, None)  # refuse before the corpus is read
    files, eos = _tokenizer(found, path, tokenizer, with_tokenizer, cache_dir)
    config = make(found.model, eos)
    tied = found.model.tie_word_embeddings
    if form == "hf":
        tensors = to_checkpoint(found.weights, tied)
    else:
        tensors = {name: value for name, value in found.weights.items() if not (tied and name == "head.weight")}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config)
    generation = {"_from_model_config": True, "bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos}
    if form == "hf":
        write_json(folder / "generation_config.json", generation)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors leaves it readable by its owner alone
    mtp = tuple(name for name in tensors if name.startswith(("mtp.",)))
    return Exported(
        out=folder,
        form=form,
        tensors=tuple(name for name in tensors if name not in mtp),
        mtp_tensors=mtp,
        parameters=sum(v.numel() for name, v in tensors.items() if name not in mtp and not name.endswith(("gate.bias", "gate.tid2eid"))),
        files=tuple(sorted(p.name for p in folder.iterdir())),
    )


def _tokenizer(found: Checkpoint, path: Path, given: str | None, wanted: bool, cache_dir: str | None) -> tuple[dict[str, str], int | None]:
    """Tokenizer files and the id that ends a document; {} and None where there is none."""
    if not wanted:
        return {}, None
    if given is not None:
        made: Tokenizer | None = load_tokenizer(given, _eos_token(Path(given)))
    elif found.tokenizer_files is not None:
        return found.tokenizer_files, eos_of(found.tokenizer_files)
    else:
        made = _tokenizer_of_run(found.config, path, cache_dir)
    if made is None:
        return {}, None
    return tokenizer_files(made, found.model), made.eos


def _tokenizer_of_run(config: ExperimentConfig, path: Path, cache_dir: str | None) -> Tokenizer | None:
    section = dataclasses.replace(config.data, num_workers=0, cache_dir=cache_dir or config.data.cache_dir)
    try:
        data = CSADataModule(section, **launch.data_arguments(config))
        data.prepare_data()
    except ConfigError as error:
        raise ConfigError(f"the tokenizer of the run cannot be made again: {error}\n{INSTEAD}") from None
    run = find_run(path)
    recorded = run.path / "corpus.json" if run else None
    if data.tokenizer is not None and recorded is not None and recorded.is_file():
        before = json.loads(recorded.read_text()).get("tokenizer_sha256")
        if before is not None and before != digest(data.tokenizer):
            raise ConfigError(
                f"the data of {path} now give another tokenizer than the run had (sha256 {digest(data.tokenizer)[:12]}, recorded {before[:12]}): "
                f"the corpus has changed. {INSTEAD}"
            )
    return data.tokenizer


def _eos_token(path: Path) -> str:
    settings = path.parent / "tokenizer_config.json"
    if not settings.is_file():
        return END_OF_TEXT
    token = json.loads(settings.read_text(encoding="utf-8")).get("eos_token")
    return (token.get("content") if isinstance(token, Mapping) else token) or END_OF_TEXT


def eos_of(files: Mapping[str, str]) -> int | None:
    """Id of the token that ends a document, from tokenizer files; None where they name none."""
    import tokenizers

    if "tokenizer.json" not in files:
        return None
    token = json.loads(files.get("tokenizer_config.json", "{}")).get("eos_token")
    name = token.get("content") if isinstance(token, Mapping) else token
    found: int | None = tokenizers.Tokenizer.from_str(files["tokenizer.json"]).token_to_id(name) if name else None
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
