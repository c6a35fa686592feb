# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments checked before Hydra composes, so that a typo is answered with the legal names, and runs named by their overrides."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf

from csa_model.config import ConfigError, ExperimentConfig

FREE_SECTIONS = ("hydra",)  # Hydra's own settings are checked by Hydra
MAY_BE_DELETED = ("logger", "callbacks", "tokenizer", "experiment", "debug")  # what is left without them is less of the same run, not another one
NEVER_INHERITED = ("run_dir", "ckpt_path", "init_from")  # arguments of one call, not of the run


def check_arguments(arguments: Sequence[str], config_dir: Path) -> list[Override]:
    """Parse the key=value arguments and check every key and every choice of a group against `config_dir` and the typed configuration.

    Returns the parsed overrides, Hydra's flags left out. Raises ConfigError for a key written with dashes, an unknown key or group, or an
    option that a group does not have. Values are checked later, once the whole config is composed.
    """
    for argument in arguments:
        match = re.match(r"^--?([\w./@+-]+)=(.*)$", argument)
        if match and not match[1].startswith(("config-", "package", "info")):
            raise ConfigError(f"{argument}: options are key=value without dashes; write {match[1]}={match[2]}")
    overrides = parse(arguments)
    if any(a in ("--config-dir", "-cd", "--config-path", "-cp") or a.startswith(("--config-dir=", "--config-path=")) for a in arguments):
        return overrides  # another config tree may add groups, options and keys: Hydra judges them
    for override in overrides:
        if override.key_or_group.split(".")[0].split("/")[0] not in FREE_SECTIONS:
            _check_override(override, config_dir)
    return overrides


def flags_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with Hydra's flags in front: its parser takes key=value arguments in one stretch only, so `seed=1 -m lr=1,2` would be refused.

    Raises ConfigError for a bare word that belongs to no flag.
    """
    flags: list[str] = []
    others: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith("-"):
            flags.append(argument)
        elif "=" in argument or argument.startswith("~"):
            others.append(argument)
        elif before.startswith("-"):
            flags.append(argument)  # the value of a flag such as --cfg job
        else:
            raise ConfigError(f"cannot read the argument {argument!r}; write key=value")
    return [*flags, *others]


def parse(arguments: Iterable[str]) -> list[Override]:
    """The overrides among `arguments`; ConfigError with the argument where one cannot be read."""
    found = []
    parser = OverridesParser.create()
    for argument in arguments:
        if argument.startswith("-") or not re.match(r"^[~+]*[\w./@$-]+(=|$)", argument):
            if "=" in argument and not argument.startswith("-"):
                raise ConfigError(f"cannot read the argument {argument!r}; write key=value")
            continue
        if "=" not in argument and not argument.startswith("~"):
            continue  # the value of a flag such as --cfg job
        try:
            found.append(parser.parse_override(argument))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"cannot read the argument {argument!r}: {reason}. Quote values with '=' or other marks: key=\"'value'\"") from None
    return found


def _check_override(override: Override, config_dir: Path) -> None:
    key = override.key_or_group
    group = config_dir / key
    if group.is_dir() and key != "":
        options = sorted(f.stem for f in group.glob("*.yaml"))
        if override.is_delete() and key not in MAY_BE_DELETED:
            choices = ", ".join(options)
            raise ConfigError(f"{override.input_line} would leave {key} to a default that nobody chose; write {key}=CHOICE, one of {choices}")
        for choice in _choices(override):
            if choice not in options and not (choice == "null" and key in ("tokenizer", "experiment", "debug")):
                raise ConfigError(f"{key}={choice} is not legal{_hint(choice, options)}; legal values: {', '.join(options)}")
        return
    current: typing.Any = ExperimentConfig
    walked: list[str] = []
    for name in key.split("."):
        if not dataclasses.is_dataclass(current):
            raise ConfigError(f"unknown key '{key}' in {override.input_line}: {'.'.join(walked)} is a value, not a section")
        legal = [f.name for f in dataclasses.fields(current)]
        if not walked:
            legal += ["tokenizer", "experiment", "debug"]
        if name not in legal:
            where = ".".join(walked) or "the config"
            raise ConfigError(f"unknown key '{key}' in {override.input_line}{_hint(name, legal)}; legal keys of {where}: {', '.join(legal)}")
        current = typing.get_type_hints(current).get(name)
        walked.append(name)


@contextlib.contextmanager
def naming_owners_of_missing_keys(config_dir: Path) -> Iterator[None]:
    """Where Hydra refuses a key because the chosen options do not have it, a ConfigError names the options that do."""
    try:
        yield
    except ConfigCompositionException as error:
        found = re.search(r"Could not override '([\w.]+)'", str(error))
        owners = _owners(found[1], config_dir) if found else []
        if found is None or not owners:
            raise
        text = f"{found[1]} is no setting of the options chosen here; it belongs to {' or '.join(owners)}. Choose that too, or leave it out"
        raise ConfigError(text) from None


def _owners(key: str, config_dir: Path) -> list[str]:
    section, *rest = key.split(".")
    own = [f"{section}={f.stem}" for f in sorted((config_dir / section).glob("*.yaml")) if _has_key(OmegaConf.load(f), rest)]
    presets = sorted((config_dir / "experiment").glob("*.yaml"))
    return own + [f"experiment={f.stem}" for f in presets if _has_key(OmegaConf.load(f), [section, *rest])]


def _has_key(config: typing.Any, path: Sequence[str]) -> bool:
    for name in path:
        if not OmegaConf.is_dict(config) or name not in config:
            return False
        config = config[name]
    return bool(path)


def _choices(override: Override) -> list[str]:
    if override.is_sweep_override() and override.is_discrete_sweep():
        return [str(choice).strip("'\"") for choice in override.sweep_string_iterator()]
    if override.is_delete():
        return []
    return [override.get_value_element_as_str().strip("'\"")]


def _hint(name: str, legal: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, legal, n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def inherited(of_run: Sequence[str], of_call: Sequence[Override]) -> list[str]:
    """The overrides that a run was started with, as far as this call does not give the same key anew."""
    given = {o.key_or_group for o in of_call} | set(NEVER_INHERITED)
    return [o.input_line for o in parse(of_run) if o.key_or_group not in given and o.input_line is not None]


def job_name(number: int | str, overrides: Sequence[str], swept: Sequence[str]) -> str:
    """A folder name for one job of a multirun: its number and the values of the swept keys, for example `0_teacher-full_csa_seed-1`."""
    parts = [f"{o.key_or_group}-{o.get_value_element_as_str()}" for o in parse(overrides) if o.key_or_group in swept]
    name = "_".join([str(number), *parts])
    return re.sub(r"[^\w.+-]+", "-", name)[:120].rstrip("-.")


def register_job_names(swept: Sequence[str]) -> None:
    """Let configs/train.yaml name the folder of a job with ${csa_job_name:NUMBER,OVERRIDES}."""
    OmegaConf.register_new_resolver("csa_job_name", lambda number, overrides: job_name(number, list(overrides), swept), replace=True)
