# SPDX-License-Identifier: Apache-2.0
"""The yardsticks of one checkpoint on held-out rows of its own corpus.

    python -m eval.evaluate ckpt_path=RUN/checkpoints/last.ckpt [out=DIR] [rows=N] [query_rows=N] [topk=[8,16,32]] [backend=...] [device=...]

Loss and bits per byte with dense attention and with sparse attention at every k, KL(dense || sparse) per token, and per CSA layer: error of the
attention output, recall at k and captured mass for both teachers, KL, total variation between the teachers, mass on window, sink and compressed
entries; for the recall task accuracy by distance. Everything is weighted by tokens or query rows, in float32, and repeats bit for bit on the CPU.

Writes evaluation.json (the figures, their counts and what they were measured on), rows.npz (the values of every token and sampled query row, for
paired statistics) and evaluation.png. configs/eval.yaml explains every option.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from csa_model import console, launch, resume
from csa_model.config import ConfigError, ExperimentConfig, from_mapping
from csa_model.data.datamodule import CSADataModule
from csa_model.decoder import Decoder
from csa_model.run_dir import find_run
from eval.plots import plot_evaluation
from eval.yardsticks import DENSE, Measured, evaluate_rows
from kernels import get_backend

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "eval.yaml"
LAYER_TABLE = ("recall_full_csa@{k}", "recall_compressed_only@{k}", "mass_full_csa@{k}", "mass_compressed_only@{k}", "output_error@{k}")
LAYER_FACTS = ("kl_full_csa", "kl_compressed_only", "tv", "mass_window", "mass_sink", "mass_compressed")


@dataclass(frozen=True)
class EvalConfig:
    """Options of an evaluation; configs/eval.yaml explains them."""

    ckpt_path: str
    out: str | None = None
    rows: int | None = None
    query_rows: int | None = 256
    topk: tuple[int, ...] = (8, 16, 32)
    backend: str = "unfused"
    device: str = "auto"
    cache_dir: str | None = None


@dataclass(frozen=True)
class Result:
    """What was measured, the facts it stands on (as in evaluation.json), and the folder it was written to."""

    measured: Measured
    facts: dict[str, Any]
    out: Path


def main(arguments: Sequence[str]) -> None:
    """The command line. Leaves with a non-zero status and one readable message for what a user can mend."""
    console.quiet()
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{CONFIG.read_text()}")
        sys.exit(0 if arguments else 2)
    with console.exit_on_error():
        result = evaluate(read_options(arguments))
        print_result(result)


def read_options(arguments: Sequence[str]) -> EvalConfig:
    """KEY=VALUE arguments over configs/eval.yaml. Raises ConfigError for anything that is no such pair, an unknown key or an illegal value."""
    odd = [a for a in arguments if "=" not in a]
    if odd:
        raise ConfigError(f"{odd[0]!r} is not KEY=VALUE; legal keys: {', '.join(EvalConfig.__dataclass_fields__)}")
    merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(CONFIG), OmegaConf.from_dotlist(list(arguments))))
    assert isinstance(merged, dict)
    values = {str(key): value for key, value in merged.items()}
    if values.get("ckpt_path") == "???":
        raise ConfigError("ckpt_path must be given: ckpt_path=RUN/checkpoints/last.ckpt")
    options = from_mapping(values, EvalConfig)
    for key in ("rows", "query_rows"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value} is not legal; legal: >= 1, or null for all")
    if any(k < 1 for k in options.topk) or len(set(options.topk)) != len(options.topk):
        raise ConfigError(f"topk={list(options.topk)} is not legal; legal: different numbers >= 1")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={options.device} is not legal; legal: auto, cpu, cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no NVIDIA GPU; device=cpu works")
    return replace(options, topk=tuple(sorted(options.topk)))


def evaluate(options: EvalConfig) -> Result:
    """Load, measure, write. Raises ConfigError or BackendUnsupported before anything is written."""
    path = resume.resolve(options.ckpt_path, None)
    assert path is not None
    stored, step = resume.read_config(path)
    config: ExperimentConfig = from_mapping(stored)
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    decoder = load_decoder(path, config, options.backend, device)
    data_config = replace(
        config.data,
        num_workers=0,
        validation_batches=options.rows or config.data.validation_batches,
        cache_dir=options.cache_dir or config.data.cache_dir,
    )
    data = CSADataModule(data_config, **launch.data_arguments(config))
    data.setup("validate")
    run = find_run(path)
    check_corpus(path, run.path if run else None, data.corpus.sha256)
    rows = data.validation_rows()
    if options.rows is not None and len(rows) < options.rows:
        raise ConfigError(f"rows={options.rows}, but the held-out documents fill only {len(rows)} packed rows; legal: 1..{len(rows)}")
    measured = evaluate_rows(decoder, rows, options.topk, options.query_rows, device=device)
    facts: dict[str, Any] = {
        "checkpoint": str(path),
        "step": step,
        "arm": config.teacher.name,
        "seed": config.seed,
        "model": config.model.name,
        "trained_topk": config.model.index_topk,
        "corpus_sha256": data.corpus.sha256,
        "unigram_loss": data.corpus.unigram_loss,
        "unigram_bits_per_byte": data.corpus.unigram_bits_per_byte,
        "target_bytes": measured.target_bytes,
        "csa_layers": list(measured.layers),
        "settings": {key: value for key, value in asdict(options).items() if key not in ("ckpt_path", "out", "cache_dir")}
        | {"rows": len(rows), "device": device},
        "yardsticks": dict(measured.values),
        "counts": dict(measured.counts),
    }
    out = Path(options.out).expanduser() if options.out else (run.path if run else path.parent) / "eval" / path.stem
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be made: {error.strerror}") from None
    (out / "evaluation.json").write_text(json.dumps(facts, indent=2) + "\n")
    np.savez_compressed(out / "rows.npz", **measured.arrays)  # type: ignore[arg-type]
    title = f"{config.model.name}, teacher {config.teacher.name}, seed {config.seed}, step {step}; {measured.counts['loss_dense']:,} held-out tokens"
    plot_evaluation(measured.values, measured.layers, options.topk, title, out / "evaluation.png")
    return Result(measured, facts, out)


def load_decoder(path: Path, config: ExperimentConfig, backend: str, device: str) -> Decoder:
    """The decoder of a checkpoint, in float32, in evaluation mode. Raises ConfigError where its weights are not those of its configuration."""
    try:
        kernels = get_backend(backend)
    except ValueError as error:
        raise ConfigError(f"backend={backend}: {error}") from None
    decoder = Decoder(config.model, kernels, device_type=device, mode=DENSE)
    state = torch.load(path, map_location="cpu", weights_only=True).get("state_dict", {})
    weights = {name.removeprefix("decoder."): value for name, value in state.items()}
    try:
        decoder.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"ckpt_path={path} is a checkpoint of another model: {error}") from None
    return decoder.to(device).eval()


def check_corpus(path: Path, run: Path | None, sha256: str) -> None:
    """Raise ConfigError where the corpus of now is not the one that the run recorded: held-out text may have been trained on."""
    recorded = run / "corpus.json" if run is not None else None
    if recorded is None or not recorded.is_file():
        return
    before = json.loads(recorded.read_text()).get("sha256")
    if before != sha256:
        raise ConfigError(f"{path} was trained on the corpus {before}, but the data are now {sha256}: restore the corpus of {recorded}")


def print_result(result: Result) -> None:
    """The table that a person reads."""
    values, counts, facts = result.measured.values, result.measured.counts, result.facts
    out, ks = Console(width=None if sys.stdout.isatty() else 140), facts["settings"]["topk"]
    tokens = counts["loss_dense"]
    head = f"{facts['checkpoint']}\nstep {facts['step']}, teacher {facts['arm']}, seed {facts['seed']}, {tokens:,} held-out tokens"
    table = Table("attention", "loss, nats/token", "bits per byte", "KL(dense || sparse)", "accuracy", title=head, title_justify="left")
    for mode in ("dense", *(f"sparse@{k}" for k in ks)):
        if f"loss_{mode}" in values:
            names = (f"loss_{mode}", f"bits_per_byte_{mode}", f"kl_dense_{mode}", f"accuracy_{mode}")
            table.add_row(
                mode + (" (trained k)" if mode == f"sparse@{facts['trained_topk']}" else ""), *(_figure(values.get(name)) for name in names)
            )
    out.print(table)
    distances = sorted({int(name.rsplit("distance", 1)[1]) for name in values if "/distance" in name})
    if distances:
        table = Table("accuracy by distance", *(f"{d} ({counts[f'accuracy_dense/distance{d}']})" for d in distances))
        for mode in ("dense", *(f"sparse@{k}" for k in ks)):
            table.add_row(mode, *(_figure(values.get(f"accuracy_{mode}/distance{d}")) for d in distances))
        out.print(table)
    if result.measured.layers:
        table = Table("CSA layer", "k", "query rows", "recall full", "recall compr.", "mass full", "mass compr.", "output error")
        for layer in result.measured.layers:
            for k in ks:
                keys = [f"layer{layer}/{name.format(k=k)}" for name in LAYER_TABLE]
                table.add_row(str(layer), str(k), str(counts.get(keys[0], 0)), *(_figure(values.get(key)) for key in keys))
        out.print(table)
        table = Table("CSA layer", "KL full", "KL compr.", "TV of teachers", "mass window", "mass sink", "mass compr.")
        for layer in result.measured.layers:
            table.add_row(str(layer), *(_figure(values.get(f"layer{layer}/{name}")) for name in LAYER_FACTS))
        out.print(table)
    print(f"written: {result.out}/evaluation.json, rows.npz, evaluation.png")


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.5f}"


if __name__ == "__main__":
    main(sys.argv[1:])
