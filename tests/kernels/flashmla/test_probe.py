# SPDX-License-Identifier: Apache-2.0
"""What the probe understands, converts, and refuses with the numbers seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels import BackendUnsupported
from kernels.flashmla.probe import Convention, probe
from kernels.flashmla.rules import SM90
from tests.kernels.flashmla.stubs import indexer_api, new_api, old_api, sparse_prefill, stub_provider

FAST = (torch.float32,)
CPU = torch.device("cpu")


def ask(function: Any, heads: int = 64) -> Convention:
    return probe(stub_provider(function, FAST), SM90, heads, CPU)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (new_api(), Convention(1.0, True, math.inf)),
        (new_api(base=2.0), Convention(math.log(2), True, math.inf)),
        (new_api(empty=-math.inf), Convention(1.0, True, -math.inf)),
        (new_api(sink_in_lse=True), Convention(1.0, False, math.inf)),
        (old_api(), Convention(math.log(2), False, math.inf)),
        (indexer_api(), Convention(1.0, True, math.inf)),
    ],
    ids=["natural", "base-2", "empty-negative", "sink-in-lse", "old", "partial-lse"],
)
def test_known_conventions_are_told_apart(function: Any, wanted: Convention) -> None:
    """An lse in base 2 is converted, whatever its version says."""
    assert ask(function) == wanted


def test_128_heads_and_bfloat16_are_understood() -> None:
    assert probe(stub_provider(new_api(), (torch.bfloat16,)), SM90, 128, CPU) == Convention(1.0, True, math.inf)


def broken(**how: Any) -> Any:
    """A stub that does one thing otherwise: a function of (out, lse, arguments)."""

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        sink = how["sink"](attn_sink) if "sink" in how and attn_sink is not None else attn_sink
        out, top, lse = sparse_prefill(q, kv, indices, how.get("scale", sm_scale), sink, **how.get("convention", {}))
        return how.get("out", lambda o: o)(out), top, how.get("lse", lambda x: x)(lse)

    return flash_mla_sparse_fwd


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (broken(lse=lambda x: x / math.log(10)), r"2\.1072 to 2\.1072; known are 4\.8520 .*7\.0000"),
        (broken(lse=lambda x: x.bfloat16()), r"4\.8438 to 4\.8438"),
        (broken(out=lambda o: 2 * o), "mean of the values"),
        (new_api(masks=False), "not masked"),
        (new_api(leaks=True), "not masked|not finite|instead of 0|mean"),
        (new_api(empty=0.0), r"gives lse \[0, 0, 0, \.\.\.\]; known are \+inf and -inf"),
        (broken(sink=lambda s: s * math.log(2)), "does not halve the mean"),
        (broken(sink=lambda s: s.flip(0)), "does not halve the mean"),
        (broken(sink=lambda s: s.clamp(-50, 3)), r"does not halve|sinks of \+inf"),
        (broken(sink=lambda s: s.nan_to_num(0, 0, 0)), r"sinks of \+inf and -inf"),
        (broken(scale=512**-0.5), "random queries are off float64"),
    ],
    ids=[
        "base-10",
        "bfloat16-lse",
        "doubled",
        "unmasked",
        "nan-leaks",
        "empty-0",
        "sink-base-2",
        "sink-order",
        "sink-clamped",
        "sink-infinite",
        "own-scale",
    ],
)
def test_an_unknown_answer_stops_with_the_numbers_seen(function: Any, seen: str) -> None:
    """Ids unchecked on one side, and a sink read as something else, are refused before anything is trained."""
    with pytest.raises(BackendUnsupported, match=seen) as caught:
        ask(function)
    assert "stub 1.0" in str(caught.value)
    assert "backend=triton" in caught.value.remedy


def test_a_call_that_fails_is_refused_with_its_words() -> None:
    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        raise RuntimeError("no kernel image is available\nlong trace")

    with pytest.raises(BackendUnsupported, match="64 heads and 128 ids failed: no kernel image is available"):
        ask(flash_mla_sparse_fwd)
