# SPDX-License-Identifier: Apache-2.0
"""The training stage of benchmarks.flashmla_compare: one small model, the same weights and the same batches on every backend."""

from __future__ import annotations

import gc
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from kernels import Backend, get_backend

DEVICE, DTYPE = "cuda", torch.bfloat16
LENGTHS, ROW = (700, 0, 500, 330, 420, 90), 2_048  # the rest of a row is padding
EVERY = 20  # steps between two records, and over how many the last loss and KL are averaged: those of one step say little
Step = Callable[[int], tuple[float, float, float]]


@dataclass
class Course:
    """What a backend has done so far: per step its seconds, its LM loss and its indexer KL."""

    asked: int  # steps
    limit: float  # seconds
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    cut_short: bool = False

    def record(self) -> dict[str, Any]:
        """Plain numbers. The first step compiles kernels and stands alone; `cut_short` is there only where the limit ended the run."""
        later = self.seconds[1:]
        record = {
            "steps": len(self.losses),
            "first_step_s": self.seconds[0],
            "median_step_ms": 1e3 * median(later) if later else None,
            f"loss_every_{EVERY}": self.losses[::EVERY],
            f"kl_every_{EVERY}": self.kls[::EVERY],
        }
        if self.cut_short:
            record["cut_short"] = f"the limit of {self.limit:g} s ended it after {len(self.losses)} of {self.asked} steps"
        return record


def follow(step: Step, steps: int, limit: float) -> Iterator[Course]:
    """Runs `steps` steps and yields the course every EVERY of them and at the end; `limit`: seconds for all steps after the first."""
    course, began = Course(steps, limit), 0.0
    for number in range(steps):
        for values, value in zip((course.seconds, course.losses, course.kls), step(number), strict=True):
            values.append(value)
        now = time.perf_counter()
        began = began or now  # the first step compiles, which says nothing about the others
        course.cut_short = number + 1 < steps and now - began > limit
        if course.cut_short or number + 1 == steps or (number + 1) % EVERY == 0:
            yield course
        if course.cut_short:
            return


def over_common_steps(courses: Mapping[str, Course]) -> dict[str, Any]:
    """{common_steps, averaged_steps, common: {backend: {loss, kl}}}: means of the last EVERY of the steps that every backend reached."""
    common = min(len(course.losses) for course in courses.values())
    last = slice(max(0, common - EVERY), common)
    means = {name: {"loss": fmean(course.losses[last]), "kl": fmean(course.kls[last])} for name, course in courses.items()}
    return {"common_steps": common, "averaged_steps": common - last.start, "common": means}


def training(flashmla: Mapping[str, Backend], steps: int, seconds: float) -> Iterator[dict[str, Any]]:
    """small_flash with packed documents of source text as bytes: ms a step, peak GiB, loss and KL. Yields all that there is every EVERY steps.

    `seconds` protects against a backend that takes for ever; its first step does not count. Loss and KL are compared over the common steps.
    """
    backends = {f"flashmla, {name} backward": backend for name, backend in flashmla.items()}
    backends |= {"triton": get_backend("triton"), "unfused": get_backend("unfused")}
    records: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {"tokens_per_row": ROW, "documents_per_row": sum(n > 0 for n in LENGTHS), "steps_asked": steps, "limit_s": seconds}
    results["backends"] = records
    courses: dict[str, Course] = {}
    for name, backend in backends.items():
        torch.cuda.reset_peak_memory_stats()
        step, peak_bytes = train_step(backend)
        for courses[name] in follow(step, steps, seconds):
            records[name] = courses[name].record() | {"peak_gib": peak_bytes() / 2**30}
            yield results
        del step, peak_bytes
        gc.collect()  # the decoder and its graph know each other: without it the next backend would be charged with both
        torch.cuda.empty_cache()
    yield results | over_common_steps(courses)


def train_step(backend: Backend) -> tuple[Step, Callable[[], int]]:
    """A new decoder: the function that runs step number n on batch n and returns (seconds, LM loss, indexer KL), and one for the peak memory.

    With a backend that can be captured forward and backward are a CUDA graph, as in training.
    """
    from benchmarks.decoder_training import DecoderTraining
    from csa_model.data.packing import pack

    config = small_flash_experiment()
    training = DecoderTraining(config, backend, DEVICE, seed=1, max_norm=1.0)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).numpy()

    def step(number: int) -> tuple[float, float, float]:
        position = number * sum(LENGTHS) % (len(data) - sum(LENGTHS) - 2)
        pieces = []
        for length in LENGTHS:
            pieces.append(data[position : position + length].astype("int64"))
            position += length
        batch = pack(pieces, ROW, {r for r in config.model.compress_ratios if r > 0}).to(DEVICE)
        torch.cuda.synchronize()
        at = time.perf_counter()
        terms = training.step(batch)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - at
        means = terms.means(batch.step, config)
        return seconds, means["train/lm_loss"].item(), means["indexer/kl"].item()

    return step, training.peak_bytes


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
    return replace(config, teacher=replace(config.teacher, name="full_csa"), optimizer=replace(config.optimizer, lr=1e-3))


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: _over(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value for key, value in above.items()}
    return {**below, **both}
