# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import eval.ab_report
from eval.ab_report import main, write_report
from eval.plots import common_steps
from eval.runs import ReportError, check_comparable, find_run_folders, pair_arms, read_metrics, read_run
from tests.eval.folders import make_run


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures cost a second each; the tests that look at numbers do without."""
    for name in ("plot_curves", "plot_differences"):
        monkeypatch.setattr(eval.ab_report, name, lambda *arguments: None)


def make_study(root: Path, arms: tuple[str, ...] = ("full_csa", "compressed_only"), seeds: tuple[int, ...] = (1, 2, 3)) -> Path:
    gap = {"full_csa": 0.0, "compressed_only": 0.01, "none": 0.5}
    for arm in arms:
        for seed in seeds:
            make_run(root / arm / f"seed{seed}", arm, seed, final_loss=2.0 + seed + gap[arm] * (1 + 0.1 * seed))
    return root


def test_arms_are_paired_by_seed_and_the_difference_is_that_of_the_pairs(tmp_path: Path) -> None:
    root = make_study(tmp_path / "runs")
    found = {(c.metric, c.first_arm, c.second_arm): c for c in write_report([root], tmp_path / "out")}
    loss = found["val/loss", "compressed_only", "full_csa"]
    assert loss.seeds == (1, 2, 3)
    assert loss.difference.mean == pytest.approx(0.012)
    assert loss.difference.sd == pytest.approx(0.001)  # seeds differ by 1 in loss; only pairing by seed gives this
    assert loss.words == "compressed_only higher than full_csa"
    assert found["indexer/recall_at_k", "compressed_only", "full_csa"].words == "identical in all 3 seeds"
    for name in ("report.md", "report.json", "differences.csv", "curves.png", "differences_compressed_only_full_csa.png"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    rows = list(csv.DictReader((tmp_path / "out" / "differences.csv").open()))
    assert float(next(r for r in rows if r["metric"] == "val/loss")["difference"]) == pytest.approx(0.012)
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())["runs"]) == 6


@pytest.mark.usefixtures("no_figures")
def test_three_arms_give_three_comparisons_with_the_control_first(tmp_path: Path) -> None:
    found = write_report([make_study(tmp_path / "runs", arms=("full_csa", "none", "compressed_only"))], tmp_path / "out")
    pairs = list(dict.fromkeys((c.first_arm, c.second_arm) for c in found))
    assert pairs == [("none", "compressed_only"), ("none", "full_csa"), ("compressed_only", "full_csa")]


@pytest.mark.usefixtures("no_figures")
def test_the_training_losses_of_the_indexers_are_not_compared(tmp_path: Path) -> None:
    found = {c.metric for c in write_report([make_study(tmp_path / "runs")], tmp_path / "out")}
    assert "indexer/kl_full_csa" in found
    assert not {"indexer/kl", "train/loss"} & found


def test_one_seed_is_labelled_and_claims_nothing(tmp_path: Path) -> None:
    comparisons = write_report([make_study(tmp_path / "runs", seeds=(1,))], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "One seed per arm" in text
    assert all(c.difference.low is None for c in comparisons)
    assert "higher than" not in text
    assert "lower than" not in text


@pytest.mark.usefixtures("no_figures")
def test_a_noisy_difference_is_reported_as_none_seen(tmp_path: Path) -> None:
    for seed, gap in ((1, 0.1), (2, -0.1)):
        make_run(tmp_path / f"f{seed}", "full_csa", seed)
        make_run(tmp_path / f"c{seed}", "compressed_only", seed, final_loss=2.0 + gap)
    write_report([tmp_path], tmp_path / "out")
    assert "| no difference seen |" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"summary": {"corpus_sha256": "other"}}, "corpus"),
        ({"summary": {"backend": "triton"}}, "backend (triton and unfused)"),
        ({"summary": {"initial_weights_sha256": "other"}}, "initial weights"),
        ({"summary": {"data_order": {"seed": 1, "corpus_sha256": "x" * 60, "tokens_per_batch": 64}}}, "data order tokens_per_batch (64 and None)"),
        ({"config": {"optimizer": {"lr": 2e-3}}}, "optimizer.lr (0.002 and 0.001)"),
        ({"config": {"teacher": {"name": "compressed_only", "coefficient": 0.5}}}, "teacher.coefficient"),
        ({"config": {"extra": {"key": 1}}}, "extra.key (1 and None)"),
    ],
)
def test_a_pair_that_differs_in_more_than_the_teacher_is_refused_naming_it(tmp_path: Path, change: dict, named: str) -> None:
    first = make_run(tmp_path / "f", "full_csa", 1)
    second = make_run(tmp_path / "c", "compressed_only", 1, **change)
    with pytest.raises(ReportError) as error:
        write_report([tmp_path], tmp_path / "out")
    for expected in (named, str(first), str(second)):
        assert expected in str(error.value)
    assert not (tmp_path / "out").exists()


def test_seeds_may_differ_in_weights_and_order_but_not_in_config(tmp_path: Path) -> None:
    make_study(tmp_path / "runs", seeds=(1, 2))
    runs = [read_run(folder) for folder in find_run_folders([tmp_path])]
    assert check_comparable(runs) == []
    make_run(tmp_path / "f3", "full_csa", 3, config={"optimizer": {"lr": 2e-3}})
    make_run(tmp_path / "c3", "compressed_only", 3, config={"optimizer": {"lr": 2e-3}})
    problems = check_comparable([read_run(folder) for folder in find_run_folders([tmp_path])])
    assert len(problems) == 1
    assert "optimizer.lr" in problems[0]


def test_the_control_may_have_any_coefficient_and_names_may_differ(tmp_path: Path) -> None:
    make_run(tmp_path / "f", "full_csa", 1)
    make_run(tmp_path / "n", "none", 1, config={"teacher": {"name": "none", "coefficient": 0.0}, "logger": {"name": "wandb"}, "task": "control"})
    assert check_comparable([read_run(folder) for folder in find_run_folders([tmp_path])]) == []


@pytest.mark.usefixtures("no_figures")
def test_pairs_that_trained_for_different_steps_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "f", "full_csa", 1)
    make_run(tmp_path / "c", "compressed_only", 1, summary={"steps": 10})
    with pytest.raises(ReportError, match=r"trained steps \(\d+ and \d+\)"):
        write_report([tmp_path], tmp_path / "out")


@pytest.mark.usefixtures("no_figures")
def test_unfinished_failed_and_diverged_runs_are_refused_by_name(tmp_path: Path) -> None:
    make_study(tmp_path, seeds=(1,))
    (make_run(tmp_path / "unfinished", "full_csa", 2) / "summary.json").unlink()
    make_run(tmp_path / "failed", "compressed_only", 2, summary={"status": "failed"})
    make_run(tmp_path / "diverged", "compressed_only", 4, final_loss=float("nan"))
    make_run(tmp_path / "unproven", "compressed_only", 5, summary={"initial_weights_sha256": None})
    with pytest.raises(ReportError) as error:
        write_report([tmp_path], tmp_path / "out")
    for name in ("unfinished", "failed", "diverged", "unproven"):
        assert str(tmp_path / name) in str(error.value)
    write_report([tmp_path], tmp_path / "out", skip_refused=True)
    assert str(tmp_path / "unfinished") in (tmp_path / "out" / "report.md").read_text()


def test_two_runs_of_one_arm_and_seed_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "full_csa", 1)
    make_run(tmp_path / "b", "full_csa", 1)
    assert "two runs of teacher=full_csa seed=1" in check_comparable([read_run(f) for f in find_run_folders([tmp_path])])[0]


@pytest.mark.usefixtures("no_figures")
def test_a_seed_without_partner_is_left_out_and_said(tmp_path: Path) -> None:
    make_study(tmp_path, seeds=(1, 2))
    alone = make_run(tmp_path / "alone", "full_csa", 7)
    comparisons = write_report([tmp_path], tmp_path / "out")
    assert all(7 not in c.seeds for c in comparisons)
    assert f"{alone}: no other arm with seed 7" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("no_figures")
def test_evaluations_of_the_runs_are_compared_too(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(tmp_path / f"f{seed}", "full_csa", seed, evaluation={"kl_dense_sparse@8": 0.010 + seed})
        make_run(tmp_path / f"c{seed}", "compressed_only", seed, evaluation={"kl_dense_sparse@8": 0.013 + seed})
    found = {c.metric: c for c in write_report([tmp_path], tmp_path / "out")}
    assert found["eval/kl_dense_sparse@8"].difference.mean == pytest.approx(0.003)
    assert "eval/kl_dense_sparse@8" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("no_figures")
def test_evaluations_with_other_settings_are_not_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "f", "full_csa", 1, evaluation={"loss_dense": 1.0})
    make_run(tmp_path / "c", "compressed_only", 1, evaluation={"loss_dense": 1.0}, settings={"rows": 8})
    with pytest.raises(ReportError, match="evaluation"):
        write_report([tmp_path], tmp_path / "out")


@pytest.mark.usefixtures("no_figures")
def test_code_that_differs_between_runs_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "f", "full_csa", 1)
    (make_run(tmp_path / "c", "compressed_only", 1) / "git.json").write_text('{"sha": "def"}')
    write_report([tmp_path], tmp_path / "out")
    assert "git.sha: abc, def" in (tmp_path / "out" / "report.md").read_text()


def test_metrics_of_a_continued_run_keep_the_later_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,val/loss\n0,1,5.0\n0,2,4.0\n0,2,\n0,2,3.5\n0,3,3.0\n")
    assert read_metrics(tmp_path / "metrics.csv") == {"val/loss": {1: 5.0, 2: 3.5, 3: 3.0}}


def test_curves_meet_only_at_common_steps() -> None:
    assert common_steps([{1: 0.0, 2: 0.0, 5: 0.0}, {5: 0.0, 2: 0.0, 3: 0.0}]) == [2, 5]


def test_nested_folders_are_found_once(tmp_path: Path) -> None:
    root = make_study(tmp_path / "deep" / "runs", seeds=(1,))
    (root / "full_csa" / "seed1" / ".hydra").mkdir()
    (root / "full_csa" / "seed1" / ".hydra" / "config.yaml").write_text("a: 1")
    assert len(find_run_folders([tmp_path, root])) == 2


@pytest.mark.usefixtures("no_figures")
def test_a_folder_with_a_summary_but_no_config_is_named(tmp_path: Path) -> None:
    (make_run(tmp_path / "broken", "full_csa", 1) / "config.yaml").unlink()
    with pytest.raises(ReportError, match=r"broken/config.yaml: not readable"):
        write_report([tmp_path], tmp_path / "out")


def test_no_common_seed_is_an_error_that_lists_what_was_found(tmp_path: Path) -> None:
    make_run(tmp_path / "f", "full_csa", 1)
    make_run(tmp_path / "c", "compressed_only", 2)
    assert pair_arms([read_run(f) for f in find_run_folders([tmp_path])]) == {}
    with pytest.raises(ReportError, match="no two arms share a seed"):
        write_report([tmp_path], tmp_path / "out")


def test_the_command_exits_readably_on_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent"), "--out", str(tmp_path / "out")]) == 2
    assert "absent is not a folder" in capsys.readouterr().err
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_the_module_runs_from_a_shell(tmp_path: Path) -> None:
    make_study(tmp_path / "runs", seeds=(1, 2))
    command = [sys.executable, "-m", "eval.ab_report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "report.md" in done.stdout


def test_arms_that_were_extended_differently_are_refused(tmp_path: Path) -> None:
    """A cosine that was stretched on the way is another schedule, though both configurations end up the same."""
    resumes = [{"at": 10, "changed": ["trainer.max_steps: 10 in the checkpoint, 20 now", "trainer.log_every_n_steps: 10 in the checkpoint, 5 now"]}]
    a, b = (make_run(tmp_path / arm, arm, 1, summary={"resumes": resumes}) for arm in ("full_csa", "compressed_only"))
    assert not check_comparable([read_run(a), read_run(b)])
    c = make_run(tmp_path / "c", "compressed_only", 1)
    (problem,) = check_comparable([read_run(a), read_run(c)])
    assert "changed on resume at step 10 trainer.max_steps (None and 10 in the checkpoint, 20 now)" in problem
    assert "log_every" not in problem
