# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's adaptation on rows whose documents the device alone knows: the same results, in shapes that the documents cannot change, and nothing
read back by the host. As a program, with TRITON_INTERPRET=1: the same with the Triton kernels around a stub of FlashMLA.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels import ALL_VISIBLE, Backend, Geometry, PackedLayout, StaticLayout
from kernels.flashmla import FlashMLABackend, adapt
from kernels.flashmla.cudnn_backward import CudnnBackward
from kernels.flashmla.parts import Parts
from kernels.flashmla.rules import SM90
from kernels.unfused import UnfusedBackend
from tests.kernels.cases import Case, make_case
from tests.kernels.flashmla.cudnn_fakes import VERSIONS
from tests.kernels.flashmla.stubs import new_api, old_api, stub_provider, unfused_backward

ROOT = Path(__file__).parents[3]
LENGTHS = (5, 3, 0, 12)
ROWS = [LENGTHS, (17,), (3, 3, 1), (1,) * 12, ()]
LEAVES = ("q", "window_kv", "compressed_kv", "sink", "index_q", "index_k", "index_w")
ENTRIES = ("compressed_kv", "index_k")
GARBAGE = 1e6
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "repeat_interleave.Tensor", "bincount")


class NoHostReads(TorchDispatchMode):
    """An operation by which the host would wait for a value of the device is an error."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        mask = name == "index.Tensor" and any(i is not None and i.dtype == torch.bool for i in arguments[1])
        if mask or name.startswith(HOST_READS):
            raise AssertionError(f"the host reads a tensor: {function}")
        return function(*arguments, **(named or {}))

    def __enter__(self) -> NoHostReads:
        super().__enter__()
        torch.Tensor.tolist = _watched_tolist  # type: ignore[assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        del torch.Tensor.tolist
        super().__exit__(*error)


def _watched_tolist(tensor: Tensor) -> Any:
    """On the CPU the one read that no operation stands for."""
    if torch._C._len_torch_dispatch_stack():
        raise AssertionError("the host reads a tensor: tolist")
    return torch._C.TensorBase.tolist(tensor)


def on_the_device(function: Any) -> Any:
    """What stands for a kernel may look at the values."""

    def run(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **named)

    return run


def exact_of(layout: PackedLayout) -> PackedLayout:
    return PackedLayout(layout.cu_seqlens, layout.num_tokens).query_slice(layout.first_row, layout.first_row + layout.num_rows)


class Reference(UnfusedBackend):
    """Selection and loss for a StaticLayout: of the documents read back from it, without the entries of nobody."""

    @staticmethod
    def _exact(arguments: tuple[Any, ...], entries: tuple[int, ...]) -> list[Any]:
        at = next(i for i, a in enumerate(arguments) if isinstance(a, PackedLayout))
        layout, ratio = exact_of(arguments[at]), arguments[at + 1]
        return [layout if i == at else a[: layout.num_compressed(ratio)] if i in entries else a for i, a in enumerate(arguments)]

    @on_the_device
    def select(self, *arguments: Any) -> Any:  # type: ignore[override]
        return super().select(*self._exact(arguments, (1,)))

    @on_the_device
    def indexer_loss(self, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        return super().indexer_loss(*self._exact(arguments, (1, 6)), **named)


@on_the_device
def reference_backward(grad_out: Tensor, q: Tensor, window_kv: Tensor, compressed_kv: Any, selected: Any, *rest: Any) -> Any:
    """The unfused backward on the exact layout; the gradient of entries of nobody is 0."""
    sink, out, lse, layout, ratio, window, scale = rest
    exact = exact_of(layout)
    entries = None if compressed_kv is None else compressed_kv[: exact.num_compressed(ratio)]
    dq, d_window, d_entries, d_sink = unfused_backward(grad_out, q, window_kv, entries, selected, sink, out, lse, exact, ratio, window, scale)
    if compressed_kv is None or d_entries is None:
        return dq, d_window, None, d_sink
    return dq, d_window, torch.cat([d_entries, torch.zeros_like(compressed_kv[len(d_entries) :])]), d_sink


@on_the_device
def reference_teaching(grad_out, grad_kl, index, scores, q, window_kv, compressed_kv, selected, sink, out, lse, kl_value, *shape):
    attention = reference_backward(grad_out, q, window_kv, compressed_kv, selected, sink, out, lse, *shape)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in index]
        kl, _ = Reference().indexer_loss(*leaves, selected, q, window_kv, compressed_kv, sink, lse, *shape)
        gradients = torch.autograd.grad(kl, leaves, grad_kl.to(kl.dtype))
    kl_value.copy_(kl.detach())
    return *gradients, *attention


def flashmla(backward: str, api: Any = new_api, shapes: list[Any] | None = None) -> FlashMLABackend:
    """With the backward that emits the teacher, one that does not, or cuDNN's of a version; `shapes` collects those of every launch."""
    function = api()

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        if shapes is not None:
            shapes.append((tuple(q.shape), tuple(kv.shape), tuple(indices.shape)))
        with _disable_current_modes():
            return function(q, kv, indices, sm_scale, d_v, **({} if api is old_api else {"attn_sink": attn_sink}))

    if api is old_api:
        provider = stub_provider(lambda q, kv, indices, sm_scale, d_v: flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v))
    else:
        provider = stub_provider(flash_mla_sparse_fwd)
    if backward in VERSIONS:
        own = CudnnBackward(VERSIONS[backward], backward)
        own.function = on_the_device(own.function)
        parts = Parts(Reference(), own, own.description)
    else:
        parts = Parts(Reference(), reference_backward, backward, reference_teaching if backward == "emits" else None)
    return FlashMLABackend("cudnn" if backward in VERSIONS else "triton", provider=provider, parts=parts, capability=(9, 0))


def pair(lengths: tuple[int, ...] = LENGTHS, ratio: int = 4, tokens: int = 24, **options: Any) -> tuple[Case, Case]:
    """The same numbers on the exact layout, and on a StaticLayout with T // ratio entries whose last ones belong to nobody."""
    exact = make_case(lengths, padding=tokens - sum(lengths), ratio=ratio, **options)
    exact.sink = exact.sink.float()
    layout = StaticLayout(tokens, 14, tokens)
    layout.load(PackedLayout.from_lengths((1, tokens - 1)))
    layout.entry_start(ratio), layout.visible_compressed(ratio), layout.window_start(exact.window)
    layout.load(exact.layout)
    longer = {name: getattr(exact, name) for name in ENTRIES}
    for name, entries in longer.items():
        longer[name] = torch.cat([entries, torch.full((tokens // ratio - entries.shape[0], entries.shape[1]), GARBAGE, dtype=entries.dtype)])
    return exact, dataclasses.replace(exact, layout=layout, **longer)


def ids_for(case: Case, topk: int = 6) -> Tensor:
    """Ids in any order, also of other documents, of the future and of entries that belong to nobody."""
    generator = torch.Generator().manual_seed(3)
    pool = max(case.layout.num_tokens // case.ratio + 2, topk)
    return torch.stack([torch.randperm(pool, generator=generator)[:topk] - 1 for _ in range(case.layout.num_rows)]).int()


def step(backend: Backend, case: Case, selected: Any, teacher: str = "full_csa") -> dict[str, Tensor]:
    leaves = {name: getattr(case, name).detach().clone().requires_grad_() for name in LEAVES}
    attention, index = [leaves[name] for name in LEAVES[:4]], [leaves[name] for name in LEAVES[4:]]
    if selected is None:
        out, lse = backend.attend(attention[0], attention[1], None, None, attention[3], *case.tail)
        kl, result = out.new_zeros(()), {}
    else:
        out, lse, kl, stats = backend.attend_with_indexer_loss(*index, selected, *attention, *case.tail, teacher=teacher)
        result = {"rows": stats.rows}
    ((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum() + 0.7 * kl).backward()
    if selected is not None:
        result["kl"] = stats.kl_sum
    return result | {"out": out.detach(), "lse": lse} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def assert_same(exact: dict[str, Tensor], static: dict[str, Tensor], tolerance: float) -> None:
    assert exact.keys() == static.keys()
    for name, wanted in exact.items():
        got = static[name]
        if name in ENTRIES:
            assert (got[len(wanted) :] == 0).all(), f"{name} of nobody"
            got = got[: len(wanted)]
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@contextmanager
def watched(backend: FlashMLABackend, case: Case) -> Iterator[None]:
    """After the probe, which reads its answers when the model is built."""
    backend._convention(SM90, SM90.padded_heads(case.q.shape[1]), torch.device("cpu"))
    with NoHostReads():
        yield


@pytest.mark.parametrize("backward", ["emits", "emits nothing", *VERSIONS])
@pytest.mark.parametrize("reads", ["ids", "all visible", "window only"])
@pytest.mark.parametrize("lengths", [LENGTHS, (3, 3, 1)], ids=["packed", "no entry"])
def test_a_training_step_is_the_same_and_the_host_reads_nothing(lengths: tuple[int, ...], reads: str, backward: str) -> None:
    dtype, tolerance = (torch.float32, 2e-5) if backward in VERSIONS else (torch.float64, 1e-11)
    exact, static = pair(lengths, dtype=dtype)
    selected = {"ids": ids_for(exact), "all visible": ALL_VISIBLE, "window only": None}[reads]
    backend = flashmla(backward)
    results = [step(backend, exact, selected)]
    with watched(backend, static):
        results.append(step(backend, static, selected))
    assert_same(*results, tolerance)
    if reads == "ids" and lengths == LENGTHS:
        assert results[0]["kl"] > 0


@pytest.mark.parametrize("teacher", ["full_csa", "compressed_only"])
@pytest.mark.parametrize("api", [new_api, old_api])
@pytest.mark.parametrize(("ratio", "window"), [(4, 0), (8, 3), (3, 3)])
def test_conventions_teachers_ratios_and_windows(api: Any, teacher: str, ratio: int, window: int) -> None:
    exact, static = pair((9, 0, 2, 8), ratio=ratio, window=window)
    for selected in (ids_for(exact), ALL_VISIBLE):
        backend = flashmla("emits", api)
        results = [step(backend, exact, selected, teacher)]
        with watched(backend, static):
            results.append(step(backend, static, selected, teacher))
        assert_same(*results, 1e-11)


@pytest.mark.parametrize("backward", ["emits nothing", "1.25"])
@pytest.mark.parametrize("reads", ["ids", "all visible", "window only"])
def test_shapes_of_the_launches_do_not_depend_on_the_documents(reads: str, backward: str) -> None:
    """Of a graph, which replays them."""
    seen = []
    for lengths in ROWS:
        exact, static = pair(lengths, dtype=torch.float32)
        shapes: list[Any] = []
        backend = flashmla(backward, shapes=shapes)
        with watched(backend, static):
            shapes.clear()
            step(backend, static, {"ids": ids_for(exact), "all visible": ALL_VISIBLE, "window only": None}[reads])
        seen.append(shapes)
    assert seen[0]
    assert all(shapes == seen[0] for shapes in seen)


@pytest.mark.parametrize("backward", ["emits", "1.25"])
@pytest.mark.parametrize("reads", ["ids", "all visible"])
def test_several_launches_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch, reads: str, backward: str) -> None:
    dtype, tolerance = (torch.float32, 2e-5) if backward in VERSIONS else (torch.float64, 1e-11)
    exact, static = pair(dtype=dtype)
    selected = ids_for(exact) if reads == "ids" else ALL_VISIBLE
    whole = step(flashmla(backward), exact, selected)
    monkeypatch.setattr(adapt, "MOST_IDS", 50)
    shapes: list[Any] = []
    backend = flashmla(backward, shapes=shapes)
    with watched(backend, static):
        shapes.clear()
        pieces = step(backend, static, selected)
    assert len(shapes) > 2
    assert_same(whole, pieces, tolerance)


def test_global_ids_are_those_of_the_exact_layout() -> None:
    """Entries stand behind the tokens in both; a wider list ends in -1."""
    for lengths in ROWS:
        exact, static = pair(lengths)
        for selected in (ids_for(exact), ALL_VISIBLE):
            lists = []
            for case in (exact, static):
                entries, layout = case.compressed_kv.shape[0], case.layout
                width = adapt.slots_of_rows(0, 24, entries, selected, layout, 4, 3)
                ids = adapt.global_ids(0, 24, 128, entries, selected, layout, 4, 3)
                assert ((ids >= 0).sum(1) <= width).all()
                lists.append(ids)
            if exact.compressed_kv.shape[0]:
                assert torch.equal(*lists)
            else:  # no entry is read in the one, none is valid in the other
                assert all(a[a >= 0].tolist() == b[b >= 0].tolist() for a, b in zip(*lists, strict=True))


def test_a_slice_of_the_queries_is_the_same() -> None:
    exact, static = pair()
    backend = flashmla("emits nothing")
    selected = ids_for(exact)
    results = []
    for case in (exact, static):
        part = case.layout.query_slice(6, 16)
        results.append(backend.attend(case.q[6:16], case.window_kv, case.compressed_kv, selected[6:16], case.sink, part, *case.tail[1:]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-11)


def test_the_watch_sees_a_read() -> None:
    for read in (lambda t: t.item(), lambda t: bool(t > 0), lambda t: t[None].tolist(), lambda t: t[None].nonzero(), lambda t: t[None][t[None] > 0]):
        with pytest.raises(AssertionError, match="the host reads"), NoHostReads():
            read(torch.ones(()))


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the compiled kernels")
def test_the_triton_kernels_around_it_fit() -> None:
    command = [sys.executable, "-m", "tests.kernels.flashmla.test_static_layout"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.splitlines() == ["equal ids full_csa", "equal ids compressed_only", "equal all visible full_csa"]


def main() -> None:
    """The composition that trains on a GPU, a stub in place of FlashMLA."""
    provider = stub_provider(new_api(base=2.0), (torch.float32,))
    backend = FlashMLABackend(provider=provider, capability=(9, 0))
    backend._load()  # the interpreter has no CUDA device for `require` of the Triton part
    backend._geometry = Geometry(heads=2, head_dim=16, window=3, ratios=(0, 4), topk=6, dtype=torch.float32, device_type="cpu", teacher="full_csa")
    for reads, teacher in (("ids", "full_csa"), ("ids", "compressed_only"), ("all visible", "full_csa")):
        exact, static = pair(dtype=torch.float32, heads=2, dim=16, index_heads=2, index_dim=16)
        selected = ids_for(exact) if reads == "ids" else ALL_VISIBLE
        assert_same(step(backend, exact, selected, teacher), step(backend, static, selected, teacher), 1e-5)
        print("equal", reads, teacher)


if __name__ == "__main__":
    main()
