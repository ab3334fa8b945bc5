"""The KV cache of causal decoding. Cached keys include their lanes; tables are sliced; memory grows in blocks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.attention.base import Kernel, fold_lanes
from zoo.attention.dispatch import prior_attention
from zoo.layers import AttentionCache
from zoo.naming import WHOLE, check_whole
from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms, RelativeTable

__all__ = ["Cache", "KVCache", "LayerCache", "Mark"]


class LayerCache(AttentionCache):
    """All keys and values of one layer in one buffer each.

    Attributes:
        keys, values: (B, Gk, capacity, R+d_c) and (B, G, capacity, D); None before the first token.
        carries: (B, H, capacity, 1) the prior's state after each token, as in `PriorTerms.carry`; None without one.
    """

    def __init__(self, owner: Cache) -> None:
        self._owner = weakref.ref(owner)  # a cycle would keep keys and values until the garbage collector comes by
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.carries: Tensor | None = None
        self._table: RelativeTable | None = None

    @property
    def owner(self) -> Cache:
        """The cache that this layer is of."""
        owner = self._owner()
        assert owner is not None
        return owner

    def __getstate__(self) -> dict[str, Any]:  # a copy of a cache has layers of its own
        return self.__dict__ | {"_owner": self.owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = weakref.ref(state["_owner"])

    @property
    def carry(self) -> Tensor | None:
        """(B, H) the prior's state after the last token held, or None."""
        return None if self.carries is None or not self.owner.length else self.carries[:, :, self.owner.length - 1, 0]

    def memory(self) -> int:
        """Bytes reserved for keys and values."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)

    def select(self, rows: Tensor) -> None:
        """As `Cache.select`."""
        if self.carries is not None:
            self.carries = self.carries.index_select(0, rows)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def terms(
        self, prior: Prior, x: Tensor, k: Tensor, queries: Positions, positions: Positions
    ) -> tuple[PriorTerms, Tensor]:
        """The prior's terms of the queries among the new tokens without key lanes, and keys with the lanes folded in."""
        terms = prior(queries, positions, causal=True, x=x, carry=self.carry)
        if terms.carry is not None:
            self.carries = _store(self.carries, terms.carry[..., None], self.owner.length, self.owner.capacity)
        if terms.k_lanes is not None:
            k = fold_lanes(k, terms.k_lanes)
        return replace(terms, k_lanes=None, offset=None), k  # which was relative to the new keys

    def table(self, prior: Prior, q_pos: Positions, k_pos: Positions) -> RelativeTable | None:
        """The prior's relative table for these positions; for one query a slice of a table computed once per capacity."""
        if q_pos.length > 1:
            return prior.relative_table(q_pos, k_pos, causal=True)
        if self._table is None or self._table.table.shape[1] < k_pos.length:
            far = max(self.owner.capacity, k_pos.length)
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
        query_scale: Tensor | None = None,
        segments: Tensor | None = None,
        window: int | None = None,
        mask: Tensor | None = None,
        kernel: str | Kernel = "auto",
    ) -> Tensor:
        queries = positions.tail(q.shape[2])
        terms, k = self.terms(prior, x, k, queries, positions)
        k, v = self.append(k, v)
        everything = Positions.line(k.shape[2])
        table = None if terms.table is None else self.table(prior, queries, everything)
        bias = None
        if terms.bias is not None:
            everything = everything if segments is None else Positions.documents(segments)
            bias = prior.dense_bias(queries, everything, causal=True)
        return prior_attention(
            q,
            k,
            v,
            replace(terms, table=table, bias=bias),
            causal=True,
            query_scale=query_scale,
            segments=segments,
            window=window,
            mask=mask,
            kernel=kernel,
        )

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, Gk, T, R+d_c) and (B, G, T, D) after the tokens held; returns views of all S tokens."""
        start = self.owner.length
        stop = start + keys.shape[2]
        self.keys = _store(self.keys, keys, start, self.owner.capacity)
        self.values = _store(self.values, values, start, self.owner.capacity)
        return self.keys[:, :, :stop], self.values[:, :, :stop]


@dataclass(frozen=True)
class Mark:
    """A saved state of a cache, for `rewind`."""

    length: int


class Cache:
    """Base of caches: token count, positions of the next tokens, mark/rewind, crop, and the choice of rows.

    Attributes:
        length: tokens held.
        capacity: tokens that fit.
        layers: one `LayerCache` per layer of the model.
        tokens: (B, length) ids of the tokens held, where a model looks at them again and so keeps them here (`keep`).
    """

    layers: Sequence[LayerCache]

    def __init__(self) -> None:
        self.length = self.capacity = 0
        self.segments: Tensor | None = None
        self.tokens: Tensor | None = None
        self._within: Tensor | None = None

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more."""
        raise NotImplementedError

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held, after every layer stored them."""
        self.length += tokens

    def keep(self, tokens: Tensor) -> Tensor:
        """Append ids (B, T) of new tokens to `tokens`, and return all of them."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        return self.tokens

    def memory(self) -> int:
        """Bytes that all layers reserve for keys and values."""
        return sum(layer.memory() for layer in self.layers)

    def mark(self) -> Mark:
        """This state, for `rewind`."""
        return Mark(self.length)

    def rewind(self, mark: Mark) -> None:
        """Drop the tokens after `mark`; the next keys overwrite theirs."""
        self.crop(mark.length)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; the next keys overwrite the others.

        Raises:
            ValueError: for a negative length, or one beyond the tokens held.
        """
        if not isinstance(length, WHOLE) or not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cropped to {length}")
        self.length = length
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


class KVCache(Cache):
    """Keys and values of all layers for batched causal decoding.

    Args:
        num_layers: layers of the model.
        capacity: tokens to reserve at once; 0 reserves in blocks on demand. A full cache grows by half, at least one block.
        block: tokens per block.
    """

    def __init__(self, num_layers: int, *, capacity: int = 0, block: int = 256) -> None:
        super().__init__()
        check_whole("num_layers", num_layers, 0)
        check_whole("capacity", capacity, 0)
        check_whole("block", block, 1)
        self.block = block
        self.capacity = -(-capacity // block) * block
        self.layers = [LayerCache(self) for _ in range(num_layers)]

    def reserve(self, tokens: int) -> None:
        needed = self.length + tokens
        if needed > self.capacity:
            grown = max(needed, self.capacity + self.capacity // 2)
            self.capacity = -(-grown // self.block) * self.block


def _store(held: Tensor | None, new: Tensor, start: int, capacity: int) -> Tensor:
    """Write `new` at row `start` of the (B, G, capacity, D) buffer, allocated or enlarged if too small."""
    if held is None or held.shape[2] < capacity:
        grown = new.new_empty(new.shape[0], new.shape[1], capacity, new.shape[3])
        if held is not None:
            grown[:, :, :start] = held[:, :, :start]
        held = grown
    held[:, :, start : start + new.shape[2]] = new
    return held
