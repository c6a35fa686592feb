# SPDX-License-Identifier: Apache-2.0
"""Compare the arms (teachers) of finished runs, paired by seed.

    python -m eval.ab_report RUNS... --out DIR

RUNS are run folders or folders that hold some. Writes report.md, differences.csv, report.json, curves.png and differences_<arm>_<arm>.png to DIR.
Stops with the names of the offenders when a run is unfinished or failed, or when a pair differs in more than its teacher.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from eval.plots import plot_curves, plot_differences
from eval.runs import ReportError, Run, check_comparable, find_run_folders, pair_arms, read_run, surrounding_differences
from eval.statistics import PairedDifference, paired_difference

# metric -> (name, unit, what a reader must know); the order of the report
METRICS = {
    "val/loss": ("validation loss", "nats/token", "neutral"),
    "val/bits_per_byte": ("bits per byte", "bits", "neutral"),
    "indexer/kl_full_csa": ("KL from full_csa to the student", "nats/row", "favours full_csa by construction"),
    "indexer/kl_compressed_only": ("KL from compressed_only to the student", "nats/row", "favours compressed_only by construction"),
    "indexer/captured": ("captured, 1 - KL / KL of a uniform student, full_csa", "share", "favours full_csa by construction"),
    "indexer/recall_at_k": ("recall at k of full_csa's top-k", "share", "favours full_csa by construction"),
    "indexer/mass_at_k": ("full_csa teacher mass at k", "probability", "favours full_csa by construction"),
    "indexer/entropy": ("entropy of the student", "nats", "descriptive"),
    "teacher/tv": ("total variation between the teachers", "probability", "descriptive: the contrast that the arms have to work with"),
    "attn/mass_compressed": ("attention mass on compressed entries", "probability", "descriptive"),
    "attn/mass_window": ("attention mass on the window", "probability", "descriptive"),
    "attn/mass_sink": ("attention mass on the sink", "probability", "descriptive"),
}
# the loss of each arm's own teacher, and a figure of one batch: a difference between arms would mean nothing
NOT_COMPARABLE = re.compile(r"indexer/(kl|grad_norm)(/|$)")
COMPARABLE = re.compile(r"(indexer|attn|teacher|val|eval)/")
# of an evaluation's figures the report shows these; differences.csv has all
EVALUATION_TABLE = re.compile(r"eval/(loss_|bits_per_byte_|kl_dense_sparse|accuracy_|output_error@|(recall|mass)_(full_csa|compressed_only)@|tv$)")
LAYER_TABLE = re.compile(r"((indexer/(recall_at_k|kl_full_csa|kl_compressed_only)|teacher/tv)/layer|eval/layer\d+/(output_error|recall_full_csa)@)")


@dataclass(frozen=True)
class Comparison:
    """One metric of one pair of arms at the end of training. first and second are means over the paired seeds."""

    metric: str
    first_arm: str
    second_arm: str
    seeds: tuple[int, ...]
    first: float
    second: float
    difference: PairedDifference

    @property
    def words(self) -> str:
        return self.difference.words(self.first_arm, self.second_arm)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.ab_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders that hold some")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the report, made if absent")
    parser.add_argument("--confidence", type=float, default=0.95, help="confidence of the intervals (default 0.95)")
    parser.add_argument(
        "--skip-refused", action="store_true", help="leave unfinished and failed runs out (the report names them) instead of stopping"
    )
    options = parser.parse_args(arguments)
    try:
        if not 0 < options.confidence < 1:
            raise ReportError(f"--confidence must lie between 0 and 1, got {options.confidence}")
        write_report(options.runs, options.out, options.confidence, options.skip_refused)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {options.out / 'report.md'}")
    return 0


def write_report(paths: Sequence[Path], out: Path, confidence: float = 0.95, skip_refused: bool = False) -> list[Comparison]:
    """Read, check, compare, write; returns the comparisons. Raises ReportError (nothing is written then)."""
    runs, refused = [], []
    for folder in find_run_folders(paths):
        try:
            runs.append(read_run(folder))
        except ReportError as error:
            refused.append(str(error))
    if refused and not skip_refused:
        raise ReportError("\n  ".join(["these runs cannot be reported on (--skip-refused leaves them out):", *refused]))
    problems = check_comparable(runs)
    if problems:
        raise ReportError("\n  ".join(["these runs may not be compared:", *problems]))
    pairs = pair_arms(runs)
    if not pairs:
        found = ", ".join(f"{run.arm} seed {run.seed}" for run in runs) or "none"
        raise ReportError(f"no two arms share a seed; finished runs: {found}")
    comparisons = compare(pairs, confidence)
    out.mkdir(parents=True, exist_ok=True)
    plot_curves(runs, out / "curves.png")
    for arms, members in pairs.items():
        plot_differences(arms, members, confidence, out / _figure(arms))
    _write_tables(runs, comparisons, out)
    (out / "report.md").write_text(_markdown(runs, pairs, comparisons, refused, confidence))
    return comparisons


def compare(pairs: Mapping[tuple[str, str], Sequence[tuple[Run, Run]]], confidence: float) -> list[Comparison]:
    """Final values of every metric that both runs of a pair have, paired over seeds."""
    comparisons = []
    for (first_arm, second_arm), members in pairs.items():
        names = dict.fromkeys(
            [*METRICS, *sorted({name for pair in members for run in pair for name in (*run.curves, *run.evaluation)}, key=_natural)]
        )
        for metric in names:
            if NOT_COMPARABLE.match(metric) or not COMPARABLE.match(metric):
                continue
            found = [(a.seed, a.final(metric), b.final(metric)) for a, b in members]
            both = [(seed, x, y) for seed, x, y in found if x is not None and y is not None]
            if both:
                seeds, firsts, seconds = zip(*both, strict=True)
                difference = paired_difference(firsts, seconds, confidence)
                comparisons.append(Comparison(metric, first_arm, second_arm, seeds, fmean(firsts), fmean(seconds), difference))
    return comparisons


def _write_tables(runs: Sequence[Run], comparisons: Sequence[Comparison], out: Path) -> None:
    columns = ["metric", "first_arm", "second_arm", "n", "first", "second", "difference", "sd", "low", "high", "confidence", "words"]
    with (out / "differences.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for c in comparisons:
            d = c.difference
            writer.writerow([c.metric, c.first_arm, c.second_arm, d.n, c.first, c.second, d.mean, d.sd, d.low, d.high, d.confidence, c.words])
    listed = [
        {"path": str(run.path), "arm": run.arm, "seed": run.seed, "steps": run.steps, "val/loss": run.final("val/loss")}
        | {key: run.summary[key] for key in ("corpus_sha256", "initial_weights_sha256", "data_order")}
        for run in runs
    ]
    body = {"runs": listed, "differences": [asdict(c) | {"words": c.words} for c in comparisons]}
    (out / "report.json").write_text(json.dumps(body, indent=2, default=str) + "\n")


def _markdown(
    runs: Sequence[Run],
    pairs: Mapping[tuple[str, str], Sequence[tuple[Run, Run]]],
    comparisons: Sequence[Comparison],
    refused: Sequence[str],
    confidence: float,
) -> str:
    config, most = runs[0].config, max(len(members) for members in pairs.values())
    lines = [
        f"# Comparison of teachers: {', '.join(dict.fromkeys(run.arm for run in runs))}",
        "",
        f"model {config.get('model.name')}, data {config.get('data.name')}, backend {runs[0].summary.get('backend')}, "
        f"stage {config.get('stage.name')}, {runs[0].steps} steps, top-k {config.get('model.index_topk')}.",
        "Paired by seed; corpus, initial weights, data order and config were checked to be equal.",
        "",
    ]
    if most == 1:
        lines += ["**One seed per arm. No interval can be given: a difference below may be nothing but the spread between seeds.**", ""]
    elif most < 4:
        lines += [
            f"{most} paired seeds: the intervals rest on {most - 1} degree{'s' if most > 2 else ''} of freedom and are wide for that reason.",
            "",
        ]
    lines += ["## Runs", "", "| arm | seed | validation loss | bits per byte | folder |", "|---|---|---|---|---|"]
    for run in sorted(runs, key=lambda r: (r.arm, r.seed)):
        lines.append(f"| {run.arm} | {run.seed} | {_number(run.final('val/loss'))} | {_number(run.final('val/bits_per_byte'))} | `{run.path}` |")
    lines += ["", "| arm | runs | validation loss, mean | sd over seeds |", "|---|---|---|---|"]
    for arm in dict.fromkeys(run.arm for run in runs):
        losses = [loss for run in runs if run.arm == arm and (loss := run.final("val/loss")) is not None]
        lines.append(f"| {arm} | {len(losses)} | {fmean(losses):.5g} | {f'{stdev(losses):.2g}' if len(losses) > 1 else 'one seed'} |")
    for arms in pairs:
        lines += _pair_section(arms, [c for c in comparisons if (c.first_arm, c.second_arm) == arms], confidence)
    lines += ["", "## Curves", "", "![overlaid curves](curves.png)", "", "## How to read this", ""]
    judged = [c for c in comparisons if c.difference.n > 1]
    if judged:
        hits = sum(c.difference.excludes_zero for c in judged)
        lines.append(
            f"- {len(judged)} intervals were looked at (differences.csv has all); {hits} exclude zero. With no difference at all, about "
            f"{len(judged) * (1 - confidence):.1f} would by chance, and many of these yardsticks move together. Fix the yardstick before looking."
        )
    lines += [
        '- "No difference seen" is not "no difference": the interval says how large a difference these runs would leave room for.',
        "- Recall, mass and KL against a teacher favour the arm trained on it. Loss, KL(dense || sparse) and attention-output error favour neither.",
        "- The training losses of the indexers (indexer/kl) are left out: each is the KL to another target, and the targets differ in entropy.",
        "- indexer/* and teacher/tv of a sparse stage range over the entries that the arm itself selected, recall and mass over all visible ones; "
        "eval/* range over all visible entries in every arm.",
        "- The seed stands for initial weights and data order together; inference reaches this model size and corpus, no further.",
    ]
    notes = surrounding_differences(runs)
    if notes:
        lines += ["", "## Not the same in all runs (did not stop the comparison)", "", *(f"- {note}" for note in notes)]
    used = {id(run) for members in pairs.values() for pair in members for run in pair}
    left = [f"{run.path}: no other arm with seed {run.seed}" for run in runs if id(run) not in used]
    if refused or left:
        lines += ["", "## Left out of the differences", "", *(f"- {text}" for text in (*refused, *left))]
    return "\n".join(lines) + "\n"


def _pair_section(arms: tuple[str, str], comparisons: Sequence[Comparison], confidence: float) -> list[str]:
    first, second = arms
    header = f"| yardstick | unit | {first} | {second} | difference | {confidence:.0%} interval | n | what it says | note |"
    lines = [
        "",
        f"## {first} - {second}",
        "",
        f"Last values; difference = {first} minus {second}, mean over paired seeds.",
        "",
        header,
        "|---" * 9 + "|",
    ]
    for c in comparisons:
        if c.metric not in METRICS and not EVALUATION_TABLE.match(c.metric):
            continue
        name, unit, note = METRICS.get(c.metric) or (c.metric, "", _evaluation_note(c.metric))
        lines.append(_row(c, f"{name} | {unit}", note))
    layers = [c for c in comparisons if LAYER_TABLE.match(c.metric)]
    if layers:
        lines += ["", "By layer:", "", header.replace("| note |", "|"), "|---" * 8 + "|", *(_row(c, f"{c.metric} | ", None) for c in layers)]
    return [*lines, "", f"![{first} minus {second} over training]({_figure(arms)})"]


def _figure(arms: tuple[str, str]) -> str:
    return f"differences_{arms[0]}_{arms[1]}.png"


def _row(c: Comparison, head: str, note: str | None) -> str:
    d = c.difference
    interval = f"{d.low:+.3g} to {d.high:+.3g}" if d.low is not None and d.high is not None else "one seed"
    row = f"| {head} | {_number(c.first)} | {_number(c.second)} | {d.mean:+.3g} | {interval} | {d.n} | {c.words} |"
    return row if note is None else f"{row} {note} |"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorting key that puts @4 before @16."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _evaluation_note(metric: str) -> str:
    for teacher in ("full_csa", "compressed_only"):
        if teacher in metric:
            return f"favours {teacher} by construction"
    return "descriptive" if metric == "eval/tv" else "neutral"


def _number(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.5g}"


if __name__ == "__main__":
    sys.exit(main())
