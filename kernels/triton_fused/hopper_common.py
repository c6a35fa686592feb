# SPDX-License-Identifier: Apache-2.0
"""Pieces that the Gluon kernels for SM90 share, and the names that Gluon changed between Triton versions.

Both kernels are persistent: one program per multiprocessor walks over items of one query row and 64 of its heads, the longest rows first. Their smem
buffers are indexed with `constant + zero`, where zero is a value that the compiler cannot know: constant indices make it hoist the descriptors of
all matrix instructions out of the loop, about a hundred registers' worth, and spill them.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


def multiprocessors(device: torch.device) -> int:
    """Programs of a persistent launch; each of them takes the shared memory of a whole multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# chosen at import, not by a branch in a kernel: the compiler resolves the names of both sides of a branch
if hasattr(async_copy, "async_load"):

    @gluon.jit
    def copy_to_shared(target, pointer, mask):
        async_copy.async_load(target, pointer, mask=mask)

else:

    @gluon.jit
    def copy_to_shared(target, pointer, mask):
        async_copy.async_copy_global_to_shared(target, pointer, mask=mask)


if hasattr(gl, "barrier"):

    @gluon.jit
    def sync_warps():
        gl.barrier()

else:

    @gluon.jit
    def sync_warps():
        gl.thread_barrier()


@gluon.jit
def item_bounds(item, BOUNDS, first_row, window_tiles, HEAD_BLOCKS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Item -> row, token, first window key, range of entries, range of key tiles (at least one, so that every item passes through all barriers).

    The tile that a row without keys passes through is the one behind its window, never the one before: with a window of 0 that would be -1, and
    the buffer index that callers make out of the tile's high bits would be negative too.
    """
    row = item // HEAD_BLOCKS
    token = row + first_row
    window_start = gl.load(BOUNDS + row * 4)
    entry_start = gl.load(BOUNDS + row * 4 + 1)
    entry_end = gl.load(BOUNDS + row * 4 + 2)
    last_tile = window_tiles + (gl.load(BOUNDS + row * 4 + 3) + BLOCK_N - 1) // BLOCK_N
    in_window = gl.maximum(token + 1 - window_start, 0)
    first_tile = window_tiles - (in_window + BLOCK_N - 1) // BLOCK_N
    return row, token, window_start, entry_start, entry_end, first_tile, gl.maximum(last_tile, first_tile + 1)


@gluon.jit
def tile_keys(tile, row, token, window_start, entry_start, entry_end, SELECTED, K, window_tiles, n, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr):
    """Key tile -> row of each key in its own tensor, -1 where it is invalid. The tile lies in the window where tile < window_tiles."""
    slot = (tile - window_tiles) * BLOCK_N + n
    if ALL_VISIBLE:
        entry = entry_start + slot
    else:
        entry = gl.load(SELECTED + row.to(gl.int64) * K + slot, mask=(slot >= 0) & (slot < K), other=-1)
    in_window = tile < window_tiles
    key = gl.where(in_window, token + 1 + slot, entry)
    valid = (key >= gl.where(in_window, window_start, entry_start)) & (key < gl.where(in_window, token + 1, entry_end))
    return gl.where(valid, key, -1)


@gluon.jit
def tile_word(
    tile, row, token, window_start, entry_start, entry_end, WORDS, word_count, window_tiles, BLOCK_N: gl.constexpr, ALL_VISIBLE: gl.constexpr
):
    """Validity of the 64 keys of a tile as one int64: bit n belongs to key n."""
    in_window = tile < window_tiles
    if ALL_VISIBLE:
        word = gl.to_tensor(-1).to(gl.int64)
        beyond = (tile - window_tiles + 1) * BLOCK_N - (entry_end - entry_start)
    else:
        index = tile - window_tiles
        word = gl.load(WORDS + row.to(gl.int64) * word_count + index, mask=(index >= 0) & (index < word_count), other=0)
        beyond = 0
    ones = gl.to_tensor(-1).to(gl.int64)
    before = gl.minimum(gl.maximum(window_start - token - 1 - (tile - window_tiles) * BLOCK_N, 0), BLOCK_N)
    before = gl.where(in_window, before, 0)
    beyond = gl.where(in_window, 0, gl.minimum(gl.maximum(beyond, 0), BLOCK_N))
    word = gl.where(in_window, ones, word)
    # a shift by all 64 bits is undefined: two halves
    word = word & ((ones << (before // 2).to(gl.int64)) << (before - before // 2).to(gl.int64))
    return gl.where(beyond >= BLOCK_N, 0, word & ((ones.to(gl.uint64) >> gl.minimum(beyond, BLOCK_N - 1).to(gl.uint64)).to(gl.int64)))


@gluon.jit
def has_bit(word, n):
    """bool like n: bit n of the int64 word, for n in the column layout of the matrix instruction.

    There bits 1 and 2 of n come from the lane and all others are constants of the register, so that this split leaves one shift per half and a test
    of a constant bit per column; n itself as a shift count would occupy a register per column throughout the loop.
    """
    half = gl.where(n < 32, word.to(gl.int32), (word >> 32).to(gl.int32))
    return (((half >> (n & 6)) >> (n & 25)) & 1) != 0


@gluon.jit
def store_half(POINTER, x, item, column: gl.constexpr, D: gl.constexpr):
    """[64, 256] fp32 in the layout of the matrix instruction -> 8 consecutive bytes per lane, 32 per row.

    16 bytes per lane would cost a second exchange between lanes, for which the compiler goes through smem that is not there.
    """
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 256]
    )
    y = gl.convert_layout(x.to(POINTER.dtype.element_ty), L)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    dim = gl.arange(0, 256, layout=gl.SliceLayout(0, L))
    gl.store(POINTER + item.to(gl.int64) * (64 * D) + head[:, None] * D + (column + dim)[None, :], y)
