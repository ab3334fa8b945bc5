"""Which tiles of logits a call needs: those that are visible and not provably irrelevant.

For query tile m and key tile n of one head, with logits z less a constant of each row (what the row's lanes make of the
own tile's middle key lanes, and the row's scale times the table's entry for the own key):

    upper(m,n) = max‖q content‖·max‖k content‖ + Σ_lanes sup(q·k) + sup(row_scale·table)         natural-log units
    lower(m,n) = likewise with minus and inf
    floor(m)   = the largest of: lower over the tiles that hold the own keys of m; lower of any tile that every row of m
                 sees a key of
    n is skipped by m where upper(m,n) < floor(m) − 24·ln 2 − ln S

Every row of m then has a visible key whose weight is at least 2^24·S times each skipped one, so that all skipped weights
of a row are together below 2^−24 of the row's sum. Bounds are rounded outwards by the float32 error of their sums.
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
    poisoned_heads,
    row_intervals,
    tile_extremes,
)

__all__ = ["Plan", "make_plan", "skipped_share"]

# What a program looks at together: query and key tiles, tiles and columns of q and k, chunks of the table, and tiles where it
# holds little else. The interpreter pays for each program; the device pays for registers: 8 × 32 tiles on 4 warps take 128
# to 168 of them on sm_90, larger blocks spill.
QUERIES, VECTOR = (16, 64) if common.INTERPRET.value else (8, 32)
SEVERAL, COLUMNS = (8, 64) if common.INTERPRET.value else (1, 64)
CHUNKS = 16
BLOCK = 64


@dataclass(frozen=True)
class Plan:
    """The tiles to compute, as intervals [lo, hi); a superset is as right.

    Attributes:
        rows: (2, B·H, ceil(T/tile)) int32, the key tiles that each query tile needs.
        cols: (2, B·H, ceil(S/tile)) int32, the query tiles that each key tile is needed by. An empty interval has lo = hi.
        tile: rows and keys of a tile.
        counts: (2, B·H, ceil(T/tile)) int32, how many key tiles each query tile sees and how many of these it skips; only
            `skipped_share` reads them.
    """

    rows: Tensor
    cols: Tensor
    tile: int = field(default_factory=lambda: common.TILE)
    counts: Tensor | None = None


def make_plan(
    q: Tensor, k: Tensor, table: Tensor | None, row_scale: Tensor | None, segments: Tensor | None, geometry: Geometry
) -> Plan:
    """The tiles that a call needs, without waiting for the device.

    A head with NaN or an infinity in its queries, keys or row scales, NaN or +∞ in its table, or −∞ there beside a row scale
    that is not positive, skips nothing but what is invisible.

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
    poisoned = torch.empty(count, dtype=torch.int32, device=q.device)
    flags = {"lanes": g.lanes, "TABLE": table is not None, "SCALED": row_scale is not None}
    columns = 0 if table is None else table.shape[1]
    chunk_count = triton.cdiv(columns, tile)
    grid = g.grid_width > 0
    with on_device(q):
        q_stats, q_ids = _tile_extremes(q, row_scale, segments, g.offset, g.lanes, tile)
        k_stats, k_ids = _tile_extremes(k, None, segments, 0, g.lanes, tile)
        chunks = q_stats if table is None else _chunk_extremes(table, tile)
        poisoned_heads[(count,)](
            poisoned, q_stats, k_stats, chunks, g.heads, g.groups, q_tiles, k_tiles, chunk_count, **flags,
            VECTOR=BLOCK, num_warps=4,
        )  # fmt: skip
        row_intervals[(count * triton.cdiv(q_tiles, QUERIES),)](
            rows, counts, poisoned, q_stats, k_stats, q_ids, k_ids, q_stats if table is None else table, chunks,
            0 if table is None else table.stride(0), columns, chunk_count, _chunks_met(g, tile),
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
    """Share of the visible tiles of all heads that the plan leaves out; waits for the device.

    A tile is visible unless causality, the window or disjoint ranges of document ids hide all of it.

    Raises:
        ValueError: for a plan of another shape, or one put together without its counts.
    """
    wanted = (2, geometry.batch * geometry.heads, triton.cdiv(geometry.queries, plan.tile))
    if plan.counts is None or tuple(plan.counts.shape) != wanted:
        found = None if plan.counts is None else tuple(plan.counts.shape)
        raise ValueError(f"the plan's counts must be {wanted} for this call, got {found}; take the plan of make_plan")
    seen, skipped = plan.counts.sum(dim=(1, 2), dtype=torch.int64).tolist()
    return skipped / seen if seen else 0.0


def _chunks_met(g: Geometry, tile: int) -> int:
    """The most chunks of `tile` columns that the indices of one tile of logits fall in."""
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
