"""Blocks of queries and the keys that they need: how CPU kernels cut a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from zoo.attention.call import ALIGNMENT, AttentionCall
from zoo.attention.masks import single_documents
from zoo.attention.reach import Reach
from zoo.positions import document_starts


@dataclass(frozen=True)
class Block:
    """Queries [lo, hi) of batch rows `batch` and heads `heads`, and the keys [first, last) visible
    to at least one of them.

    `mixed`: the block holds several documents, so document ids must be compared.
    """

    batch: slice
    heads: slice
    lo: int
    hi: int
    first: int
    last: int
    mixed: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.lo, self.hi)

    @property
    def keys(self) -> slice:
        return slice(self.first, self.last)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch rows, heads, queries, keys)."""
        batch = self.batch.stop - self.batch.start
        heads = self.heads.stop - self.heads.start
        return batch, heads, self.hi - self.lo, self.last - self.first


def plan_blocks(
    call: AttentionCall, rows: int, one_block: int, reach: Reach | None = None
) -> list[Block]:
    """Blocks of at most `rows` queries covering the call, without key ranges that no query of the
    block sees, or needs.

    A batch of several documents with at most `one_block` logits per head is compared id by id, a
    longer one cut row by row.
    """
    if reach is not None:
        return _narrowed(plan_blocks(call, rows, one_block), reach)
    every = slice(0, call.q.shape[0])
    if call.segments is None:
        return _cut(call, every, (0, call.num_queries), rows)
    single = single_documents(call.segments)
    if bool(single.all()):
        return _cut(call, every, (0, call.num_queries), rows)
    if call.num_queries * call.num_keys <= one_block:
        return _cut(call, every, (0, call.num_queries), rows, mixed=True)
    blocks: list[Block] = []
    for row, whole in enumerate(single.tolist()):
        batch = slice(row, row + 1)
        ids = call.segments[row]
        starts = document_starts(ids).nonzero().flatten()
        recurs = ids[starts].unique().numel() != starts.numel()
        if whole or recurs:
            blocks += _cut(call, batch, (0, call.num_queries), rows, mixed=recurs)
            continue
        bounds = torch.cat([starts, starts.new_tensor([call.num_keys])])
        for lo in range(0, call.num_queries, rows):
            hi = min(lo + rows, call.num_queries)
            ends = starts.new_tensor([lo + call.offset, hi + call.offset - 1])
            low, high = torch.searchsorted(bounds, ends, right=True).tolist()
            keys = (int(bounds[low - 1]), int(bounds[high]))
            blocks += _cut(call, batch, (lo, hi), rows, mixed=low != high, keys=keys)
    return blocks


def _cut(
    call: AttentionCall,
    batch: slice,
    queries: tuple[int, int],
    rows: int,
    *,
    mixed: bool = False,
    keys: tuple[int, int] | None = None,
) -> list[Block]:
    """Cut queries [start, stop) in blocks of `rows`; keys are those in `keys`, the window and the
    causal past."""
    begin, end = keys or (0, call.num_keys)
    blocks = []
    for lo in range(*queries, rows):
        hi = min(lo + rows, queries[1])
        first = begin
        last = end
        if call.window is not None:
            first = max(first, lo + call.offset - call.window + 1)
            last = min(last, hi + call.offset + call.window - 1)
        if call.causal:
            last = min(last, hi + call.offset)
        if call.terms.q_lanes is not None:
            first = max(first - max(first, 0) % ALIGNMENT, begin)
        blocks.append(Block(batch, slice(0, call.q.shape[1]), lo, hi, max(first, 0), last, mixed))
    return blocks


def _narrowed(blocks: list[Block], reach: Reach) -> list[Block]:
    """Blocks of the heads, next to each other, that need the same keys."""
    narrow = []
    for block in blocks:
        for row in range(block.batch.start, block.batch.stop):
            start = 0
            for needs, group in groupby(reach.of_rows(row, block.lo, block.hi)):
                stop = start + len(list(group))
                part = replace(
                    block,
                    batch=slice(row, row + 1),
                    heads=slice(start, stop),
                    first=max(needs[0], block.first),
                    last=min(needs[1], block.last),
                )
                narrow.append(part)
                start = stop
    return narrow


def shorten_blocks(
    call: AttentionCall, blocks: list[Block], *, least_rows: int, most_rows: int, one_head: int
) -> Iterator[Block]:
    """Blocks of at most `most_rows` queries; where one head has more than `one_head` logits fewer,
    but at least `least_rows`."""
    for block in blocks:
        fitting_rows = one_head // max(1, block.last - block.first)
        rows = max(least_rows, min(most_rows, fitting_rows))
        for lo in range(block.lo, block.hi, rows):
            hi = min(lo + rows, block.hi)
            last = min(block.last, hi + call.offset) if call.causal else block.last
            yield replace(block, lo=lo, hi=hi, last=last)


def split_blocks(blocks: Iterable[Block], limit: int) -> Iterator[Block]:
    """Blocks cut by batch rows, then by heads, until each has at most `limit` logits, or one
    head."""
    for block in blocks:
        _, num_heads, queries, keys = block.shape
        one_head = queries * keys
        whole = one_head * num_heads <= limit
        rows = max(1, limit // (one_head * num_heads)) if whole else 1
        step = num_heads if whole else max(1, limit // one_head)
        for row in range(block.batch.start, block.batch.stop, rows):
            for head in range(block.heads.start, block.heads.stop, step):
                batch = slice(row, min(row + rows, block.batch.stop))
                heads = slice(head, min(head + step, block.heads.stop))
                yield replace(block, batch=batch, heads=heads)
