# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from csa_model.config import ConfigError
from csa_model.data.batch import PackedBatch
from csa_model.data.datamodule import CSADataModule
from tests.data.helpers import datamodule_of, same, text_config, write_texts

LENGTHS = [9, 40, 7, 30, 25, 11, 33, 8, 21, 60, 13, 5]

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class Recorder(L.LightningModule):
    """A model of one number that remembers what it was shown; `stop_in` fails inside that micro-batch."""

    def __init__(self, stop_in: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[PackedBatch] = []
        self.validated: list[PackedBatch] = []
        self.stop_in = stop_in

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.stop_in:
            raise RuntimeError("power cut")
        self.seen.append(batch)
        return self.weight * batch.tokens.sum()

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.validated.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    module: CSADataModule, folder: Path, max_steps: int, ckpt_path: Path | None = None, stop_in: int | None = None, **options: Any
) -> tuple[Recorder, Path]:
    """Train; returns the recorder and the checkpoint of the last optimizer step."""
    recorder = Recorder(stop_in)
    checkpoints = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=module.accumulate,
        accelerator="cpu",
        logger=False,
        callbacks=[checkpoints],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        **{"val_check_interval": 3, **options},
    )
    if stop_in is None:
        trainer.fit(recorder, module, ckpt_path=ckpt_path, weights_only=True)
    else:
        with pytest.raises(RuntimeError, match="power cut"):
            trainer.fit(recorder, module, ckpt_path=ckpt_path, weights_only=True)
    return recorder, folder / f"step={trainer.global_step}.ckpt"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_twice_from_the_middle_continues_the_order(tmp_path: Path, workers: int, accumulate: int) -> None:
    def module(num_workers: int) -> CSADataModule:
        return datamodule_of(tmp_path, LENGTHS, accumulate=accumulate, num_workers=num_workers)

    straight, _ = fit(module(workers), tmp_path / "straight", 12)
    assert len(straight.seen) == 12 * accumulate
    assert module(0)._stream.rows_of_epoch(0) < 12 * accumulate  # type: ignore[union-attr]  # the run sees more than one epoch
    first, checkpoint = fit(module(workers), tmp_path / "first", 5)
    second, checkpoint = fit(module(2 - workers), tmp_path / "second", 8, checkpoint)
    third, _ = fit(module(workers), tmp_path / "third", 12, checkpoint)
    assert [len(part.seen) for part in (first, second, third)] == [5 * accumulate, 3 * accumulate, 4 * accumulate]
    assert all(same(a, b) for a, b in zip(straight.seen, first.seen + second.seen + third.seen, strict=True))
    assert all(same(a, b) for a, b in zip(first.validated[:3], third.validated[:3], strict=True))


def test_a_run_that_dies_inside_a_group_repeats_that_group(tmp_path: Path) -> None:
    """Prefetched rows and rows whose optimizer step was never taken count as not consumed."""
    straight, _ = fit(datamodule_of(tmp_path, LENGTHS, accumulate=3), tmp_path / "straight", 4)
    died, checkpoint = fit(datamodule_of(tmp_path, LENGTHS, accumulate=3, num_workers=2), tmp_path / "died", 4, stop_in=8)
    assert checkpoint.name == "step=2.ckpt"
    rest, _ = fit(datamodule_of(tmp_path, LENGTHS, accumulate=3), tmp_path / "rest", 4, checkpoint)
    assert all(same(a, b) for a, b in zip(straight.seen, died.seen[:6] + rest.seen, strict=True))


def test_epochs_of_the_trainer_do_not_restart_the_stream(tmp_path: Path) -> None:
    straight, _ = fit(datamodule_of(tmp_path, LENGTHS), tmp_path / "straight", 9)
    module = datamodule_of(tmp_path, LENGTHS)
    limited, _ = fit(module, tmp_path / "limited", 9, limit_train_batches=4)
    assert all(same(a, b) for a, b in zip(straight.seen, limited.seen, strict=True))
    assert module.state_dict()["consumed_samples"] == 9


def test_the_global_generator_is_not_moved_by_reading_data(tmp_path: Path) -> None:
    module = datamodule_of(tmp_path, LENGTHS, num_workers=2)
    before = torch.random.get_rng_state()
    next(iter(module.train_dataloader()))
    next(iter(module.val_dataloader()))
    assert torch.equal(before, torch.random.get_rng_state())


def attached(module: CSADataModule, rank: int, world_size: int, global_step: int = 0) -> CSADataModule:
    root = SimpleNamespace(type="cpu")
    module.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=rank, world_size=world_size, global_step=global_step, strategy=SimpleNamespace(root_device=root)
    )
    return module


def test_another_world_size_continues_with_the_next_row(tmp_path: Path) -> None:
    straight = [datamodule_of(tmp_path, LENGTHS).train_rows().batch(i) for i in range(20)]
    saved = attached(datamodule_of(tmp_path, LENGTHS, accumulate=2), 0, 2, global_step=3).state_dict()
    assert saved["consumed_samples"] == 12
    for rank in range(4):
        module = datamodule_of(tmp_path, LENGTHS)
        module.load_state_dict(saved)
        attached(module, rank, 4, global_step=3)
        assert module.consumed_samples == 12
        rows = module.train_rows()
        for i in range(2):
            assert rows.batch(i).tokens.equal(straight[12 + 4 * i + rank].tokens)
        attached(module, rank, 4, global_step=5)
        assert module.consumed_samples == 20


def test_a_step_of_two_ranks_counts_both(tmp_path: Path) -> None:
    module = datamodule_of(tmp_path, LENGTHS, accumulate=2)
    own = [datamodule_of(tmp_path, LENGTHS).train_rows().batch(i).step for i in range(4)]
    for rank in range(2):
        batches = list(zip(range(2), attached(module, rank, 2).train_dataloader(), strict=False))
        assert {str(batch.step) for _, batch in batches} == {str(own[0] + own[1] + own[2] + own[3])}


def test_validation_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """The sums over all ranks are those of one process."""
    module = datamodule_of(tmp_path, LENGTHS, validation_fraction=0.4)
    whole = list(module.val_dataloader())
    assert len(whole) == 3
    shares = [list(attached(module, rank, 2).val_dataloader()) for rank in range(2)]
    assert [len(share) for share in shares] == [2, 2]
    both = [batch for share in shares for batch in share]
    for read in (lambda b: b.step.tokens, lambda b: b.step.query_rows[4], lambda b: b.target_bytes, lambda b: int(b.tokens.sum())):
        assert sum(map(read, both)) == sum(map(read, whole))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed 1 -> 2"),
        ({"sequence_length": 8}, "sequence_length 16 -> 8"),
        ({"tokens_per_batch": 64}, "tokens_per_batch 32 -> 64"),
        ({"validation_fraction": 0.3}, "validation_fraction 0.2 -> 0.3"),
        ({"lengths": LENGTHS[1:]}, "corpus_sha256 "),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    saved = datamodule_of(tmp_path, LENGTHS).state_dict()
    other = datamodule_of(tmp_path, change.pop("lengths", LENGTHS), **change)
    with pytest.raises(ConfigError, match=rf"continues a run on other data: {named}.*init_from="):
        other.load_state_dict(saved)


def test_a_state_may_be_loaded_before_setup(tmp_path: Path) -> None:
    saved = datamodule_of(tmp_path, LENGTHS).state_dict()
    module = datamodule_of(tmp_path, LENGTHS, seed=2)
    fresh = CSADataModule(module.config, ratios=(4,), vocab_size=300, accumulate=1, seed=2, max_steps=1)
    fresh.load_state_dict(saved)
    with pytest.raises(ConfigError, match="seed 1 -> 2"):
        fresh.setup()


def test_workers_and_accumulation_may_change_on_resume(tmp_path: Path) -> None:
    saved = datamodule_of(tmp_path, LENGTHS).state_dict()
    datamodule_of(tmp_path, LENGTHS, num_workers=2, accumulate=3, validation_batches=1, ratios=(4,), max_steps=99).load_state_dict(saved)


def test_the_seed_changes_the_order_and_not_the_validation(tmp_path: Path) -> None:
    one, two = datamodule_of(tmp_path, LENGTHS, seed=1), datamodule_of(tmp_path, LENGTHS, seed=2)
    assert not all(same(one.train_rows().batch(i), two.train_rows().batch(i)) for i in range(5))
    assert all(same(a, b) for a, b in zip(one.validation_rows(), two.validation_rows(), strict=True))
    assert one.corpus == two.corpus


def test_text_needs_no_second_reading_and_gives_a_tokenizer(tmp_path: Path) -> None:
    config = text_config(tmp_path, write_texts(tmp_path / "texts"))
    module = CSADataModule(config, ratios=(0, 4, 4), vocab_size=300, accumulate=2, seed=0, max_steps=10)
    with pytest.raises(RuntimeError, match=r"call setup\(\) first"):
        _ = module.corpus
    module.prepare_data()
    opened = module.corpus
    module.setup("fit")
    assert module.corpus is opened
    assert module.ratios == (4,)
    assert module.tokenizer is not None
    batch = next(iter(module.train_dataloader()))
    assert isinstance(module.tokenizer.decode(batch.tokens.tolist()), str)
    rows = module._stream.rows_of_epoch(0)  # type: ignore[union-attr]
    assert module.planned_epochs == pytest.approx(10 * 2 / rows)


def test_bad_settings_are_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data=text_files needs data.path"):
        CSADataModule(text_config(tmp_path, None), ratios=(4,), vocab_size=300, accumulate=1, seed=1, max_steps=1)
    with pytest.raises(ConfigError, match="accumulate_grad_batches=0"):
        CSADataModule(text_config(tmp_path, tmp_path), ratios=(4,), vocab_size=300, accumulate=0, seed=1, max_steps=1)
    with pytest.raises(ConfigError, match="does not exist"):
        CSADataModule(text_config(tmp_path, tmp_path / "no"), ratios=(4,), vocab_size=300, accumulate=1, seed=1, max_steps=1).setup()
    assert not (tmp_path / "cache").exists()
