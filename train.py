# SPDX-License-Identifier: Apache-2.0
"""Train one decoder, or one per job of a multirun. `python train.py --help` explains every option."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import csa_model  # noqa: F401  # before torch: it sets how OpenMP threads wait

# isort: split
import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from csa_model import config_checks, console, launch, overrides, report, resume, run_dir, staged
from csa_model.callbacks import build_callbacks
from csa_model.config import ConfigError, ExperimentConfig, from_mapping
from csa_model.data.datamodule import CSADataModule
from csa_model.lit_module import CSALitModule, load_initial_weights

CONFIGS = Path(__file__).resolve().parent / "configs"


def train(config: ExperimentConfig, arguments: list[str], job_folder: Path | None = None) -> dict[str, object]:
    """Build and check everything, then make the run folder and train. Returns what summary.json holds."""
    if config.staged.enabled:
        return staged.run(config, arguments, train, job_folder)
    warned = config_checks.check(config)
    config_checks.check_devices(config)
    launch.check_logger(config.logger)
    checkpoint, resume_step, changed = resume.prepare(config)
    launch.refuse_folder(config, checkpoint)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    L.seed_everything(config.seed, workers=True, verbose=False)
    module = CSALitModule(config)
    if config.init_from is not None:
        load_initial_weights(module.decoder, resume.resolve(config.init_from, None, key="init_from"))
    changed += resume.backend_change(checkpoint, module.decoder.backend.name)
    initial_weights = report.weights_sha256(module.decoder)
    data = CSADataModule(config.data, **launch.data_arguments(config))
    data.prepare_data()
    data.setup("fit")
    resume.check_order(checkpoint, data)

    run = launch.open_run_on_every_rank(config, checkpoint, job_folder)
    callbacks = [*build_callbacks(config, run), *console.progress(config.trainer)]
    trainer = launch.build_trainer(config, run, callbacks, launch.build_loggers(config, run, resume_step))
    summary = report.Summary(config, run, data, initial_weights, module.decoder.backend.name, resume_step, changed)
    if trainer.is_global_zero:
        run.record(config, arguments, report.corpus_facts(data), module.decoder.backend.describe())
        report.print_start(config, run, module, data, trainer.world_size, [*warned, *(f"changed on resume: {line}" for line in changed)])
    with summary.marked_failed_on_error(trainer):
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        if trainer.global_step % config.trainer.val_every_steps and not trainer.should_stop:  # the last validation did not see the final weights
            trainer.validate(module, datamodule=data, verbose=False)
    return summary.finish(trainer)


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def job(composed: DictConfig) -> None:
    """One composed config. A failing job of a multirun is reported at once; the exit status follows when all jobs are done."""
    hydra_config = HydraConfig.get()
    job_folder = Path(hydra_config.runtime.output_dir) if hydra_config.mode == RunMode.MULTIRUN else None
    arguments = list(hydra_config.overrides.task)
    with launch.isolated_job(arguments):
        try:
            config = from_mapping(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
            if job_folder is not None and config.run_dir is not None:
                raise ConfigError("run_dir names one folder, but a multirun needs one per job; name the folder above them with hydra.sweep.dir=PATH")
            train(config, arguments, job_folder)
        except Exception as error:
            console.report(error)
            if job_folder is None:
                sys.exit(1)
            run_dir.remove_empty(job_folder)
            raise


def main(arguments: list[str]) -> None:
    """The command line. Leaves with a non-zero status and one readable message for what a user can mend."""
    console.quiet()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing, and `exit_on_error` words the message
    with console.exit_on_error():
        given = overrides.check_arguments(arguments, CONFIGS)
        sys.argv[1:] = overrides.flags_first([*resume.overrides_of_run(given), *arguments])
        overrides.register_job_names([o.key_or_group for o in given if o.is_sweep_override()])
        with run_dir.naming_the_sweep_folder(), overrides.naming_owners_of_missing_keys(CONFIGS):
            job()


if __name__ == "__main__":
    main(sys.argv[1:])
