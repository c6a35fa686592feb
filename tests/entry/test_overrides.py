# SPDX-License-Identifier: Apache-2.0
"""The command line is checked before Hydra composes: a typo is answered with the legal names."""

from __future__ import annotations

import pytest

from csa_model.config import ConfigError
from csa_model.overrides import check_arguments, flags_first, inherited, job_name, parse
from tests.entry.helpers import CONFIGS


@pytest.mark.parametrize(
    ("argument", "fragments"),
    [
        ("teecher=full_csa", ["'teecher'", "did you mean 'teacher'", "legal keys", "backend"]),
        ("teacher=full-csa", ["teacher=full-csa", "did you mean 'full_csa'", "compressed_only, full_csa, none"]),
        ("backend=flash_mla", ["backend=flash_mla", "did you mean 'flashmla'", "triton, unfused"]),
        ("backend=tilelang", ["backend=tilelang", "flashmla, triton, unfused"]),
        ("teacher=full_csa,fullcsa", ["teacher=fullcsa"]),
        ("+teacher=ful_csa", ["teacher=ful_csa"]),
        ("trainer.max_stesp=5", ["'trainer.max_stesp'", "did you mean 'max_steps'", "legal keys of trainer"]),
        ("+trainer.max_stesp=5", ["'trainer.max_stesp'"]),
        ("++model.moe.experts=5", ["'model.moe.experts'", "legal keys of model.moe", "n_routed_experts"]),
        ("seed.more=5", ["'seed.more'", "seed is a value"]),
        ("trainer.max_steps=[", ["cannot read", "trainer.max_steps=["]),
        ("run_dir=a=b", ["cannot read", "Quote"]),
        ("~teachr", ["'teachr'"]),
        ("~teacher", ["~teacher", "write teacher=CHOICE", "compressed_only, full_csa, none"]),
    ],
)
def test_typos_are_answered_with_the_legal_names(argument: str, fragments: list[str]) -> None:
    """A backend that does not exist is among them: it is no silent switch to another."""
    with pytest.raises(ConfigError) as error:
        check_arguments([argument], CONFIGS)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize("argument", ["--teacher=full_csa", "-teacher=full_csa", "--trainer.max_steps=5"])
def test_dashes_are_answered_with_the_form_that_works(argument: str) -> None:
    """Sweep agents add dashes."""
    with pytest.raises(ConfigError, match=f"write {argument.lstrip('-')}"):
        check_arguments([argument], CONFIGS)


def test_everything_that_hydra_understands_passes() -> None:
    arguments = ["-m", "teacher=full_csa,none", "seed=range(1,3)", "hydra.sweep.dir=x", "--cfg", "job", "~logger", "++trainer.max_steps=3"]
    arguments += ["model.compress_ratios=[0,4,0]", "experiment=plain", "debug=null", "model.index_topk=null", "run_dir='a=b'", "--config-name=train"]
    found = check_arguments(arguments, CONFIGS)
    assert [o.key_or_group for o in found if o.is_sweep_override()] == ["teacher", "seed"]


def test_flags_may_stand_anywhere() -> None:
    arguments = ["seed=1", "-m", "teacher=full_csa,none", "--cfg", "job", "~logger", "--config-dir=conf", "+task=a"]
    assert flags_first(arguments) == ["-m", "--cfg", "job", "--config-dir=conf", "seed=1", "teacher=full_csa,none", "~logger", "+task=a"]


@pytest.mark.parametrize("arguments", [["overfit"], ["seed=1", "overfit"]])
def test_a_bare_word_is_no_argument(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="cannot read the argument 'overfit'; write key=value"):
        flags_first(arguments)


def test_a_foreign_config_folder_is_left_to_hydra() -> None:
    assert check_arguments(["--config-dir", "mine", "teacher=mine", "own.key=1"], CONFIGS)


def test_a_resumed_run_inherits_what_this_call_does_not_give() -> None:
    of_run = ["teacher=none", "trainer.max_steps=4", "run_dir=old", "model.index_topk=4"]
    assert inherited(of_run, parse(["trainer.max_steps=8", "run_dir=old", "ckpt_path=last"])) == ["teacher=none", "model.index_topk=4"]


def test_job_names_hold_the_swept_values_and_are_safe_as_folders() -> None:
    overrides = ["teacher=full_csa", "data.path=/a/b c", "seed=1", "trainer.max_steps=3"]
    assert job_name(0, overrides, ["teacher", "seed"]) == "0_teacher-full_csa_seed-1"
    assert job_name(3, overrides, []) == "3"
    assert "/" not in job_name(1, overrides, ["data.path"])
    assert len(job_name(1, ["task=" + "x" * 400], ["task"])) <= 120
