"""The KV cache of causal decoding. Lanes are inside the cached keys, tables are sliced, memory comes in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.positions import Positions
from zoo.priors.base import Prior, RelativeTable

__all__ = ["KVCache", "LayerCache"]


class LayerCache:
    """Keys (with their lanes), values, the prior's table and its running sum, of one layer."""

    def __init__(self, owner: KVCache) -> None:
        self.owner = owner
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.carry: Tensor | None = None
        self._table: RelativeTable | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, Gk, T, R+d_c) and (B, G, T, D) after what is held; returns views of all S tokens."""
        start = self.owner.length
        stop = start + keys.shape[2]
        self.keys = _store(self.keys, keys, start, self.owner.capacity)
        self.values = _store(self.values, values, start, self.owner.capacity)
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def table(self, prior: Prior, q_pos: Positions, k_pos: Positions) -> RelativeTable | None:
        """The prior's relative table for these positions; for one query a slice of a table computed once."""
        if q_pos.length > 1:
            return prior(q_pos, k_pos, causal=True).table
        if self._table is None or self._table.table.shape[1] < k_pos.length:
            far = self.owner.capacity
            self._table = prior(Positions.line(1, offset=far - 1), Positions.line(far), causal=True).table
        return None if self._table is None else self._table.shifted(q_pos, k_pos)


class KVCache:
    """Keys and values of all layers for batched causal decoding.

    Args:
        num_layers: layers of the model.
        capacity: tokens to reserve at once; 0 reserves as they come, in blocks. A full cache grows by half, or one block.
        block: tokens per block.
    """

    def __init__(self, num_layers: int, *, capacity: int = 0, block: int = 256) -> None:
        if block < 1 or capacity < 0:
            raise ValueError(f"a cache needs block >= 1 and capacity >= 0, got {block} and {capacity}")
        self.block = block
        self.length = 0
        self.capacity = -(-capacity // block) * block
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.segments: Tensor | None = None
        self._within: Tensor | None = None

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more."""
        needed = self.length + tokens
        if needed > self.capacity:
            grown = max(needed, self.capacity + self.capacity // 2)
            self.capacity = -(-grown // self.block) * self.block

    def advance(self, tokens: int) -> None:
        """Count `tokens` as held, after every layer appended them."""
        self.length += tokens

    def mark(self) -> tuple:
        """This state, for `rewind`."""
        return self.length, self.segments, self._within, [layer.carry for layer in self.layers]

    def rewind(self, mark: tuple) -> None:
        """Forget what came after `mark`; the next keys overwrite those of the forgotten tokens."""
        self.length, self.segments, self._within, carries = mark
        for layer, carry in zip(self.layers, carries, strict=True):
            layer.carry = carry

    def positions(self, tokens: int, segments: Tensor | None) -> tuple[Positions, Tensor | None]:
        """Where `tokens` new ones are, and the document ids (B, S) of all, new ones included.

        Raises:
            ValueError: when ids are given for some tokens and not for others.
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


def _store(held: Tensor | None, new: Tensor, start: int, capacity: int) -> Tensor:
    """Write `new` at row `start` of the (B, G, capacity, D) buffer, made or enlarged where it is too small."""
    if held is None or held.shape[2] < capacity:
        grown = new.new_empty(new.shape[0], new.shape[1], capacity, new.shape[3])
        if held is not None:
            grown[:, :, :start] = held[:, :, :start]
        held = grown
    held[:, :, start : start + new.shape[2]] = new
    return held
