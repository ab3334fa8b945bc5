"""Tiles of logits that a call needs: visible ones whose weight is not provably negligible.

For query tile m and key tile n of one head, with logits z minus a constant per row (the row's lanes
times the middle key lanes of its own tile, plus the row's scale times the table's entry for its own
key):

    upper(m,n) = max‖q content‖·max‖k content‖ + Σ_lanes sup(q·k) + sup(row_scale·table)
    lower(m,n) = the same with minus and inf
    floor(m)   = max of: lower over the tiles that hold the own keys of m;
                 lower of any tile with a key visible to every row of m
    m skips n if upper(m,n) < floor(m) − 24·ln 2 − ln S

in natural-log units, q scaled.

Every row of m then has a visible key whose weight is at least 2^24·S times each skipped one, so all
skipped weights of a row together are below 2^−24 of its sum. Bounds are rounded outwards by the
float32 error of their sums. Memory is O((T + S)/TILE) per head and lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.common import (
    Geometry,
    Operands,
    cdiv,
    last_axis_contiguous,
    on_device,
    scale_stride,
)

# Block sizes of the plan's kernels: query and key tiles, tiles and columns of q and k, chunks of
# the table, and tiles where little else is held. The interpreter pays per program; the device pays
# in registers: 8 × 32 tiles on 4 warps take 128 to 168 on sm_90, larger blocks spill.
QUERIES = 16 if common.INTERPRET.value else 8
VECTOR = 64 if common.INTERPRET.value else 32
SEVERAL = 8 if common.INTERPRET.value else 1
COLUMNS = 64
CHUNKS = 16
BLOCK = 64


@dataclass(frozen=True)
class Plan:
    """The tiles to compute, as intervals [lo, hi), of which any superset is correct too: rows (2,
    B·H, ceil(T/tile)) int32, key tiles that each query tile needs; lo = hi where there are none."""

    rows: Tensor
    geometry: Geometry
    tile: int = field(default_factory=lambda: common.TILE)

    @cached_property
    def cols(self) -> Tensor:
        """(2, B·H, ceil(S/tile)) int32, query tiles that need each key tile, as the backward pass
        reads them."""
        count, q_tiles = self.rows.shape[1:]
        k_tiles = cdiv(self.geometry.keys, self.tile)
        cols = torch.empty(2, count, k_tiles, dtype=torch.int32, device=self.rows.device)
        with on_device(cols):
            column_intervals[(count * cdiv(k_tiles, BLOCK),)](
                cols=cols,
                rows=self.rows,
                count=count,
                q_tiles=q_tiles,
                k_tiles=k_tiles,
                offset=self.geometry.offset,
                TILE=self.tile,
                BLOCK=BLOCK,
                num_warps=4,
            )
        return cols


# Sizes and strides that change from call to call and must not trigger recompilation.
SHAPES = [
    "batch",
    "heads",
    "groups",
    "q_tiles",
    "k_tiles",
    "queries",
    "keys",
    "columns",
    "count",
    "chunk_count",
    "steps",
    "lanes",
    "offset",
    "window",
    "origin",
    "prefix",
    "scale_batch",
    "scale_head",
    "ids_batch",
    "table_head",
]


def _kernel(fn):
    """A Triton kernel compiled once for all sizes."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return triton.jit(
        fn,
        do_not_specialize=[name for name in SHAPES if name in names],
        do_not_specialize_on_alignment=[
            name for name in ("scale", "segments", "table", "entries") if name in names
        ],
    )


@triton.jit
def _tile_extremes(
    program,
    x,
    scale,
    segments,
    stats,
    ids,
    # Sizes and strides, as SHAPES says.
    batch,
    heads,
    tiles,
    length,
    width,
    lanes,
    offset,
    factor,
    inflate,
    x_batch,
    x_head,
    x_row,
    scale_batch,
    scale_head,
    scale_row,
    ids_batch,
    ids_column,
    TILE: tl.constexpr,
    SEVERAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    IDS: tl.constexpr,
):
    """Extremes of SEVERAL tiles of rows of a head of row scale·factor·x; norms are rounded up, +∞
    if a value is not finite."""
    blocks = (tiles + SEVERAL - 1) // SEVERAL
    head_at = (program // blocks).to(tl.int64)
    b = head_at // heads
    h = head_at % heads
    first_tile = program % blocks * SEVERAL
    tile = first_tile + tl.arange(0, SEVERAL)
    exists = tile < tiles
    row = tl.arange(0, SEVERAL)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    real = row < length - first_tile * TILE
    x += b * x_batch + h * x_head + first_tile.to(tl.int64) * TILE * x_row
    plane = tl.cast(batch * heads, tl.int64) * tiles
    stats += head_at * tiles + tile
    if IDS:
        # One head of each batch row writes the extremes of its document ids.
        at_id = (
            segments
            + b * ids_batch
            + tl.cast(first_tile * TILE + offset, tl.int64) * ids_column
            + row * ids_column
        )
        document = tl.load(at_id, mask=real & (h == 0), other=0).to(tl.int32)
        place = ids + b * tiles + tile
        tl.store(
            place, tl.min(tl.where(real, document, 0x7FFFFFFF), axis=1), mask=exists & (h == 0)
        )
        place += batch * tiles
        tl.store(
            place, tl.max(tl.where(real, document, -0x80000000), axis=1), mask=exists & (h == 0)
        )
    squares = tl.zeros((SEVERAL, TILE), tl.float32)
    wrong = tl.zeros((SEVERAL, TILE), tl.int32)
    row_scale = tl.full((SEVERAL, TILE), 1.0, tl.float32)
    if SCALED:
        scale += b * scale_batch + h * scale_head + first_tile.to(tl.int64) * TILE * scale_row
        row_scale = tl.load(scale + row.to(tl.int64) * scale_row, mask=real, other=0.0).to(
            tl.float32
        )
        wrong |= (~(tl.abs(row_scale) < float("inf"))).to(tl.int32)
        place = stats + (1 + 2 * lanes) * plane
        tl.store(place, tl.min(tl.where(real, row_scale, float("inf")), axis=1), mask=exists)
        tl.store(
            place + plane, tl.max(tl.where(real, row_scale, -float("inf")), axis=1), mask=exists
        )
    row_scale *= factor
    for first in range(0, width, COLUMNS):
        cols = first + tl.arange(0, COLUMNS)
        inside = real[:, :, None] & (cols[None, None, :] < width)
        at = x + row[:, :, None].to(tl.int64) * x_row + cols[None, None, :]
        part = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        part *= row_scale[:, :, None]
        wrong |= tl.max((~(tl.abs(part) < float("inf"))).to(tl.int32), axis=2)
        content = tl.where(cols[None, None, :] >= lanes, part, 0.0)
        squares += tl.sum(content * content, axis=2)
        if first < lanes:
            low = tl.min(tl.where(real[:, :, None], part, float("inf")), axis=1)
            high = tl.max(tl.where(real[:, :, None], part, -float("inf")), axis=1)
            places = stats[:, None] + (1 + 2 * cols)[None, :] * plane
            mask = exists[:, None] & (cols < lanes)[None, :]
            tl.store(places, low, mask=mask)
            tl.store(places + plane, high, mask=mask)
    # The constant 2^-50 covers squares that underflow.
    norm = tl.sqrt(tl.max(squares, axis=1)) * inflate + 8.8817841970012523e-16
    # The bound of a tile with a value that is not finite is +∞: it is needed.
    tl.store(stats, tl.where(tl.max(wrong, axis=1) > 0, float("inf"), norm), mask=exists)


@triton.jit
def _chunk_extremes(
    program,
    table,
    chunks,
    heads,
    columns,
    count,
    table_head,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Minimum and maximum of CHUNKS chunks of one head's table; the maximum is +∞ if there is
    NaN."""
    blocks = (count + CHUNKS - 1) // CHUNKS
    head = (program // blocks).to(tl.int64)
    chunk = program % blocks * CHUNKS + tl.arange(0, CHUNKS)
    column = chunk[:, None] * TILE + tl.arange(0, TILE)[None, :]
    real = column < columns
    part = tl.load(table + head * table_head + column, mask=real, other=0.0).to(tl.float32)
    part = tl.where(part == part, part, float("inf"))
    place = chunks + head * count + chunk
    tl.store(place, tl.min(tl.where(real, part, float("inf")), axis=1), mask=chunk < count)
    tl.store(
        place + heads * count,
        tl.max(tl.where(real, part, -float("inf")), axis=1),
        mask=chunk < count,
    )


@_kernel
def extremes(
    q,
    k,
    scale,
    segments,
    table,
    q_stats,
    k_stats,
    q_ids,
    k_ids,
    chunks,
    # Sizes and strides, as SHAPES says.
    batch,
    heads,
    groups,
    q_tiles,
    k_tiles,
    queries,
    keys,
    width,
    lanes,
    offset,
    factor,
    inflate,
    columns,
    chunk_count,
    table_head,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    scale_batch,
    scale_head,
    scale_row,
    ids_batch,
    ids_column,
    TILE: tl.constexpr,
    SEVERAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    IDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Of tiles of queries with their row scale, of tiles of keys, and of chunks of the table, in
    the order of programs."""
    program = tl.program_id(0)
    q_programs = batch * heads * ((q_tiles + SEVERAL - 1) // SEVERAL)
    k_programs = batch * groups * ((k_tiles + SEVERAL - 1) // SEVERAL)
    if program < q_programs:
        _tile_extremes(
            program=program,
            x=q,
            scale=scale,
            segments=segments,
            stats=q_stats,
            ids=q_ids,
            batch=batch,
            heads=heads,
            tiles=q_tiles,
            length=queries,
            width=width,
            lanes=lanes,
            offset=offset,
            factor=factor,
            inflate=inflate,
            x_batch=q_batch,
            x_head=q_head,
            x_row=q_row,
            scale_batch=scale_batch,
            scale_head=scale_head,
            scale_row=scale_row,
            ids_batch=ids_batch,
            ids_column=ids_column,
            TILE=TILE,
            SEVERAL=SEVERAL,
            COLUMNS=COLUMNS,
            SCALED=SCALED,
            IDS=IDS,
        )
    elif program < q_programs + k_programs:
        # Keys have no row scale and start at position 0.
        _tile_extremes(
            program=program - q_programs,
            x=k,
            scale=k,
            segments=segments,
            stats=k_stats,
            ids=k_ids,
            batch=batch,
            heads=groups,
            tiles=k_tiles,
            length=keys,
            width=width,
            lanes=lanes,
            offset=0,
            factor=1.0,
            inflate=inflate,
            x_batch=k_batch,
            x_head=k_head,
            x_row=k_row,
            scale_batch=0,
            scale_head=0,
            scale_row=0,
            ids_batch=ids_batch,
            ids_column=ids_column,
            TILE=TILE,
            SEVERAL=SEVERAL,
            COLUMNS=COLUMNS,
            SCALED=False,
            IDS=IDS,
        )
    elif TABLE:
        _chunk_extremes(
            program - q_programs - k_programs,
            table,
            chunks,
            heads,
            columns,
            chunk_count,
            table_head,
            TILE,
            CHUNKS,
        )


@triton.jit
def _largest_product(a_low, a_high, b_low, b_high):
    """sup of a·b over two intervals; +∞ where a product is NaN."""
    first = a_low * b_low
    second = a_low * b_high
    third = a_high * b_low
    fourth = a_high * b_high
    valid = (first == first) & (second == second) & (third == third) & (fourth == fourth)
    largest = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    return tl.where(valid, largest, float("inf"))


@triton.jit
def _finite_size(term):
    """|term|, and 0 for an infinity, which has no rounding error."""
    return tl.where(tl.abs(term) < float("inf"), tl.abs(term), 0.0)


@triton.jit
def _content_and_lanes(stats, tiles, LOWER: tl.constexpr):
    """(QUERIES, VECTOR) sup (of the negative, if LOWER) of content and lanes less the row's
    constant; its terms' sizes."""
    q_at, k_at, q_plane, k_plane, k_tiles, own_first, own_last, lanes = stats
    inside = tiles < k_tiles
    total = tl.load(q_at)[:, None] * tl.load(k_at + tiles, mask=inside, other=0.0)[None, :]
    size = total
    for _ in range(0, lanes):
        low_at = k_at + k_plane
        high_at = k_at + 2 * k_plane
        own_low = tl.minimum(tl.load(low_at + own_first), tl.load(low_at + own_last))
        own_high = tl.maximum(tl.load(high_at + own_first), tl.load(high_at + own_last))
        middle = 0.5 * own_low + 0.5 * own_high
        low = tl.load(low_at + tiles, mask=inside, other=0.0)[None, :] - middle[:, None]
        high = tl.load(high_at + tiles, mask=inside, other=0.0)[None, :] - middle[:, None]
        # inf(q·k) is −sup(q·(−k)).
        if LOWER:
            low, high = -high, -low
        term = _largest_product(
            tl.load(q_at + q_plane)[:, None], tl.load(q_at + 2 * q_plane)[:, None], low, high
        )
        total += term
        size += tl.abs(term)
        q_at += 2 * q_plane
        k_at += 2 * k_plane
    return total, size


@triton.jit
def _bias(table, reach, tiles, seen, GRID: tl.constexpr, LOWER: tl.constexpr, TILE: tl.constexpr):
    """(QUERIES, VECTOR) sup (of the negative, if LOWER) of row_scale·(table − base), from the
    extremes of the chunks.

    Columns increase with the query and decrease with the key, so a tile's columns lie between those
    of its corners.
    """
    chunks, plane, columns, steps, origin, codes, prefix, base, scale_low, scale_high = table
    first_row = reach[0][:, None]
    last_row = reach[1][:, None]
    keys = reach[2]
    first_key = (tiles * TILE)[None, :]
    last_key = (tl.minimum(tiles * TILE + TILE, keys) - 1)[None, :]
    if GRID:
        seen &= (last_row >= prefix) & (last_key >= prefix)
        first_key = tl.minimum(first_key, keys - 1)
        low_at = tl.load(codes + tl.maximum(last_key, prefix)) - tl.load(
            codes + tl.maximum(first_row, prefix)
        )
        high_at = tl.load(codes + tl.maximum(first_key, prefix)) - tl.load(
            codes + tl.maximum(last_row, prefix)
        )
    else:
        low_at = first_row - last_key
        high_at = last_row - first_key
    first = tl.minimum(tl.maximum(low_at + origin, 0), columns - 1) // TILE
    last = tl.minimum(tl.maximum(high_at + origin, 0), columns - 1) // TILE
    low = tl.full(first.shape, float("inf"), tl.float32)
    high = tl.full(first.shape, -float("inf"), tl.float32)
    for step in range(0, steps):
        mask = seen & (first + step <= last)
        low = tl.minimum(low, tl.load(chunks + first + step, mask=mask, other=float("inf")))
        high = tl.maximum(
            high, tl.load(chunks + plane + first + step, mask=mask, other=-float("inf"))
        )
    if GRID:
        # Prefix tokens have no bias.
        zero = (first_row < prefix) | (first_key < prefix)
        low = tl.where(zero, tl.minimum(low, 0.0), low)
        high = tl.where(zero, tl.maximum(high, 0.0), high)
    low = low - base[:, None]
    high = high - base[:, None]
    # As in _content_and_lanes.
    if LOWER:
        low, high = -high, -low
    return _largest_product(scale_low[:, None], scale_high[:, None], low, high)


@triton.jit
def _visible_tiles(tiles, reach, documents, IDS: tl.constexpr):
    """(QUERIES, VECTOR) key tiles that some row sees, and those in the one document of the query
    tile."""
    q_low, q_high, k_ids, plane, k_tiles = documents
    seen = (tiles[None, :] >= reach[3][:, None]) & (tiles[None, :] < reach[4][:, None])
    same = seen
    if IDS:
        k_low = tl.load(k_ids + tiles, mask=tiles < k_tiles, other=0)
        k_high = tl.load(k_ids + plane + tiles, mask=tiles < k_tiles, other=0)
        same = (
            seen
            & (q_low == q_high)[:, None]
            & (k_low == k_high)[None, :]
            & (k_low[None, :] == q_low[:, None])
        )
        seen &= (k_low[None, :] <= q_high[:, None]) & (k_high[None, :] >= q_low[:, None])
    return seen, same


@triton.jit
def _floor(
    stats,
    table,
    reach,
    documents,
    offset,
    window,
    own_bias,
    has_own,
    epsilon,
    IDS: tl.constexpr,
    TABLE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GRID: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """(QUERIES,) a lower bound of each row's largest visible logit, less the row's constant; −∞ if
    there is none."""
    first_row, last_row, keys, first, last = reach
    low = (first_row + offset)[:, None]
    high = (last_row + offset)[:, None]
    floor = tl.full(first_row.shape, -float("inf"), tl.float32)
    near = -floor
    for start in range(tl.min(first, axis=0), tl.max(last, axis=0), VECTOR):
        tiles = start + tl.arange(0, VECTOR)
        seen, for_all = _visible_tiles(tiles, reach, documents, IDS)
        first_key = (tiles * TILE)[None, :]
        last_key = (tl.minimum(tiles * TILE + TILE, keys) - 1)[None, :]
        if CAUSAL:
            for_all &= first_key <= low
        if WINDOW:
            for_all &= (first_key <= low + window - 1) & (last_key >= high - window + 1)
        total, size = _content_and_lanes(stats, tiles, True)
        # One of these tiles holds the own key, whose bias is known exactly and not only as a range.
        here = -(total + own_bias[:, None] + epsilon * (size + _finite_size(own_bias)[:, None]))
        here = tl.where(here == here, here, -float("inf"))
        is_own = (first_key <= high) & (first_key + TILE > low)
        near = tl.minimum(near, tl.min(tl.where(is_own, here, float("inf")), axis=1))
        if TABLE:
            term = _bias(table, reach, tiles, seen, GRID, True, TILE)
            total += term
            size += _finite_size(term)
        here = -(total + epsilon * size)
        here = tl.where(for_all & (here == here), here, -float("inf"))
        floor = tl.maximum(floor, tl.max(here, axis=1))
    return tl.where(has_own, tl.maximum(floor, near), floor)


@_kernel
def row_intervals(
    rows,
    q_stats,
    k_stats,
    q_ids,
    k_ids,
    entries,
    chunks,
    codes,
    # Sizes and strides, as SHAPES says.
    table_head,
    columns,
    chunk_count,
    steps,
    batch,
    heads,
    groups,
    queries,
    keys,
    offset,
    window,
    origin,
    prefix,
    margin,
    epsilon,
    lanes,
    IDS: tl.constexpr,
    TABLE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GRID: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Key intervals of QUERIES query tiles of one head: their floors, then the first and last tile
    not skipped."""
    q_tiles = (queries + TILE - 1) // TILE
    k_tiles = (keys + TILE - 1) // TILE
    blocks = (q_tiles + QUERIES - 1) // QUERIES
    head_at = (tl.program_id(0) // blocks).to(tl.int64)
    b = head_at // heads
    h = head_at % heads
    m = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    real = m < q_tiles
    m = tl.minimum(m, q_tiles - 1)
    at = head_at * q_tiles + m
    q_plane = tl.cast(batch * heads, tl.int64) * q_tiles
    k_plane = tl.cast(batch * groups, tl.int64) * k_tiles
    k_at = k_stats + (b * groups + h // (heads // groups)) * k_tiles

    # Key tiles visible to positions low … high by causality and window, and the tiles of their own
    # keys.
    first_row = m * TILE
    last_row = tl.minimum(m * TILE + TILE, queries) - 1
    low = first_row + offset
    high = last_row + offset
    first = tl.zeros_like(m)
    last = tl.zeros_like(m) + k_tiles
    if WINDOW:
        first = tl.minimum(tl.maximum(low - window + 1, 0) // TILE, k_tiles)
        last = tl.minimum(tl.maximum(high + window - 1 + TILE, 0) // TILE, k_tiles)
    if CAUSAL:
        last = tl.minimum(high // TILE + 1, k_tiles)
    own_first = tl.maximum(low, 0) // TILE
    own_last = tl.maximum(high, 0) // TILE
    has_own = low >= 0
    q_low = tl.zeros_like(m)
    q_high = tl.zeros_like(m)
    if IDS:
        q_low = tl.load(q_ids + b * q_tiles + m)
        q_high = tl.load(q_ids + (batch + b) * q_tiles + m)

    own_bias = tl.zeros((QUERIES,), tl.float32)
    base = own_bias
    scale_low = own_bias + 1.0
    scale_high = own_bias + 1.0
    if SCALED:
        scale_at = q_stats + at + (1 + 2 * lanes) * q_plane
        scale_low = tl.load(scale_at)
        scale_high = tl.load(scale_at + q_plane)
    if TABLE:
        # Biases are relative to the own key's entry, unless that is −∞.
        base += tl.load(entries + h * table_head + (origin if GRID else origin - offset)).to(
            tl.float32
        )
        if GRID:
            base = tl.where(last_row >= prefix, base, 0.0)
        has_own &= base > -float("inf")
        base = tl.where(tl.abs(base) < float("inf"), base, 0.0)
        if GRID:
            # Prefix rows of a mixed tile have no bias at their own key: sup of row_scale·(base
            # − 0).
            mixed = _largest_product(
                scale_low, scale_high, tl.minimum(base, 0.0), tl.maximum(base, 0.0)
            )
            own_bias = tl.where(first_row < prefix, mixed, 0.0)

    stats = (q_stats + at, k_at, q_plane, k_plane, k_tiles, own_first, own_last, lanes)
    table = (
        chunks + h * chunk_count,
        heads * chunk_count,
        columns,
        steps,
        origin,
        codes,
        prefix,
        base,
        scale_low,
        scale_high,
    )
    reach = (first_row, last_row, keys, first, last)
    documents = (q_low, q_high, k_ids + b * k_tiles, batch * k_tiles, k_tiles)
    floor = _floor(
        stats,
        table,
        reach,
        documents,
        offset,
        window,
        own_bias,
        has_own,
        epsilon,
        IDS,
        TABLE,
        CAUSAL,
        WINDOW,
        GRID,
        TILE,
        VECTOR,
    )
    floor -= margin
    lo = tl.zeros_like(m) + k_tiles
    hi = tl.zeros_like(m)
    for start in range(tl.min(first, axis=0), tl.max(last, axis=0), VECTOR):
        tiles = start + tl.arange(0, VECTOR)
        seen, _ = _visible_tiles(tiles, reach, documents, IDS)
        total, size = _content_and_lanes(stats, tiles, False)
        if TABLE:
            term = _bias(table, reach, tiles, seen, GRID, False, TILE)
            total += term
            size += _finite_size(term)
        # `~(… < …)`, so that a tile whose bound is NaN is needed.
        needed = seen & ~(total + epsilon * size < floor[:, None])
        lo = tl.minimum(lo, tl.min(tl.where(needed, tiles[None, :], k_tiles), axis=1))
        hi = tl.maximum(hi, tl.max(tl.where(needed, tiles[None, :] + 1, 0), axis=1))
    # An empty interval is placed at the row's own tile, so that kernels with larger blocks widen
    # little.
    lo = tl.where(hi == 0, tl.minimum(own_first, k_tiles), lo)
    hi = tl.maximum(hi, lo)
    tl.store(rows + at, lo, mask=real)
    tl.store(rows + q_plane + at, hi, mask=real)


@_kernel
def column_intervals(
    cols, rows, count, q_tiles, k_tiles, offset, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """First and last query tile whose interval holds a key tile, for BLOCK key tiles of one
    head."""
    blocks = (k_tiles + BLOCK - 1) // BLOCK
    at = tl.program_id(0).to(tl.int64)
    head_at = at // blocks
    n = (at % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    rows += head_at * q_tiles
    first = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    last = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, q_tiles, BLOCK):
        m = start + tl.arange(0, BLOCK)
        lo = tl.load(rows + m, mask=m < q_tiles, other=0)
        hi = tl.load(rows + tl.cast(count, tl.int64) * q_tiles + m, mask=m < q_tiles, other=0)
        needs = (lo[:, None] <= n[None, :]) & (n[None, :] < hi[:, None])
        first = tl.minimum(first, tl.min(tl.where(needs, m[:, None], 0x7FFFFFFF), axis=0))
        last = tl.maximum(last, tl.max(tl.where(needs, m[:, None] + 1, 0), axis=0))
    diagonal = tl.minimum(tl.maximum(n * TILE - offset, 0) // TILE, q_tiles)
    first = tl.where(last == 0, diagonal, first)
    last = tl.maximum(last, first)
    cols += head_at * k_tiles + n
    tl.store(cols, first, mask=n < k_tiles)
    tl.store(cols + tl.cast(count, tl.int64) * k_tiles, last, mask=n < k_tiles)


def make_plan(call: Operands, budget: float = 24.0 * math.log(2.0)) -> Plan:
    """The tiles that a call needs, without a device synchronisation; all that are visible with an
    infinite `budget`.

    A tile with NaN or ±∞ in its queries, keys, row scales or table, but −∞ of a table, is needed.
    Document ids need T <= S.
    """
    g = call.geometry
    tile = common.TILE
    row_scale = call.row_scale
    segments = call.segments
    q = last_axis_contiguous(call.q)
    k = last_axis_contiguous(call.k)
    table = None if call.table is None else last_axis_contiguous(call.table)
    q_tiles = cdiv(g.queries, tile)
    k_tiles = cdiv(g.keys, tile)
    count = g.batch * g.heads
    columns = 0 if table is None else table.shape[1]
    chunk_count = cdiv(columns, tile)
    grid = g.grid_width > 0
    rows = torch.empty(2, count, q_tiles, dtype=torch.int32, device=q.device)
    # Of each tile the norm, the minimum and maximum of each lane, and of the row scale; the
    # smallest and largest document id.
    q_planes = 1 + 2 * g.lanes
    k_planes = q_planes
    if row_scale is not None:
        q_planes += 2
    id_tiles = (0, 0) if segments is None else (q_tiles, k_tiles)
    device = q.device
    q_stats = torch.empty(q_planes, count, q_tiles, dtype=torch.float32, device=device)
    k_stats = torch.empty(k_planes, g.batch * g.groups, k_tiles, dtype=torch.float32, device=device)
    q_ids = torch.empty(2, g.batch, id_tiles[0], dtype=torch.int32, device=device)
    k_ids = torch.empty(2, g.batch, id_tiles[1], dtype=torch.int32, device=device)
    # Of each chunk of `tile` columns of the table the minimum and maximum, +∞ for NaN.
    chunks = torch.empty(2, g.heads, chunk_count, dtype=torch.float32, device=device)
    # What a call does not have is any tensor, whose values no kernel reads.
    entries = q_stats if table is None else table
    table_head = 0 if table is None else table.stride(0)
    q_batch, q_head, q_row = q.stride()[:3]
    k_batch, k_head, k_row = k.stride()[:3]
    scale_head, scale_row = (0, 0) if row_scale is None else row_scale.stride()[1:]
    ids_batch, ids_column = (0, 0) if segments is None else segments.stride()
    # Arguments of both kernels.
    shared: dict[str, object] = {
        "q_stats": q_stats,
        "k_stats": k_stats,
        "q_ids": q_ids,
        "k_ids": k_ids,
        "chunks": chunks,
        "batch": g.batch,
        "heads": g.heads,
        "groups": g.groups,
        "queries": g.queries,
        "keys": g.keys,
        "lanes": g.lanes,
        "offset": g.offset,
        "columns": columns,
        "chunk_count": chunk_count,
        "table_head": table_head,
        "SCALED": row_scale is not None,
        "IDS": segments is not None,
        "TABLE": table is not None,
        "TILE": tile,
    }
    q_programs = count * cdiv(q_tiles, SEVERAL)
    k_programs = g.batch * g.groups * cdiv(k_tiles, SEVERAL)
    table_programs = g.heads * cdiv(chunk_count, CHUNKS)
    with on_device(q):
        extremes[(q_programs + k_programs + table_programs,)](
            q=q,
            k=k,
            scale=q if row_scale is None else row_scale,
            segments=q if segments is None else segments,
            table=entries,
            q_tiles=q_tiles,
            k_tiles=k_tiles,
            width=g.width_k,
            factor=g.softmax_scale,
            # A norm is rounded up by the error of a sum of that many squares.
            inflate=1.0 + (g.width_k + 8) * 2.0**-23,
            q_batch=q_batch,
            q_head=q_head,
            q_row=q_row,
            k_batch=k_batch,
            k_head=k_head,
            k_row=k_row,
            scale_batch=scale_stride(row_scale),
            scale_head=scale_head,
            scale_row=scale_row,
            ids_batch=ids_batch,
            ids_column=ids_column,
            SEVERAL=SEVERAL,
            COLUMNS=COLUMNS,
            CHUNKS=CHUNKS,
            num_warps=4,
            **shared,
        )
        row_intervals[(count * cdiv(q_tiles, QUERIES),)](
            rows=rows,
            entries=entries,
            codes=call.codes,
            steps=_chunks_per_tile(g, tile),
            window=g.window,
            origin=columns // 2 if grid else g.origin,
            prefix=g.prefix,
            # Below the floor by so much a tile is skipped: the 24·ln 2 + ln S of this file's head,
            # and a little.
            margin=budget + math.log(g.keys) + 1e-3,
            # Relative error of a bound's sum.
            epsilon=(g.lanes + 16) * 2.0**-23,
            CAUSAL=g.causal,
            WINDOW=g.window > 0,
            GRID=grid,
            QUERIES=QUERIES,
            VECTOR=VECTOR,
            num_warps=4,
            **shared,
        )
    return Plan(rows, g, tile)


def skipped_share(call: Operands) -> float:
    """Fraction of the visible tiles of all heads that the plan skips; synchronises with the device.

    A tile is visible unless causality, the window or disjoint document id ranges hide all of it.
    """

    def tile_count(plan: Plan) -> float:
        lo, hi = plan.rows
        return (hi - lo).sum().item()

    visible = tile_count(make_plan(call, math.inf))
    if not visible:
        return 0.0
    return 1.0 - tile_count(make_plan(call)) / visible


def _chunks_per_tile(g: Geometry, tile: int) -> int:
    """Maximum number of table chunks of `tile` columns that one tile of logits indexes."""
    width = tile - 1
    if g.grid_width:
        width += (g.grid_width - 1) * min(g.grid_height - 1, (tile - 1) // g.grid_width + 1)
    return 2 * width // tile + 2
