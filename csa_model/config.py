# SPDX-License-Identifier: Apache-2.0
"""The typed configuration of a run.

Hydra composes YAML; `from_mapping` turns the resolved result into these dataclasses and refuses unknown keys at any depth and values of the wrong
type. `csa_model.config_checks.check` then refuses values and combinations that cannot work, before any work starts. Field names are those of the
public DeepSeek-V4 configurations where such a name exists.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
INDEXED_RATIO = 4  # the ratio of CSA layers: overlapping compressor and indexer; every larger ratio is an HCA layer
DEEPSEEK_V4_VOCAB = 129_280  # ids of the released models


class ConfigError(ValueError):
    """A value or combination that cannot work. The message names the key, the value, the legal values and what would work."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the compressed layers (ratio > 0); window-only layers use plain `rope_theta`."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class HyperConnectionsConfig:
    """Manifold-constrained hyper-connections. Off: a plain pre-norm residual stream."""

    enabled: bool = True
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    init_scale: float = 0.01


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts. Off: one clamped SwiGLU of width `dense_intermediate_size` per layer."""

    enabled: bool = True
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    moe_intermediate_size: int = 32
    num_hash_layers: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    bias_update_rate: float = 1e-3
    balance_coefficient: float = 1e-4
    dense_intermediate_size: int = 128


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction of depth one: a block after the last layer that predicts the token after the next."""

    enabled: bool = True
    coefficient: float = 0.3


@dataclass(frozen=True)
class ModelConfig:
    name: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one per layer and one for the MTP block: 0 window only, 4 CSA, above 4 HCA
    index_n_heads: int
    index_head_dim: int
    index_topk: int | None  # None selects every visible entry
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    hyper_connections: HyperConnectionsConfig = field(default_factory=HyperConnectionsConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    recompute: bool = False  # recompute each block in the backward pass


@dataclass(frozen=True)
class BackendConfig:
    name: Literal["unfused", "triton", "flashmla", "auto"] = "auto"  # auto: triton where it can run, else unfused
    backward: Literal["triton", "cudnn"] = "triton"  # flashmla: who differentiates the attention


@dataclass(frozen=True)
class TeacherConfig:
    name: Literal["full_csa", "compressed_only", "none"] = "full_csa"
    coefficient: float = 1.0


@dataclass(frozen=True)
class StageConfig:
    name: str = "sparse"
    attention: Literal["dense", "sparse"] = "sparse"
    indexer_loss: Literal["off", "dense", "sparse"] = "sparse"
    train_only_indexer: bool = False


STAGES = {  # what each name stands for, as in configs/stage
    "dense": StageConfig("dense", "dense", "off", False),
    "indexer_warmup": StageConfig("indexer_warmup", "dense", "dense", True),
    "sparse": StageConfig("sparse", "sparse", "sparse", False),
}


@dataclass(frozen=True)
class StagePlan:
    """One stage of a staged run; min_lr_ratio is the scheduler section's."""

    steps: int = 100
    scheduler: Literal["cosine", "wsd", "constant"] = "constant"
    warmup_steps: int = 10
    decay_steps: int = 0
    lr_multiplier: float = 1.0  # of optimizer.lr


@dataclass(frozen=True)
class StagedConfig:
    """The three stages in one command (experiment=staged): dense, the indexers alone, sparse."""

    enabled: bool = False
    dense: StagePlan = field(default_factory=StagePlan)
    indexer_warmup: StagePlan = field(default_factory=StagePlan)
    sparse: StagePlan = field(default_factory=StagePlan)


@dataclass(frozen=True)
class TokenizerConfig:
    name: Literal["bpe", "bytes", "deepseek_v4"] = "bpe"
    vocab_size: int = 1024


@dataclass(frozen=True)
class RecallConfig:
    """Synthetic key-value recall: `pairs` bindings per document, asked back at the given token distances."""

    pairs: int = 8
    key_space: int = 64
    value_space: int = 64
    distances: tuple[int, ...] = (16, 64, 128)
    documents: int = 4096


@dataclass(frozen=True)
class DataConfig:
    name: Literal["stdlib", "text_files", "memmap", "recall"] = "stdlib"
    path: str | None = None  # text_files: a file or folder; memmap: the token file
    cache_dir: str = "data_cache"
    sequence_length: int = 256  # longest document in a row; longer ones are cut into pieces
    tokens_per_batch: int = 1024  # length of one packed row, the batch of one rank
    validation_fraction: float = 0.05
    validation_batches: int = 16
    num_workers: int = 0
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["muon_adamw", "adamw"] = "muon_adamw"
    lr: float = 1e-2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-20
    muon_momentum: float = 0.95
    indexer_lr_multiplier: float = 1.0
    max_grad_norm: float = 1.0  # every parameter outside the indexers
    indexer_max_grad_norm: float = 1.0  # the indexers, a norm of their own


@dataclass(frozen=True)
class SchedulerConfig:
    name: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20
    decay_steps: int = 0  # wsd: length of the final decay
    min_lr_ratio: float = 0.1


@dataclass(frozen=True)
class TrainerConfig:
    max_steps: int = 300
    accelerator: str = "auto"
    devices: int | str = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    cuda_graph: Literal["auto", "always", "never"] = "auto"  # forward and backward launched as one; auto: where it can be
    accumulate_grad_batches: int = 1
    val_every_steps: int = 50  # optimizer steps, whatever accumulate_grad_batches is
    log_every_n_steps: int = 10
    deterministic: bool = False
    num_threads: int | None = None  # CPU threads of torch; None leaves torch's choice
    enable_progress_bar: bool = True
    profiler: str | None = None
    max_time: str | None = None


@dataclass(frozen=True)
class DiagnosticsConfig:
    enabled: bool = True
    every_n_steps: int = 50
    rows: int = 256  # sampled query rows per CSA layer


@dataclass(frozen=True)
class CheckpointConfig:
    every_n_steps: int = 100
    keep: int = 2


@dataclass(frozen=True)
class CallbacksConfig:
    indexer_diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    peak_memory: bool = True
    throughput: bool = True
    learning_rates: bool = True


@dataclass(frozen=True)
class LoggerConfig:
    name: Literal["csv", "wandb", "tensorboard"] = "csv"
    project: str = "csa-lightning"
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    offline: bool = True


@dataclass(frozen=True)
class ExperimentConfig:
    model: ModelConfig
    task: str = "csa"
    seed: int = 1
    data_seed: int | None = None  # None: the same as seed
    runs_dir: str = "runs"
    run_dir: str | None = None
    ckpt_path: str | None = None
    init_from: str | None = None
    compile: bool = False
    backend: BackendConfig = field(default_factory=BackendConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    staged: StagedConfig = field(default_factory=StagedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def from_mapping(mapping: Mapping[str, Any], cls: type[T] = ExperimentConfig, path: str = "") -> T:  # type: ignore[assignment]
    """Build dataclass `cls` from a resolved mapping (plain dicts, lists, scalars).

    Raises ConfigError for an unknown key, a missing key, or a value of the wrong type, naming the dotted key and the legal values.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path or 'the config'} must be a section with keys, got {mapping!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise ConfigError(f"unknown key '{_join(path, str(key))}'; legal keys of {path or 'the config'}: {', '.join(fields)}")
    values = {}
    for name, f in fields.items():
        if name in mapping:
            values[name] = _convert(mapping[name], hints[name], _join(path, name))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing key '{_join(path, name)}'")
    return cls(**values)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _convert(value: Any, hint: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        errors = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _convert(value, option, path)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[-1].replace(", got", " or null, got", 1) if type(None) in args else errors[-1])
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{path}={value!r} is not legal; legal values: {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        item = args[0]
        if Ellipsis not in args and len(value) != len(args):
            raise ConfigError(f"{path} must have {len(args)} values, got {list(value)}")
        return tuple(_convert(v, item, f"{path}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return from_mapping(value, hint, path)  # type: ignore[arg-type]
    if hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{path} must be true or false, got {value!r}")
        return value
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{path} must be a whole number, got {value!r}")
        return value
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{path} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ConfigError(f"{path} must be a finite number, got {value!r}")
        return float(value)
    if hint is str:
        if not isinstance(value, str):
            raise ConfigError(f"{path} must be a string, got {value!r}")
        return value
    raise TypeError(f"no conversion for {hint} at {path}")
