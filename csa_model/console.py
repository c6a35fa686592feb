# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: an info block, one line of progress, a table at the end, and errors as one message."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from csa_model.config import ConfigError, TrainerConfig
from csa_model.gradients import NonFiniteGradientError
from kernels import BackendUnsupported

READABLE = (ConfigError, BackendUnsupported, NonFiniteGradientError, HydraException, OmegaConfBaseException)

# Known and harmless here, each for the reason given; anything else stays visible.
HARMLESS_WARNINGS = (
    r".*does not have many workers.*",  # rows are packed from a memory map, faster than any worker starts
    r".*`IterableDataset` has `__len__` defined.*",  # the validation rows know their number on every rank
    r".*You have overridden `transfer_batch_to_device` in both.*",  # both do the same; the module's serves use without the data module
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",  # torch's own, from inside Lightning
    r".*Checkpoint directory .* exists and is not empty.*",  # a run that is continued in place
    r".*The number of training batches \(\d+\) is smaller than the logging interval.*",  # short trial runs
    r".*ModelCheckpoint\(save_last=True, save_top_k=.*",
    r".*The `srun` command is available on your system but is not used.*",  # started by hand on a cluster's login node
)


def quiet() -> None:
    """Silence Lightning's banners and the known harmless warnings."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def message_of(error: BaseException) -> str:
    """One readable message of an error of the kinds that a user can mend."""
    text = str(error)
    if isinstance(error, HydraException) and error.__cause__ is not None and str(error.__cause__) not in text:
        text += "\n" + str(error.__cause__).splitlines()[0]
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(("full_key:", "object_type="))]
    return "\n".join(lines)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM in the middle of a run. The message says how to go on; `status` is the exit status that shells expect, 128 + signal."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def report(error: BaseException) -> None:
    """Print an error once: what a user can mend as one message, anything else with its traceback."""
    if getattr(error, "_reported", False):
        return
    error._reported = True  # type: ignore[attr-defined]
    if isinstance(error, KeyboardInterrupt):
        print(str(error) or "interrupted", file=sys.stderr)
    elif isinstance(error, READABLE):
        print(f"{type(error).__name__}: {message_of(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Leave the program with status 1 (130 for Ctrl-C, 143 for SIGTERM) and one message where an error comes through."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        report(error)
        sys.exit(getattr(error, "status", 130) if isinstance(error, KeyboardInterrupt) else 1)


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A table of two columns on stdout."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, value)
    Console(soft_wrap=False, width=None if sys.stdout.isatty() else 140).print(table)


def number(value: float | None, digits: int = 3) -> str:
    """A figure for a table, n/a where there is none."""
    return "n/a" if value is None or value != value else f"{value:,.{digits}f}"


class StepProgress(L.Callback):
    """A bar over optimizer steps in a terminal; one line per `every` steps elsewhere (a file, a batch job).

    The bar shows the figures of the last step that was logged, a line those that were measured since the line before: most are not measured at every
    step.
    """

    COLUMNS = (
        ("loss", "train/lm_loss", 3),
        ("val", "val/loss", 3),
        ("bits/byte", "val/bits_per_byte", 3),
        ("kl", "indexer/kl", 4),
        ("recall", "indexer/recall_at_k", 2),
    )

    def __init__(self, max_steps: int, every: int) -> None:
        self.max_steps, self.every = max_steps, every
        self._bar: Progress | None = None
        self._task: Any = None
        self._last = -1
        self._text = ""
        self._started = 0.0
        self._printed: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._last, self._started, self._text = trainer.global_step, time.monotonic(), ""
        if trainer.is_global_zero and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}"),
            )
            self._task = self._bar.add_task("training", total=self.max_steps, completed=trainer.global_step, metrics="")
            self._bar.start()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._show(trainer)  # of the step before: its metrics and its validation are there by now

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._show(trainer)
        self._stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _show(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or step == self._last:  # inside an accumulation
            return
        self._last = step
        wanted = step % self.every == 0 or step == self.max_steps  # reading figures off a GPU makes the host wait for it
        if self._bar is not None:
            self._text = _metrics(trainer.callback_metrics) if wanted else self._text
            self._bar.update(self._task, completed=step, metrics=self._text)
        elif wanted:
            figures = dict(trainer.callback_metrics)
            new = {key: value for key, value in figures.items() if self._printed.get(key) is not value}  # Lightning keeps what is not measured anew
            self._printed = figures
            print(f"step {step}/{self.max_steps}  {_metrics(new)}  {time.monotonic() - self._started:.0f} s", flush=True)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _metrics(figures: Mapping[str, Any]) -> str:
    return "  ".join(f"{label} {float(figures[key]):.{digits}f}" for label, key, digits in StepProgress.COLUMNS if key in figures)


def progress(config: TrainerConfig) -> list[L.Callback]:
    """The progress callback, unless trainer.enable_progress_bar=false."""
    return [StepProgress(config.max_steps, config.log_every_n_steps)] if config.enable_progress_bar else []
