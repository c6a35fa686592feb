# SPDX-License-Identifier: Apache-2.0
"""Between ModelConfig and the config.json of transformers' DeepseekV4ForCausalLM, with the reasons where one cannot express the other.

The file is written in the released form (`compress_ratios`, `rope_scaling`, `num_hash_layers`, `qk_rope_head_dim`), which every reader of DeepSeek-V4
knows, and carries `layer_types`, `compress_rates` and `mlp_layer_types` beside it: transformers' own default for the layer types does not match the
released models, and its `compress_ratios` knows the ratios 0, 4 and 128 alone. What only training needs stands under `csa_lightning`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from csa_model.config import INDEXED_RATIO, ConfigError, ModelConfig, RopeScaling, from_mapping
from csa_model.run_dir import plain

ARCHITECTURE, MODEL_TYPE = "DeepseekV4ForCausalLM", "deepseek_v4"
OWN_ARCHITECTURE, OWN_MODEL_TYPE = "CSADecoder", "csa_lightning"
# Whose form this is. Without it AutoTokenizer takes a large vocabulary for an old Mistral one and advises to change how it splits.
FORM_OF = "5.17.0"
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RELEASED_HCA_RATIO = 128
OWN_SECTION = "csa_lightning"
# ModelConfig field = config.json key; sections of ModelConfig are listed with theirs.
SAME_NAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
    *("sliding_window", "index_n_heads", "index_head_dim", "rope_theta", "compress_rope_theta", "rms_norm_eps", "initializer_range"),
    "tie_word_embeddings",
)
HYPER_CONNECTIONS = ("hc_mult", "hc_sinkhorn_iters", "hc_eps")
MOE = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size", "routed_scaling_factor", "swiglu_limit")
_EXPECTED = {  # what the decoder computes; the class can be configured to do something else
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
_DEFAULTS = {  # of transformers, for keys that a file may leave out
    **_EXPECTED,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
}


def reasons_against(model: ModelConfig) -> list[str]:
    """Why DeepseekV4ForCausalLM cannot express this model, one sentence each; empty where it can."""
    found = []
    if not model.hyper_connections.enabled:
        found.append("model.hyper_connections.enabled=false: the class always builds hyper-connections")
    if not model.moe.enabled:
        found.append("model.moe.enabled=false: every layer of the class is a mixture of experts")
    elif model.moe.n_shared_experts != 1:
        found.append(f"model.moe.n_shared_experts={model.moe.n_shared_experts}: the class always builds one shared expert")
    larger = sorted({ratio for ratio in model.compress_ratios[: model.num_hidden_layers] if ratio > INDEXED_RATIO})
    if len(larger) > 1:
        found.append(f"model.compress_ratios has the HCA ratios {larger}: the class knows one HCA ratio for all layers")
    if int(model.head_dim * (model.qk_rope_head_dim / model.head_dim)) != model.qk_rope_head_dim:
        found.append(
            f"model.qk_rope_head_dim={model.qk_rope_head_dim} of model.head_dim={model.head_dim}: the class computes the rotary width as a rounded "
            "fraction, which gives another number here"
        )
    return found


def hf_config(model: ModelConfig, eos: int | None) -> dict[str, Any]:
    """config.json for DeepseekV4ForCausalLM. Raises ConfigError with every reason where the class cannot express the model."""
    if reasons := reasons_against(model):
        raise ConfigError(
            f"{ARCHITECTURE} cannot express this model:\n  " + "\n  ".join(reasons) + "\nExport it in this project's own form with --form own."
        )
    ratios = list(model.compress_ratios[: model.num_hidden_layers])
    hca = next((ratio for ratio in ratios if ratio > INDEXED_RATIO), RELEASED_HCA_RATIO)
    hashed = min(model.moe.num_hash_layers, model.num_hidden_layers)
    scaling = model.rope_scaling
    positions = int(scaling.factor * scaling.original_max_position_embeddings)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": "float32",
        "transformers_version": FORM_OF,
        **{name: getattr(model, name) for name in SAME_NAME},
        **{name: getattr(model.hyper_connections, name) for name in HYPER_CONNECTIONS},
        **{name: getattr(model.moe, name) for name in MOE},
        "num_key_value_heads": 1,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "compress_ratios": [*ratios, 0] if model.mtp.enabled else ratios,
        "layer_types": [WINDOW if ratio == 0 else CSA if ratio == INDEXED_RATIO else HCA for ratio in ratios],
        "compress_rates": {CSA: INDEXED_RATIO, HCA: hca},
        "num_hash_layers": hashed,
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (model.num_hidden_layers - hashed),
        "num_nextn_predict_layers": int(model.mtp.enabled),
        "index_topk": positions if model.index_topk is None else model.index_topk,  # more than there can be entries: all of them
        "max_position_embeddings": positions,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        },
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        OWN_SECTION: plain(model),
    }


def own_config(model: ModelConfig, eos: int | None) -> dict[str, Any]:
    """config.json of this project's own form: the model section as it is."""
    return {"architectures": [OWN_ARCHITECTURE], "model_type": OWN_MODEL_TYPE, "dtype": "float32", "eos_token_id": eos, OWN_SECTION: plain(model)}


def model_config(content: Mapping[str, Any], has_mtp: bool, name: str) -> ModelConfig:
    """ModelConfig of a config.json of either form.

    `has_mtp`: whether the weights hold an MTP block (transformers writes none). `name`: of the model where the file does not say. Public keys win
    over the section that this project adds; what neither says takes the default. Raises ConfigError for a file that is neither form or says
    something that a Decoder cannot do.
    """
    own = dict(content.get(OWN_SECTION) or {})
    if content.get("model_type") == OWN_MODEL_TYPE:
        return from_mapping(own, ModelConfig, "config.json")
    if content.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"config.json has model_type={content.get('model_type')!r}; legal: {MODEL_TYPE}, {OWN_MODEL_TYPE}")
    public = _with_defaults(content)
    _refuse_foreign(public)
    layers = public["num_hidden_layers"]
    ratios = _ratios(public)
    compress = _rope(public)
    hashed = _hash_layers(public)
    positions = int(compress["factor"] * compress["original_max_position_embeddings"])
    topk: int | None = public["index_topk"]
    if own and own.get("index_topk") is None and topk == positions:
        topk = None
    values = {
        **own,
        **{key: public[key] for key in SAME_NAME},
        "name": own.get("name", name),
        "qk_rope_head_dim": _rotary_width(public),
        "rope_theta": public["rope_theta"],
        "compress_rope_theta": public["compress_rope_theta"],
        "compress_ratios": [*ratios, 0],
        "index_topk": topk,
        "rope_scaling": compress,
        "hyper_connections": {**own.get("hyper_connections", {}), "enabled": True, **{key: public[key] for key in HYPER_CONNECTIONS}},
        "moe": {**own.get("moe", {}), "enabled": True, "num_hash_layers": hashed, **{key: public[key] for key in MOE}},
        "mtp": {**own.get("mtp", {}), "enabled": has_mtp},
    }
    if own and list(own["compress_ratios"])[:layers] == ratios and len(own["compress_ratios"]) in (layers, layers + 1):
        values["compress_ratios"] = own["compress_ratios"] if has_mtp <= (len(own["compress_ratios"]) > layers) else [*ratios, 0]
    return from_mapping(values, ModelConfig, "config.json")


def _with_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that a file may leave out, as transformers fills them in; everything else must be there."""
    public: dict[str, Any] = {**_DEFAULTS, **content}
    missing = [key for key in (*SAME_NAME, *HYPER_CONNECTIONS, *MOE, "index_topk") if key not in public]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    return public


def _refuse_foreign(public: Mapping[str, Any]) -> None:
    for key, value in _EXPECTED.items():
        if public[key] != value:
            raise ConfigError(f"config.json: {key}={public[key]!r} is not what this project's decoder computes; legal: {value!r}")
    if (public.get("quantization_config") or {}) != {}:
        raise ConfigError("config.json has a quantization_config: dequantise the checkpoint first (bf16 or fp32 tensors), then import it")


def _ratios(public: Mapping[str, Any]) -> list[int]:
    layers = public["num_hidden_layers"]
    rates = {CSA: INDEXED_RATIO, HCA: RELEASED_HCA_RATIO, **(public.get("compress_rates") or {})}
    for kind, key in ((CSA, "compress_rate_csa"), (HCA, "compress_rate_hca")):
        rates[kind] = public.get(key) or rates[kind]
    if rates[CSA] != INDEXED_RATIO:
        raise ConfigError(f"config.json: compress_rates[{CSA}]={rates[CSA]}; this project's overlapping layers have the ratio {INDEXED_RATIO}")
    if rates[HCA] <= INDEXED_RATIO:
        raise ConfigError(f"config.json: compress_rates[{HCA}]={rates[HCA]}; legal here: above {INDEXED_RATIO}")
    kinds = public.get("layer_types")
    if kinds is None and "compress_ratios" in public:
        kinds = [WINDOW if r == 0 else CSA if r == INDEXED_RATIO else HCA for r in public["compress_ratios"][:layers]]
    if kinds is None:
        raise ConfigError(
            "config.json has neither layer_types nor compress_ratios; transformers' default is not that of the released models: add one"
        )
    unknown = sorted(set(kinds) - {WINDOW, CSA, HCA})
    if unknown or len(kinds) < layers:
        raise ConfigError(f"config.json: layer_types={kinds}; legal: {layers} of {WINDOW}, {CSA}, {HCA}")
    return [{WINDOW: 0, CSA: INDEXED_RATIO, HCA: rates[HCA]}[kind] for kind in kinds[:layers]]


def _rope(public: dict[str, Any]) -> dict[str, Any]:
    """The YaRN section of the compressed layers; sets rope_theta and compress_rope_theta from the nested form where the file has that."""
    nested = public.get("rope_parameters") or {}
    scaling = dict(public.get("rope_scaling") or {})
    if isinstance(nested.get("main"), Mapping):
        main, scaling = nested["main"], dict(nested["compress"])
        if main.get("rope_type", "default") != "default":
            raise ConfigError(f"config.json: rope_parameters.main has rope_type={main['rope_type']!r}; window layers have plain RoPE here")
        public["rope_theta"], public["compress_rope_theta"] = main["rope_theta"], scaling["rope_theta"]
        if scaling.get("rope_type") == "yarn" and scaling.get("attention_factor") is None:
            raise ConfigError(
                "config.json: rope_parameters.compress lacks attention_factor, which transformers takes for a magnitude scale; set it to 1.0"
            )
    elif nested and not scaling:
        scaling = dict(nested)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":  # YaRN with factor 1 divides by one
        scaling = {"factor": 1.0, "original_max_position_embeddings": public.get("max_position_embeddings", 1048576)}
    elif kind != "yarn":
        raise ConfigError(f"config.json: rope type {kind!r} of the compressed layers; legal: yarn, default")
    if float(scaling.get("attention_factor") or 1.0) != 1.0:
        raise ConfigError(
            f"config.json: attention_factor={scaling['attention_factor']}; this project's decoder has no magnitude scale: it must be 1.0"
        )
    public["rope_theta"], public["compress_rope_theta"] = float(public["rope_theta"]), float(public["compress_rope_theta"])
    fields = {f.name for f in dataclasses.fields(RopeScaling)}
    return {key: value for key, value in scaling.items() if key in fields and value is not None}


def _hash_layers(public: Mapping[str, Any]) -> int:
    kinds, layers = public.get("mlp_layer_types"), public["num_hidden_layers"]
    if kinds is None:
        return min(int(public.get("num_hash_layers", 3)), layers)
    count = sum(kind == "hash_moe" for kind in kinds[:layers])
    if list(kinds[:layers]) != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise ConfigError(f"config.json: mlp_layer_types={kinds}; legal: hash_moe layers first, then moe layers")
    return count


def _rotary_width(public: Mapping[str, Any]) -> int:
    if "qk_rope_head_dim" in public:
        return int(public["qk_rope_head_dim"])
    nested = (public.get("rope_parameters") or {}).get("main") or {}
    fraction = public.get("partial_rotary_factor") or nested.get("partial_rotary_factor") or 64 / 512
    return int(public["head_dim"] * fraction)
