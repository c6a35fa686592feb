# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a FlashMLA op mean, found by asking it: once per process and device, before anything is trained.

Versions differ in the base of the lse (2 in old sources, whatever the README says), in whether they know a sink, and in the lse of an empty row. An
answer that is none of the known ones stops here with the numbers seen.

Legend: R query rows, H padded heads, N keys, S ids per query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from kernels.backend import BackendUnsupported
from kernels.flashmla.adapt import on_device
from kernels.flashmla.providers import Provider, ProviderRejected, advice
from kernels.flashmla.rules import OTHER_BACKENDS, ArchitectureRules

LN_2 = math.log(2.0)
ROWS, VALID, KEYS = 16, 128, 192
FIRST_KEY = 7  # the keys before the first and behind the last valid one are NaN: no invalid id may bring them in
TOLERANCE = 2e-2  # relative to the largest value of the reference; a bfloat16 result is off by 0.4 %
LSE_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Convention:
    """Answers of the probe. `to_natural`: factor that turns the raw lse into natural log. `applies_sink`: the op takes the sink, scales out by it and
    leaves it out of the lse; else it is called without one and we scale. `empty_lse`: raw lse of a row without a key."""

    to_natural: float
    applies_sink: bool
    empty_lse: float

    def describe(self) -> str:
        base = "natural-log lse" if self.to_natural == 1.0 else "base-2 lse converted"
        return f"{base}, {'sink in the kernel' if self.applies_sink else 'sink applied behind the kernel'}, empty row {self.empty_lse:+}"


class _Question:
    """Inputs of the probe and how an unknown answer is refused."""

    def __init__(self, provider: Provider, rules: ArchitectureRules, heads: int, device: torch.device) -> None:
        self.provider, self.heads, self.device = provider, heads, device
        self.dtype = provider.dtypes[0]
        self.generator = torch.Generator().manual_seed(5)
        self.columns = rules.head_dim
        self.slots = rules.padded_slots(VALID, heads)
        self.keys = self.draw(KEYS, self.columns)
        self.keys[:FIRST_KEY] = math.nan
        self.keys[FIRST_KEY + VALID :] = math.nan
        self.values = self.keys[FIRST_KEY : FIRST_KEY + VALID].double()
        self.mean = self.values.mean(0)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def ids(self) -> Tensor:
        every = torch.arange(FIRST_KEY, FIRST_KEY + VALID, dtype=torch.int32, device=self.device)
        return torch.nn.functional.pad(every, (0, self.slots - VALID), value=-1).expand(ROWS, -1).contiguous()

    def ask(self, q: Tensor, ids: Tensor, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        try:
            with on_device(self.device):
                out, lse = self.provider(q, self.keys, ids, scale, sink)
            # the numbers are looked at on the host: a kernel that fails does so here
            return out.double(), lse.double()
        except ProviderRejected as reason:
            raise BackendUnsupported(str(reason), f"{advice()}, or {OTHER_BACKENDS}") from reason
        except (RuntimeError, TypeError) as error:
            self.refuse(f"a call with {self.heads} heads and {self.slots} ids failed: {str(error).strip().splitlines()[0][:200]}", error)

    def refuse(self, what: str, cause: BaseException | None = None) -> NoReturn:
        remedy = f"{advice()}, or {OTHER_BACKENDS}"
        raise BackendUnsupported(f"the probe does not understand {self.provider.description}: {what}", remedy) from cause

    def off(self, got: Tensor, wanted: Tensor) -> float:
        """Largest difference by the largest value; NaN counts as infinite."""
        worst = ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
        return worst if worst == worst else math.inf


def probe(provider: Provider, rules: ArchitectureRules, heads: int, device: torch.device) -> Convention:
    """Ask `provider` on `device` with `heads` padded heads. BackendUnsupported with the numbers seen where an answer is none of the known ones."""
    question = _Question(provider, rules, heads, device)
    to_natural = _base(question)
    empty = _empty_and_invalid(question, to_natural)
    applies = provider.takes_sink and _sink(question, to_natural)
    convention = Convention(to_natural, applies, empty)
    _against_reference(question, convention)
    return convention


def _base(question: _Question) -> float:
    """All logits 0 and 128 keys: the lse is ln 128 = 4.852, or 7 in base 2; out is the mean of the values."""
    q = torch.zeros(ROWS, question.heads, question.columns, dtype=question.dtype, device=question.device)
    out, lse = question.ask(q, question.ids(), 1.0, None)
    low, high = lse.min().item(), lse.max().item()
    if question.off(out, question.mean.expand_as(out)) > TOLERANCE:
        seen = f"out {_numbers(out[0, 0])} for a mean of {_numbers(question.mean)}"
        question.refuse(f"128 keys of equal weight do not give the mean of the values ({seen})")
    for factor in (1.0, LN_2):
        if max(abs(low * factor - math.log(VALID)), abs(high * factor - math.log(VALID))) < LSE_TOLERANCE:
            return factor
    question.refuse(f"the lse of 128 equal logits is {low:.4f} to {high:.4f}; known are {math.log(VALID):.4f} (natural log) and 7.0000 (base 2)")


def _empty_and_invalid(question: _Question, to_natural: float) -> float:
    """Raw lse of a row without a valid id. Ids of every illegal kind must be masked, and the NaN keys that they might reach must not come through."""
    q = torch.zeros(ROWS, question.heads, question.columns, dtype=question.dtype, device=question.device)
    ids = question.ids()
    ids[3] = -1
    illegal = torch.tensor([-1, KEYS, KEYS + 5, 2**31 - 1, -(2**31)], dtype=torch.int32, device=question.device)
    half = VALID // 2
    ids[5, half:VALID] = illegal.repeat(half)[:half]
    out, lse = question.ask(q, ids, 1.0, None)
    kept = question.values[:half].mean(0).expand_as(out[5])
    if question.off(out[5], kept) > TOLERANCE or (lse[5] * to_natural - math.log(half)).abs().max().item() > LSE_TOLERANCE:
        seen = f"lse {_numbers(lse[5] * to_natural)} instead of {math.log(half):.4f}, out {_numbers(out[5, 0])} instead of {_numbers(kept[0])}"
        question.refuse(f"ids outside [0, number of keys) are not masked: {seen}")
    if (out[3] != 0).any():
        question.refuse(f"a row without a valid id gives out {_numbers(out[3, 0])} instead of 0")
    empty = lse[3, 0].item()
    if not math.isinf(empty) or (lse[3] != empty).any():
        question.refuse(f"a row without a valid id gives lse {_numbers(lse[3])}; known are +inf and -inf")
    if not torch.isfinite(out[7:]).all():
        question.refuse(f"rows beside an empty one are not finite: out {_numbers(out[7, 0])}")
    return empty


def _sink(question: _Question, to_natural: float) -> bool:
    """Whether the op handles the sink as documented: sink = ln 128 halves the mean of 128 equal keys and stays out of the lse.

    False where out is right but the lse holds the sink: the op can then be called without one.
    """
    q = torch.zeros(ROWS, question.heads, question.columns, dtype=question.dtype, device=question.device)
    level = math.log(VALID)
    even = torch.full((question.heads,), level, dtype=torch.float32, device=question.device)
    # one sink per head: read in another dtype or order, each would be another
    graded = torch.linspace(level - 2, level + 2, question.heads, dtype=torch.float32, device=question.device)
    outside = True
    for sink in (even, graded):
        out, lse = question.ask(q, question.ids(), 1.0, sink)
        share = torch.sigmoid(level - sink.double())
        if question.off(out, (share[:, None] * question.mean).expand_as(out)) > TOLERANCE:
            seen = f"out {_numbers(out[0, 0])}, half of the mean is {_numbers(question.mean / 2)}"
            question.refuse(f"a sink of ln 128 = {level:.4f} against 128 equal keys does not halve the mean of the values ({seen})")
        natural = lse * to_natural
        if (natural - level).abs().max().item() < LSE_TOLERANCE:
            continue
        if (natural - torch.logaddexp(torch.full_like(sink, level), sink).double()).abs().max().item() >= LSE_TOLERANCE:
            question.refuse(f"with a sink of ln 128 the lse is {_numbers(natural)}; known are {level:.4f} (without) and {level + LN_2:.4f} (with it)")
        outside = False
    infinite = torch.full((question.heads,), -math.inf, dtype=torch.float32, device=question.device)
    infinite[::2] = math.inf
    out, _ = question.ask(q, question.ids(), 1.0, infinite)
    wanted = torch.where(infinite[:, None] > 0, 0.0, question.mean).expand_as(out)
    if question.off(out, wanted) > TOLERANCE:
        seen = f"{_numbers(out[0, 0])} and {_numbers(out[0, 1])}"
        question.refuse(f"sinks of +inf and -inf give out {seen}, not 0 and the mean {_numbers(question.mean)}")
    return outside


def _against_reference(question: _Question, convention: Convention) -> None:
    """Random queries, shuffled ids with holes, a scale that no default has: out and lse against float64."""
    scale = 0.7 * question.columns**-0.5
    q = question.draw(ROWS, question.heads, question.columns)
    order = torch.rand(ROWS, question.slots, generator=question.generator).argsort(1).to(question.device)
    ids = question.ids().gather(1, order)
    ids[torch.rand(ROWS, question.slots, generator=question.generator).to(question.device) < 0.3] = -1
    out, lse = question.ask(q, ids, scale, None)
    valid = ids >= 0
    values = torch.where(torch.isfinite(question.keys), question.keys, 0).double()[ids.clamp(min=0).long()]
    logits = torch.einsum("rhd,rsd->rhs", q.double(), values) * scale
    logits = logits.masked_fill(~valid[:, None], -math.inf)
    exact_lse = torch.logsumexp(logits, -1)
    exact = torch.einsum("rhs,rsd->rhd", torch.softmax(logits, -1), values)
    out_error, lse_error = question.off(out, exact), (lse * convention.to_natural - exact_lse).abs().max().item()
    if out_error > TOLERANCE or not lse_error < LSE_TOLERANCE:
        question.refuse(f"random queries are off float64 by {out_error:.2e} of the largest output and {lse_error:.2e} in the lse")


def _numbers(values: Tensor) -> str:
    flat = values.flatten()
    return "[" + ", ".join(f"{v:.4g}" for v in flat[:3].tolist()) + (", ...]" if flat.numel() > 3 else "]")
