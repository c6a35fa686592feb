# SPDX-License-Identifier: Apache-2.0
"""The Lightning data module: an infinite, resumable stream of packed training rows and a fixed set of validation rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from csa_model.config import ConfigError, DataConfig
from csa_model.data.batch import PackedBatch
from csa_model.data.corpus import Corpus, CorpusInfo, build_corpus, check_data
from csa_model.data.stream import RowStream, TrainRows, ValidationRows
from csa_model.data.tokenizers import Tokenizer


class CSADataModule(L.LightningDataModule):
    """Packed rows of `data.tokens_per_batch` tokens, one per micro-batch and rank.

    A sample is a row. The order is a pure function of (data settings, seed, consumed samples). `state_dict` holds the number of samples whose
    optimizer step was taken, so prefetched rows and unfinished accumulation groups are read again after a resume, and changing workers or ranks does
    no harm.

    Args:
        config: the data section.
        ratios: compression ratios of the model (zeros and repeats are ignored); batches carry the query rows of each.
        vocab_size: ids that the model has.
        accumulate: micro-batches per optimizer step.
        seed: of the training order, >= 0. The validation split and rows do not depend on it.
        max_steps: optimizer steps of the run, for `planned_epochs` only; the stream itself has no end.

    Raises:
        ConfigError: at construction what can be told without reading data, in `prepare_data` and `setup` the rest.
    """

    def __init__(self, config: DataConfig, *, ratios: Sequence[int], vocab_size: int, accumulate: int, seed: int, max_steps: int) -> None:
        super().__init__()
        check_data(config, vocab_size, seed)
        if accumulate < 1:
            raise ConfigError(f"trainer.accumulate_grad_batches={accumulate} is not legal; legal: >= 1")
        self.config = config
        self.ratios = tuple(sorted({ratio for ratio in ratios if ratio > 0}))
        self.vocab_size, self.accumulate, self.seed, self.max_steps = vocab_size, accumulate, seed, max_steps
        self._corpus: Corpus | None = None
        self._stream: RowStream | None = None
        self._consumed_at_load, self._step_at_load = 0, 0
        self._loaded_order: dict[str, Any] | None = None

    def prepare_data(self) -> None:
        """Fill the token cache (one process per node)."""
        self.setup("fit")

    def setup(self, stage: str | None = None) -> None:
        """Open the corpus; a second call does nothing. Needs no trainer, so bad data can be refused before anything else is built."""
        if self._corpus is None:
            self._corpus = build_corpus(self.config, vocab_size=self.vocab_size, seed=self.seed)
            self._stream = RowStream(self._corpus.train, self.config.tokens_per_batch, self.ratios, self.seed)
        self._check_order()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a token file that names no tokenizer."""
        return self._opened.tokenizer

    @property
    def corpus(self) -> CorpusInfo:
        return self._opened.info

    @property
    def order(self) -> dict[str, Any]:
        """All that decides which tokens stand in which row. Two runs see the same data in the same order exactly when these agree."""
        return {
            "seed": self.seed,
            "corpus_sha256": self.corpus.sha256,
            "tokenizer_sha256": self.corpus.tokenizer_sha256,
            "sequence_length": self.config.sequence_length,
            "tokens_per_batch": self.config.tokens_per_batch,
            "validation_fraction": self.config.validation_fraction,
        }

    @property
    def planned_epochs(self) -> float:
        """Passes over the training split that `max_steps` make, by the number of rows of the first pass."""
        return self.max_steps * self.accumulate * self._world_size / self._rows_of_first_epoch

    @property
    def consumed_samples(self) -> int:
        """Rows, over all ranks, whose optimizer step was taken."""
        steps = 0 if self.trainer is None else self.trainer.global_step - self._step_at_load
        return self._consumed_at_load + steps * self.accumulate * self._world_size

    def train_rows(self, start: int | None = None) -> TrainRows:
        """The rows of this rank from sample `start` on (default: the first one not consumed)."""
        assert self._stream is not None, "call setup() first"
        return TrainRows(
            self._opened.train,
            self._stream,
            rank=self._rank,
            world_size=self._world_size,
            accumulate=self.accumulate,
            start=self.consumed_samples if start is None else start,
        )

    def validation_rows(self) -> ValidationRows:
        """The validation rows of this rank. Each batch's `step` counts that row alone; a rank without a row left gets one of padding."""
        c = self.config
        return ValidationRows(self._opened.validation, c.tokens_per_batch, self.ratios, c.validation_batches, self._rank, self._world_size)

    def train_dataloader(self) -> DataLoader[PackedBatch]:
        return _TrainLoader(self, num_workers=self.config.num_workers, pin_memory=self._pinned)

    def val_dataloader(self) -> ValidationRows:
        # a handful of rows: starting workers would take longer than making them
        return self.validation_rows()

    def transfer_batch_to_device(self, batch: PackedBatch, device: torch.device, dataloader_idx: int) -> PackedBatch:
        return batch.to(device, non_blocking=self._pinned)

    def state_dict(self) -> dict[str, Any]:
        return {
            "consumed_samples": self.consumed_samples,
            "global_step": 0 if self.trainer is None else self.trainer.global_step,
            "order": self.order,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the consumed samples. ConfigError if the data differ from those of the checkpoint: their rows have another meaning."""
        self._consumed_at_load, self._step_at_load = int(state_dict["consumed_samples"]), int(state_dict["global_step"])
        self._loaded_order = dict(state_dict["order"])
        if self._corpus is not None:
            self._check_order()

    def _check_order(self) -> None:
        if self._loaded_order is None:
            return
        changed = [f"{key} {self._loaded_order.get(key)} -> {value}" for key, value in self.order.items() if self._loaded_order.get(key) != value]
        if changed:
            raise ConfigError(
                f"ckpt_path continues a run on other data: {'; '.join(changed)}. Use the settings of that run, or init_from= to take its weights only"
            )

    @property
    def _opened(self) -> Corpus:
        if self._corpus is None:
            raise RuntimeError("the data module is not set up; call setup() first")
        return self._corpus

    @property
    def _rows_of_first_epoch(self) -> int:
        assert self._stream is not None, "call setup() first"
        return self._stream.rows_of_epoch(0)

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

    @property
    def _rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _pinned(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


class _TrainLoader(DataLoader[PackedBatch]):
    """Every new iterator begins behind the samples consumed by then, also when the trainer asks for one in the middle of a run."""

    def __init__(self, datamodule: CSADataModule, *, num_workers: int, pin_memory: bool) -> None:
        self.datamodule = datamodule
        super().__init__(datamodule.train_rows(), batch_size=None, num_workers=num_workers, pin_memory=pin_memory, generator=_own_generator())

    def __iter__(self) -> Iterator[PackedBatch]:  # type: ignore[override]
        assert isinstance(self.dataset, TrainRows)
        self.dataset.start = self.datamodule.consumed_samples
        return super().__iter__()


def _own_generator() -> torch.Generator:
    """Loaders draw a seed for their workers; from this generator, so that reading data never moves the global one."""
    return torch.Generator().manual_seed(0)
