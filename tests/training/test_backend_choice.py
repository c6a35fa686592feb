# SPDX-License-Identifier: Apache-2.0
"""backend=auto: triton where it can run, else unfused, with the reason; a named backend is never overridden."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from training_helpers import make_config, make_module

from csa_model import backend_choice
from csa_model.backend_choice import choose_backend
from csa_model.config import BackendConfig, ExperimentConfig
from csa_model.decoder import AttentionMode
from kernels import BackendUnsupported, get_backend

MODE = AttentionMode("sparse", "sparse", "full_csa")


def config_of(name: str, accelerator: str, **fields: Any) -> ExperimentConfig:
    return dataclasses.replace(make_config(accelerator=accelerator, **fields), backend=BackendConfig(name=name))  # type: ignore[arg-type]


class Asked:
    """Stands in for get_backend: a triton that accepts, or refuses when it is loaded or when it sees the geometry."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.names, self.geometry = refuses, [], None

    def __call__(self, name: str, **choices: str) -> Any:
        self.names.append(name)
        if name != "triton":
            return get_backend(name, **choices)
        if self.refuses == "loading":
            raise BackendUnsupported("the Python package 'triton' is not installed", "backend=unfused")
        asked = self

        class Triton:
            name = "triton"

            def require(self, geometry: Any) -> None:
                asked.geometry = geometry
                if asked.refuses == "geometry":
                    raise BackendUnsupported("head_dim=8 is too small", "backend=unfused")

        return Triton()


def test_auto_is_the_default_and_means_unfused_on_a_cpu() -> None:
    assert make_config().backend.name == "auto"
    backend, reason = choose_backend(config_of("auto", "cpu"), MODE)
    assert (backend.name, reason) == ("unfused", "the model runs on the CPU")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_auto_takes_triton_where_it_accepts_this_very_model(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    asked = Asked()
    monkeypatch.setattr(backend_choice, "get_backend", asked)
    config = config_of("auto", "gpu", precision=precision)
    backend, reason = choose_backend(config, MODE)
    assert backend.name == "triton"
    assert reason
    assert (asked.geometry.head_dim, asked.geometry.device_type) == (config.model.head_dim, "cuda")
    assert asked.geometry.dtype == (torch.bfloat16 if precision == "bf16-mixed" else torch.float32)


@pytest.mark.parametrize(("refuses", "words"), [("loading", "not installed"), ("geometry", "head_dim=8 is too small")])
def test_auto_falls_back_with_the_refusal_as_its_reason(monkeypatch: pytest.MonkeyPatch, refuses: str, words: str) -> None:
    monkeypatch.setattr(backend_choice, "get_backend", Asked(refuses))
    backend, reason = choose_backend(config_of("auto", "gpu"), MODE)
    assert backend.name == "unfused"
    assert words in reason


def test_a_named_backend_is_never_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(backend_choice, "get_backend", asked)
    backend, reason = choose_backend(config_of("unfused", "gpu"), MODE)
    assert (backend.name, reason, asked.names) == ("unfused", "", ["unfused"])
    monkeypatch.undo()
    with pytest.raises(BackendUnsupported, match="triton"):
        make_module(config_of("triton", "cpu"))


@pytest.mark.gpu
def test_auto_on_a_gpu() -> None:
    config = config_of("auto", "gpu")
    assert make_module(config).decoder.backend.name == "unfused"  # heads of 8 columns
    larger = dataclasses.replace(config, model=dataclasses.replace(config.model, head_dim=16, index_head_dim=16))
    module = make_module(larger)
    assert module.decoder.backend.name == "triton"
    assert module.backend_reason
