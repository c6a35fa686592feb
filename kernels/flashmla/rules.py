# SPDX-License-Identifier: Apache-2.0
"""What shapes FlashMLA's sparse prefill takes on each architecture, and what it costs to fill them up.

Read in the kernels' own checks and in their tests. The rules of SM90 were run on an H200; those of SM100 are data that no machine has confirmed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.backend import BackendUnsupported

OTHER_BACKENDS = "backend=triton on any NVIDIA GPU from Ampere on, or backend=unfused, which runs anywhere"
MOST_ELEMENTS = 2**31  # of a query tensor: offsets beyond do not fit the 32 bits that a kernel may compute them in
MOST_ROWS = 2**16


@dataclass(frozen=True)
class ArchitectureRules:
    """Legal shapes of one architecture: query heads, columns of a key (all of them value columns), ids per query."""

    name: str
    heads: tuple[int, ...]
    head_dim: int
    confirmed: bool  # has run on such a card

    def padded_heads(self, heads: int) -> int:
        """The smallest legal head count that holds `heads`."""
        fitting = [legal for legal in self.heads if legal >= heads]
        if not fitting:
            raise BackendUnsupported(f"FlashMLA takes at most {max(self.heads)} heads on {self.name}, the model has {heads}", OTHER_BACKENDS)
        return min(fitting)

    def padded_slots(self, slots: int, padded_heads: int) -> int:
        """Ids per query, rounded up to what the kernel walks in one step."""
        step = self._step(slots, padded_heads)
        return -(-slots // step) * step

    def _step(self, slots: int, padded_heads: int) -> int:
        if self.name == "SM100" and (padded_heads == 64 or slots <= 1280):
            return 64
        return 128

    def rows_per_call(self, padded_heads: int) -> int:
        """Query rows of one launch."""
        return min(MOST_ROWS, MOST_ELEMENTS // (padded_heads * self.head_dim))


SM90 = ArchitectureRules("SM90", heads=(64, 128), head_dim=512, confirmed=True)
SM100 = ArchitectureRules("SM100", heads=(64, 128), head_dim=512, confirmed=False)


def rules_of(capability: tuple[int, int]) -> ArchitectureRules:
    """The rules of a compute capability. BackendUnsupported for one that FlashMLA has no sparse prefill for."""
    if capability == (9, 0):
        return SM90
    if capability[0] == 10:
        return SM100
    raise BackendUnsupported(
        f"FlashMLA's sparse prefill exists for compute capability 9.0 (H100, H200) and 10.x (B200), this device has {capability[0]}.{capability[1]}",
        OTHER_BACKENDS,
    )


def padding_cost(rules: ArchitectureRules, heads: int, head_dim: int, slots: int) -> str:
    """What the padding wastes, in words: `8 of 64 heads useful, 64 of 512 columns useful: 1.6 % of the products`."""
    padded = rules.padded_heads(heads)
    padded_slots = rules.padded_slots(slots, padded)
    pairs = (("heads", heads, padded), ("columns", head_dim, rules.head_dim), ("ids per query", slots, padded_slots))
    wasted = [f"{useful} of {total} {what} useful" for what, useful, total in pairs if useful < total]
    if not wasted:
        return "none"
    share = 100.0 * heads * head_dim * slots / (padded * rules.head_dim * padded_slots)
    return f"{', '.join(wasted)}: {share:.2g} % of the products"
