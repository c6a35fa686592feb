# SPDX-License-Identifier: Apache-2.0
"""Impossible values and combinations are refused with the key, the value and what would work; rare ones draw a warning."""

from __future__ import annotations

import pytest

from csa_model.config import ConfigError, from_mapping
from csa_model.run_dir import plain
from tests.entry.helpers import checked, load

REFUSED = {
    "list shorter than the layers": (["model.num_hidden_layers=3", "model.compress_ratios=[4,4]"], ["2 entries", "need 4", "=3"]),
    "the MTP entry forgotten": (["model.compress_ratios=[0,0,4,16,4,16,4]"], ["7 entries", "need 8", "MTP"]),
    "ratio 5 is HCA but 3 is nothing": (
        ["model.compress_ratios=[0,0,4,3,4,16,4,0]"],
        ["compress_ratios[3]=3", "0 (window", "4 (CSA)"],
    ),
    "negative ratio": (["model.compress_ratios=[0,0,4,-4,4,16,4,0]"], ["compress_ratios[3]=-4"]),
    "compressed MTP block": (["model.compress_ratios=[0,0,4,16,4,16,4,4]"], ["compress_ratios[7]=4", "must be 0"]),
    "head smaller than rope": (["model.qk_rope_head_dim=66", "model.index_head_dim=128"], ["model.head_dim=64", "qk_rope_head_dim=66"]),
    "index head smaller than rope": (["model.qk_rope_head_dim=32"], ["model.index_head_dim=16", "at least 32"]),
    "odd rope": (["model.qk_rope_head_dim=7"], ["qk_rope_head_dim=7", "even"]),
    "groups do not divide heads": (["model.o_groups=3"], ["model.o_groups=3", "num_attention_heads=8", "[1, 2, 4, 8]"]),
    "top-k negative": (["model.index_topk=-1"], ["model.index_topk=-1", "at least 1", "null"]),
    "top-k beyond a row": (["model.index_topk=70000"], ["model.index_topk=70000", "tokens_per_batch=1024", "256 entries", "null"]),
    "top-k zero": (["model.index_topk=0"], ["model.index_topk=0"]),
    "more experts per token than experts": (["model.moe.num_experts_per_tok=9"], ["num_experts_per_tok=9", "1 to 8"]),
    "more hash layers than layers": (["model.moe.num_hash_layers=8"], ["num_hash_layers=8", "0 to 7"]),
    "coefficient negative": (["teacher.coefficient=-0.5"], ["teacher.coefficient=-0.5", "at least 0"]),
    "balance coefficient negative": (["model.moe.balance_coefficient=-1"], ["model.moe.balance_coefficient"]),
    "mtp coefficient negative": (["model.mtp.coefficient=-1"], ["model.mtp.coefficient"]),
    "learning rate zero": (["optimizer.lr=0"], ["optimizer.lr=0", "above 0"]),
    "beta one": (["optimizer.betas=[0.9,1.0]"], ["optimizer.betas[1]=1.0"]),
    "tokenizer larger than the model": (["data.tokenizer.vocab_size=2048"], ["data.tokenizer.vocab_size=2048", "model.vocab_size=1024"]),
    "bytes need 257 ids": (["data.tokenizer.name=bytes", "model.vocab_size=256"], ["model.vocab_size=256", "257"]),
    "sequence longer than the row": (["data.sequence_length=4096"], ["data.sequence_length=4096", "data.tokens_per_batch"]),
    "stage by its label": (["stage.name=dense"], ["stage.name=dense", "attention=dense", "stage=NAME"]),
    "no such stage": (["stage.name=foo"], ["stage.name=foo", "dense, indexer_warmup, sparse"]),
    "attention under another label": (["stage.attention=dense"], ["stage.name=sparse", "stage=NAME"]),
    "nothing to train": (["stage=indexer_warmup", "teacher=none"], ["train_only_indexer", "teacher=none", "full_csa"]),
    "nothing to train, loss off": (["stage=indexer_warmup", "stage.indexer_loss='off'"], ["stage.indexer_loss=off"]),
    "nothing to train, no CSA layer": (["stage=indexer_warmup", "model.compress_ratios=[0,0,8,16,8,16,8,0]"], ["no CSA layer"]),
    "warm-up longer than the run": (["trainer.max_steps=10"], ["scheduler.warmup_steps=20", "trainer.max_steps=10"]),
    "decay longer than the run": (["scheduler=wsd", "trainer.max_steps=50"], ["scheduler.decay_steps=60", "between 1 and 30"]),
    "devices without ddp": (["trainer.devices=2"], ["trainer.devices=2", "trainer=ddp"]),
    "devices zero": (["trainer.devices=0"], ["trainer.devices=0"]),
    "devices in words": (["trainer.devices=all"], ["trainer.devices='all'", "auto"]),
    "accelerator": (["trainer.accelerator=tpu"], ["'tpu'", "auto, cpu, gpu"]),
    "strategy": (["trainer.strategy=fsdp"], ["'fsdp'", "ddp"]),
    "max_time": (["trainer.max_time='10 min'"], ["trainer.max_time", "DD:HH:MM:SS"]),
    "no time": (["trainer.max_time=00:00:00:00"], ["trainer.max_time", "above zero"]),
    "validation fraction": (["data.validation_fraction=1"], ["data.validation_fraction"]),
    "path missing": (["data=text_files"], ["data=text_files", "data.path"]),
    "two checkpoints": (["ckpt_path=a", "init_from=b"], ["ckpt_path", "init_from"]),
    "task leaves the runs folder": (["task=../up"], ["task="]),
    "recall without distances": (["data=recall", "data.recall.distances=[]"], ["data.recall.distances"]),
    "zero accumulation": (["trainer.accumulate_grad_batches=0"], ["trainer.accumulate_grad_batches=0", "at least 1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_settings_name_key_value_and_what_is_legal(name: str) -> None:
    """Lengths and ratios among them are checked before any work."""
    overrides, fragments = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        checked(*overrides)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.compress_ratios=[0,0,4,5,4,128,4,0]"],  # any ratio above 4 is an HCA layer
        ["model.mtp.enabled=false"],  # the entry of the MTP block may stay
        ["model.mtp.enabled=false", "model.compress_ratios=[0,0,4,16,4,16,4]"],
        ["model.index_topk=null"],
        ["model.qk_rope_head_dim=16"],  # equal to index_head_dim
        ["stage=dense", "teacher=none"],
        ["trainer=ddp", "trainer.accelerator=cpu"],
        ["scheduler=wsd", "trainer.max_steps=80"],  # exactly warm-up and decay
        ["model.moe.enabled=false", "model.moe.num_experts_per_tok=9"],  # a section that is switched off does not matter
    ],
)
def test_the_edge_of_what_is_legal_passes(overrides: list[str]) -> None:
    checked(*overrides)


@pytest.mark.parametrize("key", ["teacher.coefficient", "optimizer.lr", "model.mtp.coefficient", "optimizer.max_grad_norm"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number"):
        checked(f"{key}={value}")


def test_selection_that_covers_the_sequence_draws_a_warning_and_no_error() -> None:
    covering = checked("model.index_topk=64", "data.sequence_length=256")[1]
    assert any("index_topk=64" in line and "sequence_length=256" in line for line in covering)
    assert not any("index_topk" in line for line in checked("model.index_topk=63", "data.sequence_length=256")[1])
    assert not any("index_topk" in line for line in checked("model.index_topk=null")[1])


def test_a_teacher_without_effect_draws_a_warning() -> None:
    assert checked()[1] == []
    assert any("no CSA layer" in line for line in checked("model.compress_ratios=[0,0,8,16,8,16,8,0]")[1])
    assert any("indexer_loss=off" in line for line in checked("stage.indexer_loss='off'")[1])
    assert any("coefficient=0" in line for line in checked("teacher.coefficient=0")[1])


@pytest.mark.parametrize("key", ["model.moe.expert", "trainer.max_stesp", "callbacks.checkpoint.every", "data.recall.pair", "logger.entity", "sead"])
def test_unknown_keys_are_refused_at_any_depth(key: str) -> None:
    mapping = plain(load())
    section = mapping
    *path, name = key.split(".")
    for part in path:
        section = section[part]
    section[name] = 1
    with pytest.raises(ConfigError, match=f"unknown key '{key}'") as error:
        from_mapping(mapping)
    assert "legal keys" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.max_steps=abc"], "trainer.max_steps must be a whole number"),
        (["trainer.max_steps=1.5"], "trainer.max_steps must be a whole number"),
        (["trainer.max_steps=true"], "trainer.max_steps must be a whole number"),
        (["model.mtp.enabled=1"], "model.mtp.enabled must be true or false"),
        (["trainer.precision=16-mixed"], "legal values: 32-true, bf16-mixed"),
        (["optimizer.betas=[0.9]"], "optimizer.betas must have 2 values"),
        (["model.compress_ratios=4"], "model.compress_ratios must be a list"),
        (["data.path=3", "data=text_files"], "data.path must be a string or null, got 3"),
        (["model.index_topk=many"], "model.index_topk must be a whole number or null, got 'many'"),
    ],
)
def test_values_of_the_wrong_type_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*overrides)
