# SPDX-License-Identifier: Apache-2.0
"""Which file ckpt_path means, what is no checkpoint, and which settings may differ from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from csa_model.config import ConfigError
from csa_model.resume import backend_change, compare, read_config, resolve
from csa_model.run_dir import plain
from tests.entry.helpers import load


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    torch.save({"hyper_parameters": {"config": plain(load())}, "global_step": 4}, folder / "checkpoints" / "last.ckpt")
    return folder


def test_last_a_file_a_run_folder_and_a_checkpoint_folder_name_the_same_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also relative, from another working directory."""
    monkeypatch.chdir(run.parent.parent)
    relative = run.relative_to(Path.cwd())
    expected = run / "checkpoints" / "last.ckpt"
    assert resolve("last", str(relative)) == expected
    for path in (relative, relative / "checkpoints", relative / "checkpoints" / "last.ckpt"):
        assert resolve(str(path), None) == expected
    assert resolve("last.ckpt", str(relative)) == expected
    assert resolve(None, str(relative)) is None


def test_a_missing_checkpoint_is_named_with_what_is_legal(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"ckpt_path=nowhere.ckpt.*legal"):
        resolve("nowhere.ckpt", None)
    with pytest.raises(ConfigError, match=r"ckpt_path=last.*run_dir"):
        resolve("last", None)
    (run / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"has no checkpoints/last.ckpt"):
        resolve("last", str(run))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 truncated"])
def test_a_file_that_is_no_checkpoint_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x.ckpt cannot be read as a checkpoint"):
        read_config(tmp_path / "x.ckpt")


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match="no checkpoint of this program"):
        read_config(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    "override",
    ["teacher=compressed_only", "backend=triton", "model.index_topk=16", "stage=dense", "optimizer.lr=1e-4", "data.sequence_length=64", "seed=3"],
)
def test_settings_that_make_another_experiment_are_named_and_refused(run: Path, override: str) -> None:
    """A teacher or backend that differs is named, not ignored."""
    stored, step = read_config(run / "checkpoints" / "last.ckpt")
    assert step == 4
    key = {"teacher": "teacher.name", "backend": "backend.name", "stage": "stage.name"}.get(override.split("=")[0], override.split("=")[0])
    with pytest.raises(ConfigError, match="trained with other settings") as error:
        compare(run, stored, load(override))
    assert f"{key}: " in str(error.value)
    assert "init_from" in str(error.value)


def test_another_number_of_rows_to_a_step_is_refused_however_it_comes_about(run: Path) -> None:
    stored, _ = read_config(run / "checkpoints" / "last.ckpt")
    with pytest.raises(ConfigError, match=r"rows per optimizer step .*: 1 in the checkpoint, 4 now"):
        compare(run, stored, load("trainer.accumulate_grad_batches=2", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"))
    two = dict(plain(load("trainer.accumulate_grad_batches=2")))
    assert compare(run, two, load("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"))  # two processes of one row each, named but allowed
    assert compare(run, two, load("trainer=ddp", "trainer.devices=auto", "trainer.accelerator=cpu"))


def test_length_and_reporting_may_change_and_are_named(run: Path) -> None:
    stored, _ = read_config(run / "checkpoints" / "last.ckpt")
    assert compare(run, stored, load()) == []
    changed = compare(run, stored, load("trainer.max_steps=900", "logger=wandb", "data.num_workers=2", "task=other"))
    assert "trainer.max_steps: 300 in the checkpoint, 900 now" in changed
    assert any(line.startswith("data.num_workers") for line in changed)
    assert not any(line.startswith("task") for line in changed)


def test_settings_that_an_old_checkpoint_does_not_know_are_no_difference(run: Path) -> None:
    stored = dict(plain(load()))
    stored["teacher"] = {"name": "full_csa", "gone": 1}
    assert compare(run, stored, dataclasses.replace(load())) == []


def test_a_run_that_auto_puts_on_another_backend_says_so(run: Path) -> None:
    """A GPU run under backend=auto that goes on on a CPU changes its kernels."""
    checkpoint = run / "checkpoints" / "last.ckpt"
    (run / "config.yaml").write_text("")
    (run / "summary.json").write_text('{"backend": "triton"}')
    assert backend_change(checkpoint, "triton") == []
    assert backend_change(checkpoint, "unfused") == ["backend: triton before, auto takes unfused here"]
    (run / "summary.json").unlink()
    assert backend_change(checkpoint, "unfused") == backend_change(None, "unfused") == []
