# SPDX-License-Identifier: Apache-2.0
"""The losses of one packed row, as sums divided by the counts of the whole optimizer step.

A mean per micro-batch would weight a token by how few neighbours it has. Here every sum is divided by the number of contributions over every
micro-batch and every rank, so that accumulation and data parallelism give exactly the loss of one large batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from csa_model.config import ExperimentConfig
from csa_model.data.batch import IGNORED, Divisors, PackedBatch, StepCounts

if TYPE_CHECKING:
    from csa_model.decoder import Decoder, DecoderOutput
    from kernels.backend import IndexerStats

LOGIT_ELEMENTS = 2**26  # logits alive at once: 256 MiB in fp32


@dataclass
class LossTerms:
    """Sums of one row (scalars, nats) and the loss to differentiate. Sums other than `total` are detached."""

    lm_sum: Tensor
    mtp_sum: Tensor | None
    balance_sum: Tensor | None  # over layers and documents
    indexer: dict[int, IndexerStats] = field(default_factory=dict)  # layer -> kl_sum and rows, right after the backward at the latest
    ratios: dict[int, int] = field(default_factory=dict)  # layer -> compression ratio, the key of its divisor
    total: Tensor = field(default_factory=lambda: torch.zeros(()))

    def means(self, step: StepCounts, config: ExperimentConfig) -> dict[str, Tensor]:
        """This row's share of the losses of the optimizer step by metric name: summed over micro-batches and ranks they are the step's losses.

        train/loss is the sum that is minimised; the other terms stand unweighted (nats per token, nats per query row, balance per document). Read it
        after the backward pass.
        """
        divisors = step.divisors()
        values = {"train/lm_loss": self.lm_sum / divisors.tokens}
        total = torch.zeros_like(self.lm_sum) if config.stage.train_only_indexer else values["train/lm_loss"].clone()
        if self.mtp_sum is not None:
            values["train/mtp_loss"] = self.mtp_sum / divisors.mtp_tokens
            if not config.stage.train_only_indexer:
                total += config.model.mtp.coefficient * values["train/mtp_loss"]
        if self.indexer:
            for layer, stats in self.indexer.items():
                values[f"indexer/kl/layer{layer}"] = stats.kl_sum / divisors.query_rows[self.ratios[layer]]
            per_layer = torch.stack([values[f"indexer/kl/layer{layer}"] for layer in self.indexer])
            values["indexer/kl"] = per_layer.mean()
            values["train/indexer_loss"] = per_layer.sum()
            total = total + config.teacher.coefficient * values["train/indexer_loss"]
        if self.balance_sum is not None:
            values["train/balance_loss"] = self.balance_sum / divisors.documents
            if not config.stage.train_only_indexer:
                total = total + config.model.moe.balance_coefficient * values["train/balance_loss"]
        values["train/loss"] = total
        return values


def cross_entropy_sum(decoder: Decoder, hidden: Tensor, targets: Tensor, logit_elements: int = LOGIT_ELEMENTS) -> Tensor:
    """Sum over rows of the cross entropy in fp32, a scalar; 0 with zero gradients where every target is ignored.

    Args:
        hidden: [T, d]; targets: int64 [T], IGNORED where nothing is predicted.
        logit_elements: at most this many logits exist at once. More rows than that are taken in chunks whose logits the backward computes again.
            Where the backend fuses the head with its loss, the fused form bounds them by itself.
    """
    if decoder.fused is not None and hidden.dtype != torch.float64 and not torch.compiler.is_compiling():
        return decoder.fused.linear_cross_entropy(hidden, decoder.head.weight, targets, IGNORED)
    rows = max(1, logit_elements // decoder.config.vocab_size)

    def chunk_sum(h: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(decoder.logits(h).float(), t, ignore_index=IGNORED, reduction="sum")

    if hidden.shape[0] <= rows:
        return chunk_sum(hidden, targets)
    total = hidden.new_zeros((), dtype=torch.float32)
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + (checkpoint(chunk_sum, h, t, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else chunk_sum(h, t))
    return total


def total_loss(
    output: DecoderOutput, batch: PackedBatch, decoder: Decoder, config: ExperimentConfig, scale: float = 1.0, divisors: Divisors | None = None
) -> LossTerms:
    """All losses of one row.

    total = LM + mtp.coefficient * MTP + teacher.coefficient * (KL summed over layers) + balance_coefficient * (balance summed over layers), times
    `scale`: the factor by which accumulation and the mean over ranks will divide the gradient. A stage that trains only the indexers differentiates
    the KL alone. `divisors` default to those of `batch.step`.
    """
    alone = config.stage.train_only_indexer
    divisors = divisors or batch.step.divisors()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not alone):
        lm_sum = cross_entropy_sum(decoder, output.hidden, batch.targets)
        mtp_sum = cross_entropy_sum(decoder, output.mtp_hidden, batch.mtp_targets) if output.mtp_hidden is not None else None
    balances = [record.balance_sum for record in output.router if record.balance_sum is not None]
    balance_sum = torch.stack(balances).sum() if balances else None

    total = output.hidden.new_zeros((), dtype=torch.float32)
    if not alone:
        total = total + lm_sum / divisors.tokens
        if mtp_sum is not None:
            total = total + config.model.mtp.coefficient * mtp_sum / divisors.mtp_tokens
        if balance_sum is not None:
            total = total + config.model.moe.balance_coefficient * balance_sum / divisors.documents
    for record in output.indexer:
        total = total + config.teacher.coefficient * record.kl_sum / divisors.query_rows[record.ratio]
    return LossTerms(
        lm_sum=lm_sum.detach(),
        mtp_sum=None if mtp_sum is None else mtp_sum.detach(),
        balance_sum=None if balance_sum is None else balance_sum.detach(),
        indexer={record.layer: record.stats for record in output.indexer},
        ratios={record.layer: record.ratio for record in output.indexer},
        total=total * scale,
    )
