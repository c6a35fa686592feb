# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of selection, teacher and indexer loss for sm_90 and prints one JSON line per kernel: run by test_compile_ahead.py in a
process of its own, since a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json

import torch
import triton

from kernels.triton_fused import selection
from kernels.triton_fused.index_scores import write_scores
from kernels.triton_fused.indexer_dense import dense_loss
from kernels.triton_fused.indexer_sparse import sparse_loss
from kernels.triton_fused.teacher import sparse_teacher
from tests.kernels.triton.aot import compiling_for_sm90

GEOMETRIES = {  # index heads, index dim, heads, dim, top-k, dtype
    "published": (64, 128, 64, 512, 512, torch.bfloat16),
    "largest": (128, 256, 128, 512, 2048, torch.bfloat16),
}
LOSSES = {  # index heads, index dim, integer sums, scores kept by the selection
    "published, deterministic": (64, 128, True, True),
    "published, scores recomputed": (64, 128, False, False),
    "128 heads of 128": (128, 128, False, True),
    "48 heads of 96": (48, 96, False, True),
    "32 heads of 32": (32, 32, False, True),
    "4 heads of 32": (4, 32, False, True),
}


def launch_all(index_heads: int, index_dim: int, heads: int, dim: int, topk: int, dtype: torch.dtype, tokens: int = 64, entries: int = 4096) -> None:
    """Every host function once, on tensors whose contents do not matter."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    start, visible, ids = (zeros(*shape, dtype=torch.int32) for shape in ((tokens,), (tokens,), (tokens, topk)))
    index_q, index_k, index_w = zeros(tokens, index_heads, index_dim, dtype=dtype), zeros(entries, index_dim, dtype=dtype), zeros(tokens, index_heads)
    q, keys, lse, sink = zeros(tokens, heads, dim, dtype=dtype), zeros(entries, dim, dtype=dtype), zeros(tokens, heads), zeros(heads)
    indexer = (index_q, index_k, index_w)
    scores = zeros(tokens, entries)
    write_scores(*indexer, start, visible, scores, 0, tokens)
    selection._take_chunk(scores, ids, zeros(tokens, topk), start, visible, 0, tokens, 20000)  # every span of registers, and longer rows
    teacher = sparse_teacher(q, keys, ids, sink, lse, start, visible, 0.1)
    sparse_teacher(q, keys, ids, sink, None, start, visible, 0.1)
    sparse_loss(*indexer, ids, teacher, start, visible, zeros(), scores=zeros(tokens, topk))
    dense_loss(*indexer, q, keys, lse, start, visible, 0.1, 4, entries, 4 * entries)


def launch_loss(heads: int, dim: int, deterministic: bool, scored: bool, tokens: int = 64, slots: int = 512) -> None:
    q, k, w = (torch.zeros(*shape) for shape in ((tokens, heads, dim), (4096, dim), (tokens, heads)))
    ids, bound = torch.zeros(tokens, slots, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    weights = torch.zeros(tokens, slots)
    grad, scores = torch.zeros(()), torch.zeros(tokens, slots) if scored else None
    sparse_loss(q.bfloat16(), k.bfloat16(), w, ids, weights, bound, bound, grad, deterministic, scores)


def main() -> None:
    for name in [*GEOMETRIES, *LOSSES]:
        with compiling_for_sm90() as kernels:
            if name in GEOMETRIES:
                launch_all(*GEOMETRIES[name])
            else:
                launch_loss(*LOSSES[name])
        for kernel in kernels:
            counts = {i: kernel.count(i) for i in ("HGMMA", "HMMA", "WARPGROUP", "LDL")}
            record = {
                "geometry": name,
                "kernel": kernel.name,
                "stack": kernel.stack_bytes,
                "shared": kernel.shared_bytes,
                "triton": triton.__version__,
            }
            print(json.dumps(record | counts), flush=True)


if __name__ == "__main__":
    main()
