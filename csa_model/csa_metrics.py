# SPDX-License-Identifier: Apache-2.0
"""Yardsticks of one CSA layer, row by row: how close the indexer (student) is to the attention it selects for (teacher).

Pure functions of what a layer saw in one forward (`csa_model.attention.CapturedLayer`); the diagnostics of a run and `eval.evaluate` both use them.
Everything is computed in float32 (float64 for float64 captures), in chunks of query rows, by plain logits: no kernel under test takes part.

Legend: T tokens of the packed row, R sampled query rows, C compressed entries, n entries of a chunk, H heads, D head dim, HI / DI index heads / dim,
W window, m ratio, k number of selected entries. Entry: one compressed key. Support: the entries that a distribution ranges over.

Names in `RowMetrics.values`, one number per query row (nats where an entropy or a KL; NaN where not defined):

| name | meaning |
|---|---|
| `kl_<teacher>` | KL(teacher || student) over the support |
| `kl_uniform_<teacher>` | KL(teacher || uniform over the support), what a student that knows nothing pays |
| `entropy`, `entropy_<teacher>` | entropy of the student, of the teacher |
| `tv` | total variation between the two teachers over the support |
| `mass_window`, `mass_sink`, `mass_compressed` | attention probability, mean over heads, with the support as the compressed keys; they sum to 1 |
| `recall_<teacher>@k` | share of the teacher's k largest visible entries that are among the student's k largest |
| `mass_<teacher>@k` | teacher probability on the student's k entries |
| `best_mass_<teacher>@k` | teacher probability on the teacher's own k entries, the most that any selection of k can catch |
| `output_error@k` | norm of (out_k - out) / norm of out over heads and dims; out reads all visible entries, out_k the student's k |
| `output_error_<teacher>@k` | the same for the k entries of that teacher: what a perfect student of it would cost |

Everything `@k` ranks all visible entries (ties to the lower id) and is defined on rows with more than k of them: any other row selects everything.
Recall against a teacher favours the student trained on that teacher; `output_error@k` favours neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kernels import ALL_VISIBLE, PackedLayout
from kernels.unfused import indexer_kl, teacher_distribution

if TYPE_CHECKING:
    from csa_model.attention import CapturedLayer

TeacherName = Literal["full_csa", "compressed_only"]
Support = Literal["visible", "attended"]
TEACHERS: tuple[TeacherName, ...] = ("full_csa", "compressed_only")
CHUNK_ELEMENTS = 2**22  # largest tensor of a chunk: 16 MiB in float32


@dataclass(frozen=True)
class RowMetrics:
    """Yardsticks of R query rows of one layer. rows int64 [R]: token index in the packed row, ascending; visible int32 [R]: entries the row may see;
    values: name -> float32 [R] on the CPU, NaN where the row has no such value."""

    rows: Tensor
    visible: Tensor
    values: Mapping[str, Tensor]


def sample_rows(layout: PackedLayout, ratio: int, count: int | None, generator: torch.Generator | None = None) -> Tensor:
    """Query rows with at least one visible entry, int64 [R] ascending on the CPU: all for `count` None, else at most `count` without replacement.

    The sample is uniform, not strided: a stride that shares a factor with the ratio would always meet the same place inside a block.
    """
    eligible = torch.nonzero(layout.visible_compressed(ratio).cpu() > 0).flatten()
    if count is None or count >= eligible.numel():
        return eligible
    return eligible[torch.randperm(eligible.numel(), generator=generator)[:count]].sort().values


def row_metrics(
    captured: CapturedLayer, rows: Tensor, topk: Sequence[int] = (), support: Support = "visible", output_error: bool = False
) -> RowMetrics:
    """Yardsticks of the query rows `rows` (int64 [R], real tokens) of one captured layer; see the table of the module.

    support: "visible" takes all visible entries for KL, entropy, TV and mass, "attended" those that the layer attended to in this forward
    (selected and visible; the same thing where attention was dense). `output_error` adds the attention-output errors, the dearest part.
    Raises ValueError for a row outside the packed row or k < 1.
    """
    num_tokens = captured.q.shape[0]
    rows = rows.sort().values.to(captured.q.device)
    if rows.numel() and (int(rows[0]) < 0 or int(rows[-1]) >= num_tokens):
        raise ValueError(f"query rows must lie in [0, {num_tokens}), got {int(rows[0])}..{int(rows[-1])}")
    if any(k < 1 for k in topk):
        raise ValueError(f"every k of topk must be at least 1, got {list(topk)}")
    visible = captured.layout.visible_compressed(captured.ratio)[rows]
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for chunk in _chunks(captured, rows):
            parts.append({name: value.float().cpu() for name, value in _chunk_metrics(captured, chunk, topk, support, output_error).items()})
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
    return RowMetrics(rows.cpu(), visible.cpu(), values)


def concatenate(metrics: Iterable[RowMetrics]) -> RowMetrics:
    """One RowMetrics out of those of one layer on several packed rows; `rows` keep their packed-row indices. Empty parts are dropped."""
    parts = [part for part in metrics if part.rows.numel()]
    if not parts:
        return RowMetrics(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), {})
    return RowMetrics(
        torch.cat([part.rows for part in parts]),
        torch.cat([part.visible for part in parts]),
        {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values},
    )


def summarise(metrics: RowMetrics) -> dict[str, tuple[float, int]]:
    """Mean over the rows where a value is defined, and their number; a name without any such row is left out.

    Adds `captured_<teacher>` = 1 - mean KL / mean KL of a uniform student, left out where the teacher is uniform: 0 knows nothing, 1 is perfect.
    """
    means: dict[str, tuple[float, int]] = {}
    for name, value in metrics.values.items():
        defined = value[~value.isnan()].double()
        if defined.numel():
            means[name] = (float(defined.mean()), defined.numel())
    for teacher in TEACHERS:
        kl, uniform = means.get(f"kl_{teacher}"), means.get(f"kl_uniform_{teacher}")
        if kl is not None and uniform is not None and uniform[0] > 0:
            means[f"captured_{teacher}"] = (1 - kl[0] / uniform[0], kl[1])
    return means


def _chunks(captured: CapturedLayer, rows: Tensor) -> Iterator[Tensor]:
    heads, head_dim = captured.q.shape[1:]
    per_row = max(captured.compressed_kv.shape[0] * max(heads, captured.index_q.shape[1]), captured.window * max(heads, head_dim), 1)
    yield from rows.split(max(1, CHUNK_ELEMENTS // per_row)) if rows.numel() else ()


def _chunk_metrics(captured: CapturedLayer, rows: Tensor, topk: Sequence[int], support: Support, output_error: bool) -> dict[str, Tensor]:
    layout, ratio = captured.layout, captured.ratio
    dtype = torch.float64 if captured.q.dtype == torch.float64 else torch.float32
    count = layout.visible_compressed(ratio)[rows].long()
    start = layout.entry_start(ratio)[rows].long()
    # sorted rows read neighbouring entries: one slice of the keys serves the chunk
    low, high = (int(start.min()), int((start + count).max())) if rows.numel() else (0, 0)
    high = max(low, high)
    entry = torch.arange(low, high, device=rows.device)
    visible = (entry >= start[:, None]) & (entry < (start + count)[:, None])  # [R, n]
    keys = captured.compressed_kv[low:high].to(dtype)
    q, sink = captured.q[rows].to(dtype), captured.sink.to(dtype)
    logits = torch.einsum("rhd,nd->rhn", q, keys) * captured.scale
    window_ids = layout.window_ids(captured.window)[rows].long()
    window_keys = captured.window_kv[window_ids.clamp(min=0)].to(dtype)  # [R, W, D]
    window_logits = torch.einsum("rhd,rwd->rhw", q, window_keys) * captured.scale
    window_logits = window_logits.masked_fill((window_ids < 0)[:, None], -math.inf)
    window_lse = _logsumexp(window_logits)
    outside_lse = torch.logaddexp(window_lse, sink)  # window and sink [R, H]
    scores = _index_scores(captured, rows, low, high, dtype)

    attended = visible if support == "visible" else visible & _attended(captured.selected, rows, low, high)
    values = _distribution_metrics(scores, logits, outside_lse, attended)
    compressed_lse = _logsumexp(logits.masked_fill(~attended[:, None], -math.inf))
    masses = _shares(torch.stack([window_lse, sink.expand_as(window_lse), compressed_lse], dim=-1)).mean(dim=1)
    values |= {f"mass_{name}": masses[:, i] for i, name in enumerate(("window", "sink", "compressed"))}
    if not topk:
        return values

    teachers = {name: teacher_distribution(logits, outside_lse, visible, teacher=name) for name in TEACHERS}
    order = {name: _descending(t, visible) for name, t in teachers.items()}
    order_student = _descending(scores, visible)

    def attend(chosen: Tensor) -> Tensor:
        chosen_logits = logits.masked_fill(~chosen[:, None], -math.inf)
        total = torch.logaddexp(outside_lse, _logsumexp(chosen_logits))[..., None]
        return (chosen_logits - total).exp() @ keys + torch.einsum("rhw,rwd->rhd", (window_logits - total).exp(), window_keys)

    out = attend(visible) if output_error else None
    for k in topk:
        selects = count > k  # the other rows take everything, whoever ranks
        student = _first(order_student, k)
        best = {name: _first(order[name], k) for name in TEACHERS}
        at_k: dict[str, Tensor] = {}
        for name, teacher in teachers.items():
            at_k[f"recall_{name}@{k}"] = (student & best[name]).sum(dim=-1).to(dtype) / k
            at_k[f"mass_{name}@{k}"] = (teacher * student).sum(dim=-1)
            at_k[f"best_mass_{name}@{k}"] = (teacher * best[name]).sum(dim=-1)
        if out is not None:
            norm = out.flatten(1).norm(dim=-1)
            for suffix, chosen in (("", student), *((f"_{name}", best[name]) for name in TEACHERS)):
                at_k[f"output_error{suffix}@{k}"] = (attend(chosen) - out).flatten(1).norm(dim=-1) / norm
        values |= {name: value.masked_fill(~selects, math.nan) for name, value in at_k.items()}
    return values


def _distribution_metrics(scores: Tensor, logits: Tensor, outside_lse: Tensor, support: Tensor) -> dict[str, Tensor]:
    """KL, entropies and TV over `support` bool [R, n]; scores [R, n], logits [R, H, n], outside_lse [R, H] -> name -> [R]."""
    empty = ~support.any(dim=-1)
    log_student = torch.log_softmax(scores.masked_fill(~support, -math.inf), dim=-1).masked_fill(~support, 0)
    log_size = support.sum(dim=-1).to(scores.dtype).log()
    values = {"entropy": -(log_student.exp() * log_student * support).sum(dim=-1)}
    teachers = [teacher_distribution(logits, outside_lse, support, teacher=name) for name in TEACHERS]
    for name, teacher in zip(TEACHERS, teachers, strict=True):
        entropy = -torch.xlogy(teacher, teacher).sum(dim=-1)
        values[f"entropy_{name}"] = entropy
        values[f"kl_{name}"] = indexer_kl(scores, teacher, support)
        values[f"kl_uniform_{name}"] = log_size - entropy
    values["tv"] = (teachers[0] - teachers[1]).abs().sum(dim=-1) / 2
    return {name: value.masked_fill(empty, math.nan) for name, value in values.items()}


def _index_scores(captured: CapturedLayer, rows: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Student logits [R, n]: sum over index heads of weight times relu(q . k)."""
    products = torch.einsum("rhd,nd->rhn", captured.index_q[rows].to(dtype), captured.index_k[low:high].to(dtype))
    return torch.einsum("rhn,rh->rn", products.relu(), captured.index_w[rows].to(dtype))


def _attended(selected: object, rows: Tensor, low: int, high: int) -> Tensor:
    """bool [R, n]: the entries among ids low..high that the layer selected; `selected` int32 [T, K] or ALL_VISIBLE."""
    if selected is ALL_VISIBLE:
        return torch.ones(rows.numel(), high - low, dtype=torch.bool, device=rows.device)
    if not isinstance(selected, Tensor):
        raise ValueError(f"selected must be ids [T, K] or ALL_VISIBLE, got {selected!r}")
    ids = selected[rows].long()
    inside = (ids >= low) & (ids < high)
    mask = torch.zeros(rows.numel(), high - low + 1, dtype=torch.bool, device=rows.device)  # the last column collects what is no entry
    return mask.scatter_(1, torch.where(inside, ids - low, high - low), True)[:, :-1]


def _descending(score: Tensor, visible: Tensor) -> Tensor:
    """Entry positions of each row by falling score, ties to the lower id, invisible entries last; int64 [R, n]."""
    return score.masked_fill(~visible, -math.inf).sort(dim=-1, descending=True, stable=True).indices


def _first(order: Tensor, k: int) -> Tensor:
    """bool [R, n]: the first k positions of each row of `order`."""
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :k], True)


def _logsumexp(x: Tensor) -> Tensor:
    """Over the last axis; -inf for an axis of length 0 (no entry at all)."""
    return x.logsumexp(dim=-1) if x.shape[-1] else x.new_full(x.shape[:-1], -math.inf)


def _shares(lse: Tensor) -> Tensor:
    """Softmax over the last axis with the limits that extreme sinks need: +inf takes everything, all -inf gives 0."""
    return torch.softmax(lse.clamp(max=1e30), dim=-1).nan_to_num(nan=0.0)
