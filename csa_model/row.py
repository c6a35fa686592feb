# SPDX-License-Identifier: Apache-2.0
"""What all layers of one forward share about the packed row: rotations per position and the windows that compressed entries are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from csa_model.config import ModelConfig
from csa_model.rotary import RotaryTable, Rotation
from kernels import PackedLayout


@dataclass(frozen=True)
class CompressedWindows:
    """The windows of `ratio` tokens behind the C compressed entries of the row, in the order of `layout.compressed_cu_seqlens(ratio)`.

    token_ids int64 [C * ratio]: rows of the packed row, window after window; starts_document bool [C]; position int64 [C]: of a window's first token.
    are_head: whether those are known to be the first rows of the packed row.
    """

    ratio: int
    token_ids: Tensor
    starts_document: Tensor
    position: Tensor
    are_head: bool

    @classmethod
    def of(cls, layout: PackedLayout, ratio: int) -> CompressedWindows:
        """Windows are anchored at the start of each document; the tail of a document (fewer than `ratio` tokens) forms none.

        In order, the windows are the tokens that stand in one, in order. Where C is only a bound, other tokens, each once, fill the windows behind.
        """
        lengths = torch.nn.functional.pad(layout.cu_seqlens.diff(), (0, 1))  # the last, 0, is that of the document -1
        length = lengths[layout.document_of_token.long()]
        in_window = layout.position_of_token < length - length % ratio
        order = torch.sort(in_window.to(torch.uint8), descending=True, stable=True).indices
        token_ids = order[: layout.num_compressed(ratio) * ratio]
        position = layout.position_of_token[token_ids[::ratio]].long()
        return cls(ratio, token_ids, position == 0, position, layout.windows_come_first(ratio))

    def rows_of(self, x: Tensor) -> Tensor:
        """Rows [C * ratio, d] of all windows, of x [T, d]: `x` itself where the windows cover it, and no copy where its first rows are theirs."""
        if torch.compiler.is_compiling():  # one graph for all rows
            return x.index_select(0, self.token_ids)
        if not self.are_head:
            return _Rows.apply(x, self.token_ids)
        count = self.token_ids.shape[0]
        return x if count == x.shape[0] else x[:count]


class _Rows(torch.autograd.Function):
    """Rows `ids` of x, none of them twice: their gradients are copied back, where autograd would add them up atomically."""

    @staticmethod
    def forward(ctx, x: Tensor, ids: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.rows = x.shape[0]
        return x.index_select(0, ids)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, ids, grad), None


class RotaryTables:
    """The two position encodings of a model: plain RoPE for window-only layers, another base with YaRN for every compressed layer."""

    def __init__(self, config: ModelConfig) -> None:
        self.window = RotaryTable(config.qk_rope_head_dim, config.rope_theta, None)
        self.compressed = RotaryTable(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)

    def of(self, ratio: int) -> RotaryTable:
        return self.compressed if ratio else self.window


class Row:
    """One packed row during one forward. `position_offset` shifts every position, which must change nothing (a test uses it)."""

    def __init__(self, layout: PackedLayout, tables: RotaryTables, ratios: set[int], dtype: torch.dtype, position_offset: int = 0) -> None:
        self.layout = layout
        positions = layout.position_of_token.long() + position_offset
        self.is_real = layout.document_of_token >= 0
        token_rotations = {kind: tables.of(kind)(positions, dtype) for kind in {bool(ratio) for ratio in ratios}}
        self._token_rotation = {ratio: token_rotations[bool(ratio)] for ratio in ratios}
        self._windows = {ratio: CompressedWindows.of(layout, ratio) for ratio in ratios if ratio}
        self._entry_rotation = {ratio: tables.of(ratio)(windows.position + position_offset, dtype) for ratio, windows in self._windows.items()}

    def token_rotation(self, ratio: int) -> Rotation:
        """Rotation of every token in a layer of this ratio."""
        return self._token_rotation[ratio]

    def entry_rotation(self, ratio: int) -> Rotation:
        """Rotation of every compressed entry: that of the first token of its window."""
        return self._entry_rotation[ratio]

    def windows(self, ratio: int) -> CompressedWindows:
        return self._windows[ratio]

    @cached_property
    def document_index(self) -> Tensor:
        """int64 [T]: document of each token; padding has the number N of documents."""
        return torch.where(self.is_real, self.layout.document_of_token, self.document_lengths.numel() - 1).long()

    @cached_property
    def document_lengths(self) -> Tensor:
        """fp32 [N + 1] (exact up to 2^24): tokens of each document, at least 1; infinity for padding, whose share in a mean is then 0."""
        return torch.nn.functional.pad(self.layout.cu_seqlens.diff().clamp(min=1).float(), (0, 1), value=torch.inf)
