# SPDX-License-Identifier: Apache-2.0
"""How the gate judges: errors against the unfused backend in float64, measured by what rounding alone costs.

The yardstick is a plain implementation in the dtype of the case that rounds P and dS to that dtype before their matrix products, as every
tensor-core kernel must. A kernel may be FACTOR times as far from float64 as that in the norm of each result, ROW_FACTOR times in its worst row.
A relative error e of the norm leaves a cosine of at least sqrt(1 - e^2): 0.999 is e = 4.5 %.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.csa_gate_cases import Inputs
from kernels import ALL_VISIBLE, Backend, get_backend

FACTOR = 1.5
ROW_FACTOR = 2.0  # one row of thousands: the largest of so many errors scatters more than their norm
# Relative error that needs no explanation: about the rounding of the result itself; float32 is judged by the order of its sums.
FLOOR = {torch.bfloat16: 1.0e-3, torch.float16: 1.5e-4, torch.float32: 3.0e-6}
SCORE_TOLERANCE = 2.0**-20
GRADIENTS = ("q", "window_kv", "compressed_kv", "sink", "index_q", "index_k", "index_w")


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Every torch.empty of the host code arrives full of NaN (or of the largest integer): what a kernel does not write shows."""
    originals = torch.empty, torch.empty_like

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    torch.empty = lambda *a, **k: fill(originals[0](*a, **k))  # type: ignore[assignment]
    torch.empty_like = lambda *a, **k: fill(originals[1](*a, **k))  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = originals


def train_once(backend: Backend, x: Inputs, leaves: dict[str, Tensor], teacher: str) -> dict[str, Tensor]:
    """out, lse, kl, rows and all gradients of sum(out * grad_out) + grad_kl * kl_sum, as a training step runs it."""
    p = leaves
    out, lse, kl_sum, stats = backend.attend_with_indexer_loss(
        p["index_q"], p["index_k"], p["index_w"], x.selected, p["q"], p["window_kv"], p["compressed_kv"], p["sink"],
        x.layout, x.ratio, x.window, x.scale, teacher,
    )  # fmt: skip
    # the gradients are handed over: a scalar loss would hold a float64 copy of out, 17 GiB for 70,000 rows
    torch.autograd.backward([out, kl_sum], [x.grad_out.to(out.dtype), torch.full_like(kl_sum, x.grad_kl)])
    result = {"out": out.detach(), "lse": lse, "kl": stats.kl_sum.detach(), "rows": stats.rows}
    for name in GRADIENTS:
        grad = p[name].grad
        result["d_" + name] = torch.zeros_like(p[name]) if grad is None else grad
    return result


def reference_once(x: Inputs, teacher: str) -> dict[str, Tensor]:
    """`train_once` of the unfused backend on the same numbers in float64."""
    return train_once(get_backend("unfused"), x, x.as_dtype(torch.float64), teacher)


def key_masks(x: Inputs) -> tuple[Tensor, Tensor]:
    """bool [T, T] of the window and [T, C] of the attended entries."""
    layout, device = x.layout, x.q.device
    token = torch.arange(layout.num_tokens, device=device)
    window = (token[None] >= layout.window_start(x.window)[:, None]) & (token[None] <= token[:, None])
    first, visible = layout.entry_start(x.ratio)[:, None], layout.visible_compressed(x.ratio)[:, None]
    entry = torch.arange(x.compressed_kv.shape[0], device=device)[None]
    attended = (entry >= first) & (entry < first + visible)
    if x.selected is not ALL_VISIBLE:
        assert isinstance(x.selected, Tensor)
        ids = torch.where((x.selected >= 0) & (x.selected < entry.shape[1]), x.selected, entry.shape[1]).long()
        chosen = torch.zeros(ids.shape[0], entry.shape[1] + 1, dtype=torch.bool, device=device).scatter_(1, ids, True)
        attended = attended & chosen[:, :-1]
    return window, attended


def rounding_yardstick(x: Inputs, exact: dict[str, Tensor], d_score: Tensor) -> dict[str, Tensor]:
    """out and gradients by plain tensor operations in the dtype of the case, P and dS rounded to it before their products.

    d_score fp32 [T, C]: gradient of the loss to the index scores, exact.
    """
    dtype = x.q.dtype
    window, attended = key_masks(x)
    keys = torch.cat([x.window_kv, x.compressed_kv]).float()
    valid = torch.cat([window, attended], 1)
    q, grad = x.q.float(), x.grad_out.float()

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).float()

    logits = (torch.einsum("thd,kd->htk", q, keys) * x.scale).masked_fill(~valid, float("-inf"))
    top = logits.amax(-1, keepdim=True).clamp(min=-1e30)
    weight = torch.exp(logits - top)
    total = weight.sum(-1, keepdim=True)
    z = torch.logaddexp(top[..., 0] + torch.log(total[..., 0]), x.sink.float()[:, None])
    norm = torch.where(total > 0, 1 / (total + torch.exp(x.sink.float()[:, None, None] - top)), 0)
    out = rounded(torch.einsum("htk,kd->thd", rounded(weight), keys) * norm.permute(1, 0, 2))
    p = torch.where(valid & z.isfinite()[..., None], torch.exp(logits - torch.where(z.isfinite(), z, 0)[..., None]), 0)
    delta = (out * grad).sum(-1).T
    ds = p * (torch.einsum("thd,kd->htk", grad, keys) - delta[..., None]) * x.scale
    d_keys = torch.einsum("htk,thd->kd", rounded(ds), q) + torch.einsum("htk,thd->kd", rounded(p), grad)
    dq = torch.einsum("htk,kd->thd", rounded(ds), keys)
    tokens = x.window_kv.shape[0]
    index_q, index_k = x.index_q.float(), x.index_k.float()
    s = torch.einsum("thd,cd->htc", index_q, index_k)
    ds_index = torch.where(s > 0, x.index_w.float().T[..., None] * d_score[None], 0)
    result = {
        "out": out,
        "d_q": rounded(dq),
        "d_window_kv": rounded(d_keys[:tokens]),
        "d_compressed_kv": rounded(d_keys[tokens:]),
        "d_sink": -(torch.where(z.isfinite(), torch.exp(x.sink.float()[:, None] - z), 0) * delta).sum(1),
        "d_index_q": rounded(torch.einsum("htc,cd->thd", rounded(ds_index), index_k)),
        "d_index_k": rounded(torch.einsum("htc,thd->cd", rounded(ds_index), index_q)),
        "d_index_w": (torch.relu(s) * d_score[None]).sum(-1).T,
    }
    return {name: value.double() for name, value in result.items() if name in exact}


def exact_d_score(x: Inputs, teacher: str) -> Tensor:
    """fp32 [T, C]: grad_kl * (softmax - teacher) in float64, from its definition."""
    _, attended = key_masks(x)
    lse = get_backend("unfused").attend(
        *(t.double() for t in (x.q, x.window_kv, x.compressed_kv)), x.selected, x.sink.double(), x.layout, x.ratio, x.window, x.scale
    )[1]
    logits = (torch.einsum("thd,cd->thc", x.q.double(), x.compressed_kv.double()) * x.scale).masked_fill(~attended[:, None], float("-inf"))
    z = torch.logaddexp(lse, x.sink.double()) if teacher == "full_csa" else torch.logsumexp(logits, -1)
    lowest = z.amin(-1, keepdim=True)
    z = torch.where(lowest.isfinite(), z - lowest, 0)
    log_t = torch.logsumexp(logits - z[..., None], 1)
    some = attended.any(-1, keepdim=True)
    t = torch.where(some, torch.softmax(log_t.masked_fill(~some, 0), -1), 0)
    scores = (torch.relu(torch.einsum("thd,cd->thc", x.index_q.double(), x.index_k.double())) * x.index_w.double()[..., None]).sum(1)
    student = torch.softmax(scores.masked_fill(~attended, float("-inf")).masked_fill(~some, 0), -1)
    return (torch.where(some & attended, student - t, 0) * x.grad_kl).float()


def norm_error(a: Tensor, exact: Tensor) -> float:
    """||a - exact|| / ||exact||; NaN counts as infinite, 0 / 0 as 0."""
    difference = (a.double() - exact.double()).norm().item()
    size = exact.double().norm().item()
    if difference != difference:
        return float("inf")
    return difference / size if size > 0 else (0.0 if difference == 0 else float("inf"))


def row_error(a: Tensor, exact: Tensor) -> float:
    """Largest error of a row (first axis), by the root mean square of the rows of `exact`."""
    if a.numel() == 0:
        return 0.0
    a, exact = (t.double().reshape(t.shape[0], -1) for t in (a, exact))
    size = exact.norm(dim=1).square().mean().sqrt().item()
    worst = (a - exact).norm(dim=1).max().item()
    return worst / size if size > 0 else (0.0 if worst == 0 else float("inf"))


def judge(x: Inputs, got: dict[str, Tensor], exact: dict[str, Tensor], yardstick: dict[str, Tensor], stretch: float) -> dict[str, Any]:
    """Failures, and the errors with their limits. `stretch`: size of the largest logits, which fp32 exponents lose digits to."""
    failures, errors = [], {}
    # the exponent of a logit of 300 carries an error of 300 * 2^-24
    floor = FLOOR[x.q.dtype] + 3.0e-7 * max(0.0, stretch - 4)
    for name, reference in yardstick.items():
        for kind, measure, factor, slack in (("norm", norm_error, FACTOR, 1), ("row", row_error, ROW_FACTOR, 4)):
            error, allowed = measure(got[name], exact[name]), factor * measure(reference, exact[name]) + floor * slack
            errors[f"{name}/{kind}"] = (error, allowed)
            if not error <= allowed:
                failures.append(f"{name} {kind} error {error:.2e} > {allowed:.2e}")
    finite = exact["lse"].isfinite()
    if not torch.equal(got["lse"].isfinite(), finite) or not torch.equal(got["lse"][~finite].double(), exact["lse"][~finite]):
        failures.append("lse is not -inf in exactly the empty rows")
    elif finite.any():
        error = (got["lse"].double() - exact["lse"])[finite].abs().max().item()
        errors["lse/abs"] = (error, 2e-6 * max(10.0, stretch))
        if not error <= errors["lse/abs"][1]:
            failures.append(f"lse error {error:.2e} > {errors['lse/abs'][1]:.2e}")
    error = abs(got["kl"].item() - exact["kl"].item())
    allowed = 1e-4 * abs(exact["kl"].item()) + 1e-6 * max(10.0, stretch) * x.q.shape[0] ** 0.5
    errors["kl/abs"] = (error, allowed)
    if not error <= allowed:
        failures.append(f"KL {got['kl'].item():.6f} instead of {exact['kl'].item():.6f}")
    if int(got["rows"]) != int(exact["rows"]):
        failures.append(f"rows {int(got['rows'])} instead of {int(exact['rows'])}")
    return {"failures": failures, "errors": errors}


def selection_failures(ids: Tensor, scores: Tensor, first: Tensor, visible: Tensor) -> list[str]:
    """Is `ids` int32 [R, K] the top-k of the float64 scores [R, C]? Free to differ: entries within 2^-20 of the largest magnitude from the k-th."""
    rows, topk = ids.shape
    entry = torch.arange(scores.shape[1], device=scores.device)[None]
    seen = (entry >= first[:, None]) & (entry < (first + visible)[:, None])
    count = torch.minimum(visible, torch.full_like(visible, topk))
    slot = torch.arange(topk, device=ids.device)[None]
    failures = []
    filled = slot < count[:, None]
    if not torch.equal(ids >= 0, filled) or (ids[~filled] != -1).any():
        return ["the number of ids is not min(K, visible), or they do not come first"]
    if ((ids[:, 1:] <= ids[:, :-1]) & filled[:, 1:]).any():
        failures.append("ids do not ascend")
    if scores.shape[1] == 0 or topk == 0:
        return failures
    chosen = torch.zeros(rows, scores.shape[1] + 1, dtype=torch.bool, device=ids.device)
    chosen.scatter_(1, torch.where(filled, ids, scores.shape[1]).long(), True)
    chosen = chosen[:, :-1]
    if (chosen & ~seen).any():
        failures.append("an id lies outside the visible entries")
    masked = scores.masked_fill(~seen, float("-inf"))
    ranked = masked.sort(-1, descending=True).values
    kth = ranked.gather(1, (count - 1).clamp(min=0)[:, None].long())
    tolerance = SCORE_TOLERANCE * scores.masked_fill(~seen, 0).abs().amax(-1, keepdim=True)
    some = (count > 0)[:, None]
    if ((masked > kth + tolerance) & ~chosen & some).any():
        failures.append("an entry clearly above the k-th score is missing")
    if ((masked < kth - tolerance) & chosen & some).any():
        failures.append("an entry clearly below the k-th score is chosen")
    return failures


def exact_scores(index_q: Tensor, index_k: Tensor, index_w: Tensor) -> Tensor:
    """float64 [R, C] index scores, one head at a time."""
    scores = torch.zeros(index_q.shape[0], index_k.shape[0], dtype=torch.float64, device=index_q.device)
    for head in range(index_q.shape[1]):
        scores += torch.relu(index_q[:, head].double() @ index_k.double().T) * index_w[:, head, None].double()
    return scores
