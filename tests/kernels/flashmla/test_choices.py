# SPDX-License-Identifier: Apache-2.0
"""What the configuration lets one choose of this backend, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from csa_model.config import BackendConfig, ConfigError, ExperimentConfig, TrainerConfig, from_mapping
from csa_model.config_checks import check
from kernels import get_backend

CONFIGS = Path(__file__).parents[3] / "configs"


def experiment(name: str = "flashmla", backward: str = "triton", deterministic: bool = False) -> ExperimentConfig:
    model = yaml.safe_load((CONFIGS / "model/nano.yaml").read_text())
    config = from_mapping({"model": model, "backend": {"name": name, "backward": backward}})
    return replace(config, trainer=TrainerConfig(deterministic=deterministic))


def test_the_backward_reaches_the_backend() -> None:
    assert get_backend("flashmla", backward="cudnn")._backward == "cudnn"  # type: ignore[attr-defined]
    assert get_backend("flashmla")._backward == "triton"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'unfused' offers no choice of backward"):
        get_backend("unfused", backward="cudnn")


def test_a_backward_without_flashmla_or_with_determinism_is_refused() -> None:
    check(experiment(backward="cudnn"))
    check(experiment("triton"))
    with pytest.raises(ConfigError, match=r"backend\.backward=cudnn belongs to backend=flashmla"):
        check(experiment("triton", "cudnn"))
    with pytest.raises(ConfigError, match="no deterministic mode"):
        check(experiment("flashmla", "cudnn", deterministic=True))


@pytest.mark.parametrize(("key", "value", "legal"), [("name", "tilelang", "unfused, triton, flashmla, auto"), ("backward", "flash", "triton, cudnn")])
def test_names_that_cannot_be_used_are_refused_with_those_that_can(key: str, value: str, legal: str) -> None:
    """`backend=tilelang` has no kernels for these layers."""
    with pytest.raises(ConfigError, match=rf"backend\.{key}='{value}' is not legal; legal values: {legal}"):
        from_mapping({key: value}, BackendConfig, "backend")


def test_small_flash_needs_no_padding_and_has_about_100_million_parameters() -> None:
    from csa_model.config import ModelConfig
    from csa_model.decoder import Decoder
    from kernels.flashmla.rules import SM90, padding_cost

    merged: dict = {}
    for name in ("nano", "small", "small_flash"):
        layer = yaml.safe_load((CONFIGS / f"model/{name}.yaml").read_text())
        layer.pop("defaults", None)
        merged = _merged(merged, layer)
    model = from_mapping(merged, ModelConfig, "model")
    assert padding_cost(SM90, model.num_attention_heads, model.head_dim, model.index_topk + model.sliding_window) == "none"
    assert {0, 4, 128} <= set(model.compress_ratios)
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(model, get_backend("unfused"), device_type="cpu").parameters())
    assert 80e6 < count < 120e6


def _merged(below: dict, above: dict) -> dict:
    return {
        **below,
        **{k: _merged(below[k], v) if isinstance(v, dict) and isinstance(below.get(k), dict) else v for k, v in above.items()},
    }
