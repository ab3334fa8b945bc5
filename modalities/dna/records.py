"""The log-likelihood of every record of a sequence file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.genome import Genome, open_genome
from modalities.dna.held_out import held_out
from modalities.dna.likelihood import strands_of, window_of
from modalities.dna.scoring import score_windows
from modalities.dna.settings import DnaEvaluator, DnaSettings
from modalities.dna.tokenizers import DnaTokenizer, load_tokenizer
from modalities.evaluation import Cell, CellValue, Listing, ModelResult

FACTOR = 16  # default window, in training lengths
LEAST_PART = 1 << 18  # bases in a cell
MOST_PARTS = 64  # cells of a file


@dataclass(frozen=True)
class Piece:
    """Windows [first, last) of a record; each is read whole, and counts from where the one before it ended."""

    record: str
    length: int
    first: int
    last: int


@dataclass(frozen=True)
class Window:
    """Bases [start, stop) of a record, on the strand that is read, of which those from ``counts`` on count."""

    piece: int
    start: int
    stop: int
    counts: int


class Score(DnaEvaluator, Listing):
    """Log-likelihood, in nats, and bits per base of every record of ``fasta``, in any format that a genome may have.

    A record of at most ``window`` bases (default 16 times the training length) is read at once. A longer one is read in
    windows that overlap by half: of the first one all bases count, of every other the last half. So each base counts once,
    and each but those of the first window is predicted from window/2 bases or more. A token that lies across
    a window's middle (BPE alone has such) counts by its share of bases. With strands "both" the record's reverse complement
    is read likewise, and numbers are means over the two. A window is rounded down to an even number of k-mers.

    ``bases`` are those that count; ``remainder`` those at a record's end that make no k-mer; a k-mer with an unknown base
    does not count. A record in which nothing counts has NaN. Memory is bounded by ``batch_tokens`` and one window.
    """

    name = "score"
    summary = "log-likelihood and bits per base of every record of a FASTA (or 2bit, GenBank) file"
    headline = ("bits_per_base",)

    def source_name(self, settings: DnaSettings) -> str:
        return f"{settings.fasta}"

    def identity(self, model: nn.Module, settings: DnaSettings) -> dict[str, Any]:
        window = read_at_once(model, settings.window, FACTOR, even=True)
        return {"bases": _opened(settings).fingerprint} | reading(model, settings, window)

    def cells(self, model: nn.Module, settings: DnaSettings) -> list[Cell]:
        if settings.samples is not None:
            raise ValueError(f"{self.name} reads every record of its file; samples ({settings.samples}) do not apply")
        genome, half = _opened(settings), read_at_once(model, settings.window, FACTOR, even=True) // 2
        size = max(LEAST_PART, genome.bases // MOST_PARTS)
        times = 2 if strands_of(model, settings) == "both" else 1
        parts = _parts(genome, half, size)
        return [
            Cell(
                f"part={n}", cost=times * sum(_cost(piece, half) for piece in part), data={"pieces": part, "half": half}
            )
            for n, part in enumerate(parts)
        ]

    def measure(self, model: nn.Module, cell: Cell, settings: DnaSettings) -> CellValue:
        """Sums over the cell's pieces; a record's sums are those of all its pieces."""
        genome, pieces, half = _opened(settings), cell.data["pieces"], cell.data["half"]
        sums = np.zeros((len(pieces), 2))  # nats and bases that count, on all strands read
        known = np.zeros((len(pieces), 3), np.int64)  # bases that count, known ones, G and C; on the strand as written
        for turned in (False, True) if strands_of(model, settings) == "both" else (False,):
            windows = [window for n, piece in enumerate(pieces) for window in _windows(n, piece, half)]
            for batch, codes in _batches(genome, pieces, windows, settings.batch_tokens, turned):
                nats, counted = base_nats(model, codes, settings.batch_tokens)
                for n, window in enumerate(batch):
                    part = slice(window.counts - window.start, window.stop - window.start)
                    sums[window.piece] += nats[n, part].sum(), counted[n, part].sum()
                    if not turned:
                        own = codes[n, part]
                        strong = ((own == 1) | (own == 2)).sum()
                        known[window.piece] += counted[n, part].sum(), (own != UNKNOWN).sum(), strong
        step = step_of(load_tokenizer(model.config.tokenizer))
        return {
            "record": [piece.record for piece in pieces],
            "length": [piece.length for piece in pieces],
            "remainder": [piece.length % step for piece in pieces],
            "nats": sums[:, 0].tolist(),
            "read": sums[:, 1].astype(int).tolist(),
            **dict(zip(("bases", "known", "strong"), known.T.tolist(), strict=True)),
            "strands": 2 if strands_of(model, settings) == "both" else 1,
        }

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        names = ("nats", "read", "bases", "known", "strong")
        records: dict[str, dict[str, Any]] = {}
        for cell in cells.values():
            for n, name in enumerate(cell["record"]):
                fixed = {"length": cell["length"][n], "remainder": cell["remainder"][n], "strands": cell["strands"]}
                record = records.setdefault(name, fixed | dict.fromkeys(names, 0))
                for column in names:
                    record[column] += cell[column][n]
        return [_row(name, record) for name, record in records.items()]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.plots import records_figure

        records_figure(results, path)

    def show(self, results: list[ModelResult], console: Any) -> None:
        from modalities.dna.terminal import show_records

        show_records(results, console)


def base_nats(model: nn.Module, windows: np.ndarray, batch_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """What each base of windows (B, T) costs, float64, and whether it counts: tokens share their cost evenly among bases."""
    nats, counted = np.zeros(windows.shape), np.zeros(windows.shape, bool)
    tokenizer = load_tokenizer(model.config.tokenizer)
    if windows.shape[1] < step_of(tokenizer):
        return nats, counted
    scores = score_windows(model, windows, strands="one", batch_tokens=batch_tokens)
    for n, window in enumerate(windows):
        spans = tokenizer.encode(window).spans
        nll, bases = (values[n, : len(spans)].numpy() for values in (scores.nll, scores.bases))
        read = int(spans.sum())
        nats[n, :read], counted[n, :read] = np.repeat(nll / spans, spans), np.repeat(bases > 0, spans)
    return nats, counted


def step_of(tokenizer: DnaTokenizer) -> int:
    """K for k-mers, 1 for single bases and for BPE: windows are multiples of it."""
    widths = np.unique(tokenizer.widths[: tokenizer.num_targets])
    return int(widths[0]) if len(widths) == 1 else 1


def read_at_once(model: nn.Module, asked: int | None, factor: int, *, even: bool) -> int:
    """``asked`` bases, or ``factor`` training lengths, rounded down to whole k-mers, an even number of them if ``even``.

    Raises ValueError where none is left.
    """
    tokenizer = load_tokenizer(model.config.tokenizer)
    step = step_of(tokenizer) * (2 if even else 1)
    window = asked or window_of(model, factor * model.config.train_context)
    if window < step:
        raise ValueError(f"window {window}: tokenizer {tokenizer.name!r} needs at least {step} bases")
    return window // step * step


def reading(model: nn.Module, settings: DnaSettings, window: int) -> dict[str, Any]:
    """What the numbers of ``window`` bases depend on besides the bases: of a baseline that learns, also what it learns from."""
    return {
        "window": window,
        "strands": strands_of(model, settings),
        "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
        "learnt_from": held_out(settings.source).fingerprint if hasattr(model, "learn_from") else None,
    }


def _opened(settings: DnaSettings) -> Genome:
    if settings.fasta is None:
        raise ValueError("score reads a file of sequences: name one with --fasta")
    return open_genome(settings.fasta)


def _parts(genome: Genome, half: int, size: int) -> Iterator[list[Piece]]:
    """All windows of all records, in order, in parts of about ``size`` bases; a long record lies in several."""
    part: list[Piece] = []
    room = size
    for contig in genome.contigs:
        first, count = 0, max(1, -(-contig.length // half) - 1)
        while first < count:
            last = min(count, first + max(1, room // (2 * half)))
            part.append(Piece(contig.name, contig.length, first, last))
            room -= _cost(part[-1], half)
            first = last
            if room <= 0:
                yield part
                part, room = [], size
    if part:
        yield part


def _cost(piece: Piece, half: int) -> int:
    """Bases that its windows read."""
    last = (piece.last - 1) * half  # where the last one starts: it alone may be shorter
    return (piece.last - piece.first - 1) * 2 * half + min(2 * half, piece.length - last)


def _windows(number: int, piece: Piece, half: int) -> Iterator[Window]:
    for k in range(piece.first, piece.last):
        start = k * half
        stop = min(start + 2 * half, piece.length)
        yield Window(number, start, stop, start + half if k else 0)


def _batches(
    genome: Genome, pieces: list[Piece], windows: Iterable[Window], batch_tokens: int, turned: bool
) -> Iterator[tuple[list[Window], np.ndarray]]:
    """Windows of like lengths together, shorter ones filled with unknown bases, which a causal model reads last."""
    batch: list[Window] = []

    def codes() -> np.ndarray:
        filled = np.full((len(batch), batch[-1].stop - batch[-1].start), UNKNOWN, np.uint8)
        for row, window in zip(filled, batch, strict=True):
            piece = pieces[window.piece]
            start, stop = window.start, window.stop
            if turned:
                start, stop = piece.length - stop, piece.length - start
            own = genome.codes(piece.record, start, stop)
            row[: len(own)] = reverse_complement(own) if turned else own
        return filled

    for window in sorted(windows, key=lambda w: w.stop - w.start):
        if batch and (len(batch) + 1) * (window.stop - window.start) > batch_tokens:
            yield batch, codes()
            batch = []
        batch.append(window)
    if batch:
        yield batch, codes()


def _row(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    nats_per_base = record["nats"] / record["read"] if record["read"] else math.nan
    return {
        "name": name,
        "length": record["length"],
        "bases": record["bases"],
        "unknown": record["length"] - record["known"],
        "remainder": record["remainder"],
        "gc": record["strong"] / record["known"] if record["known"] else math.nan,
        "log_likelihood": -record["nats"] / record["strands"] if record["read"] else math.nan,
        "nats_per_base": nats_per_base,
        "bits_per_base": nats_per_base / math.log(2),
    }
