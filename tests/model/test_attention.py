# SPDX-License-Identifier: Apache-2.0
"""Attention of each kind of layer, through the module."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from csa_model.attention import Attention, AttentionMode
from csa_model.config import ConfigError, RopeScaling, StageConfig
from csa_model.row import RotaryTables, Row
from kernels import PackedLayout, get_backend
from tests.model.helpers import SPARSE, tiny_config

DENSE = AttentionMode("dense", "off")


def layer(ratio: int, **changes: object) -> Attention:
    torch.manual_seed(ratio)
    made = Attention(tiny_config(**changes), get_backend("unfused"), 0, ratio).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("sink", "ape")):
                parameter.normal_()
            elif "norm" not in name:
                parameter.mul_(12.0)
    return made


def row_of(lengths: list[int], ratio: int, offset: int = 0, **changes: object) -> Row:
    return Row(PackedLayout.from_lengths(lengths), RotaryTables(tiny_config(**changes)), {ratio}, torch.float64, position_offset=offset)


def inputs(count: int) -> Tensor:
    return torch.randn(count, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_gradients_with_the_inverse_rotation(ratio: int) -> None:
    """Rotating the attention output in place would corrupt what its backward needs."""
    attention, x = layer(ratio, num_attention_heads=2, o_lora_rank=3, q_lora_rank=5), inputs(9).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, row_of([9], ratio), DENSE).y, (x,), fast_mode=True)


def test_projection_leaves_the_backend_output_unchanged() -> None:
    """The output that the backend returned, before and after the module has used it."""
    attention, kept = layer(4), []

    class Watched(type(attention.backend)):  # type: ignore[misc]
        def attend(self, *args: object) -> tuple[Tensor, Tensor]:
            out, lse = super().attend(*args)
            kept.append((out, out.clone()))
            return out, lse

    attention.backend = Watched()
    attention(inputs(20), row_of([20], 4), SPARSE)
    ((out, copy),) = kept
    assert torch.equal(out, copy)


@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_only_relative_positions_matter(ratio: int) -> None:
    """Shift every position by any constant. Entries at the wrong position, unrotated values or a missing inverse rotation show."""
    attention, x = layer(ratio), inputs(30)
    reference = attention(x, row_of([17, 13], ratio), SPARSE).y
    for offset in (1, 4, 1000):
        torch.testing.assert_close(attention(x, row_of([17, 13], ratio, offset), SPARSE).y, reference, rtol=1e-9, atol=1e-9)


def test_positions_do_matter() -> None:
    attention, x = layer(0), inputs(12)
    row = row_of([12], 0)
    row._token_rotation[0] = row.token_rotation(0).flip(0)
    assert not torch.allclose(attention(x, row, SPARSE).y, attention(x, row_of([12], 0), SPARSE).y)


@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_softmax_scale_has_no_magnitude_correction(ratio: int) -> None:
    """D^-0.5 of the configured head dim in every layer, whatever YaRN's factor; never hidden / heads."""
    attention = Attention(tiny_config(hidden_size=256, head_dim=96), get_backend("unfused"), 0, ratio)
    assert attention.softmax_scale == 96**-0.5
    assert attention.wq_b.out_features == 4 * 96
    assert attention.wkv.out_features == 96


def test_window_only_layer_with_a_long_window_is_causal_attention_with_a_sink() -> None:
    attention, x = layer(0, sliding_window=64), inputs(21)
    row = row_of([21], 0)
    result: dict[str, Tensor] = {}

    class Plain(type(attention.backend)):  # type: ignore[misc]
        def attend(self, q, kv, compressed, selected, sink, layout, ratio, window, scale):  # type: ignore[no-untyped-def]
            logits = torch.einsum("thd,jd->htj", q, kv) * scale
            logits = logits.masked_fill(~torch.ones(21, 21, dtype=torch.bool).tril(), -torch.inf)
            p = torch.cat([logits, sink[:, None, None].expand(-1, 21, 1)], -1).softmax(-1)[..., :-1]
            result["plain"] = torch.einsum("htj,jd->thd", p, kv)
            return result["plain"], None

    ours = attention(x, row, SPARSE).y
    attention.backend = Plain()
    torch.testing.assert_close(ours, attention(x, row, SPARSE).y)


def test_window_reaches_exactly_its_length() -> None:
    """Window 4, row t: token t-4 changes nothing, token t-3 and t itself do."""
    attention, t = layer(0, sliding_window=4), 9
    x = inputs(12)
    reference = attention(x, row_of([12], 0), SPARSE).y[t]
    for token, changes in ((t - 4, False), (t - 3, True), (t, True), (t + 1, False)):
        moved = x.clone()
        moved[token] += 1.0
        assert torch.equal(attention(moved, row_of([12], 0), SPARSE).y[t], reference) is not changes


def test_compressed_base_moves_compressed_layers_only() -> None:
    """The base of the compressed layers, and YaRN with it, leave window-only layers alone."""
    x = inputs(24)
    changes = ({"compress_rope_theta": 10_000.0}, {"rope_scaling": RopeScaling(factor=4.0, original_max_position_embeddings=512)})
    for change in changes:
        for ratio in (0, 4, 8):
            attention = layer(ratio)
            before, after = (attention(x, row_of([24], ratio, **c), DENSE).y for c in ({}, change))
            assert torch.equal(before, after) is (ratio == 0), (change, ratio)
    for ratio in (0, 4, 8):
        attention = layer(ratio)
        before, after = (attention(x, row_of([24], ratio, **c), DENSE).y for c in ({}, {"rope_theta": 500.0}))
        assert torch.equal(before, after) is (ratio > 0), ratio


@pytest.mark.parametrize("topk", [6, 512])
def test_enough_selected_entries_are_all_of_them(topk: int) -> None:
    attention, x = layer(4, index_topk=topk), inputs(24)
    torch.testing.assert_close(attention(x, row_of([24], 4), SPARSE).y, attention(x, row_of([24], 4), DENSE).y)
    few = layer(4, index_topk=2)
    assert not torch.allclose(few(x, row_of([24], 4), SPARSE).y, few(x, row_of([24], 4), DENSE).y)


def test_a_larger_ratio_reads_every_visible_entry() -> None:
    attention, x = layer(8, index_topk=1), inputs(40)
    assert attention.indexer is None
    assert torch.equal(attention(x, row_of([40], 8), SPARSE).y, attention(x, row_of([40], 8), DENSE).y)


def test_first_tokens_of_a_compressed_layer_see_no_entry() -> None:
    """Rows 0 to 2 of a CSA layer, 0 to 6 at ratio 8: the window alone, so the compressor has no say in them."""
    for ratio in (4, 8):
        attention, x = layer(ratio), inputs(16)
        before = attention(x, row_of([16], ratio), DENSE).y
        assert attention.compressor is not None
        with torch.no_grad():
            attention.compressor.wkv.weight.mul_(-1.0)
        after = attention(x, row_of([16], ratio), DENSE).y
        assert torch.equal(before[: ratio - 1], after[: ratio - 1])
        assert not torch.allclose(before[ratio - 1], after[ratio - 1])


@pytest.mark.parametrize("sink", [200.0, -200.0, float("inf"), float("-inf")])
def test_extreme_sinks_stay_finite(sink: float) -> None:
    attention, x = layer(4).float(), inputs(20).float().requires_grad_()
    with torch.no_grad():
        attention.attn_sink.fill_(sink)
    row = Row(PackedLayout.from_lengths([20]), RotaryTables(tiny_config()), {4}, torch.float32)
    result = attention(x, row, SPARSE)
    assert result.indexer is not None
    (result.y.square().sum() + result.indexer.kl_sum).backward()
    assert result.y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())


def test_mode_of_a_stage() -> None:
    stage = StageConfig(attention="dense", indexer_loss="dense")
    assert AttentionMode.from_config(stage, "compressed_only") == AttentionMode("dense", "dense", "compressed_only")
    assert AttentionMode.from_config(stage, "none").indexer_loss == "off"
    with pytest.raises(ConfigError, match="full_csa, compressed_only, none"):
        AttentionMode.from_config(stage, "full-csa")


def test_grouped_output_keeps_heads_of_a_group_together() -> None:
    attention = layer(0)
    out = torch.randn(7, 4, 16, dtype=torch.float64)
    first = attention.wo_a.weight[:10] @ out[:, :2].flatten(1).t()  # group 0: heads 0 and 1, output rows 0-9
    second = attention.wo_a.weight[10:] @ out[:, 2:].flatten(1).t()
    torch.testing.assert_close(attention.project(out), torch.cat([first, second]).t() @ attention.wo_b.weight.t())


def test_output_projection_starts_smaller_by_depth() -> None:
    torch.manual_seed(0)
    attention = Attention(dataclasses.replace(tiny_config(hidden_size=256, o_lora_rank=128), num_hidden_layers=8), get_backend("unfused"), 0, 4)
    assert attention.wo_b.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert attention.wo_a.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not attention.attn_sink.any()
    assert attention.compressor is not None
    assert not attention.compressor.ape.any()
