"""Every base of long sequences, read in windows that overlap by half.

A contig of at most `window` bases is one window. Of a longer one all bases of the first window
count, and the last half of every other: each base counts once, predicted from at least window/2
bases but for those of the first window. On the other strand windows begin at the contig's other
end. A base costs the same in a region as in its whole contig.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from modalities.dna.genome import Genome
from modalities.dna.scoring import score_windows
from modalities.dna.splits import Region
from modalities.dna.tokenizers import UNKNOWN, load_tokenizer, reverse_complement
from zoo.model import ZooModel


class Span(NamedTuple):
    """Bases [start, stop) of a contig of `length` bases, of the region of number `row`; turned:
    read on the other strand."""

    row: int
    contig: str
    length: int
    start: int
    stop: int
    turned: bool = False

    def strands(self, both: bool) -> tuple[bool, ...]:
        """Those that are read: whether it is the other one."""
        return (False, True) if both else (self.turned,)


class Read(NamedTuple):
    """Bases from `start` of the contig of a span, by number, read on one strand; arrays (n,) in the
    contig's order, nats float64 and counted bool."""

    span: int
    start: int
    nats: np.ndarray
    counted: np.ndarray
    turned: bool


@dataclass(frozen=True)
class Window:
    """Bases [start, stop) of the strand that is read; those of [first, last) count."""

    span: int
    start: int
    stop: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.stop - self.start


def split_spans(
    genome: Genome, rows: Sequence[Region], half: int, size: int
) -> Iterator[list[Span]]:
    """All bases of all rows, in order, in parts whose windows read about `size` bases; a long row
    lies in several."""
    part: list[Span] = []
    room = size
    for number, row in enumerate(rows):
        length = genome[row.contig].length
        start = row.start
        while start < row.stop:
            # Where windows end, so that none is read twice.
            cut = max(start + room // 2, start + half, 2 * half) // half * half
            span = Span(number, row.contig, length, start, min(cut, row.stop), row.strand == "-")
            part.append(span)
            room -= span_cost(span, half, both=False)
            start = span.stop
            if room <= 0:
                yield part
                part = []
                room = size
    if part:
        yield part


def span_cost(span: Span, half: int, both: bool) -> int:
    """Bases that the windows of a span read, on one strand or both."""
    cost = 0
    for turned in span.strands(both):
        cost += sum(map(len, _windows(0, span, half, turned)))
    return cost


def read_spans(
    model: ZooModel,
    genome: Genome,
    spans: Sequence[Span],
    *,
    half: int,
    both: bool,
    batch_tokens: int,
) -> Iterator[Read]:
    """What every window of every span says, a strand after the other, windows of similar lengths
    together."""
    for turned in (False, True):
        windows: list[Window] = []
        for number, span in enumerate(spans):
            if turned in span.strands(both):
                windows += _windows(number, span, half, turned)
        for batch in _batches(windows, batch_tokens):
            codes = _codes(genome, spans, batch, turned)
            nats, counted = _score(model, codes, batch_tokens)
            for n, window in enumerate(batch):
                part = slice(window.first - window.start, window.last - window.start)
                if turned:
                    start = spans[window.span].length - window.last
                    yield Read(
                        window.span, start, nats[n, part][::-1], counted[n, part][::-1], True
                    )
                else:
                    yield Read(window.span, window.first, nats[n, part], counted[n, part], False)


def _windows(number: int, span: Span, half: int, turned: bool) -> Iterator[Window]:
    """Windows on one strand whose bases that count lie in the span of this number."""
    start = span.start
    stop = span.stop
    if turned:
        start, stop = span.length - stop, span.length - start
    # Window k begins at k · half; but for window 0, its second half counts.
    for k in range(max(0, start // half - 1), max(0, (stop - 1) // half - 1) + 1):
        begin = k * half
        end = min(begin + 2 * half, span.length)
        counts_from = begin + half if k else 0
        yield Window(number, begin, end, max(start, counts_from), min(stop, end))


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Windows, the shortest first, as many at a time as fit."""
    batch: list[Window] = []
    for window in sorted(windows, key=len):
        if batch and (len(batch) + 1) * len(window) > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _codes(
    genome: Genome, spans: Sequence[Span], batch: Sequence[Window], turned: bool
) -> np.ndarray:
    """(B, T) of the strand that is read, padded with unknown bases, which a causal model reads
    last."""
    padded = np.full((len(batch), len(batch[-1])), UNKNOWN, np.uint8)
    for row, window in zip(padded, batch, strict=True):
        span = spans[window.span]
        if turned:
            codes = genome.codes(span.contig, span.length - window.stop, span.length - window.start)
            codes = reverse_complement(codes)
        else:
            codes = genome.codes(span.contig, window.start, window.stop)
        row[: len(codes)] = codes
    return padded


def _score(model: ZooModel, codes: np.ndarray, batch_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each base of windows (B, T), and whether it counts; none does in less than a
    token."""
    if codes.shape[1] < load_tokenizer(model.config.tokenizer).step:
        return np.zeros(codes.shape), np.zeros(codes.shape, bool)
    scores = score_windows(model, codes, batch_tokens=batch_tokens, by_base=True)
    return scores.nll.numpy(), scores.bases.numpy() > 0
