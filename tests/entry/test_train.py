# SPDX-License-Identifier: Apache-2.0
"""`train.py` end to end on a tiny model: what a run leaves behind, how it goes on, and how it fails."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.entry.helpers import ROOT, TINY, fails, run, write_text


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text corpus, away from the source tree."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    return tmp_path


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


def steps(folder: Path, metric: str = "train/loss") -> list[int]:
    return [int(row["step"]) for row in rows(folder) if row.get(metric)]


def summary(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_everything_that_explains_it_in_one_folder(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*TINY, "run_dir=out")
    out = workplace / "out"
    expected = {"config.yaml", "overrides.txt", "git.json", "environment.json", "corpus.json", "metrics.csv", "checkpoints", "plots", "summary.json"}
    assert {p.name for p in out.iterdir()} == expected
    assert {p.name for p in workplace.iterdir()} == {"text", "out", "data_cache"}  # no outputs/, .hydra or lightning_logs anywhere
    assert {p.name for p in (out / "plots").iterdir()} == {"loss.png", "indexer.png", "mass.png"}
    recorded = [line.replace("data.path=text", f"data.path={workplace / 'text'}") for line in TINY]  # absolute: see the resume below
    assert (out / "overrides.txt").read_text().splitlines() == [*recorded, "run_dir=out"]
    assert yaml.safe_load((out / "config.yaml").read_text())["model"]["index_topk"] == 4
    facts = summary(out)
    assert facts["status"] == "finished"
    assert facts["steps"] == 2
    assert facts["cuda_graph"] == "none: the model does not run on an NVIDIA GPU"
    for key in ("validation_loss", "bits_per_byte", "unigram_loss", "unigram_bits_per_byte", "indexer_kl", "indexer_kl_uniform", "process_rss_gib"):
        assert isinstance(facts[key], float), key
    assert len(str(facts["initial_weights_sha256"])) == len(str(facts["corpus_sha256"])) == 64
    assert facts["data_order"]["seed"] == 1  # type: ignore[index]
    assert steps(out) == [1, 2]
    assert steps(out, "val/loss") == [2]
    # tensors and plain containers only
    checkpoint = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["config"]["teacher"]["name"] == "full_csa"
    shown = capfd.readouterr()
    assert "unigram model" in shown.out
    assert "unfused" in shown.out
    assert str(out.name) in shown.out
    assert shown.err.strip() == ""  # quiet: no tips, no known warnings


def test_a_run_goes_on_in_place_from_another_directory_without_repeating_its_overrides(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths, one logical run, the rows of the first steps stay."""
    run(*TINY, "run_dir=out", "logger=wandb")
    out = workplace / "out"
    first, identity = rows(out), (out / "wandb_run_id.txt").read_text()
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    run("run_dir=../out", "ckpt_path=last", "trainer.max_steps=4")
    assert rows(out)[: len(first)] == [{**row, **dict.fromkeys(set(rows(out)[0]) - set(row), "")} for row in first]
    assert steps(out) == [1, 2, 3, 4]
    assert summary(out)["steps"] == 4
    assert (out / "wandb_run_id.txt").read_text() == identity
    offline = sorted(p.name for p in (out / "wandb").iterdir() if p.name.startswith("offline-run"))
    assert offline
    assert all(name.endswith(identity.strip()) for name in offline)
    assert (out / "config.before_resume_1.yaml").exists()


def test_the_summary_of_a_resumed_run_shows_no_figure_of_before(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*TINY, "run_dir=out")
    assert isinstance(summary(workplace / "out")["indexer_kl"], float)
    capfd.readouterr()
    run("run_dir=out", "ckpt_path=last", "trainer.max_steps=3", "trainer.log_every_n_steps=1000")
    facts = summary(workplace / "out")
    assert (facts["resumed_at"], facts["steps"], facts["indexer_kl"]) == (2, 3, None)
    assert isinstance(facts["validation_loss"], float)
    assert "1 step in" in capfd.readouterr().out


def test_resuming_with_another_teacher_is_refused_by_name_and_leaves_the_run_alone(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The mismatch is named, not ignored."""
    run(*TINY, "run_dir=out")
    before = {p: p.stat().st_mtime_ns for p in (workplace / "out").rglob("*")}
    message = fails(capfd, "run_dir=out", "ckpt_path=last", "teacher=compressed_only", "trainer.max_steps=4")
    assert "teacher.name: full_csa in the checkpoint, compressed_only now" in message
    assert "already holds a run" in fails(capfd, *TINY, "run_dir=out")
    assert "raise trainer.max_steps" in fails(capfd, "run_dir=out", "ckpt_path=last")
    assert {p: p.stat().st_mtime_ns for p in (workplace / "out").rglob("*")} == before


def test_weights_only_start_lets_the_teacher_change_and_refuses_another_model(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*TINY, "run_dir=out", "stage=dense")
    run(*TINY, "run_dir=next", "init_from=out", "teacher=compressed_only", "stage=indexer_warmup")
    assert summary(workplace / "next")["arm"] == "compressed_only"
    message = fails(capfd, *TINY, "run_dir=third", "init_from=out", "model.hidden_size=32")
    assert "embed.weight" in message
    assert not (workplace / "third").exists()


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["teecher=full_csa"], ["teecher", "teacher"]),
        (["teacher=full-csa"], ["teacher=full-csa", "full_csa"]),
        (["backend=flash_mla"], ["backend=flash_mla", "flashmla"]),
        (["model.index_topk=-1"], ["model.index_topk=-1"]),
        (["teacher.coefficient=nan"], ["teacher.coefficient"]),
        (["data.path=absent"], ["data.path=absent"]),
        (["data.path=empty"], ["data.path=empty"]),
        (["data=memmap", "data.path=short.bin"], ["short"]),
        (["ckpt_path=absent.ckpt"], ["ckpt_path=absent.ckpt"]),
        (["ckpt_path=garbage.ckpt"], ["garbage.ckpt"]),
        (["init_from=garbage.ckpt"], ["garbage.ckpt"]),
        (["backend=triton", "backend.backward=cudnn"], ["backend.backward is no setting", "belongs to backend=flashmla"]),
        (["data.recall.pairs=3"], ["data.recall.pairs is no setting", "data=recall"]),
        (["staged.enabled=true"], ["belongs to experiment=staged"]),
        (["backend=flashmla"], ["BackendUnsupported", "flashmla", "backend=unfused"]),
        (["trainer=gpu"], ["NVIDIA GPU", "trainer=cpu"]),
        (["model.head_dim=${model.nothing}"], ["model.nothing"]),
        (["+seed=4"], ["seed"]),
    ],
)
def test_bad_input_ends_with_one_message_and_no_run_folder(
    workplace: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], fragments: list[str]
) -> None:
    if arguments == ["trainer=gpu"] and torch.cuda.is_available():
        arguments = ["trainer=gpu", "trainer.devices=99"]
        fragments = ["trainer.devices=99"]
    (workplace / "empty").mkdir()
    (workplace / "garbage.ckpt").write_bytes(b"garbage")
    (workplace / "short.bin").write_bytes(b"\0\0\0")
    (workplace / "short.json").write_text("{}")
    message = fails(capfd, *TINY, *arguments)
    assert len(message.splitlines()) <= 3, message
    for fragment in fragments:
        assert fragment in message
    assert not (workplace / "runs").exists()


def test_a_multirun_gives_every_combination_a_run_of_its_own_and_fails_if_one_fails(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One bad job out of several leaves exit status 1, its message, and the others finished; wandb runs are not shared."""
    message = fails(capfd, "-m", *TINY, "model.index_topk=4,-1", "logger=wandb", "hydra.sweep.dir=sweep")
    assert "model.index_topk=-1" in message
    assert {p.name for p in (workplace / "sweep").iterdir()} == {"multirun.yaml", "0_model.index_topk-4"}
    assert summary(workplace / "sweep" / "0_model.index_topk-4")["status"] == "finished"
    run(*TINY, "-m", "teacher=full_csa,compressed_only", "seed=1,2", "logger=wandb", "task=ab", "callbacks=minimal")
    (sweep,) = (workplace / "runs" / "ab").iterdir()
    names = {f"{i}_teacher-{t}_seed-{s}" for i, (t, s) in enumerate((t, s) for t in ("full_csa", "compressed_only") for s in (1, 2))}
    assert {p.name for p in sweep.iterdir() if p.is_dir()} == names
    found = [summary(sweep / name) for name in sorted(names)]
    assert [(f["arm"], f["seed"]) for f in found] == [("full_csa", 1), ("full_csa", 2), ("compressed_only", 1), ("compressed_only", 2)]
    assert found[0]["initial_weights_sha256"] == found[2]["initial_weights_sha256"] != found[1]["initial_weights_sha256"]
    identities = {name: (sweep / name / "wandb_run_id.txt").read_text().strip() for name in names}
    assert len(set(identities.values())) == 4
    for name, identity in identities.items():
        assert [p.name[-8:] for p in (sweep / name / "wandb").glob("offline-run-*")] == [identity]
    assert "run_dir" in fails(capfd, "-m", *TINY, "seed=1,2", "run_dir=one")
    assert not (workplace / "one").exists()


def test_a_multirun_below_a_file_is_refused_with_one_message(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = fails(capfd, "-m", *TINY, "seed=1,2", "runs_dir=text/0.txt")
    assert "the folder of the multirun cannot be made" in message
    assert "runs_dir=PATH" in message


def test_one_process_under_ddp_draws_no_warning_about_syncing(workplace: Path, recwarn: pytest.WarningsRecorder) -> None:
    run(*TINY, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.precision=32-true", "run_dir=out")
    assert summary(workplace / "out")["status"] == "finished"
    assert not [w for w in recwarn if "sync_dist" in str(w.message)]


def test_an_error_in_the_middle_marks_the_run_failed_and_shows_its_traceback(
    workplace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status, the summary and the first traceback all say so."""
    from csa_model.lit_module import CSALitModule

    def broken(self: object, batch: object, batch_idx: int) -> None:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(CSALitModule, "training_step", broken)
    with pytest.raises(SystemExit) as exit_:
        run(*TINY, "run_dir=out")
    assert exit_.value.code == 1
    error = capfd.readouterr().err
    assert error.count("Traceback") == 1
    assert "the disk is on fire" in error
    facts = summary(workplace / "out")
    assert facts["status"] == "failed"
    assert "the disk is on fire" in str(facts["error"])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_works_without_terminal_account_or_network_and_stops_on_a_signal(workplace: Path, sent: signal.Signals) -> None:
    """Stdin closed, no WANDB variable; then Ctrl-C in the middle of training leaves a non-zero exit and a run that says so."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *TINY,
        "logger=wandb",
        "run_dir=out",
        "trainer.max_steps=100000",
        "callbacks.checkpoint.every_n_steps=1",
    ]
    process = subprocess.Popen(
        command, cwd=workplace, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 200
        while not ((workplace / "out" / "metrics.csv").exists() and max(steps(workplace / "out"), default=0) >= 2) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        process.send_signal(sent)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 128 + sent
    assert "Traceback" not in output
    assert re.search(rf"go on (from step [1-9]\d*, its last checkpoint, )?with run_dir={re.escape(str(workplace / 'out'))} ckpt_path=last", output)
    assert summary(workplace / "out")["status"] == "interrupted"
    assert summary(workplace / "out")["error"] == f"interrupted by {sent.name}"
    assert (workplace / "out" / "checkpoints" / "last.ckpt").exists()
    assert any((workplace / "out" / "wandb").glob("offline-run-*"))


@pytest.mark.distributed
def test_a_multirun_of_data_parallel_jobs_trains_each_in_its_own_folder(workplace: Path) -> None:
    """The second job inherits no rank, port or process group from the first, and the second rank no folder of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parallel = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_steps=2", "callbacks=minimal"]
    command = [sys.executable, str(ROOT / "train.py"), "-m", *TINY, *parallel, "teacher=compressed_only,full_csa", "hydra.sweep.dir=sweep"]
    done = subprocess.run(command, cwd=workplace, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in workplace.iterdir()} == {"text", "data_cache", "sweep"}
    folders = sorted(p for p in (workplace / "sweep").iterdir() if p.is_dir())
    assert [p.name for p in folders] == ["0_teacher-compressed_only", "1_teacher-full_csa"]
    for folder in folders:
        assert summary(folder)["status"] == "finished"
        assert summary(folder)["steps"] == 2
        assert steps(folder) == [1, 2]
