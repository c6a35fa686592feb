# SPDX-License-Identifier: Apache-2.0
"""Correctness gate of backend=triton on a GPU: `python -m benchmarks.csa_gate [--workers N] [--only TEXT] [--json FILE]`.

A pairwise cover of the grid (csa_gate_cases.py) and every extreme alone (csa_gate_extremes.py), judged against float64 (csa_gate_checks.py).
Almost all of its time goes into compiling kernels, so that several processes share the card. Exit status 0 only if everything is green.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance, write_json
from benchmarks.csa_gate_cases import Case, ids_of, inputs_of, pairwise_cases
from benchmarks.csa_gate_checks import (
    exact_d_score,
    exact_scores,
    judge,
    poisoned_outputs,
    reference_once,
    rounding_yardstick,
    selection_failures,
    train_once,
)
from benchmarks.csa_gate_extremes import EXTREMES
from kernels import Backend, get_backend


@dataclass(frozen=True)
class GateReport:
    """passed; one record {name, failures, errors, seconds} per check; seconds of the whole gate."""

    passed: bool
    records: list[dict[str, Any]]
    seconds: float

    def lines(self) -> list[str]:
        """Every failure, then one line that sums up."""
        failed = [r for r in self.records if r["failures"]]
        lines = [f"RED   {r['name']}: {'; '.join(r['failures'][:4])}" for r in failed]
        word = "green" if self.passed else "RED"
        return [*lines, f"gate {word}: {len(self.records) - len(failed)} of {len(self.records)} checks passed in {self.seconds:.0f} s"]


def check_case(backend: Backend, case: Case, device: str, seed: int) -> dict[str, Any]:
    """Selection and one training step of a case; {failures, errors}."""
    x = inputs_of(case, device, seed)
    with poisoned_outputs():
        chosen = backend.select(x.index_q, x.index_k, x.index_w, x.layout, x.ratio, x.topk)
    scores = exact_scores(x.index_q, x.index_k, x.index_w)
    failures = selection_failures(chosen, scores, x.layout.entry_start(x.ratio), x.layout.visible_compressed(x.ratio))
    x.selected = ids_of(case, x, chosen, seed)
    exact = reference_once(x, case.teacher)
    yardstick = rounding_yardstick(x, exact, exact_d_score(x, case.teacher))
    with poisoned_outputs():
        got = train_once(backend, x, x.leaves(), case.teacher)
    result = judge(x, got, exact, yardstick, 4.0 * case.logits if case.logits > 1 else 4.0)
    result["failures"] = failures + result["failures"]
    return result


def tasks(only: str | None) -> list[tuple[str, Any]]:
    """(name, case or extreme), the long ones first."""
    everything: list[tuple[str, Any]] = [(f"extreme: {name}", function) for name, function in EXTREMES.items()]
    everything += [(case.name(), case) for case in pairwise_cases()]
    return [task for task in everything if only is None or only in task[0]]


def run_task(number: int, name: str, what: Any, device: str) -> dict[str, Any]:
    """One record of the report; an exception is a failure."""
    began = time.perf_counter()
    try:
        backend = get_backend("triton")
        result = check_case(backend, what, device, number) if isinstance(what, Case) else {"failures": what(backend, device), "errors": {}}
    except Exception as error:
        traceback.print_exc()
        result = {"failures": [f"{type(error).__name__}: {str(error).strip()[:300]}"], "errors": {}}
    return {"name": name, "seconds": round(time.perf_counter() - began, 1)} | result


def _worker(share: str, device: str, only: str | None, path: Path) -> None:
    index, count = (int(part) for part in share.split("/"))
    todo = list(enumerate(tasks(only)))[index::count]
    with path.open("w") as file:
        for number, (name, what) in todo:
            file.write(json.dumps(run_task(number, name, what, device)) + "\n")
            file.flush()


def run_gate(workers: int | None = None, only: str | None = None, device: str = "cuda") -> GateReport:
    """Run every check in `workers` processes on one GPU; a process that dies leaves its checks failed."""
    began = time.perf_counter()
    todo = tasks(only)
    workers = min(workers or min(16, os.cpu_count() or 1), max(1, len(todo)))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.jsonl" for i in range(workers)]
        command = [sys.executable, "-m", "benchmarks.csa_gate", "--device", device] + (["--only", only] if only else [])
        processes = [subprocess.Popen([*command, "--worker", f"{i}/{workers}", "--json", str(path)]) for i, path in enumerate(paths)]
        for process in processes:
            process.wait()
        records = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    done = {record["name"] for record in records}
    records += [{"name": name, "failures": ["not run: its process died"], "errors": {}, "seconds": 0} for name, _ in todo if name not in done]
    passed = bool(records) and not any(record["failures"] for record in records)
    return GateReport(passed, records, time.perf_counter() - began)


def worst_shares(records: list[dict[str, Any]]) -> dict[str, float]:
    """Per quantity, the largest share of its limit that any check used."""
    worst: dict[str, float] = {}
    for record in records:
        for name, (error, allowed) in record["errors"].items():
            worst[name] = max(worst.get(name, 0.0), error / allowed if allowed > 0 else 0.0)
    return {name: round(share, 3) for name, share in sorted(worst.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="processes that share the card (default: one per core, at most 16)")
    parser.add_argument("--only", help="run the checks whose name contains this text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(args.worker, args.device, args.only, args.json)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("the gate needs an NVIDIA GPU; without one, the tests in tests/kernels/triton run small shapes in Triton's interpreter")
        return 2
    report = run_gate(args.workers, args.only, args.device)
    print("\n".join(report.lines()))
    if args.json:
        gate = {"passed": report.passed, "checks": len(report.records), "seconds": report.seconds}
        write_json(args.json, provenance() | {"gate": gate, "records": report.records})
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
