# SPDX-License-Identifier: Apache-2.0
"""The decoder against a second implementation written from the formulas: logits, every loss, every parameter gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from csa_model.config import ModelConfig, MTPConfig
from csa_model.decoder import AttentionMode, Decoder
from tests.model.helpers import build, next_of, plain_config, random_tokens, relative_error, run, tiny_config
from tests.model.reference import Reference

LENGTHS = [13, 1, 3, 0, 22, 4]  # shorter than a window, a ratio, empty, and no multiple of any
ROW = sum(LENGTHS) + 5  # padding at the end

PAIRS = (("sparse", "sparse"), ("dense", "dense"), ("sparse", "dense"), ("dense", "sparse"))  # what is attended to, what the loss runs over
MODES = [AttentionMode(attention, support, "full_csa") for attention, support in PAIRS]  # type: ignore[arg-type]
MODES += [AttentionMode(attention, support, "compressed_only") for attention, support in PAIRS[:2]]  # type: ignore[arg-type]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def ours(decoder: Decoder, tokens: Tensor, mode: AttentionMode) -> tuple[Tensor, list[Tensor]]:
    targets = next_of(tokens, LENGTHS)
    out = run(decoder, tokens, LENGTHS, mode, next_tokens=targets)
    logits = decoder.logits(out.hidden)
    losses = [cross_entropy(logits, targets), *(r.kl_sum for r in out.indexer), *(r.balance_sum for r in out.router)]
    if out.mtp_hidden is not None:
        losses.append(cross_entropy(decoder.logits(out.mtp_hidden), torch.where(targets >= 0, targets.roll(-1), -100)))
    return logits, losses


def theirs(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, mode: AttentionMode) -> tuple[Tensor, list[Tensor]]:
    reference = Reference(config, weights, mode.attention, mode.indexer_loss, mode.teacher)
    targets, logits, totals, start = next_of(tokens, LENGTHS), [], None, 0
    for length in LENGTHS:
        span = slice(start, start + length)
        start += length
        if not length:
            continue
        out = reference(tokens[span], targets[span].clamp(min=0))
        logits.append(out.logits)
        losses = [cross_entropy(out.logits, targets[span]), *out.kl, *out.balance]
        if out.mtp_logits is not None:
            losses.append(cross_entropy(out.mtp_logits, torch.where(targets[span] >= 0, targets[span].roll(-1), -100)))
        totals = losses if totals is None else [a + b for a, b in zip(totals, losses, strict=True)]
    assert totals is not None
    return torch.cat(logits), totals


def check(config: ModelConfig, mode: AttentionMode, dtype: torch.dtype, tolerance: float) -> None:
    """The decoder in `dtype` against the reference in float64, each difference relative to the largest value of its tensor."""
    decoder, tokens = build(config, dtype=dtype), random_tokens(ROW)
    logits, losses = ours(decoder, tokens, mode)
    weights = {name: value.double().requires_grad_() if value.is_floating_point() else value for name, value in decoder.state_dict().items()}
    expected_logits, expected = theirs(config, weights, tokens, mode)
    assert relative_error(logits[: sum(LENGTHS)], expected_logits) < tolerance
    assert len(losses) == len(expected)
    for loss, target in zip(losses, expected, strict=True):
        assert relative_error(loss, target) < tolerance
    factors = [1.0 + 0.37 * i for i in range(len(losses))]
    sum(f * loss for f, loss in zip(factors, losses, strict=True)).backward()  # type: ignore[union-attr]
    sum(f * loss for f, loss in zip(factors, expected, strict=True)).backward()  # type: ignore[union-attr]
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert weights[name].grad is not None, name
        # the norm behind the last streams takes their common factor out: this gradient is what is left of terms that cancel
        cancels = dtype == torch.float32 and "hc_head" in name
        assert relative_error(parameter.grad, weights[name].grad) < tolerance * (10 if cancels else 1), name


@pytest.mark.parametrize("mode", MODES, ids=lambda m: f"{m.attention}-{m.indexer_loss}-{m.teacher}")
def test_logits_losses_and_gradients_equal_the_reference(mode: AttentionMode) -> None:
    """A whole model against an oracle, not a loss that goes down. float64 leaves no room for a formula that is nearly right."""
    check(tiny_config(), mode, torch.float64, 1e-9)


@pytest.mark.parametrize(
    "config",
    [plain_config(), plain_config(mtp=MTPConfig()), tiny_config(mtp=MTPConfig(enabled=False)), tiny_config(index_topk=None)],
    ids=["plain", "plain-with-mtp", "no-mtp", "topk-none"],
)
def test_every_part_can_be_off(config: ModelConfig) -> None:
    check(config, MODES[0], torch.float64, 1e-9)


def test_float32_stays_close_to_the_reference() -> None:
    """1e-5 in single precision."""
    check(tiny_config(), MODES[0], torch.float32, 1e-5)
