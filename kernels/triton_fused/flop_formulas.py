# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the operators for torch.utils.flop_counter, from shapes alone.

Ids are data, so a row counts its whole window and all its K slots, filled or not. Where every visible entry is read, the row is taken for one
document: the query at position t sees (t + 1) / m entries, half of C on average. A multiply-add is two FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from kernels.triton_fused import training_op  # registers what the formulas below are for
from kernels.triton_fused.ops import Reads

Shape = Sequence[int]
_OPS = getattr(torch.ops, training_op.NAMESPACE)


def _entries_of_row(selected: Shape | None, compressed: Shape | None, reads: int) -> float:
    if reads == Reads.SELECTED and selected is not None:
        return selected[1]
    return compressed[0] / 2 if reads == Reads.ALL_VISIBLE and compressed is not None else 0


def attention_flops(q: Shape, keys: float, matrix_products: int) -> int:
    """`matrix_products` products of [H, D] with [D, keys] for every row of q [R, H, D]: 2 in the forward, 5 in the backward."""
    rows, heads, dim = q
    return int(2 * matrix_products * rows * heads * dim * keys)


def indexer_flops(index_q: Shape, keys: float, matrix_products: int) -> int:
    """Products of [HI, DI] with [DI, keys] for every row: 1 for the scores, 3 for the gradient (the scores of each head again)."""
    return attention_flops(index_q, keys, matrix_products)


@register_flop_formula(_OPS.select)
def _select(index_q: Shape, index_k: Shape, *args: Any, **kwargs: Any) -> int:
    return indexer_flops(index_q, index_k[0] / 2, 1)


@register_flop_formula(_OPS.attend)
def _attend(q: Shape, window_kv: Shape, compressed_kv: Shape | None, selected: Shape | None, *args: Any, **kwargs: Any) -> int:
    window, reads = args[5], args[7]
    return attention_flops(q, window + _entries_of_row(selected, compressed_kv, reads), 2)


@register_flop_formula(_OPS.attend_backward)
def _attend_backward(grad: Shape, q: Shape, window_kv: Shape, compressed_kv: Shape | None, selected: Shape | None, *args: Any, **kwargs: Any) -> int:
    window, reads = args[7], args[9]
    return attention_flops(q, window + _entries_of_row(selected, compressed_kv, reads), 5)


@register_flop_formula(_OPS.sparse_indexer_loss)
def _sparse_loss(index_q: Shape, index_k: Shape, index_w: Shape, support: Shape, scores: Shape | None, q: Shape, *args: Any, **kwargs: Any) -> int:
    return indexer_flops(index_q, support[1], int(scores is None)) + attention_flops(q, support[1], 1)


@register_flop_formula(_OPS.sparse_indexer_gradient)
def _sparse_gradient(
    grad: Shape, index_q: Shape, index_k: Shape, index_w: Shape, support: Shape, scores: Shape | None, *args: Any, **kwargs: Any
) -> int:
    return indexer_flops(index_q, support[1], 3 + int(scores is None))


@register_flop_formula(_OPS.dense_indexer_loss)
def _dense_loss(index_q: Shape, index_k: Shape, index_w: Shape, q: Shape, compressed_kv: Shape, *args: Any, **kwargs: Any) -> int:
    with_grad = args[-1]
    return indexer_flops(index_q, index_k[0] / 2, 5 if with_grad else 1) + attention_flops(q, compressed_kv[0] / 2, 1)


@register_flop_formula(_OPS.attend_and_teach)
def _teach(index_q: Shape, index_k: Shape, index_w: Shape, selected: Shape, scores: Shape | None, q: Shape, *args: Any, **kwargs: Any) -> int:
    window = args[8]
    return attention_flops(q, window + selected[1], 2)


@register_flop_formula(_OPS.attend_and_teach_backward)
def _teach_backward(
    grad: Shape,
    grad_kl: Shape,
    index_q: Shape,
    index_k: Shape,
    index_w: Shape,
    selected: Shape,
    scores: Shape | None,
    q: Shape,
    *args: Any,
    **kwargs: Any,
) -> int:
    window = args[10]
    return attention_flops(q, window + selected[1], 5) + indexer_flops(index_q, selected[1], 3 + int(scores is None))
