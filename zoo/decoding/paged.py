"""A paged KV cache: each key head keeps its newest pages, back to the oldest that a future query can use.

A head whose prior decays keeps the last few pages, a retrieval head keeps all. Pages come from one pool per layer shared by
all heads, so memory is proportional to the pages held. `zoo.decoding.eviction` bounds the weight that eviction drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zoo.attention.base import AttentionCall, Kernel, repeat_heads
from zoo.attention.dispatch import prior_attention
from zoo.decoding.cache import Cache, LayerCache
from zoo.decoding.eviction import EvictionBound
from zoo.decoding.paged_attention import attend_gathered, paged_kernel
from zoo.decoding.pages import PageStore
from zoo.naming import check_whole
from zoo.positions import Positions
from zoo.priors.base import Prior

__all__ = ["PagedCache", "PagedLayer"]


class PagedLayer(LayerCache):
    """The pages of one layer. No gradient reaches the keys and values held."""

    def __init__(self, owner: PagedCache, bound: EvictionBound | None) -> None:
        super().__init__(owner)
        self.bound = bound
        self.store: PageStore | None = None

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
        """As `LayerCache.attend`.

        kernel: as in `prior_attention` for the first tokens, and for more than a page of later ones. For up to a page of them
            "triton", which "auto" selects on CUDA where no gradient is needed, reads pages in place; else they are gathered.

        Raises:
            ValueError: for a prior that returns a dense bias (FIRE), and for a mask.
        """
        if mask is not None:
            # The bound compares with the query's own key, which a mask may hide.
            raise ValueError("a paged cache evicts keys that it knows no mask of: use a dense cache (KVCache)")
        queries = positions.tail(q.shape[2])
        terms, k = self.terms(prior, x, k, queries, positions)
        if terms.bias is not None:
            raise ValueError(
                f"a paged cache serves priors made of lanes or of a table; {type(prior).__name__} returns a dense bias over "
                "all keys, evicted ones included: use a dense cache"
            )
        v = repeat_heads(v, k.shape[1])
        if query_scale is not None and query_scale.ndim == 2:
            query_scale = query_scale[None]
        if self.store is None:
            self.store = PageStore(k, v, block=self.owner.block, width=q.shape[-1])
        start, tokens = self.owner.length, k.shape[2]
        stop = start + tokens
        call = AttentionCall(q, k, v, terms, True, query_scale, segments, window)
        if start == 0 and tokens > 1:
            out = _dense(call, kernel)
            self.store.append(k, v, self._evictable(stop))
            return out
        table = None if terms.table is None else self.table(prior, queries, Positions.line(stop))
        call = replace(call, terms=replace(terms, table=table))
        if tokens > self.owner.block:
            # Attend to a long chunk beside the pages before storing it, so that pages evicted at once never enter the pool.
            out = attend_gathered(call, self.store.pages, self.store.counts, fresh=(k, v), kernel=kernel)
            self.store.append(k, v, self._evictable(stop))
            return out
        self.store.append(k, v, self._evictable(start))
        in_place = paged_kernel(call, kernel, self.owner.block)
        if in_place is None:
            return attend_gathered(call, self.store.pages, self.store.counts, kernel=kernel)
        ids = None if segments is None else segments.to(torch.int32).contiguous()
        return in_place(call, replace(self.store.pages, segments=ids))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.store is not None:
            self.store.select(rows)

    def memory(self) -> int:
        return 0 if self.store is None else self.store.memory()

    def _evictable(self, now: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """For `PageStore.append`: which pages no query at `now` or later can use; None while nothing may be evicted."""
        if self.bound is None or self.owner.marked:
            return None
        return partial(self._useless, self.bound, now)

    def _useless(self, bound: EvictionBound, now: int, max_norm: Tensor, last: Tensor) -> Tensor:
        """`EvictionBound.evictable` at `now`, which the cache remembers."""
        self.owner.evicted = max(self.owner.evicted, now)
        return bound.evictable(max_norm, last, now, documents=self.owner.segments is not None)


def _dense(call: AttentionCall, kernel: str | Kernel) -> Tensor:
    """Attention among the first tokens of a cache."""
    return prior_attention(
        call.q,
        call.k,
        call.v,
        call.terms,
        causal=True,
        query_scale=call.query_scale,
        segments=call.segments,
        window=call.window,
        kernel=kernel,
    )


class PagedCache(Cache):
    """Keys and values in pages; each layer, batch row and key head drops the oldest ones, which cannot be used any more.

    Nothing is evicted while a `mark` is alive, since `rewind` may need it.

    Attributes:
        evicted: keys may be gone that queries before this position need.

    Args:
        num_layers: layers of the model.
        horizon: maximum number of tokens; evicted keys are negligible for queries up to there.
        block: tokens per page. Kernels on CUDA take powers of two from 16 on.
        bounds: one per layer, for at least this horizon; None evicts nothing.

    Raises:
        ValueError: for a block or horizon below 1, or bounds for another number of layers or a shorter horizon.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        horizon: int,
        block: int = 64,
        bounds: Sequence[EvictionBound] | None = None,
    ) -> None:
        super().__init__()
        check_whole("num_layers", num_layers, 0)
        check_whole("block", block, 1)
        check_whole("horizon", horizon, 1)
        each: Sequence[EvictionBound | None] = [None] * num_layers if bounds is None else bounds
        if len(each) != num_layers or any(bound is not None and bound.horizon < horizon for bound in each):
            raise ValueError(
                f"a paged cache needs an eviction bound for each of {num_layers} layers up to {horizon} tokens"
            )
        self.block, self.horizon = block, horizon
        self.evicted = 0
        self.layers: list[PagedLayer] = [PagedLayer(self, bound) for bound in each]

    @property
    def marked(self) -> bool:
        """Whether a mark is alive."""
        return len(self._marks) > 0

    def reserve(self, tokens: int) -> None:
        """Check that `tokens` more are within the horizon. Pages are allocated when they are filled.

        Raises:
            ValueError: beyond the horizon, where the eviction bound does not hold.
        """
        needed = self.length + tokens
        if needed > self.horizon:
            raise ValueError(
                f"this cache was made for {self.horizon} tokens and holds {self.length}: no room for {tokens} more; "
                "make it with a longer horizon"
            )
        if needed > self.capacity:
            self.capacity = min(max(needed, 2 * self.capacity, self.block), self.horizon)

    def crop(self, length: int) -> None:
        """As `Cache.crop`; ValueError also below the position for which pages were last evicted."""
        if 0 < length < self.evicted:
            raise ValueError(
                f"keys that queries from {length} to {self.evicted} need may be evicted: take a `mark` before the tokens to "
                "be dropped are read, or use a dense cache"
            )
        super().crop(length)
        self.evicted = min(self.evicted, length)
        for layer in self.layers:
            if layer.store is not None:
                layer.store.truncate(self.length)

    def held(self) -> Tensor:
        """(layers, B, G) int64: pages held; G is H where lanes make keys differ per head. (layers, 0, 0) of an empty cache."""
        counts = [layer.store.pages.count for layer in self.layers if layer.store is not None]
        return torch.stack(counts).long() if counts else torch.zeros(len(self.layers), 0, 0, dtype=torch.int64)
