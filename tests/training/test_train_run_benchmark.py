# SPDX-License-Identifier: Apache-2.0
"""The benchmark of train.py itself: a whole run of it, which windows count, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import train_run
from csa_model.data.corpus import build_corpus
from csa_model.data.stream import RowStream
from csa_model.overrides import check_arguments
from tests.entry.helpers import CONFIGS, checked

SMALL = [
    *("model.num_hidden_layers=3", "model.compress_ratios=[0,4,8,0]", "model.hidden_size=16", "model.num_attention_heads=2", "model.head_dim=16"),
    *("model.moe.n_routed_experts=4", "model.moe.moe_intermediate_size=8", "model.mtp.enabled=false"),
]


def write_run(folder: Path, speeds: Sequence[float], every: int = 10, extra: Sequence[str] = ()) -> Path:
    """A run folder with a window per speed, validation after the last one, and `extra` lines of metrics.csv."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    lines = [f"{every * (i + 1)},{speed},{9 - i}," for i, speed in enumerate(speeds)]
    text = "\n".join(["step,throughput/tokens_per_second,memory/peak_gib,val/loss", *lines, *extra, f"{every * len(speeds)},,,3.5"])
    (folder / "metrics.csv").write_text(text + "\n")
    (folder / "summary.json").write_text(json.dumps({"backend": "triton", "cuda_graph": "yes"}))
    return folder


def test_train_py_is_measured_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "result.json"
    options = ["--device", "cpu", "--model", "nano", "--tokens", "32", "--steps", "10", "--window", "2", "--out", str(target)]
    monkeypatch.setattr(sys, "argv", ["train_run", *options, *SMALL])
    assert train_run.main() == 0, capsys.readouterr().out
    record = json.loads(target.read_text())
    (point,) = record["points"]
    assert len(point["windows"]) == 4  # five windows, without the first
    assert min(point["windows"]) <= round(point["tokens_per_second"], 1) <= max(point["windows"])
    assert point["step_ms"] == pytest.approx(32e3 / point["tokens_per_second"])
    assert (record["model"], record["backend"], record["window_steps"], record["further_arguments"]) == ("nano", "unfused", 2, SMALL)
    assert (point["tokens"], point["steps"], point["backend"]) == (32, 10, "unfused")
    assert "peak_gib" not in point  # a processor has no such counter
    assert "git_sha" in record


def test_the_first_window_counts_neither_for_speed_nor_for_memory(tmp_path: Path) -> None:
    found = train_run.figures(write_run(tmp_path / "run", [1.0, 100.0, 104.0, 102.0, 90.0, 103.0]), 204, 60, 10)
    assert found["windows"] == [100.0, 104.0, 102.0, 90.0, 103.0]
    assert (found["tokens_per_second"], found["step_ms"]) == (102.0, 2000.0)
    assert found["spread"] == pytest.approx(3 / 102)  # from 100 to 103: one slow window does not count
    assert (found["slowest_window"], found["fastest_window"], found["peak_gib"], found["cuda_graph"]) == (90.0, 104.0, 8.0, "yes")


def test_a_run_whose_windows_hold_a_checkpoint_or_a_validation_is_refused(tmp_path: Path) -> None:
    validated = write_run(tmp_path / "validated", [1.0, 2.0, 3.0], extra=["20,,,3.9"])
    with pytest.raises(ValueError, match="not free of validation at step 20"):
        train_run.figures(validated, 32, 30, 10)
    saved = write_run(tmp_path / "saved", [1.0, 2.0, 3.0])
    (saved / "checkpoints" / "step000010.ckpt").touch()
    with pytest.raises(ValueError, match=r"not free of step000010\.ckpt"):
        train_run.figures(saved, 32, 30, 10)
    with pytest.raises(ValueError, match="fewer than two windows"):
        train_run.figures(write_run(tmp_path / "short", [1.0, 2.0]), 32, 20, 10)


@pytest.mark.parametrize("tokens", train_run.LENGTHS)
def test_every_row_of_a_run_is_one_whole_document(tmp_path: Path, tokens: int) -> None:
    """With the arguments that train.py gets, which must compose and be legal."""
    options = train_run.overrides("small", "triton", "cuda", tokens, train_run.steps_for(tokens), 10)
    train_run.write_rows(tmp_path / "rows.bin", tokens, 5, 8192)
    check_arguments(options, CONFIGS)
    config, _ = checked(*options, f"data.path={tmp_path / 'rows.bin'}")
    corpus = build_corpus(config.data, vocab_size=config.model.vocab_size, seed=1)
    assert corpus.train.lengths.tolist() == [tokens] * 5
    assert corpus.validation.lengths.tolist() == [tokens]
    stream = RowStream(corpus.train, config.data.tokens_per_batch, (4, 128), seed=1)
    assert stream.rows_of_epoch(0) == 5
    assert config.trainer.val_every_steps == config.trainer.max_steps < config.callbacks.checkpoint.every_n_steps
    assert 100 <= config.trainer.max_steps <= 400


def test_a_run_that_fails_is_told_and_the_next_length_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        options = dict(item.split("=", 1) for item in command[2:])
        if options["data.sequence_length"] == "32":
            return subprocess.CompletedProcess(command, 1, "error: out of memory\n")
        if options["data.sequence_length"] == "48":
            raise subprocess.TimeoutExpired(command, 1)
        assert Path(options["data.path"]).is_file()
        write_run(Path(options["run_dir"]), [1.0, 2.0, 2.0, 2.0])
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(train_run.subprocess, "run", train)
    monkeypatch.setattr(train_run, "provenance", dict)
    target = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device=cpu", "--model=nano", "--steps=40", f"--out={target}", "--tokens", "32", "48", "64"])
    assert train_run.main() == 1
    points = json.loads(target.read_text())["points"]
    assert [point.get("failed") for point in points] == ["error: out of memory", f"no end after {train_run.LIMIT_S} s", None]
    assert points[2]["tokens_per_second"] == 2.0


def test_what_keeps_the_windows_clean_may_not_be_set_behind_their_back(capsys: pytest.CaptureFixture[str]) -> None:
    args, extra = train_run.arguments(["data.num_workers=2", "--tokens", "4096"])
    assert (args.model, args.backend, args.tokens, extra) == ("small", "triton", [4096], ["data.num_workers=2"])
    for wrong in (["trainer.val_every_steps=5"], ["callbacks.checkpoint.every_n_steps=5"], ["run_dir=x"], ["--steps", "20"], ["--step-s"], ["word"]):
        with pytest.raises(SystemExit):
            train_run.arguments(wrong)
    assert "set here" in capsys.readouterr().err
