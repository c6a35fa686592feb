# SPDX-License-Identifier: Apache-2.0
"""csa_model.csa_metrics against plain loops over documents, rows and heads in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import csa_model.csa_metrics as metrics_module
from csa_model.attention import CapturedLayer
from csa_model.csa_metrics import TEACHERS, RowMetrics, concatenate, row_metrics, sample_rows, summarise
from kernels import ALL_VISIBLE, PackedLayout

LENGTHS, PADDING, RATIO, WINDOW = [3, 29, 0, 47, 4], 5, 4, 3
HEADS, DIM, INDEX_HEADS, INDEX_DIM = 3, 5, 2, 4


def make_capture(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> CapturedLayer:
    g = torch.Generator().manual_seed(seed)
    layout = PackedLayout.from_lengths(LENGTHS, num_tokens=sum(LENGTHS) + PADDING)
    tokens, entries = layout.num_tokens, layout.num_compressed(RATIO) + 2  # surplus entries are never visible

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * 1.5).to(dtype)

    captured = CapturedLayer(
        layer=2,
        q=rand(tokens, HEADS, DIM),
        window_kv=rand(tokens, DIM),
        compressed_kv=rand(entries, DIM),
        sink=rand(HEADS),
        index_q=rand(tokens, INDEX_HEADS, INDEX_DIM),
        index_k=rand(entries, INDEX_DIM),
        index_w=rand(tokens, INDEX_HEADS),
        selected=ALL_VISIBLE,
        out=rand(tokens, HEADS, DIM),
        lse=rand(tokens, HEADS),
        layout=layout,
        ratio=RATIO,
        window=WINDOW,
        scale=0.7,
    )
    return replace(captured, **changes)


def loop_row(c: CapturedLayer, row: int, topk: tuple[int, ...], chosen_ids: set[int] | None = None) -> dict[str, float]:
    """The yardsticks of one row, written with numpy and no shortcut."""
    bounds = np.cumsum([0, *LENGTHS])
    document = int(np.searchsorted(bounds, row, side="right") - 1)
    position = row - bounds[document]
    first_entry = sum(length // RATIO for length in LENGTHS[:document])
    visible = [first_entry + j for j in range((position + 1) // RATIO)]
    window = list(range(max(bounds[document], row - c.window + 1), row + 1))
    q, kv, wkv = c.q[row].double().numpy(), c.compressed_kv.double().numpy(), c.window_kv.double().numpy()
    sink = c.sink.double().numpy()
    score = {
        j: sum(float(c.index_w[row, h]) * max(0.0, float(c.index_q[row, h].double() @ c.index_k[j].double())) for h in range(INDEX_HEADS))
        for j in visible
    }

    def attend(ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        out, p_entry, groups = np.zeros((HEADS, DIM)), np.zeros((HEADS, len(ids))), np.zeros((HEADS, 3))
        for h in range(HEADS):
            w = np.exp(c.scale * wkv[window] @ q[h])
            e = np.exp(c.scale * kv[ids] @ q[h]) if ids else np.zeros(0)
            z = np.exp(sink[h]) + w.sum() + e.sum()
            out[h] = (w / z) @ wkv[window] + ((e / z) @ kv[ids] if ids else 0)
            p_entry[h], groups[h] = e / z, (w.sum() / z, np.exp(sink[h]) / z, e.sum() / z)
        return out, p_entry, groups

    def teachers(ids: list[int]) -> dict[str, np.ndarray]:
        full = attend(ids)[1].sum(0)
        per_head = np.stack([np.exp(c.scale * kv[ids] @ q[h]) / np.exp(c.scale * kv[ids] @ q[h]).sum() for h in range(HEADS)])
        return {"full_csa": full / full.sum(), "compressed_only": per_head.mean(0)}

    support = visible if chosen_ids is None else [j for j in visible if j in chosen_ids]
    groups = attend(support)[2].mean(0)
    result = {"mass_window": groups[0], "mass_sink": groups[1], "mass_compressed": groups[2]}
    if support:
        student = np.exp([score[j] for j in support])
        student /= student.sum()
        t = teachers(support)
        result |= {"entropy": -(student * np.log(student)).sum(), "tv": 0.5 * np.abs(t["full_csa"] - t["compressed_only"]).sum()}
        for name, p in t.items():
            result[f"entropy_{name}"] = -(p * np.log(p)).sum()
            result[f"kl_{name}"] = (p * (np.log(p) - np.log(student))).sum()
            result[f"kl_uniform_{name}"] = (p * (np.log(p) + np.log(len(support)))).sum()
    dense_out = attend(visible)[0]
    for k in topk:
        if len(visible) <= k:
            continue
        t = dict(zip(TEACHERS, (dict(zip(visible, teachers(visible)[name], strict=True)) for name in TEACHERS), strict=True))
        mine = sorted(visible, key=lambda j: (-score[j], j))[:k]
        for suffix, ids in [("", mine)] + [(f"_{name}", sorted(visible, key=lambda j, n=name: (-t[n][j], j))[:k]) for name in TEACHERS]:  # type: ignore[misc]
            result[f"output_error{suffix}@{k}"] = np.linalg.norm(attend(ids)[0] - dense_out) / np.linalg.norm(dense_out)
            if suffix:
                name = suffix[1:]
                result[f"recall_{name}@{k}"] = len(set(mine) & set(ids)) / k
                result[f"mass_{name}@{k}"] = sum(t[name][j] for j in mine)
                result[f"best_mass_{name}@{k}"] = sum(t[name][j] for j in ids)
    return result


def assert_matches_loops(
    found: RowMetrics, c: CapturedLayer, topk: tuple[int, ...], chosen: dict[int, set[int]] | None = None, tolerance: float = 1e-6
) -> None:
    for place, row in enumerate(found.rows.tolist()):
        expected = loop_row(c, row, topk, None if chosen is None else chosen[row])
        for name, value in found.values.items():
            if name in expected:
                assert float(value[place]) == pytest.approx(expected[name], rel=1e-5, abs=tolerance), (row, name)
            else:
                assert math.isnan(value[place]), (row, name)


def test_every_yardstick_equals_plain_loops_in_packed_documents() -> None:
    c = make_capture()
    found = row_metrics(c, torch.arange(sum(LENGTHS)).flip(0), (1, 2, 5), output_error=True)
    assert found.rows.tolist() == list(range(sum(LENGTHS)))
    assert_matches_loops(found, c, (1, 2, 5))
    assert set(loop_row(c, 60, (1, 2, 5))) == set(found.values)  # nothing is computed that the loops do not check


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c = make_capture()
    rows = torch.arange(sum(LENGTHS))
    whole = row_metrics(c, rows, (2,), output_error=True)
    monkeypatch.setattr(metrics_module, "CHUNK_ELEMENTS", 200)
    pieces = row_metrics(c, rows, (2,), output_error=True)
    for name, value in whole.values.items():
        torch.testing.assert_close(pieces.values[name], value, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_memory_follows_the_chunk_and_not_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = metrics_module.teacher_distribution

    def watched(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(logits.numel())
        return real(logits, *args, **kwargs)

    monkeypatch.setattr(metrics_module, "teacher_distribution", watched)
    monkeypatch.setattr(metrics_module, "CHUNK_ELEMENTS", 500)
    row_metrics(make_capture(), torch.arange(sum(LENGTHS)), (2,))
    assert max(sizes) <= 500


def test_attended_support_is_what_the_layer_selected_whatever_stands_in_the_other_slots() -> None:
    c = make_capture()
    tokens, g = c.q.shape[0], torch.Generator().manual_seed(1)
    # unordered ids of any document, some invisible, -1 in the middle, one far outside
    selected = torch.stack([torch.randperm(c.compressed_kv.shape[0], generator=g)[:6] for _ in range(tokens)]).int()
    selected[:, 2], selected[::2, 4] = -1, 10_000
    c = replace(c, selected=selected)
    chosen = {row: {int(j) for j in selected[row].tolist()} for row in range(tokens)}
    found = row_metrics(c, torch.arange(sum(LENGTHS)), (2,), support="attended")
    assert_matches_loops(found, c, (2,), chosen)


def test_float32_agrees_with_float64() -> None:
    exact, single = make_capture(), make_capture(torch.float32)
    rows = sample_rows(exact.layout, RATIO, None)
    a, b = row_metrics(exact, rows, (3,), output_error=True), row_metrics(single, rows, (3,), output_error=True)
    for name, value in a.values.items():
        torch.testing.assert_close(b.values[name], value, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_worked_example_of_two_heads() -> None:
    """Compressed logits (ln 3, 0) and (0, ln 3); sink ln 4 on the first head, none on the second, no window."""
    layout = PackedLayout.from_lengths([8])
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).expand(8, 2, 2).clone()
    c = make_capture(
        dtype=torch.float32,
        layout=layout,
        q=q,
        window_kv=torch.zeros(8, 2),
        compressed_kv=math.log(3) * torch.eye(2),
        sink=torch.tensor([math.log(4), -math.inf]),
        index_q=torch.zeros(8, 1, 2),
        index_k=torch.zeros(2, 2),
        index_w=torch.zeros(8, 1),
        window=0,
        scale=1.0,
    )
    values = {name: float(value) for name, value in row_metrics(c, torch.tensor([7]), (1,)).values.items()}
    full = [5 / 12, 7 / 12]
    assert values["tv"] == pytest.approx(1 / 12)
    assert values["kl_compressed_only"] == pytest.approx(0, abs=1e-6)  # a student with equal scores is uniform, and so is this teacher
    assert values["kl_full_csa"] == pytest.approx(math.log(2) + sum(p * math.log(p) for p in full), abs=1e-6)
    assert values["kl_uniform_full_csa"] == pytest.approx(values["kl_full_csa"], abs=1e-6)
    # equal scores: the student takes the lower id, full_csa prefers the higher one, compressed_only ties and takes the lower
    assert values["recall_full_csa@1"] == 0
    assert values["recall_compressed_only@1"] == 1
    assert values["mass_full_csa@1"] == pytest.approx(5 / 12)
    assert values["best_mass_full_csa@1"] == pytest.approx(7 / 12)
    assert values["mass_compressed"] == pytest.approx((4 / 8 + 1) / 2)
    assert values["mass_sink"] == pytest.approx((4 / 8) / 2)


@pytest.mark.parametrize("sink", [200.0, -200.0, math.inf, -math.inf])
def test_extreme_sinks_give_finite_yardsticks(sink: float) -> None:
    c = make_capture(torch.float32, sink=torch.full((HEADS,), sink))
    found = row_metrics(c, sample_rows(c.layout, RATIO, None), (2,))
    assert all(not value[~value.isnan()].isinf().any() for value in found.values.values())
    for name in ("tv", "kl_full_csa", "mass_sink", "entropy_full_csa"):
        assert not found.values[name].isnan().any()
    total = sum(found.values[f"mass_{part}"] for part in ("window", "sink", "compressed"))
    torch.testing.assert_close(total, torch.ones_like(total))
    if sink > 0:
        assert float(found.values["mass_sink"].min()) == pytest.approx(1)


def test_a_perfect_student_scores_perfectly() -> None:
    """Index scores equal to the log of a one-head teacher: KL 0, recall 1, output error that of the teacher's own choice."""
    base = make_capture()
    one = replace(
        base,
        q=base.q[:, :1],
        sink=base.sink[:1],
        # relu(s + 20) with weight 1 ranks and normalises as s does; the constant rides on an extra dimension
        index_q=torch.cat([base.q[:, :1] * base.scale, torch.full((base.q.shape[0], 1, 1), 20.0, dtype=torch.float64)], -1),
        index_k=torch.cat([base.compressed_kv, torch.ones(base.compressed_kv.shape[0], 1, dtype=torch.float64)], -1),
        index_w=torch.ones(base.q.shape[0], 1, dtype=torch.float64),
    )
    means = summarise(row_metrics(one, sample_rows(one.layout, RATIO, None), (3,), output_error=True))
    for teacher in TEACHERS:
        assert means[f"kl_{teacher}"][0] == pytest.approx(0, abs=1e-9)
        assert means[f"captured_{teacher}"][0] == pytest.approx(1)
        assert means[f"recall_{teacher}@3"][0] == 1
        assert means[f"mass_{teacher}@3"][0] == pytest.approx(means[f"best_mass_{teacher}@3"][0])
    assert means["tv"][0] == pytest.approx(0, abs=1e-12)
    assert means["output_error@3"][0] == pytest.approx(means["output_error_full_csa@3"][0])


def test_rows_without_more_than_k_entries_take_no_part() -> None:
    c = make_capture()
    found = row_metrics(c, torch.arange(sum(LENGTHS)), (5,))
    counts = summarise(found)
    expected = sum(max(0, length - 6 * RATIO + 1) for length in LENGTHS)
    assert counts["recall_full_csa@5"][1] == expected
    assert counts["kl_full_csa"][1] == c.layout.num_query_rows(RATIO)
    assert counts["mass_window"][1] == sum(LENGTHS)
    assert "recall_full_csa@50" not in summarise(row_metrics(c, torch.arange(40), (50,)))


def test_sample_holds_only_rows_that_see_an_entry_and_repeats_with_the_seed() -> None:
    layout = PackedLayout.from_lengths(LENGTHS, num_tokens=sum(LENGTHS) + PADDING)
    everything = sample_rows(layout, RATIO, None)
    assert everything.tolist() == torch.nonzero(layout.visible_compressed(RATIO) > 0).flatten().tolist()
    a, b = (sample_rows(layout, RATIO, 11, torch.Generator().manual_seed(3)) for _ in range(2))
    assert a.tolist() == b.tolist() == sorted(set(a.tolist()))
    assert set(a.tolist()) <= set(everything.tolist())
    assert sample_rows(layout, RATIO, 10_000).tolist() == everything.tolist()
    assert a.tolist() != sample_rows(layout, RATIO, 11, torch.Generator().manual_seed(4)).tolist()


def test_no_entry_at_all_gives_empty_results() -> None:
    """Documents shorter than the ratio, and a k beyond the entries there are."""
    layout = PackedLayout.from_lengths([3, 2])
    c = make_capture(layout=layout, compressed_kv=torch.zeros(0, DIM, dtype=torch.float64), index_k=torch.zeros(0, INDEX_DIM, dtype=torch.float64))
    c = replace(c, q=c.q[:5], window_kv=c.window_kv[:5], index_q=c.index_q[:5], index_w=c.index_w[:5])
    assert summarise(row_metrics(c, sample_rows(layout, RATIO, None), (2,))) == {}
    found = row_metrics(c, torch.arange(5), (2,), output_error=True)
    assert bool(found.values["kl_full_csa"].isnan().all())
    assert float(found.values["mass_compressed"].abs().max()) == 0


def test_concatenated_rows_weigh_by_row() -> None:
    first = RowMetrics(torch.arange(1), torch.ones(1, dtype=torch.int32), {"tv": torch.tensor([4.0])})
    second = RowMetrics(torch.arange(3), torch.ones(3, dtype=torch.int32), {"tv": torch.tensor([0.0, 2.0, math.nan])})
    empty = RowMetrics(torch.arange(0), torch.ones(0, dtype=torch.int32), {})
    assert summarise(concatenate([first, empty, second])) == {"tv": (2.0, 3)}


def test_bad_arguments_are_refused() -> None:
    c = make_capture()
    with pytest.raises(ValueError, match="must lie in"):
        row_metrics(c, torch.tensor([c.q.shape[0]]))
    with pytest.raises(ValueError, match="at least 1"):
        row_metrics(c, torch.tensor([5]), (0,))
