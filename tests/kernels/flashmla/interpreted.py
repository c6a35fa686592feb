# SPDX-License-Identifier: Apache-2.0
"""Run by test_triton_parts.py with TRITON_INTERPRET=1: the default composition, a stub in place of FlashMLA, against unfused in float32."""

from __future__ import annotations

import torch

from kernels import ALL_VISIBLE, Backend, Geometry, get_backend
from kernels.flashmla import FlashMLABackend
from tests.kernels.cases import Case, make_case
from tests.kernels.flashmla.stubs import new_api, stub_provider

SIZES = {"heads": 2, "dim": 16, "index_heads": 2, "index_dim": 16}
CHECKED = ("out", "lse", "kl", "rows", "q", "window_kv", "compressed_kv", "sink", "index_q", "index_k", "index_w")


def step(backend: Backend, case: Case, ids: object, teacher: str, warm: bool) -> dict[str, torch.Tensor]:
    case.require_grad()
    chosen = backend.select(*case.index, case.layout, case.ratio, 3) if ids == "selected" else ALL_VISIBLE
    if warm:  # the loss alone, over all entries, without a known lse
        kl, rows = backend.indexer_loss(*case.index, ALL_VISIBLE, *(t.detach() for t in case.attention), None, *case.tail, teacher=teacher)
        kl.backward()
        return {"kl": kl.detach(), "rows": rows} | {name: getattr(case, name).grad for name in CHECKED[8:]}
    out, lse, kl, stats = backend.attend_with_indexer_loss(*case.index, chosen, *case.attention, *case.tail, teacher=teacher)
    ((out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum() + 0.7 * kl).backward()
    return {"out": out.detach(), "lse": lse, "kl": stats.kl_sum, "rows": stats.rows} | {name: getattr(case, name).grad for name in CHECKED[4:]}


def main() -> None:
    backend = FlashMLABackend(provider=stub_provider(new_api(base=2.0), (torch.float32,)), capability=(9, 0))
    geometry = Geometry(heads=2, head_dim=16, window=3, ratios=(0, 4), topk=3, dtype=torch.float32, device_type="cpu", teacher="full_csa")
    backend._load()  # the interpreter has no CUDA device for `require` of the Triton part
    backend._geometry = geometry
    for ids, teacher, warm in (
        ("selected", "full_csa", False),
        ("selected", "compressed_only", False),
        ("all visible", "full_csa", False),
        ("all visible", "full_csa", True),
    ):
        case = make_case((9, 0, 6), padding=1, dtype=torch.float32, **SIZES)
        got, wanted = step(backend, case, ids, teacher, warm), None
        wanted = step(get_backend("unfused"), make_case((9, 0, 6), padding=1, dtype=torch.float32, **SIZES), ids, teacher, warm)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name, i=ids, t=teacher: f"{i} {t} {n}: {m}")
        print("equal", ids, teacher, "warm-up" if warm else "step")
    case = make_case((9, 6), dtype=torch.float32, **SIZES)
    alone = [b.attend(case.q, case.window_kv, None, None, case.sink, *case.tail) for b in (backend, get_backend("unfused"))]
    torch.testing.assert_close(alone[0], alone[1], rtol=1e-4, atol=1e-4)
    print("composition", backend.describe())


if __name__ == "__main__":
    main()
