# SPDX-License-Identifier: Apache-2.0
"""backend.backward=cudnn on fakes of four versions, with a negative control for every argument whose default we must not rely on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import ALL_VISIBLE, BackendUnsupported, Geometry, get_backend
from kernels.flashmla import FlashMLABackend, cudnn_backward
from kernels.flashmla.cudnn_backward import CudnnBackward, compact_ids, find_cudnn_backward
from kernels.flashmla.parts import with_backward
from tests.kernels.flashmla.cudnn_fakes import VERSIONS, v1_25, v1_32, without
from tests.kernels.flashmla.stubs import new_api, stub_provider, unfused_parts
from tests.kernels.flashmla.test_composition import disturbed, layer, step

CPU = torch.device("cpu")
PROVIDER = stub_provider(new_api(), (torch.float32,))


def backward(version: str) -> CudnnBackward:
    return CudnnBackward(VERSIONS[version], version)


def flashmla(version: str) -> FlashMLABackend:
    own = backward(version)
    return FlashMLABackend("cudnn", provider=PROVIDER, parts=with_backward(unfused_parts(), own, own.description), capability=(9, 0))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_known_version_is_understood(version: str) -> None:
    backward(version).probe(64, CPU, torch.float32)


CONTROLS = [
    *((version, "softmax_scale") for version in VERSIONS),  # the default follows the padded head dim
    *((version, "topk_length") for version in ("1.25", "1.26", "1.29")),  # 1.32 masks by itself
    *(("sibling", name) for name in ("deterministic", "block_tile", "q_cluster_mode", "topk_indices_global", "q_causal_offsets")),
]


@pytest.mark.parametrize(("version", "argument"), CONTROLS, ids=["-".join(c) for c in CONTROLS])
def test_with_an_argument_left_out_the_probe_stops(version: str, argument: str) -> None:
    """Negative controls: each default that moved, or could, must be passed; left out, nothing is trained."""
    with pytest.raises(BackendUnsupported, match=rf"cuDNN frontend {version}"):
        CudnnBackward(without(VERSIONS[version], argument), version).probe(64, CPU, torch.float32)


def test_ids_are_compacted_and_never_empty() -> None:
    """A length of 0 hangs the kernel, so a row without ids reads key 0 with probability 0."""
    ids = torch.tensor([[-1, 4, -1, 2], [-1, -1, -1, -1], [5, 6, 7, 8]], dtype=torch.int32)
    compact, length = compact_ids(ids)
    assert compact.tolist() == [[4, 2, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8]]
    assert length.tolist() == [2, 1, 4]
    assert compact.dtype == length.dtype == torch.int32


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ids", ["disturbed", "all visible", "window only"])
def test_a_training_step_equals_unfused(version: str, ids: str) -> None:
    """Gradients of q, both kinds of keys, sink and indexer; empty rows, padding, a zero-length document."""
    case = layer(dtype=torch.float32)
    case.sink[:2] = torch.tensor([torch.inf, -torch.inf])
    selected: Any = {"disturbed": disturbed(case), "all visible": ALL_VISIBLE, "window only": None}[ids]
    got = step(flashmla(version), case, selected, entries=selected is not None)
    wanted = step(get_backend("unfused"), case, selected, entries=selected is not None)
    assert got.keys() == wanted.keys()
    for name in got:
        torch.testing.assert_close(got[name], wanted[name], rtol=2e-5, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    if ids == "disturbed":
        assert got["d4"].abs().sum() > 0  # the indexer learns from the pair


def test_launches_over_parts_of_the_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    case = layer(dtype=torch.float32)
    selected = disturbed(case)
    whole = step(flashmla("1.25"), case, selected)
    monkeypatch.setattr("kernels.flashmla.adapt.MOST_IDS", 64)
    pieces = step(flashmla("1.25"), case, selected)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_a_scale_kept_from_the_first_call_is_found() -> None:
    """The probe runs one shape at two scales."""
    kept: list[float] = []

    def stale(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None):
        kept.append(softmax_scale)
        return v1_32(q, kv, out, dout, lse, attn_sink, topk_idxs, kept[0], topk_length)

    with pytest.raises(BackendUnsupported, match=r"relative errors dq .* at scale 0\.0164"):
        CudnnBackward(stale, "9").probe(64, CPU, torch.float32)


def test_unknown_and_missing_arguments_are_refused_by_name() -> None:
    def newer(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, lse_base="e"):
        raise AssertionError("not called")

    with pytest.raises(BackendUnsupported, match=r"unknown argument lse_base.*1\.25, 1\.26, 1\.29 and 1\.32"):
        CudnnBackward(newer, "1.99")

    def older(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None):
        raise AssertionError("not called")

    with pytest.raises(BackendUnsupported, match="lacks topk_length"):
        CudnnBackward(older, "1.20")


def test_results_without_names_are_refused() -> None:
    def unnamed(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None):
        return q, kv, attn_sink

    with pytest.raises(BackendUnsupported, match="does not return dq, dkv and d_sink by name"):
        CudnnBackward(unnamed, "1.99").probe(64, CPU, torch.float32)


def test_the_wrapper_is_found_or_its_absence_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_backward.importlib.metadata, "version", lambda name: "1.25.0")
    module = SimpleNamespace(DSA=SimpleNamespace(sparse_attention_backward_wrapper=v1_25))
    assert find_cudnn_backward(lambda name: module).description == "cuDNN frontend 1.25.0, sparse attention backward for SM90, not deterministic"

    def absent(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'cudnn'")

    with pytest.raises(BackendUnsupported, match=r"does not import .*No module named 'cudnn'.*backend\.backward=triton"):
        find_cudnn_backward(absent)


GEOMETRY = Geometry(heads=8, head_dim=64, window=16, ratios=(4,), topk=8, dtype=torch.float32, device_type="cpu", teacher="full_csa")


def test_require_probes_the_backward_and_describe_names_it() -> None:
    backend = flashmla("1.32")
    backend.require(GEOMETRY)
    told = backend.describe()
    assert "cuDNN frontend 1.32" in told["attend backward"]
    assert told["attend_with_indexer_loss"].startswith("the pair")
    own = CudnnBackward(without(v1_25, "topk_length"), "1.25")
    broken = FlashMLABackend("cudnn", provider=PROVIDER, parts=with_backward(unfused_parts(), own, own.description), capability=(9, 0))
    with pytest.raises(BackendUnsupported, match="probe"):
        broken.require(GEOMETRY)


def test_other_architectures_and_determinism_are_refused(deterministic: None) -> None:
    with pytest.raises(BackendUnsupported, match="no deterministic mode"):
        flashmla("1.32").require(GEOMETRY)
    case = layer(dtype=torch.float32)
    with pytest.raises(BackendUnsupported, match="no deterministic mode"):
        step(flashmla("1.32"), case, ALL_VISIBLE)
    torch.use_deterministic_algorithms(False)
    own = backward("1.32")
    blackwell = FlashMLABackend("cudnn", provider=PROVIDER, parts=with_backward(unfused_parts(), own, own.description), capability=(10, 0))
    with pytest.raises(BackendUnsupported, match="built for SM90, this device is SM100"):
        blackwell.require(GEOMETRY)
