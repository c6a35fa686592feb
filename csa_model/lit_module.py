# SPDX-License-Identifier: Apache-2.0
"""Training and validation of the decoder under Lightning: one packed row per rank and micro-batch, losses exact over the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from csa_model.backend_choice import choose_backend, compute_dtype, device_type
from csa_model.config import ConfigError, ExperimentConfig, from_mapping
from csa_model.data.batch import Divisors, PackedBatch
from csa_model.decoder import AttentionMode, Decoder, DecoderOutput
from csa_model.gradients import ClippedNorms, FiniteGuard
from csa_model.hyper_connections import HyperHead
from csa_model.layers import RMSNorm
from csa_model.losses import LossTerms, cross_entropy_sum, total_loss
from csa_model.moe import RouterRecord, SwiGLU, update_router_biases
from csa_model.optimizers import build_optimizer
from csa_model.run_dir import plain
from csa_model.schedulers import build_scheduler
from csa_model.training_graph import CaptureFailed, MicroStep, Prepared, TrainingGraph, choose_graph, copied
from kernels import Backend, BackendUnsupported

SHOWN_KEYS = 3  # of each kind of key that does not fit


class CSALitModule(L.LightningModule):
    """The decoder with its losses, optimizer and metrics.

    `config` is the typed configuration, or the plain mapping that a checkpoint keeps of it. Hyper-parameters are saved as plain containers, so that
    checkpoints load with `torch.load(..., weights_only=True)`.
    """

    def __init__(self, config: ExperimentConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config if isinstance(config, ExperimentConfig) else from_mapping(config)
        self.save_hyperparameters({"config": plain(self.config)})
        self.mode = AttentionMode.from_config(self.config.stage, self.config.teacher.name)
        backend, self.backend_reason = choose_backend(self.config, self.mode)
        self.decoder = build_decoder(self.config, self.mode, backend)
        freeze(self.decoder, self.config)
        if self.config.compile:
            compile_parts(self.decoder)
        indexer = {id(p) for _, p in self.decoder.indexer_parameters()}
        trained = [(name, p) for name, p in self.decoder.named_parameters() if p.requires_grad]
        self._trunk = [(name, p) for name, p in trained if id(p) not in indexer]
        self._indexers = [(name, p) for name, p in trained if id(p) in indexer]
        self._guards = {name: FiniteGuard() for name in ("train/grad_norm", "indexer/grad_norm")}
        on_graph, self.graph_choice = choose_graph(self.config, backend, device_type(self.config))
        longest = self.config.data.sequence_length
        self.graph = TrainingGraph(self._losses, self.decoder, longest) if on_graph else None
        self._micro_batches: list[tuple[LossTerms, PackedBatch]] = []
        self._gradients: list[Tensor | None] = []
        self._router_counts: dict[int, tuple[Any, Tensor]] = {}
        self._norms: dict[str, Tensor] = {}
        self._finished: list[tuple[LossTerms, PackedBatch]] = []
        self._validation = ValidationSums(self)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.decoder, self.config.optimizer)
        if self.graph is not None:
            optimizer.repeat = self._beside_graph
        scheduler = build_scheduler(optimizer, self.config.scheduler, self.config.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    def run_decoder(self, batch: PackedBatch) -> DecoderOutput:
        """The decoder on one row, with the MTP block where the model has one."""
        next_tokens = batch.targets if self.config.model.mtp.enabled else None
        output: DecoderOutput = self.decoder(batch.tokens, batch.layout, self.mode, next_tokens=next_tokens)
        return output

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        step = None if self.graph is None else self._graph_step(self.graph, batch)
        if step is None:
            terms, router = self._losses(batch, batch.step.divisors())
        else:
            terms, router, self._gradients = step.terms, step.router, step.gradients
            if self.trainer.accumulate_grad_batches > 1:  # the next micro-batch will overwrite them
                terms, router = copied(terms), copied(router)
        self._micro_batches.append((terms, batch))
        for record in router:
            gate, counts = self._router_counts.get(record.layer, (record.module, None))
            self._router_counts[record.layer] = (gate, record.counts if counts is None else counts + record.counts)
        return terms.total if self.graph is None else terms.total * self.trainer.accumulate_grad_batches

    def _graph_step(self, graph: TrainingGraph, batch: PackedBatch) -> MicroStep | None:
        """The micro-batch from the graph; None, after a warning, where trainer.cuda_graph=auto finds only now that there can be none."""
        try:
            return graph.run(batch)
        except (BackendUnsupported, CaptureFailed) as error:
            self._refuse_unless_auto(error)
            rank_zero_warn(f"training goes on without a CUDA graph: {error}")
            graph.release()
            self.graph, self.graph_choice = None, f"none: {error}"
            return None

    def _beside_graph(self, name: str, key: Hashable, prepare: Callable[[], Prepared]) -> Any:
        """A part of the optimizer step, as a graph beside that of the micro-batches where there is one; see `TrainingGraph.beside`."""
        if self.graph is None:
            prepared = prepare()
            prepared.load()
            return prepared.run()
        try:
            return self.graph.beside(name, key, prepare)
        except CaptureFailed as error:
            self._refuse_unless_auto(error)
            rank_zero_warn(f"training goes on without a CUDA graph of one part: {error}")
            return self.graph.beside(name, key, prepare)

    def _refuse_unless_auto(self, error: Exception) -> None:
        if self.config.trainer.cuda_graph == "always":
            remedy = "trainer.cuda_graph=auto, which goes on without, or never"
            raise BackendUnsupported(f"trainer.cuda_graph=always cannot be honoured: {error}", remedy) from error

    def _losses(self, batch: PackedBatch, divisors: Divisors) -> tuple[LossTerms, list[RouterRecord]]:
        """Losses of one micro-batch, and the loads of its routers."""
        output = self.run_decoder(batch)
        # Lightning divides the loss by the micro-batches of a step and DDP averages over ranks; the divisors are those of the whole step already.
        scale = 1 if self.graph is not None else self.trainer.accumulate_grad_batches * self.trainer.world_size
        return total_loss(output, batch, self.decoder, self.config, scale=float(scale), divisors=divisors), output.router

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Lightning's hook; `loss` has been through a graph with its backward, where there is one, and the gradients are only handed on."""
        if self.graph is None:
            super().backward(loss, *args, **kwargs)
            return
        gradients, self._gradients = self._gradients, []
        self.graph.hand_over(gradients, more=self.trainer.accumulate_grad_batches > 1)

    def on_fit_start(self) -> None:
        if self.graph is not None and self.trainer.world_size > 1:
            raise BackendUnsupported(
                f"a Trainer of {self.trainer.world_size} processes cannot sum the gradients of a CUDA graph",
                "trainer.strategy=ddp or trainer.cuda_graph=never in the configuration of the module",
            )

    def on_train_start(self) -> None:
        # A checkpoint brings the learning rates of its own schedule; where trainer.max_steps has changed, those of this one hold from here on.
        for scheduler in (entry.scheduler for entry in self.trainer.lr_scheduler_configs):
            assert isinstance(scheduler, LambdaLR)
            for group, base, factor in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                group["lr"] = base * factor(scheduler.last_epoch)

    def on_fit_end(self) -> None:
        if self.graph is not None:
            self.decoder.zero_grad(set_to_none=True)  # gradients lie in the graph's memory
            self.graph.release()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip trunk and indexers by their own norms, so that the size of the KL cannot change the trunk's step. Lightning's values stay unused."""
        limits = self.config.optimizer
        groups = {
            "train/grad_norm": (self._trunk, limits.max_grad_norm),
            "indexer/grad_norm": (self._indexers, limits.indexer_max_grad_norm),
        }
        places = tuple(p.grad.data_ptr() if p.grad is not None else 0 for parameters, _ in groups.values() for _, p in parameters)
        for name, (names, norms, joint) in self._beside_graph("norms and clipping", places, lambda: ClippedNorms(groups)).items():
            self._guards[name].check(names, norms, self.trainer.global_step + 1)
            self._norms[name] = joint.clone()  # the next micro-batch may overwrite it

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        # Here and not in on_train_batch_end, which callbacks reach first: a checkpoint must hold the biases of the step it counts.
        self._update_router_biases()
        self._finished, self._micro_batches = self._micro_batches, []

    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:  # also after an exception in the middle of a step
            self._micro_batches, self._router_counts = [], {}

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        finished, self._finished = self._finished, []
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if finished and (self.trainer.global_step % every == 0 or self.trainer.should_stop):
            metrics = {**self._step_losses(finished), **self._norms}
            # nothing for a progress bar, here and below: Lightning reads such a figure after every step, and the host would wait for the device
            self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)

    def _step_losses(self, finished: list[tuple[LossTerms, PackedBatch]]) -> dict[str, Tensor]:
        shares = [terms.means(batch.step, self.config) for terms, batch in finished]
        totals = torch.stack([torch.stack([share[name].float() for share in shares]).sum() for name in shares[0]])
        return dict(zip(shares[0], self._sum_over_ranks(totals), strict=True))

    def _update_router_biases(self) -> None:
        counts, self._router_counts = self._router_counts, {}
        if not counts or self.config.stage.train_only_indexer:  # that stage moves nothing but the indexers
            return
        summed = self._sum_over_ranks(torch.stack([load for _, load in counts.values()]))
        update_router_biases([gate for gate, _ in counts.values()], summed, self.config.model.moe.bias_update_rate)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return values
        reduced = self.trainer.strategy.reduce(values, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    def on_validation_epoch_start(self) -> None:
        self._validation.reset()

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._validation.add(self.run_decoder(batch), batch)

    def on_validation_epoch_end(self) -> None:
        metrics = self._validation.metrics(self._sum_over_ranks(self._validation.sums))
        # Every rank holds the same values already; sync_dist only keeps Lightning from warning about it, which it does under ddp on one device too.
        self.log_dict(metrics, batch_size=1, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for guard in self._guards.values():
            guard.settle()


class ValidationSums:
    """Sums over validation rows, float64, in one vector: ranks add theirs once per validation, whatever number of rows each of them has.

    The set of metrics follows from the configuration alone, so that every rank logs the same keys.
    """

    def __init__(self, module: CSALitModule) -> None:
        self.module = module
        learns = module.mode.indexer_loss != "off"
        self.layers = {layer: attention.ratio for layer, attention in module.decoder.csa_layers()} if learns else {}
        self.names = ["loss", "tokens", "bytes", "mtp_loss", "mtp_tokens"]
        self.names += [f"{what}{layer}" for layer in self.layers for what in ("kl", "rows")]
        self.sums = torch.zeros(len(self.names), dtype=torch.float64)

    def reset(self) -> None:
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=self.module.device)

    def add(self, output: DecoderOutput, batch: PackedBatch) -> None:
        """Add one row. Only real documents count; the divisors are taken from the rows themselves, not from `batch.step`."""
        decoder = self.module.decoder
        zero = batch.tokens.new_zeros(())
        row = {
            "loss": cross_entropy_sum(decoder, output.hidden, batch.targets),
            "tokens": (batch.targets >= 0).sum(),
            "bytes": zero + batch.target_bytes,
        }
        row |= {"mtp_loss": zero, "mtp_tokens": zero}
        if output.mtp_hidden is not None:
            row |= {"mtp_loss": cross_entropy_sum(decoder, output.mtp_hidden, batch.mtp_targets), "mtp_tokens": (batch.mtp_targets >= 0).sum()}
        for record in output.indexer:
            row |= {f"kl{record.layer}": record.stats.kl_sum, f"rows{record.layer}": record.stats.rows}
        self.sums += torch.stack([row[name].to(self.sums) for name in self.names])

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        """Metrics of the summed vector: nats per token, bits per byte of text, nats per query row."""
        total = dict(zip(self.names, sums, strict=True))
        # Lightning keeps metrics in fp32: one rounding at the end.
        metrics = {"val/loss": total["loss"] / total["tokens"].clamp(min=1)}
        if total["bytes"] > 0:  # synthetic tasks stand for no text; the sums are those of all ranks, so every rank decides alike
            metrics["val/bits_per_byte"] = total["loss"] / math.log(2) / total["bytes"]
        if self.module.config.model.mtp.enabled:
            metrics["val/mtp_loss"] = total["mtp_loss"] / total["mtp_tokens"].clamp(min=1)
        if self.layers:
            per_layer = {layer: total[f"kl{layer}"] / total[f"rows{layer}"].clamp(min=1) for layer in self.layers}
            metrics["val/indexer_kl"] = torch.stack(list(per_layer.values())).mean()
            metrics |= {f"val/indexer_kl/layer{layer}": kl for layer, kl in per_layer.items()}
        return {name: value.float() for name, value in metrics.items()}


def build_decoder(config: ExperimentConfig, mode: AttentionMode, backend: Backend | None = None) -> Decoder:
    """The decoder on its backend. Raises BackendUnsupported now rather than in the first step, for the device and precision of the trainer."""
    backend = backend or choose_backend(config, mode)[0]
    return Decoder(config.model, backend, device_type=device_type(config), dtype=compute_dtype(config), mode=mode)


def compile_parts(decoder: Decoder) -> None:
    """torch.compile the modules that see tensors only: norms, dense and shared SwiGLU, closing heads of the streams.

    The whole decoder would be compiled anew for every layout, since the document boundaries are host integers, and the attention runs kernels of its
    own. In place, so that the keys of the state dict stay as they are.
    """
    for module in decoder.modules():
        if isinstance(module, (RMSNorm, SwiGLU, HyperHead)):
            module.compile()


def freeze(decoder: Decoder, config: ExperimentConfig) -> None:
    """Switch off the gradient of what stage and teacher do not train: a parameter with a zero gradient would still be moved by weight decay."""
    learns = config.teacher.name != "none" and config.stage.indexer_loss != "off"
    if config.stage.train_only_indexer:
        if not learns or not decoder.csa_layers():
            raise ConfigError(
                "stage.train_only_indexer=true trains nothing here: it needs a CSA layer (ratio 4) in model.compress_ratios, "
                "teacher=full_csa or compressed_only, and stage.indexer_loss=dense or sparse"
            )
        decoder.requires_grad_(False)
    for _, p in decoder.indexer_parameters():
        p.requires_grad_(learns)


def load_initial_weights(decoder: Decoder, path: str | Path) -> None:
    """Load weights, and nothing else, from a checkpoint of this project (or a plain state dict of the decoder).

    Raises ConfigError, before anything is changed, for a file that cannot be read and for a checkpoint of another model; the message names the first
    keys that do not fit and, where the checkpoint knows them, the settings.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"init_from={path} does not exist; give the path of a checkpoint file") from None
    except IsADirectoryError:
        raise ConfigError(f"init_from={path} is a folder; give the path of a checkpoint file") from None
    except Exception as error:  # torch's own text advises to load it unsafely
        raise ConfigError(f"init_from={path} cannot be read as a checkpoint of tensors and plain values ({type(error).__name__})") from None
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"init_from={path} holds no state dict; give a checkpoint that a training run wrote")
    weights = {name.removeprefix("decoder."): value for name, value in state.items()}
    own = decoder.state_dict()
    missing = [f"missing {name}" for name in own if name not in weights]
    unexpected = [f"unexpected {name}" for name in weights if name not in own]
    different = [
        f"{name} is {list(weights[name].shape)} there and {list(value.shape)} here"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    number = len(missing) + len(unexpected) + len(different)
    if number:
        shown = [line for kind in (missing, unexpected, different) for line in kind[:SHOWN_KEYS]]
        there = content.get("hyper_parameters", {}).get("config", {}).get("model", {})
        settings = [
            f"model.{key}: {there[key]} there, {value} here" for key, value in plain(decoder.config).items() if there.get(key, value) != value
        ]
        more = f"; and {number - len(shown)} more" if number > len(shown) else ""
        raise ConfigError(
            f"init_from={path} is a checkpoint of another model: {number} keys do not fit: {'; '.join(shown)}{more}. "
            f"Use the model settings that it was trained with{': ' if settings else ''}{'; '.join(settings)}"
        )
    decoder.load_state_dict(weights)
