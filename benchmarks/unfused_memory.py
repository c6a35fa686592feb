# SPDX-License-Identifier: Apache-2.0
"""Peak memory and time on a CPU of one CSA layer's forward and backward: the unfused backend against the same formulas in naive autograd.

    python -m benchmarks.unfused_memory                    # T = 1k .. 8k, writes benchmarks/results/unfused_memory.json
    python -m benchmarks.unfused_memory --tokens 1024      # fewer lengths, prints without writing

Every point runs in a process of its own; peak_bytes is the growth of its resident set beyond the inputs. Nothing is reported unless both forms
agree on loss and gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import RESULTS, provenance, write_json
from kernels import ALL_VISIBLE, PackedLayout, get_backend

HEADS, DIM, INDEX_HEADS, INDEX_DIM, WINDOW, TOPK, RATIO = 8, 64, 4, 32, 64, 64, 4
SCALE = DIM**-0.5
PATHS, SUPPORTS = ("unfused", "naive"), ("sparse", "dense")
REPEATS = 3
GATE = 2e-4  # largest relative difference of loss and gradients in float32


def make_inputs(tokens: int) -> list[Tensor]:
    """q, window_kv, compressed_kv, sink, index_q, index_k, index_w of one document."""
    generator = torch.Generator().manual_seed(0)
    entries = tokens // RATIO
    shapes: list[tuple[int, ...]] = [(tokens, HEADS, DIM), (tokens, DIM), (entries, DIM), (HEADS,)]
    shapes += [(tokens, INDEX_HEADS, INDEX_DIM), (entries, INDEX_DIM), (tokens, INDEX_HEADS)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    for index in (4, 5):
        inputs[index].abs_()  # no index head is off, so no two scores are equal: torch.topk has no tie rule that the gate could rely on
    return [x.requires_grad_() for x in inputs]


def unfused_step(inputs: list[Tensor], layout: PackedLayout, support: str) -> Tensor:
    """The step through the backend."""
    backend = get_backend("unfused")
    selected = backend.select(*inputs[4:], layout, RATIO, TOPK) if support == "sparse" else ALL_VISIBLE
    out, _, kl_sum, _ = backend.attend_with_indexer_loss(*inputs[4:], selected, *inputs[:4], layout, RATIO, WINDOW, SCALE)
    return out.square().sum() + kl_sum


def naive_step(inputs: list[Tensor], layout: PackedLayout, support: str) -> Tensor:
    """The same formulas as one writes them first: everything at once, every intermediate kept by autograd."""
    q, window_kv, compressed_kv, sink, index_q, index_k, index_w = inputs
    visible = torch.arange(index_k.shape[0]) < layout.visible_compressed(RATIO)[:, None]
    scores = (torch.einsum("thd,cd->thc", index_q, index_k).relu() * index_w[..., None]).sum(1)
    scores = scores.masked_fill(~visible, -math.inf)
    if support == "sparse":
        ids = scores.topk(min(TOPK, scores.shape[1])).indices
        valid = visible.gather(1, ids)
        student = scores.gather(1, ids)
        logits = torch.einsum("thd,tkd->thk", q, compressed_kv[ids]) * SCALE
    else:
        valid, student = visible, scores
        logits = torch.einsum("thd,cd->thc", q, compressed_kv) * SCALE
    logits = logits.masked_fill(~valid[:, None], -math.inf)
    window_ids = layout.window_ids(WINDOW)
    window_keys = window_kv[window_ids.clamp(min=0).long()]
    window_logits = (torch.einsum("thd,twd->thw", q, window_keys) * SCALE).masked_fill(window_ids[:, None] < 0, -math.inf)
    p = torch.softmax(torch.cat([window_logits, logits, sink[None, :, None].expand(q.shape[0], -1, 1)], -1), -1)[..., :-1]
    out = torch.einsum("thw,twd->thd", p[..., :WINDOW], window_keys)
    if support == "sparse":
        out = out + torch.einsum("thk,tkd->thd", p[..., WINDOW:], compressed_kv[ids])
    else:
        out = out + torch.einsum("thc,cd->thd", p[..., WINDOW:], compressed_kv)
    mass = p[..., WINDOW:].detach().sum(1)
    some = valid.any(-1)
    teacher = mass[some] / mass[some].sum(-1, keepdim=True)
    log_student = torch.log_softmax(student[some], -1).masked_fill(~valid[some], 0)
    return out.square().sum() + (torch.xlogy(teacher, teacher) - teacher * log_student).sum()


STEPS = {"unfused": unfused_step, "naive": naive_step}


def gate(tokens: int = 512) -> float:
    """Largest relative difference between the two forms, over both supports, of the loss and each gradient."""
    worst = 0.0
    for support in SUPPORTS:
        results = []
        for path in PATHS:
            inputs = make_inputs(tokens)
            loss = STEPS[path](inputs, PackedLayout.from_lengths([tokens]), support)
            loss.backward()
            results.append([loss.detach(), *(x.grad for x in inputs)])
        for one, two in zip(*results, strict=True):
            assert one is not None
            assert two is not None
            worst = max(worst, ((one - two).norm() / two.norm()).item())
    return worst


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def measure(path: str, support: str, tokens: int) -> dict[str, Any]:
    """One point, in the calling process."""
    layout = PackedLayout.from_lengths([tokens])
    STEPS[path](make_inputs(128), PackedLayout.from_lengths([128]), support).backward()  # libraries load before the baseline
    inputs = make_inputs(tokens)
    for x in inputs:
        x.grad = torch.zeros_like(x).add_(0)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        STEPS[path](inputs, layout, support).backward()
        seconds.append(time.perf_counter() - start)
    peak = max(0, resident_bytes("VmHWM") - before)
    return {"path": path, "support": support, "tokens": tokens, "peak_bytes": peak, "seconds": round(min(seconds), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--point", nargs=2, metavar=("PATH", "SUPPORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.point:
        print(json.dumps(measure(*arguments.point, arguments.tokens[0])))
        return
    difference = gate()
    if not difference < GATE:
        raise SystemExit(f"no numbers: the two forms differ by {difference:.1e} (allowed {GATE:.0e})")
    points = []
    for support in SUPPORTS:
        for tokens in arguments.tokens:
            for path in PATHS:
                command = [sys.executable, "-m", "benchmarks.unfused_memory", "--tokens", str(tokens), "--threads", str(arguments.threads)]
                done = subprocess.run([*command, "--point", path, support], capture_output=True, text=True, check=True)
                points.append(json.loads(done.stdout.splitlines()[-1]))
                print("{support:>6}  T={tokens:<5} {path:>8}  {0:8.1f} MiB  {seconds:7.3f} s".format(points[-1]["peak_bytes"] / 2**20, **points[-1]))
    shape = {"heads": HEADS, "head_dim": DIM, "index_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM, "window": WINDOW, "topk": TOPK, "ratio": RATIO}
    result = {
        "what": "select, attend, full_csa indexer loss, forward and backward of one layer, one document, float32",
        "peak_bytes": "growth of the resident set beyond inputs and gradients",
        "shape": shape,
        "gate_relative_difference": difference,
        "provenance": provenance(),
        "points": points,
    }
    if arguments.tokens == parser.get_default("tokens"):
        write_json(RESULTS / "unfused_memory.json", result)


if __name__ == "__main__":
    main()
