# SPDX-License-Identifier: Apache-2.0
"""Small decoders for the tests of the model, with every parameter moved off its initial value so that nothing is hidden by a zero or a one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from csa_model.config import HyperConnectionsConfig, ModelConfig, MoEConfig, MTPConfig, RopeScaling
from csa_model.decoder import AttentionMode, Decoder, DecoderOutput
from kernels import PackedLayout, get_backend

SPARSE = AttentionMode("sparse", "sparse", "full_csa")
VOCABULARY = 61


def tiny_config(**changes: Any) -> ModelConfig:
    """Window, CSA and HCA layers, hash-routed and scored experts, MTP; YaRN blends and scales within the few rotary dims."""
    base = ModelConfig(
        name="tiny",
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=12,
        o_groups=2,
        o_lora_rank=10,
        sliding_window=6,
        compress_ratios=(0, 4, 8, 4, 0),
        index_n_heads=3,
        index_head_dim=8,
        index_topk=3,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=512),
        moe=MoEConfig(n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=14, num_hash_layers=1, dense_intermediate_size=20),
    )
    return dataclasses.replace(base, **changes)


def plain_config(**changes: Any) -> ModelConfig:
    """Without hyper-connections, experts and MTP."""
    off: dict[str, Any] = {"hyper_connections": HyperConnectionsConfig(enabled=False), "mtp": MTPConfig(enabled=False)}
    off["moe"] = MoEConfig(enabled=False, dense_intermediate_size=20)
    return tiny_config(**{**off, **changes})


def build(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, shake: bool = True) -> Decoder:
    """A decoder on the unfused backend; `shake` moves norms, sinks, position biases, gates and maps to random values."""
    torch.manual_seed(seed)
    decoder = Decoder(config, get_backend("unfused"))
    if shake:
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                leaf = name.rsplit(".", 1)[-1]
                if leaf in ("attn_sink", "ape", "scale", "base"):
                    parameter.add_(torch.randn_like(parameter))
                elif "norm" in name:
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(6.0)
            for name, buffer in decoder.named_buffers():
                if name.endswith("gate.bias"):
                    buffer.add_(0.1 * torch.randn_like(buffer))
    return decoder.to(dtype)


def random_tokens(count: int, seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def run(decoder: Decoder, tokens: Tensor, lengths: list[int] | None = None, mode: AttentionMode = SPARSE, **kwargs: Any) -> DecoderOutput:
    """Forward of one row; `lengths` None: a single document."""
    return decoder(tokens, PackedLayout.from_lengths(lengths or [len(tokens)], len(tokens)), mode, **kwargs)


def logits_of(decoder: Decoder, tokens: Tensor, lengths: list[int] | None = None, mode: AttentionMode = SPARSE) -> Tensor:
    return decoder.logits(run(decoder, tokens, lengths, mode).hidden)


def next_of(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Targets: the next token of the same document, -100 at its last token and in padding."""
    targets = torch.full_like(tokens, -100)
    start = 0
    for length in lengths:
        targets[start : start + length - 1] = tokens[start + 1 : start + length]
        start += length
    return targets


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |difference| over max |expected|."""
    actual, expected = actual.detach(), expected.detach()
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))
