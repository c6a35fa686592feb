# SPDX-License-Identifier: Apache-2.0
"""The extremes of the gate, each alone: what a grid of small cases cannot show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.csa_gate_cases import Inputs, random_inputs
from benchmarks.csa_gate_checks import (
    FLOOR,
    GRADIENTS,
    exact_d_score,
    exact_scores,
    judge,
    norm_error,
    poisoned_outputs,
    reference_once,
    rounding_yardstick,
    selection_failures,
    train_once,
)
from kernels import ALL_VISIBLE, Backend, PackedLayout

BF16 = torch.bfloat16


def compare(backend: Backend, x: Inputs, teacher: str = "full_csa", stretch: float = 4.0) -> list[str]:
    """Failures of one training step against float64."""
    exact = reference_once(x, teacher)
    yardstick = rounding_yardstick(x, exact, exact_d_score(x, teacher))
    with poisoned_outputs():
        got = train_once(backend, x, x.leaves(), teacher)
    return judge(x, got, exact, yardstick, stretch)["failures"]


def _flagship(device: str, lengths: list[int], seed: int, topk: int = 64) -> Inputs:
    return random_inputs(lengths, sum(lengths), 64, 512, (64, 128), topk, 128, 4, BF16, device, seed)


def crowded_key(backend: Backend, device: str) -> list[str]:
    """64 identical queries that choose the same 8 entries: their gradients add up to 64 times one."""
    x = _flagship(device, [320], 1, topk=8)
    for name in ("q", "index_q", "index_w", "grad_out"):
        tensor = getattr(x, name)
        tensor[256:] = tensor[256]
    x.selected = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 8)
    x.selected[256:] = x.selected[256]
    return compare(backend, x)


def sinks_of_200(backend: Backend, device: str) -> list[str]:
    """All sinks at +200: every emitted teacher sum underflows and is done again in log space; the KL is that of float64."""
    x = _flagship(device, [200, 70], 2, topk=24)
    x.sink = torch.full_like(x.sink, 200.0)
    x.selected = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 24)
    return compare(backend, x)


def tiny_compressed_mass(backend: Backend, device: str) -> list[str]:
    """Window logits 70 above those of the entries: a compressed mass of 1e-30, whose distribution still counts."""
    x = _flagship(device, [200, 70], 3, topk=24)
    direction = torch.nn.functional.normalize(torch.randn(512, device=device), dim=0)
    x.q = (x.q.float() + direction * 30).to(BF16)
    x.window_kv = (x.window_kv.float() + direction * 53).to(BF16)  # 30 * 53 / sqrt(512) = 70
    x.selected = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 24)
    return compare(backend, x, stretch=80.0)


def deterministic_runs(backend: Backend, device: str) -> list[str]:
    """Three runs in deterministic mode give the same bits."""
    x = _flagship(device, [400, 111], 4)
    x.selected = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = [train_once(backend, x, x.leaves(), "full_csa") for _ in range(3)]
        failures = [f"{n} differs from run to run" for n in runs[0] for run in runs[1:] if not torch.equal(run[n], runs[0][n])]
        return failures + compare(backend, x)
    finally:
        torch.use_deterministic_algorithms(False)


def long_rows(backend: Backend, device: str) -> list[str]:
    """Rows that see 65,536 and more entries, the last rows of a long document among short ones; top-k 512 and 2,048."""
    failures = []
    lengths = [50, 66_000 * 4 + 3, 9_000 * 4, 40]
    layout = PackedLayout.from_lengths(lengths, device=device)
    g = torch.Generator(device=device).manual_seed(5)
    entries = layout.num_compressed(4)
    index_k = torch.randn(entries, 128, device=device, generator=g).to(BF16)
    for start in (50 + 66_000 * 4 + 3 - 40, 50 + 20_000 * 4, 50 + 66_000 * 4 + 3 + 9_000 * 4 - 9):
        part = layout.query_slice(start, start + 48)
        index_q = torch.randn(48, 64, 128, device=device, generator=g).to(BF16)
        index_w = torch.randn(48, 64, device=device, generator=g)
        index_w[3] = 0  # all scores equal: the lowest ids win
        scores = exact_scores(index_q, index_k, index_w)
        for topk in (512, 2048):
            with poisoned_outputs():
                ids = backend.select(index_q, index_k, index_w, part, 4, topk)
            failures += [
                f"rows from {start}, top-{topk}: {f}" for f in selection_failures(ids, scores, part.entry_start(4), part.visible_compressed(4))
            ]
    return failures


def many_rows(backend: Backend, device: str) -> list[str]:
    """70,000 rows x 64 heads x 512: addresses beyond 2^31 elements; 64 sampled rows, the last among them, against the same rows alone in float64."""
    tokens, topk = 70_000, 128
    x = random_inputs([30_001, 0, 39_999], tokens, 64, 512, (64, 128), topk, 128, 4, BF16, device, 6)
    x.selected = ids = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, topk)
    leaves = x.leaves()
    with poisoned_outputs():
        got = train_once(backend, x, leaves, "full_csa")
    g = torch.Generator(device=device).manual_seed(7)
    rows = torch.cat([torch.randint(0, tokens, (63,), device=device, generator=g), torch.tensor([tokens - 1], device=device)])
    first, visible = x.layout.entry_start(4)[rows], x.layout.visible_compressed(4)[rows]
    scores = exact_scores(x.index_q[rows], x.index_k, x.index_w[rows])
    failures = selection_failures(ids[rows], scores, first, visible)
    alone = _rows_alone(x, rows, ids[rows])
    for name, reference in alone.items():
        error = norm_error(got[name][rows], reference)
        if not error <= 4 * FLOOR[BF16]:
            failures.append(f"{name} of the sampled rows: error {error:.2e}")
        if not norm_error(got[name][rows][-1:], reference[-1:]) <= 8 * FLOOR[BF16]:
            failures.append(f"{name} of the last row is wrong")
    # the gradients of the keys are sums over all rows: their total along a direction has a second form
    total = sum(_dot(got["d_" + n], getattr(x, n))[0] for n in ("window_kv", "compressed_kv"))
    value, square = _dot(got["out"], x.grad_out)
    score_part = _dot(got["d_q"], x.q)[0]
    if not abs(total - value - score_part) <= 2e-2 * square**0.5:
        failures.append(f"sum(d_kv * kv) = {total:.4f}, sum(out * grad) + sum(dq * q) = {value + score_part:.4f}")
    return failures


def _dot(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Sum of the products and of their squares in float64, some rows at a time."""
    products = [x.double() * y.double() for x, y in zip(a.split(2_048), b.split(2_048), strict=True)]
    return sum(p.sum().item() for p in products), sum(p.square().sum().item() for p in products)


def _rows_alone(x: Inputs, rows: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """out, lse, d_q, d_index_q and d_index_w of these rows in float64, from gathered keys."""
    token = x.layout.token_ids[rows].long()
    start = x.layout.window_start(x.window)[rows].long()
    window = start[:, None] + torch.arange(x.window, device=rows.device)
    in_window, chosen = window <= token[:, None], ids >= 0
    keys = torch.cat([x.window_kv[window.clamp(max=x.window_kv.shape[0] - 1)], x.compressed_kv[ids.clamp(min=0).long()]], 1).double()
    valid = torch.cat([in_window, chosen], 1)
    q, grad, sink = x.q[rows].double(), x.grad_out[rows].double(), x.sink.double()
    logits = (torch.einsum("rhd,rkd->rhk", q, keys) * x.scale).masked_fill(~valid[:, None], float("-inf"))
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.logaddexp(lse, sink)[..., None])
    out = torch.einsum("rhk,rkd->rhd", p, keys)
    ds = p * (torch.einsum("rhd,rkd->rhk", grad, keys) - (out * grad).sum(-1, keepdim=True)) * x.scale
    teacher = p[..., x.window :].sum(1)
    teacher = teacher / teacher.sum(-1, keepdim=True).clamp(min=1e-300)
    index_k = x.index_k[ids.clamp(min=0).long()].double()
    s = torch.einsum("rhd,rkd->rhk", x.index_q[rows].double(), index_k)
    w = x.index_w[rows].double()
    scores = torch.einsum("rhk,rh->rk", torch.relu(s), w).masked_fill(~chosen, float("-inf"))
    some = chosen.any(-1, keepdim=True)
    d_score = torch.where(chosen, torch.softmax(scores.masked_fill(~some, 0), -1) - teacher, 0) * x.grad_kl
    return {
        "out": out,
        "lse": lse,
        "d_q": torch.einsum("rhk,rkd->rhd", ds, keys),
        "d_index_q": torch.einsum("rhk,rkd->rhd", (s > 0) * w[..., None] * d_score[:, None], index_k),
        "d_index_w": torch.einsum("rhk,rk->rh", torch.relu(s), d_score),
    }


def compiled_step(backend: Backend, device: str) -> list[str]:
    """torch.compile takes the whole step as one graph and gives the same results; opcheck accepts every operator."""
    x = random_inputs([90, 38], 128, 8, 64, (4, 32), 8, 16, 4, BF16, device, 8)

    def step(leaves: dict[str, Tensor], dense: bool) -> dict[str, Tensor]:
        p = leaves
        ids = ALL_VISIBLE if dense else backend.select(p["index_q"], p["index_k"], p["index_w"], x.layout, 4, 8)
        operands = (p["q"], p["window_kv"], p["compressed_kv"], p["sink"], x.layout, 4, x.window, x.scale)
        out, lse, kl_sum, stats = backend.attend_with_indexer_loss(p["index_q"], p["index_k"], p["index_w"], ids, *operands)
        return {"out": out, "kl": kl_sum, "lse": lse, "value": stats.kl_sum}

    failures = []
    for dense in (False, True):
        results = []
        for function in (step, torch.compile(step, fullgraph=True)):
            leaves = x.leaves()
            result = function(leaves, dense)
            ((result["out"] * x.grad_out).sum() + 0.5 * result["kl"]).backward()
            results.append({"out": result["out"], "lse": result["lse"], "value": result["value"]} | {"d_" + n: leaves[n].grad for n in GRADIENTS})
        for name, eager in results[0].items():
            if not norm_error(results[1][name].detach(), eager.detach()) <= 1e-3:
                failures.append(f"{'dense' if dense else 'sparse'}: compiled {name} differs from eager")
    return failures + operator_failures(x, backend)


EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def operator_failures(x: Inputs, backend: Backend, checks: tuple[str, ...] = EVERY_CHECK) -> list[str]:
    """torch.library.opcheck on every operator."""
    from kernels.triton_fused import ops, training_op
    from kernels.triton_fused.rows import RowBounds

    bounds = RowBounds.of(x.layout, 4, x.window, True)
    rows = (bounds.entry_start, bounds.visible)
    ids = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 8)
    leaf = {n: t.detach().clone().requires_grad_() for n, t in x.leaves().items()}
    plain = {n: t.detach() for n, t in leaf.items()}
    out, lse = backend.attend(*(plain[n] for n in ("q", "window_kv", "compressed_kv")), ids, plain["sink"], x.layout, 4, x.window, x.scale)
    layer = ("index_q", "index_k", "index_w")
    teacher = torch.rand(ids.shape, device=ids.device)
    grad_kl = torch.ones((), device=ids.device)
    value = torch.zeros((), device=ids.device)
    attention = (leaf["q"], leaf["window_kv"], leaf["compressed_kv"], ids, leaf["sink"], bounds.window_start, *rows, 0, x.window, x.scale, 1)
    plain_attention = (plain["q"], plain["window_kv"], plain["compressed_kv"], ids, plain["sink"])
    samples = {
        ops.select: (*(plain[n] for n in layer), *rows, 8, 4, 22, 0, True),
        ops.attend: attention,
        ops.attend_backward: (x.grad_out, *plain_attention, out, lse, bounds.window_start, *rows, 0, x.window, x.scale, 1),
        ops.sparse_indexer_loss: (*(leaf[n] for n in layer), ids, None, plain["q"], plain["compressed_kv"], plain["sink"], lse, *rows, x.scale),
        ops.sparse_indexer_gradient: (grad_kl, *(plain[n] for n in layer), ids, None, teacher, *rows),
        ops.dense_indexer_loss: (*(leaf[n] for n in layer), plain["q"], plain["compressed_kv"], lse, *rows, x.scale, 4, 22, 0, True),
        training_op.attend_and_teach: (
            *(leaf[n] for n in layer), ids, None, leaf["q"], leaf["window_kv"], leaf["compressed_kv"], leaf["sink"],
            bounds.window_start, *rows, value, 0, x.window, x.scale,
        ),
        training_op.attend_and_teach_backward: (
            x.grad_out, grad_kl, *(plain[n] for n in layer), ids, None, plain["q"], plain["window_kv"], plain["compressed_kv"], plain["sink"], out,
            lse, bounds.window_start, *rows, value, 0, x.window, x.scale,
        ),
    }  # fmt: skip
    failures = []
    for operator, arguments in samples.items():
        # fp32 additions in memory come in any order: two runs differ in the last bits
        try:
            torch.library.opcheck(operator, arguments, test_utils=checks, rtol=2e-2, atol=2e-2)
        except Exception as error:
            failures.append(f"opcheck of {operator._qualname}: {str(error).strip().splitlines()[0][:200]}")
    return failures


def no_window(backend: Backend, device: str) -> list[str]:
    """A window of 0: the first rows of every document, and all rows where nothing is selected, read no key at all."""
    failures = []
    for heads, dim, indexer in ((64, 512, (64, 128)), (8, 64, (4, 32))):
        x = random_inputs([300, 2, 81], 400, heads, dim, indexer, 24, 0, 4, BF16, device, 10)
        chosen = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 24)
        for name, ids in {"selected": chosen, "nothing": torch.full_like(chosen, -1), "all visible": ALL_VISIBLE}.items():
            failures += [f"H={heads} {name}: {f}" for f in compare(backend, dataclasses.replace(x, selected=ids))]
    return failures


def small_heads_long(backend: Backend, device: str) -> list[str]:
    """Few small heads over 4,096 tokens with top-k 512: the shape of the small models, against float64."""
    x = random_inputs([3_000, 1_096], 4_096, 8, 64, (8, 64), 512, 128, 4, BF16, device, 9)
    x.selected = backend.select(x.index_q, x.index_k, x.index_w, x.layout, 4, 512)
    failures = selection_failures(x.selected, exact_scores(x.index_q, x.index_k, x.index_w), x.layout.entry_start(4), x.layout.visible_compressed(4))
    return failures + compare(backend, x) + compare(backend, dataclasses.replace(x, selected=ALL_VISIBLE))


EXTREMES: dict[str, Callable[[Backend, str], list[str]]] = {
    "70,000 rows": many_rows,
    "rows of 65,536 entries": long_rows,
    "torch.compile and opcheck": compiled_step,
    "crowded key": crowded_key,
    "all sinks +200": sinks_of_200,
    "compressed mass 1e-30": tiny_compressed_mass,
    "deterministic": deterministic_runs,
    "window of 0": no_window,
    "small heads, 4,096 tokens": small_heads_long,
}
