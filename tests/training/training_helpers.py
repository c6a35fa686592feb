# SPDX-License-Identifier: Apache-2.0
"""A whole decoder small enough to train in a test, and packed rows of random tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from csa_model.config import (
    CallbacksConfig,
    CheckpointConfig,
    DiagnosticsConfig,
    ExperimentConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    SchedulerConfig,
    StageConfig,
    TeacherConfig,
    TrainerConfig,
)
from csa_model.data.batch import PackedBatch
from csa_model.data.packing import pack
from csa_model.lit_module import CSALitModule

VOCABULARY = 61
MODEL = ModelConfig(
    name="tiny",
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=8,
    qk_rope_head_dim=4,
    q_lora_rank=8,
    o_groups=2,
    o_lora_rank=4,
    sliding_window=4,
    compress_ratios=(0, 4, 8, 0),
    index_n_heads=2,
    index_head_dim=8,
    index_topk=3,
    moe=MoEConfig(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, num_hash_layers=1, bias_update_rate=1e-2, balance_coefficient=1e-2
    ),
)


def make_config(teacher: str = "full_csa", stage: StageConfig | None = None, model: dict[str, Any] | None = None, **trainer: Any) -> ExperimentConfig:
    """A run of the tiny decoder; `model` and the keyword arguments replace fields of the model and the trainer."""
    return ExperimentConfig(
        model=dataclasses.replace(MODEL, **(model or {})),
        teacher=TeacherConfig(name=teacher),  # type: ignore[arg-type]
        stage=stage or StageConfig(),
        optimizer=OptimizerConfig(lr=1e-2),
        scheduler=SchedulerConfig(name="constant", warmup_steps=0),
        trainer=TrainerConfig(**{"max_steps": 4, "accelerator": "cpu", "log_every_n_steps": 1, **trainer}),
        callbacks=CallbacksConfig(
            indexer_diagnostics=DiagnosticsConfig(every_n_steps=2, rows=16), checkpoint=CheckpointConfig(every_n_steps=2, keep=1)
        ),
    )


def make_module(config: ExperimentConfig, seed: int = 0) -> CSALitModule:
    """Seeded weights; sinks and router biases are made unequal, so that nothing holds by symmetry only."""
    torch.manual_seed(seed)
    module = CSALitModule(config)
    with torch.no_grad():
        for name, p in module.decoder.named_parameters():
            if name.endswith("attn_sink"):
                p.normal_()
    return module


def make_rows(rows: Sequence[Sequence[int]], num_tokens: int = 48, accumulate: int = 1, seed: int = 0) -> list[PackedBatch]:
    """One packed row per list of document lengths; every `accumulate` consecutive rows form an optimizer step."""
    generator = np.random.default_rng(seed)
    batches = [pack([generator.integers(0, VOCABULARY, n) for n in lengths], num_tokens, (4, 8)) for lengths in rows]
    batches = [dataclasses.replace(b, target_bytes=3 * b.step.tokens) for b in batches]
    for first in range(0, len(batches), accumulate):
        group = batches[first : first + accumulate]
        total = group[0].step
        for b in group[1:]:
            total = total + b.step
        batches[first : first + accumulate] = [dataclasses.replace(b, step=total) for b in group]
    return batches


def make_trainer(config: ExperimentConfig, **options: Any) -> L.Trainer:
    settings = {
        "max_steps": config.trainer.max_steps,
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": config.trainer.accumulate_grad_batches,
        "precision": config.trainer.precision,
        "log_every_n_steps": config.trainer.log_every_n_steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return L.Trainer(**{**settings, **options})


def loader(batches: Sequence[PackedBatch]) -> DataLoader[PackedBatch]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


class StopAt(L.Callback):
    """Raises in the middle of a micro-batch: after the forward and backward passes, before anything is counted."""

    def __init__(self, micro_batch: int, error: BaseException) -> None:
        self.micro_batch, self.error = micro_batch, error

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.micro_batch -= 1
        if self.micro_batch == 0:
            raise self.error
