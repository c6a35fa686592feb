# SPDX-License-Identifier: Apache-2.0
"""The files of configs/: each composes, is short, says what it needs, and is named by --help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from csa_model.decoder import Decoder
from csa_model.run_dir import plain
from kernels import get_backend
from tests.entry.helpers import CONFIGS, checked, load

OPTIONS = sorted(
    str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml") if "hydra" not in path.parts and path.parent != CONFIGS
)
EXTRA = {"data/text_files": ["data.path=x"], "data/memmap": ["data.path=x"], "experiment/small_gpu": ["data.path=x"]}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_passes_the_checks(option: str) -> None:
    group, name = option.split("/")
    config, _ = checked(f"{group}={name}", *EXTRA.get(option, []))
    if group not in ("experiment", "debug", "callbacks", "trainer"):
        assert getattr(config.data if group == "tokenizer" else config, group).name == name


@pytest.mark.parametrize("option", OPTIONS)
def test_every_file_fits_a_screen_and_begins_with_what_it_needs(option: str) -> None:
    lines = (CONFIGS / f"{option}.yaml").read_text().splitlines()
    assert len(lines) <= 45
    header = " ".join(line for line in lines[:4] if line.startswith("#"))
    assert re.search(r"\b(Needs|Excludes):", header), header


def test_help_names_every_group_and_every_option() -> None:
    text = yaml.safe_load((CONFIGS / "hydra/help/csa.yaml").read_text())["template"]
    for option in OPTIONS:
        group, name = option.split("/")
        assert re.search(rf"^\s+{group} ", text, re.MULTILINE), group
        assert re.search(rf"\b{name}\b", text), option
    for key in ("task", "seed", "data_seed", "runs_dir", "run_dir", "ckpt_path", "init_from", "compile"):
        assert key in text


def test_yaml_defaults_and_dataclass_defaults_agree_on_every_key() -> None:
    """What a group file leaves out comes from the dataclass, so a reader of configs/ must be able to trust that no key hides there."""
    composed = plain(load())
    for group in ("model", "data", "optimizer", "scheduler", "trainer", "callbacks", "stage", "teacher"):
        default = {"callbacks": "default", "data": "stdlib", "model": "nano", "optimizer": "muon_adamw", "scheduler": "cosine", "trainer": "cpu"}
        name = default.get(group, {"stage": "sparse", "teacher": "full_csa"}.get(group))
        written = set(yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text()))
        hidden = set(composed[group]) - written - ({"recall"} if group == "data" else set())
        assert not hidden, (group, hidden)


def test_command_line_wins_over_an_experiment_and_over_a_debug_preset() -> None:
    """An experiment that sets a group, and the same group on the command line."""
    assert load("experiment=small_gpu", "data.path=x").backend.name == "triton"
    for arguments in (["experiment=small_gpu", "backend=unfused"], ["backend=unfused", "experiment=small_gpu"]):
        config = load(*arguments, "data.path=x")
        assert (config.backend.name, config.model.name) == ("unfused", "small")
    assert load("debug=fdr", "trainer.max_steps=7").trainer.max_steps == 7
    assert load("experiment=recall", "data=stdlib").data.name == "stdlib"


def test_sizes_are_those_of_the_published_proportions() -> None:
    """hidden size, heads x head dim, low ranks and ratios of the released models: c_I = c / 4, r = c / 8, q rank = d / 4 in small and small_flash."""
    for name in ("small", "small_flash"):
        model = load(f"model={name}").model
        assert model.q_lora_rank * 4 == model.hidden_size
        assert model.qk_rope_head_dim * 8 == model.head_dim == model.index_head_dim * 4
        assert model.vocab_size == 8192
    for name in ("small_flash", "base"):
        model = load(f"model={name}").model
        assert (model.num_attention_heads, model.head_dim) == (64, 512)
        assert model.compress_ratios[:3] == (0, 0, 4)
        assert model.compress_ratios[-2:] == (4, 0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # counted independently by formula and with the public transformers class, at these vocabularies and with the MTP block
    [("nano", 1_212_522), ("small", 82_822_298), ("small_flash", 89_997_518), ("base", 1_048_658_302)],
)
def test_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        decoder = Decoder(load(f"model={name}").model, get_backend("unfused"))
    assert sum(p.numel() for p in decoder.parameters()) == parameters


def test_paths_in_the_group_files_stay_relative() -> None:
    for path in Path(CONFIGS).rglob("*.yaml"):
        assert not re.search(r"[:\s]/(home|work|root|tmp|mnt|data)/", path.read_text()), path
