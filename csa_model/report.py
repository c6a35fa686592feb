# SPDX-License-Identifier: Apache-2.0
"""The facts of a run: the block printed at its start, summary.json, and the table and plots at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from csa_model.backend_choice import device_type
from csa_model.config import INDEXED_RATIO, ExperimentConfig
from csa_model.console import Interrupted, number, print_table
from csa_model.plots import last_values, plot_run, read_curves
from csa_model.resume import LAST
from csa_model.run_dir import RunDirectory

OF_A_LEG = re.compile(r"(throughput|memory|train)/|indexer/kl(/layer\d+)?$")  # measured while training; the rest is measured again when a run ends
OUT_OF_TIME = "out_of_time"  # status of a run that trainer.max_time ended
# summary.json: key -> metric of metrics.csv whose last value it holds
METRICS = {
    "validation_loss": "val/loss",
    "bits_per_byte": "val/bits_per_byte",
    "validation_mtp_loss": "val/mtp_loss",
    "indexer_kl": "indexer/kl",
    "indexer_kl_full_csa": "indexer/kl_full_csa",
    "indexer_kl_compressed_only": "indexer/kl_compressed_only",
    "indexer_kl_uniform": "indexer/kl_uniform",
    "indexer_captured": "indexer/captured",
    "indexer_recall_at_k": "indexer/recall_at_k",
    "indexer_mass_at_k": "indexer/mass_at_k",
    "teacher_total_variation": "teacher/tv",
    "attention_mass_window": "attn/mass_window",
    "attention_mass_compressed": "attn/mass_compressed",
    "attention_mass_sink": "attn/mass_sink",
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "peak_memory_gib": "memory/peak_gib",
    "process_rss_gib": "memory/process_rss_gib",
}


def weights_sha256(module: nn.Module) -> str:
    """Hash of every name, dtype, shape and value of the state dict: equal hashes mean equal starting points."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        data = value.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {list(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def corpus_facts(data: Any) -> dict[str, Any]:
    """What corpus.json holds: the corpus's facts as plain values."""
    return dataclasses.asdict(data.corpus)


def print_start(config: ExperimentConfig, run: RunDirectory, module: Any, data: Any, processes: int, notes: Sequence[str]) -> None:
    """The block before training: what trains on what, in how many processes, with which kernels, and where it is written."""
    model, corpus = config.model, data.corpus
    parameters = sum(p.numel() for p in module.decoder.parameters())
    kinds = ["window" if r == 0 else "CSA" if r == INDEXED_RATIO else f"HCA/{r}" for r in model.compress_ratios[: model.num_hidden_layers]]
    parts = [name for name, part in (("mHC", model.hyper_connections), ("MoE", model.moe), ("MTP", model.mtp)) if part.enabled]
    rows = [
        ("model", f"{model.name}, {parameters / 1e6:.2f}M parameters, {', '.join(parts) or 'plain pre-norm blocks'}"),
        ("layers", " ".join(kinds)),
        ("selection", f"{_selection(config)}, window {model.sliding_window}"),
        ("backend", f"{module.decoder.backend.name}: {_grouped(module.decoder.backend.describe())}"),
        *([("backend=auto", f"chose {module.decoder.backend.name}: {module.backend_reason}")] if module.backend_reason else []),
        *([("CUDA graph", module.graph_choice)] if device_type(config) == "cuda" or config.trainer.cuda_graph != "auto" else []),
        ("teacher", f"{config.teacher.name} x {config.teacher.coefficient:g}, stage {config.stage.name}"),
        ("data", f"{corpus.name}, {corpus.documents:,} documents, {corpus.tokens:,} tokens, sha256 {corpus.sha256[:12]}"),
        (
            "rows",
            f"{config.data.tokens_per_batch:,} tokens x {config.trainer.accumulate_grad_batches}"
            + (f" x {processes} processes" if processes > 1 else "")
            + f", documents up to {config.data.sequence_length}",
        ),
        ("run folder", str(run.path)),
        *([("weights", f"from {config.init_from}")] if config.init_from is not None else []),
        *(("note", note) for note in notes),
    ]
    print_table("csa-lightning", rows)


def _selection(config: ExperimentConfig) -> str:
    """What the layers with an indexer read of their compressed entries."""
    if config.stage.attention == "dense" or config.model.index_topk is None:
        return "every visible compressed entry"
    return f"top {config.model.index_topk} compressed entries"


def _grouped(described: Mapping[str, str]) -> str:
    """Ops of the same implementation under one entry: `select, attend: ...; indexer_loss: ...`."""
    operations: dict[str, list[str]] = {}
    for operation, implementation in described.items():
        operations.setdefault(implementation, []).append(operation)
    return "; ".join(f"{', '.join(names)}: {implementation}" for implementation, names in operations.items())


class Summary:
    """Collects what summary.json holds, whether the run ends well or not."""

    def __init__(
        self,
        config: ExperimentConfig,
        run: RunDirectory,
        data: Any,
        initial_weights_sha256: str,
        backend: str,
        resumed_at: int | None = None,
        changed: Sequence[str] = (),
    ) -> None:
        self.config, self.run, self.corpus = config, run, data.corpus
        self.started, self.resumed_at = time.monotonic(), resumed_at or 0
        self.facts: dict[str, Any] = {
            "status": "running",
            "arm": config.teacher.name,
            "stage": config.stage.name,
            "backend": backend,
            "model": config.model.name,
            "seed": config.seed,
            "initial_weights_sha256": initial_weights_sha256,
            "resumed_at": resumed_at,
            "resumes": _resumes(run, resumed_at, changed),
            "corpus_sha256": self.corpus.sha256,
            "data_order": data.order,
            "unigram_loss": self.corpus.unigram_loss,
            "unigram_bits_per_byte": self.corpus.unigram_bits_per_byte,
        }

    @contextlib.contextmanager
    def marked_failed_on_error(self, trainer: L.Trainer) -> Iterator[None]:
        """Write summary.json with the error and status failed (interrupted for Ctrl-C and SIGTERM) where one comes through, and pass it on.

        Lightning makes a SystemExit of either signal, with status 1 or even 0 and without a word; here it becomes Interrupted.
        """
        self._write(trainer)
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as error:
            cause = signal.SIGTERM if isinstance(error, SIGTERMException) else signal.SIGINT
            self.facts |= {"status": "interrupted", "error": f"interrupted by {cause.name}"}
            self._write(trainer)
            raise Interrupted(f"interrupted in step {trainer.global_step + 1}; {self._way_on()}", 128 + cause) from None
        except BaseException as error:
            self.facts |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            self._write(trainer)
            raise

    def _way_on(self) -> str:
        if not (self.run.checkpoints / LAST).exists():
            return f"no checkpoint is written yet (callbacks.checkpoint.every_n_steps={self.config.callbacks.checkpoint.every_n_steps})"
        step = re.search(r"step(\d+)", (self.run.checkpoints / LAST).resolve().name)
        repeated = f" from step {int(step[1])}, its last checkpoint," if step else ""  # a file of its own holds the step that was interrupted
        whole = self.run.path.parent if (self.run.path.parent / "staged.json").is_file() else self.run.path  # a stage goes on with its staged run
        return f"go on{repeated} with run_dir={whole} ckpt_path=last"

    def finish(self, trainer: L.Trainer) -> dict[str, Any]:
        """Write the final summary.json and the plots, print the closing table, return the summary.

        Its status is finished, or out_of_time where trainer.max_time ended the run before its last step.
        """
        limits = self.config.trainer
        self.facts["status"] = OUT_OF_TIME if limits.max_time is not None and trainer.global_step < limits.max_steps else "finished"
        if not trainer.is_global_zero:
            return self.facts
        self._write(trainer)
        title = f"{self.config.model.name}, teacher {self.config.teacher.name}, seed {self.config.seed}"
        plots = plot_run(self.run.metrics_file, self.run.plots, self.corpus.unigram_loss, title)
        stopped = f"trainer.max_time={limits.max_time} was over before step {limits.max_steps}; {self._way_on()}"
        ended = [("ended", stopped)] if self.facts["status"] == OUT_OF_TIME else []
        print_table("\nresult", [*ended, *closing_rows(self.facts), ("plots", ", ".join(p.name for p in plots)), ("run folder", str(self.run.path))])
        return self.facts

    def _write(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        curves = read_curves(self.run.metrics_file)
        if trainer.global_step > self.resumed_at:  # what was logged before the run was resumed is no figure of its last leg
            curves = {name: curve for name, curve in curves.items() if curve[0][-1] > self.resumed_at or not OF_A_LEG.match(name)}
        values = last_values(curves)
        module: Any = trainer.lightning_module
        if module is not None:  # chosen when it was built, and again where a step could not be captured
            self.facts["cuda_graph"] = module.graph_choice
        self.facts |= {"steps": trainer.global_step, "seconds": round(time.monotonic() - self.started, 1)}
        self.facts |= {key: values.get(metric) for key, metric in METRICS.items()}
        self.facts["metrics"] = {name: value for name, value in sorted(values.items()) if name.startswith(("val/", "indexer/", "attn/", "teacher/"))}
        self.run.write_summary(self.facts)


def _resumes(run: RunDirectory, resumed_at: int | None, changed: Sequence[str]) -> list[dict[str, Any]]:
    """Every resume that this run folder has seen: at which step, and which settings changed."""
    known: list[dict[str, Any]] = []
    if resumed_at is not None and run.summary_file.is_file():
        known = json.loads(run.summary_file.read_text()).get("resumes", [])
    return known if resumed_at is None else [*known, {"at": resumed_at, "changed": list(changed)}]


def closing_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table at the end of a run; a figure that was not measured reads n/a, those of the diagnostics stand there if these ran."""
    f = facts.get
    resumed = f("resumed_at") or 0
    done = (f("steps") or 0) - resumed
    memory = ("peak GPU memory", f("peak_memory_gib")) if f("peak_memory_gib") is not None else ("peak process memory", f("process_rss_gib"))
    kl = f"{number(f('indexer_kl_full_csa'), 4)} to full_csa (a uniform guess {number(f('indexer_kl_uniform'), 4)})"
    if f("arm") == "compressed_only":  # full_csa is the yardstick of every arm; what this one learns is its own teacher
        kl += f", {number(f('indexer_kl_compressed_only'), 4)} to compressed_only"
    measured = [
        ("indexer KL", kl),
        ("recall@k", f"{number(f('indexer_recall_at_k'))} of the full_csa teacher's own top-k"),
        ("captured mass", f"{number(f('indexer_mass_at_k'))} of the teacher lies on the selected entries"),
    ]
    return [
        ("validation loss", f"{number(f('validation_loss'))} nats per token (unigram model {number(f('unigram_loss'))})"),
        ("bits per byte", f"{number(f('bits_per_byte'))} (unigram model {number(f('unigram_bits_per_byte'))})"),
        *(measured if f("indexer_kl_full_csa") is not None else []),
        ("throughput", f"{number(f('tokens_per_second'), 0)} tokens/s"),
        (memory[0], f"{number(memory[1], 2)} GiB"),
        ("time", f"{done} step{'' if done == 1 else 's'} in {number(f('seconds'), 0)} s" + (f", {f('steps')} steps in all" if resumed else "")),
    ]
