# SPDX-License-Identifier: Apache-2.0
"""docs/measured.md from what the benchmarks wrote: `python -m benchmarks.tables [--out docs/measured.md]`.

Every measured figure comes from a result file. Typed by hand are what the columns mean, the targets and the reasons of benchmarks.goals, and the few
notes that were added to a result file: which stage another commit ran (`measured_at`), which figures were left out and why (`peak_gib_left_out`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, goals
from benchmarks.goals import COMPRESSED, OURS, PEER
from benchmarks.loss_curves import seeds_order_data
from benchmarks.train_step import LENGTHS

CARD = "nvidia_h200"
PLAIN, DETERMINISTIC = "PyTorch autograd", "triton full_csa, deterministic"
COLUMNS = {
    OURS: "`full_csa`",
    COMPRESSED: "`compressed_only`",
    "triton without indexer loss": "no indexer loss",
    DETERMINISTIC: "`full_csa`, deterministic",
    PLAIN: "PyTorch autograd",
    "unfused": "`backend=unfused`",
}
CURVES = {"train/lm_loss": "LM loss", "indexer/kl": "indexer KL", "val/loss": "validation loss"}
TRAINING_PATHS = ("triton", "dense", "triton-plain", "unfused")
PIECES = {  # column -> (ours, the peer's parts that do the same); *: part of the step with full_csa
    "index scores + top-k": ("ours/scores + top-k", ("peer/scores", "peer/top-k")),
    "the same, scores kept for the loss *": ("ours/scores + top-k, scores kept", ()),
    "attention forward *": ("ours/attention forward", ("peer/attention forward",)),
    "attention backward": ("ours/attention backward", ("peer/attention backward",)),
    "attention backward with the teacher *": ("ours/attention backward + teacher", ("peer/attention backward", "peer/teacher")),
    "teacher alone": ("ours/teacher alone (log space)", ("peer/teacher",)),
    "KL + indexer backward *": ("ours/KL + indexer backward", ("peer/indexer backward",)),
}


def read(name: str) -> dict[str, Any]:
    """A result file by the first part of its name."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}_{CARD}.json").read_text())
    return content


def origin(result: dict[str, Any]) -> str:
    """Where the numbers come from, in one line."""
    parts = [result.get("card") or result["gpu"], f"torch {result['torch']}"]
    parts += [f"Triton {result['triton']}"] if "triton" in result and isinstance(result["triton"], str) else []
    gate = result.get("gate")
    if gate:
        kind = "quick correctness gate" if gate.get("quick") else "correctness gate"
        checks = f", {gate['checks']} checks" if "checks" in gate else ""
        parts.append((f"{kind} green" if gate["passed"] else f"{kind} RED") + checks)
    return f"{', '.join(parts)}, code at {result['git_sha']}{' with uncommitted changes' if result.get('git_dirty') else ''}."


def aims(core: dict[str, Any] | None, steps: dict[str, Any] | None, flashmla: dict[str, Any] | None, runs: dict[str, Any] | None = None) -> list[str]:
    """What was aimed at, what the result files that there are say, and why not."""
    reached = [*(goals.of_core(core) if core else []), *(goals.of_flashmla(flashmla) if flashmla else []), *(goals.of_steps(steps) if steps else [])]
    reached += goals.of_runs(runs, steps) if runs and steps else []
    if not reached:
        return []
    why = goals.reasons(reached)
    return [
        *("## Goals", ""),
        f"Targets for one H200; {sum(goal.met for goal in reached)} of {len(reached)} lines are met. The times are those of the sections below,",
        "of a second run those of the section on FlashMLA. Peer: FlashMLA and the cuDNN frontend, as in the next section.",
        f"±: the larger spread of the two times in a ratio, where it is more than {100 * goals.SHOWN_SPREAD:.0f} %.",
        *("", *grid(["goal", "where", "target", "reached", ""], [goal.cells() for goal in reached])),
        *(["", "Why not:", "", *why] if why else []),
    ]


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def ms(value: float | None, spread: float = 0.0) -> str:
    """Milliseconds; with the difference of the two passes where it is more than 5 %."""
    return "-" if value is None else (f"{value:.3f}" if value < 10 else f"{value:.1f}") + (f" ±{spread:.0%}" if spread > 0.05 else "")


def timed(record: dict[str, Any] | None) -> str:
    return "-" if not record or "ms" not in record else ms(record["ms"], record.get("spread", 0.0))


SHAPE = ["tokens", "heads", "head dim", "top-k"]


def _shape(r: dict[str, Any]) -> list[str]:
    return [f"{r['tokens']:,}", str(r["heads"]), str(r["head_dim"]), f"{r['topk']:,}"]


def core(result: dict[str, Any]) -> list[str]:
    """The step of one CSA layer's core, and its parts."""
    # the shapes of one layer stand together, the longer ones below
    shapes = sorted(result["shapes"], key=lambda r: (-r["head_dim"], r["heads"], r["topk"], r["tokens"]))
    done = [r for r in shapes if "failed" not in r]
    lines = ["## One CSA layer's core, one training step", "", origin(result), ""]
    lines += [
        "Index scores, top-k, attention forward, teacher, KL, attention backward, indexer backward; random bf16 data, one document, ratio 4, "
        "window 128.",
        "Where 4 x top-k reaches the number of tokens, every entry is selected. GiB: peak above the inputs.",
        "±: the difference of the two passes relative to their median, where it is more than 5 %.",
        *(f"Not measured: {r['tokens']:,} tokens, {r['heads']} heads of {r['head_dim']}: {r['failed']}." for r in shapes if "failed" in r),
        *("", *beside_the_peer(done, result["peer"]), "", *choices_of_ours(done), "", *parts(done)),
    ]
    return lines


def beside_the_peer(shapes: list[dict[str, Any]], peer: str) -> list[str]:
    """Time and memory of the step, ours and the peer's, where the peer ran and agreed."""
    rows = []
    with_graphs = any("captured" in r for r in shapes)
    for r in shapes:
        if PEER in r["step"]:
            own, other = r["step"][OURS], r["step"][PEER]
            gib, other_gib = r["peak_gib"][OURS], r["peak_gib"][PEER]
            speed, memory = f"{own['ms'] / other['ms']:.2f}", f"{gib / other_gib:.2f}"
            graphs = [timed(r["captured"].get(path)) for path in (OURS, PEER)] if "captured" in r else ["-", "-"]
            rows.append([*_shape(r), timed(own), timed(other), speed, *(graphs if with_graphs else []), f"{gib:.2f}", f"{other_gib:.2f}", memory])
    failed = [
        f"No peer at {r['tokens']:,} tokens, {r['heads']} heads of {r['head_dim']}: {why if isinstance(why, str) else f'it differs by {why:.1%}'}."
        for r in shapes
        if PEER not in r["step"] and (why := r["agrees"].get(PEER)) is not None
    ]
    alone = [f"{r['tokens']:,} tokens" for r in shapes if r["head_dim"] == 512 and PEER not in r["agrees"]]
    if not rows:
        return [f"No peer: {peer}.", *failed]
    graphs_head = ["ours as a graph", "peer as a graph"] if with_graphs else []
    return [
        "### Beside the peer",
        "",
        f"Peer: {peer}, composed by us with the KL in PyTorch and the scores of all entries in memory, in the same run; it agrees",
        "in output and mean KL. Ours: `backend=triton` with the teacher `full_csa`. Ratios: ours by the peer's, below 1 ours is faster or smaller.",
        f"The next table has the shapes that ours ran alone: small heads, which it would have to pad{''.join(f', and {item}' for item in alone)}.",
        *failed,
        *("", *grid([*SHAPE, "ours ms", "peer ms", "ms ratio", *graphs_head, "ours GiB", "peer GiB", "GiB ratio"], rows)),
    ]


def choices_of_ours(shapes: list[dict[str, Any]]) -> list[str]:
    """Every shape, also those without a peer: what the choices of our step cost, and plain PyTorch."""

    def longest(path: str) -> str:
        return f"{max((r['tokens'] for r in shapes if path in r['step']), default=0):,}"

    columns = {path: title for path, title in COLUMNS.items() if path != "unfused" or any(path in r["step"] for r in shapes)}
    rows = [
        [
            *_shape(r),
            *(timed(r["step"].get(path)) for path in columns),
            *(f"{r['peak_gib'][p]:.2f}" if p in r["peak_gib"] else "-" for p in (OURS, PLAIN)),
        ]
        for r in shapes
    ]
    return [
        "### Every shape, and what our choices cost",
        "",
        "ms of our step, with another teacher, without the indexer loss, in the deterministic mode (`torch.use_deterministic_algorithms`), and",
        f"of plain PyTorch autograd. -: not run; the deterministic mode ran up to {longest(DETERMINISTIC)} tokens, autograd up to {longest(PLAIN)}.",
        "",
        *grid([*SHAPE, *columns.values(), "`full_csa` GiB", "autograd GiB"], rows),
    ]


def parts(shapes: list[dict[str, Any]]) -> list[str]:
    """The parts of the step alone; with a peer, the ratio to its parts that do the same."""
    lines = [
        "### Parts of the step",
        "",
        "ms of each part alone; in brackets the ratio to the peer's parts that do the same. The step with `full_csa` runs the parts marked *;",
        "what it takes beyond their sum is the host's, for launches and autograd, and shows where the work is small.",
        "`compressed_only` has attention backward and the teacher alone instead of the backward with the teacher.",
    ]
    for there in (True, False):
        rows = []
        for r in shapes:
            pieces = r.get("pieces")
            if pieces is None or (PEER in r["step"]) != there:
                continue
            cells = []
            for own, peers in PIECES.values():
                other = [pieces[p]["ms"] for p in peers if p in pieces]
                ratio = f" ({pieces[own]['ms'] / sum(other):.2f})" if own in pieces and peers and len(other) == len(peers) else ""
                cells.append(timed(pieces.get(own)) + ratio)
            step = [pieces[own]["ms"] for name, (own, _) in PIECES.items() if name.endswith("*") and own in pieces]
            rows.append([*_shape(r), *cells, ms(sum(step))])
        if rows:
            lines += ["", *([] if there else ["Without a peer:", ""]), *grid([*SHAPE, *PIECES, "sum of *"], rows)]
    return lines


def training_step(result: dict[str, Any]) -> list[str]:
    """Tokens per second of whole training steps."""
    lines = ["## Whole training steps", "", origin(result), ""]
    lines += [
        f"model={result['model']}, one document per row, bf16. A step is forward, losses, backward and optimizer, without clipping, update of the",
        "router biases, schedule and logging. `dense`: the same decoder without compressors and indexers, every layer of which attends to all tokens",
        "through scaled_dot_product_attention. `triton` and `dense` run forward and backward as one CUDA graph and the optimizer as another, as",
        "training does, the others do not.",
        "",
    ]
    points = {(p["path"], p["tokens"]): p for p in result["points"]}
    lengths, paths = sorted({t for _, t in points}), [path for path in TRAINING_PATHS if any(p == path for p, _ in points)]

    def cell(path: str, tokens: int, field: str, form: str, scale: float = 1.0) -> str:
        value = points.get((path, tokens), {}).get(field)
        return "-" if value is None else f"{value * scale:{form}}"

    speed = []
    for tokens in lengths:
        ours, twin = (points.get((path, tokens), {}).get("tokens_per_second") for path in ("triton", "dense"))
        ratio = f"{ours / twin:.2f}" if ours and twin else "-"
        speed.append([f"{tokens:,}", *(cell(path, tokens, "tokens_per_second", ",.0f") for path in paths), ratio])
    lines += ["Tokens per second:", "", *grid(["tokens", *paths, "triton / dense"], speed), ""]
    memory = [[f"{t:,}", *(cell(p, t, "peak_gib", ".1f") for p in paths), *(cell(p, t, "gpu_busy", ".0f", 100) for p in paths)] for t in lengths]
    lines += [
        "Peak memory in GiB, with what a CUDA graph keeps for itself, and the share of the step in which the GPU works, in percent:",
        *("", *grid(["tokens", *(f"{path} GiB" for path in paths), *(f"{path} busy %" for path in paths)], memory), ""),
    ]
    spent = {t: points["triton", t]["profile"]["parts_ms"] for t in lengths if "profile" in points.get(("triton", t), {})}
    names = list(dict.fromkeys(name for parts in spent.values() for name in parts))
    lines += [
        "What the GPU does in a step of `triton`, ms, sorted by the names of the kernels: `optimizer` and `cross entropy` are without their matrix",
        "products, which count among the others.",
        "",
    ]
    lines += [
        *grid(["part", *(f"{t:,}" for t in spent)], [[name, *(f"{parts.get(name, 0.0):.1f}" for parts in spent.values())] for name in names]),
        "",
    ]
    lines += [f"{points[p, t]['failed']}: {p}, {t:,} tokens." for p, t in points if "failed" in points[p, t]]
    lines += [*not_run(points), crossing(result.get("crossover_tokens", {}).get("triton"), points)]
    return [*lines, "", f"![Tokens per second and memory](../benchmarks/results/train_step_{result['model']}_{CARD}.png)"]


def train_runs(runs: dict[str, Any], steps: dict[str, Any]) -> list[str]:
    """train.py beside the bare step: what everything around the step costs."""
    rows = []
    for tokens, (run, bare) in goals.compared_runs(runs, steps).items():
        speed = run["tokens_per_second"]
        spread = f" ±{run['spread']:.0%}" if run["spread"] > goals.SHOWN_SPREAD else ""
        beside = [f"{bare['tokens_per_second']:,.0f}", f"{speed / bare['tokens_per_second']:.2f}"] if bare else ["-", "-"]
        rows.append([f"{tokens:,}", f"{speed:,.0f}{spread}", *beside, f"{run['peak_gib']:.1f}" if "peak_gib" in run else "-"])
    return [
        *("### What `train.py` reaches", ""),
        f"`train.py`: {origin(runs)}",
        "",
        f"Bare step: {origin(steps)}",
        "",
        f"Tokens per second of `python train.py` with model={runs['model']} and backend={runs['backend']}, thus with clipping, router biases,",
        "schedule, logging, Lightning and the data pipeline, beside those of the bare step above.",
        f"Rows: {runs['rows']}. Left out: {runs['left_out']}.",
        f"Median of windows of {runs['window_steps']} steps, without the first; ±: the range of the middle half of them, where it is more than "
        f"{100 * goals.SHOWN_SPREAD:.0f} %.",
        *([f"Further arguments: `{' '.join(runs['further_arguments'])}`."] if runs["further_arguments"] else []),
        *("", *grid(["tokens", "`train.py`", "bare step", "ratio", "`train.py` GiB"], rows)),
        *(["", *failed] if (failed := [f"{p['tokens']:,} tokens failed: {p['failed']}." for p in runs["points"] if "failed" in p]) else []),
    ]


def not_run(points: Collection[tuple[str, int]]) -> list[str]:
    """A line with the paths and lengths of the whole benchmark that were left out; paths with the same lengths together."""
    left: dict[tuple[int, ...], list[str]] = {}
    for path in TRAINING_PATHS:
        lengths = tuple(tokens for tokens in LENGTHS if (path, tokens) not in points)
        if lengths:
            left.setdefault(lengths, []).append(f"`{path}`")
    where = [f"{listed(paths)} at {listed([f'{tokens:,}' for tokens in lengths])}" for lengths, paths in left.items()]
    return [f"Not run: {'; '.join(where)} tokens."] if where else []


def listed(items: list[str]) -> str:
    """a, b and c"""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def crossing(tokens: int | None, points: Mapping[tuple[str, int], dict[str, Any]]) -> str:
    """From which length on triton is faster than the dense twin, of the lengths that both were measured at."""
    both = sorted(t for path, t in points if path == "triton" and ("dense", t) in points)
    if tokens is None:
        return "Not faster than the dense twin at the longest measured length."
    if tokens == both[0]:
        return f"Faster than the dense twin at every measured length (shortest: {tokens:,} tokens)."
    return f"Faster than the dense twin from {tokens:,} tokens on."


def _named_shape(name: str) -> list[str]:
    """A shape as the FlashMLA comparison writes it: T=4096 H=64 D=512 K=512."""
    return [f"{int(part.split('=')[1]):,}" if part.startswith("T=") else part.split("=")[1] for part in name.split()]


def flashmla(result: dict[str, Any]) -> list[str]:
    """backend=flashmla beside backend=triton and unfused."""
    lines = ["## FlashMLA", "", origin(result), ""]
    lines += ["`flashmla` and `cudnn` are what the backend runs: the foreign op with the ids and keys laid out for it.", ""]
    for stage, title in (("attention_forward", "Attention forward, ms"), ("attention_backward", "Attention backward, ms")):
        record = result.get(stage)
        if isinstance(record, dict):
            names = list(dict.fromkeys(n for shape in record.values() for n, v in shape.items() if isinstance(v, dict) and "ms" in v))
            rows = [[*_named_shape(shape), *(timed(values.get(n)) for n in names)] for shape, values in record.items()]
            at = result.get("measured_at", {}).get(stage)
            lines += [f"{title}{f' (code at {at})' if at else ''}:", "", *grid([*SHAPE, *names], rows), ""]
    if isinstance(result.get("layer_step"), dict):
        rows = []
        for shape, backends in result["layer_step"].items():
            for name, v in backends.items():
                graph = ms(v["captured_ms"], v["captured_spread"]) if "captured_ms" in v else "-"
                rows.append([*_named_shape(shape), name, timed(v), graph, f"{v['peak_gib']:.2f}", f"{v['kl_mean']:.4f}"])
        lines += [
            "Step of one layer's core, ms (unfused: of a single run) and peak GiB above the inputs. FlashMLA runs small heads padded.",
            "As a CUDA graph, the form in which training runs it, the step is without what the host needs for launches.",
            *slower_graphs(result["layer_step"]),
            *("", *grid([*SHAPE, "backend", "ms", "ms as a graph", "GiB", "mean KL"], rows), ""),
        ]
    training = result.get("training", {})
    return lines + (flashmla_training(training) if "common_steps" in training else [])


def slower_graphs(layer_step: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """A line for every shape whose graph was slower than the plain form on every backend, by more than 1 %."""
    lines = []
    for shape, backends in layer_step.items():
        more = [v["captured_ms"] / v["ms"] - 1 for v in backends.values() if "captured_ms" in v]
        if more and min(more) > 0.01:
            tokens, heads = _named_shape(shape)[:2]
            lines.append(
                f"At {tokens} tokens and {heads} heads the graphs, timed after the plain forms, are {100 * min(more):.0f} to {100 * max(more):.0f} % "
                "slower than these; the cause is not known."
            )
    return lines


def flashmla_training(training: dict[str, Any]) -> list[str]:
    """Speed of a small model's training, and its loss and KL over the steps that every backend reached."""
    common, averaged = training["common_steps"], training["averaged_steps"]
    rows, notes = [], []
    for name, v in training["backends"].items():
        means = training["common"][name]
        numbers = [f"{v['peak_gib']:.2f}" if "peak_gib" in v else "-", f"{means['loss']:.4f}", f"{means['kl']:.5f}", f"{v['first_step_s']:.1f}"]
        rows.append([name, str(v["steps"]), ms(v["median_step_ms"]), *numbers])
        notes += [f"{name}: {v['cut_short']}."] if "cut_short" in v else []
    return [
        f"Training of model=small_flash from the same weights on the same batches, {training['documents_per_row']} documents in a row of "
        f"{training['tokens_per_row']:,} tokens.",
        f"Loss and KL: means of steps {common - averaged + 1} to {common}, the last {averaged} of the {common} steps that every backend did.",
        "The first step compiles kernels, for the first backend also those that others share; it counts in no median.",
        *([f"GiB left out {training['peak_gib_left_out']}."] if "peak_gib_left_out" in training else []),
        "",
        *grid(["backend", "steps", "ms a step", "GiB", "loss", "KL", "first step, s"], rows),
        *(["", *notes] if notes else []),
    ]


def loss_curves(results: list[dict[str, Any]]) -> list[str]:
    """Distances of the loss curves and their differences with the sign, per model."""
    lines = ["## The course of training", ""]
    lines += [
        "Does a backend train as unfused does? Runs of one seed have the same initial weights and see the same batches.",
        "Distance: mean absolute difference over the logged steps, averaged over the seeds, beside that of unfused runs of different seeds.",
        "Bias: mean relative difference to unfused of the same seed with its sign, ± the standard error over the seeds.",
    ]
    for result in results:
        between, apart, signed = (result[key] for key in ("distance_between_seeds", "distance_to_unfused", "signed_difference"))
        rows = [["unfused, another seed", *(few_digits(between[m]["mean"]) for m in CURVES)]]
        rows += [
            [f"{backend}, the same seed{of_seeds(own, result['seeds'])}", *(few_digits(own[m]["mean"]) for m in CURVES)]
            for backend, own in apart.items()
        ]
        biases = [
            [backend, *(biased(parts[m][part]) for m in ("train/lm_loss", "indexer/kl") for part in ("all", "second_half"))]
            for backend, parts in signed.items()
        ]
        lines += [
            *("", f"### model={result['model']}", "", origin(result), ""),
            f"{result['steps']} steps on the interpreter's sources, seeds 1 to {result['seeds']}. {what_seeds_set(result)}",
            *([f"Runs that failed: {', '.join(result['failed'])}."] if result["failed"] else []),
            *("", *grid(["distance", *CURVES.values()], rows), ""),
            *grid(["bias", "LM loss", "LM loss, second half", "indexer KL", "indexer KL, second half"], biases),
            *("", f"![Loss curves of {result['model']}](../benchmarks/results/loss_curves_{result['model']}_{CARD}.png)"),
        ]
    return lines


def what_seeds_set(result: dict[str, Any]) -> str:
    if seeds_order_data(result["settings"]):
        return "A seed sets the initial weights and the order of the data: a step of another seed sees another batch, which widens its distance."
    return "A seed sets the initial weights alone: every run sees the same batches."


def of_seeds(distances: dict[str, Any], seeds: int) -> str:
    """Nothing, or over how many seeds a backend was compared where that is not all of them."""
    compared = len(distances["val/loss"]["each"])
    return "" if compared == seeds else f" ({compared} seed{'s' if compared != 1 else ''})"


def few_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def biased(value: dict[str, Any]) -> str:
    error = "" if value["standard_error"] is None else f" ± {value['standard_error']:.2%}"
    return "-" if value["mean"] is None else f"{value['mean']:+.2%}{error}"


SECTIONS = {"csa_core": core, "train_step_small": training_step, "flashmla": flashmla}


def curve_files() -> list[Path]:
    return sorted(RESULTS.glob(f"loss_curves_*_{CARD}.json"))


def render() -> str:
    """The whole page; a result that does not exist yet is left out."""
    lines = [
        "# Measured",
        "",
        "Written by `python -m benchmarks.tables` from `benchmarks/results/`; absolute times hold for the card named beside them.",
    ]
    there = {name: read(name) for name in SECTIONS if (RESULTS / f"{name}_{CARD}.json").exists()}
    runs = read("train_run_small") if (RESULTS / f"train_run_small_{CARD}.json").exists() else None
    aimed = aims(there.get("csa_core"), there.get("train_step_small"), there.get("flashmla"), runs)
    lines += ["", *aimed] if aimed else []
    if (RESULTS / f"csa_gate_{CARD}.json").exists():
        gate = read("csa_gate")
        lines += ["", f"The gate of `backend=triton` by itself: {origin(gate)}"]
    for name, result in there.items():
        lines += ["", *"\n".join(SECTIONS[name](result)).rstrip().split("\n")]
        lines += ["", *train_runs(runs, result)] if runs and name == "train_step_small" else []
    if curve_files():
        lines += ["", *loss_curves([json.loads(path.read_text()) for path in curve_files()])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "measured.md")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(render())
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
