# SPDX-License-Identifier: Apache-2.0
"""The whole backend on stubs in float64 against kernels.unfused: what stands between the two is the adaptation alone."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import ALL_VISIBLE, Backend, BackendUnsupported, Geometry, PackedLayout, get_backend
from kernels.flashmla import FlashMLABackend, adapt
from kernels.flashmla.backend import _device_of_this_process
from kernels.flashmla.rules import SM90, SM100, padding_cost, rules_of
from tests.kernels.cases import Case, make_case
from tests.kernels.flashmla.stubs import indexer_api, new_api, old_api, stub_provider, unfused_parts

TOLERANCE = 1e-11
PROVIDERS = {
    "new": stub_provider(new_api()),
    "base-2": stub_provider(new_api(base=2.0, empty=-torch.inf)),
    "old": stub_provider(old_api()),
    "sink-in-lse": stub_provider(new_api(sink_in_lse=True)),
    "partial-lse": stub_provider(indexer_api()),
}


def flashmla(provider: str = "new", teaching: bool = True) -> FlashMLABackend:
    return FlashMLABackend(provider=PROVIDERS[provider], parts=unfused_parts(teaching), capability=(9, 0))


def layer(lengths: tuple[int, ...] = (5, 3, 0, 9), **options: Any) -> Case:
    case = make_case(lengths, padding=2, **options)
    case.sink = case.sink.float()
    return case


def disturbed(case: Case, topk: int = 3) -> Tensor:
    """Selected ids, shuffled, with every kind of invalid id among them; the last two rows have none at all."""
    generator = torch.Generator().manual_seed(3)
    ids = get_backend("unfused").select(*case.index, case.layout, case.ratio, topk)
    wrong = torch.tensor([-1, -7, case.compressed_kv.shape[0], case.compressed_kv.shape[0] + 5, 2**31 - 1], dtype=torch.int32)
    # of another document, or of the future: legal ids that this row may not see
    unseen = torch.arange(case.layout.num_compressed(case.ratio), dtype=torch.int32).expand(ids.shape[0], -1)
    start, visible = case.layout.entry_start(case.ratio)[:, None], case.layout.visible_compressed(case.ratio)[:, None]
    unseen = torch.where((unseen >= start) & (unseen < start + visible), -1, unseen)
    padded = torch.cat([ids, wrong.expand(ids.shape[0], -1), unseen], 1)
    padded = padded.gather(1, torch.rand(padded.shape, generator=generator).argsort(1))
    padded[-2:] = -1
    return padded


def step(backend: Backend, case: Case, selected: Any, teacher: str = "full_csa", entries: bool = True) -> dict[str, Tensor]:
    case.require_grad()
    if not entries:
        out, lse = backend.attend(case.q, case.window_kv, None, None, case.sink, *case.tail)
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        return {"out": out.detach(), "lse": lse} | {f"d{i}": t.grad for i, t in enumerate(case.attention) if t is not case.compressed_kv}
    out, lse, kl, stats = backend.attend_with_indexer_loss(*case.index, selected, *case.attention, *case.tail, teacher=teacher)
    ((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum() + 0.7 * kl).backward()
    return {"out": out.detach(), "lse": lse, "kl": stats.kl_sum, "rows": stats.rows} | {f"d{i}": t.grad for i, t in enumerate(case.leaves())}


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name in got:
        torch.testing.assert_close(got[name], wanted[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("ids", ["disturbed", "all visible"])
def test_a_training_step_equals_unfused_whatever_the_convention(provider: str, ids: str) -> None:
    """Out, lse, KL and every gradient, from old and new sources alike."""
    case = layer()
    selected = disturbed(case) if ids == "disturbed" else ALL_VISIBLE
    assert_equal(step(flashmla(provider), case, selected), step(get_backend("unfused"), case, selected))


@pytest.mark.parametrize(("teacher", "teaching"), list(itertools.product(["full_csa", "compressed_only"], [True, False])))
def test_both_teachers_with_and_without_an_emitting_backward(teacher: str, teaching: bool) -> None:
    case = layer()
    selected = disturbed(case)
    assert_equal(step(flashmla(teaching=teaching), case, selected, teacher), step(get_backend("unfused"), case, selected, teacher))


def test_the_teacher_follows_the_window_as_in_unfused() -> None:
    """A constant added to the window keys moves the KL by the same amount."""
    kl = {}
    for shift in (0.0, 1.5):
        case = layer(dim=8, heads=4)
        case.window_kv += shift * case.q.mean((0, 1))
        for backend in (flashmla(), get_backend("unfused")):
            kl[backend.name, shift] = step(backend, case, disturbed(case))["kl"].item()
    moved = kl["unfused", 1.5] - kl["unfused", 0.0]
    assert abs(moved) > 1e-4
    assert kl["flashmla", 1.5] - kl["flashmla", 0.0] == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize(("name", "message"), [("index_q", "index_q must have shape"), ("index_k", "needs"), ("index_w", "index_w must have shape")])
def test_indexer_that_does_not_fit_the_layout_is_refused_before_a_kernel_reads_beyond_it(name: str, message: str) -> None:
    case = layer()
    selected = disturbed(case)
    setattr(case, name, getattr(case, name)[:-1])
    case.require_grad()
    with pytest.raises(ValueError, match=message):  # in the forward: the backward that follows is a kernel's
        flashmla().attend_with_indexer_loss(*case.index, selected, *case.attention, *case.tail)


@pytest.mark.parametrize("window", [0, 3])
def test_window_only_and_hca_layers(window: int) -> None:
    """Ratios 0 and above 4: no entry, and every visible entry."""
    case = layer(window=window, ratio=3)
    assert_equal(step(flashmla(), case, None, entries=False), step(get_backend("unfused"), case, None, entries=False))
    assert_equal(step(flashmla(), case, ALL_VISIBLE), step(get_backend("unfused"), case, ALL_VISIBLE))


def test_a_loss_over_another_support_asks_flashmla_for_its_lse() -> None:
    asked = []
    stub = new_api()

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        asked.append(q.shape[0])
        return stub(q, kv, indices, sm_scale, d_v, attn_sink)

    case = layer().require_grad()
    backend = FlashMLABackend(provider=stub_provider(flash_mla_sparse_fwd), parts=unfused_parts(), capability=(9, 0))
    wanted = get_backend("unfused").indexer_loss(*case.index, ALL_VISIBLE, *case.attention, None, *case.tail)[0]
    got = backend.indexer_loss(*case.index, ALL_VISIBLE, *case.attention, None, *case.tail)[0]
    assert got.item() == pytest.approx(wanted.item(), rel=1e-10)
    assert asked[-1] == case.layout.num_rows


def test_rows_without_any_key_give_nothing_and_infinite_sinks_are_legal() -> None:
    case = layer(window=0)
    case.sink = torch.tensor([torch.inf, -torch.inf, 0.5])
    selected = disturbed(case)
    got = step(flashmla("old"), case, selected)
    assert (got["out"][-2:] == 0).all()
    assert (got["lse"][-2:] == -torch.inf).all()
    assert (got["d0"][-2:] == 0).all()
    assert_equal(got, step(get_backend("unfused"), case, selected))


def test_many_documents_equal_single_ones_also_in_small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op has no batch axis. Ids and results of a document do not depend on its neighbours or on the launch."""
    lengths = (9, 14, 6)
    case = make_case(lengths, seed=4)
    case.sink = case.sink.float()
    ids = get_backend("unfused").select(*case.index, case.layout, case.ratio, 2)
    for selected in (ids, ALL_VISIBLE):
        joint = flashmla().attend(*case.attention[:3], selected, case.sink, *case.tail)
        monkeypatch.setattr(adapt, "MOST_IDS", 128)
        pieces = flashmla().attend(*case.attention[:3], selected, case.sink, *case.tail)
        monkeypatch.undo()
        token = entry = 0
        for length in lengths:
            entries = length // case.ratio
            alone = (case.q[token : token + length], case.window_kv[token : token + length], case.compressed_kv[entry : entry + entries])
            own = selected if selected is ALL_VISIBLE else torch.where(ids >= 0, ids - entry, -1)[token : token + length]
            layout = PackedLayout.from_lengths([length])
            single = flashmla().attend(*alone, own, case.sink, layout, *case.tail[1:])
            for a, b, c in zip(joint, single, pieces, strict=True):
                torch.testing.assert_close(a[token : token + length], b, rtol=0, atol=1e-14)
                torch.testing.assert_close(a[token : token + length], c[token : token + length], rtol=0, atol=1e-14)
            token, entry = token + length, entry + entries


def test_ids_of_a_document_are_the_same_ids_whatever_surrounds_it() -> None:
    joint, alone = PackedLayout.from_lengths([9, 14]), PackedLayout.from_lengths([14])
    one = adapt.global_ids(0, 14, 128, 3, ALL_VISIBLE, alone, 4, 5)
    both = adapt.global_ids(9, 23, 128, 5, ALL_VISIBLE, joint, 4, 5)
    token = torch.where(both < 23, both - 9, both - 23 - 2 + 14)
    assert torch.equal(torch.where(both >= 0, token, -1), one)
    assert one[13, :10].tolist() == [14, 15, 16, 9, 10, 11, 12, 13, -1, -1]


def test_what_stands_behind_invalid_ids_never_counts() -> None:
    """Surplus entries, other documents and padding tokens may hold anything."""
    case = layer(surplus=2)
    selected = disturbed(case)
    before = flashmla().attend(*case.attention[:3], selected, case.sink, *case.tail)
    case.compressed_kv[-2:] = torch.nan
    case.window_kv[-2:] = torch.nan
    after = flashmla().attend(*case.attention[:3], selected, case.sink, *case.tail)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_slice_of_the_queries_sees_global_keys() -> None:
    case = layer()
    selected = disturbed(case)
    whole = flashmla().attend(*case.attention[:3], selected, case.sink, *case.tail)
    part = flashmla().attend(
        case.q[7:13], case.window_kv, case.compressed_kv, selected[7:13], case.sink, case.layout.query_slice(7, 13), *case.tail[1:]
    )
    torch.testing.assert_close(part[0], whole[0][7:13], rtol=0, atol=1e-14)


def test_recomputed_blocks_report_the_same_loss_and_gradients() -> None:
    """The KL of an emitting backward is written where the first forward said, also if the forward runs twice."""
    results = []
    for recompute in (False, True):
        case = layer().require_grad()
        selected = disturbed(case)

        def block(*tensors: Tensor, case: Case = case, selected: Tensor = selected) -> Any:
            return flashmla().attend_with_indexer_loss(*tensors[4:], selected, *tensors[:4], *case.tail)

        run = partial(checkpoint, block, use_reentrant=False) if recompute else block
        out, _, kl, stats = run(*case.leaves())
        (out.sum() + kl).backward()
        assert kl.item() == 0  # the value stands in stats
        results.append([stats.kl_sum, *(leaf.grad for leaf in case.leaves())])
    assert results[0][0] > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_each_process_of_a_node_probes_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert _device_of_this_process("cuda") == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert _device_of_this_process("cuda") == torch.device("cuda", 2)
    assert _device_of_this_process("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert _device_of_this_process("cuda") == torch.device("cuda")


@pytest.mark.parametrize("heads", [1, 64, 65, 128])
def test_head_counts_up_to_128_are_padded_and_cut(heads: int) -> None:
    case = layer((6, 3), heads=heads)
    selected = disturbed(case)
    assert_equal(step(flashmla(), case, selected), step(get_backend("unfused"), case, selected))


def test_rules_are_data_and_other_architectures_are_refused() -> None:
    """SM100 figures come from the sources; no such card has run them."""
    assert [SM90.padded_slots(n, 64) for n in (1, 128, 129, 640)] == [128, 128, 256, 640]
    assert [SM100.padded_slots(n, 64) for n in (1, 640, 641)] == [64, 640, 704]
    assert [SM100.padded_slots(n, 128) for n in (1, 641, 1280, 1281)] == [64, 704, 1280, 1408]
    assert rules_of((10, 3)) is SM100
    assert SM90.rows_per_call(64) == 65536
    assert SM90.rows_per_call(128) == 32768
    for capability in ((8, 0), (8, 9), (12, 0)):
        with pytest.raises(BackendUnsupported, match=r"9\.0.*10\.x.*What would work: backend=triton"):
            rules_of(capability)
    with pytest.raises(BackendUnsupported, match="at most 128 heads on SM90, the model has 256"):
        SM90.padded_heads(256)


def test_what_padding_costs_is_told() -> None:
    assert adapt.padded_sink(torch.ones(3), 5).tolist() == [1, 1, 1, -torch.inf, -torch.inf]
    assert padding_cost(SM90, 64, 512, 640) == "none"
    assert padding_cost(SM90, 8, 64, 640) == "8 of 64 heads useful, 64 of 512 columns useful: 1.6 % of the products"


GEOMETRY = Geometry(heads=8, head_dim=64, window=16, ratios=(0, 4), topk=8, dtype=torch.bfloat16, device_type="cpu", teacher="full_csa")


def test_require_probes_and_describe_tells_the_composition() -> None:
    """The log states what is in effect."""
    backend = FlashMLABackend(provider=stub_provider(old_api()), parts=unfused_parts(), capability=(10, 0))
    backend.require(GEOMETRY)
    told = backend.describe()
    assert "SM100 from stub 1.0 (old API, without a sink), base-2 lse converted, sink applied behind the kernel" in told["attend"]
    assert "never been run" in told["attend"]
    assert told["padding"].startswith("8 of 64 heads useful")
    assert told["attend backward"] == "unfused"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float16}, "computes in bfloat16.*float16.*bf16-mixed"),
        ({"heads": 200}, "at most 128 heads"),
        ({"head_dim": 576}, "head_dim up to 512"),
        ({"device_type": "cuda"}, "NVIDIA GPU|runs on cpu tensors"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_the_model_is_built(change: dict[str, Any], message: str) -> None:
    backend = FlashMLABackend(provider=stub_provider(new_api(), (torch.bfloat16,)), parts=unfused_parts(), capability=(9, 0))
    with pytest.raises(BackendUnsupported, match=message):
        backend.require(Geometry(**{**GEOMETRY.__dict__, **change}))


def test_a_convention_that_is_not_known_stops_the_build_and_every_call() -> None:
    backend = FlashMLABackend(provider=stub_provider(new_api(base=10.0)), parts=unfused_parts(), capability=(9, 0))
    with pytest.raises(BackendUnsupported, match=r"2\.1072"):
        backend.require(GEOMETRY)
    case = layer()
    with pytest.raises(BackendUnsupported, match=r"2\.1072"):
        backend.attend(*case.attention[:3], ALL_VISIBLE, case.sink, *case.tail)
    assert "not available" in backend.describe()["attend"]


def test_the_probe_runs_once_per_process() -> None:
    asked = []
    stub = new_api()

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        asked.append(q.shape)
        return stub(q, kv, indices, sm_scale, d_v, attn_sink)

    provider = stub_provider(flash_mla_sparse_fwd)
    for _ in range(2):
        FlashMLABackend(provider=provider, parts=unfused_parts(), capability=(9, 0)).require(GEOMETRY)
    assert len(asked) == 6


def test_a_sink_in_bfloat16_is_refused() -> None:
    """The sink stays float32."""
    case = layer()
    with pytest.raises(ValueError, match="sink must be float32"):
        flashmla().attend(*case.attention[:3], ALL_VISIBLE, case.sink.bfloat16(), *case.tail)


def test_a_backward_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="legal: triton, cudnn"):
        FlashMLABackend("tilelang")
