"""Which queries meet which keys: the blocks that the `toeplitz` kernel works through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from zoo.attention.base import AttentionCall, single_documents

__all__ = ["Block", "plan_blocks"]

# Up to this many logits per head a mixed batch is cheaper as one masked block than row by row.
ONE_BLOCK = 256 * 256


@dataclass(frozen=True)
class Block:
    """Queries [lo, hi) of batch rows `batch` and the keys [first, last) that at least one of them may see.

    `mixed` says that documents meet inside the block, so that document ids must be compared.
    """

    batch: slice
    lo: int
    hi: int
    first: int
    last: int
    mixed: bool = False

    def of_batch(self, start: int, stop: int) -> Block:
        """The same block of batch rows [start, stop) alone."""
        return replace(self, batch=slice(start, stop))


def plan_blocks(call: AttentionCall, rows: int) -> list[Block]:
    """Blocks of at most `rows` queries covering the call; key ranges that no query of a block sees are left out.

    Documents are contiguous runs (`Positions.documents`): where every row is one document they cost nothing; a short
    mixed batch is compared id by id; a long one is cut row by row, so that a block starts at its first document.
    """
    batch, offset = call.q.shape[0], call.offset
    everything = slice(0, batch)
    if call.segments is None:
        return _cut(call, everything, 0, call.num_queries, rows)
    single = single_documents(call.segments)
    if bool(single.all()):
        return _cut(call, everything, 0, call.num_queries, rows)
    if call.num_queries * call.num_keys <= ONE_BLOCK:
        return _cut(call, everything, 0, call.num_queries, rows, mixed=True)
    blocks: list[Block] = []
    for row, whole in enumerate(single.tolist()):
        here = slice(row, row + 1)
        if whole:
            blocks += _cut(call, here, 0, call.num_queries, rows)
            continue
        starts = _run_starts(call.segments[row])
        if starts is None:
            blocks += _cut(call, here, 0, call.num_queries, rows, mixed=True)
            continue
        bounds = torch.tensor([*starts, call.num_keys])
        for lo, hi in _query_cuts(starts, offset, call.num_queries, rows):
            low, high = torch.searchsorted(bounds, torch.tensor([lo + offset, hi + offset - 1]), right=True).tolist()
            keys = (int(bounds[low - 1]), int(bounds[high]))
            blocks += _cut(call, here, lo, hi, rows, mixed=low != high, keys=keys)
    return blocks


def _cut(
    call: AttentionCall,
    batch: slice,
    start: int,
    stop: int,
    rows: int,
    *,
    mixed: bool = False,
    keys: tuple[int, int] | None = None,
) -> list[Block]:
    """Cut queries [start, stop) in blocks of `rows`; keys are those in `keys`, the window and the causal past."""
    begin, end = keys or (0, call.num_keys)
    blocks = []
    for lo in range(start, stop, rows):
        hi = min(lo + rows, stop)
        first, last = begin, end
        if call.window is not None:
            first = max(first, lo + call.offset - call.window + 1)
            last = min(last, hi + call.offset + call.window - 1)
        if call.causal:
            last = min(last, hi + call.offset)
        blocks.append(Block(batch, lo, hi, max(first, 0), last, mixed))
    return blocks


def _run_starts(segments: Tensor) -> list[int] | None:
    """First column of each document of one row; None where an id comes back after another one."""
    change = torch.ones_like(segments, dtype=torch.bool)
    change[1:] = segments[1:] != segments[:-1]
    starts = change.nonzero().flatten()
    if segments[starts].unique().numel() != starts.numel():
        return None
    return starts.tolist()


def _query_cuts(starts: list[int], offset: int, num_queries: int, rows: int) -> list[tuple[int, int]]:
    """Query ranges of at most `rows`: a document of a quarter block or more gets its own, shorter ones share."""
    bounds = [max(s - offset, 0) for s in starts] + [num_queries]
    cuts: list[tuple[int, int]] = []
    shared: int | None = None
    for begin, end in pairwise(bounds):
        if end <= begin:
            continue
        if end - begin < rows // 4:
            if shared is not None and end - shared > rows:
                cuts.append((shared, begin))
                shared = begin
            shared = begin if shared is None else shared
            continue
        if shared is not None:
            cuts.append((shared, begin))
            shared = None
        cuts += [(lo, min(lo + rows, end)) for lo in range(begin, end, rows)]
    if shared is not None:
        cuts.append((shared, num_queries))
    return cuts
