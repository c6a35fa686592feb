# SPDX-License-Identifier: Apache-2.0
"""Logic of the benchmarks that needs no GPU: the dense twin, the crossover, the agreement of paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.train_step import PARTS, DenseTwin, crossover, measure_point
from kernels import Geometry, PackedLayout


def test_dense_twin_is_causal_attention_over_all_tokens_with_one_key_head() -> None:
    g = torch.Generator().manual_seed(0)
    q, kv = torch.randn(7, 2, 8, generator=g), torch.randn(7, 8, generator=g)
    logits = torch.einsum("thd,sd->hts", q, kv) * 0.3
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = torch.einsum("hts,sd->thd", logits.masked_fill(~causal, -torch.inf).softmax(-1), kv)
    out, lse = DenseTwin().attend(q, kv, None, None, torch.zeros(2), PackedLayout.from_lengths([7]), 0, 4, 0.3)
    assert torch.allclose(out, expected, atol=1e-6)
    assert lse.shape == (7, 2)
    with pytest.raises(ValueError, match="one document"):
        DenseTwin().attend(q, kv, None, None, torch.zeros(2), PackedLayout.from_lengths([3, 4]), 0, 4, 0.3)
    with pytest.raises(ValueError, match="no compressed layers"):
        DenseTwin().require(Geometry(heads=2, head_dim=8, window=4, ratios=(0, 4)))


def test_crossover_is_where_sparse_stays_ahead() -> None:
    speeds = {1024: (5.0, 9.0), 2048: (8.0, 7.0), 4096: (6.0, 6.5), 8192: (6.0, 4.0), 16384: (6.0, 2.0)}
    records = [{"path": p, "tokens": t, "tokens_per_second": s} for t, pair in speeds.items() for p, s in zip(("triton", "dense"), pair)]
    assert crossover(records, "triton") == 8192  # at 2,048 it leads too, but not at 4,096
    assert crossover([r for r in records if r["tokens"] <= 1024], "triton") is None


def test_every_kernel_of_the_backend_belongs_to_its_part() -> None:
    """A kernel that no part names would hide among PyTorch's; one that the wrong part names would be charged to it."""
    folder = Path(__file__).parents[3] / "kernels" / "triton_fused"
    names = [name for file in folder.glob("*.py") for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)]
    found = {name: next((part for part, words in PARTS.items() if any(word in name for word in words)), None) for name in names}
    assert len(found) > 25
    expected = {
        "parts_kernel": "index scores and top-k",
        "query_gradient_kernel": "indexer loss",
        "hopper_backward_kernel": "attention",
        "dense_forward_kernel": "attention",
        "write_backward_kernel": "hyper-connections",
        "norm_rotate_backward_kernel": "norms and rotation",
        "swiglu_backward_kernel": "router and SwiGLU",
        "compress_pool_backward_kernel": "compressor",
        "column_sum_kernel": "column sums",
        "head_sum_kernel": "indexer loss",
        "sum_kernel": "experts' rows",
        "long_row_loss_kernel": "cross entropy",
        "momentum_kernel": "optimizer",
    }
    ours = {part for part in PARTS if part not in ("matrix products", "reductions", "sort, scatter, gather", "copies and casts")}
    assert set(found.values()) <= ours
    assert {name: found[name] for name in expected} == expected


def test_point_trains_on_a_cpu() -> None:
    record = measure_point("nano", "dense", 64, "cpu", 1, False)
    assert record["tokens_per_second"] > 0
    assert record["loss"] == pytest.approx(9.0, abs=1.0)  # ln(1024) and 0.3 of it again for the token after the next
