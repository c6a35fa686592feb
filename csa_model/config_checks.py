# SPDX-License-Identifier: Apache-2.0
"""Values and combinations that cannot work, refused before any work starts.

Every refusal is a `ConfigError` that names the key, its value, the legal values and, where there is one, the change that would work.
"""

from __future__ import annotations

import re
from typing import Any

from csa_model.config import DEEPSEEK_V4_VOCAB, INDEXED_RATIO, STAGES, ConfigError, DataConfig, ExperimentConfig, ModelConfig, TrainerConfig

MIN_TEXT_VOCAB = 257  # 256 bytes and the end of a document

# key, lowest legal value, highest legal value (None: no bound), True where the lowest value itself is not legal
_RANGES: tuple[tuple[str, float, float | None, bool], ...] = (
    ("seed", 0, 2**32 - 1, False),
    ("data_seed", 0, 2**32 - 1, False),
    ("model.vocab_size", 2, None, False),
    ("model.hidden_size", 1, None, False),
    ("model.num_hidden_layers", 1, None, False),
    ("model.num_attention_heads", 1, None, False),
    ("model.head_dim", 1, None, False),
    ("model.qk_rope_head_dim", 2, None, False),
    ("model.q_lora_rank", 1, None, False),
    ("model.o_groups", 1, None, False),
    ("model.o_lora_rank", 1, None, False),
    ("model.sliding_window", 1, None, False),
    ("model.index_n_heads", 1, None, False),
    ("model.index_head_dim", 1, None, False),
    ("model.rope_theta", 0, None, True),
    ("model.compress_rope_theta", 0, None, True),
    ("model.rope_scaling.factor", 1, None, False),
    ("model.rope_scaling.original_max_position_embeddings", 1, None, False),
    ("model.rope_scaling.beta_slow", 0, None, True),
    ("model.rms_norm_eps", 0, None, True),
    ("model.initializer_range", 0, None, True),
    ("model.hyper_connections.hc_mult", 1, None, False),
    ("model.hyper_connections.hc_sinkhorn_iters", 1, None, False),
    ("model.hyper_connections.hc_eps", 0, None, True),
    ("model.hyper_connections.init_scale", 0, None, False),
    ("model.moe.n_routed_experts", 1, None, False),
    ("model.moe.num_experts_per_tok", 1, None, False),
    ("model.moe.n_shared_experts", 0, None, False),
    ("model.moe.moe_intermediate_size", 1, None, False),
    ("model.moe.num_hash_layers", 0, None, False),
    ("model.moe.routed_scaling_factor", 0, None, True),
    ("model.moe.swiglu_limit", 0, None, True),
    ("model.moe.bias_update_rate", 0, None, False),
    ("model.moe.balance_coefficient", 0, None, False),
    ("model.moe.dense_intermediate_size", 1, None, False),
    ("model.mtp.coefficient", 0, None, False),
    ("teacher.coefficient", 0, None, False),
    ("staged.dense.steps", 1, None, False),
    ("staged.dense.lr_multiplier", 0, None, True),
    ("staged.indexer_warmup.steps", 1, None, False),
    ("staged.indexer_warmup.lr_multiplier", 0, None, True),
    ("staged.sparse.steps", 1, None, False),
    ("staged.sparse.lr_multiplier", 0, None, True),
    ("data.sequence_length", 2, None, False),
    ("data.tokens_per_batch", 2, None, False),
    ("data.validation_batches", 1, None, False),
    ("data.num_workers", 0, None, False),
    ("data.tokenizer.vocab_size", 2, None, False),
    ("data.recall.pairs", 1, None, False),
    ("data.recall.key_space", 1, None, False),
    ("data.recall.value_space", 2, None, False),
    ("data.recall.documents", 2, None, False),
    ("optimizer.lr", 0, None, True),
    ("optimizer.weight_decay", 0, None, False),
    ("optimizer.eps", 0, None, True),
    ("optimizer.muon_momentum", 0, 1, False),
    ("optimizer.indexer_lr_multiplier", 0, None, False),
    ("optimizer.max_grad_norm", 0, None, True),
    ("optimizer.indexer_max_grad_norm", 0, None, True),
    ("scheduler.warmup_steps", 0, None, False),
    ("scheduler.decay_steps", 0, None, False),
    ("scheduler.min_lr_ratio", 0, 1, False),
    ("trainer.max_steps", 1, None, False),
    ("trainer.num_nodes", 1, None, False),
    ("trainer.accumulate_grad_batches", 1, None, False),
    ("trainer.val_every_steps", 1, None, False),
    ("trainer.log_every_n_steps", 1, None, False),
    ("trainer.num_threads", 1, None, False),
    ("callbacks.indexer_diagnostics.every_n_steps", 1, None, False),
    ("callbacks.indexer_diagnostics.rows", 1, None, False),
    ("callbacks.checkpoint.every_n_steps", 1, None, False),
    ("callbacks.checkpoint.keep", 1, None, False),
)


def check(config: ExperimentConfig) -> list[str]:
    """Raise ConfigError for what cannot work; return warnings, one sentence each, for what works but is rarely meant."""
    for key, low, high, is_open in _RANGES:
        _check_range(key, _value(config, key), low, high, is_open)
    _check_model(config.model)
    _check_backend(config)
    _check_training(config)
    _check_data(config.data, config.model)
    _check_trainer(config.trainer)
    return _warnings(config)


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _check_range(key: str, value: float | None, low: float, high: float | None, is_open: bool) -> None:
    if value is None:
        return
    if value < low or (is_open and value == low) or (high is not None and value > high):
        legal = f"{'above' if is_open else 'at least'} {low}" + (f" and at most {high}" if high is not None else "")
        raise ConfigError(f"{key}={value} is not legal; it must be {legal}")


def _check_model(model: ModelConfig) -> None:
    layers, mtp = model.num_hidden_layers, int(model.mtp.enabled)
    ratios = model.compress_ratios
    if len(ratios) not in (layers + mtp, layers + 1):
        raise ConfigError(
            f"model.compress_ratios has {len(ratios)} entries {list(ratios)}, but model.num_hidden_layers={layers} and model.mtp.enabled="
            f"{str(model.mtp.enabled).lower()} need {layers + mtp}: one per layer{' and one, 0, for the MTP block' if mtp else ''}"
        )
    for i, ratio in enumerate(ratios):
        if ratio != 0 and ratio < INDEXED_RATIO:
            raise ConfigError(f"model.compress_ratios[{i}]={ratio} is not legal; legal ratios: 0 (window only), {INDEXED_RATIO} (CSA), above 4 (HCA)")
    if len(ratios) > layers and ratios[layers] != 0:
        raise ConfigError(f"model.compress_ratios[{layers}]={ratios[layers]} belongs to the MTP block, which has window attention only: it must be 0")
    rope = model.qk_rope_head_dim
    if rope % 2:
        raise ConfigError(f"model.qk_rope_head_dim={rope} is odd; rotary dimensions come in pairs, so it must be even")
    for key in ("head_dim", "index_head_dim"):
        if getattr(model, key) < rope:
            raise ConfigError(f"model.{key}={getattr(model, key)} is smaller than model.qk_rope_head_dim={rope}; it must be at least {rope}")
    if model.num_attention_heads % model.o_groups:
        divisors = [n for n in range(1, model.num_attention_heads + 1) if model.num_attention_heads % n == 0]
        raise ConfigError(f"model.o_groups={model.o_groups} does not divide model.num_attention_heads={model.num_attention_heads}; legal: {divisors}")
    if model.index_topk is not None and model.index_topk < 1:
        raise ConfigError(f"model.index_topk={model.index_topk} is not legal; it must be at least 1, or null to select every visible entry")
    if model.rope_scaling.beta_fast <= model.rope_scaling.beta_slow:
        raise ConfigError(
            f"model.rope_scaling.beta_fast={model.rope_scaling.beta_fast} must be above model.rope_scaling.beta_slow={model.rope_scaling.beta_slow}"
        )
    moe = model.moe
    if moe.enabled and moe.num_experts_per_tok > moe.n_routed_experts:
        raise ConfigError(
            f"model.moe.num_experts_per_tok={moe.num_experts_per_tok} is more than model.moe.n_routed_experts={moe.n_routed_experts}; "
            f"legal: 1 to {moe.n_routed_experts}"
        )
    if moe.enabled and moe.num_hash_layers > layers:
        raise ConfigError(f"model.moe.num_hash_layers={moe.num_hash_layers} is more than model.num_hidden_layers={layers}; legal: 0 to {layers}")


def _check_backend(config: ExperimentConfig) -> None:
    if config.backend.backward == "triton":
        return
    key = f"backend.backward={config.backend.backward}"
    if config.backend.name != "flashmla":
        raise ConfigError(f"{key} belongs to backend=flashmla; backend={config.backend.name} has a backward of its own: leave it out")
    if config.trainer.deterministic:
        raise ConfigError(f"{key} has no deterministic mode and trainer.deterministic=true asks for one; take backend.backward=triton")


def _check_training(config: ExperimentConfig) -> None:
    stage, steps, schedule = config.stage, config.trainer.max_steps, config.scheduler
    named = STAGES.get(stage.name)
    if named is None:
        raise ConfigError(f"stage.name={stage.name} is not legal; legal values: {', '.join(STAGES)}. Choose one with stage=NAME")
    if (stage.attention, stage.train_only_indexer) != (named.attention, named.train_only_indexer):
        raise ConfigError(
            f"stage.name={stage.name} stands for stage.attention={named.attention} with stage.train_only_indexer={named.train_only_indexer}, but the "
            f"config has {stage.attention} with {stage.train_only_indexer}: reports would carry the wrong name. "
            f"Choose the stage with stage=NAME, one of {', '.join(STAGES)}"
        )
    if stage.train_only_indexer and config.teacher.name == "none":
        raise ConfigError(
            "stage.train_only_indexer=true with teacher=none would train nothing; take teacher=full_csa or teacher=compressed_only, or another stage"
        )
    if stage.train_only_indexer and stage.indexer_loss == "off":
        raise ConfigError("stage.train_only_indexer=true with stage.indexer_loss=off would train nothing; set stage.indexer_loss=dense or sparse")
    if stage.train_only_indexer and INDEXED_RATIO not in config.model.compress_ratios[: config.model.num_hidden_layers]:
        raise ConfigError(f"stage.train_only_indexer=true, but model.compress_ratios={list(config.model.compress_ratios)} has no CSA layer (ratio 4)")
    if schedule.warmup_steps > steps:
        raise ConfigError(f"scheduler.warmup_steps={schedule.warmup_steps} is more than trainer.max_steps={steps}; legal: 0 to {steps}")
    if schedule.name == "wsd" and not 1 <= schedule.decay_steps <= steps - schedule.warmup_steps:
        raise ConfigError(
            f"scheduler.decay_steps={schedule.decay_steps} does not fit scheduler=wsd; with trainer.max_steps={steps} and scheduler.warmup_steps="
            f"{schedule.warmup_steps} it must lie between 1 and {steps - schedule.warmup_steps}"
        )
    for i, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"optimizer.betas[{i}]={beta} is not legal; it must be at least 0 and below 1")
    if config.ckpt_path is not None and config.init_from is not None:
        raise ConfigError("ckpt_path resumes a run and init_from starts a new one from its weights: give one of the two")
    for key in ("task", "runs_dir"):
        if not getattr(config, key).strip():
            raise ConfigError(f"{key} is empty; it names the folder of the run")
    if not re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*", config.task) or ".." in config.task.split("/"):
        raise ConfigError(f"task={config.task!r} names a folder below runs_dir; legal: letters, digits, '.', '_', '-', '+', parts separated by '/'")


def _check_data(data: DataConfig, model: ModelConfig) -> None:
    if data.sequence_length > data.tokens_per_batch:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} is more than data.tokens_per_batch={data.tokens_per_batch}: a whole sequence must fit "
            f"one row; raise data.tokens_per_batch or lower data.sequence_length"
        )
    if model.index_topk is not None and model.index_topk > data.tokens_per_batch:  # ids of that width would cost time and memory for nothing
        raise ConfigError(
            f"model.index_topk={model.index_topk} is more than data.tokens_per_batch={data.tokens_per_batch}, and a row of that length has "
            f"{data.tokens_per_batch // INDEXED_RATIO} entries at most; lower it, or take model.index_topk=null to select every visible entry"
        )
    if data.name in ("text_files", "memmap") and not data.path:
        what = "a file or folder of text" if data.name == "text_files" else "a token file with its JSON side-car"
        raise ConfigError(f"data={data.name} needs data.path=PATH, {what}")
    if not 0 < data.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction={data.validation_fraction} is not legal; it must lie between 0 and 1")
    if data.name in ("stdlib", "text_files"):
        if data.tokenizer.name == "bpe" and data.tokenizer.vocab_size > model.vocab_size:
            raise ConfigError(
                f"data.tokenizer.vocab_size={data.tokenizer.vocab_size} is more than model.vocab_size={model.vocab_size}: its ids would have no "
                f"embedding; lower the one or raise the other"
            )
        if model.vocab_size < MIN_TEXT_VOCAB:
            raise ConfigError(
                f"model.vocab_size={model.vocab_size} is too small for text: 256 bytes and the end-of-document mark need at least {MIN_TEXT_VOCAB}"
            )
        if data.tokenizer.name == "deepseek_v4" and model.vocab_size < DEEPSEEK_V4_VOCAB:
            raise ConfigError(
                f"data.tokenizer.name=deepseek_v4 makes {DEEPSEEK_V4_VOCAB} ids, more than model.vocab_size={model.vocab_size}: set "
                f"model.vocab_size={DEEPSEEK_V4_VOCAB}, or take tokenizer=deepseek_v4, which sets both"
            )
        if data.tokenizer.name == "bpe" and data.tokenizer.vocab_size < MIN_TEXT_VOCAB:
            raise ConfigError(f"data.tokenizer.vocab_size={data.tokenizer.vocab_size} is too small: byte-level BPE needs at least {MIN_TEXT_VOCAB}")
    if data.name == "recall":
        for i, distance in enumerate(data.recall.distances):
            if distance < 1:
                raise ConfigError(f"data.recall.distances[{i}]={distance} is not legal; a distance is a number of tokens, at least 1")
        if not data.recall.distances:
            raise ConfigError("data.recall.distances is empty; give at least one distance in tokens")


def _check_trainer(trainer: TrainerConfig) -> None:
    if trainer.accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise ConfigError(f"trainer.accelerator={trainer.accelerator!r} is not legal; legal values: auto, cpu, gpu")
    if trainer.strategy not in ("auto", "ddp"):
        raise ConfigError(f"trainer.strategy={trainer.strategy!r} is not legal; legal values: auto (one device), ddp")
    if isinstance(trainer.devices, str) and trainer.devices != "auto":
        raise ConfigError(f"trainer.devices={trainer.devices!r} is not legal; legal values: a number, or auto")
    if isinstance(trainer.devices, int) and trainer.devices < 1:
        raise ConfigError(f"trainer.devices={trainer.devices} is not legal; it must be at least 1, or auto for all")
    if trainer.strategy == "auto" and (trainer.devices != 1 or trainer.num_nodes != 1):
        raise ConfigError(
            f"trainer.devices={trainer.devices} and trainer.num_nodes={trainer.num_nodes} need more than one process: take trainer=ddp "
            f"(trainer.strategy=ddp)"
        )
    if trainer.profiler not in (None, "simple", "advanced", "pytorch"):
        raise ConfigError(f"trainer.profiler={trainer.profiler!r} is not legal; legal values: null, simple, advanced, pytorch")
    limit = trainer.max_time
    if limit is not None and (not re.fullmatch(r"\d+:([01]\d|2[0-3])(:[0-5]\d){2}", limit) or not re.search("[1-9]", limit)):
        raise ConfigError(f"trainer.max_time={limit!r} is not legal; it must be DD:HH:MM:SS above zero, for example 00:01:30:00")


def check_devices(config: ExperimentConfig) -> None:
    """Raise ConfigError where this machine lacks the devices that the config asks for. What a backend needs is said by the backend itself."""
    import torch

    trainer = config.trainer
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if trainer.accelerator in ("gpu", "cuda"):
        if gpus == 0:
            raise ConfigError(
                f"trainer.accelerator={trainer.accelerator} needs an NVIDIA GPU and a CUDA build of torch; none is seen. Take trainer=cpu"
            )
        if isinstance(trainer.devices, int) and trainer.devices > gpus:
            raise ConfigError(f"trainer.devices={trainer.devices}, but this machine has {gpus} GPU(s); legal: 1 to {gpus}")


def _warnings(config: ExperimentConfig) -> list[str]:
    model, found = config.model, []
    has_csa = INDEXED_RATIO in model.compress_ratios[: model.num_hidden_layers]
    if has_csa and model.index_topk is not None and model.index_topk * INDEXED_RATIO >= config.data.sequence_length:
        found.append(
            f"model.index_topk={model.index_topk} x ratio {INDEXED_RATIO} covers data.sequence_length={config.data.sequence_length}: every visible "
            "entry is selected, so the indexer decides nothing"
        )
    if not has_csa and config.teacher.name != "none":
        found.append(f"model.compress_ratios has no CSA layer (ratio {INDEXED_RATIO}): teacher={config.teacher.name} has no indexer to teach")
    if has_csa and config.stage.attention == "sparse" and config.stage.indexer_loss == "off" and config.teacher.name != "none":
        found.append(f"stage.indexer_loss=off: teacher={config.teacher.name} is not used and the indexer selects as it was initialised")
    if config.teacher.name != "none" and config.teacher.coefficient == 0 and config.stage.indexer_loss != "off":
        found.append(f"teacher.coefficient=0: the loss of teacher={config.teacher.name} is computed but moves nothing")
    if model.sliding_window >= config.data.sequence_length:
        found.append(
            f"model.sliding_window={model.sliding_window} covers data.sequence_length={config.data.sequence_length}: nothing lies beyond the window"
        )
    return found
