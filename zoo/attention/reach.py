"""The keys that a tile of queries needs on the CPU: outside them, provably, there is no weight.

For row i of a tile of queries, key j and one head, with logits z less the row's lanes times the
lanes of its own key:

    z_ij ≤ ‖q_i content‖·‖k_j content‖ + Σ_lanes q_i·(k_j − k_own) + row_scale_i·table_ij

`upper` is the supremum of that over the rows of a query tile and the keys of a key tile; `floor`
the least, over the rows, of the largest of a few exact logits: those of the own key and of the keys
just before it. What a query tile needs is an interval of keys. On either side of it tiles are left
out from the far end on as long as

    Σ keys of the tile · exp(upper − floor) ≤ 2^−25

so all keys left out weigh less than 2^−24 of the row's sum together. `zoo.attention.triton.plan`
bounds the same terms on the GPU, key by key. Memory is O(T + S) and a block of tile pairs.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.call import AttentionCall
from zoo.attention.heads import repeat_heads
from zoo.positions import slices

# Of a row's sum, at most, on either side.
LEFT_OUT = 2.0**-25
# Distances of the keys whose logits are computed.
NEAR = (0, 1, 2, 3)
# Of the sizes of a logit's terms: what float32 sums of them may be off by.
SLACK = 2.0**-20
# Keys of a tile, or more where there would be more tiles.
KEYS = 64
MOST_TILES = 2048
# Tile pairs of all heads that are bounded at a time.
PAIRS = 1 << 20


@dataclass
class Tally:
    """Visible logits of calls on the CPU that were not computed, their keys having provably
    negligible weight."""

    left_out: int = 0


# Of the innermost context `skipping`.
TALLY: ContextVar[Tally | None] = ContextVar("tally", default=None)
SKIPS: ContextVar[bool] = ContextVar("skips", default=True)


@dataclass(frozen=True)
class Reach:
    """Key intervals [first, last), (B, H, ceil(T/rows)) int64, that tiles of `rows` queries
    need."""

    first: Tensor
    last: Tensor
    rows: int

    def of_rows(self, batch: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """(first, last) of each head, for rows [lo, hi) of one batch row."""
        tiles = slice(lo // self.rows, -(-hi // self.rows))
        first = self.first[batch, :, tiles].amin(-1)
        last = self.last[batch, :, tiles].amax(-1)
        return list(zip(first.tolist(), last.tolist(), strict=True))


def find_reach(
    call: AttentionCall,
    queries: Tensor,
    keys: Tensor,
    table: Tensor,
    scale: Tensor | None,
    rows: int,
) -> Reach:
    """What each tile of `rows` queries needs, of scaled queries (B, H, T, R + d_c) and keys (B, G,
    S, R + d_c), lanes first.

    table: (H or 1, T+S−1), the logit's addend at [T−1−i+j], hidden distances at −∞. scale: (1 or B,
    H, T) of it, or None.
    """
    num_queries = call.num_queries
    num_keys = call.num_keys
    lanes = 0 if call.terms.q_lanes is None else call.terms.q_lanes.shape[-1]
    size = max(KEYS, 2 ** math.ceil(math.log2(num_keys / MOST_TILES)))
    keys = repeat_heads(keys, queries.shape[1])
    q_norms = norms(queries[..., lanes:])
    k_norms = norms(keys[..., lanes:])
    row_floors = _floors(call, queries, keys, (q_norms, k_norms), table, scale, lanes)
    floor = _tiled(row_floors, rows, math.inf).amin(-1)
    q_norm = _tiled(q_norms, rows, 0.0).amax(-1)
    k_norm = _tiled(k_norms, size, 0.0).amax(-1)
    q_lanes = _extremes(queries[..., :lanes], rows)
    k_lanes = _extremes(keys[..., :lanes], size)
    own_lanes = _extremes(keys[:, :, call.offset :, :lanes], rows)
    scales = None if scale is None else _extremes(scale[..., None], rows)
    lowest, highest = _stretch_extremes(table, rows + size - 1, size)
    q_tiles = q_norm.shape[-1]
    k_tiles = k_norm.shape[-1]
    first = torch.empty(q_norm.shape, dtype=torch.int64)
    last = torch.empty(q_norm.shape, dtype=torch.int64)
    pairs_of_a_row = len(queries) * queries.shape[1] * k_tiles
    for part in slices(q_tiles, max(1, PAIRS // pairs_of_a_row)):
        upper = q_norm[:, :, part, None] * k_norm[:, :, None]
        terms = upper.clone()
        for n in range(lanes):
            low = k_lanes[0][..., n][:, :, None] - own_lanes[1][:, :, part, None, n]
            high = k_lanes[1][..., n][:, :, None] - own_lanes[0][:, :, part, None, n]
            q_low = q_lanes[0][:, :, part, None, n]
            q_high = q_lanes[1][:, :, part, None, n]
            term = _largest_product(q_low, q_high, low, high)
            upper += term
            terms += term.abs()
        # The stretch of the table that a pair of tiles reads begins in this chunk.
        tile_ends = torch.arange(part.start + 1, part.stop + 1)[:, None] * rows
        last_row = tile_ends.clamp(max=num_queries) - 1
        chunk = (num_queries - 1 - last_row + torch.arange(k_tiles) * size) // size
        high = highest[:, chunk]
        if scales is not None:
            low_scale = scales[0][:, :, part]
            high_scale = scales[1][:, :, part]
            high = _largest_product(low_scale, high_scale, lowest[:, chunk], high)
        upper += high
        terms += high.abs().nan_to_num(posinf=0.0)
        weight = size * (upper + SLACK * terms - floor[:, :, part, None]).exp()
        # The comparison is negated, so that NaN is needed.
        needed = ~(weight.cumsum(-1) <= LEFT_OUT)
        needed_back = ~(weight.flip(-1).cumsum(-1) <= LEFT_OUT)
        first[:, :, part] = needed.int().argmax(-1) * size
        last[:, :, part] = (k_tiles - needed_back.int().argmax(-1)) * size
    return Reach(first, last.clamp(max=num_keys), rows)


def _floors(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    norms: tuple[Tensor, Tensor],
    table: Tensor,
    scale: Tensor | None,
    lanes: int,
) -> Tensor:
    """(B, H, T) float64: of each row the largest logit of the keys near its own, less the row's
    lanes times its own key's."""
    num_queries = call.num_queries
    num_keys = call.num_keys
    offset = call.offset
    floors = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for part in slices(num_queries, max(1, PAIRS // (q.shape[0] * q.shape[1]))):
        own_keys = k[:, :, part.start + offset : part.stop + offset]
        for distance in NEAR:
            # The first row that has such a key.
            start = max(part.start, distance - offset)
            if start >= part.stop:
                continue
            q_rows = slice(start, part.stop)
            own_rows = slice(start + offset, part.stop + offset)
            k_rows = slice(own_rows.start - distance, own_rows.stop - distance)
            a = q[:, :, q_rows]
            b = k[:, :, k_rows]
            wide = torch.promote_types(a.dtype, torch.float32)
            logit = torch.linalg.vecdot(a[..., lanes:].to(wide), b[..., lanes:].to(wide)).double()
            terms = norms[0][:, :, q_rows] * norms[1][:, :, k_rows]
            if lanes:
                own_lanes = own_keys[:, :, start - part.start :, :lanes].double()
                by_lane = a[..., :lanes].double() * (b[..., :lanes].double() - own_lanes)
                logit += by_lane.sum(-1)
                terms += by_lane.abs().sum(-1)
            bias = table[:, num_keys - 1 - distance, None].double()
            if scale is not None:
                bias = scale[:, :, q_rows].double() * bias
            logit = logit + bias
            terms = terms + bias.abs()
            if call.segments is not None:
                differ = call.segments[:, own_rows] != call.segments[:, k_rows]
                logit = logit.masked_fill(differ[:, None], -math.inf)
            # NaN where something is not finite: then nothing is left out.
            floors[:, :, q_rows] = torch.maximum(floors[:, :, q_rows], logit - SLACK * terms)
    return floors


def _stretch_extremes(table: Tensor, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Least and largest, (H, chunks) float64, of any stretch of `length` entries that begins in a
    chunk of `size`."""
    # Chunks that such a stretch is in, at most.
    count = (length + size - 2) // size + 1
    low = _tiled(table, size, math.inf).amin(-1).double()
    high = _tiled(table, size, -math.inf).amax(-1).double()
    low = F.pad(low, (0, count - 1), value=math.inf)
    high = F.pad(high, (0, count - 1), value=-math.inf)
    return low.unfold(-1, count, 1).amin(-1), high.unfold(-1, count, 1).amax(-1)


def _largest_product(a_low: Tensor, a_high: Tensor, b_low: Tensor, b_high: Tensor) -> Tensor:
    """The supremum of a·b over two intervals; +∞ where a product is NaN."""
    with_low = torch.maximum(a_low * b_low, a_low * b_high)
    with_high = torch.maximum(a_high * b_low, a_high * b_high)
    largest = torch.maximum(with_low, with_high)
    return largest.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def norms(x: Tensor) -> Tensor:
    """(B, H, L) float64, rounded up."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).double() * (1 + 1e-5) + 1e-30


def _tiled(x: Tensor, size: int, fill: float) -> Tensor:
    """(…, L) as (…, ceil(L/size), size), the last tile filled up."""
    return F.pad(x, (0, -x.shape[-1] % size), value=fill).unflatten(-1, (-1, size))


def _extremes(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and largest, (B, H, tiles, R) float64, of (B, H, L, R)."""
    lines = x.double().transpose(-1, -2)
    low = _tiled(lines, size, math.inf).amin(-1)
    high = _tiled(lines, size, -math.inf).amax(-1)
    return low.transpose(-1, -2), high.transpose(-1, -2)
