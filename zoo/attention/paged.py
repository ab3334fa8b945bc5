"""A KV cache in pages, which each key head keeps only as long as a query to come can use them.

A head whose prior decays needs the last few pages, a retrieval head all of them; pages that one drops are another's next. So
memory follows the retrieval heads. What is dropped is proven to be of no use (`zoo.attention.forget`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zoo.attention.base import AttentionCall, repeat_heads
from zoo.attention.cache import Cache, LayerCache, Mark
from zoo.attention.dispatch import prior_attention
from zoo.attention.forget import Certificate
from zoo.attention.gathered import attend_gathered, kernel_for
from zoo.attention.pages import Pages, PageStore
from zoo.positions import Positions
from zoo.priors.base import Prior

__all__ = ["PagedCache", "PagedLayer", "Pages"]


class PagedLayer(LayerCache):
    """The pages of one layer. No gradient reaches the keys and values held."""

    def __init__(self, owner: PagedCache, certificate: Certificate | None) -> None:
        super().__init__(owner)
        self.owner: PagedCache = owner
        self.certificate = certificate
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
        kernel: str = "auto",
    ) -> Tensor:
        """As `LayerCache.attend`.

        kernel: of the first tokens as in `prior_attention`. Later ones are attended to by "triton", which "auto" takes on
            CUDA where no gradient is wanted, and with any other by gathering the pages.

        Raises:
            ValueError: for a prior that hands over a dense bias (FIRE).
        """
        terms, k = self.terms(prior, x, k, positions)
        if terms.bias is not None:
            raise ValueError(
                f"a paged cache serves priors made of lanes or of a table; {type(prior).__name__} hands over a dense bias "
                "over all keys, dropped ones too: use a dense cache"
            )
        v = repeat_heads(v, k.shape[1])
        if query_scale is not None and query_scale.ndim == 2:
            query_scale = query_scale[None]
        if self.store is None:
            self.store = PageStore(k, v, block=self.owner.block, width=q.shape[-1])
        start, tokens = self.owner.length, q.shape[2]
        stop = start + tokens
        call = AttentionCall(q, k, v, terms, True, query_scale, segments, window)
        if start == 0 and tokens > 1:
            out = _dense(call, kernel)
            self.store.keep(k, v, self._dead(stop))
            return out
        table = None if terms.table is None else self.distances(prior, stop)
        table = None if table is None else table.shifted(positions, Positions.line(stop))
        call = replace(call, terms=replace(terms, table=table))
        in_place = kernel_for(call, kernel, self.owner.block)
        if in_place is None and tokens > self.owner.block:
            # A long chunk is read beside the pages and then stored, so that the pool never holds what is dropped at once.
            out = attend_gathered(call, self.store.pages, self.store.counts, fresh=(k, v))
            self.store.keep(k, v, self._dead(stop))
            return out
        self.store.keep(k, v, self._dead(start))
        if in_place is None:
            return attend_gathered(call, self.store.pages, self.store.counts)
        ids = None if segments is None else segments.to(torch.int32).contiguous()
        return in_place(call, replace(self.store.pages, segments=ids))

    def memory(self) -> int:
        return 0 if self.store is None else self.store.memory()

    def _dead(self, now: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Which pages no query at `now` or later can use, for `PageStore.keep`; None while all must stay."""
        if self.certificate is None or self.owner.marked:
            return None
        return partial(self.certificate.dead, now=now, documents=self.owner.segments is not None)


def _dense(call: AttentionCall, kernel: str) -> Tensor:
    """The first tokens of a cache, which are all there are."""
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
    """Keys and values in pages, of which each layer, batch row and key head holds only those that can still be used.

    While a `mark` is kept nothing is dropped, for its `rewind` may need it.

    Args:
        num_layers: layers of the model.
        horizon: the most tokens the cache will ever hold; what is dropped is of no use up to there, and no further.
        block: tokens per page. Kernels on CUDA take powers of two from 16 on.
        certificates: of each layer, made for this horizon; None drops nothing.

    Raises:
        ValueError: for a block or horizon below 1, or certificates of other layers or another horizon.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        horizon: int,
        block: int = 64,
        certificates: Sequence[Certificate] | None = None,
    ) -> None:
        super().__init__()
        if block < 1 or horizon < 1:
            raise ValueError(f"a paged cache needs block >= 1 and horizon >= 1, got {block} and {horizon}")
        proofs: Sequence[Certificate | None] = [None] * num_layers if certificates is None else certificates
        if len(proofs) != num_layers or any(p is not None and p.horizon < horizon for p in proofs):
            raise ValueError(
                f"a paged cache needs a certificate for each of {num_layers} layers up to {horizon} tokens"
            )
        self.block, self.horizon = block, horizon
        self.layers: list[PagedLayer] = [PagedLayer(self, proof) for proof in proofs]

    @property
    def marked(self) -> bool:
        """Whether a mark is still kept by anyone."""
        return len(self._marks) > 0

    def reserve(self, tokens: int) -> None:
        """Check that `tokens` more are within the horizon. Pages are made when they are filled.

        Raises:
            ValueError: beyond the horizon, for which nothing was proven.
        """
        needed = self.length + tokens
        if needed > self.horizon:
            raise ValueError(
                f"this cache was made for {self.horizon} tokens and holds {self.length}: no room for {tokens} more; "
                "make it with a longer horizon"
            )
        if needed > self.capacity:
            self.capacity = min(max(needed, 2 * self.capacity, self.block), self.horizon)

    def rewind(self, mark: Mark) -> None:
        super().rewind(mark)
        for layer in self.layers:
            if layer.store is not None:
                layer.store.cut(self.length)

    def held(self) -> Tensor:
        """(layers, B, G) int64: pages held; G is H where lanes make keys differ per head. (layers, 0, 0) of an empty cache."""
        counts = [layer.store.pages.count for layer in self.layers if layer.store is not None]
        return torch.stack(counts).long() if counts else torch.zeros(len(self.layers), 0, 0, dtype=torch.int64)
