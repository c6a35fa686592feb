# SPDX-License-Identifier: Apache-2.0
"""What a kernel backend offers, how one is chosen, and how a refusal reads.

Legend: T tokens in the row, C compressed entries of the row, H heads, D head dim, HI/DI index heads / index head dim, K top-k, W window, m ratio.
"""

from __future__ import annotations

import enum
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kernels.layout import PackedLayout

Teacher = Literal["full_csa", "compressed_only"]
TEACHERS: tuple[str, ...] = ("full_csa", "compressed_only")


class AllVisible(enum.Enum):
    """Type of the marker ALL_VISIBLE."""

    ALL_VISIBLE = "all visible entries"


ALL_VISIBLE = AllVisible.ALL_VISIBLE  # in place of ids: every entry that the query may see
Selection = Tensor | AllVisible


class BackendUnsupported(RuntimeError):
    """A backend cannot honour a request. Nothing falls back silently; the message says what is missing and what would work."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. What would work: {remedy}")
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[BackendUnsupported], tuple[str, str]]:
        return type(self), (self.reason, self.remedy)


@dataclass(frozen=True)
class Geometry:
    """All that a model asks of a backend, known when the model is built.

    `ratios` holds the compression ratio of every attention layer (0 = window only). `topk` None: nothing is selected, every visible entry is
    read. `index_heads` None: no indexer. `teacher` None: no indexer loss. `support` names the set the loss runs over.
    """

    heads: int
    head_dim: int
    window: int
    ratios: tuple[int, ...] = (0,)
    topk: int | None = None
    index_heads: int | None = None
    index_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"
    needs_grad: bool = True
    teacher: Teacher | None = None
    support: Literal["sparse", "dense"] = "sparse"
    max_tokens: int | None = None


@dataclass
class IndexerStats:
    """What logging reads: kl_sum [] (summed over rows) and rows int64 []. Right after the backward at the latest, in every backend."""

    kl_sum: Tensor
    rows: Tensor


class RowOperations(Protocol):
    """What a backend fuses of the work on single rows around the attention, and of the optimizer's on whole matrices; csa_model holds the plain
    counterparts."""

    streams: tuple[int, ...]  # numbers n of residual streams that the hyper-connections below take

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor | None = None) -> Tensor:
        """RMS norm of x [T, D] or [T, H, D], with `weight` [D] or without, then `rotate` by `rotation` if there is one: one rounding for both."""

    def rotate(self, x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
        """The last r dims of x in interleaved pairs, out of place, by `rotation` complex64 [T, r/2] or its opposite."""

    def pool_windows(self, projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
        """Entries [C, D] of a compressor: values pooled by a softmax, per channel and in fp32, of their gates with the position bias.

        Args:
            projected: [C * m, 2 * width], of every token of every window: values, then gates; width is D, or 2D with `overlap`.
            ape: [m, width], bias of the gates. starts_document: bool [C]; such an entry, and the first, has no window before it.
            overlap: an entry pools the first half of the channels of the window before its own as well, and of its own the second half.
        """

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        """silu(min(gate, limit)) * clip(up, -limit, limit) of gate and up [R, D], times `weight` fp32 [R, 1] if there is one: one rounding.

        Row r takes weight[source[r]] where `source` int64 [R], the numbers from 0 to R - 1 in some order, is given, else weight[r].
        """

    def order_pairs(self, experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The P = N * K pairs of experts int64 [N, K], ids below `number`, sorted by expert, those of one expert by their own number; no gradient.

        pair int64 [P]: number of the pair at each place; place int64 [N, K]: place of each pair; end int32 [number]: end of each expert's places.
        """

    def spread_rows(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """[P, D]: row n of x [N, D] at places[n, k] for every k; places int64 [N, K] holds every number from 0 to P - 1 once.

        The same rows twice, for two readers that write to neither, so that the sum of their gradients costs no pass of its own.
        """

    def sum_rows(self, x: Tensor, places: Tensor, plus: Tensor | None = None) -> Tensor:
        """[N, D]: sum over k of x[places[n, k]] of x [P, D], places as for `spread_rows`, plus `plus` [N, D] if there is one: one rounding."""

    def route(self, logits: Tensor, bias: Tensor | None, given: Tensor | None, topk: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """scores [T, E] = sqrt(softplus(logits)), expert ids int64 [T, K] and their weights [T, K], scores over their sum times `scaling`; fp32.

        The experts are the K highest of scores + `bias` [E], or `given` int64 [T, K]; one of the two is None.
        """

    def linear_cross_entropy(self, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """Sum over rows of the cross entropy of the logits hidden [T, d] @ weight [V, d].T with targets int64 [T], fp32 []; no logits are kept.

        Under autocast both operands are rounded to its dtype; logits are fp32. Rows whose target is `ignored` count nothing; any other target outside
        [0, V) makes the result NaN.
        """

    def balance(self, scores: Tensor, experts: Tensor, document: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over documents n of sum_i f_i P_i, fp32 [] with gradient to the scores, and the load int32 [N + 1, E]: pairs per document and expert.

        P_i is the mean over the document's tokens of scores fp32 [T, E] over their sum per token, f_i = E / (K * lengths[n]) * load[n, i].

        Args:
            experts: int64 [T, K]. document: int64 [T], N for padding. lengths: fp32 [N + 1], infinity at N.
        """

    def at_their_addresses(self, tensors: Sequence[Tensor]) -> Any:
        """What the next functions take as matrices: those of contiguous stacks [k, n, m] of one dtype, which must stay where they are in memory."""

    def gather_momentum(self, grads: Any, buffers: Any, momentum: float, out: Tensor, eps: float) -> None:
        """buffers <- momentum * buffers + grads, then out <- each matrix of grads + momentum * buffers over max(its Frobenius norm, eps).

        Args:
            grads, buffers: of `at_their_addresses`, of one dtype, as many matrices as `out` has.
            out: [B, n, m], with rows or columns that lie together in memory: part of larger matrices, or turned.
        """

    def matrix_polynomial(self, gram: Tensor, a: float, b: float, c: float) -> Tensor:
        """aI + bG + cG^2 of each matrix of `gram` [B, n, n], contiguous: summed in fp32, rounded once."""

    def decay_and_add(self, params: Any, updates: Tensor, rate: Tensor, decay: float, scale: float) -> None:
        """params <- params - rate * (decay * params + scale * updates), of params as the grads and updates as the `out` of `gather_momentum`.

        Args:
            rate: float32, one number, read from the device.
        """

    def around_sublayer(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """A hyper-connection: the input x [T, d] of a sublayer, and the function from its output y [T, d] to the new streams [T, n, d].

        With mix = fn @ RMS norm of the flattened streams [T, n, d], in fp32: read = sigmoid + eps and write = 2 sigmoid of the first and second n
        columns, comb [n, n] from the others by `iterations` of row and column normalisation, each of mix * scale + base. x = sum over j of
        read[j] * streams[j]; new[s] = write[s] * y + sum over j of comb[j, s] * streams[j]. In the dtype of the streams.

        Args:
            fn: fp32 [n (2 + n), n d]; scale: fp32 [3], of read, write and comb; base: fp32 [n (2 + n)]. norm_eps: of the RMS norm; eps: of the rest.
        """

    def collapse_streams(self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
        """x [T, d] as in `around_sublayer`, of a connection that only reads: fn fp32 [n, n d], scale [1], base [n]."""


class Backend(ABC):
    """The operations of one CSA layer. Gradients: select none; attend to q, both kv and the sink; indexer_loss to index_* only."""

    name: str

    @abstractmethod
    def require(self, geometry: Geometry) -> None:
        """Raise BackendUnsupported unless everything in `geometry` can be honoured."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """op -> implementation and version."""

    def row_operations(self) -> RowOperations | None:
        """Fused forms of the work around the attention, on the device of the last `require`; None: the model's own run."""
        return None

    def capturable(self) -> bool:
        """Whether a CUDA graph may record the operations: of a StaticLayout's documents they ask the host nothing, and they wait for nothing."""
        return False

    @abstractmethod
    def select(self, index_q: Tensor, index_k: Tensor, index_w: Tensor, layout: PackedLayout, ratio: int, topk: int) -> Tensor:
        """The `topk` visible entries of the highest index score, per query. No gradient.

        Score of query t and entry j: sum over index heads of index_w[t, h] * relu(index_q[t, h] . index_k[j]).

        Args:
            index_q: [T, HI, DI]; index_k: [C, DI]; index_w: [T, HI], all scales included.
            topk: K; may exceed C.

        Returns:
            int32 [T, K]: ids into the C entries of the row, ascending, then -1. Ties go to the lower id.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor | None,
        selected: Selection | None,
        sink: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """One softmax over sink, window and selected entries; keys are the values.

        Args:
            q: [T, H, D]; window_kv: [T, D]; compressed_kv: [C, D], or None for no compressed keys (`ratio` is then ignored).
            selected: int32 [T, K] in any order with holes (ids that are negative, >= C or invisible are invalid; duplicates undefined),
                ALL_VISIBLE, or None for no entry.
            sink: fp32 [H] (float64 allowed with float64 q), a logit after scaling; +-inf is legal.

        Returns:
            out [T, H, D] in the dtype of q, 0 where a row has no valid key; lse [T, H] in fp32 (float64 for float64), natural log over the keys
            without the sink, -inf for an empty row, no gradient.
        """

    @abstractmethod
    def indexer_loss(
        self,
        index_q: Tensor,
        index_k: Tensor,
        index_w: Tensor,
        support: Selection,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        sink: Tensor,
        lse: Tensor | None,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
        teacher: Teacher = "full_csa",
        head_group: object | None = None,
    ) -> tuple[Tensor, Tensor]:
        """KL(teacher || softmax of the index scores) over the support, summed over rows. Gradient to index_q, index_k, index_w only.

        Args:
            support: int32 [T, K] or ALL_VISIBLE: the entries that teacher and student are distributions over.
            lse: [T, H] of the attention over the SAME support, or None to recompute it.
            teacher: "full_csa" (the probabilities of the real attention) or "compressed_only" (a softmax over the support per head).
            head_group: process group of sharded heads; other than None raises BackendUnsupported.

        Returns:
            kl_sum [] fp32 (float64 for float64), with a grad_fn whenever an index_* needs gradient; rows int64 []: real rows with at least one
            visible entry, whatever the support holds.
        """

    def attend_with_indexer_loss(
        self,
        index_q: Tensor,
        index_k: Tensor,
        index_w: Tensor,
        selected: Selection,
        q: Tensor,
        window_kv: Tensor,
        compressed_kv: Tensor,
        sink: Tensor,
        layout: PackedLayout,
        ratio: int,
        window: int,
        scale: float,
        teacher: Teacher = "full_csa",
        head_group: object | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, IndexerStats]:
        """attend and indexer_loss over the same ids, as a training step calls them: out, lse, kl_sum, stats.

        A backend may do both as one function whose kl_sum is 0 in the forward; stats holds the right values after the backward at the latest.
        """
        out, lse = self.attend(q, window_kv, compressed_kv, selected, sink, layout, ratio, window, scale)
        kl_sum, rows = self.indexer_loss(
            index_q, index_k, index_w, selected, q, window_kv, compressed_kv, sink, lse, layout, ratio, window, scale, teacher, head_group
        )
        return out, lse, kl_sum, IndexerStats(kl_sum.detach(), rows)


_REGISTRY = {
    "unfused": ("kernels.unfused", "UnfusedBackend"),
    "triton": ("kernels.triton_fused", "TritonBackend"),
    "flashmla": ("kernels.flashmla", "FlashMLABackend"),
}


def available_backends() -> tuple[str, ...]:
    """Names that get_backend knows; whether one runs on this machine is what require() tells."""
    return tuple(_REGISTRY)


def get_backend(name: str, **choices: str) -> Backend:
    """The backend of this name, imported only now.

    Args:
        choices: what only this backend lets one choose; flashmla: `backward`, "triton" (default) or "cudnn".

    Raises:
        ValueError: unknown name or choice; the message lists the names.
        BackendUnsupported: a package that the backend is built on is missing.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown backend {name!r}; legal: {', '.join(available_backends())}")
    module_name, class_name = _REGISTRY[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = [f"the Python package {error.name!r} is not installed"]
        if not torch.cuda.is_available():
            missing.append("no NVIDIA GPU is visible")
        remedy = "backend=unfused, which runs anywhere" + (", or backend=triton on an NVIDIA GPU" if name == "flashmla" else "")
        raise BackendUnsupported(f"backend {name!r} cannot be loaded: {' and '.join(missing)}", remedy) from error
    if choices and name != "flashmla":
        raise ValueError(f"backend {name!r} offers no choice of {', '.join(choices)}; leave it out")
    backend: Backend = getattr(module, class_name)(**choices)
    return backend
