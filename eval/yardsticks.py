# SPDX-License-Identifier: Apache-2.0
"""The yardsticks of one decoder on packed held-out rows: what it loses by sparse attention, and how its indexers select.

Every CSA layer is switched together. "dense": every visible entry is attended to; "sparse@k": the k entries that the indexer ranks first.

Legend: T tokens of a packed row, N counted tokens (those with a target), V vocabulary, d hidden, k selected entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from csa_model.attention import AttentionMode, capture
from csa_model.csa_metrics import RowMetrics, concatenate, row_metrics, sample_rows, summarise
from csa_model.data.batch import IGNORED, PackedBatch
from csa_model.decoder import Decoder

DENSE, SPARSE = AttentionMode(attention="dense"), AttentionMode(attention="sparse")
LOGIT_ELEMENTS = 2**23  # logits alive at once, 32 MiB in float32


@dataclass(frozen=True)
class Measured:
    """values: name -> mean, weighted by tokens or query rows; counts: name -> how many tokens or query rows stand behind it;
    arrays: what was averaged, row by row, for paired statistics (see `evaluate_rows`); layers: CSA layer indices; target_bytes: UTF-8 bytes."""

    values: Mapping[str, float]
    counts: Mapping[str, int]
    arrays: Mapping[str, np.ndarray]
    layers: tuple[int, ...]
    target_bytes: int


def evaluate_rows(
    decoder: Decoder, batches: Iterable[PackedBatch], topk: Sequence[int], query_rows: int | None = None, seed: int = 0, device: str = "cpu"
) -> Measured:
    """Run `decoder` over packed rows, dense and sparse at every k of `topk`, and measure.

    query_rows: query rows sampled per packed row and CSA layer for the layer yardsticks (None: all).
    Arrays, one element per counted token: token/packed_row, token/index, token/document, token/target, token/nll_dense, token/nll_sparse@k,
    token/kl_dense_sparse@k and, for recall data, token/distance and token/correct_*; one element per sampled query row of layer i:
    layer{i}/packed_row, layer{i}/row, layer{i}/visible and layer{i}/<name> for every name of csa_model.csa_metrics.
    Raises ValueError where there is no held-out token.
    """
    tokens: list[dict[str, Tensor]] = []
    layers: dict[int, list[RowMetrics]] = {}
    origin: dict[int, list[Tensor]] = {}
    target_bytes = 0
    for number, batch in enumerate(batches):
        batch = batch.to(device)
        target_bytes += batch.target_bytes
        with torch.no_grad():
            with capture(decoder) as captured:
                hidden = {"dense": decoder(batch.tokens, batch.layout, DENSE).hidden}
            for seen in captured:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
                metrics = row_metrics(seen, sample_rows(seen.layout, seen.ratio, query_rows, generator), topk, output_error=True)
                layers.setdefault(seen.layer, []).append(metrics)
                origin.setdefault(seen.layer, []).append(torch.full_like(metrics.rows, number))
            for k in topk if decoder.csa_layers() else ():
                with top_k(decoder, k):
                    hidden[f"sparse@{k}"] = decoder(batch.tokens, batch.layout, SPARSE).hidden
            tokens.append(_token_arrays(decoder, batch, hidden, number))
    merged = {name: torch.cat([part[name] for part in tokens]) for name in tokens[0]} if tokens else {}
    if not merged or merged["nll_dense"].numel() == 0:
        raise ValueError("no held-out token to evaluate on; take more rows, or a corpus with a larger validation part")
    values, counts = _token_means(merged, target_bytes)
    arrays = {f"token/{name}": value.numpy() for name, value in merged.items()}
    layer_means: dict[str, list[tuple[float, int]]] = {}
    for layer, parts in sorted(layers.items()):
        metrics = concatenate(parts)
        for name, (mean, count) in summarise(metrics).items():
            values[f"layer{layer}/{name}"], counts[f"layer{layer}/{name}"] = mean, count
            layer_means.setdefault(name, []).append((mean, count))
        arrays |= {f"layer{layer}/packed_row": torch.cat(origin[layer]).numpy(), f"layer{layer}/row": metrics.rows.numpy()}
        arrays |= {f"layer{layer}/visible": metrics.visible.numpy()} | {f"layer{layer}/{name}": v.numpy() for name, v in metrics.values.items()}
    for name, means in layer_means.items():
        values[name], counts[name] = sum(mean for mean, _ in means) / len(means), sum(count for _, count in means)
    return Measured(values, counts, arrays, tuple(sorted(layers)), target_bytes)


@contextmanager
def top_k(decoder: Decoder, k: int) -> Iterator[None]:
    """Within the context every CSA layer of `decoder` selects k entries, whatever it was trained with."""
    modules = [module for _, module in decoder.csa_layers()]
    before = [module.topk for module in modules]
    try:
        for module in modules:
            module.topk = k
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.topk = value


def token_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each row of two log-distributions [N, V], nats, summed in float64; a probability that underflowed to 0 adds 0."""
    log_p, log_q = log_p.double(), log_q.double()
    return torch.where(log_p == -math.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _token_arrays(decoder: Decoder, batch: PackedBatch, hidden: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """What is known of each counted token of one packed row; hidden: mode -> [T, d], "dense" among them."""
    index = torch.nonzero(batch.targets != IGNORED).flatten()
    targets = batch.targets[index]
    parts: dict[str, list[Tensor]] = {}
    for part in index.split(max(1, LOGIT_ELEMENTS // decoder.config.vocab_size)):
        dense = torch.log_softmax(decoder.logits(hidden["dense"][part]), dim=-1)
        for mode, state in hidden.items():
            log_p = dense if mode == "dense" else torch.log_softmax(decoder.logits(state[part]), dim=-1)
            wanted = batch.targets[part]
            parts.setdefault(f"nll_{mode}", []).append(-log_p.gather(1, wanted[:, None])[:, 0])
            parts.setdefault(f"correct_{mode}", []).append(log_p.argmax(dim=-1) == wanted)
            if mode != "dense":
                parts.setdefault(f"kl_dense_{mode}", []).append(token_kl(dense, log_p).to(dense.dtype))
    arrays = {
        "packed_row": torch.full_like(index, number, dtype=torch.int32),
        "index": index.int(),
        "document": batch.layout.document_of_token[index],
        "target": targets.int(),
    }
    if batch.distance is not None:
        arrays["distance"] = batch.distance[index]
    for name, found in parts.items():
        if batch.distance is not None or not name.startswith("correct_"):
            arrays[name] = torch.cat(found)
    return {name: value.cpu() for name, value in arrays.items()}


def _token_means(arrays: Mapping[str, Tensor], target_bytes: int) -> tuple[dict[str, float], dict[str, int]]:
    values: dict[str, float] = {}
    counts: dict[str, int] = {}

    def put(name: str, value: float, count: int) -> None:
        values[name], counts[name] = value, count

    for name, array in arrays.items():
        count = array.numel()
        if name.startswith("nll_"):
            mode = name.removeprefix("nll_")
            put(f"loss_{mode}", float(array.double().mean()), count)
            if target_bytes:
                put(f"bits_per_byte_{mode}", float(array.double().sum()) / math.log(2) / target_bytes, count)
        elif name.startswith("kl_"):
            put(name, float(array.double().mean()), count)
        elif name.startswith("correct_"):
            mode, distance = name.removeprefix("correct_"), arrays["distance"]
            asked = distance >= 0
            if asked.any():
                put(f"accuracy_{mode}", float(array[asked].double().mean()), int(asked.sum()))
            for d in distance[asked].unique().tolist():
                put(f"accuracy_{mode}/distance{d}", float(array[distance == d].double().mean()), int((distance == d).sum()))
    return values, counts
