# SPDX-License-Identifier: Apache-2.0
"""Correctness gate, then time and memory of one training step of one CSA layer's core: `python -m benchmarks.csa_core [--quick]`.

One step: index scores, top-k, attention forward, teacher, KL, attention backward, indexer backward; random bf16 data, one document, ratio 4.
Paths: backend=triton, FlashMLA + cuDNN frontend where both are installed, backend=unfused and plain PyTorch autograd up to 4,096 tokens; the first
two also as CUDA graphs, the form in which training runs them. Nothing is timed on a red gate, and no path whose KL or output disagrees is reported.
Writes benchmarks/results/csa_core_<card>.json; CSA_GIT_SHA names the commit where there is no .git.

Times are medians of device-event timings with a cold L2, alternating between the paths; "spread" is the relative difference of two such medians.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from benchmarks import RESULTS, provenance, write_json
from benchmarks.csa_core_peers import ComposedInputs, autograd_step, composed_missing, composed_pieces, composed_step
from benchmarks.csa_gate import run_gate, worst_shares
from benchmarks.csa_gate_cases import Inputs, random_inputs
from kernels import get_backend

SHAPES = [  # tokens, heads, top-k
    (2_048, 64, 512),
    (4_096, 64, 512),
    (8_192, 64, 512),
    (16_384, 64, 512),
    (32_768, 64, 512),
    (65_536, 64, 512),
    (4_096, 128, 1_024),
    (16_384, 128, 1_024),
]
SMALL_SHAPES = [(4_096, 16, 128), (16_384, 16, 128), (4_096, 8, 64), (16_384, 8, 64)]  # tokens, heads, head dim; FlashMLA refuses these
AUTOGRAD_UP_TO = 4_096
CAPTURED_UP_TO = 16_384  # where launches could matter
AGREEMENT = 5e-2  # relative, of out and of the mean KL; plain PyTorch rounds its index scores to bf16 and so chooses some other entries


def layer(tokens: int, heads: int, dim: int, topk: int, indexer: tuple[int, int] = (64, 128)) -> Inputs:
    """Random inputs of one document. The index weights are bf16 numbers: the peers take them so, and would choose other entries otherwise."""
    x = random_inputs([tokens], tokens, heads, dim, indexer, topk, 128, 4, torch.bfloat16, "cuda", 0)
    x.index_w = x.index_w.bfloat16().float()
    return x


SLOW = 200.0  # ms
DETERMINISTIC_UP_TO = 16_384  # tokens; its cost is a factor that does not change beyond


def deterministic(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step under torch.use_deterministic_algorithms: equal bits from run to run."""

    def run() -> Any:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return step()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


class OurStep:
    """The step of one of our backends, as a training step calls it. `teacher` None: attention alone, without any indexer loss."""

    def __init__(self, x: Inputs, teacher: str | None = "full_csa", backend: str = "triton") -> None:
        self.backend, self.x, self.teacher = get_backend(backend), x, teacher
        self.leaves = x.leaves()
        self.one = torch.ones((), device=x.q.device)

    def __call__(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """out, mean KL, gradients in the order of x.named."""
        x, p = self.x, self.leaves
        indexer = [p[n] for n in ("index_q", "index_k", "index_w")]
        attention = [p[n] for n in ("q", "window_kv", "compressed_kv", "sink")]
        if self.teacher is None:
            with torch.no_grad():
                ids = self.backend.select(*indexer, x.layout, x.ratio, x.topk)
            out, _ = self.backend.attend(*attention[:3], ids, attention[3], x.layout, x.ratio, x.window, x.scale)
            return out, self.one, torch.autograd.grad(out, attention, x.grad_out)
        ids = self.backend.select(*indexer, x.layout, x.ratio, x.topk)
        operands = (*attention, x.layout, x.ratio, x.window, x.scale, self.teacher)
        out, _, kl_sum, stats = self.backend.attend_with_indexer_loss(*indexer, ids, *operands)
        gradients = torch.autograd.grad([out, kl_sum], [p[n] for n in x.named], [x.grad_out, self.one / stats.rows])
        return out, stats.kl_sum / stats.rows, gradients


def measure(functions: dict[str, Callable[[], Any]], milliseconds: int = 120) -> dict[str, dict[str, float]]:
    """Median ms of each, in two alternating passes; spread between the passes."""
    passes: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(2):
        for name, function in functions.items():
            passes[name].append(_milliseconds(function, milliseconds))
    return {name: {"ms": median(times), "spread": abs(times[0] - times[1]) / median(times)} for name, times in passes.items()}


def _milliseconds(function: Callable[[], Any], milliseconds: int) -> float:
    """Median of do_bench, or a single run where that takes longer than SLOW: one such run is long enough, and do_bench would make a dozen."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    once = start.elapsed_time(end)
    return once if once > SLOW else do_bench(function, warmup=25, rep=milliseconds, return_mode="median")


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The work of `function` as a CUDA graph, as training runs it: its time is the GPU's, without the launches of the host."""
    for _ in range(2):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak_gib(function: Callable[[], Any]) -> float:
    """Peak memory above what was allocated before the call, results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    del result
    return peak


def our_pieces(x: Inputs) -> dict[str, Callable[[], Any]]:
    """The parts of our step alone."""
    from kernels.triton_fused import indexer_sparse, ops, teacher
    from kernels.triton_fused.rows import RowBounds

    backend = get_backend("triton")
    bounds = RowBounds.of(x.layout, x.ratio, x.window, True)
    index = (x.index_q, x.index_k, x.index_w)
    selection = (*index, bounds.entry_start, bounds.visible, x.topk, x.ratio, x.layout.longest_document() // x.ratio, 0)
    ids, scores = ops.select_now(*selection, True)
    attention = (x.q, x.window_kv, x.compressed_kv, ids, x.sink)
    with torch.no_grad():
        out, lse = backend.attend(*attention, x.layout, x.ratio, x.window, x.scale)
    target = teacher.sparse_teacher(x.q, x.compressed_kv, ids, x.sink, lse, bounds.entry_start, bounds.visible, x.scale)
    one = torch.ones((), device=x.q.device)
    loss = (*index, ids, target, bounds.entry_start, bounds.visible, one, False, scores)

    def backward(emit: bool) -> Any:
        return ops._attention_gradients(x.grad_out, *attention, out, lse, bounds, x.scale, ops.Reads.SELECTED, emit)

    def teacher_alone() -> Tensor:
        return teacher.sparse_teacher(x.q, x.compressed_kv, ids, x.sink, lse, bounds.entry_start, bounds.visible, x.scale)

    return {
        "ours/scores + top-k": lambda: ops.select_now(*selection, False),
        "ours/scores + top-k, scores kept": lambda: ops.select_now(*selection, True),
        "ours/attention forward": lambda: ops._attend(*attention, bounds.window_start, bounds.entry_start, bounds.visible, 0, x.window, x.scale, 1),
        "ours/attention backward": lambda: backward(False),
        "ours/attention backward + teacher": lambda: backward(True),
        "ours/teacher alone (log space)": teacher_alone,
        "ours/KL + indexer backward": lambda: indexer_sparse.sparse_loss(*loss),
    }


def peer_pieces(x: Inputs, c: ComposedInputs) -> dict[str, Callable[[], Any]]:
    """The parts of the composed step alone."""
    call = composed_pieces(x, c)
    score = call["scores"]()
    ids = call["topk"](score)
    full = c.full_ids(ids, x.q.shape[0])
    out, lse = call["attend"](full)
    target = call["teacher"](ids, lse)
    student = torch.softmax(torch.gather(score, 1, ids.clamp(min=0).long()).masked_fill(ids < 0, -1e30), -1)[None].contiguous()
    return {
        "peer/scores": call["scores"],
        "peer/top-k": lambda: call["topk"](score),
        "peer/attention forward": lambda: call["attend"](full),
        "peer/teacher": lambda: call["teacher"](ids, lse),
        "peer/attention backward": lambda: call["attend_backward"](out, lse, full),
        "peer/indexer backward": lambda: call["indexer_backward"](ids, target.clone(), student),
    }


def disagreement(ours: tuple[Tensor, Tensor, Any], out: Tensor, kl_mean: Tensor) -> float:
    """Relative difference of out and of the mean KL, the larger of both; infinite for NaN."""
    difference = ((ours[0].float() - out.float()).norm() / out.float().norm()).item()
    kl = abs(ours[1].item() - kl_mean.item()) / max(abs(kl_mean.item()), 1e-6)
    worst = max(difference, kl)
    return worst if worst == worst else float("inf")


def bench_shape(tokens: int, heads: int, dim: int, topk: int, with_peer: bool, pieces: bool) -> dict[str, Any]:
    """One line of the table: every path that can run this shape, checked against ours, then timed."""
    x = layer(tokens, heads, dim, topk, (64, 128) if dim == 512 else (heads, 64))
    step = OurStep(x)
    ours = step()
    paths: dict[str, Callable[[], Any]] = {"triton full_csa": step, "triton compressed_only": OurStep(x, "compressed_only")}
    paths["triton without indexer loss"] = OurStep(x, None)
    if tokens <= DETERMINISTIC_UP_TO:
        paths["triton full_csa, deterministic"] = deterministic(step)
    record: dict[str, Any] = {
        "tokens": tokens,
        "heads": heads,
        "head_dim": dim,
        "topk": topk,
        "window": x.window,
        "kl_mean": ours[1].item(),
        "agrees": {},
    }
    candidates: dict[str, Callable[[], Any]] = {}
    if with_peer and dim == 512:
        c = ComposedInputs.of(x)
        candidates["FlashMLA + cuDNN"] = lambda: composed_step(x, c)
    if tokens <= AUTOGRAD_UP_TO:
        unfused = OurStep(x, backend="unfused")
        candidates["unfused"] = unfused
        candidates["PyTorch autograd"] = lambda: autograd_step(x)
    for name, function in candidates.items():
        try:
            result = function()
            out, kl_mean = result[:2] if isinstance(result, tuple) else (result.out, result.kl_mean)
            record["agrees"][name] = disagreement(ours, out, kl_mean)
            if record["agrees"][name] <= AGREEMENT:
                paths[name] = function
            del result, out, kl_mean
        except Exception as error:
            traceback.print_exc()
            record["agrees"][name] = f"{type(error).__name__}: {str(error)[:200]}"
    del ours
    record["peak_gib"] = {name: peak_gib(function) for name, function in paths.items()}
    record["step"] = measure(paths)
    if tokens <= CAPTURED_UP_TO:
        graphs: dict[str, Callable[[], Any]] = {}
        for name in ("triton full_csa", "FlashMLA + cuDNN"):
            if name in paths:
                try:
                    graphs[name] = captured(paths[name])
                except Exception as error:
                    record[f"not captured: {name}"] = f"{type(error).__name__}: {str(error)[:200]}"
        record["captured"] = measure(graphs)
        del graphs
        torch.cuda.empty_cache()
    if "FlashMLA + cuDNN" in paths:
        peer, own = (record["step"][name]["ms"] for name in ("FlashMLA + cuDNN", "triton full_csa"))
        record["time_over_peer"] = own / peer
        record["memory_over_peer"] = record["peak_gib"]["triton full_csa"] / record["peak_gib"]["FlashMLA + cuDNN"]
    if pieces:
        parts = our_pieces(x) | (peer_pieces(x, c) if "FlashMLA + cuDNN" in paths else {})
        record["pieces"] = measure(parts, 60)
    del paths, candidates, step
    torch.cuda.empty_cache()
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Lines of text: ms and GiB of each path."""
    lines = []
    for r in records:
        lines.append(f"T={r['tokens']} H={r['heads']} D={r['head_dim']} K={r['topk']}  mean KL {r['kl_mean']:.4f}  disagreement {r['agrees']}")
        for name, time in r["step"].items():
            lines.append(f"    {name:34s} {time['ms']:9.3f} ms (spread {time['spread']:.1%})  peak {r['peak_gib'][name]:.3f} GiB")
        for name, time in r.get("pieces", {}).items():
            lines.append(f"        {name:38s} {time['ms']:9.3f} ms")
        if "time_over_peer" in r:
            lines.append(f"    of FlashMLA + cuDNN: {r['time_over_peer']:.2f}x the time, {r['memory_over_peer']:.2f}x the memory")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4,096 and 16,384 tokens only")
    parser.add_argument("--tokens", type=int, nargs="+", help="only shapes of these lengths")
    parser.add_argument("--no-pieces", action="store_true", help="whole steps only")
    parser.add_argument("--longest", action="store_true", help="also 262,144 tokens, ours alone")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/csa_core_<card>.json)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU; benchmarks.unfused_memory runs on a CPU")
        return 2
    gate = run_gate()
    print("\n".join(gate.lines()), flush=True)
    missing = composed_missing()
    result: dict[str, Any] = provenance() | {
        "card": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "gate": {
            "passed": gate.passed,
            "checks": len(gate.records),
            "seconds": gate.seconds,
            "failed": [r for r in gate.records if r["failures"]],
            "worst": worst_shares(gate.records),
        },
        "peer": missing or "FlashMLA (sglang-kernel) + cuDNN frontend",
        "shapes": [],
    }
    card = result["card"].lower().replace(" ", "_")
    path = args.out or RESULTS / f"csa_core_{card}.json"
    if gate.passed:
        print(f"peer: {result['peer']}", flush=True)
        shapes = [(t, h, 512, k) for t, h, k in SHAPES] + [(t, h, d, 512) for t, h, d in SMALL_SHAPES]
        if args.quick:
            shapes = [s for s in shapes if s[0] in (4_096, 16_384)]
        if args.tokens:
            shapes = [s for s in shapes if s[0] in args.tokens]
        if args.longest:
            shapes.append((262_144, 64, 512, 512))
        for tokens, heads, dim, topk in shapes:
            try:
                record = bench_shape(tokens, heads, dim, topk, missing is None and tokens < 200_000, not args.no_pieces and tokens < 200_000)
                print(table([record]), flush=True)
            except torch.OutOfMemoryError as error:
                record = {"tokens": tokens, "heads": heads, "head_dim": dim, "topk": topk, "failed": str(error).splitlines()[0]}
                print(record, flush=True)
            result["shapes"].append(record)
            write_json(path, result)
    else:
        print("nothing is timed on a red gate")
        write_json(path, result)
    print(f"wrote {path}")
    return 0 if gate.passed else 1


if __name__ == "__main__":
    sys.exit(main())
