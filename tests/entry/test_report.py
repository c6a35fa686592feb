# SPDX-License-Identifier: Apache-2.0
"""The summary, the closing table and the plots of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf.errors import OmegaConfBaseException

from csa_model.config import STAGES, ConfigError, ExperimentConfig
from csa_model.console import StepProgress, number, report
from csa_model.plots import last_values, plot_run, read_curves
from csa_model.report import Summary, _resumes, _selection, closing_rows, weights_sha256
from csa_model.run_dir import RunDirectory
from kernels import BackendUnsupported
from tests.model.helpers import plain_config


def test_the_hash_of_the_weights_sees_values_names_shapes_and_buffers() -> None:
    def module(name: str = "weight", shape: tuple[int, ...] = (4,), value: float = 0.0, buffer: int = 0) -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_parameter(name, torch.nn.Parameter(torch.full(shape, value)))
        made.register_buffer("table", torch.tensor([buffer]))
        return made

    same = weights_sha256(module())
    assert same == weights_sha256(module())
    others = [module("other"), module(shape=(2, 2)), module(value=1e-7), module(buffer=1), module().double()]
    assert len({same, *map(weights_sha256, others)}) == 6


def test_curves_skip_blank_cells_and_plots_follow_what_was_logged(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,step,train/lm_loss,val/loss\n0,1,3.0,\n0,2,2.5,\n0,2,,2.75\n")
    curves = read_curves(file)
    assert curves == {"train/lm_loss": ([1, 2], [3.0, 2.5]), "val/loss": ([2], [2.75])}
    assert last_values(curves) == {"train/lm_loss": 2.5, "val/loss": 2.75}
    assert [p.name for p in plot_run(file, tmp_path, 5.0, "title")] == ["loss.png"]
    assert (tmp_path / "loss.png").stat().st_size > 5000
    assert plot_run(tmp_path / "absent.csv", tmp_path, None, "title") == []


def test_a_metric_with_one_value_is_drawn_as_a_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    (tmp_path / "metrics.csv").write_text("epoch,step,attn/mass_window\n0,5,0.5\n")
    plot_run(tmp_path / "metrics.csv", tmp_path, None, "title")
    (line,) = pyplot.gcf().axes[0].lines
    monkeypatch.undo()
    pyplot.close("all")
    assert line.get_marker() == "o"


def test_figures_that_were_not_measured_read_n_a() -> None:
    assert number(None) == number(float("nan")) == "n/a"
    assert number(1234.5678, 1) == "1,234.6"
    table = dict(
        closing_rows({"validation_loss": 2.5, "unigram_loss": 5.0, "indexer_kl_full_csa": 0.01, "process_rss_gib": 0.5, "steps": 2, "seconds": 1.0})
    )
    assert table["validation loss"] == "2.500 nats per token (unigram model 5.000)"
    assert table["bits per byte"] == "n/a (unigram model n/a)"
    assert table["peak process memory"] == "0.50 GiB"  # named for what it is
    assert table["recall@k"].startswith("n/a")
    assert "recall@k" not in dict(closing_rows({"steps": 2}))  # the diagnostics did not run
    assert "peak GPU memory" in dict(closing_rows({"peak_memory_gib": 3.0}))
    assert dict(closing_rows({"steps": 15, "resumed_at": 10, "seconds": 5.0}))["time"] == "5 steps in 5 s, 15 steps in all"


def test_the_old_teacher_s_arm_shows_the_yardstick_and_what_it_learned() -> None:
    facts = {"indexer_kl_full_csa": 0.01, "indexer_kl_compressed_only": 0.002, "indexer_kl_uniform": 0.02}
    for arm, shown in (("full_csa", ""), ("compressed_only", ", 0.0020 to compressed_only")):
        assert dict(closing_rows({"arm": arm, **facts}))["indexer KL"] == "0.0100 to full_csa (a uniform guess 0.0200)" + shown


def test_a_stage_without_selection_does_not_announce_one() -> None:
    config = ExperimentConfig(model=replace(plain_config(), index_topk=8))
    assert _selection(config) == "top 8 compressed entries"
    assert _selection(replace(config, stage=STAGES["dense"])) == "every visible compressed entry"
    assert _selection(replace(config, model=replace(config.model, index_topk=None))) == "every visible compressed entry"


def test_a_line_of_progress_shows_a_measurement_once(capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured anew is shown, also where it is the same number again."""
    progress, once = StepProgress(max_steps=4, every=1), torch.tensor(3.5)
    measured = [{}, {"val/loss": once}, {"val/loss": once}, {"val/loss": torch.tensor(3.5)}]
    for step, metrics in enumerate(measured):
        losses = {"train/lm_loss": torch.tensor(4.0 - step)} if step else {}
        trainer = SimpleNamespace(global_step=step, is_global_zero=True, callback_metrics=losses | metrics)
        if step == 0:
            progress.on_train_start(trainer, None)  # type: ignore[arg-type]
        progress._show(trainer)  # type: ignore[arg-type]
    lines = [line.rsplit("  ", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 1/4  loss 3.000  val 3.500", "step 2/4  loss 2.000", "step 3/4  loss 1.000  val 3.500"]


def test_the_bar_reads_figures_off_the_device_only_where_they_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that is read makes the host wait for the GPU, which would then have nothing to do."""
    reads: list[int] = []

    class Figure:
        def __init__(self, step: int) -> None:
            self.step = step

        def __float__(self) -> float:
            reads.append(self.step)
            return 1.0

    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True, write=lambda text: None, flush=lambda: None))
    progress = StepProgress(max_steps=7, every=3)
    trainers = [SimpleNamespace(global_step=step, is_global_zero=True, callback_metrics={"val/loss": Figure(step)}) for step in range(8)]
    progress.on_train_start(trainers[0], None)  # type: ignore[arg-type]
    try:
        for trainer in trainers:
            progress._show(trainer)  # type: ignore[arg-type]
            assert progress._bar is not None
            assert progress._bar.tasks[0].completed == trainer.global_step
        assert progress._bar.tasks[0].fields["metrics"] == "val 1.000"
    finally:
        progress._stop()
    assert reads == [3, 6, 7]


@pytest.mark.parametrize("error", [ConfigError("key=1 is not legal"), BackendUnsupported("no GPU", "backend=unfused"), OmegaConfBaseException("bad")])
def test_errors_that_a_user_can_mend_are_one_line_once(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    report(error)
    report(error)
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("inside")
    except RuntimeError as error:
        report(error)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "inside" in shown


def test_an_interrupted_run_says_from_which_step_it_will_go_on(tmp_path: Path) -> None:
    """last.ckpt is a link to a periodic checkpoint where a step was interrupted half done, else a file of the last step."""
    (tmp_path / "checkpoints").mkdir()
    summary = object.__new__(Summary)
    summary.run = RunDirectory(tmp_path)
    summary.config = ExperimentConfig(model=plain_config())
    assert "no checkpoint is written yet" in summary._way_on()
    last = tmp_path / "checkpoints" / "last.ckpt"
    (tmp_path / "checkpoints" / "step000100.ckpt").touch()
    last.symlink_to("step000100.ckpt")
    assert summary._way_on() == f"go on from step 100, its last checkpoint, with run_dir={tmp_path} ckpt_path=last"
    last.unlink()
    last.touch()
    assert summary._way_on() == f"go on with run_dir={tmp_path} ckpt_path=last"


def test_every_resume_of_a_run_folder_is_remembered(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert _resumes(run, None, []) == []
    first = _resumes(run, 4, ["trainer.max_steps: 4 in the checkpoint, 8 now"])
    run.write_summary({"resumes": first})
    again = _resumes(run, 6, [])
    assert again == [{"at": 4, "changed": ["trainer.max_steps: 4 in the checkpoint, 8 now"]}, {"at": 6, "changed": []}]
    assert _resumes(run, None, []) == []  # a fresh run in a folder of an old one
