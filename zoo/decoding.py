"""The KV cache of causal decoding. Cached keys include their lanes; tables are sliced; memory grows
in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.dispatch import prior_attention
from zoo.attention.heads import fold_lanes
from zoo.attention.reach import LEFT_OUT, SKIPS, TALLY, norms
from zoo.attention.sdpa import FEWEST_KEYS
from zoo.attention.toeplitz import FUSED
from zoo.errors import WHOLE, check_whole
from zoo.positions import Positions
from zoo.priors.base import Prior, RelativeTable

# From this many keys on, those that a prior hides from the next token are left out, in steps of so
# many.
LONG = 4096
STEP = 512


@dataclass
class Extent:
    """Tokens held, and tokens that fit; the layers of a cache share it."""

    length: int = 0
    capacity: int = 0


@dataclass(frozen=True)
class NextRow:
    """K of the next token along a line as a sum (`Prior.next_row`), whatever tokens there are
    before it.

    by_distance, by_key: (H, length), the farthest and the first key first; None: zeros. highest:
    (H, length) float64, how far K at so many tokens or more is below that of the own key at least.
    level: (H, 1) K of sinks less by_key of the own key.
    lanes: (1, 1 or H, length, R) of keys, which a cache holds. sink: as in `PriorTerms`. serves:
    whether K is such a sum, and finite.
    """

    length: int
    by_distance: Tensor | None
    by_key: Tensor | None
    highest: Tensor
    level: Tensor
    lanes: Tensor
    serves: bool
    sink: Tensor | None = None

    @staticmethod
    def of(prior: Prior, length: int, dtype: torch.dtype) -> NextRow:
        absent = any(
            p.is_meta or not p.numel() for p in prior.parameters()
        )  # which only `forward` gathers
        rows = None if absent or prior.depends_on_content else prior.next_row(length)
        none = torch.empty(0)
        if rows is None or not all(bool(row.isfinite().all()) for row in rows):
            return NextRow(length, None, None, none, none, none, False)
        line, (by_distance, by_key) = Positions.line(length), rows
        terms = prior(line.tail(1), line, causal=True)
        highest = by_distance[:, :1] - by_distance.flip(-1).cummax(-1).values.flip(-1)
        spread = by_key.amax(-1, keepdim=True) - by_key.amin(-1, keepdim=True)
        return NextRow(
            length,
            by_distance.flip(-1).to(dtype) if by_distance.any() else None,
            by_key.to(dtype) if by_key.any() else None,
            highest - spread,
            _lanes_at_0(prior).to(dtype),
            none if terms.k_lanes is None else terms.k_lanes,
            True,
            terms.sink,
        )

    def bias(
        self, heads: slice, stop: int, reach: int, sinks: int, scale: Tensor | None
    ) -> Tensor | None:
        """(1 or B, h, sinks + reach) for sinks and the last keys of `stop`, times the row scale (1
        or B, H, 1)."""
        if self.by_distance is None and self.by_key is None:
            return None
        bias = (
            None
            if self.by_distance is None
            else self.by_distance[None, heads, self.length - reach :]
        )
        if self.by_key is not None:
            keyed = self.by_key[None, heads, stop - reach : stop]
            bias = keyed if bias is None else bias + keyed
        assert bias is not None
        if sinks:
            bias = torch.cat([self.level_at(stop)[None, heads].expand(-1, -1, sinks), bias], dim=-1)
        return bias if scale is None else bias * scale[:, heads]

    def level_at(self, stop: int) -> Tensor:
        """(H, 1) K of sinks for the last of `stop` tokens."""
        return self.level if self.by_key is None else self.level + self.by_key[:, stop - 1 : stop]


def _lanes_at_0(prior: Prior) -> Tensor:
    """(H, 1) float64: the part of K at distance 0 that is lanes, but what depends on the key."""
    if parts := prior.parts():
        return torch.stack([_lanes_at_0(part) for part in parts]).sum(0)
    row = prior.next_row(1)
    return (
        row[0]
        if row is not None and prior.num_lanes
        else torch.zeros(prior.num_heads, 1, dtype=torch.float64)
    )


class LayerCache:
    """All keys and values of one layer in one buffer each.

    Attributes:
        keys, values: (B, Gk, capacity, R+d_c) and (B, G, capacity, D); None before the first token.
        carries: (B, H, capacity, 1) the prior's state after each token, as in `PriorTerms.carry`;
            None without one.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.carries: Tensor | None = None
        self._table: RelativeTable | None = None
        self._row: NextRow | None = None
        self._norms: tuple[Tensor, int] | None = (
            None  # the largest of each head, of the first so many keys
        )

    def select(self, rows: Tensor) -> None:
        """As `KVCache.select`."""
        buffers = (self.keys, self.values, self.carries)
        self.keys, self.values, self.carries = (
            None if x is None else x.index_select(0, rows) for x in buffers
        )

    def table(
        self, prior: Prior, q_pos: Positions, k_pos: Positions, x: Tensor | None = None
    ) -> RelativeTable | None:
        """The prior's relative table for these positions; for one query a slice of a table computed
        once per capacity."""
        if q_pos.length > 1:
            return prior.beside_lanes(q_pos, k_pos, causal=True, x=x).table
        if self._table is None or self._table.table.shape[1] < k_pos.length:
            far = max(self.extent.capacity, k_pos.length)
            last = Positions.line(1, offset=far - 1)
            line = Positions.line(far)
            self._table = prior.beside_lanes(last, line, causal=True, x=x).table
        return None if self._table is None else self._table.shifted(q_pos, k_pos)

    def attend(
        self,
        prior: Prior,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        *,
        segments: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Store k and v of the new tokens and attend to all tokens so far: (B, H, Q, D). Options as
        in `prior_attention`.

        q, k, v: (B, H, Q, d_c), (B, G, T, d_c), (B, G, T, D) of the last Q of the T new tokens,
            whose input is x (B, T, C) at
        `positions`; segments: (B, S) document ids of all tokens.
        """
        if q.shape[2] == k.shape[2] == 1 and segments is None and positions.within is None:
            out = self._attend_next(prior, q, k, v, **options)
            if out is not None:
                return out
        queries = positions.tail(q.shape[2])
        length = self.extent.length
        state = (
            {"carry": self.carries[:, :, length - 1, 0]}
            if self.carries is not None and length
            else {}
        )
        terms = prior(queries, positions, causal=True, x=x, **state)
        if terms.carry is not None:
            self.carries = _store(self.carries, terms.carry[..., None], self.extent)
        if terms.k_lanes is not None:
            k = fold_lanes(k, terms.k_lanes)
        k, v = self.append(k, v)
        k_pos = Positions.line(k.shape[2])
        gain = (
            None
            if terms.gain is None
            else prior.beside_lanes(queries, k_pos, causal=True, x=x).gain
        )
        table = None if terms.table is None else self.table(prior, queries, k_pos, x)
        bias = None
        if terms.bias is not None:
            k_pos = k_pos if segments is None else Positions.documents(segments)
            bias = prior.beside_lanes(queries, k_pos, causal=True, x=x).bias
        # The offset was relative to the new keys.
        terms = replace(terms, k_lanes=None, table=table, bias=bias, gain=gain, offset=None)
        return prior_attention(q, k, v, terms, causal=True, segments=segments, **options)

    def _attend_next(
        self,
        prior: Prior,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        query_scale: Tensor | None = None,
        window: int | None = None,
        sinks: int = 0,
        kernel: object = "auto",
    ) -> Tensor | None:
        """`attend` of one token of a line on the CPU, without gradients, by a slice of the row in
        the cache; None elsewhere."""
        plain = kernel == "auto" and type(q) is Tensor and q.device.type == "cpu"
        if (
            not plain
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not q.dtype == k.dtype == v.dtype
        ):
            return None
        stop = self.extent.length + 1
        width = q.shape[-1]
        if self._row is None or self._row.length < stop:
            self._row = NextRow.of(
                prior, max(self.extent.capacity, stop), torch.promote_types(q.dtype, torch.float32)
            )
        row = self._row
        if (
            stop < FEWEST_KEYS
            or row.serves is False
            or v.shape[-1] not in (width, width + row.lanes.shape[-1])
        ):
            return None
        if row.lanes.shape[-1]:
            k = fold_lanes(k, row.lanes[:, :, stop - 1 : stop])
        keys, values = self.append(k, v)
        groups = values.shape[1]
        keys = keys[:, :: keys.shape[1] // groups, :, keys.shape[-1] - v.shape[-1] :]
        shape = len(q), groups, q.shape[1] // groups
        scale = 1.0 / math.sqrt(width)
        reaches = [stop if window is None else min(window, stop)] * groups
        if stop >= LONG and window is None and SKIPS.get():
            reaches = self._reaches(row, q, keys[..., v.shape[-1] - width :], query_scale)
        if query_scale is not None:
            q = (q * (query_scale[..., None] * scale)).to(q.dtype)
            scale = 1.0
        q = (
            F.pad(q, (v.shape[-1] - width, 0)).view(*shape, -1)
            if v.shape[-1] > width
            else q.reshape(*shape, width)
        )
        sink = row.sink
        if sink is not None:  # (1 or B, G, H/G)
            level = row.level_at(stop) if query_scale is None else row.level_at(stop) * query_scale
            sink = (sink[:, None] + level).view(-1, *shape[1:])
        parts = []
        start = 0
        sinks = min(sinks, stop)
        for reach, run in groupby(reaches):
            heads = slice(start, start := start + len(list(run)))
            some = slice(heads.start * shape[2], heads.stop * shape[2])
            first = max(stop - reach, sinks)
            bias = row.bias(some, stop, stop - first, sinks, query_scale)
            bias = None if bias is None else bias.unflatten(1, (-1, shape[2]))
            parts_of = [x[:, heads, 0 if first == sinks else first :] for x in (keys, values)]
            if sinks and first > sinks:
                parts_of = [
                    torch.cat([x[:, heads, :sinks], y], 2)
                    for x, y in zip((keys, values), parts_of, strict=True)
                ]
            part, lse = FUSED(q[:, heads], *parts_of, 0.0, False, attn_mask=bias, scale=scale)
            parts.append(
                part if sink is None else part * (lse - sink[:, heads]).sigmoid()[..., None]
            )
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(
            len(q), -1, 1, v.shape[-1]
        )

    def _reaches(
        self, row: NextRow, q: Tensor, keys: Tensor, query_scale: Tensor | None
    ) -> list[int]:
        """Of each key head how many of the last keys may weigh something: all others together weigh
        less than 2^−24."""
        largest, counted = self._norms or (torch.zeros(keys.shape[1], dtype=torch.float64), 0)
        self._norms = (
            torch.maximum(largest, norms(keys[:, :, counted:]).amax((0, 2))),
            keys.shape[2],
        )
        of_query = norms(q).amax((0, 2)).unflatten(0, (keys.shape[1], -1))
        content = 2.0 / math.sqrt(q.shape[-1]) * of_query * self._norms[0][:, None]
        margin = torch.full_like(content, math.log(keys.shape[2] / LEFT_OUT)).flatten()
        if query_scale is not None:
            least = query_scale.amin((0, 2)).double()
            margin = torch.where(least > 0, margin / least, math.inf)
        reach = (
            torch.searchsorted(row.highest, (content.flatten() + margin)[:, None])
            .view(content.shape)
            .amax(1)
        )
        tally = TALLY.get()
        reaches = [min(-(-n // STEP) * STEP, keys.shape[2]) for n in reach.tolist()]
        if tally is not None:
            tally.left_out += (
                sum(keys.shape[2] - n for n in reaches) * len(q) * (q.shape[1] // len(reaches))
            )
        return reaches

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, Gk, T, R+d_c) and (B, G, T, D) after the tokens held; returns views of all S
        tokens."""
        stop = self.extent.length + keys.shape[2]
        if (
            self._norms is not None and self._norms[1] > self.extent.length
        ):  # of keys that are replaced now
            self._norms = self._norms[0], self.extent.length
        self.keys, self.values = (
            _store(self.keys, keys, self.extent),
            _store(self.values, values, self.extent),
        )
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVCache:
    """Keys and values of all layers for batched causal decoding, a `LayerCache` each in `layers`.

    capacity: tokens to reserve at once; 0 reserves blocks of `block` tokens on demand. A full cache
    grows by half. tokens,
    segments: (B, length) ids and document ids of the tokens held, or None.
    """

    def __init__(self, num_layers: int, *, capacity: int = 0, block: int = 256) -> None:
        check_whole("num_layers", num_layers, 0)
        check_whole("capacity", capacity, 0)
        check_whole("block", block, 1)
        self.block = block
        self.extent = Extent(capacity=-(-capacity // block) * block)
        self.layers = [LayerCache(self.extent) for _ in range(num_layers)]
        self.tokens: Tensor | None = None
        self.segments: Tensor | None = None
        self._within: Tensor | None = None  # (B, 1) the last token's index in its document

    @property
    def length(self) -> int:
        return self.extent.length

    @property
    def capacity(self) -> int:
        return self.extent.capacity

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more."""
        needed = self.length + tokens
        if needed > self.capacity:
            size = max(needed, self.capacity + self.capacity // 2)
            self.extent.capacity = -(-size // self.block) * self.block

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held, after every layer stored them."""
        self.extent.length += tokens

    def keep(self, tokens: Tensor) -> Tensor:
        """Append ids (B, T) of new tokens to `tokens`, and return all of them."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        return self.tokens

    def memory(self) -> int:
        """Bytes that all layers reserve for keys and values."""
        buffers = [x for layer in self.layers for x in (layer.keys, layer.values) if x is not None]
        return sum(x.numel() * x.element_size() for x in buffers)

    def mark(self) -> int:
        """This state, for `rewind`."""
        return self.length

    def rewind(self, mark: int) -> None:
        """Drop the tokens after `mark`; the next keys overwrite theirs."""
        self.crop(mark)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Raises ValueError for a negative length, or one beyond
        the tokens held."""
        if not isinstance(length, WHOLE) or not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cropped to {length}")
        self.extent.length = length
        if self.tokens is not None:
            self.tokens = self.tokens[:, :length] if length else None
        if self.segments is not None:
            self.segments = self.segments[:, :length] if length else None
            self._within = (
                None
                if self.segments is None
                else Positions.documents(self.segments).index()[:, -1:]
            )

    def select(self, rows: Tensor) -> None:
        """Make the rows `rows` (B',) int64 of the batch, in this order and as often as they occur,
        the rows of the cache."""
        for layer in self.layers:
            layer.select(rows)
        if self.tokens is not None:
            self.tokens = self.tokens.index_select(0, rows)
        if self.segments is not None and self._within is not None:
            self.segments, self._within = (
                self.segments.index_select(0, rows),
                self._within.index_select(0, rows),
            )

    def positions(self, tokens: int, segments: Tensor | None) -> tuple[Positions, Tensor | None]:
        """Positions of `tokens` new tokens, and the document ids (B, S) of all tokens including
        them.

        Raises:
            ValueError: if ids are given for some tokens and not for others.
        """
        if self.length and (segments is None) != (self.segments is None):
            raise ValueError("a cache holds document ids for all of its tokens or for none")
        if segments is None:
            return Positions.line(tokens, offset=self.length), None
        index = torch.arange(tokens, device=segments.device).expand_as(segments)
        before = torch.full_like(segments[:, :1], -1) if self._within is None else -1 - self._within
        last = segments[:, :1] if self.segments is None else self.segments[:, -1:]
        changed = torch.diff(segments, dim=1, prepend=last) != 0
        first = torch.where(changed, index, before.expand_as(index)).cummax(dim=1).values
        if self.segments is None:
            first = first.clamp(min=0)
        within = index - first
        self._within = within[:, -1:]
        self.segments = (
            segments if self.segments is None else torch.cat([self.segments, segments], dim=1)
        )
        return Positions(tokens, self.length, within=within), self.segments


def _store(buffer: Tensor | None, new: Tensor, extent: Extent) -> Tensor:
    """Write `new` after the tokens held into the (B, G, capacity, D) buffer, allocated or enlarged
    if too small."""
    start = extent.length
    if buffer is None or buffer.shape[2] < extent.capacity:
        larger = new.new_empty(new.shape[0], new.shape[1], extent.capacity, new.shape[3])
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer[:, :, start : start + new.shape[2]] = new
    return buffer
