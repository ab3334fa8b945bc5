"""The page pool of one layer: allocation, the page table of each key head, and eviction, the oldest pages first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zoo.attention.base import Pages

__all__ = ["PageStore"]


class PageStore:
    """The pages of one layer. Appending evicts where new pages begin, with one device synchronisation for the counts.

    Attributes:
        pages: pool and page table.
        counts: pages.count on the host, length B·G.

    Args:
        k, v: (B, G, T, Dk) and (B, G, T, Dv), examples of shape, dtype and device.
        block: positions of a page.
        width: d_c, the last columns of a key.
    """

    def __init__(self, k: Tensor, v: Tensor, *, block: int, width: int) -> None:
        self.block, self.width = block, width
        none = torch.empty(*k.shape[:2], 0, dtype=torch.int32, device=k.device)
        self.pages = Pages(
            keys=k.new_empty(0, block, k.shape[3]),
            values=v.new_empty(0, block, v.shape[3]),
            index=none,
            start=none,
            count=none.new_zeros(k.shape[:2]),
            length=0,
        )
        self.counts = [0] * k.shape[:2].numel()
        self._max_norm = none.float()  # (B, G, n) max‖k‖, content columns, of each full page
        self._free = none.new_empty(0, dtype=torch.int64)  # free pages of the pool

    @property
    def newest(self) -> Tensor:
        """(B, G, 1) int64 place of the last page in each list."""
        return (self.pages.count[..., None].long() - 1).clamp(min=0)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, evictable: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        """Store (B, G, T, Dk) and (B, G, T, Dv) after the tokens held.

        Args:
            evictable: maps max‖k‖ and last position of full pages, both (B, G, n), to bool; called where new pages begin.
                None evicts nothing.
        """
        at, tokens = self.pages.length, k.shape[2]
        self.pages = replace(self.pages, length=at + tokens)
        filled = min(-at % self.block, tokens)
        if filled:
            self._fill(k[:, :, :filled], v[:, :, :filled], at % self.block)
        if filled < tokens:
            self._begin_pages(k[:, :, filled:], v[:, :, filled:], at + filled, evictable)

    def truncate(self, length: int) -> None:
        """Free the pages of positions from `length` on."""
        pages = self.pages
        later = self._listed() & (pages.start >= length)
        self._free = torch.cat([self._free, pages.index[later].long()])
        count = pages.count - later.sum(2)
        self.pages = replace(pages, count=count.to(torch.int32), length=length)
        self.counts = count.flatten().tolist()

    def select(self, rows: Tensor) -> None:
        """Make `rows` (B',) of the batch its rows, each with pages of its own, in a pool of just these."""
        listed, pages = self._listed()[rows], self.pages
        ids = pages.index[rows][listed].long()
        index = pages.index.new_zeros(listed.shape)
        index[listed] = torch.arange(len(ids), dtype=index.dtype, device=index.device)
        keys, values = pages.keys.index_select(0, ids), pages.values.index_select(0, ids)
        start, count = pages.start[rows], pages.count[rows]
        self.pages = replace(pages, keys=keys, values=values, index=index, start=start, count=count)
        self.counts, self._max_norm = count.flatten().tolist(), self._max_norm[rows]
        self._free = self._free[:0]

    def memory(self) -> int:
        """Bytes of the pool."""
        return sum(pool.numel() * pool.element_size() for pool in (self.pages.keys, self.pages.values))

    def _listed(self) -> Tensor:
        """(B, G, n) bool: valid entries of the page table."""
        pages = self.pages
        return torch.arange(pages.index.shape[2], device=pages.index.device) < pages.count[..., None]

    def _fill(self, k: Tensor, v: Tensor, row: int) -> None:
        """Write tokens to the newest page of every head, from `row` on."""
        pages = self.pages
        ids = pages.index.gather(2, self.newest)[..., 0].long()
        pages.keys[ids, row : row + k.shape[2]] = k
        pages.values[ids, row : row + v.shape[2]] = v

    def _begin_pages(self, k: Tensor, v: Tensor, at: int, evictable: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        """Tokens from position `at`, the first of a page: evict, then store the new pages that are not evictable themselves."""
        if self.pages.index.shape[2]:  # the newest page is full now
            full = self.pages.keys[self.pages.index.gather(2, self.newest).long()]
            self._max_norm.scatter_(2, self.newest, _norms(full, self.width))
        pages, (batch, groups, tokens), block = self.pages, k.shape[:3], self.block
        whole = tokens // block
        blocks = [x[:, :, : whole * block].unflatten(2, (whole, block)) for x in (k, v)]
        starts = torch.arange(at, at + tokens, block, dtype=torch.int32, device=k.device).expand(batch, groups, -1)
        new = starts.new_zeros(starts.shape)
        norms = new.float()
        norms[..., :whole] = _norms(blocks[0], self.width)
        start, max_norm = torch.cat([pages.start, starts], dim=2), torch.cat([self._max_norm, norms], dim=2)
        held = pages.index.shape[2]
        listed = torch.cat([self._listed(), torch.ones_like(new, dtype=torch.bool)], dim=2)
        live = listed.clone()
        if evictable is not None:
            useless = evictable(max_norm, start + block - 1) | ~listed
            useless[..., held + whole :] = False  # only full pages can be evicted
            live &= ~useless.cummin(dim=2).values  # and the oldest first, so that a head's keys stay one stretch
        evicted, made = listed[..., :held] & ~live[..., :held], live[..., held:]
        count = live.sum(2)
        *counts, num_evicted, num_made = torch.cat([count.flatten(), evicted.sum()[None], made.sum()[None]]).tolist()

        self._free = torch.cat([self._free, pages.index.flatten()[_first(evicted, num_evicted)].long()])
        new.view(-1)[_first(made, num_made)] = self._take(num_made).to(torch.int32)
        order = live.logical_not().to(torch.uint8).argsort(dim=2, stable=True)[..., : max(counts)]
        index = torch.cat([pages.index, new], dim=2).gather(2, order)
        self.counts, self._max_norm = counts, max_norm.gather(2, order)
        self.pages = replace(self.pages, index=index, start=start.gather(2, order), count=count.to(torch.int32))
        if whole:
            stored = made[..., :whole].nonzero(as_tuple=True)
            ids = new[..., :whole][stored].long()
            self.pages.keys[ids], self.pages.values[ids] = blocks[0][stored], blocks[1][stored]
        if whole * block < tokens:
            self._fill(k[:, :, whole * block :], v[:, :, whole * block :], 0)

    def _take(self, count: int) -> Tensor:
        """(count,) free pages; the pool grows by a quarter, or by what is needed."""
        short = count - len(self._free)
        if short > 0:
            pages, size = self.pages, len(self.pages.keys)
            grown = max(short, size // 4)
            # Zeros: unfilled rows may be read with weight 0.
            keys, values = (torch.cat([x, x.new_zeros(grown, *x.shape[1:])]) for x in (pages.keys, pages.values))
            self.pages = replace(pages, keys=keys, values=values)
            self._free = torch.cat([self._free, torch.arange(size, size + grown, device=self._free.device)])
        taken, self._free = self._free[:count], self._free[count:]
        return taken


def _norms(blocks: Tensor, width: int) -> Tensor:
    """(B, G, n) float32: largest key norm of each (B, G, n, block, Dk), over its last `width` columns."""
    if blocks.shape[2] == 0:
        return torch.zeros(blocks.shape[:3], device=blocks.device)
    return blocks[..., -width:].float().norm(dim=-1).amax(-1)


def _first(mask: Tensor, count: int) -> Tensor:
    """(count,) int64: where the flattened mask is true, in order, without a device synchronisation."""
    return mask.flatten().logical_not().to(torch.uint8).argsort(stable=True)[:count]
