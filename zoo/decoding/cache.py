"""The KV cache of causal decoding. Cached keys include their lanes; tables are sliced; memory grows in blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.attention.base import fold_lanes
from zoo.attention.dispatch import prior_attention
from zoo.errors import WHOLE, check_whole
from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms, RelativeTable

__all__ = ["KVCache", "LayerCache"]


@dataclass
class Extent:
    """Tokens held, and tokens that fit; the layers of a cache share it."""

    length: int = 0
    capacity: int = 0


class LayerCache:
    """All keys and values of one layer in one buffer each.

    Attributes:
        keys, values: (B, Gk, capacity, R+d_c) and (B, G, capacity, D); None before the first token.
        carries: (B, H, capacity, 1) the prior's state after each token, as in `PriorTerms.carry`; None without one.
    """

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.carries: Tensor | None = None
        self._table: RelativeTable | None = None

    def select(self, rows: Tensor) -> None:
        """As `KVCache.select`."""
        buffers = (self.keys, self.values, self.carries)
        self.keys, self.values, self.carries = (None if x is None else x.index_select(0, rows) for x in buffers)

    def terms(
        self, prior: Prior, x: Tensor, k: Tensor, queries: Positions, positions: Positions
    ) -> tuple[PriorTerms, Tensor]:
        """The prior's terms of the queries among the new tokens without key lanes, and keys with the lanes folded in."""
        length, carry = self.extent.length, None
        if self.carries is not None and length:
            carry = self.carries[:, :, length - 1, 0]
        terms = prior(queries, positions, causal=True, x=x, carry=carry)
        if terms.carry is not None:
            self.carries = _store(self.carries, terms.carry[..., None], self.extent)
        if terms.k_lanes is not None:
            k = fold_lanes(k, terms.k_lanes)
        return replace(terms, k_lanes=None, offset=None), k  # which was relative to the new keys

    def table(self, prior: Prior, q_pos: Positions, k_pos: Positions) -> RelativeTable | None:
        """The prior's relative table for these positions; for one query a slice of a table computed once per capacity."""
        if q_pos.length > 1:
            return prior.relative_table(q_pos, k_pos, causal=True)
        if self._table is None or self._table.table.shape[1] < k_pos.length:
            far = max(self.extent.capacity, k_pos.length)
            self._table = prior.relative_table(Positions.line(1, offset=far - 1), Positions.line(far), causal=True)
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
        """Store k and v of the new tokens and attend to all tokens so far: (B, H, Q, D). Options as in `prior_attention`.

        Args:
            prior: of this layer.
            x: (B, T, C) the layer's input at the new tokens.
            q, k, v: (B, H, Q, d_c), (B, G, T, d_c), (B, G, T, D): queries of the last Q of the T new tokens.
            positions: of the new tokens.
            segments: (B, S) document ids of all tokens.
        """
        queries = positions.tail(q.shape[2])
        terms, k = self.terms(prior, x, k, queries, positions)
        k, v = self.append(k, v)
        k_pos = Positions.line(k.shape[2])
        table = None if terms.table is None else self.table(prior, queries, k_pos)
        bias = None
        if terms.bias is not None:
            k_pos = k_pos if segments is None else Positions.documents(segments)
            bias = prior.dense_bias(queries, k_pos, causal=True)
        terms = replace(terms, table=table, bias=bias)
        return prior_attention(q, k, v, terms, causal=True, segments=segments, **options)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, Gk, T, R+d_c) and (B, G, T, D) after the tokens held; returns views of all S tokens."""
        stop = self.extent.length + keys.shape[2]
        self.keys, self.values = _store(self.keys, keys, self.extent), _store(self.values, values, self.extent)
        return self.keys[:, :, :stop], self.values[:, :, :stop]


class KVCache:
    """Keys and values of all layers for batched causal decoding.

    Args:
        num_layers: layers of the model.
        capacity: tokens to reserve at once; 0 reserves in blocks on demand. A full cache grows by half, at least one block.
        block: tokens per block.

    Attributes:
        length, capacity: tokens held, and tokens that fit.
        layers: one `LayerCache` per layer of the model.
        tokens: (B, length) ids of the tokens held, where a model keeps them here (`keep`).
        segments: (B, length) document ids, or None.
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
        """Keep the first `length` tokens. Raises ValueError for a negative length, or one beyond the tokens held."""
        if not isinstance(length, WHOLE) or not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cropped to {length}")
        self.extent.length = length
        if self.tokens is not None:
            self.tokens = self.tokens[:, :length] if length else None
        if self.segments is not None:
            self.segments = self.segments[:, :length] if length else None
            self._within = None if self.segments is None else Positions.documents(self.segments).index()[:, -1:]

    def select(self, rows: Tensor) -> None:
        """Make the rows `rows` (B',) int64 of the batch, in this order and as often as they occur, the rows of the cache."""
        for layer in self.layers:
            layer.select(rows)
        if self.tokens is not None:
            self.tokens = self.tokens.index_select(0, rows)
        if self.segments is not None and self._within is not None:
            self.segments, self._within = self.segments.index_select(0, rows), self._within.index_select(0, rows)

    def positions(self, tokens: int, segments: Tensor | None) -> tuple[Positions, Tensor | None]:
        """Positions of `tokens` new tokens, and the document ids (B, S) of all tokens including them.

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
        self.segments = segments if self.segments is None else torch.cat([self.segments, segments], dim=1)
        return Positions(tokens, self.length, within=within), self.segments


def _store(buffer: Tensor | None, new: Tensor, extent: Extent) -> Tensor:
    """Write `new` after the tokens held into the (B, G, capacity, D) buffer, allocated or enlarged if too small."""
    start = extent.length
    if buffer is None or buffer.shape[2] < extent.capacity:
        larger = new.new_empty(new.shape[0], new.shape[1], extent.capacity, new.shape[3])
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer[:, :, start : start + new.shape[2]] = new
    return buffer
