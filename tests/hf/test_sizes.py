# SPDX-License-Identifier: Apache-2.0
"""Parameter counts on the meta device: ours, the class's, and the published figures."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from csa_model.config import ModelConfig, MoEConfig, MTPConfig, from_mapping
from csa_model.decoder import Decoder
from csa_model.hf import hf_config
from kernels import get_backend

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(file.stem for file in (CONFIGS / "model").glob("*.yaml"))


def shipped(name: str) -> ModelConfig:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = hydra.compose("train", overrides=[f"model={name}"])
    return from_mapping(OmegaConf.to_container(composed.model, resolve=True), ModelConfig)  # type: ignore[arg-type]


def released(name: str) -> ModelConfig:
    """DeepSeek-V4-Flash and V4-Pro by their published configurations."""
    flash = name == "flash"
    return ModelConfig(
        name=name,
        vocab_size=129_280,
        hidden_size=4096 if flash else 7168,
        num_hidden_layers=43 if flash else 61,
        num_attention_heads=64 if flash else 128,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024 if flash else 1536,
        o_groups=8 if flash else 16,
        o_lora_rank=1024,
        sliding_window=128,
        compress_ratios=(0, 0, *(4, 128) * 20, 4, 0) if flash else (128, 128, *(4, 128) * 29, 4, 0),
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512 if flash else 1024,
        moe=MoEConfig(
            n_routed_experts=256 if flash else 384,
            num_experts_per_tok=6,
            moe_intermediate_size=2048 if flash else 3072,
            num_hash_layers=3,
            routed_scaling_factor=1.5 if flash else 2.5,
        ),
        mtp=MTPConfig(),
    )


def counts(config: ModelConfig) -> dict[str, int]:
    with torch.device("meta"):
        decoder = Decoder(config, get_backend("unfused"), device_type="cpu")
    return {name: p.numel() for name, p in decoder.named_parameters() if not name.startswith("mtp.")}


def count_of_class(config: ModelConfig) -> int:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in DeepseekV4ForCausalLM(DeepseekV4Config(**hf_config(config, eos=None))).parameters())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_has_the_parameters_of_the_class(name: str) -> None:
    config = shipped(name)
    assert sum(counts(config).values()) == count_of_class(config)


@pytest.mark.parametrize(("name", "total", "active"), [("flash", 284e9, 13e9), ("pro", 1.6e12, 49e9)])
def test_released_models_have_the_published_sizes(name: str, total: float, active: float) -> None:
    config = released(name)
    ours = counts(config)
    assert sum(ours.values()) == count_of_class(config)
    assert sum(ours.values()) == pytest.approx(total, rel=0.07)
    idle = 1 - config.moe.num_experts_per_tok / config.moe.n_routed_experts
    routed = sum(n for key, n in ours.items() if ".ffn.experts." in key)
    assert sum(ours.values()) - idle * routed == pytest.approx(active, rel=0.07)
