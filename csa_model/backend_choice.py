# SPDX-License-Identifier: Apache-2.0
"""Which backend a model runs on: the named one, or for `backend=auto` the fastest that can."""

from __future__ import annotations

import torch

from csa_model.attention import AttentionMode
from csa_model.config import ExperimentConfig
from csa_model.decoder import geometry
from kernels import Backend, BackendUnsupported, get_backend


def device_type(config: ExperimentConfig) -> str:
    """Where trainer.accelerator will put the model on this machine: "cuda" or "cpu"."""
    wants_gpu = config.trainer.accelerator in ("gpu", "cuda") or (config.trainer.accelerator == "auto" and torch.cuda.is_available())
    return "cuda" if wants_gpu else "cpu"


def compute_dtype(config: ExperimentConfig) -> torch.dtype:
    """Dtype in which the attention runs."""
    return torch.bfloat16 if config.trainer.precision == "bf16-mixed" else torch.float32


def choose_backend(config: ExperimentConfig, mode: AttentionMode) -> tuple[Backend, str]:
    """The backend, and in words why `auto` took it; "" where the configuration names one, which is never overridden.

    `auto` is triton where its requirements hold for this model, device and precision, else unfused. flashmla is never taken by itself: it needs a
    foreign package, and whoever installs one wants to say so.

    Raises:
        BackendUnsupported: a package of the named backend is missing. What else a named backend needs it says when the decoder is built.
    """
    name = config.backend.name
    if name != "auto":
        return get_backend(name, **({"backward": config.backend.backward} if name == "flashmla" else {})), ""
    device = device_type(config)
    if device == "cpu":
        return get_backend("unfused"), "the model runs on the CPU"
    model = config.model
    ratios = model.compress_ratios[: model.num_hidden_layers + model.mtp.enabled]
    try:
        backend = get_backend("triton")
        backend.require(geometry(model, ratios, device, compute_dtype(config), mode))
    except BackendUnsupported as refusal:
        return get_backend("unfused"), refusal.reason
    return backend, "its kernels take this model on this GPU"
