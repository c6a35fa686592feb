# SPDX-License-Identifier: Apache-2.0
"""Tensor names: those of a Decoder, those of DeepSeek's checkpoints, and those of the modules of transformers' DeepseekV4ForCausalLM.

A Decoder is named like DeepSeek's checkpoints except for three things: hyper-connection tensors (`hc_attn.fn` here, `hc_attn_fn` there), the MTP
block (`mtp.` here, `mtp.0.` there) and routed experts (one stack [E, out, in] per matrix here, one matrix per expert there). transformers maps the
checkpoint names to its own modules while it loads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from csa_model.config import ConfigError

_HC_OURS = re.compile(r"(hc_attn|hc_ffn|hc_head)\.(fn|scale|base)$")
_HC_CHECKPOINT = re.compile(r"(hc_attn|hc_ffn|hc_head)_(fn|scale|base)$")
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight$")
_STACK = re.compile(r"(.*\.ffn\.experts)\.(w[123])$")

# Module names of transformers -> checkpoint names; the first rule that matches a stretch of the name wins, several may apply to one name.
_MODULES = (
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"\.attn_hc\.(fn|base|scale)$", r".hc_attn_\1"),
    (r"\.ffn_hc\.(fn|base|scale)$", r".hc_ffn_\1"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),  # what save_pretrained of transformers 5.17 to 5.24 makes of kv_norm
    (r"\.mlp\.", ".ffn."),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.attn\.q_a_proj\.", ".attn.wq_a."),
    (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.attn\.q_b_proj\.", ".attn.wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.attn\.o_a_proj\.", ".attn.wo_a."),
    (r"\.attn\.o_b_proj\.", ".attn.wo_b."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.position_bias$", ".compressor.ape"),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)


def to_checkpoint(state: Mapping[str, Tensor], tied: bool = False) -> dict[str, Tensor]:
    """State dict of a Decoder under the names of DeepSeek's checkpoints. `tied`: the output head is the embedding and is left out."""
    out = {}
    for name, value in state.items():
        if tied and name == "head.weight":
            continue
        stack = _STACK.match(name)
        entries = [(f"{stack[1]}.{e}.{stack[2]}.weight", matrix) for e, matrix in enumerate(value)] if stack else [(name, value)]
        for entry, tensor in entries:
            out[re.sub(r"^mtp\.", "mtp.0.", _HC_OURS.sub(r"\1_\2", entry))] = tensor
    return out


def from_checkpoint(tensors: Mapping[str, Tensor], tied: bool = False) -> dict[str, Tensor]:
    """The inverse of `to_checkpoint`; takes the module names of transformers as well.

    Floating-point tensors become float32, hash tables int64. Raises ConfigError for experts that are not numbered 0, 1, ... without a gap.
    """
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        value = value.float() if value.is_floating_point() else value.long()
        for entry, tensor in _module_to_checkpoint(name, value):
            entry = re.sub(r"^mtp\.0\.", "mtp.", _HC_CHECKPOINT.sub(r"\1.\2", entry))
            if expert := _EXPERT.match(entry):
                experts[f"{expert[1]}.{expert[3]}"][int(expert[2])] = tensor
            else:
                out[entry] = tensor
    for name, matrices in experts.items():
        if set(matrices) != set(range(len(matrices))):
            raise ConfigError(f"{name}: the experts {sorted(matrices)} are not numbered from 0 without a gap; the checkpoint is incomplete")
        out[name] = torch.stack([matrices[e] for e in range(len(matrices))])
    if tied and "embed.weight" in out:
        out["head.weight"] = out["embed.weight"]
    return out


def _module_to_checkpoint(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    for pattern, replacement in _MODULES:
        name = re.sub(pattern, replacement, name)
    if name.endswith(".experts.gate_up_proj"):
        gate, up = value.chunk(2, dim=1)
        stem = name.removesuffix("gate_up_proj")
        return [(stem + "w1", gate.contiguous()), (stem + "w3", up.contiguous())]
    if name.endswith(".experts.down_proj"):
        return [(name.removesuffix("down_proj") + "w2", value)]
    return [(name, value)]
