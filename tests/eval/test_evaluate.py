# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import eval.evaluate
from csa_model.config import ConfigError, DataConfig, ExperimentConfig, ModelConfig, MoEConfig, MTPConfig, RecallConfig
from csa_model.decoder import Decoder
from csa_model.run_dir import plain
from eval.evaluate import EvalConfig, evaluate, main, print_result, read_options
from kernels import BackendUnsupported, get_backend

RECALL = RecallConfig(pairs=3, key_space=6, value_space=6, distances=(16, 24), documents=8)
CONFIG = ExperimentConfig(
    model=ModelConfig(
        name="tiny",
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8,
        qk_rope_head_dim=4,
        q_lora_rank=8,
        o_groups=1,
        o_lora_rank=8,
        sliding_window=2,
        compress_ratios=(0, 4, 0),
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        moe=MoEConfig(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, num_hash_layers=1),
        mtp=MTPConfig(enabled=False),
    ),
    data=DataConfig(name="recall", sequence_length=64, tokens_per_batch=128, validation_batches=2, recall=RECALL),
    seed=5,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoint of an untrained decoder."""
    torch.manual_seed(0)
    decoder = Decoder(CONFIG.model, get_backend("unfused"), device_type="cpu")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 5\n")
    save(tmp_path / "run", decoder, CONFIG)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def no_figure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure costs a second; only the test that looks for it draws one."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(eval.evaluate, "plot_evaluation", lambda *arguments: None)


def save(run: Path, decoder: Decoder, config: ExperimentConfig) -> None:
    state = {f"decoder.{name}": value for name, value in decoder.state_dict().items()}
    torch.save({"state_dict": state, "hyper_parameters": {"config": plain(config)}, "global_step": 7}, run / "checkpoints" / "last.ckpt")


def options(run: Path, **changes: object) -> EvalConfig:
    return replace(EvalConfig(ckpt_path=str(run / "checkpoints" / "last.ckpt"), topk=(2, 4), query_rows=8, device="cpu"), **changes)  # type: ignore[arg-type]


def test_one_checkpoint_gives_figures_rows_and_a_picture(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(options(run))
    out = run / "eval" / "last"
    assert result.out == out
    facts = json.loads((out / "evaluation.json").read_text())
    assert (facts["step"], facts["arm"], facts["seed"], facts["trained_topk"]) == (7, "full_csa", 5, 4)
    assert facts["settings"]["rows"] == 2
    values = facts["yardsticks"]
    for name in (
        "loss_dense",
        "loss_sparse@2",
        "kl_dense_sparse@4",
        "recall_full_csa@2",
        "layer1/mass_compressed_only@4",
        "layer1/tv",
        "accuracy_dense/distance24",
    ):
        assert np.isfinite(values[name])
        assert facts["counts"][name] > 0
    rows = np.load(out / "rows.npz")
    assert rows["token/nll_dense"].astype(np.float64).mean() == pytest.approx(values["loss_dense"])
    assert (out / "evaluation.png").stat().st_size > 1000
    print_result(result)
    shown = capsys.readouterr().out
    for text in ("sparse@4 (trained k)", f"{values['loss_dense']:.5f}", "accuracy by distance", "KL(dense || sparse)"):
        assert text in shown


def test_an_evaluation_repeats_bit_for_bit(run: Path, tmp_path: Path) -> None:
    first, second = (evaluate(options(run, out=str(tmp_path / name))) for name in ("a", "b"))
    assert first.measured.values == second.measured.values
    for name, array in first.measured.arrays.items():
        np.testing.assert_array_equal(array, second.measured.arrays[name])


def test_weights_come_from_the_checkpoint(run: Path) -> None:
    before = evaluate(options(run)).measured.values["loss_dense"]
    decoder = Decoder(CONFIG.model, get_backend("unfused"), device_type="cpu")
    torch.nn.init.zeros_(decoder.head.weight)
    save(run, decoder, CONFIG)
    after = evaluate(options(run)).measured.values["loss_dense"]
    assert after == pytest.approx(np.log(48))
    assert after != before


def test_weights_that_do_not_fit_their_configuration_are_named(run: Path) -> None:
    other = Decoder(replace(CONFIG.model, hidden_size=32), get_backend("unfused"), device_type="cpu")
    save(run, other, CONFIG)
    with pytest.raises(ConfigError, match=r"checkpoint of another model(.|\n)*embed.weight"):
        evaluate(options(run))
    assert not (run / "eval").exists()


def test_files_that_are_no_checkpoint_of_this_program_are_refused(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    with pytest.raises(ConfigError, match="no such file"):
        evaluate(options(run, ckpt_path=str(file)))
    file.write_text("not a checkpoint")
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint"):
        evaluate(options(run, ckpt_path=str(file)))
    torch.save({"state_dict": {"layer.weight": torch.zeros(1)}}, file)
    with pytest.raises(ConfigError, match="no checkpoint of this program"):
        evaluate(options(run, ckpt_path=str(file)))


def test_a_corpus_that_changed_since_training_is_refused(run: Path) -> None:
    (run / "corpus.json").write_text('{"sha256": "older"}')
    with pytest.raises(ConfigError, match="was trained on the corpus older"):
        evaluate(options(run))


def test_rows_chooses_how_much_of_the_held_out_text_is_read(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(12):
        (text / f"{i}.txt").write_text(f"document {i} " * 20)
    data = DataConfig(
        name="text_files", path=str(text), cache_dir=str(tmp_path / "cache"), sequence_length=64, tokens_per_batch=128, validation_fraction=0.3
    )
    config = replace(CONFIG, model=replace(CONFIG.model, vocab_size=300), data=replace(data, tokenizer=replace(data.tokenizer, name="bytes")))
    save(run, Decoder(config.model, get_backend("unfused"), device_type="cpu"), config)
    with pytest.raises(ConfigError, match=r"rows=1000, but the held-out documents fill only \d+ packed rows"):
        evaluate(options(run, rows=1000))
    one, two = (evaluate(options(run, rows=n)).measured for n in (1, 2))
    assert 0 < one.counts["loss_dense"] < two.counts["loss_dense"]
    np.testing.assert_array_equal(two.arrays["token/nll_dense"][: one.counts["loss_dense"]], one.arrays["token/nll_dense"])
    assert one.values["bits_per_byte_dense"] > 0


def test_a_backend_that_cannot_run_here_is_refused_and_not_replaced(run: Path) -> None:
    with pytest.raises(ConfigError, match="unfused"):
        evaluate(options(run, backend="flash_mla"))
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnsupported):
            evaluate(options(run, backend="triton"))


def test_options_come_from_the_command_line_over_the_file() -> None:
    found = read_options(["ckpt_path=x", "topk=[16,4]", "rows=3", "out=null"])
    assert (found.topk, found.rows, found.out, found.query_rows, found.backend) == ((4, 16), 3, None, 256, "unfused")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topk=[4]"], "ckpt_path must be given"),
        (["ckpt_path=x", "top_k=[4]"], "unknown key 'top_k'; legal keys"),
        (["ckpt_path=x", "topk=[0]"], "different numbers >= 1"),
        (["ckpt_path=x", "topk=[4,4]"], "different numbers >= 1"),
        (["ckpt_path=x", "topk=8"], "topk must be a list"),
        (["ckpt_path=x", "rows=0"], "rows=0 is not legal"),
        (["ckpt_path=x", "rows=many"], "rows must be a whole number"),
        (["ckpt_path=x", "device=tpu"], "legal: auto, cpu, cuda"),
        (["last.ckpt"], "is not KEY=VALUE"),
    ],
)
def test_bad_options_are_refused_naming_the_key(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 1
    assert message in capsys.readouterr().err


def test_the_command_line_evaluates_and_says_where_the_results_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([f"ckpt_path={run}", "topk=[2]", "query_rows=4", "rows=1", "device=cpu"])
    assert str(run / "eval" / "last") in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "query_rows: 256" in capsys.readouterr().out
