# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of train.py itself, with all that `benchmarks.train_step` leaves out of a step: Lightning, the data pipeline, gradient norms and
clipping, router biases, schedule and logging.

    python -m benchmarks.train_run                                  # model=small, 2k .. 32k tokens; needs an NVIDIA GPU
    python -m benchmarks.train_run data.num_workers=2 --out workers.json --tokens 4096              # further arguments go to train.py
    python -m benchmarks.train_run --device cpu --model nano --tokens 64 --steps 12 --window 4      # tries the command out, writes nothing

Each length is a run of its own, in a folder that is removed afterwards, on a token file of random ids (data=memmap) of which every row is one whole
document, as in train_step. A window is what lies between two logs (`throughput/tokens_per_second` of metrics.csv); the figure is the median of the
windows after the first, in which kernels are compiled and the CUDA graph is captured. Checkpoint and validation come after the last step, and a run
in which one came earlier is refused. Writes benchmarks/results/train_run_<model>_<card>.json, anew after every length.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from benchmarks import RESULTS, provenance, write_json
from benchmarks.train_step import load_config

ROOT = Path(__file__).parent.parent
MODELS = sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.yaml"))
LENGTHS = (2_048, 4_096, 8_192, 16_384, 32_768)
SPEED, MEMORY, VALIDATED, LAST = "throughput/tokens_per_second", "memory/peak_gib", "val/loss", "last.ckpt"
LIMIT_S = 400  # a run that takes longer hangs
ROWS = "random ids, one whole document in each row"
LEFT_OUT = "checkpoint and validation, both after the last step; indexer diagnostics, which are off"


def steps_for(tokens: int) -> int:
    """So many steps that the measured part takes five to eight seconds where an H200 makes what it should."""
    return min(400, max(100, 2_000_000 // tokens // 10 * 10))


def overrides(model: str, backend: str, device: str, tokens: int, steps: int, window: int) -> list[str]:
    """Arguments of train.py for rows of `tokens` tokens, `steps` steps and a log every `window` steps, but for data.path and run_dir."""
    return [
        f"model={model}",
        f"backend={backend}",
        f"trainer={'gpu' if device == 'cuda' else 'cpu'}",
        "data=memmap",
        f"data.sequence_length={tokens}",
        f"data.tokens_per_batch={tokens}",
        "data.validation_batches=1",
        f"trainer.max_steps={steps}",
        f"trainer.log_every_n_steps={window}",
        f"trainer.val_every_steps={steps}",
        f"callbacks.checkpoint.every_n_steps={steps + 1}",
        "callbacks.indexer_diagnostics.enabled=false",
        "scheduler.warmup_steps=10",
        "optimizer.lr=1e-3",
    ]


def write_rows(path: Path, tokens: int, rows: int, vocab: int) -> None:
    """A token file of `rows` training documents and one for validation, each of `tokens` ids."""
    from csa_model.data.token_file import write_token_file

    draw, eos = np.random.default_rng(0), vocab - 1
    documents = (np.append(draw.integers(0, eos, tokens - 1), eos) for _ in range(rows + 1))
    write_token_file(path, documents, vocab=vocab, eos=eos, token_bytes=np.full(vocab, 4), train_documents=rows)  # bytes are counted as for text


def figures(folder: Path, tokens: int, steps: int, window: int) -> dict[str, Any]:
    """What a run folder says. ValueError where a checkpoint or a validation fell into a window, or no window is left."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    early = [f"validation at step {row['step']}" for row in rows if row.get(VALIDATED) and int(row["step"]) < steps]
    early += [path.name for path in sorted((folder / "checkpoints").iterdir()) if path.name != LAST]
    if early:
        raise ValueError(f"the windows are not free of {', '.join(early)}")
    # the first window of a run with a graph has fewer steps: those before the graph is replayed do not count
    after_the_first = [row for row in rows if int(row["step"]) > window]
    windows, memory = ([float(row[name]) for row in after_the_first if row.get(name)] for name in (SPEED, MEMORY))
    if len(windows) < 2:
        raise ValueError("fewer than two windows after the first: raise --steps or lower --window")
    speed, (lower, _, upper) = median(windows), quantiles(windows, n=4, method="inclusive")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "tokens_per_second": speed,
        "step_ms": tokens / speed * 1e3,
        "spread": (upper - lower) / speed,
        "slowest_window": min(windows),
        "fastest_window": max(windows),
        "windows": [round(value, 1) for value in windows],
        **({"peak_gib": max(memory)} if memory else {}),
        "backend": summary["backend"],
        "cuda_graph": summary["cuda_graph"],
    }


def measure(options: Sequence[str], tokens: int, steps: int, window: int, vocab: int) -> dict[str, Any]:
    """One run of train.py; one that fails is a result too."""
    record: dict[str, Any] = {"tokens": tokens, "steps": steps, "arguments": list(options)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        rows, run = Path(temporary) / "rows.bin", Path(temporary) / "run"
        write_rows(rows, tokens, steps + 2, vocab)  # the loader reads ahead
        command = [sys.executable, str(ROOT / "train.py"), *options, f"data.path={rows}", f"run_dir={run}"]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT_S, check=False
            )
            if done.returncode:
                lines = done.stdout.strip().splitlines()
                record["failed"] = " ".join(line.strip() for line in lines[-3:])[-300:] if lines else f"exit status {done.returncode}"
            else:
                record |= figures(run, tokens, steps, window)
        except subprocess.TimeoutExpired:
            record["failed"] = f"no end after {LIMIT_S} s"
        except ValueError as error:
            record["failed"] = str(error)
    return record | {"wall_s": round(time.monotonic() - began, 1)}


def arguments(given: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes on to train.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--backend", help="default: triton on a GPU, unfused elsewhere")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of a row")
    parser.add_argument("--steps", type=int, help="default: 400 at most, 100 at least, about two million tokens between them")
    parser.add_argument("--window", type=int, default=10, help="steps between two logs, as trainer.log_every_n_steps (default: as there)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/train_run_<model>_<card>.json, none on a CPU")
    args, extra = parser.parse_known_args(given)
    args.backend = args.backend or ("triton" if args.device == "cuda" else "unfused")
    if wrong := [item for item in extra if "=" not in item or item.startswith("-")]:
        parser.error(f"{' '.join(wrong)}: neither an option nor key=value of train.py; give key=value before or after another option than --tokens")
    own = {item.split("=")[0] for item in overrides("", "", "", 1, 1, 1)} | {"data.path", "run_dir", "runs_dir", "task"}
    if taken := [item for item in extra if item.split("=")[0].lstrip("+") in own]:
        parser.error(f"{' '.join(taken)}: set here")
    least = min(args.steps or steps_for(tokens) for tokens in args.tokens)
    if args.window < 1 or least < 3 * args.window or least < 10:
        parser.error(f"{least} steps with --window {args.window}: at least 10 steps and two windows after the first are needed")
    return args, extra


def main() -> int:
    args, extra = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU; --device cpu tries it out at small lengths")
        return 2
    points: list[dict[str, Any]] = []
    result = provenance() | {
        "model": args.model,
        "backend": args.backend,
        "rows": ROWS,
        "left_out": LEFT_OUT,
        "window_steps": args.window,
        "further_arguments": extra,
        "points": points,
    }
    target = args.out
    if target is None and args.device == "cuda":
        target = RESULTS / f"train_run_{args.model}_{torch.cuda.get_device_name().lower().replace(' ', '_')}.json"
    for tokens in args.tokens:
        steps = args.steps or steps_for(tokens)
        vocab = load_config(args.model, args.backend, tokens, args.device).model.vocab_size
        record = measure([*overrides(args.model, args.backend, args.device, tokens, steps, args.window), *extra], tokens, steps, args.window, vocab)
        points.append(record)
        memory = f"{record['peak_gib']:.2f} GiB" if "peak_gib" in record else "N/A"
        told = record.get("failed") or (
            f"{record['tokens_per_second']:12,.0f} tokens/s ±{record['spread']:.1%}  {record['step_ms']:8.2f} ms a step  "
            f"{len(record['windows'])} windows  peak {memory}"
        )
        print(f"{args.model} T={tokens:6d} {told}  ({record['wall_s']:.0f} s)", flush=True)
        if target is not None:  # after every length: a run that is stopped keeps what it has
            write_json(target, result)
    if target is not None:
        print(f"wrote {target}")
    return 1 if any("failed" in record for record in points) else 0


if __name__ == "__main__":
    sys.exit(main())
