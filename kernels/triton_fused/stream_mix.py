# SPDX-License-Identifier: Apache-2.0
"""A sublayer within a hyper-connection (arXiv 2512.24880): the kernels of stream_kernels.py and hyper_maps.py as two differentiable functions.

    mix               = (streams @ fn^T) * rsqrt(mean(streams^2) + norm_eps)      [T, n (2 + n)]
    read, write, comb = maps of mix (hyper_maps.py)
    x                 = sum_j read[j] * streams[j]                                 input of the sublayer, which turns it into y
    mixed[s]          = sum_j comb[j, s] * streams[j]
    out[s]            = mixed[s] + write[s] * y                                    the new streams

`mixed` is never formed: the first function returns the streams in its place and the second applies comb as it writes. The gradient of `mixed` is that
of `out` as it is, so nothing of the size of the streams is written for it, and the first function's backward turns it, with those of x and write,
into one gradient of the streams. All sums run in a fixed order.

Legend: T tokens, n streams, d hidden, R = n (2 + n) rows of fn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.triton_fused import hyper_maps, stream_kernels
from kernels.triton_fused.column_sum import column_sum
from kernels.triton_fused.ops import on_device_of
from kernels.triton_fused.requirements import DTYPES
from kernels.triton_fused.rounding import ceil_div, power_of_two

PROGRAMS = 528  # of the gradient of fn, about: its tokens are divided so that columns times shares come to this; four a multiprocessor of an H100


def _row_sizes(streams: Tensor) -> dict[str, int]:
    """One warp a token: 8 features of every stream a thread, 4 of 8 streams."""
    _, n, d = streams.shape
    return {"N": n, "D": d, "BLOCK_D": min(256 if n <= 4 else 128, max(8, power_of_two(d))), "num_warps": 1}


def _wide(streams: Tensor) -> bool:
    """Whether the streams have more bits than a tf32 number."""
    return streams.dtype == torch.float32


def _open(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, steps: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, d] in the dtype of the streams and, in fp32, mix [T, R], norm [T], read [T, n], write [T, n], comb [T, n, n] (no tokens in the last two
    for 0 steps)."""
    (tokens, n, d), rows = streams.shape, fn.shape[0]
    mapped = tokens if steps else 0
    shapes = (tokens, rows), (tokens,), (tokens, n), (mapped, n), (mapped, n, n)
    mix, norm, read, write, comb = (torch.empty(shape, dtype=torch.float32, device=streams.device) for shape in shapes)
    x = torch.empty(tokens, d, dtype=streams.dtype, device=streams.device)
    if tokens:
        # the larger the tile, the fewer times fn is read; the smaller, the more multiprocessors have one
        block_t = 16 if tokens < 8192 or rows > 32 else 32 if tokens < 16384 else 64
        sizes = {"BLOCK_T": block_t, "BLOCK_K": 64, "BLOCK_R": max(16, power_of_two(rows)), "BLOCK_D": min(max(2048 // block_t, 64), power_of_two(d))}
        operands = (streams, fn, scale, base, mix, norm, read, write, comb, x, tokens, eps, norm_eps)
        stream_kernels.open_kernel[(ceil_div(tokens, block_t),)](
            *operands, WIDE=_wide(streams), STEPS=steps, N=n, D=d, R=rows, **sizes, num_warps=4, num_stages=4 if rows <= 32 else 3
        )
    return x, mix, norm, read, write, comb


def _products(streams: Tensor, grad: Tensor | None, d_x: Tensor) -> tuple[Tensor, Tensor | None]:
    """d_read [T, n] and, where the mixed streams have a gradient, d_comb [T, n, n]; fp32."""
    tokens, n, _ = streams.shape
    d_read = torch.empty(tokens, n, dtype=torch.float32, device=streams.device)
    d_comb = None if grad is None else torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)
    outs = (d_read, d_read if d_comb is None else d_comb)
    operands = (streams, streams if grad is None else grad, d_x)
    stream_kernels.products_kernel[(tokens,)](*operands, *outs, MIXED=grad is not None, **_row_sizes(streams))
    return d_read, d_comb


def _streams_backward(
    streams: Tensor, fn: Tensor, grad: Tensor | None, d_x: Tensor, read: Tensor, comb: Tensor | None, mix: Tensor, d_mix: Tensor, norm: Tensor
) -> Tensor:
    """The gradient of the streams [T, n, d] from everything that reads them."""
    tokens, n, d = streams.shape
    out = torch.empty_like(streams)
    operands = (streams, fn, streams if grad is None else grad, d_x, read, read if comb is None else comb, mix, d_mix, norm, out, tokens)
    few = n <= 4  # of 8 streams there are registers for a quarter of the tokens only and half of the features
    lane, warps = (16 // streams.element_size(), 4) if few else (4, 1)
    columns = min(128, ceil_div(d, 4 * lane) * 4 * lane)  # more, and fewer programs leave multiprocessors idle; less, and d_mix is read more often
    sizes = {"N": n, "D": d, "R": fn.shape[0], "COLUMNS": columns, "LANE": lane, "BLOCK_R": max(16, power_of_two(fn.shape[0])), "WARPS": warps}
    grid = (ceil_div(d, columns) * ceil_div(tokens, 16 * warps),)
    stream_kernels.streams_backward_kernel[grid](
        *operands, WIDE=_wide(streams), MIXED=grad is not None, AHEAD=few, **sizes, num_warps=warps, num_stages=2 if few else 1
    )
    return out


def _fn_backward(streams: Tensor, fn: Tensor, d_mix: Tensor, norm: Tensor) -> Tensor:
    """The gradient of fn [R, n * d]: partial sums over shares of the tokens, then their sum."""
    tokens, (rows, columns) = streams.shape[0], fn.shape
    block_t, block_k = 32, 128
    blocks = ceil_div(columns, block_k)
    share = block_t * ceil_div(ceil_div(tokens, block_t), max(1, PROGRAMS // blocks))
    shares = ceil_div(tokens, share)
    partial = torch.empty(shares, rows, columns, dtype=torch.float32, device=streams.device)
    sizes = {"K": columns, "R": rows, "BLOCK_T": block_t, "BLOCK_K": block_k, "BLOCK_R": max(16, power_of_two(rows))}
    warps = 4 if rows <= 32 else 8
    stream_kernels.fn_backward_kernel[(blocks, shares)](streams, d_mix, norm, partial, tokens, share, WIDE=_wide(streams), **sizes, num_warps=warps)
    return column_sum(partial, fn.dtype)


class _Open(torch.autograd.Function):
    """streams -> x, the streams in place of `mixed`, write and comb. comb has no gradient of its own: it acts within `mixed` alone."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams, fn, scale, base = streams.contiguous(), fn.contiguous(), scale.contiguous(), base.contiguous()
        with on_device_of(streams):
            x, mix, norm, read, write, comb = _open(streams, fn, scale, base, 2 * iterations - 1, eps, norm_eps)
        ctx.save_for_backward(streams, fn, scale, base, mix, norm, read, comb)
        ctx.settings = iterations, eps
        ctx.mark_non_differentiable(comb)
        ctx.set_materialize_grads(False)
        return x, streams, write, comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, grad: Tensor | None, d_write: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        streams, fn, scale, base, mix, norm, read, comb = ctx.saved_tensors
        if streams.shape[0] == 0:
            return torch.empty_like(streams), torch.zeros_like(fn), torch.zeros_like(scale), torch.zeros_like(base), None, None, None
        d_x = torch.zeros_like(streams[:, 0]) if d_x is None else d_x.contiguous()
        grad = torch.zeros_like(streams) if grad is None else grad.contiguous()
        d_write = torch.zeros_like(read) if d_write is None else d_write.contiguous()
        d_streams = d_fn = None
        with on_device_of(streams):
            d_read, d_comb = _products(streams, grad, d_x)
            assert d_comb is not None
            d_mix, d_scale, d_base = hyper_maps.maps_backward(mix, scale, base, d_read, d_write, d_comb, *ctx.settings)
            if ctx.needs_input_grad[0]:
                d_streams = _streams_backward(streams, fn, grad, d_x, read, comb, mix, d_mix, norm)
            if ctx.needs_input_grad[1]:
                d_fn = _fn_backward(streams, fn, d_mix, norm)
        return d_streams, d_fn, d_scale, d_base, None, None, None


class _Close(torch.autograd.Function):
    """The new streams. The gradient of `mixed` is the incoming one."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, write: Tensor, comb: Tensor) -> Tensor:
        y = y.contiguous()
        ctx.save_for_backward(y, write)
        out = torch.empty_like(streams)
        if streams.shape[0]:
            with on_device_of(streams):
                stream_kernels.write_kernel[(streams.shape[0],)](streams, y, write, comb, out, **_row_sizes(streams))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y, write = ctx.saved_tensors
        grad = grad.contiguous()
        d_y, d_write = torch.empty_like(y), torch.empty_like(write)
        if grad.shape[0]:
            with on_device_of(grad):
                stream_kernels.write_backward_kernel[(grad.shape[0],)](grad, y, write, d_y, d_write, **_row_sizes(grad))
        return grad, d_y, d_write, None


class _Head(torch.autograd.Function):
    """Collapse of the streams by sigmoid(mix * scale + base) + eps."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
        streams, fn, base = streams.contiguous(), fn.contiguous(), base.contiguous()
        with on_device_of(streams):
            x, mix, norm, read, _, _ = _open(streams, fn, scale, base, 0, eps, norm_eps)
        ctx.save_for_backward(streams, fn, scale, mix, norm, read)
        ctx.eps = eps
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        streams, fn, scale, mix, norm, read = ctx.saved_tensors
        if streams.shape[0] == 0:
            return torch.empty_like(streams), torch.zeros_like(fn), torch.zeros_like(scale), torch.zeros_like(scale).expand(fn.shape[0]), None, None
        d_x = d_x.contiguous()
        d_streams = d_fn = None
        with on_device_of(streams):
            d_read, _ = _products(streams, None, d_x)
            gate = read - ctx.eps
            d_z = d_read * gate * (1 - gate)
            d_mix = d_z * scale
            if ctx.needs_input_grad[0]:
                d_streams = _streams_backward(streams, fn, None, d_x, read, None, mix, d_mix, norm)
            if ctx.needs_input_grad[1]:
                d_fn = _fn_backward(streams, fn, d_mix, norm)
        return d_streams, d_fn, (d_z * mix).sum().view_as(scale), d_z.sum(0), None, None


def _check(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, per_stream: Callable[[int], int], scales: int) -> None:
    if streams.dim() != 3 or streams.shape[1] not in hyper_maps.STREAMS or streams.dtype not in DTYPES:
        raise ValueError(
            f"streams must be [T, n, d] with n of {', '.join(map(str, hyper_maps.STREAMS))} streams in {', '.join(map(str, DTYPES))}, "
            f"got {list(streams.shape)} in {streams.dtype}"
        )
    n, d = streams.shape[1:]
    rows = per_stream(n)
    if fn.shape != (rows, n * d) or scale.shape != (scales,) or base.shape != (rows,):
        got = ", ".join(str(list(t.shape)) for t in (fn, scale, base))
        raise ValueError(f"fn must be [{rows}, {n * d}], scale [{scales}] and base [{rows}] for streams {list(streams.shape)}, got {got}")
    if {fn.dtype, scale.dtype, base.dtype} != {torch.float32}:
        raise ValueError(f"fn, scale and base must be float32, got {fn.dtype}, {scale.dtype} and {base.dtype}")


def around_sublayer(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Input of a sublayer [T, d] in the dtype of the streams, and the function from its output y [T, d] to the new streams [T, n, d].

    Args:
        streams: [T, n, d], n one of 1, 2, 4, 8, in bfloat16, float16 or float32.
        fn: float32 [n (2 + n), n d]; scale: float32 [3]; base: float32 [n (2 + n)].
        iterations: row and column normalisations of comb, 1 or more. eps: of the maps. norm_eps: of the norm before the projection.

    Raises:
        ValueError: shapes, dtypes or a number of streams that the kernels do not take; from the function, a y that is not [T, d].
    """
    _check(streams, fn, scale, base, lambda n: n * (2 + n), 3)
    if iterations < 1:
        raise ValueError(f"iterations must be 1 or more, got {iterations}")
    x, mixed, write, comb = _Open.apply(streams, fn, scale, base, iterations, eps, norm_eps)

    def put_back(y: Tensor) -> Tensor:
        if y.shape != x.shape or y.dtype not in DTYPES:
            raise ValueError(f"the output of the sublayer must be {list(x.shape)} in {', '.join(map(str, DTYPES))}, got {list(y.shape)} in {y.dtype}")
        out: Tensor = _Close.apply(mixed, y, write, comb)
        return out

    return x, put_back


def collapse_streams(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """The closing head: sum over streams of (sigmoid(mix * scale + base) + eps) * streams, [T, d] in the dtype of the streams.

    Args:
        streams: [T, n, d] as for `around_sublayer`. fn: float32 [n, n d]; scale: float32 [1]; base: float32 [n].

    Raises:
        ValueError: shapes, dtypes or a number of streams that the kernels do not take.
    """
    _check(streams, fn, scale, base, lambda n: n, 1)
    out: Tensor = _Head.apply(streams, fn, scale, base, eps, norm_eps)
    return out
