# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of one decoder: tokens per second and peak memory, and where the time goes.

    python -m benchmarks.train_step                        # model=small, 2k .. 64k tokens, every path; needs an NVIDIA GPU
    python -m benchmarks.train_step --model base --tokens 4096 16384 --paths triton dense
    python -m benchmarks.train_step --device cpu --model nano --tokens 256 --paths unfused dense    # tries the command out, writes nothing

Paths: `unfused` and `triton` are the backends; `dense` is the dense-attention twin: the same decoder without compressors and indexers, whose every
attention layer is PyTorch's scaled_dot_product_attention over all tokens; on a GPU it has the fused row operations of `triton`. There `triton` and
`dense` run forward and backward as one CUDA graph, as training does; `triton-plain` is trainer.cuda_graph=never. One step: forward, losses, backward,
optimizer, without clipping, update of the router biases, schedule and logging; one document per row, random tokens, bf16 autocast on a GPU. Each
point runs in a process of its own, so that memory is its own. Writes benchmarks/results/train_step_<model>_<card>.json and .png with the crossover;
short lengths where sparse attention loses are shown as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import RESULTS, provenance, write_json
from kernels import Backend, BackendUnsupported, Geometry, PackedLayout, StaticLayout, get_backend
from kernels.backend import RowOperations

CONFIGS = Path(__file__).parent.parent / "configs"
LENGTHS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
PLAIN = "-plain"  # this path launches every kernel by itself
PATHS = ("unfused", "triton", "triton" + PLAIN, "dense")
READY = "ready"  # what a process that waits for its turn prints
# What a kernel's name says about the part of the step it belongs to; the first match counts.
PARTS = {
    "hyper-connections": (
        "open_kernel",
        "write_kernel",
        "write_backward",
        "products_kernel",
        "streams_backward",
        "fn_backward",
        "hyper_maps",
        "add_partials",
    ),
    "norms and rotation": ("norm_rotate",),
    "column sums": ("column_sum",),
    "router and SwiGLU": ("route_", "swiglu"),
    "compressor": ("compress_pool",),
    "index scores and top-k": ("scores_kernel", "parts_kernel", "long_row_kernel"),
    "cross entropy": ("row_loss_kernel",),
    "indexer loss": ("loss_kernel", "teacher_kernel", "head_sum_kernel", "row_kernel", "gradient_kernel"),
    "experts' rows": ("sum_kernel", "spread_kernel", "count_kernel", "place_kernel", "load_kernel", "balance_kernel"),
    "optimizer": ("multi_tensor", "foreach", "adam", "momentum_kernel", "divide_kernel", "decay_and_add", "polynomial_kernel"),
    "attention": ("forward_kernel", "backward_kernel", "prepare_kernel", "plan_kernel", "fmha", "flash", "sdpa", "attention"),
    "matrix products": ("gemm", "cutlass", "nvjet", "matmul", "cublas", "xmma"),
    "reductions": ("reduce", "softmax", "norm", "logsumexp"),
    "sort, scatter, gather": ("sort", "scatter", "gather", "index", "embedding"),
    "copies and casts": ("copy", "memcpy", "memset", "cat"),
}


class DenseTwin(Backend):
    """Attention over all earlier tokens of one document through scaled_dot_product_attention; no sink, no compressed entries."""

    name = "dense"

    def __init__(self) -> None:
        self._rows: RowOperations | None = None

    def require(self, geometry: Geometry) -> None:
        """Any geometry of window-only layers; on a GPU one whose row operations the triton backend fuses."""
        if any(geometry.ratios):
            raise ValueError(f"the dense twin has no compressed layers, got ratios {geometry.ratios}")
        if geometry.device_type == "cuda":
            triton = get_backend("triton")
            triton.require(geometry)
            self._rows = triton.row_operations()

    def capturable(self) -> bool:
        return True

    def row_operations(self) -> RowOperations | None:
        """Those of backend=triton on a GPU, so that the twins differ in their attention alone."""
        return self._rows

    def describe(self) -> dict[str, str]:
        return {"attend": f"scaled_dot_product_attention, PyTorch {torch.__version__}"}

    def select(self, *arguments: Any, **named: Any) -> Tensor:
        raise BackendUnsupported("the dense twin selects nothing", "window-only layers, or another backend")

    def indexer_loss(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        raise BackendUnsupported("the dense twin has no indexer", "window-only layers, or another backend")

    def attend(
        self, q: Tensor, window_kv: Tensor, compressed_kv: Any, selected: Any, sink: Tensor, layout: PackedLayout, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """`q` [T, H, D] against the one key-value head `window_kv` [T, D]; the layout must be one document without padding, which of a StaticLayout
        the caller has to know."""
        if not isinstance(layout, StaticLayout) and layout.lengths != (layout.num_tokens,):
            raise ValueError("the dense twin takes one document per row")
        tokens, heads, dim = q.shape
        kv = window_kv.to(q.dtype)[None, None].expand(1, heads, tokens, dim)
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], kv, kv, is_causal=True, scale=rest[2])
        # the sinks stay parameters of the twin: without a gradient the optimizer would miss them
        return out[0].transpose(0, 1) + 0 * sink.sum().to(out.dtype), q.new_zeros(tokens, heads, dtype=torch.float32)


def load_config(model: str, path: str, tokens: int, device: str) -> Any:
    """The typed configuration of a path."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from csa_model.config import from_mapping

    gpu = device == "cuda"
    overrides = [
        f"model={model}",
        f"backend={'unfused' if path == 'dense' else path.removesuffix(PLAIN)}",
        f"trainer={'gpu' if gpu else 'cpu'}",
        f"data.sequence_length={tokens}",
        f"data.tokens_per_batch={tokens}",
    ]
    if path == "dense":
        overrides += ["teacher=none"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS.resolve())):
        composed = OmegaConf.to_container(compose("train", overrides=overrides), resolve=True, throw_on_missing=True)
    config = from_mapping(composed)  # type: ignore[arg-type]
    if path == "dense":
        flat = dataclasses.replace(config.model, compress_ratios=(0,) * len(config.model.compress_ratios))
        config = dataclasses.replace(config, model=flat)
    return config


def build_step(model: str, path: str, tokens: int, device: str) -> tuple[Any, Callable[[], Tensor]]:
    """The DecoderTraining of a path, and the function that takes one step of it, on the same row at every call, and returns the loss."""
    from benchmarks.decoder_training import DecoderTraining
    from csa_model.data.packing import pack

    config = load_config(model, path, tokens, device)
    backend = DenseTwin() if path == "dense" else get_backend(path.removesuffix(PLAIN))
    training = DecoderTraining(config, backend, device, graph=not path.endswith(PLAIN))
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, tokens)
    batch = pack([ids], tokens, sorted({r for r in config.model.compress_ratios if r})).to(device)
    return training, lambda: training.step(batch).total.detach()


def take_steps(model: str, path: str, tokens: int, device: str) -> None:
    """As many steps as it takes until every kernel is compiled and the graph, if there is one, replayed; nothing of them stays."""
    training, step = build_step(model, path, tokens, device)
    for _ in range(3):
        step()
    del training, step
    gc.collect()  # the decoder and its graph know each other
    if device == "cuda":
        torch.cuda.empty_cache()


def time_step(step: Callable[[], Tensor], device: str, repeats: int, at_most: float = 3.0) -> list[float]:
    """Seconds of a step, from each of `repeats` groups of three that follow one another as in training, after two steps to warm up.

    Steps of a second and more go one by one, and after one to warm up; no new group begins when `at_most` seconds have passed.
    """
    seconds: list[float] = []
    group, spent, slow = 1, 0.0, 1.0
    for number in range(2 + repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(group):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        if number == 1:
            group = 3 if took < slow else 1
        if number >= 2 or (number == 1 and took >= slow):
            seconds.append(took / group)
            spent += took
        if spent > at_most:
            break
    return seconds


def profile_step(step: Callable[[], Tensor]) -> dict[str, Any]:
    """Milliseconds on the GPU of one step by part, how many kernels, copies and fills it ran, and which took longest."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    wall = time.perf_counter() - began
    parts: dict[str, float] = {}
    kernels = []
    for event in profiler.key_averages():
        milliseconds = event.self_device_time_total / 1e3
        if milliseconds <= 0:
            continue
        name = event.key.lower()
        part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "other elementwise")
        parts[part] = parts.get(part, 0.0) + milliseconds
        kernels.append({"kernel": event.key[:120], "calls": event.count, "ms": round(milliseconds, 3)})
    kernels.sort(key=lambda kernel: -kernel["ms"])
    ordered = dict(sorted(parts.items(), key=lambda part: -part[1]))
    number = sum(kernel["calls"] for kernel in kernels)
    gpu_ms = sum(parts.values())
    return {"parts_ms": ordered, "longest": kernels[:25], "gpu_ms": gpu_ms, "kernels": number, "wall_ms_with_profiler": wall * 1e3}


def measure_point(model: str, path: str, tokens: int, device: str, repeats: int, with_profile: bool) -> dict[str, Any]:
    """One point of the table; an out-of-memory error is a result too."""
    record: dict[str, Any] = {"path": path, "tokens": tokens}
    try:
        training, step = build_step(model, path, tokens, device)
        record["loss"] = step().item()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = time_step(step, device, repeats)
        record |= {"step_ms": median(seconds) * 1e3, "tokens_per_second": tokens / median(seconds), "slowest_ms": max(seconds) * 1e3}
        if device == "cuda":
            record["peak_gib"] = training.peak_bytes() / 2**30
            if with_profile:
                record["profile"] = profile_step(step)
                record["gpu_busy"] = record["profile"]["gpu_ms"] / record["step_ms"]
                record["host_bound"] = max(0.0, 1.0 - record["gpu_busy"])  # share of the step in which the GPU waits for the host
    except torch.OutOfMemoryError as error:
        record["failed"] = f"out of memory: {str(error).splitlines()[0][:160]}"
    return record


def crossover(records: list[dict[str, Any]], path: str) -> int | None:
    """Shortest measured length from which on `path` is faster than the dense twin at every longer one; None if there is none."""
    speed = {(r["path"], r["tokens"]): r.get("tokens_per_second", 0.0) for r in records}
    lengths = sorted({t for p, t in speed if p == path and ("dense", t) in speed}, reverse=True)
    best = None
    for tokens in lengths:
        if speed[path, tokens] <= speed["dense", tokens]:
            break
        best = tokens
    return best


def plot(records: list[dict[str, Any]], title: str, target: Path) -> None:
    """Tokens per second and peak memory over the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for path in PATHS:
        points = sorted((r["tokens"], r["tokens_per_second"], r.get("peak_gib")) for r in records if r["path"] == path and "tokens_per_second" in r)
        if points:
            left.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=path)
            right.plot([p[0] for p in points], [p[2] for p in points], marker="o", label=path)
    for axis, label in ((left, "tokens per second"), (right, "peak memory (GiB)")):
        lengths = sorted({r["tokens"] for r in records})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        axis.set_yscale("log")
        axis.set_xlabel("tokens in the row (one document)")
        axis.set_ylabel(label)
        axis.grid(True, alpha=0.3)
    right.legend(loc="upper left")  # of both: beside rising curves there is room
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def measured_points(args: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(path, tokens, record) of every point, one after the other, each in a process of its own.

    They import side by side and wait; the first begins when all have done so, for imports would take the host's time from what is measured. The first
    process of each path also takes its first steps then: what it compiles stands in Triton's cache for the others.
    """
    with contextlib.ExitStack() as stack:
        waiting = []
        for tokens, path in itertools.product(args.tokens, args.paths):
            command = [sys.executable, "-m", "benchmarks.train_step", "--model", args.model, "--device", args.device, "--repeats", str(args.repeats)]
            command += ["--point", f"{path}@{tokens}", "--wait"] + (["--no-profile"] if args.no_profile else [])
            command += ["--compile"] if args.device == "cuda" and tokens == args.tokens[0] else []
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.kill)
            waiting.append((path, tokens, process, errors))
        for _, _, process, _ in waiting:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == READY:
                    break  # a process that dies instead closes its output
        for path, tokens, process, errors in waiting:
            printed, _ = process.communicate("go\n")
            if process.returncode:
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                yield path, tokens, {"path": path, "tokens": tokens, "failed": lines[-1][:300] if lines else "no output"}
            else:
                yield path, tokens, json.loads(printed.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help="file of configs/model")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU; --device cpu tries it out at small lengths")
        return 2
    if args.point:
        path, tokens = args.point.split("@")
        for module in ("benchmarks.decoder_training", "csa_model.data.packing", "hydra"):  # what takes long and needs no GPU
            importlib.import_module(module)
        if args.compile:
            take_steps(args.model, path, int(tokens), args.device)
        if args.wait:
            print(READY, flush=True)
        if args.wait and not sys.stdin.readline():
            return 1  # whoever started this is gone: without it, all that wait would measure at once
        print(json.dumps(measure_point(args.model, path, int(tokens), args.device, args.repeats, not args.no_profile)))
        return 0
    records = []
    result = provenance() | {"model": args.model, "points": records}
    target = RESULTS / f"train_step_{args.model}_{torch.cuda.get_device_name().lower().replace(' ', '_') if args.device == 'cuda' else 'cpu'}.json"
    for path, tokens, record in measured_points(args):
        records.append(record)
        memory = f"{record['peak_gib']:.2f} GiB" if "peak_gib" in record else "N/A"
        told = record.get("failed") or f"{record['tokens_per_second']:12,.0f} tokens/s  {record['step_ms']:9.1f} ms  peak {memory}"
        print(f"{args.model} T={tokens:6d} {path:12s} {told}", flush=True)
        if "profile" in record:
            print(f"    {record['profile']['kernels']:,} kernels on the GPU, which waits {record['host_bound']:.0%} of the step: ", end="")
            print(", ".join(f"{part} {ms:.1f} ms" for part, ms in record["profile"]["parts_ms"].items()), flush=True)
        if args.device == "cuda":  # after every point: a run that is stopped keeps what it has
            write_json(target, result)
    result["crossover_tokens"] = {path: crossover(records, path) for path in args.paths if path != "dense" and "dense" in args.paths}
    print(f"faster than the dense twin from: {result['crossover_tokens']}")
    if args.device == "cuda":
        write_json(target, result)
        plot(records, f"training step, model={args.model}, {torch.cuda.get_device_name()}", target.with_suffix(".png"))
        print(f"wrote {target}")
    return 0 if all("failed" not in r or r["failed"].startswith("out of memory") for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
