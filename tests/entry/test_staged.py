# SPDX-License-Identifier: Apache-2.0
"""experiment=staged: three stages from one command, what each may change, resuming, and the report of the switch to sparse attention."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml

from csa_model import staged
from csa_model.lit_module import CSALitModule
from tests.entry.helpers import CONFIGS, TINY, fails, load, run, write_text

PLAN = (*(f"staged.{name}.{key}" for name in staged.STAGES for key in ("steps=3", "warmup_steps=1")), "staged.sparse.decay_steps=1")
ONE_STAGE = tuple(o for o in TINY if not o.startswith("trainer.max_steps"))
STAGED = (*ONE_STAGE, "experiment=staged", *PLAN, "callbacks.checkpoint.every_n_steps=1", "callbacks.indexer_diagnostics.enabled=false")
FOLDERS = ("1_dense", "2_indexer_warmup", "3_sparse")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def test_stages_are_those_of_the_config_group() -> None:
    for name, stage in staged.STAGES.items():
        assert dataclasses.asdict(stage) == yaml.safe_load((CONFIGS / "stage" / f"{name}.yaml").read_text())


def test_one_command_runs_all_stages_and_reports_the_switch(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*STAGED, "run_dir=out")
    out = workplace / "out"
    assert {p.name for p in out.iterdir()} == {*FOLDERS, "staged.json", "overrides.txt", "report.md", "losses.png"}
    dense, warmed, sparse = (weights(out / name) for name in FOLDERS)
    trained = moved(dense, warmed)
    assert trained
    assert all(".attn.indexer." in name for name in trained)  # bit for bit: no weight decay, no router bias, no LM gradient
    indexers = {name for name in dense if ".attn.indexer." in name}
    assert trained == indexers
    assert {name for name in moved(warmed, sparse) if ".attn.indexer." not in name} > {"decoder.embed.weight", "decoder.head.weight"}
    configs = [yaml.safe_load((out / name / "config.yaml").read_text()) for name in FOLDERS]
    assert [c["stage"]["attention"] for c in configs] == ["dense", "dense", "sparse"]
    assert [c["data_seed"] for c in configs] == [1, 2, 3]
    assert [c["trainer"]["max_steps"] for c in configs] == [3, 3, 3]
    assert configs[1]["init_from"].endswith("1_dense/checkpoints/last.ckpt")
    facts = json.loads((out / "staged.json").read_text())
    assert facts["status"] == "finished"
    losses = facts["losses"]
    assert losses["dense"]["dense"] == losses["indexer_warmup"]["dense"]  # the same trunk
    assert facts["switch_cost"] == losses["indexer_warmup"]["sparse"] - losses["indexer_warmup"]["dense"] != 0
    for name in FOLDERS:  # the report measures what validation measured
        measured = json.loads((out / name / "summary.json").read_text())["validation_loss"]
        assert measured == pytest.approx(losses[name[2:]]["sparse" if name == "3_sparse" else "dense"], abs=1e-5)
    assert "cost of the switch" in capfd.readouterr().out
    assert "| indexer_warmup | 3 |" in (out / "report.md").read_text()


@pytest.mark.parametrize("at", ["dense", "indexer_warmup", "sparse"])
def test_a_stage_that_was_interrupted_goes_on_to_the_same_weights(at: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage is resumed by the one command; stages that were finished are not touched."""
    run(*STAGED, "run_dir=whole")
    original = CSALitModule.training_step

    def broken(self: CSALitModule, batch: object, batch_idx: int) -> torch.Tensor:
        if self.config.stage.name == at and self.trainer.global_step == 2:
            raise RuntimeError("pulled the plug")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(CSALitModule, "training_step", broken)
    with pytest.raises(SystemExit):
        run(*STAGED, "run_dir=cut")
    monkeypatch.setattr(CSALitModule, "training_step", original)
    index = list(staged.STAGES).index(at)
    finished = {p: p.stat().st_mtime_ns for name in FOLDERS[:index] for p in (workplace / "cut" / name).rglob("*")}
    assert not (workplace / "cut" / "report.md").exists()
    run("run_dir=cut", "ckpt_path=last")
    assert {p: p.stat().st_mtime_ns for p in finished} == finished
    for name in FOLDERS:
        assert not moved(weights(workplace / "whole" / name), weights(workplace / "cut" / name)), name
    ours, theirs = (json.loads((workplace / name / "staged.json").read_text())["losses"] for name in ("cut", "whole"))
    assert ours == theirs


def test_a_stage_that_never_reached_a_checkpoint_begins_again(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = CSALitModule.on_train_batch_start

    def broken(self: CSALitModule, batch: object, batch_idx: int) -> None:
        if self.config.stage.name == "indexer_warmup":
            raise RuntimeError("pulled the plug")
        original(self, batch, batch_idx)

    monkeypatch.setattr(CSALitModule, "on_train_batch_start", broken)
    with pytest.raises(SystemExit):
        run(*STAGED, "run_dir=out")
    monkeypatch.setattr(CSALitModule, "on_train_batch_start", original)
    run("run_dir=out", "ckpt_path=last")
    assert {p.name for p in (workplace / "out").iterdir() if p.is_dir()} == {*FOLDERS, "2_indexer_warmup_aborted_1"}
    assert json.loads((workplace / "out" / "staged.json").read_text())["status"] == "finished"


def test_the_folder_of_a_stage_resumes_like_any_run(workplace: Path) -> None:
    run(*STAGED, "run_dir=out")
    run("run_dir=out/3_sparse", "ckpt_path=last", "trainer.max_steps=5")
    assert json.loads((workplace / "out" / "3_sparse" / "summary.json").read_text())["steps"] == 5


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["teacher=none"], "teacher=none would train nothing"),
        (["trainer=ddp", "trainer.devices=2"], "a staged run is one process"),
        (["staged.dense.steps=0"], "staged.dense.steps=0"),
        (["trainer.max_steps=7"], "staged.NAME.KEY"),
        (["scheduler=wsd"], "staged.NAME.KEY"),
        (["stage=dense"], "staged.NAME.KEY"),
        (["staged.sparse.decay_steps=9"], "scheduler.decay_steps=9"),
        (["run_dir=text"], "is not empty"),
        (["run_dir=new", "ckpt_path=last"], "new"),
        (["staged.warmup.steps=3"], "staged.warmup"),
    ],
)
def test_what_cannot_work_is_refused_before_any_stage(
    arguments: list[str], fragment: str, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fragment in fails(capfd, *STAGED, *arguments)
    assert not (workplace / "runs").exists()
    assert not (workplace / "new").exists()


def test_a_finished_staged_run_is_not_overwritten_and_other_settings_are_refused(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*STAGED, "run_dir=out")
    assert "already holds a staged run" in fails(capfd, *STAGED, "run_dir=out")
    assert "teacher.name" in fails(capfd, "run_dir=out", "ckpt_path=last", "teacher=compressed_only")


def test_arguments_of_a_stage_compose_to_its_configuration(workplace: Path) -> None:
    config = load(*STAGED, "scheduler=cosine", "optimizer.lr=0.003", "staged.sparse.lr_multiplier=0.5")
    for name in staged.STAGES:
        stage = staged.stage_config(config, name, workplace / "a b")
        given = staged.stage_arguments([*STAGED, "scheduler=cosine", "optimizer.lr=0.003", "staged.sparse.lr_multiplier=0.5", "init_from=x"], stage)
        assert stage.optimizer.lr == 0.003 * (0.5 if name == "sparse" else 1)
        assert load(*given) == stage
