# SPDX-License-Identifier: Apache-2.0
"""What was aimed at on one H200 and what the result files say about it; the targets and the reasons are typed here, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PEER, OURS, COMPRESSED, NO_LOSS = "FlashMLA + cuDNN", "triton full_csa", "triton compressed_only", "triton without indexer loss"
INDEXER = (64, 128)  # heads and columns of the indexer in the core step
LONG = (4_096, 16_384, 65_536)
LARGE_HEADS = (64, 128)  # of 512: what the peer takes
SMALL = "H=16 D=64"
SHOWN_SPREAD = 0.05  # the smallest difference of two passes that is shown

FORWARD = "attention forward, speed / FlashMLA"
TRAIN_RUN = "train.py / bare training step, tokens per second"

# Why a goal is missed, by its name.
REASONS = {
    "core step / peer": "attention backward is two thirds of the step, and what limits it limits the step; on long rows the index scores add to it.",
    FORWARD: "on long rows it is slower under load than cold, most likely because the clock falls (it was not read).",
    "attention backward with the teacher / cuDNN and teacher": "fp32 additions in the L2 cache limit it, see "
    "[MEASURED.md](../kernels/triton_fused/MEASURED.md).",
    "index scores + top-k / peer": "on long rows nearly all of its time is matrix products, and the peer's are near the rate of the tensor cores "
    "too.",
    "16 heads of 64, step as a graph, flashmla / triton": "selection and indexer loss are the same kernels in both; only attention pays for padding.",
    "full_csa without KL and indexer backward / no indexer loss": "emitting the teacher and keeping the scores "
    "of the selected entries for the loss, see the parts below.",
    TRAIN_RUN: "most likely the log, every 10 steps: it reads figures off the GPU, which then waits for the next launch; and clipping passes over "
    "the gradients once more.",
    "full_csa / compressed_only, memory": "a few MiB more in some shapes, less in the others; which buffer it is was not looked into.",
}


@dataclass(frozen=True)
class Goal:
    """A ratio, what it was to be, and the larger spread of the two times that it is made of."""

    name: str
    where: str
    target: float
    at_most: bool
    reached: float
    spread: float = 0.0
    percent: bool = False

    @property
    def met(self) -> bool:
        return self.reached <= self.target if self.at_most else self.reached >= self.target

    @property
    def within_spread(self) -> bool:
        """Whether the target lies within the spread of what was reached, so that another run may tell otherwise."""
        return self.spread > SHOWN_SPREAD and abs(self.reached - self.target) <= self.spread * self.reached

    def cells(self) -> list[str]:
        """Goal, where, target, reached, met or missed. As many digits as it takes to see a missed target missed."""
        forms = [f".{digits}%" for digits in range(3)] if self.percent else [f".{digits}f" for digits in range(2, 5)]
        shown = [format(self.reached, form) for form in forms]
        equal = [format(self.target, form) for form in forms]
        reached = next((a for a, b in zip(shown, equal, strict=True) if self.met or a != b), shown[-1])
        target = equal[0]
        spread = f" ±{self.spread:.0%}" if self.spread > SHOWN_SPREAD else ""
        verdict = ("met" if self.met else "missed") + (", within the spread" if self.within_spread else "")
        return [self.name, self.where, f"{'≤' if self.at_most else '≥'} {target}", reached + spread, verdict]


def _quotient(above: list[dict[str, Any]], below: list[dict[str, Any]]) -> tuple[float, float]:
    """Sum of the times above by that of those below, and the larger of the two sums' spreads."""
    sums = [sum(t["ms"] for t in side) for side in (above, below)]
    spreads = [sum(t["ms"] * t.get("spread", 0.0) for t in side) / total for side, total in zip((above, below), sums, strict=True)]
    return sums[0] / sums[1], max(spreads)


def result_gib(shape: dict[str, Any]) -> float:
    """GiB of out, dq and d index_q, which any path returns, in bfloat16."""
    heads, dim = INDEXER
    return float(2 * shape["tokens"] * (2 * shape["heads"] * shape["head_dim"] + heads * dim) / 2**30)


def forward_target(tokens: int) -> float:
    return 1.15 if tokens <= 4_096 else 1.05


def of_core(core: dict[str, Any]) -> Iterator[Goal]:
    """The goals that benchmarks.csa_core answers."""
    shapes = [shape for shape in core["shapes"] if "failed" not in shape]
    large = {(s["tokens"], s["heads"]): s for s in shapes if s["head_dim"] == 512 and PEER in s["step"]}

    def where(shape: dict[str, Any]) -> str:
        dim = "" if shape["head_dim"] == 512 else f" of {shape['head_dim']}"
        return f"{shape['tokens']:,} tokens, {shape['heads']} heads{dim}"

    for tokens, target in ((4_096, 0.65), (16_384, 0.70)):
        if shape := large.get((tokens, 64)):
            step = shape["step"]
            yield Goal("core step / peer", where(shape), target, True, *_quotient([step[OURS]], [step[PEER]]))
    if shape := large.get((65_536, 64)):
        peak = shape["peak_gib"]
        yield Goal("peak memory / peer", where(shape), 0.70, True, peak[OURS] / peak[PEER])
        results = result_gib(shape)
        yield Goal("the same above out, dq and d index_q", where(shape), 0.15, True, (peak[OURS] - results) / (peak[PEER] - results))
    measured = [large[tokens, heads] for heads in LARGE_HEADS for tokens in LONG if "pieces" in large.get((tokens, heads), {})]
    for shape in measured:
        ours, peer = shape["pieces"]["ours/attention forward"], shape["pieces"]["peer/attention forward"]
        yield Goal(FORWARD, where(shape), forward_target(shape["tokens"]), False, *_quotient([peer], [ours]))
    for name, target, own, others in (
        ("attention backward with the teacher / cuDNN and teacher", 0.80, "attention backward + teacher", ("attention backward", "teacher")),
        ("index scores + top-k / peer", 0.70, "scores + top-k", ("scores", "top-k")),
    ):
        for shape in measured:
            pieces = shape["pieces"]
            yield Goal(name, where(shape), target, True, *_quotient([pieces[f"ours/{own}"]], [pieces[f"peer/{other}"] for other in others]))
    for shape in measured:
        step, pieces = shape["step"], shape["pieces"]
        if NO_LOSS in step and "ours/KL + indexer backward" in pieces:
            spread = max(step[name]["spread"] for name in (OURS, NO_LOSS))
            ratio = (step[OURS]["ms"] - pieces["ours/KL + indexer backward"]["ms"]) / step[NO_LOSS]["ms"]
            yield Goal("full_csa without KL and indexer backward / no indexer loss", where(shape), 1.02, True, ratio, spread)
    both = [shape for shape in shapes if OURS in shape["step"] and COMPRESSED in shape["step"]]
    times = [Goal("full_csa / compressed_only, time", where(s), 1.0, True, *_quotient([s["step"][OURS]], [s["step"][COMPRESSED]])) for s in both]
    memory = [Goal("full_csa / compressed_only, memory", where(s), 1.0, True, s["peak_gib"][OURS] / s["peak_gib"][COMPRESSED]) for s in both]
    for goals in (times, memory):
        if goals:
            worst = max(goals, key=lambda goal: goal.reached)
            yield Goal(worst.name, f"worst of {len(goals)} shapes: {worst.where}", worst.target, True, worst.reached, worst.spread)


def of_flashmla(flashmla: dict[str, Any]) -> Iterator[Goal]:
    """The attention forward a second time, and the goal for heads that FlashMLA takes padded only: how many times faster ours is than it is."""
    forward = flashmla.get("attention_forward")
    for shape, times in forward.items() if isinstance(forward, dict) else ():
        tokens, heads = (int(part[2:]) for part in shape.split()[:2])
        if heads in LARGE_HEADS and "FlashMLA op" in times:
            where = f"{tokens:,} tokens, {heads} heads, second run"
            yield Goal(FORWARD, where, forward_target(tokens), False, *_quotient([times["FlashMLA op"]], [times["triton"]]))
    for shape, backends in flashmla.get("layer_step", {}).items():
        ours = backends.get("triton", {})
        if SMALL not in shape or "captured_ms" not in ours:
            continue
        tokens = int(shape.split()[0].removeprefix("T="))
        for name, padded in backends.items():
            if name.startswith("flashmla") and "captured_ms" in padded:
                spread = max(padded["captured_spread"], ours["captured_spread"])
                backward = name.removeprefix("flashmla, ")
                reached = padded["captured_ms"] / ours["captured_ms"]
                yield Goal("16 heads of 64, step as a graph, flashmla / triton", f"{tokens:,} tokens, {backward}", 5.0, False, reached, spread)


def of_steps(steps: dict[str, Any]) -> Iterator[Goal]:
    """The goal for whole training steps: the GPU does not wait for the host."""
    for point in steps["points"]:
        if (point["path"], point["tokens"]) == ("triton", 4_096) and "gpu_busy" in point:
            where = f"{point['tokens']:,} tokens, model={steps['model']}"
            yield Goal("training step of triton, GPU busy", where, 0.95, False, point["gpu_busy"], percent=True)


def compared_runs(runs: dict[str, Any], steps: dict[str, Any]) -> dict[int, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Tokens -> (what train.py reached, the bare step on the same path if it was measured), of the runs that came to their end."""
    bare = {p["tokens"]: p for p in steps["points"] if p["path"] == runs["backend"] and "tokens_per_second" in p}
    done = sorted((p for p in runs["points"] if "failed" not in p), key=lambda p: p["tokens"])
    return {p["tokens"]: (p, bare.get(p["tokens"])) for p in done}


def of_runs(runs: dict[str, Any], steps: dict[str, Any]) -> Iterator[Goal]:
    """The goal for train.py: with all that it does around the step it is not launch-bound, and the data pipeline never starves it."""
    run, bare = compared_runs(runs, steps).get(4_096, (None, None))
    if run is not None and bare is not None:
        where = f"4,096 tokens, model={runs['model']}{'' if runs['git_sha'] == steps['git_sha'] else ', of two commits'}"
        yield Goal(TRAIN_RUN, where, 0.95, False, run["tokens_per_second"] / bare["tokens_per_second"], run["spread"])


def reasons(goals: Iterable[Goal]) -> list[str]:
    """One sentence for every goal that is missed somewhere; without a known reason, that."""
    missed = dict.fromkeys(goal.name for goal in goals if not goal.met)
    return [f"- {name}: {REASONS.get(name, 'the cause is not known.')}" for name in missed]
