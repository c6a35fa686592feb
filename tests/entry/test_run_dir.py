# SPDX-License-Identifier: Apache-2.0
"""Where a run may write, and what it records."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import yaml

from csa_model import run_dir
from csa_model.config import ConfigError, ExperimentConfig, from_mapping
from csa_model.run_dir import RunDirectory, open_run, refuse, remove_empty
from tests.entry.helpers import load


def with_run_dir(path: Path | None, runs: Path = Path("runs")) -> ExperimentConfig:
    return dataclasses.replace(load(), run_dir=None if path is None else str(path), runs_dir=str(runs))


def begin(path: Path) -> RunDirectory:
    config = with_run_dir(path)
    run = open_run(config, None)
    run.record(config, ["seed=1"], {"sha256": "x"}, {"attend": "plain"})
    (run.checkpoints / "last.ckpt").write_bytes(b"")
    return run


def test_run_dir_is_made_if_absent(tmp_path: Path) -> None:
    run = open_run(with_run_dir(tmp_path / "deep" / "new"), None)
    assert run.path == tmp_path / "deep" / "new"
    assert not run.continued
    assert run.checkpoints.is_dir()
    assert run.plots.is_dir()


def test_a_folder_that_holds_a_run_is_refused_unless_its_own_checkpoint_continues_it(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    config = with_run_dir(run.path)
    with pytest.raises(ConfigError, match=r"already holds a run.*ckpt_path=last"):
        open_run(config, None)
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run(config, tmp_path / "other" / "checkpoints" / "last.ckpt")
    assert open_run(config, run.checkpoints / "last.ckpt").continued


def test_a_file_and_a_folder_of_something_else_are_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("x")
    for name, message in (("file", "is a file"), ("thesis", "holds no run")):
        with pytest.raises(ConfigError, match=message):
            refuse(with_run_dir(tmp_path / name), None)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


@pytest.mark.parametrize("key", ["run_dir", "runs_dir"])
def test_a_folder_below_a_file_is_refused_before_any_work(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("x")
    config = dataclasses.replace(load(), **{key: str(tmp_path / "file" / "sub" / "run")})
    with pytest.raises(ConfigError, match=rf"{key}=.*sub/run cannot be made: .*file is a file"):
        refuse(config, None)


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "csa").write_text("a file where the task's folder should be")
    with pytest.raises(ConfigError, match=r"runs_dir=.*the run folder cannot be made"):
        open_run(with_run_dir(None, tmp_path), None)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "2026-01-01_00-00-00")
    config = with_run_dir(None, tmp_path)
    paths = [open_run(config, None).path.relative_to(tmp_path) for _ in range(3)]
    assert [str(p) for p in paths] == ["csa/2026-01-01_00-00-00", "csa/2026-01-01_00-00-00_2", "csa/2026-01-01_00-00-00_3"]


def test_the_empty_folder_of_a_multirun_job_is_used_and_a_used_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "0_seed-1").mkdir()
    config = with_run_dir(None, tmp_path)
    assert open_run(config, None, tmp_path / "0_seed-1").path == tmp_path / "0_seed-1"
    assert open_run(config, None, tmp_path / "0_seed-1").path == tmp_path / "0_seed-1_2"


def test_what_is_recorded_reads_back(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    assert from_mapping(yaml.safe_load(run.config_file.read_text())) == with_run_dir(run.path)
    assert run.overrides_file.read_text() == "seed=1\n"
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["backend"] == {"attend": "plain"}
    git = json.loads((run.path / "git.json").read_text())
    assert set(git) == {"sha", "dirty", "changed"}
    assert json.loads((run.path / "corpus.json").read_text()) == {"sha256": "x"}


def test_a_continued_run_keeps_its_earlier_config(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    before = run.config_file.read_text()
    again = open_run(with_run_dir(run.path), run.checkpoints / "last.ckpt")
    again.record(dataclasses.replace(with_run_dir(run.path), seed=9), [], {}, {})
    assert (run.path / "config.before_resume_1.yaml").read_text() == before
    assert yaml.safe_load(run.config_file.read_text())["seed"] == 9


def test_git_state_without_git_is_unknown_and_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "REPOSITORY", tmp_path)
    assert run_dir.git_state() == {"sha": None, "dirty": None, "changed": []}


def test_empty_job_folders_go_away_with_the_sweep_they_were_made_for(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "0").mkdir(parents=True)
    (sweep / "1").mkdir()
    (sweep / "multirun.yaml").write_text("")
    remove_empty(sweep / "0")
    assert (sweep / "1").is_dir()
    assert (sweep / "multirun.yaml").exists()
    remove_empty(sweep / "1")
    assert not sweep.exists()


def test_a_folder_with_content_is_never_removed(tmp_path: Path) -> None:
    run = begin(tmp_path / "sweep" / "0")
    remove_empty(run.path)
    assert run.config_file.exists()
