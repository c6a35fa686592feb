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
from kernels.triton_fused.indexer_sparse import LossTiling, sparse_loss
from kernels.triton_fused.teacher import sparse_teacher
from tests.kernels.triton.aot import compiling_for_sm90

LOSS_VARIANTS = (
    LossTiling(64, 64, 4, 1, fold=True, together=2),
    LossTiling(64, 64, 4, 2, fold=True),
    LossTiling(64, 64, 4, 1, chunk=64, fold=True, registers=168),
)
GEOMETRIES = {  # index heads, index dim, heads, dim, top-k, dtype
    "published": (64, 128, 64, 512, 512, torch.bfloat16),
    "largest": (128, 256, 128, 512, 2048, torch.bfloat16),
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
    for selection.IN_PARTS in (False, True):
        selection._take_chunk(scores, ids, zeros(tokens, topk), start, visible, 0, tokens, 20000)  # every span of registers, and longer rows
    teacher = sparse_teacher(q, keys, ids, sink, lse, start, visible, 0.1)
    sparse_teacher(q, keys, ids, sink, None, start, visible, 0.1)
    sparse_loss(*indexer, ids, teacher, start, visible, zeros(), scores=zeros(tokens, topk))
    if index_heads <= 64 and index_dim <= 128:
        for variant in LOSS_VARIANTS:
            sparse_loss(*indexer, ids, teacher, start, visible, zeros(), scores=zeros(tokens, topk), tiling=variant)
    dense_loss(*indexer, q, keys, lse, start, visible, 0.1, 4, entries, 4 * entries)


def main() -> None:
    for name, geometry in GEOMETRIES.items():
        with compiling_for_sm90() as kernels:
            launch_all(*geometry)
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
