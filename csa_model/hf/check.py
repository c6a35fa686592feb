# SPDX-License-Identifier: Apache-2.0
"""An exported directory against the checkpoint it was made from: loaded with transformers, logits compared."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from csa_model import resume
from csa_model.config import ConfigError
from csa_model.decoder import AttentionMode, Decoder
from csa_model.hf.config_map import ARCHITECTURE
from csa_model.hf.export import read_checkpoint
from kernels import PackedLayout, get_backend

TOKENS = 256
BOUND = 1e-4  # of the largest logit, float32


def compare_with_class(checkpoint: str | Path, folder: Path) -> str:
    """One sentence with the differences. Raises ConfigError where transformers misses or ignores a tensor, or computes other logits.

    Every visible entry is read on both sides: with few index heads scores tie at exactly 0, and which tied entry is selected is not defined.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("--check needs the package transformers: pip install '.[hf]'")
    from transformers import DeepseekV4ForCausalLM

    loaded: Any = DeepseekV4ForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, experts_implementation="eager"
    )  # eager takes any width
    model, info = loaded
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise ConfigError(f"{ARCHITECTURE} does not load {folder} cleanly: {wrong}")
    path = resume.resolve(str(checkpoint), None, key="--checkpoint")
    assert path is not None
    found = read_checkpoint(path)
    decoder = Decoder(found.model, get_backend("unfused"), device_type="cpu")
    decoder.load_state_dict(found.weights)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = TOKENS
    tokens = torch.randint(0, found.model.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = decoder.eval()(tokens, PackedLayout.from_lengths([TOKENS]), AttentionMode("dense", "off", "full_csa")).hidden
        ours = decoder.logits(hidden)
        theirs = model.eval()(tokens[None], use_cache=False).logits[0]
    difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= BOUND * largest:
        raise ConfigError(f"logits of {folder} differ from those of {path} by {difference:.2e}, at values up to {largest:.2f}")
    return f"checked: {ARCHITECTURE} loads every tensor; logits of {TOKENS} tokens differ by at most {difference:.1e} (values up to {largest:.2f})"
