# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from csa_model.config import ConfigError, HyperConnectionsConfig, ModelConfig, MoEConfig, MTPConfig, RecallConfig
from csa_model.data.recall import RecallTokenizer
from csa_model.data.tokenizers import BPETokenizer, BytesTokenizer
from csa_model.hf import export, hf_config, import_directory, model_config, read_directory
from csa_model.hf.__main__ import main
from csa_model.hf.check import compare_with_class
from csa_model.hf.tokenizer_files import tokenizer_files
from csa_model.lit_module import load_initial_weights
from tests.entry.helpers import TINY, run, write_text
from tests.hf.parity import model_of, save_checkpoint
from tests.model.helpers import build, logits_of, plain_config, random_tokens, tiny_config

TEXTS = ["def f(x):\n    return x + 1\n", "class A:\n    pass  # naïve 漢字\n"] * 3


def transformers_directory(folder: Path, **changes: Any) -> Any:
    """A random model as `save_pretrained` writes it."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    content = {k: v for k, v in hf_config(model_of("mixed"), eos=0).items() if k != "csa_lightning"}
    torch.manual_seed(5)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**content, **changes}))
    model.save_pretrained(folder)
    return model


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoint and directory, with a tokenizer of 300 ids."""
    decoder = build(dataclasses.replace(model_of("mixed"), vocab_size=320), seed=1)
    BPETokenizer.train(TEXTS, 300).save(tmp_path / "tok.json")
    path = save_checkpoint(decoder, tmp_path / "a.ckpt")
    export(path, tmp_path / "hf", tokenizer=str(tmp_path / "tok.json"))
    return path, tmp_path / "hf"


def test_export_import_export_is_equal_byte_for_byte(exported: tuple[Path, Path], tmp_path: Path) -> None:
    path, first = exported
    import_directory(first, tmp_path / "b.ckpt")
    export(tmp_path / "b.ckpt", tmp_path / "again")
    names = sorted(p.name for p in first.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert names == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in names:
        assert (first / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    before, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "b.ckpt"))
    assert before["hyper_parameters"]["config"]["model"] == after["hyper_parameters"]["config"]["model"]
    assert set(before["state_dict"]) == set(after["state_dict"])
    for name, value in before["state_dict"].items():
        assert torch.equal(value, after["state_dict"][name]), name
        assert value.dtype == after["state_dict"][name].dtype, name


def test_mtp_weights_carry_the_names_of_the_released_checkpoints(tmp_path: Path) -> None:
    done = export(save_checkpoint(build(model_of("mixed")), tmp_path / "a.ckpt"), tmp_path / "hf", with_tokenizer=False)
    expected = "e_proj.weight h_proj.weight enorm.weight hnorm.weight norm.weight hc_head_fn hc_head_base hc_head_scale hc_attn_fn hc_ffn_scale"
    expected += " attn.wq_a.weight attn.attn_sink attn_norm.weight ffn.gate.bias ffn.experts.4.w2.weight ffn.shared_experts.w1.weight"
    assert {f"mtp.0.{name}" for name in expected.split()} <= set(done.mtp_tensors)
    assert all(name.startswith("mtp.0.") for name in done.mtp_tensors)
    assert not any(name.startswith("mtp") for name in done.tensors)
    assert {"layers.1.attn.indexer.compressor.ape", "layers.0.ffn.gate.tid2eid", "hc_head_fn", "layers.0.hc_attn_fn"} <= set(done.tensors)


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_every_tensor(tied: bool, mtp: bool, tmp_path: Path) -> None:
    """compare_with_class raises on a missing, unexpected or mismatched key and on other logits."""
    config = dataclasses.replace(model_of("mixed"), tie_word_embeddings=tied, mtp=MTPConfig(enabled=mtp), index_topk=None)
    path = save_checkpoint(build(config), tmp_path / "a.ckpt")
    export(path, tmp_path / "hf", with_tokenizer=False)
    assert "loads every tensor" in compare_with_class(path, tmp_path / "hf")
    assert read_directory(tmp_path / "hf").model == config


def test_check_takes_widths_that_the_grouped_product_of_the_class_refuses(tmp_path: Path) -> None:
    config = model_of("window")
    path = save_checkpoint(build(dataclasses.replace(config, moe=dataclasses.replace(config.moe, moe_intermediate_size=14))), tmp_path / "a.ckpt")
    assert "loads every tensor" in compare_with_class(path, export(path, tmp_path / "hf", with_tokenizer=False).out)


def test_check_notices_a_wrong_and_a_missing_tensor(exported: tuple[Path, Path]) -> None:
    from safetensors.torch import load_file, save_file

    path, folder = exported
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "layers.2.attn.attn_sink": tensors["layers.2.attn.attn_sink"] + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="differ"):
        compare_with_class(path, folder)
    save_file({n: v for n, v in tensors.items() if n != "layers.2.attn.attn_sink"}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing_keys.*sinks"):
        compare_with_class(path, folder)
    with pytest.raises(ConfigError, match=r"missing layers\.2\.attn\.attn_sink"):
        read_directory(folder)


def test_directory_of_transformers_is_imported_with_equal_weights(tmp_path: Path) -> None:
    """Its hash tables are zero until loaded, and it writes kv_norm under another name than it reads."""
    model = transformers_directory(tmp_path / "hf")
    found = import_directory(tmp_path / "hf", tmp_path / "a.ckpt")
    assert not found.model.mtp.enabled
    assert "all zero" in found.notes[0]
    decoder = build(found.model, shake=False)
    decoder.load_state_dict(found.weights)
    tokens = random_tokens(37)
    with torch.no_grad():
        assert (logits_of(decoder, tokens) - model.eval()(tokens[None]).logits[0]).abs().max() < 1e-5
    export(tmp_path / "a.ckpt", tmp_path / "back", with_tokenizer=False)
    again = type(model).from_pretrained(tmp_path / "back", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_zero_hash_tables_are_drawn_on_request(tmp_path: Path) -> None:
    transformers_directory(tmp_path / "hf")
    before = torch.get_rng_state()
    found = read_directory(tmp_path / "hf", hash_seed=7)
    assert torch.equal(before, torch.get_rng_state())
    tables = [value for name, value in found.weights.items() if name.endswith("tid2eid")]
    assert len(tables) == found.model.moe.num_hash_layers == 1
    assert all((table.sort(1).values.diff(dim=1) > 0).all() for table in tables)  # distinct experts per token
    assert torch.equal(read_directory(tmp_path / "hf", hash_seed=7).weights["layers.0.ffn.gate.tid2eid"], tables[0])


def test_weights_in_bf16_and_in_shards_are_read(tmp_path: Path) -> None:
    model = transformers_directory(tmp_path / "hf")
    model.bfloat16().save_pretrained(tmp_path / "half", max_shard_size="100KB")
    assert (tmp_path / "half" / "model.safetensors.index.json").is_file()
    found = read_directory(tmp_path / "half")
    assert all(v.dtype in (torch.float32, torch.int64) for v in found.weights.values())
    assert torch.equal(found.weights["head.weight"], model.lm_head.weight.float())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny_config(hyper_connections=HyperConnectionsConfig(enabled=False)), "hyper_connections"),
        (tiny_config(moe=MoEConfig(enabled=False)), "mixture of experts"),
        (tiny_config(moe=MoEConfig(n_shared_experts=2)), "one shared expert"),
        (tiny_config(compress_ratios=(8, 4, 16, 4, 0)), r"HCA ratios \[8, 16\]"),
        (tiny_config(head_dim=49, qk_rope_head_dim=8), "rounded fraction"),
    ],
)
def test_what_the_class_cannot_express_is_refused_with_the_reason(config: ModelConfig, reason: str, tmp_path: Path) -> None:
    path = save_checkpoint(build(config), tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=reason) as refusal:
        export(path, tmp_path / "hf", with_tokenizer=False)
    assert "--form own" in str(refusal.value)
    assert not (tmp_path / "hf").exists()
    export(path, tmp_path / "own", form="own", with_tokenizer=False)
    found = import_directory(tmp_path / "own", tmp_path / "b.ckpt")
    assert found.model == config
    assert all(torch.equal(v, found.weights[n]) for n, v in build(config).state_dict().items())
    export(tmp_path / "b.ckpt", tmp_path / "again", form="own", with_tokenizer=False)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        hf_config(plain_config(), eos=None)
    assert "hyper_connections" in str(refusal.value)
    assert "moe.enabled" in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128}}, "have the ratio 4"),
        ({"layer_types": None, "compress_ratios": None}, "neither layer_types nor compress_ratios"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"model_type": "llama"}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}}, "magnitude"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_foreign_configurations_are_refused(change: dict[str, Any], reason: str) -> None:
    content = {k: v for k, v in {**hf_config(model_of("mixed"), eos=None), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=reason):
        model_config(content, has_mtp=True, name="x")


def test_no_public_value_of_the_cases_is_the_default_of_the_class() -> None:
    """A key that config.json forgot would go unnoticed where its value happens to be the default."""
    from transformers import DeepseekV4Config

    content, default = hf_config(dataclasses.replace(model_of("CSA"), tie_word_embeddings=True), eos=7), DeepseekV4Config().to_dict()
    fixed = ("scoring_func", "norm_topk_prob", "hidden_act", "num_key_value_heads", "n_shared_experts", "attention_bias", "attention_dropout")
    fixed += ("model_type", "transformers_version", "use_cache", "pad_token_id", "num_nextn_predict_layers", "compress_rates")
    assert [key for key, value in content.items() if key in default and key not in fixed and default[key] == value] == []
    assert hf_config(model_of("HCA"), eos=None)["compress_rates"] != default["compress_rates"]


def test_released_form_alone_is_enough() -> None:
    """A file as DeepSeek writes it: no layer_types, no compress_rates, no section of ours."""
    config = dataclasses.replace(model_of("mixed"), compress_ratios=(0, 4, 128, 4, 0))
    extra = ("layer_types", "compress_rates", "mlp_layer_types", "csa_lightning")
    content = {k: v for k, v in hf_config(config, eos=1).items() if k not in extra}
    found = model_config(content, has_mtp=True, name="tiny")
    assert dataclasses.replace(found, moe=dataclasses.replace(found.moe, dense_intermediate_size=0), mtp=config.mtp) == dataclasses.replace(
        config, moe=dataclasses.replace(config.moe, dense_intermediate_size=0)
    )


def test_small_hca_ratio_goes_through_the_compress_rates() -> None:
    content = hf_config(model_of("mixed"), eos=None)
    assert content["compress_rates"] == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    assert content["layer_types"][2] == "heavily_compressed_attention"
    assert content["compress_ratios"] == [0, 4, 8, 4, 0]


def test_tokenizer_gives_the_ids_that_the_model_was_trained_on(exported: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    _, folder = exported
    ours, theirs = BPETokenizer.train(TEXTS, 300), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS[:2], " leading space", "tab\tand\n\nlines ", "é漢\U0001f600"]:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos == json.loads((folder / "config.json").read_text())["eos_token_id"]


def test_bytes_tokenizer_has_a_form_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    BytesTokenizer().save(tmp_path / "bytes.json")
    path = save_checkpoint(build(dataclasses.replace(model_of("window"), vocab_size=257)), tmp_path / "a.ckpt")
    export(path, tmp_path / "hf", tokenizer=str(tmp_path / "bytes.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "ab c\n\té漢" + "".join(map(chr, range(128)))
    assert theirs(text)["input_ids"] == list(text.encode())
    assert theirs.decode(list(text.encode())) == text
    assert theirs.eos_token_id == 256


def test_symbols_of_the_recall_task_have_a_form_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = RecallTokenizer(RecallConfig(key_space=4, value_space=4))
    for name, content in tokenizer_files(ours, dataclasses.replace(model_of("window"), vocab_size=64)).items():
        (tmp_path / name).write_text(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "f3 k1 v2 f31 k3 v0 ."
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos == 0


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    BPETokenizer.train(TEXTS, 300).save(tmp_path / "tok.json")
    path = save_checkpoint(build(model_of("window")), tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=r"ids, more than model\.vocab_size=61"):
        export(path, tmp_path / "hf", tokenizer=str(tmp_path / "tok.json"))


def test_tokenizer_of_a_run_is_made_again_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --tokenizer it comes from the run's data; a corpus that has changed since is noticed, and nothing is written."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    run(*TINY, "run_dir=out", "model.vocab_size=300", "data.tokenizer.name=bpe", "data.tokenizer.vocab_size=280")
    export("out", "hf")
    ours = next((tmp_path / "data_cache").glob("*/tokenizer.json"))
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == ours.read_bytes()
    for file in (tmp_path / "text").iterdir():
        file.write_text(f"{file.name}: other words altogether, zebras and quaggas " * 20)
    with pytest.raises(ConfigError, match=r"the corpus has changed.*--tokenizer FILE"):
        export("out", "second")
    assert not (tmp_path / "second").exists()
    (tmp_path / "text").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot be made again"):
        export("out", "second")
    export("out", "second", tokenizer="hf/tokenizer.json")
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == ours.read_bytes()


def test_imported_checkpoint_starts_a_run(exported: tuple[Path, Path], tmp_path: Path) -> None:
    found = import_directory(exported[1], tmp_path / "b.ckpt")
    decoder = build(found.model, seed=77)
    load_initial_weights(decoder, tmp_path / "b.ckpt")
    assert all(torch.equal(value, found.weights[name]) for name, value in decoder.state_dict().items())


def test_nothing_is_overwritten(exported: tuple[Path, Path], tmp_path: Path) -> None:
    path, folder = exported
    with pytest.raises(ConfigError, match="no empty folder"):
        export(path, folder, with_tokenizer=False)
    with pytest.raises(ConfigError, match="exists"):
        import_directory(folder, path)


def test_command_line(exported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = exported
    out, back = str(tmp_path / "cli"), str(tmp_path / "cli.ckpt")
    main(["export", "--checkpoint", str(path), "--out", out, "--no-tokenizer", "--check"])
    said = " ".join(capsys.readouterr().out.split())
    assert "mtp.0.*" in said
    assert "builds no MTP block and ignores them" in said
    assert "loads every tensor" in said
    main(["import", out, "--out", back])
    assert Path(back).is_file()
    assert (tmp_path / "cli.model.yaml").is_file()


def test_module_runs_and_fails_with_one_message(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "csa_model.hf", "import", str(tmp_path), "--out", str(tmp_path / "x.ckpt")]
    failed = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 1
    assert failed.stderr.startswith("ConfigError: ")
    assert "Traceback" not in failed.stderr
