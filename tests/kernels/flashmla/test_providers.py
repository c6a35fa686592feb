# SPDX-License-Identifier: Apache-2.0
"""Where the op comes from: order, refusals, and what a refusal advises."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import BackendUnsupported, Geometry
from kernels.flashmla import FlashMLABackend, providers
from kernels.flashmla.providers import ProviderRejected, advice, find_provider, provider_of
from tests.kernels.flashmla.stubs import indexer_api, new_api, old_api, stub_provider, unfused_parts


def installed_flash_mla(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    module = ModuleType("flash_mla")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    module.__version__ = "1.0.0+fake"  # type: ignore[attr-defined]
    for name, value in attributes.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "flash_mla", module)


def installed_sglang(monkeypatch: pytest.MonkeyPatch, folder: Any, libraries: tuple[str, ...] = ("flashmla_ops.abi3.so",)) -> None:
    for name in libraries:
        (folder / name).write_bytes(b"not an extension")
    spec = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == "sgl_kernel" else original(name, *rest))


def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *r: None if name in ("flash_mla", "sgl_kernel") else original(name, *r))


@pytest.mark.parametrize(("api", "takes_sink"), [(new_api, True), (indexer_api, True), (old_api, False)])
def test_an_importable_flash_mla_of_any_generation_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, api: Any, takes_sink: bool) -> None:
    installed_flash_mla(monkeypatch, flash_mla_sparse_fwd=api())
    provider, passed_over = find_provider()
    assert (provider.name, provider.version, passed_over) == ("flash_mla", "1.0.0+fake", [])
    assert provider.takes_sink is takes_sink


def test_a_flash_mla_without_the_sparse_op_is_passed_over_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package on PyPI predates sparse attention."""
    installed_flash_mla(monkeypatch)
    second = stub_provider(new_api())
    provider, passed_over = find_provider((providers.from_flash_mla, lambda: second))
    assert provider is second
    assert len(passed_over) == 1
    assert "flash_mla_sparse_fwd" in passed_over[0]
    backend = FlashMLABackend(provider=lambda: (provider, passed_over), parts=unfused_parts(), capability=(9, 0))
    backend._geometry = Geometry(heads=64, head_dim=512, window=128, topk=256, device_type="cpu")
    assert "passed over: flash_mla 1.0.0+fake: has no flash_mla_sparse_fwd" in backend.describe()["attend"]


def test_no_provider_says_what_was_tried_and_what_to_install_for_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    no_package(monkeypatch)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(BackendUnsupported) as caught:
        find_provider()
    assert "flash_mla: not installed; sglang-kernel: not installed" in caught.value.reason
    assert "sglang-kernel==0.4.3" in caught.value.remedy
    assert "backend=unfused" in caught.value.remedy


def test_advice_for_a_torch_that_no_wheel_is_known_for_names_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    assert "sglang-kernel==0.4.3 with torch 2.11" in advice()
    assert "2.99.1" in advice()


def test_an_extension_for_another_torch_is_refused_with_the_version_that_matches(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A wrong torch is refused when the model is built, never a crash in the first step."""
    installed_sglang(monkeypatch, tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    with pytest.raises(BackendUnsupported) as caught:
        find_provider()
    assert "does not load with torch 2.13.0+cu130" in caught.value.reason
    assert "flashmla_ops.abi3.so: " in caught.value.reason  # the loader's own words
    assert "sglang-kernel==0.4.7" in caught.value.remedy


def test_a_library_without_the_symbol_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    installed_sglang(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    with pytest.raises(ProviderRejected, match="has no sparse_prefill_fwd"):
        providers.from_sglang_kernel()


def test_a_wheel_without_the_extension_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    installed_sglang(monkeypatch, tmp_path, ())
    with pytest.raises(ProviderRejected, match="has no flashmla_ops extension"):
        providers.from_sglang_kernel()


def test_the_op_of_the_wheel_is_called_by_the_names_of_its_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    installed_sglang(monkeypatch, tmp_path)
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    schema = "(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink=None, Tensor? topk_length=None) -> Tensor[]"
    library.define("sparse_prefill_fwd" + schema)
    library.impl("sparse_prefill_fwd", lambda *a, **k: list(new_api(base=2.0)(*a, **k)), "CPU")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    try:
        provider = providers.from_sglang_kernel()
        assert provider.names == ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length")
        out, lse = provider(torch.zeros(2, 64, 512), torch.ones(3, 512), torch.zeros(2, 128, dtype=torch.int32), 1.0, None)
        assert out.shape == (2, 64, 512)
        assert torch.allclose(lse, torch.tensor(7.0))
    finally:
        library._destroy()


def test_arguments_that_are_not_known_are_refused_by_name() -> None:
    def another(q, kv, indices, sm_scale, d_v=512, attn_sink=None, causal_mode="auto"):
        raise AssertionError("not called")

    with pytest.raises(ProviderRejected, match="unknown argument causal_mode"):
        provider_of("flash_mla", "9", another)

    def renamed(q, kv, topk_ids, sm_scale):
        raise AssertionError("not called")

    with pytest.raises(ProviderRejected, match="lacks the argument indices"):
        provider_of("flash_mla", "9", renamed)
    with pytest.raises(ProviderRejected, match="hides its arguments"):
        provider_of("flash_mla", "9", lambda *args, **kwargs: None)


def test_results_of_another_form_are_refused() -> None:
    q, keys, ids = torch.zeros(2, 64, 512), torch.zeros(3, 512), torch.zeros(2, 128, dtype=torch.int32)

    def two(q, kv, indices, sm_scale):
        return q, q[..., 0]

    def transposed(q, kv, indices, sm_scale):
        return q, q[..., 0], q[..., 0].T

    with pytest.raises(ProviderRejected, match="2 values"):
        provider_of("flash_mla", "9", two)(q, keys, ids, 1.0, None)
    with pytest.raises(ProviderRejected, match=r"lse \[64, 2\]"):
        provider_of("flash_mla", "9", transposed)(q, keys, ids, 1.0, None)
