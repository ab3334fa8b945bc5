"""The cost of every base of long sequences, in windows that overlap by half.

A contig of at most `window` bases is one window. Of a longer one all bases of the first window count, and the last half of
every other: each base counts once, predicted from at least window/2 bases but for those of the first window. On the other
strand windows begin at the contig's other end. A base costs the same in a region as in its whole contig.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.bed import BedRow
from modalities.dna.evaluation import step_of
from modalities.dna.genome import Genome
from modalities.dna.scoring import score_windows
from modalities.dna.tokenizers import load_tokenizer
from zoo.model import ZooModel


@dataclass(frozen=True)
class Span:
    """Bases [start, stop) of a contig."""

    row: int  # number of the region that they are of
    contig: str
    length: int  # of the contig
    start: int
    stop: int
    turned: bool = False  # the region means the other strand

    def strands(self, both: bool) -> tuple[bool, ...]:
        """Those that are read: whether it is the other one."""
        return (False, True) if both else (self.turned,)


@dataclass(frozen=True)
class Read:
    """Bases [start, stop) of a contig read on one strand; arrays (n,) are in the order of the strand as written."""

    span: int
    start: int
    stop: int
    nats: np.ndarray  # float64
    counted: np.ndarray  # bool
    codes: np.ndarray  # uint8, of the strand as written
    turned: bool  # read on the other strand


@dataclass(frozen=True)
class _Window:
    """Bases [start, stop) of the strand that is read; those of [first, last) count."""

    span: int
    start: int
    stop: int
    first: int
    last: int


def spans_of(genome: Genome, rows: Sequence[BedRow], half: int, size: int) -> Iterator[list[Span]]:
    """All bases of all rows, in order, in parts whose windows read about `size` bases; a long row lies in several."""
    part: list[Span] = []
    room = size
    for number, row in enumerate(rows):
        length, start = genome[row.contig].length, row.start
        while start < row.stop:
            # Where windows end, so that none is read twice.
            cut = max(start + room // 2, start + half, 2 * half) // half * half
            span = Span(number, row.contig, length, start, min(cut, row.stop), row.strand == "-")
            part.append(span)
            room -= cost(span, half, both=False)
            start = span.stop
            if room <= 0:
                yield part
                part, room = [], size
    if part:
        yield part


def cost(span: Span, half: int, *, both: bool) -> int:
    """Bases that the windows of a span read, on one strand or both."""
    windows = (window for turned in span.strands(both) for window in _windows(0, span, half, turned))
    return sum(window.stop - window.start for window in windows)


def _windows(number: int, span: Span, half: int, turned: bool) -> Iterator[_Window]:
    start, stop = (span.length - span.stop, span.length - span.start) if turned else (span.start, span.stop)
    for k in range(max(0, start // half - 1), max(0, (stop - 1) // half - 1) + 1):
        begin = k * half
        end = min(begin + 2 * half, span.length)
        yield _Window(number, begin, end, max(start, begin + half if k else 0), min(stop, end))


def read_spans(
    model: ZooModel,
    genome: Genome,
    spans: Sequence[Span],
    half: int,
    *,
    both: bool,
    batch_tokens: int,
    advance: Callable[[int], object],
) -> Iterator[Read]:
    """What every window of every span says, a strand after the other, windows of similar lengths together."""
    for turned in (False, True):
        chosen = [(n, span) for n, span in enumerate(spans) if turned in span.strands(both)]
        windows = [window for n, span in chosen for window in _windows(n, span, half, turned)]
        for batch in _batches(windows, batch_tokens):
            codes = _codes(genome, spans, batch, turned)
            nats, counted = base_nats(model, codes, batch_tokens)
            advance(sum(window.stop - window.start for window in batch))
            for n, window in enumerate(batch):
                part = slice(window.first - window.start, window.last - window.start)
                start, arrays = window.first, (nats[n, part], counted[n, part], codes[n, part])
                if turned:
                    start = spans[window.span].length - window.last
                    arrays = (arrays[0][::-1], arrays[1][::-1], reverse_complement(arrays[2]))
                yield Read(window.span, start, start + len(arrays[0]), *arrays, turned)


def base_nats(model: ZooModel, windows: np.ndarray, batch_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each base of windows (B, T), float64, and whether it counts; tokens share their cost evenly among bases."""
    if windows.shape[1] < step_of(load_tokenizer(model.config.tokenizer)):
        return np.zeros(windows.shape), np.zeros(windows.shape, bool)
    scores = score_windows(model, windows, strands="one", batch_tokens=batch_tokens, by_base=True)
    return scores.nll.numpy(), scores.bases.numpy() > 0


def _batches(windows: Sequence[_Window], batch_tokens: int) -> Iterator[list[_Window]]:
    batch: list[_Window] = []
    for window in sorted(windows, key=lambda w: w.stop - w.start):
        if batch and (len(batch) + 1) * (window.stop - window.start) > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _codes(genome: Genome, spans: Sequence[Span], batch: Sequence[_Window], turned: bool) -> np.ndarray:
    """(B, T) of the strand that is read, padded with unknown bases, which a causal model reads last."""
    filled = np.full((len(batch), batch[-1].stop - batch[-1].start), UNKNOWN, np.uint8)
    for row, window in zip(filled, batch, strict=True):
        span, start, stop = spans[window.span], window.start, window.stop
        if turned:
            start, stop = span.length - stop, span.length - start
        codes = genome.codes(span.contig, start, stop)
        row[: len(codes)] = reverse_complement(codes) if turned else codes
    return filled
