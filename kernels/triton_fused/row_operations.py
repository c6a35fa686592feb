# SPDX-License-Identifier: Apache-2.0
"""The Triton form of `RowOperations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kernels.triton_fused import compress_pool, cross_entropy, expert_load, expert_rows, hyper_maps, matrices, norm_rotate, route, stream_mix, swiglu


class TritonRowOperations:
    """Everything of the model around attention and large products in few kernels each way, differentiable once, and the optimizer's passes."""

    streams: tuple[int, ...] = hyper_maps.STREAMS

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Tensor | None = None) -> Tensor:
        """See `norm_rotate.norm_rotate`."""
        return norm_rotate.norm_rotate(x, weight, eps, rotation)

    def rotate(self, x: Tensor, rotation: Tensor, inverse: bool = False) -> Tensor:
        """See `norm_rotate.rotate`."""
        return norm_rotate.rotate(x, rotation, inverse)

    def pool_windows(self, projected: Tensor, ape: Tensor, starts_document: Tensor, overlap: bool) -> Tensor:
        """See `compress_pool.compress_pool`."""
        return compress_pool.compress_pool(projected, ape, starts_document, overlap)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None, source: Tensor | None = None) -> Tensor:
        """See `swiglu.swiglu`."""
        return swiglu.swiglu(gate, up, limit, weight, source)

    def order_pairs(self, experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `expert_rows.order_pairs`."""
        return expert_rows.order_pairs(experts, number)

    def spread_rows(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `expert_rows.spread_rows`."""
        return expert_rows.spread_rows(x, places)

    def sum_rows(self, x: Tensor, places: Tensor, plus: Tensor | None = None) -> Tensor:
        """See `expert_rows.sum_rows`."""
        return expert_rows.sum_rows(x, places, plus)

    def route(self, logits: Tensor, bias: Tensor | None, given: Tensor | None, topk: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """See `route.route`."""
        return route.route(logits, bias, given, topk, scaling)

    def linear_cross_entropy(self, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """See `cross_entropy.linear_cross_entropy`."""
        return cross_entropy.linear_cross_entropy(hidden, weight, targets, ignored)

    def balance(self, scores: Tensor, experts: Tensor, document: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """See `expert_load.balance`."""
        return expert_load.balance(scores, experts, document, lengths)

    def at_their_addresses(self, tensors: Sequence[Tensor]) -> matrices.Matrices:
        """See `matrices.at_their_addresses`."""
        return matrices.at_their_addresses(tensors)

    def gather_momentum(self, grads: matrices.Matrices, buffers: matrices.Matrices, momentum: float, out: Tensor, eps: float) -> None:
        """See `matrices.gather_momentum`."""
        matrices.gather_momentum(grads, buffers, momentum, out, eps)

    def matrix_polynomial(self, gram: Tensor, a: float, b: float, c: float) -> Tensor:
        """See `matrices.matrix_polynomial`."""
        return matrices.matrix_polynomial(gram, a, b, c)

    def decay_and_add(self, params: matrices.Matrices, updates: Tensor, rate: Tensor, decay: float, scale: float) -> None:
        """See `matrices.decay_and_add`."""
        matrices.decay_and_add(params, updates, rate, decay, scale)

    def around_sublayer(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See `stream_mix.around_sublayer`."""
        return stream_mix.around_sublayer(streams, fn, scale, base, iterations, eps, norm_eps)

    def collapse_streams(self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
        """See `stream_mix.collapse_streams`."""
        return stream_mix.collapse_streams(streams, fn, scale, base, eps, norm_eps)
