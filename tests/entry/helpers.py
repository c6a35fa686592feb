# SPDX-License-Identifier: Apache-2.0
"""Composing configs and running train.py in this process, on a model small enough for a test."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from csa_model import config_checks
from csa_model.config import ExperimentConfig, from_mapping
from csa_model.overrides import check_arguments, register_job_names

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"

TINY = (
    "debug=fdr",
    *("model.num_hidden_layers=3", "model.compress_ratios=[0,4,8,0]", "model.hidden_size=16", "model.num_attention_heads=2"),
    *("model.head_dim=16", "model.q_lora_rank=8", "model.o_lora_rank=8", "model.index_n_heads=2", "model.index_topk=4", "model.sliding_window=4"),
    *("model.moe.n_routed_experts=4", "model.moe.moe_intermediate_size=8", "model.moe.num_hash_layers=1", "model.vocab_size=257"),
    *("data=text_files", "data.path=text", "data.tokenizer.name=bytes", "data.sequence_length=32", "data.tokens_per_batch=64"),
    *("trainer.max_steps=2", "callbacks.indexer_diagnostics.rows=16"),
)


@functools.cache
def load(*overrides: str) -> ExperimentConfig:
    """The typed, unchecked config of these command-line arguments."""
    check_arguments(overrides, CONFIGS)
    register_job_names([])
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return from_mapping(OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=True, throw_on_missing=True))  # type: ignore[arg-type]


def checked(*overrides: str) -> tuple[ExperimentConfig, list[str]]:
    """The config and its warnings, after every check that needs no machine."""
    config = load(*overrides)
    return config, config_checks.check(config)


def write_text(folder: Path) -> None:
    """A text corpus of four documents under folder/text."""
    (folder / "text").mkdir()
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * (6 + i))


def run(*arguments: str) -> None:
    """train.py with these arguments, in this process. SystemExit where it fails."""
    import train

    GlobalHydra.instance().clear()
    train.main(list(arguments))


def fails(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run train.py, which must exit non-zero with one readable message; returns that message."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code not in (0, None)
    message = capfd.readouterr().err.strip()
    assert "Traceback" not in message
    assert message
    return message
