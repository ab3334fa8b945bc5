"""Tile helpers of the backward pass: loads and stores of rows, table entries, and the range of blocks to visit."""

from __future__ import annotations

import triton
import triton.language as tl

from zoo.attention.triton.common import code_of, narrow, table_load

__all__ = ["entries", "place_of", "planned", "row_values", "split", "store_tile", "tile_at"]


@triton.jit
def tile_at(
    matrix, start, stride, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
    opaque_zero=0
):  # fmt: skip
    """(BLOCK, PADDED) rows from `start` on of a (count, WIDTH) matrix, zeros beyond its last column and, if MASKED, row.

    `opaque_zero`: a runtime 0 that the compiler cannot fold; it stops it from hoisting the address arithmetic out of earlier
    loops and spilling it.
    """
    r, c = tl.arange(0, BLOCK) + opaque_zero, tl.arange(0, PADDED)
    # The first row's offset may pass 2^31, offsets inside the tile do not.
    at = matrix + start * tl.cast(stride, tl.int64) + (r[:, None] * stride + c[None, :])
    if MASKED and WIDTH < PADDED:
        return tl.load(at, mask=(start + r[:, None] < count) & (c[None, :] < WIDTH), other=0.0)
    if MASKED:
        return tl.load(at, mask=start + r[:, None] < count, other=0.0)
    if WIDTH < PADDED:
        return tl.load(at, mask=c[None, :] < WIDTH, other=0.0)
    return tl.load(at)


@triton.jit
def row_values(vector, rows, count, beyond: tl.constexpr, MASKED: tl.constexpr):
    """One value per row, in the shape of `rows`; `beyond` for rows from `count` on, if MASKED."""
    if MASKED:
        return tl.load(vector + rows, mask=rows < count, other=beyond)
    return tl.load(vector + rows)


@triton.jit
def store_tile(
    matrix, tile, start, stride, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, opaque_zero=0
):
    """Store the rows of `tile` inside a (count, WIDTH) matrix, rounded to its dtype. `opaque_zero`: as for `tile_at`."""
    r, c = tl.arange(0, BLOCK) + opaque_zero, tl.arange(0, PADDED)
    at = matrix + start * tl.cast(stride, tl.int64) + (r[:, None] * stride + c[None, :])
    tl.store(at, narrow(tile, matrix.dtype.element_ty), mask=(start + r[:, None] < count) & (c[None, :] < WIDTH))


@triton.jit
def place_of(tokens, grid_width, prefix, GRID: tl.constexpr):
    """The value whose query − key difference indexes the table: the token's index on a line, its code on a grid."""
    if GRID:
        return code_of(tokens, grid_width, prefix)
    return tokens


@triton.jit
def entries(
    table, row_start, col_start, rows, cols, q_place, k_place, seen, origin, prefix,
    GRID: tl.constexpr, PREFIX: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Table entries of the tile whose first query and key are `row_start` and `col_start`, in the shape that `rows` and `cols`
    broadcast to; if MASKED, 0 outside the table's reach: for hidden pairs, and for tokens off the grid.

    On a line the address is one shared by the tile plus constant ranges used nowhere else, so that the compiler loads each
    distinct entry of a thread once (see `common.bias_of`).
    """
    if GRID:
        at = table + (q_place - k_place + origin)
    else:
        R: tl.constexpr = rows.numel
        C: tl.constexpr = cols.numel
        r = tl.reshape(tl.arange(R, 2 * R), rows.shape).to(tl.int64)
        c = tl.reshape(tl.arange(C, 2 * C), cols.shape).to(tl.int64)
        at = table + (origin + C - R) + (row_start - col_start) + r - c
    if PREFIX and MASKED:
        seen = seen & (rows >= prefix) & (cols >= prefix)
    return table_load(at, seen, MASKED)


@triton.jit
def planned(plan, row, all_rows, tiles, start, other, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """[lo, hi) in tokens of the other axis, of length `other`, that the plan requires for the block at `start`."""
    COUNT: tl.constexpr = (BLOCK + TILE - 1) // TILE
    tile = start // TILE + tl.arange(0, COUNT)
    lo = tl.min(tl.load(plan + row * tiles + tile, mask=tile < tiles, other=2147483647), 0)
    hi = tl.max(tl.load(plan + (all_rows + row) * tiles + tile, mask=tile < tiles, other=0), 0)
    return tl.minimum(lo, other) * TILE, hi * TILE


@triton.jit
def split(first, last, full_first, full_last, BLOCK: tl.constexpr):
    """Blocks [lo, hi) that hold tokens [first, last), and [full_lo, full_hi) of them wholly in [full_first, full_last)."""
    lo = tl.maximum(first, 0) // BLOCK
    hi = tl.maximum(tl.cdiv(tl.maximum(last, 0), BLOCK), lo)
    full_lo = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_first, 0), BLOCK), lo), hi)
    full_hi = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_lo), hi)
    return lo, full_lo, full_hi, hi
