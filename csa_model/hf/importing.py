# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory turned into a checkpoint that `init_from` and `csa_model.hf export` take. Such a checkpoint knows no data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor

from csa_model.config import ConfigError, ExperimentConfig, ModelConfig
from csa_model.decoder import Decoder
from csa_model.hf.config_map import OWN_MODEL_TYPE, model_config
from csa_model.hf.export import CONFIG, INDEX, TOKENIZER_KEY, WEIGHTS
from csa_model.hf.names import from_checkpoint
from csa_model.hf.tokenizer_files import read_files
from csa_model.moe import Gate
from csa_model.run_dir import plain
from kernels import get_backend


@dataclass(frozen=True)
class Imported:
    """model, weights under the names of a Decoder (float32, int64), tokenizer files, and what a reader should know."""

    model: ModelConfig
    weights: dict[str, Tensor]
    tokenizer_files: dict[str, str]
    notes: tuple[str, ...]


def read_directory(folder: str | Path, hash_seed: int | None = None) -> Imported:
    """Read either form, with DeepSeek's tensor names or those of transformers' modules, in one file or several.

    `hash_seed`: draw hash tables that are all zero (transformers' initial value: every token goes to expert 0) anew from this seed.
    Raises ConfigError for a missing or foreign file, and for tensors that are not exactly those of the model; the message names them.
    """
    folder = Path(folder).expanduser()
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} has no {CONFIG}; name a directory in the Hugging Face form")
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tensors = _read_tensors(folder)
    tied = bool(content.get("tie_word_embeddings", False))
    if content.get("model_type") == OWN_MODEL_TYPE:
        tied = bool(content["csa_lightning"]["tie_word_embeddings"])
    weights = from_checkpoint(tensors, tied)
    model = model_config(content, has_mtp=any(name.startswith("mtp.") for name in weights), name=folder.resolve().name)
    _check(weights, model)
    return Imported(model, weights, read_files(folder), tuple(_hash_tables(weights, model, hash_seed)))


def import_directory(folder: str | Path, out: str | Path, hash_seed: int | None = None) -> Imported:
    """Write `read_directory(folder)` as the checkpoint `out`, and its model section beside it as `out` with the suffix .model.yaml."""
    path = Path(out).expanduser()
    if path.exists():
        raise ConfigError(f"--out {out} exists; name another file")
    found = read_directory(folder, hash_seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = {
        "state_dict": {f"decoder.{name}": value for name, value in found.weights.items()},
        "hyper_parameters": {"config": plain(ExperimentConfig(model=found.model))},
        "global_step": 0,
        TOKENIZER_KEY: found.tokenizer_files,
    }
    torch.save(checkpoint, path)
    section = yaml.safe_dump(plain(found.model), sort_keys=False)
    path.with_suffix(".model.yaml").write_text(f"# Model section of {path.name}, imported. Needs: nothing.\n{section}")
    return found


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            raise ConfigError(f"{folder} has no {name}; only safetensors are read") from None
        except SafetensorError as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}") from None
    scaled = [name for name, value in tensors.items() if value.dtype.itemsize == 1 or name.endswith((".scale_inv", "_scale_inv"))]
    if scaled:
        raise ConfigError(f"{folder} holds quantised tensors ({', '.join(scaled[:3])}, ...); dequantise them to bf16 or fp32 first")
    return tensors


def _check(weights: dict[str, Tensor], model: ModelConfig) -> None:
    with torch.device("meta"):
        expected = Decoder(model, get_backend("unfused"), device_type="cpu").state_dict()
    problems = [f"missing {name}" for name in expected if name not in weights]
    problems += [f"unexpected {name}" for name in weights if name not in expected]
    problems += [
        f"{name} is {list(weights[name].shape)} and should be {list(value.shape)}"
        for name, value in expected.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConfigError(f"the tensors are not those of the model in {CONFIG}: {'; '.join(problems[:20])}{more}")


def _hash_tables(weights: dict[str, Tensor], model: ModelConfig, seed: int | None) -> list[str]:
    empty = [name for name, table in weights.items() if name.endswith("gate.tid2eid") and model.moe.num_experts_per_tok > 1 and not table.any()]
    if not empty:
        return []
    if seed is None:
        return [
            f"the hash tables {', '.join(empty)} are all zero (transformers' initial value): every token goes to expert 0, "
            f"{model.moe.num_experts_per_tok} times; --hash-seed N draws a table to train with"
        ]
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    for name in empty:
        weights[name] = Gate(model, hashed=True).tid2eid.clone()
    torch.set_rng_state(generator_state)
    return [f"drawn from seed {seed}: {', '.join(empty)}"]
