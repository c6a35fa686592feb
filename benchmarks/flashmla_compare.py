# SPDX-License-Identifier: Apache-2.0
"""What backend=flashmla is compared with, stage by stage: forward and backward alone, the step of one CSA layer, a small model's training.

Called by benchmarks.flashmla_gate on a green gate. Every stage takes the flashmla backends by their backward and yields plain numbers, all that it
has so far, whenever there are new ones. Times are medians of device-event timings with a cold L2, random bfloat16 data.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.csa_core import measure, peak_gib
from benchmarks.csa_gate_cases import Inputs, random_inputs
from benchmarks.csa_gate_checks import norm_error
from kernels import Backend, get_backend

BF16, DEVICE = torch.bfloat16, "cuda"
TOKENS = (4_096, 16_384)
SMALL = (64, 16)  # head dim, heads of a shape that FlashMLA runs padded


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
    """Step of one CSA layer's core (selection, attention, teacher, KL, all gradients): ms, peak GiB above the inputs, mean KL."""
    results = {}
    for tokens, heads, dim in ((4_096, 64, 512), (16_384, 64, 512), (4_096, SMALL[1], SMALL[0])):
        x = layer(tokens, heads, dim)
        backends = {f"flashmla, {name} backward": backend for name, backend in flashmla.items()} | {"triton": get_backend("triton")}
        functions = {name: _core_step(backend, x) for name, backend in backends.items()}
        if tokens <= 4_096:
            functions["unfused"] = _core_step(get_backend("unfused"), x)
        record = {}
        for name, function in functions.items():
            record[name] = {"kl_mean": float(function()), "peak_gib": peak_gib(function)}
        for name, times in measure({name: f for name, f in functions.items() if name != "unfused"}).items():
            record[name] |= times
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


def training(flashmla: Mapping[str, Backend], steps: int, seconds: float) -> Iterator[dict[str, Any]]:
    """small_flash with packed documents of source text as bytes: seconds a step, peak GiB, KL and loss, from the same weights and batches."""
    backends = {f"flashmla, {name} backward": backend for name, backend in flashmla.items()}
    backends |= {"triton": get_backend("triton"), "unfused": get_backend("unfused")}
    results: dict[str, Any] = {"tokens_per_row": ROW, "documents_per_row": len(LENGTHS)}
    for name, backend in backends.items():
        results[name] = _train(backend, steps, seconds)
        yield results
        torch.cuda.empty_cache()


LENGTHS, ROW = (700, 0, 500, 330, 420, 90), 2_048  # the rest of a row is padding


def _train(backend: Backend, steps: int, seconds: float) -> dict[str, Any]:
    from csa_model.attention import AttentionMode
    from csa_model.config import OptimizerConfig
    from csa_model.data.packing import pack
    from csa_model.decoder import Decoder
    from csa_model.losses import total_loss
    from csa_model.optimizers import build_optimizer

    config = small_flash_experiment()
    torch.manual_seed(1)
    mode = AttentionMode("sparse", "sparse", "full_csa")
    decoder = Decoder(config.model, backend, device_type=DEVICE, dtype=BF16, mode=mode).to(DEVICE)
    optimizer = build_optimizer(decoder, OptimizerConfig(lr=1e-3))
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).numpy()
    losses, kls, times = [], [], []
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for step in range(steps):
        start = step * sum(LENGTHS) % (len(data) - sum(LENGTHS) - 2)
        pieces, position = [], start
        for length in LENGTHS:
            pieces.append(data[position : position + length].astype("int64"))
            position += length
        batch = pack(pieces, ROW, {r for r in config.model.compress_ratios if r > 0}).to(DEVICE)
        torch.cuda.synchronize()
        at = time.perf_counter()
        with torch.autocast(DEVICE, BF16):
            output = decoder(batch.tokens, batch.layout, mode, batch.targets)
            terms = total_loss(output, batch, decoder, config)
        terms.total.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - at)
        means = terms.means(batch.step, config)
        losses.append(means["train/lm_loss"].item())
        kls.append(means["indexer/kl"].item())
        if time.perf_counter() - began > seconds:
            break
    tail = slice(max(0, len(losses) - 20), None)
    warm = sorted(times[min(10, len(times) // 2) :])
    return {
        "steps": len(losses),
        "median_step_ms": 1e3 * warm[len(warm) // 2],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss_last_20": sum(losses[tail]) / len(losses[tail]),
        "kl_last_20": sum(kls[tail]) / len(kls[tail]),
        "loss_every_20": losses[::20],
    }


def small_flash_experiment() -> Any:
    """ExperimentConfig of model=small_flash, read from the files as Hydra would."""
    import yaml

    from csa_model.config import from_mapping

    folder = Path(__file__).parent.parent / "configs" / "model"

    def merged(name: str) -> dict[str, Any]:
        own = yaml.safe_load((folder / f"{name}.yaml").read_text())
        result: dict[str, Any] = {}
        for part in own.pop("defaults", ["_self_"]):
            result = _over(result, own if part == "_self_" else merged(part))
        return result

    config = from_mapping({"model": merged("small_flash")})
    return replace(config, teacher=replace(config.teacher, name="full_csa"))


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: _over(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value for key, value in above.items()}
    return {**below, **both}


STAGES: dict[str, Callable[[Mapping[str, Backend], int, float], Iterator[dict[str, Any]]]] = {
    "attention_forward": forward_alone,
    "attention_backward": backward_alone,
    "layer_step": layer_step,
    "training": training,
}
