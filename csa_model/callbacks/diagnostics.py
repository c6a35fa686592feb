# SPDX-License-Identifier: Apache-2.0
"""How well the indexers know the attention they select for, measured on the same rows all through a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from csa_model.attention import capture
from csa_model.callbacks.throughput import Throughput
from csa_model.config import DiagnosticsConfig
from csa_model.csa_metrics import row_metrics, sample_rows, summarise

if TYPE_CHECKING:
    from csa_model.attention import CapturedLayer
    from csa_model.data.batch import PackedBatch
    from csa_model.lit_module import CSALitModule


def metric_sources(topk: int | None) -> dict[str, str]:
    """Logged name -> name in `csa_model.csa_metrics`. Names without a teacher refer to full_csa in every arm, so that arms can be compared; without a
    top-k there is nothing to recall."""
    sources = {
        "indexer/kl_full_csa": "kl_full_csa",
        "indexer/kl_compressed_only": "kl_compressed_only",
        "indexer/kl_uniform": "kl_uniform_full_csa",
        "indexer/kl_uniform_compressed_only": "kl_uniform_compressed_only",
        "indexer/entropy": "entropy",
        "attn/mass_window": "mass_window",
        "attn/mass_sink": "mass_sink",
        "attn/mass_compressed": "mass_compressed",
        "teacher/tv": "tv",
    }
    if topk is not None:
        sources |= {"indexer/recall_at_k": f"recall_full_csa@{topk}", "indexer/mass_at_k": f"mass_full_csa@{topk}"}
    return sources


# share of a uniform student's KL that the student has made good -> its KL, the uniform student's
CAPTURED = {
    "indexer/captured": ("indexer/kl_full_csa", "indexer/kl_uniform"),
    "indexer/captured_compressed_only": ("indexer/kl_compressed_only", "indexer/kl_uniform_compressed_only"),
}


class IndexerDiagnostics(L.Callback):
    """Logs the metrics of `metric_sources` and `CAPTURED` = 1 - KL / KL of a uniform student, per CSA layer and as the mean over layers.

    KL, entropy, total variation and the mass split are taken over the entries that the attention of the current stage reads. Recall (overlap of the
    student's and the full_csa teacher's k largest of all visible entries) and the teacher's mass on the student's k count only rows with more than k
    visible entries. The rows are a fixed sample of the first validation row of each rank; ranks are averaged by the number of rows. A metric that is
    defined on no row is not logged.
    """

    def __init__(self, config: DiagnosticsConfig, topk: int | None) -> None:
        self.every_n_steps, self.rows = config.every_n_steps, config.rows
        self.topk = topk
        self.sources = metric_sources(topk)
        self._batch: PackedBatch | None = None
        self._measured_at = -1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:  # within a step: the weights are those of the step before
            return
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == trainer.max_steps
        if due and step != self._measured_at and step > 0:
            self._measured_at = step
            self._run(trainer, pl_module)  # type: ignore[arg-type]

    def _run(self, trainer: L.Trainer, module: CSALitModule) -> None:
        with Throughput.pause_all(trainer):
            metrics = self.measure(trainer, module)
        # Lightning counts logged steps from 0; straight to the loggers, since its own interval need not fall on this step.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def measure(self, trainer: L.Trainer, module: CSALitModule) -> dict[str, float]:
        """The metrics of the current weights."""
        if self._batch is None:
            assert trainer.datamodule is not None  # type: ignore[attr-defined]
            self._batch = next(iter(trainer.datamodule.val_dataloader()))  # type: ignore[attr-defined]
        batch = self._batch.to(module.device)
        was_training = module.training
        module.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context(), capture(module.decoder) as layers:
            module.run_decoder(batch)
        module.train(was_training)
        sums = torch.tensor([self._sums(layer) for layer in layers], dtype=torch.float64, device=module.device)  # [layers, metrics, 2]
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        return self._named([layer.layer for layer in layers], sums.cpu())

    def _sums(self, captured: CapturedLayer) -> list[tuple[float, float]]:
        """(sum, rows) of every metric over this rank's sample."""
        generator = torch.Generator().manual_seed(captured.layer)
        rows = sample_rows(captured.layout, captured.ratio, self.rows, generator)
        means: Mapping[str, tuple[float, int]] = summarise(
            row_metrics(captured, rows, topk=() if self.topk is None else (self.topk,), support="attended")
        )
        found = [means.get(source, (0.0, 0)) for source in self.sources.values()]
        return [(mean * count, float(count)) for mean, count in found]

    def _named(self, layers: list[int], sums: torch.Tensor) -> dict[str, float]:
        per_layer: dict[int, dict[str, float]] = {}
        for layer, values in zip(layers, sums.tolist(), strict=True):
            named = {name: total / count for name, (total, count) in zip(self.sources, values, strict=True) if count}
            for name, (kl, uniform) in CAPTURED.items():
                if named.get(uniform, 0.0) > 0:
                    named[name] = 1 - named[kl] / named[uniform]
            per_layer[layer] = named
        result: dict[str, float] = {}
        for name in [*self.sources, *CAPTURED]:
            values = {layer: named[name] for layer, named in per_layer.items() if name in named}
            if values:
                result[name] = math.fsum(values.values()) / len(values)
                result |= {f"{name}/layer{layer}": value for layer, value in values.items()}
        return result
