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
from zoo.attention.heads import HALF_PRECISION, fold_lanes, in_half_precision
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

    Attributes:
        length: most tokens, the next one included.
        by_distance, by_key: (H, length), the farthest and the first key first; None: zeros.
        drop: (H, length) float64, how far K at so many tokens or more is below that of the own key
            at least.
        level: (H, 1) K of sinks less by_key of the own key.
        lanes: (1, 1 or H, length, R) of keys, which a cache holds.
        serves: whether K is such a sum, and finite.
        sink: as in `PriorTerms`.
    """

    length: int
    by_distance: Tensor | None
    by_key: Tensor | None
    drop: Tensor
    level: Tensor
    lanes: Tensor
    serves: bool
    sink: Tensor | None = None

    @staticmethod
    def from_prior(prior: Prior, length: int, dtype: torch.dtype) -> NextRow:
        """The row of at most `length` tokens in `dtype`."""
        rows = None
        # Parameters that are elsewhere only `forward` gathers.
        absent = any(p.is_meta or not p.numel() for p in prior.parameters())
        if not absent and not prior.depends_on_content:
            rows = prior.next_row(length)
        none = torch.empty(0)
        if rows is None or not all(bool(row.isfinite().all()) for row in rows):
            return NextRow(length, None, None, none, none, none, serves=False)
        by_distance, by_key = rows
        line = Positions.line(length)
        terms = prior(line.tail(1), line, causal=True)
        if dtype in HALF_PRECISION:
            terms = terms.cut_lanes()
        # The largest K at so many tokens or more: a running maximum from the far end.
        largest = by_distance.flip(-1).cummax(-1).values.flip(-1)
        spread = by_key.amax(-1, keepdim=True) - by_key.amin(-1, keepdim=True)
        return NextRow(
            length,
            by_distance=by_distance.flip(-1).to(dtype) if by_distance.any() else None,
            by_key=by_key.to(dtype) if by_key.any() else None,
            drop=by_distance[:, :1] - largest - spread,
            level=prior.lanes_at_query().to(dtype),
            lanes=none if terms.k_lanes is None else terms.k_lanes,
            serves=True,
            sink=terms.sink,
        )

    def bias(
        self, heads: slice, stop: int, reach: int, sinks: int, scale: Tensor | None
    ) -> Tensor | None:
        """(1 or B, h, sinks + reach) for sinks and the last keys of `stop`, times the row scale (1
        or B, H, 1)."""
        bias = None
        if self.by_distance is not None:
            bias = self.by_distance[None, heads, self.length - reach :]
        if self.by_key is not None:
            by_key = self.by_key[None, heads, stop - reach : stop]
            bias = by_key if bias is None else bias + by_key
        if bias is None:
            return None
        if sinks:
            level = self.level_at(stop)[None, heads].expand(-1, -1, sinks)
            bias = torch.cat([level, bias], dim=-1)
        return bias if scale is None else bias * scale[:, heads]

    def level_at(self, stop: int) -> Tensor:
        """(H, 1) K of sinks for the last of `stop` tokens."""
        if self.by_key is None:
            return self.level
        return self.level + self.by_key[:, stop - 1 : stop]


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
        # (G,) the largest norm of the first so many keys of each head, and their number.
        self._largest_norms: tuple[Tensor, int] | None = None

    def select(self, rows: Tensor) -> None:
        """As `KVCache.select`."""
        for name in ("keys", "values", "carries"):
            buffer = getattr(self, name)
            if buffer is not None:
                setattr(self, name, buffer.index_select(0, rows))

    def table(
        self, prior: Prior, q_pos: Positions, k_pos: Positions, x: Tensor | None = None
    ) -> RelativeTable | None:
        """The prior's relative table for these positions; for one query a slice of a table computed
        once per capacity."""
        if q_pos.length > 1:
            return prior.beside_lanes(q_pos, k_pos, causal=True, x=x).table
        if self._table is None or self._table.table.shape[1] < k_pos.length:
            length = max(self.extent.capacity, k_pos.length)
            last = Positions.line(1, offset=length - 1)
            line = Positions.line(length)
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

        Args:
            x: (B, T, C) the layer's input at the T new tokens.
            q, k, v: (B, H, Q, d_c) of the last Q of them, (B, G, T, d_c), (B, G, T, D).
            positions: of the new tokens.
            segments: (B, S) document ids of all tokens.
        """
        if q.shape[2] == k.shape[2] == 1 and segments is None and positions.within is None:
            out = self._attend_next(prior, q, k, v, **options)
            if out is not None:
                return out
        q_pos = positions.tail(q.shape[2])
        length = self.extent.length
        state = {}
        if self.carries is not None and length:
            state["carry"] = self.carries[:, :, length - 1, 0]
        terms = prior(q_pos, positions, causal=True, x=x, **state)
        if terms.carry is not None:
            self.carries = _store(self.carries, terms.carry[..., None], self.extent)
        if terms.k_lanes is not None:
            if in_half_precision(k):
                terms = terms.cut_lanes()
            k = fold_lanes(k, terms.k_lanes)
        k, v = self.append(k, v)
        k_pos = Positions.line(k.shape[2])
        gain = None
        if terms.gain is not None:
            gain = prior.beside_lanes(q_pos, k_pos, causal=True, x=x).gain
        table = None
        if terms.table is not None:
            table = self.table(prior, q_pos, k_pos, x)
        bias = None
        if terms.bias is not None:
            if segments is not None:
                k_pos = Positions.documents(segments)
            bias = prior.beside_lanes(q_pos, k_pos, causal=True, x=x).bias
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
        if kernel != "auto" or type(q) is not Tensor or q.device.type != "cpu":
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if not q.dtype == k.dtype == v.dtype:
            return None
        stop = self.extent.length + 1
        row = self._next_row(prior, stop, q.dtype)
        width = q.shape[-1]
        value_width = v.shape[-1]
        num_lanes = row.lanes.shape[-1]
        if stop < FEWEST_KEYS or not row.serves:
            return None
        if value_width not in (width, width + num_lanes):
            return None
        if num_lanes:
            k = fold_lanes(k, row.lanes[:, :, stop - 1 : stop])
        keys, values = self.append(k, v)
        groups = values.shape[1]
        group_size = q.shape[1] // groups
        # Lanes are the first columns of cached keys, and may differ for query heads with a key head
        # in common, whose content is the same. Here K is a bias: one key head of each is enough.
        keys = keys[:, :: keys.shape[1] // groups, :, keys.shape[-1] - value_width :]
        reaches = [stop if window is None else min(window, stop)] * groups
        if stop >= LONG and window is None and SKIPS.get():
            reaches = self._reaches(row, q, keys[..., value_width - width :], query_scale)
        scale = 1.0 / math.sqrt(width)
        if query_scale is not None:
            q = (q * (query_scale[..., None] * scale)).to(q.dtype)
            scale = 1.0
        if value_width > width:
            # Zeros for the lanes that are left in the keys.
            q = F.pad(q, (value_width - width, 0))
        q = q.reshape(len(q), groups, group_size, value_width)
        sink = row.sink
        if sink is not None:
            # (1 or B, G, H/G)
            level = row.level_at(stop)
            if query_scale is not None:
                level = level * query_scale
            sink = (sink[:, None] + level).view(-1, groups, group_size)
        sinks = min(sinks, stop)
        parts = []
        # Groups that follow each other and reach equally far are one call.
        for reach, members in groupby(range(groups), key=reaches.__getitem__):
            numbers = list(members)
            run = slice(numbers[0], numbers[-1] + 1)
            heads = slice(run.start * group_size, run.stop * group_size)
            first = max(stop - reach, sinks)
            bias = row.bias(heads, stop, stop - first, sinks, query_scale)
            if bias is not None:
                bias = bias.unflatten(1, (-1, group_size))
            out, lse = FUSED(
                q[:, run],
                _visible(keys[:, run], first, sinks),
                _visible(values[:, run], first, sinks),
                0.0,
                False,
                attn_mask=bias,
                scale=scale,
            )
            if sink is not None:
                # The learned sink takes its share of the softmax.
                out = out * (lse - sink[:, run]).sigmoid()[..., None]
            parts.append(out)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(len(q), -1, 1, value_width)

    def _next_row(self, prior: Prior, length: int, dtype: torch.dtype) -> NextRow:
        """The prior's row, made anew where the one in the cache is too short."""
        if self._row is None or self._row.length < length:
            wide = torch.promote_types(dtype, torch.float32)
            self._row = NextRow.from_prior(prior, max(self.extent.capacity, length), wide)
        return self._row

    def _reaches(
        self, row: NextRow, q: Tensor, keys: Tensor, query_scale: Tensor | None
    ) -> list[int]:
        """Of each key head how many of the last keys may weigh something: all others together weigh
        less than 2^−24."""
        batch, groups, length, width = keys.shape
        if self._largest_norms is None:
            largest = torch.zeros(groups, dtype=torch.float64)
            counted = 0
        else:
            largest, counted = self._largest_norms
        largest = torch.maximum(largest, norms(keys[:, :, counted:]).amax((0, 2)))
        self._largest_norms = largest, length
        q_norms = norms(q).amax((0, 2)).unflatten(0, (groups, -1))
        # Logits of the content are within ±|q|·|k|/√d of each other, so that K decides from twice
        # that on.
        content = 2.0 / math.sqrt(width) * q_norms * largest[:, None]
        margin = torch.full_like(content, math.log(length / LEFT_OUT)).flatten()
        if query_scale is not None:
            least = query_scale.amin((0, 2)).double()
            margin = torch.where(least > 0, margin / least, math.inf)
        reach = torch.searchsorted(row.drop, (content.flatten() + margin)[:, None])
        furthest = reach.view(content.shape).amax(1)
        # Whole steps, so that most groups have the same and are one call.
        reaches = [min(-(-count // STEP) * STEP, length) for count in furthest.tolist()]
        tally = TALLY.get()
        if tally is not None:
            skipped = sum(length - count for count in reaches)
            tally.left_out += skipped * batch * (q.shape[1] // groups)
        return reaches

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, Gk, T, R+d_c) and (B, G, T, D) after the tokens held; returns views of all S
        tokens."""
        start = self.extent.length
        stop = start + keys.shape[2]
        if self._largest_norms is not None:
            # Keys after `start` are replaced and count anew.
            largest, counted = self._largest_norms
            self._largest_norms = largest, min(counted, start)
        self.keys = _store(self.keys, keys, self.extent)
        self.values = _store(self.values, values, self.extent)
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVCache:
    """Keys and values of all layers for batched causal decoding, a `LayerCache` each in `layers`.

    Args:
        capacity: tokens to reserve at once; 0 reserves blocks of `block` tokens on demand. A full
            cache grows by half.

    Attributes:
        tokens, segments: (B, length) ids and document ids of the tokens held, or None.
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
        # (B, 1) the last token's index in its document.
        self._within: Tensor | None = None

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
        return sum(_bytes(layer.keys) + _bytes(layer.values) for layer in self.layers)

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
        if self.segments is not None and length:
            self.segments = self.segments[:, :length]
            self._within = Positions.documents(self.segments).index()[:, -1:]
        else:
            self.segments = None
            self._within = None

    def select(self, rows: Tensor) -> None:
        """Make the rows `rows` (B',) int64 of the batch, in this order and as often as they occur,
        the rows of the cache."""
        for layer in self.layers:
            layer.select(rows)
        if self.tokens is not None:
            self.tokens = self.tokens.index_select(0, rows)
        if self.segments is not None and self._within is not None:
            self.segments = self.segments.index_select(0, rows)
            self._within = self._within.index_select(0, rows)

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
        # The column of each row where the last document so far began, counted from the new tokens:
        # a negative number.
        start = torch.full_like(segments[:, :1], -1) if self._within is None else -1 - self._within
        last = segments[:, :1] if self.segments is None else self.segments[:, -1:]
        changed = torch.diff(segments, dim=1, prepend=last) != 0
        first = torch.where(changed, index, start.expand_as(index)).cummax(dim=1).values
        if self.segments is None:
            self.segments = segments
            first = first.clamp(min=0)
        else:
            self.segments = torch.cat([self.segments, segments], dim=1)
        within = index - first
        self._within = within[:, -1:]
        return Positions(tokens, self.length, within=within), self.segments


def _visible(x: Tensor, first: int, sinks: int) -> Tensor:
    """The first `sinks` of keys or values x (B, G, S, D), and those from `first` on."""
    if first == sinks:
        return x
    last = x[:, :, first:]
    if not sinks:
        return last
    return torch.cat([x[:, :, :sinks], last], dim=2)


def _bytes(buffer: Tensor | None) -> int:
    return 0 if buffer is None else buffer.numel() * buffer.element_size()


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
