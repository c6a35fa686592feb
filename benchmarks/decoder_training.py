# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of whole steps time: a decoder's forward, losses, backward and optimizer, with the CUDA graph of training.

Without what else train.py does in a step: update of the router biases, schedule, logging, Lightning; clipping only where it is asked for.
"""

from __future__ import annotations

import torch
from torch import nn

from csa_model.attention import AttentionMode
from csa_model.config import ExperimentConfig
from csa_model.data.batch import Divisors, PackedBatch
from csa_model.decoder import Decoder
from csa_model.losses import LossTerms, total_loss
from csa_model.moe import RouterRecord
from csa_model.optimizers import build_optimizer
from csa_model.training_graph import TrainingGraph
from kernels import Backend


class DecoderTraining:
    """Seeded weights, bf16 autocast on a GPU; there forward and backward are a CUDA graph if the backend can be captured.

    Args:
        config: model, teacher, stage and optimizer are read.
        graph: False launches every kernel by itself, as trainer.cuda_graph=never.
        max_norm: the gradients are clipped to this norm together; None leaves them.
    """

    def __init__(
        self, config: ExperimentConfig, backend: Backend, device: str, *, seed: int = 0, graph: bool = True, max_norm: float | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.config, self.device, self.max_norm = config, device, max_norm
        self.on_gpu = device == "cuda"
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.mode = AttentionMode.from_config(config.stage, config.teacher.name)
        self.decoder = Decoder(config.model, backend, device_type=device, dtype=dtype, mode=self.mode).to(device)
        self.optimizer = build_optimizer(self.decoder, config.optimizer)
        self.parameters: list[nn.Parameter] = list(self.decoder.parameters())
        captured = graph and self.on_gpu and backend.capturable()
        self.graph = TrainingGraph(self._losses, self.decoder, config.data.sequence_length) if captured else None
        if self.graph is not None:
            self.optimizer.repeat = self.graph.beside

    def step(self, batch: PackedBatch) -> LossTerms:
        """One optimizer step on a row; its losses belong to the next step as soon as that begins."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.on_gpu):
            if self.graph is None:
                terms, _ = self._losses(batch, batch.step.divisors())
            else:
                result = self.graph.run(batch)
                terms = result.terms
        if self.graph is None:
            terms.total.backward()
        else:
            for p, gradient in zip(self.parameters, result.gradients, strict=True):
                p.grad = gradient
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()
        return terms

    def peak_bytes(self) -> int:
        """Peak memory since the counter was reset, with what the graph keeps for itself."""
        return torch.cuda.max_memory_allocated() + (self.graph.hidden_bytes if self.graph is not None else 0)

    def _losses(self, batch: PackedBatch, divisors: Divisors) -> tuple[LossTerms, list[RouterRecord]]:
        next_tokens = batch.targets if self.config.model.mtp.enabled else None
        output = self.decoder(batch.tokens, batch.layout, self.mode, next_tokens=next_tokens)
        return total_loss(output, batch, self.decoder, self.config, divisors=divisors), output.router
