# SPDX-License-Identifier: Apache-2.0
"""What backend=flashmla is compared with, stage by stage: forward and backward alone, the step of one CSA layer, a small model's training.

Called by benchmarks.flashmla_gate on a green gate. Every stage takes the flashmla backends by their backward and yields plain numbers, all that it
has so far, whenever there are new ones. Times are medians of device-event timings with a cold L2, random bfloat16 data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from benchmarks.csa_core import captured, measure, peak_gib
from benchmarks.csa_gate_cases import Inputs, random_inputs
from benchmarks.csa_gate_checks import norm_error
from benchmarks.flashmla_training import training
from kernels import Backend, get_backend

BF16 = torch.bfloat16
TOKENS = (4_096, 16_384)
SMALL_HEADS, SMALL_DIM = 16, 64  # a shape that FlashMLA runs padded


def layer(tokens: int, heads: int = 64, dim: int = 512, topk: int = 512) -> Inputs:
    """One document, window 128, ratio 4, with ids selected."""
    x = random_inputs([tokens], tokens, heads, dim, (64, 128) if dim == 512 else (heads, 64), topk, 128, 4, BF16, "cuda", 0)
    x.selected = get_backend("triton").select(x.index_q, x.index_k, x.index_w, x.layout, x.ratio, topk)
    return x


def attention_of(x: Inputs) -> tuple[Any, ...]:
    return x.q, x.window_kv, x.compressed_kv, x.selected, x.sink, x.layout, x.ratio, x.window, x.scale


def forward_alone(flashmla: Mapping[str, Backend], steps: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Attention forward: FlashMLA's op alone, with its adaptation (ids, keys side by side), and ours."""
    from kernels.flashmla import adapt

    ours, foreign = get_backend("triton"), flashmla["triton"]
    provider = foreign._found()  # type: ignore[attr-defined]
    results = {}
    for tokens in TOKENS:
        x = layer(tokens)
        assert isinstance(x.selected, torch.Tensor)
        keys = adapt.key_table(x.window_kv, x.compressed_kv, 512)
        ids = adapt.global_ids(0, tokens, x.topk + x.window, x.compressed_kv.shape[0], x.selected, x.layout, x.ratio, x.window)
        functions: dict[str, Callable[[], Any]] = {
            "FlashMLA op": lambda keys=keys, ids=ids, x=x: provider(x.q, keys, ids, x.scale, x.sink),
            "flashmla": lambda x=x: foreign.attend(*attention_of(x)),
            "triton": lambda x=x: ours.attend(*attention_of(x)),
        }
        with torch.no_grad():
            difference = norm_error(functions["flashmla"]()[0], functions["triton"]()[0])
            results[f"T={tokens} H=64 D=512 K=512"] = measure(functions) | {"out_difference": difference}
        yield results


def backward_alone(flashmla: Mapping[str, Backend], steps: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Attention backward on the same out and lse: ours, ours with the teacher, cuDNN's."""
    from kernels.flashmla.parts import triton_parts
    from kernels.triton_fused.attend_backward import attend_backward

    own = triton_parts().attention_backward
    results = {}
    for tokens in TOKENS:
        x = layer(tokens)
        with torch.no_grad():
            out, lse = flashmla["triton"].attend(*attention_of(x))
        arguments = (x.grad_out, *attention_of(x)[:5], out, lse, *attention_of(x)[5:])
        functions: dict[str, Callable[[], Any]] = {
            "triton": lambda a=arguments: own(*a),
            "triton with teacher": lambda a=arguments: attend_backward(*a, emit_teacher=True),
        }
        record: dict[str, Any] = {}
        if "cudnn" in flashmla:
            cudnn = flashmla["cudnn"]._load().attention_backward  # type: ignore[attr-defined]
            functions["cudnn"] = lambda a=arguments, f=cudnn: f(*a)
            pairs = zip(("dq", "d_window_kv", "d_compressed_kv", "d_sink"), functions["cudnn"](), functions["triton"](), strict=True)
            record["difference"] = {name: norm_error(a, b) for name, a, b in pairs}
        results[f"T={tokens} H=64 D=512 K=512"] = record | measure(functions)
        yield results


def layer_step(flashmla: Mapping[str, Backend], steps: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Step of one CSA layer's core (selection, attention, teacher, KL, all gradients): ms, peak GiB above the inputs, mean KL.

    `captured_ms`: the same step replayed as a CUDA graph.
    """
    results = {}
    for (heads, dim), tokens in product(((64, 512), (SMALL_HEADS, SMALL_DIM)), TOKENS):
        x = layer(tokens, heads, dim)
        backends = {f"flashmla, {name} backward": backend for name, backend in flashmla.items()} | {"triton": get_backend("triton")}
        functions = {name: _core_step(backend, x) for name, backend in backends.items()}
        if tokens <= 4_096:
            functions["unfused"] = _core_step(get_backend("unfused"), x)
        record = {}
        for name, function in functions.items():
            record[name] = {"kl_mean": float(function()), "peak_gib": peak_gib(function)}
        fused = {name: f for name, f in functions.items() if name != "unfused"}
        for name, times in measure(fused).items():
            record[name] |= times
        graphs = {name: captured(f) for name, f in fused.items()}
        for name, times in measure(graphs).items():
            record[name] |= {"captured_ms": times["ms"], "captured_spread": times["spread"]}
        del graphs
        if "unfused" in functions:
            torch.cuda.synchronize()
            began = time.perf_counter()
            functions["unfused"]()
            torch.cuda.synchronize()
            record["unfused"]["ms"] = 1e3 * (time.perf_counter() - began)
        results[f"T={tokens} H={heads} D={dim} K=512"] = record
        yield results
        torch.cuda.empty_cache()


def _core_step(backend: Backend, x: Inputs) -> Callable[[], Any]:
    p = x.leaves()
    index, attention = [p[n] for n in ("index_q", "index_k", "index_w")], [p[n] for n in ("q", "window_kv", "compressed_kv", "sink")]
    rows = x.layout.num_query_rows(x.ratio)

    def step() -> torch.Tensor:
        ids = backend.select(*index, x.layout, x.ratio, x.topk)
        out, _, kl_sum, stats = backend.attend_with_indexer_loss(*index, ids, *attention, x.layout, x.ratio, x.window, x.scale)
        gradients = torch.autograd.grad([out, kl_sum], [p[n] for n in x.named], [x.grad_out, torch.full_like(kl_sum, 1 / rows)])
        del gradients
        return stats.kl_sum / rows

    return step


STAGES: dict[str, Callable[[Mapping[str, Backend], int, float], Iterator[dict[str, Any]]]] = {
    "attention_forward": forward_alone,
    "attention_backward": backward_alone,
    "layer_step": layer_step,
    "training": training,
}
