"""The gradient of a relative table: one program walks a diagonal of blocks, which share their table
entries.

    d table[h, c] = Σ_b Σ_{i,j: index(i,j)=c} row_scale[b,h,i]·ds[b,h,i,j]

README.md here says how. On a grid the line is one row of patches, with one set of diagonals per
difference of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.backward import OutputGradient, loops
from zoo.attention.triton.common import (
    Geometry,
    Operands,
    cdiv,
    describable,
    descriptor,
    last_axis_contiguous,
    mm,
    on_device,
    padded_width,
    row_values,
    rows_of,
    scale_stride,
    shape_options,
    strided,
)

if TYPE_CHECKING:
    from zoo.attention.triton.plan import Plan

# (rows = keys, warps, stages) of a block by padded width; see forward.py.
BLOCKS_16 = {16: (64, 8, 2), 32: (64, 8, 2), 64: (64, 8, 2), 128: (64, 8, 2), 256: (16, 4, 2)}
BLOCKS_32 = {16: (32, 8, 2), 32: (32, 8, 2), 64: (16, 4, 2), 128: (16, 4, 2), 256: (16, 4, 1)}

# Diagonals are split into at most MOST_PARTS parts, until about PROGRAMS programs run.
PROGRAMS = 1024
MOST_PARTS = 8

LENGTHS = [
    "batch",
    "heads",
    "share",
    "queries",
    "keys",
    "offset",
    "window",
    "origin",
    "columns",
    "lines",
    "line_q",
    "line_k",
    "prefix",
    "low",
    "diagonals",
    "batch_parts",
    "tile_parts",
    "q_tiles",
    "scale_b",
]


@triton.jit
def _needed(
    plan, row, all_rows, q_tiles, diagonal, lo, hi, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """The part of query blocks [lo, hi) on a diagonal between the first and last that the plan
    requires."""
    first = hi
    last = lo
    for start in range(lo * BLOCK // TILE, tl.cdiv(hi * BLOCK, TILE), 128):
        tile = start + tl.arange(0, 128)
        left = tl.load(plan + row * q_tiles + tile, mask=tile < q_tiles, other=2147483647)
        right = tl.load(plan + (all_rows + row) * q_tiles + tile, mask=tile < q_tiles, other=0)
        block = tile * TILE // BLOCK
        end = ((tile + 1) * TILE - 1) // BLOCK + 1
        # Keys of the diagonal's blocks at this tile of queries, in tiles, rounded outwards.
        key_lo = (block - diagonal) * BLOCK // TILE
        key_hi = ((end - diagonal) * BLOCK + TILE - 1) // TILE
        needed = (left < key_hi) & (right > key_lo) & (left < right)
        first = tl.minimum(first, tl.min(tl.where(needed, block, hi), 0))
        last = tl.maximum(last, tl.max(tl.where(needed, end, lo), 0))
    return tl.maximum(first, lo), tl.minimum(last, hi)


@triton.jit(do_not_specialize=LENGTHS)
def _diagonal(
    grad_out,
    q,
    k,
    v,
    table,
    row_scale,
    segments,
    lse,
    delta,
    plan,
    partial,
    # Strides and sizes, as LENGTHS says.
    scale_b,
    batch,
    heads,
    share,
    queries,
    keys,
    offset,
    window,
    origin,
    columns,
    lines,
    line_q,
    line_k,
    prefix,
    low,
    diagonals,
    batch_parts,
    tile_parts,
    q_tiles,
    factor,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    LANES: tl.constexpr,
    DL: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    GRID: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """One part of the walk down one diagonal of blocks, of one head and, on a grid, one difference
    of rows of patches.

    `partial` is (batch parts, tile parts, H, differences, diagonals, 2·BLOCK): columns
    BLOCK·diagonal + (−BLOCK … BLOCK−1).
    """
    turn = tl.program_id(0) % diagonals
    rest = tl.program_id(0) // diagonals
    differences = 2 * lines - 1
    dy = rest % differences - (lines - 1)
    h = (rest // differences % heads).to(tl.int64)
    part = rest // differences // heads
    batch_part = part // tile_parts
    tile_part = part % tile_parts
    # Longest diagonals first: causal, the first is longest; else the middle one.
    place = turn
    if not CAUSAL:
        place = (diagonals - 1) // 2 + tl.where(turn % 2 == 1, (turn + 1) // 2, -(turn // 2))
    diagonal = low + place
    r = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    dx = diagonal * BLOCK + r - c
    distance = dx + offset
    if GRID:
        distance += dy * line_q
    valid = (dx > -line_k) & (dx < line_q)
    if CAUSAL:
        valid &= distance >= 0
    if window is not None:
        valid &= (distance < window) & (distance > -window)
    column = dx + origin
    if GRID:
        column += dy * (2 * line_q - 1)
    bias = tl.load(table + h * columns + column, mask=valid, other=float("-inf"))
    # Query blocks on the diagonal, and the first that crosses a line's end on either axis.
    lo = tl.maximum(diagonal, 0)
    hi = tl.minimum(tl.cdiv(line_q, BLOCK), tl.cdiv(line_k, BLOCK) + diagonal)
    edge = tl.minimum(line_q // BLOCK, line_k // BLOCK + diagonal)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for b_at in range(batch_part * batch // batch_parts, (batch_part + 1) * batch // batch_parts):
        b = b_at + 0 * h
        row = b * heads + h
        g = h // share
        first = lo
        last = hi
        if plan is not None:
            first, last = _needed(plan, row, batch * heads, q_tiles, diagonal, lo, hi, BLOCK, TILE)
        length = tl.cdiv(tl.maximum(last - first, 0), tile_parts)
        first = first + tile_part * length
        last = tl.maximum(tl.minimum(last, first + length), first)
        middle = tl.minimum(tl.maximum(edge, first), last)
        # See tile_at.
        opaque_zero = b_at // batch
        if PARTS == 1:
            middle = first
        # 0: tiles inside the lines, 1: tiles at their ends.
        for edges in tl.static_range(2 - PARTS, 2):
            begin = middle if edges == 1 else first
            count = last - middle if edges == 1 else middle - first
            walk = count
            if GRID:
                walk = count * (lines - tl.abs(dy))
            for t in tl.range(0, walk):
                m = begin + t
                q_base = 0 * dy
                k_base = 0 * dy
                if GRID:
                    m = begin + t % count
                    y = t // count + tl.maximum(dy, 0)
                    q_base = prefix + y * line_q
                    k_base = prefix + (y - dy) * line_q
                q_at = q_base + m * BLOCK
                k_at = k_base + (m - diagonal) * BLOCK
                q_end = q_base + line_q
                k_end = k_base + line_k
                rows = q_at + r
                cols = k_at + c
                q_tile = rows_of(
                    q, b, h, LANES, q_at, q_end, WIDTH_K, DK, BLOCK, edges == 1, TMA, opaque_zero
                )
                k_tile = rows_of(
                    k, b, g, LANES, k_at, k_end, WIDTH_K, DK, BLOCK, edges == 1, TMA, opaque_zero
                )
                z = mm(q_tile, tl.trans(k_tile))
                if LANES > 0:
                    q_lanes = rows_of(
                        q, b, h, 0, q_at, q_end, LANES, DL, BLOCK, edges == 1, False, opaque_zero
                    )
                    k_lanes = rows_of(
                        k, b, g, 0, k_at, k_end, LANES, DL, BLOCK, edges == 1, False, opaque_zero
                    )
                    z = mm(q_lanes, tl.trans(k_lanes), z)
                z *= factor
                lse_rows = row_values(lse + row * queries, rows, q_end, float("inf"), edges == 1)
                delta_rows = row_values(delta + row * queries, rows, q_end, 0.0, edges == 1)
                if row_scale is not None:
                    scale = row_values(
                        row_scale + b * scale_b + h * queries, rows, q_end, 1.0, edges == 1
                    )
                    p = tl.exp2(scale * z + (scale * bias - lse_rows)) * scale
                else:
                    p = tl.exp2(z + bias - lse_rows)
                if edges == 1:
                    p = tl.where((rows < q_end) & (cols < k_end), p, 0.0)
                if segments is not None:
                    row_ids = row_values(segments + b * keys + offset, rows, q_end, 0, edges == 1)
                    p = tl.where(
                        row_ids == row_values(segments + b * keys, cols, k_end, 0, edges == 1),
                        p,
                        0.0,
                    )
                do_tile = rows_of(
                    grad_out, b, h, 0, q_at, q_end, WIDTH_V, DV, BLOCK, edges == 1, TMA, opaque_zero
                )
                v_tile = rows_of(
                    v, b, g, 0, k_at, k_end, WIDTH_V, DV, BLOCK, edges == 1, TMA, opaque_zero
                )
                total += p * (mm(do_tile, tl.trans(v_tile)) - delta_rows)
    # Entries with bias −∞ are hidden in every tile of the diagonal; discard whatever they
    # accumulated.
    total = tl.where(bias == float("-inf"), 0.0, total)
    # Adds an opaque 0: r is computed again and not kept in registers across the loops.
    r += turn // (turn + lines)
    # Rotates row r by r. Column s then has r − c = s from row s on, s − BLOCK above it.
    sheared = tl.gather(total, (r - c + BLOCK) % BLOCK, 1)
    at = partial + (part * heads + h) * (differences * diagonals * 2 * BLOCK)
    at += ((dy + lines - 1) * diagonals + place) * 2 * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, tl.sum(tl.where(r < c, sheared, 0.0), 0))
    tl.store(at + BLOCK, tl.sum(tl.where(r < c, 0.0, sheared), 0))


def _diagonal_range(
    g: Geometry, line_q: int, line_k: int, block: int, constant_from: int = 0
) -> tuple[int, int]:
    """First diagonal of blocks and their count, of those with a visible pair at a distance below
    `constant_from`, if any. On a grid only the lines' ends bound them."""
    # of i − j
    low = 1 - line_k
    high = line_q - 1
    if not g.grid_width:
        if g.causal:
            low = max(low, -g.offset)
        if g.window:
            low = max(low, 1 - g.window - g.offset)
            high = min(high, g.window - 1 - g.offset)
        if constant_from:
            high = min(high, constant_from - 1 - g.offset)
    # Block diagonal d holds differences d·block ± (block − 1).
    first = -((block - 1 - low) // block)
    last = (high + block - 1) // block
    return first, max(last - first + 1, 1)


def _assemble(partial: Tensor, low: int, origin: int, columns: int) -> Tensor:
    """(…, columns) from (…, diagonals, 2·BLOCK): diagonal d's second half is where d + 1's first
    half is."""
    block = partial.shape[-1] // 2
    lower = partial[..., :block]
    upper = partial[..., block:]
    line = (F.pad(upper, (0, 0, 1, 0)) + F.pad(lower, (0, 0, 0, 1))).flatten(-2)
    # Column of the first entry.
    start = (low - 1) * block + origin
    begin = max(start, 0)
    end = min(start + line.shape[-1], columns)
    if end <= begin:
        return line.new_zeros(*line.shape[:-1], columns)
    return F.pad(line[..., begin - start : end - start], (begin, columns - end))


def table_gradient(
    call: Operands, upstream: OutputGradient, plan: Plan | None = None, constant_from: int = 0
) -> Tensor:
    """(H, N) float32: the gradient of the table of a call that has one, summed over the batch.

    constant_from: on a line, causal; the sum over the columns of this distance or more stands in
    its column, and is minus that of all others, since Σ_j ds_ij = 0: no diagonals are walked for
    it. 0: every column for itself.
    """
    g = call.geometry
    table2 = call.table2
    assert table2 is not None
    q = last_axis_contiguous(call.q)
    k = last_axis_contiguous(call.k)
    v = last_axis_contiguous(call.v)
    row_scale = None if call.row_scale is None else call.row_scale.contiguous()
    segments = None if call.segments is None else call.segments.contiguous()
    grad_out, lse2, delta, _ = upstream
    grid = g.grid_width > 0
    if grid:
        line_q = g.grid_width
        line_k = g.grid_width
        lines = g.grid_height
    else:
        line_q = g.queries
        line_k = g.keys
        lines = 1
    options = shape_options(g)
    width = max(options["DK"], options["DV"])
    block, warps, stages = (BLOCKS_16 if q.element_size() == 2 else BLOCKS_32)[width]
    block = max(16, block * common.TILE // 64)
    if grid:
        block = min(block, padded_width(g.grid_width))
    low, diagonals = _diagonal_range(g, line_q, line_k, block, constant_from)
    differences = 2 * lines - 1
    programs = g.heads * differences * diagonals
    # The batch is split first; then a line, at most into its blocks.
    parts = min(MOST_PARTS, cdiv(PROGRAMS, programs))
    batch_parts = min(parts, g.batch)
    tile_parts = 1
    if not grid:
        tile_parts = max(1, min(parts // batch_parts, cdiv(min(line_q, line_k), block)))
    parts = batch_parts * tile_parts
    partial = lse2.new_empty(parts, g.heads, differences, diagonals, 2 * block)
    columns = table2.shape[-1]
    with on_device(q):
        tma = not (grid or options["LANES"]) and describable(grad_out, q, k, v)

        def tiles_of(x: Tensor) -> object:
            return descriptor(x, block) if tma else strided(x)

        _diagonal[(parts * programs,)](
            grad_out=tiles_of(grad_out),
            q=tiles_of(q),
            k=tiles_of(k),
            v=tiles_of(v),
            table=table2,
            row_scale=row_scale,
            segments=segments,
            lse=lse2,
            delta=delta,
            # The plan's tiles are of tokens, which on a grid lie on no such diagonals.
            plan=None if plan is None or grid else plan.rows,
            partial=partial,
            scale_b=scale_stride(row_scale),
            batch=g.batch,
            heads=g.heads,
            share=g.heads // g.groups,
            queries=g.queries,
            keys=g.keys,
            offset=g.offset,
            window=g.window or None,
            origin=columns // 2 if grid else g.origin,
            columns=columns,
            lines=lines,
            line_q=line_q,
            line_k=line_k,
            prefix=g.prefix,
            low=low,
            diagonals=diagonals,
            batch_parts=batch_parts,
            tile_parts=tile_parts,
            q_tiles=cdiv(g.queries, common.TILE),
            factor=g.factor,
            BLOCK=block,
            TILE=common.TILE,
            GRID=grid,
            PARTS=loops(q, segments),
            TMA=tma,
            num_warps=4 if tma else warps,
            num_stages=stages,
            **options,
        )
    partial = partial.sum(0)
    if grid:
        return _assemble(partial, low, g.grid_width - 1, 2 * g.grid_width - 1).flatten(1)
    gradient = _assemble(partial[:, 0], low, g.origin, columns)
    if constant_from:
        first = g.origin - g.offset + constant_from
        gradient[:, first:] = 0.0
        gradient[:, first] = -gradient.sum(1, dtype=torch.float64)
    return gradient
