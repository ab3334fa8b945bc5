"""Tiles of logits that a call needs: visible ones whose weight is not provably negligible.

For query tile m and key tile n of one head, with logits z minus a constant per row (the row's lanes times the middle key
lanes of its own tile, plus the row's scale times the table's entry for its own key):

    upper(m,n) = max‖q content‖·max‖k content‖ + Σ_lanes sup(q·k) + sup(row_scale·table)         natural-log units
    lower(m,n) = the same with minus and inf
    floor(m)   = max of: lower over the tiles that hold the own keys of m; lower of any tile with a key visible to every
                 row of m
    m skips n if upper(m,n) < floor(m) − 24·ln 2 − ln S

Every row of m then has a visible key whose weight is at least 2^24·S times each skipped one, so all skipped weights of a row
together are below 2^−24 of its sum. Bounds are rounded outwards by the float32 error of their sums.
Memory is O((T + S)/TILE) per head and lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from zoo.attention.triton import common
from zoo.attention.triton.common import Geometry, last_axis_contiguous, on_device
from zoo.attention.triton.plan_kernels import (
    chunk_extremes,
    column_intervals,
    heads_without_skipping,
    row_intervals,
    tile_extremes,
)

__all__ = ["Plan", "make_plan", "skipped_share"]

# Block sizes of the plan's kernels: query and key tiles, tiles and columns of q and k, chunks of the table, and tiles where
# little else is held. The interpreter pays per program; the device pays in registers: 8 × 32 tiles on 4 warps take 128 to 168
# on sm_90, larger blocks spill.
QUERIES, VECTOR = (16, 64) if common.INTERPRET.value else (8, 32)
SEVERAL, COLUMNS = (8, 64) if common.INTERPRET.value else (1, 64)
CHUNKS = 16
BLOCK = 64


@dataclass(frozen=True)
class Plan:
    """The tiles to compute, as intervals [lo, hi); any superset is also correct.

    Attributes:
        rows: (2, B·H, ceil(T/tile)) int32, key tiles that each query tile needs.
        cols: (2, B·H, ceil(S/tile)) int32, query tiles that need each key tile. An empty interval has lo = hi.
        tile: rows and keys of a tile.
        counts: (2, B·H, ceil(T/tile)) int32, key tiles that each query tile sees, and skips; read only by
            `skipped_share`.
    """

    rows: Tensor
    cols: Tensor
    tile: int = field(default_factory=lambda: common.TILE)
    counts: Tensor | None = None


def make_plan(
    q: Tensor, k: Tensor, table: Tensor | None, row_scale: Tensor | None, segments: Tensor | None, geometry: Geometry
) -> Plan:
    """The tiles that a call needs, without a device synchronisation.

    A head skips only invisible tiles if its queries, keys or row scales have NaN or ±∞, its table has NaN or +∞, or its table
    has −∞ while a row scale is not positive.

    Args:
        q: (B, H, T, Dk), lanes first; scaled, so that q·k is in natural-log units. float32 or narrower.
        k: (B, G, S, Dk).
        table: (H, N) float32 or None; −∞ hides a distance.
        row_scale: (1 or B, H, T) float32 or None; multiplies the table.
        segments: (B, S) int32 ids or None; needs T <= S.
        geometry: the shape of the call.
    """
    g, tile = geometry, common.TILE
    q, k = last_axis_contiguous(q), last_axis_contiguous(k)
    table = None if table is None else last_axis_contiguous(table)
    q_tiles, k_tiles, count = triton.cdiv(g.queries, tile), triton.cdiv(g.keys, tile), g.batch * g.heads
    rows = torch.empty(2, count, q_tiles, dtype=torch.int32, device=q.device)
    cols = torch.empty(2, count, k_tiles, dtype=torch.int32, device=q.device)
    counts = torch.empty_like(rows)
    no_skip = torch.empty(count, dtype=torch.int32, device=q.device)
    flags = {"lanes": g.lanes, "TABLE": table is not None, "SCALED": row_scale is not None}
    columns = 0 if table is None else table.shape[1]
    chunk_count = triton.cdiv(columns, tile)
    grid = g.grid_width > 0
    with on_device(q):
        q_stats, q_ids = _tile_extremes(q, row_scale, segments, g.offset, g.lanes, tile)
        k_stats, k_ids = _tile_extremes(k, None, segments, 0, g.lanes, tile)
        chunks = q_stats if table is None else _chunk_extremes(table, tile)
        heads_without_skipping[(count,)](
            no_skip, q_stats, k_stats, chunks, g.heads, g.groups, q_tiles, k_tiles, chunk_count, **flags,
            VECTOR=BLOCK, num_warps=4,
        )  # fmt: skip
        row_intervals[(count * triton.cdiv(q_tiles, QUERIES),)](
            rows, counts, no_skip, q_stats, k_stats, q_ids, k_ids, q_stats if table is None else table, chunks,
            0 if table is None else table.stride(0), columns, chunk_count, _chunks_per_tile(g, tile),
            g.batch, g.heads, g.groups, g.queries, g.keys, g.offset, g.window, columns // 2 if grid else g.origin,
            max(g.grid_width, 1), g.prefix, 24.0 * math.log(2.0) + math.log(g.keys) + 1e-3, (g.lanes + 16) * 2.0**-23,
            **flags, CAUSAL=g.causal, WINDOW=g.window > 0, GRID=grid, IDS=segments is not None,
            TILE=tile, QUERIES=QUERIES, VECTOR=VECTOR, num_warps=4,
        )  # fmt: skip
        column_intervals[(count * triton.cdiv(k_tiles, BLOCK),)](
            cols, rows, count, q_tiles, k_tiles, g.offset, TILE=tile, BLOCK=BLOCK, num_warps=4
        )
    return Plan(rows, cols, tile, counts)


def skipped_share(plan: Plan, geometry: Geometry) -> float:
    """Fraction of the visible tiles of all heads that the plan skips; synchronises with the device.

    A tile is visible unless causality, the window or disjoint document id ranges hide all of it.

    Raises:
        ValueError: for a plan of another shape, or without counts.
    """
    wanted = (2, geometry.batch * geometry.heads, triton.cdiv(geometry.queries, plan.tile))
    if plan.counts is None or tuple(plan.counts.shape) != wanted:
        found = None if plan.counts is None else tuple(plan.counts.shape)
        raise ValueError(f"the plan's counts must be {wanted} for this call, got {found}; use the plan of make_plan")
    seen, skipped = plan.counts.sum(dim=(1, 2), dtype=torch.int64).tolist()
    return skipped / seen if seen else 0.0


def _chunks_per_tile(g: Geometry, tile: int) -> int:
    """Maximum number of table chunks of `tile` columns that one tile of logits indexes."""
    width = tile - 1
    if g.grid_width:
        width += (g.grid_width - 1) * min(g.grid_height - 1, (tile - 1) // g.grid_width + 1)
    return 2 * width // tile + 2


def _tile_extremes(
    x: Tensor, scale: Tensor | None, segments: Tensor | None, offset: int, lanes: int, tile: int
) -> tuple[Tensor, Tensor]:
    """(1 + 2R + 2, B·heads, tiles) float32: the norm, minimum and maximum of each lane, and of the row scale; and
    (2, B, tiles) int32: the smallest and largest document id."""
    batch, heads, length, width = x.shape
    tiles = triton.cdiv(length, tile)
    planes = 1 + 2 * lanes + (0 if scale is None else 2)
    stats = torch.empty(planes, batch * heads, tiles, dtype=torch.float32, device=x.device)
    ids = torch.empty(2, batch, tiles if segments is not None else 0, dtype=torch.int32, device=x.device)
    scaled, masked = x if scale is None else scale, x if segments is None else segments
    strides = (0, 0, 0) if scale is None else (scale.stride(0) if scale.shape[0] > 1 else 0, *scale.stride()[1:])
    tile_extremes[(batch * heads * triton.cdiv(tiles, SEVERAL),)](
        x, scaled, masked, stats, ids, batch, heads, tiles, length, width, lanes, offset, 1.0 + (width + 8) * 2.0**-23,
        *x.stride()[:3], *strides, *((0, 0) if segments is None else segments.stride()),
        TILE=tile, SEVERAL=SEVERAL, COLUMNS=COLUMNS, SCALED=scale is not None, IDS=segments is not None, num_warps=4,
    )  # fmt: skip
    return stats, ids


def _chunk_extremes(table: Tensor, tile: int) -> Tensor:
    """(2, H, ceil(N/tile)) float32 minimum and maximum of the table's chunks of `tile` columns; +∞ for NaN."""
    heads, columns = table.shape
    count = triton.cdiv(columns, tile)
    chunks = torch.empty(2, heads, count, dtype=torch.float32, device=table.device)
    blocks = triton.cdiv(count, CHUNKS)
    chunk_extremes[(heads * blocks,)](
        table, chunks, heads, columns, count, blocks, table.stride(0), TILE=tile, CHUNKS=CHUNKS, num_warps=4
    )
    return chunks
