# SPDX-License-Identifier: Apache-2.0
"""docs/measured.md says what the result files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals, tables
from benchmarks.loss_curves import summary
from benchmarks.tables import SECTIONS, read, render
from tests.entry.helpers import CONFIGS


def test_the_page_of_measurements_is_written_from_the_result_files() -> None:
    assert (CONFIGS.parent / "docs" / "measured.md").read_text() == render(), "run python -m benchmarks.tables"


def test_nothing_is_shown_that_was_timed_on_a_red_gate() -> None:
    for name in SECTIONS:
        gate = read(name).get("gate")
        assert gate is None or gate["passed"], name


def test_the_gate_says_whether_it_was_the_quick_one_and_how_much_it_checked() -> None:
    record = {"gpu": "card", "torch": "2", "git_sha": "abc"}
    for gate, told in (
        ({"passed": True, "quick": True, "checks": 37}, "card, torch 2, quick correctness gate green, 37 checks, code at abc."),
        ({"passed": True, "checks": 48}, "card, torch 2, correctness gate green, 48 checks, code at abc."),
        ({"passed": False}, "card, torch 2, correctness gate RED, code at abc."),
    ):
        assert tables.origin(record | {"gate": gate}) == told


def test_losses_of_training_are_shown_only_over_the_steps_that_every_backend_did() -> None:
    alone = {"steps": 3, "median_step_ms": 12.5, "peak_gib": 1.0, "first_step_s": 20.0, "loss_every_20": [9.0], "kl_every_20": [0.5]}
    training = {"tokens_per_row": 2048, "documents_per_row": 5, "backends": {"triton": alone, "unfused": alone | {"cut_short": "too slow"}}}
    record = {"gpu": "card", "torch": "2", "git_sha": "abc", "training": training}
    assert "Training" not in "\n".join(tables.flashmla(record))  # stopped before every backend was done, or an older record
    training |= {"common_steps": 3, "averaged_steps": 2, "common": {"triton": {"loss": 8.0, "kl": 0.25}, "unfused": {"loss": 8.5, "kl": 0.125}}}
    page = "\n".join(tables.flashmla(record))
    assert "means of steps 2 to 3, the last 2 of the 3 steps" in page
    assert "| triton | 3 | 12.5 | 1.00 | 8.0000 | 0.25000 | 20.0 |" in page
    assert "unfused: too slow." in page


def test_loss_curves_of_several_models_stand_in_one_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "course of training" not in render()
    offsets = {("unfused", 1): 0.0, ("unfused", 2): 0.5, ("triton", 1): 0.1, ("triton", 2): 0.35}
    runs = {key: {metric: {5: 1.0 + value} for metric in tables.CURVES} for key, value in offsets.items()}
    for model in ("small", "nano"):
        record = {"card": "Card", "torch": "2", "git_sha": "abc", "model": model, "steps": 5, "seeds": 2, "failed": ["triton seed 3"]}
        record["settings"] = ["trainer=gpu", *(["data_seed=1"] if model == "nano" else [])]
        (tmp_path / f"loss_curves_{model}_{tables.CARD}.json").write_text(json.dumps(record | summary(runs, 5)))
    page = render()
    assert page.count("## The course of training") == 1
    assert page.index("### model=nano") < page.index("### model=small\n")
    assert "| unfused, another seed | 0.5 | 0.5 | 0.5 |" in page
    assert "| triton, the same seed | 0.12 | 0.12 | 0.12 |" in page
    assert "| triton | +0.00% ± 10.00% | +0.00% ± 10.00% | +0.00% ± 10.00% | +0.00% ± 10.00% |" in page
    assert "Runs that failed: triton seed 3." in page
    nano, small = page.split("### model=small\n")
    assert "A seed sets the initial weights alone" in nano
    assert "A seed sets the initial weights and the order of the data" in small
    assert "results/loss_curves_nano_nvidia_h200.png)" in page


def test_the_core_is_shown_with_the_peer_and_without_it() -> None:
    ours, peer, plain = tables.OURS, tables.PEER, tables.PLAIN

    def shape(tokens: int, heads: int, dim: int, agrees: dict[str, float | str], **step: float) -> dict[str, Any]:
        names = {"ours": ours, "peer": peer, "plain": plain}
        pieces = {own: {"ms": 1.0} for own, _ in tables.PIECES.values()}
        pieces |= {"peer/scores": {"ms": 1.5}, "peer/top-k": {"ms": 0.5}} if "peer" in step else {}
        return {
            "tokens": tokens, "heads": heads, "head_dim": dim, "topk": 1024, "agrees": agrees, "pieces": pieces,
            "step": {names[n]: {"ms": v, "spread": 0.0} for n, v in step.items()}, "peak_gib": {names[n]: v for n, v in step.items()},
        }  # fmt: skip

    shapes = [
        shape(4096, 8, 64, {plain: 0.01}, ours=2.0, plain=12.0),
        shape(9999, 64, 512, {}, ours=70.0),
        shape(8192, 64, 512, {peer: 0.071}, ours=5.0),
        shape(8192, 128, 512, {peer: "OutOfMemoryError: no"}, ours=5.0),
        shape(4096, 64, 512, {peer: 0.01}, ours=3.0, peer=4.0),
        {"tokens": 77, "heads": 64, "head_dim": 512, "topk": 512, "failed": "out of memory"},
    ]
    record = {"gpu": "card", "torch": "2", "git_sha": "abc", "peer": "FlashMLA", "shapes": shapes}
    page = "\n".join(tables.core(record))
    assert "| 4,096 | 64 | 512 | 1,024 | 3.000 | 4.000 | 0.75 | 3.00 | 4.00 | 0.75 |" in page
    assert "No peer at 8,192 tokens, 64 heads of 512: it differs by 7.1%." in page
    assert "No peer at 8,192 tokens, 128 heads of 512: OutOfMemoryError: no." in page
    assert "Not measured: 77 tokens, 64 heads of 512: out of memory." in page
    assert "would have to pad, and 9,999 tokens." in page
    assert "| 4,096 | 8 | 64 | 1,024 | 2.000 | - | - | - | 12.0 | 2.00 | 12.00 |" in page
    assert page.index("| 4,096 | 64 | 512 | 1,024 | 3.000 | - |") < page.index("| 8,192 | 64 | 512 | 1,024 | 5.000 | - |")
    with_ratios, without = page.split("Without a peer:")
    assert "| 4,096 | 64 | 512 | 1,024 | 1.000 (0.50) | 1.000 |" in with_ratios
    assert "| 4,096 | 8 | 64 | 1,024 | 1.000 | 1.000 |" in without
    assert without.count("| 4.000 |") == 4  # the parts of the step with full_csa are four, in each shape
    shapes[4]["captured"] = {ours: {"ms": 2.5, "spread": 0.0}, peer: {"ms": 3.5, "spread": 0.0}}
    shapes[0]["step"]["unfused"] = {"ms": 40.0, "spread": 0.0}
    page = "\n".join(tables.core(record))
    assert "| 4,096 | 64 | 512 | 1,024 | 3.000 | 4.000 | 0.75 | 2.500 | 3.500 | 3.00 | 4.00 | 0.75 |" in page
    assert "| 4,096 | 8 | 64 | 1,024 | 2.000 | - | - | - | 12.0 | 40.0 | 2.00 | 12.00 |" in page
    record["shapes"] = shapes[:1]
    assert "No peer: FlashMLA." in "\n".join(tables.core(record))


def test_what_was_not_run_of_the_training_steps_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LENGTHS", (1024, 2048, 4096))
    every = {(path, tokens) for path in tables.TRAINING_PATHS for tokens in (1024, 2048, 4096)}
    assert tables.not_run(every) == []
    left = {("triton", 4096), ("dense", 4096), ("unfused", 1024), ("unfused", 2048), ("unfused", 4096)}
    assert tables.not_run(every - left) == ["Not run: `triton` and `dense` at 4,096; `unfused` at 1,024, 2,048 and 4,096 tokens."]


def test_the_crossover_at_the_shortest_length_is_no_crossover() -> None:
    points: dict[tuple[str, int], dict[str, Any]] = {(path, tokens): {} for path in ("triton", "dense") for tokens in (2048, 4096)}
    points["triton", 1024] = {}
    assert tables.crossing(4096, points) == "Faster than the dense twin from 4,096 tokens on."
    assert tables.crossing(2048, points) == "Faster than the dense twin at every measured length (shortest: 2,048 tokens)."
    assert tables.crossing(None, points) == "Not faster than the dense twin at the longest measured length."


def test_a_graph_that_is_slower_than_the_plain_form_is_not_passed_over() -> None:
    def times(plain: float, graph: float) -> dict[str, float]:
        return {"ms": plain, "captured_ms": graph}

    slower = {"triton": times(10.0, 10.2), "flashmla": times(10.0, 10.8), "unfused": {"ms": 99.0}}
    mixed = {"triton": times(10.0, 10.2), "flashmla": times(10.0, 10.0)}
    assert tables.slower_graphs({"T=16384 H=64 D=512 K=512": slower, "T=4096 H=64 D=512 K=512": mixed}) == [
        "At 16,384 tokens and 64 heads the graphs, timed after the plain forms, are 2 to 8 % slower than these; the cause is not known."
    ]


def test_a_goal_is_met_at_its_target_and_a_missed_one_looks_missed() -> None:
    assert goals.Goal("a", "b", 0.70, True, 0.70).cells() == ["a", "b", "≤ 0.70", "0.70", "met"]
    assert goals.Goal("a", "b", 0.70, True, 0.7003).cells()[2:] == ["≤ 0.70", "0.7003", "missed"]
    assert goals.Goal("a", "b", 1.15, False, 1.146, 0.0501).cells()[2:] == ["≥ 1.15", "1.146 ±5%", "missed, within the spread"]
    assert goals.Goal("a", "b", 0.95, False, 0.9499, percent=True).cells()[2:] == ["≥ 95%", "94.99%", "missed"]
    assert goals.Goal("a", "b", 5.0, False, 5.5, 0.05).cells()[3:] == ["5.50", "met"]


def test_goals_are_judged_from_the_times_of_one_run() -> None:
    ours, peer, compressed = goals.OURS, goals.PEER, goals.COMPRESSED

    def at(ms: float, spread: float = 0.0) -> dict[str, float]:
        return {"ms": ms, "spread": spread}

    def shape(tokens: int, heads: int, dim: int = 512, with_peer: bool = True, gib: float = 1.0) -> dict[str, Any]:
        step = {ours: at(6.0, 0.2), compressed: at(8.0)} | ({peer: at(10.0)} if with_peer else {})
        pieces = {"ours/attention forward": at(2.0), "ours/attention backward + teacher": at(4.0), "ours/scores + top-k": at(3.0)}
        theirs = {"attention forward": at(2.2), "attention backward": at(4.0), "teacher": at(1.0), "scores": at(3.0), "top-k": at(1.0, 0.4)}
        pieces |= {f"peer/{name}": time for name, time in theirs.items()} if with_peer else {}
        memory = {ours: gib, compressed: 1.0, peer: 2.0}
        return {"tokens": tokens, "heads": heads, "head_dim": dim, "step": step, "pieces": pieces, "peak_gib": memory}

    shapes = [shape(4096, 64), shape(16384, 64), shape(16384, 128), shape(65536, 64, with_peer=False), shape(4096, 16, 128, False, 1.5)]
    core = {"shapes": [*shapes, {"tokens": 4096, "heads": 128, "head_dim": 512, "failed": "out of memory"}]}
    cells = [goal.cells() for goal in goals.of_core(core)]
    assert ["core step / peer", "4,096 tokens, 64 heads", "≤ 0.65", "0.60 ±20%", "met, within the spread"] in cells
    assert [c[2:] for c in cells if c[0].startswith("attention forward")] == [["≥ 1.15", "1.10", "missed"], *[["≥ 1.05", "1.10", "met"]] * 2]
    assert [c[3:] for c in cells if c[0].startswith("attention backward")] == [["0.80", "met"]] * 3
    assert [c[3:] for c in cells if c[0].startswith("index scores")] == [["0.75 ±10%", "missed, within the spread"]] * 3
    worst = "worst of 5 shapes: 4,096 tokens, 16 heads of 128"
    assert ["full_csa / compressed_only, memory", worst, "≤ 1.00", "1.50", "missed"] in cells
    assert "peak memory / peer" not in [c[0] for c in cells]  # 65,536 tokens ran without the peer
    longest = shape(65536, 64, gib=9.5)
    longest["peak_gib"][peer] = 14.0  # 9 GiB are results: twice 64 x 512 and once 64 x 128 numbers of 2 bytes a token
    longest["step"][goals.NO_LOSS], longest["pieces"]["ours/KL + indexer backward"] = at(5.0), at(0.8)
    cells = [goal.cells() for goal in goals.of_core({"shapes": [longest]})]
    assert [c[2:] for c in cells if c[0].startswith("the same above")] == [["≤ 0.15", "0.10", "met"]]
    assert [c[2:] for c in cells if c[0].startswith("full_csa without KL")] == [["≤ 1.02", "1.04 ±20%", "missed, within the spread"]]

    step = {"triton": {"captured_ms": 1.0, "captured_spread": 0.0}, "unfused": {"ms": 9.0}}
    step |= {f"flashmla, {b} backward": {"captured_ms": ms, "captured_spread": 0.1} for b, ms in (("triton", 4.0), ("cudnn", 6.0))}
    forward = {"T=4096 H=64 D=512 K=512": {"FlashMLA op": at(2.2), "flashmla": at(9.0), "triton": at(2.0)}}
    flashmla = {"attention_forward": forward, "layer_step": {"T=4096 H=16 D=64 K=512": step, "T=4096 H=64 D=512 K=512": step}}
    assert [goal.cells()[1:] for goal in goals.of_flashmla(flashmla)] == [
        ["4,096 tokens, 64 heads, second run", "≥ 1.15", "1.10", "missed"],
        ["4,096 tokens, triton backward", "≥ 5.00", "4.00 ±10%", "missed"], ["4,096 tokens, cudnn backward", "≥ 5.00", "6.00 ±10%", "met"],
    ]  # fmt: skip
    steps = {"model": "small", "points": [{"path": p, "tokens": t, "gpu_busy": 0.96} for p in ("triton", "dense") for t in (2048, 4096)]}
    assert [goal.cells()[3:] for goal in goals.of_steps(steps)] == [["96%", "met"]]

    page = tables.aims(core, steps, None)
    assert [line.split(":")[0] for line in page if line.startswith("- ")] == [
        "- attention forward, speed / FlashMLA", "- index scores + top-k / peer", "- full_csa / compressed_only, memory",
    ]  # fmt: skip
    assert tables.aims(None, {"model": "small", "points": []}, None) == []


def test_every_kind_of_goal_has_a_reason_for_the_case_that_it_is_missed() -> None:
    missed = [goal.name for goal in (*goals.of_core(read("csa_core")), *goals.of_flashmla(read("flashmla"))) if not goal.met]
    assert set(missed) <= set(goals.REASONS)


def made_up_runs(**changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What train_run and train_step write, at made-up speeds."""
    where = {"gpu": "card", "torch": "2", "model": "small"}
    points = [
        {"tokens": 4096, "tokens_per_second": 180_000.0, "spread": 0.2, "peak_gib": 3.64},
        {"tokens": 2048, "tokens_per_second": 99_000.0, "spread": 0.01},
        {"tokens": 8192, "failed": "out of memory"},
        {"tokens": 16384, "tokens_per_second": 400_000.0, "spread": 0.0},
    ]
    runs = where | {"git_sha": "abc", "backend": "triton", "rows": "one each", "left_out": "validation", "window_steps": 10, "points": points}
    speeds = {("triton", 2048): 100_000.0, ("triton", 4096): 200_000.0, ("dense", 4096): 1.0, ("triton", 8192): 300_000.0}
    bare = [{"path": path, "tokens": tokens, "tokens_per_second": speed} for (path, tokens), speed in speeds.items()]
    return runs | {"further_arguments": []} | changed, where | {
        "git_sha": "def",
        "points": [*bare, {"path": "triton", "tokens": 16384, "failed": "x"}],
    }


def test_train_py_stands_beside_the_bare_step_of_its_backend() -> None:
    runs, steps = made_up_runs()
    page = tables.train_runs(runs, steps)
    assert [line for line in page if line.startswith("| ")][2:] == [
        "| 2,048 | 99,000 | 100,000 | 0.99 | - |",
        "| 4,096 | 180,000 ±20% | 200,000 | 0.90 | 3.6 |",
        "| 16,384 | 400,000 | - | - | - |",
    ]
    assert {"`train.py`: card, torch 2, code at abc.", "Bare step: card, torch 2, code at def.", "8,192 tokens failed: out of memory."} <= set(page)
    assert "Rows: one each. Left out: validation." in page
    assert not any("Further arguments" in line for line in page)
    assert "Further arguments: `data.num_workers=2`." in tables.train_runs(made_up_runs(further_arguments=["data.num_workers=2"])[0], steps)


def test_the_goal_of_train_py_needs_both_files_and_says_where_their_code_differs() -> None:
    runs, steps = made_up_runs()
    told = ["train.py / bare training step, tokens per second", "4,096 tokens, model=small, of two commits", "≥ 0.95", "0.90 ±20%"]
    assert [goal.cells() for goal in goals.of_runs(runs, steps)] == [[*told, "missed, within the spread"]]
    assert goals.TRAIN_RUN in goals.REASONS
    assert [goal.where for goal in goals.of_runs(runs | {"git_sha": "def"}, steps)] == ["4,096 tokens, model=small"]
    assert list(goals.of_runs(made_up_runs(backend="unfused")[0], steps)) == []
    assert any(goals.TRAIN_RUN in line for line in tables.aims(None, steps, None, runs))
    assert tables.aims(None, steps, None, None) == tables.aims(None, None, None, runs) == []


def test_the_page_has_what_train_py_reaches_once_it_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    runs, steps = made_up_runs()
    (tmp_path / f"train_step_small_{tables.CARD}.json").write_text(json.dumps(steps | {"points": steps["points"][:4]}))
    assert "What `train.py` reaches" not in render()
    (tmp_path / f"train_run_small_{tables.CARD}.json").write_text(json.dumps(runs))
    page = render()
    assert page.index("## Whole training steps") < page.index("### What `train.py` reaches")
    assert goals.TRAIN_RUN in page.split("## Whole training steps")[0]
