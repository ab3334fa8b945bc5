"""Log-likelihood of every record of a sequence file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.evaluation import (
    REFERENCE,
    FileEvaluator,
    FileSettings,
    bin_edges,
    step_of,
    strands_of,
    table,
)
from modalities.dna.genome import Genome
from modalities.dna.scoring import score_windows
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult
from modalities.evaluation import Score as Column
from modalities.figures import finish, panels, styles_of
from modalities.results import short_names
from zoo.model import ZooModel
from zoo.slices import slices

__all__ = ["Score"]

CELL_BASES = 1 << 18  # that the windows of a cell read, on one strand
FEW_RECORDS = 20  # too few for a histogram


@dataclass(frozen=True)
class Piece:
    """Windows [first, last) of a record; each counts from where the previous one ended."""

    record: str
    length: int
    first: int
    last: int


@dataclass(frozen=True)
class Window:
    """Bases [start, stop) of a record, on the strand that is read; those from `counts` on count."""

    piece: int
    start: int
    stop: int
    counts: int


class Score(FileEvaluator):
    """Log-likelihood, in nats, and bits per base of every record of `fasta`, in any format that a genome may have.

    A record of at most `window` bases (default 16 times the training length) is one window. A longer one is read in windows
    that overlap by half: all bases of the first count, and the last half of every other. So each base counts once, and each
    but those of the first window is predicted from at least window/2 bases. A token across a window's middle (BPE alone has
    such) counts by its share of bases. With strands "both" the record's reverse complement is read likewise, and numbers are
    means over the two. A window is rounded down to an even number of k-mers.

    `bases` are those that count; `remainder` those at a record's end that make no k-mer; a k-mer with an unknown base does
    not count. `unknown` and `gc` are of the whole record as written. Records without a counted base are listed as NaN.

    A cell is a run of windows, so a stopped measurement goes on inside a record.
    """

    name = "score"
    version = 2
    summary = "log-likelihood and bits per base of every record of a FASTA (or 2bit, GenBank) file"
    scores = (Column("bits_per_base"),)
    settings_class = FileSettings
    default_window = 16
    window_step = 2

    def identity(self, model: ZooModel) -> dict[str, Any]:
        return {"bases": self.genome().fingerprint} | super().identity(model)

    def cells(self, model: ZooModel) -> list[Cell]:
        genome, half = self.genome(), self.window(model) // 2
        times = 2 if strands_of(model, self.settings) == "both" else 1
        return [
            Cell(f"part={n}", times * sum(_cost(piece, half) for piece in part), {"pieces": part, "half": half})
            for n, part in enumerate(_parts(genome, half, CELL_BASES))
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """Sums over the cell's pieces; a record's sums are those of all its pieces."""
        genome, pieces, half = self.genome(), cell.data["pieces"], cell.data["half"]
        both, batch_tokens = strands_of(model, self.settings) == "both", self.settings.batch_tokens
        sums = np.zeros((len(pieces), 2))  # nats and bases that count, on all strands
        known = np.zeros((len(pieces), 3), np.int64)  # bases that count, known ones, G and C; on the strand as written
        for turned in (False, True) if both else (False,):
            windows = [window for n, piece in enumerate(pieces) for window in _windows(n, piece, half)]
            for batch, codes in _batches(genome, pieces, windows, batch_tokens, turned):
                nats, counted = base_nats(model, codes, batch_tokens)
                self.advance(sum(window.stop - window.start for window in batch))
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
            "strands": 2 if both else 1,
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
        """Bits per base against length, a dot for each record, and their histogram where they are many."""
        many = len(results[0].rows) > FEW_RECORDS
        finite = [[row for row in result.rows if math.isfinite(row["bits_per_base"])] for result in results]
        every = [row["bits_per_base"] for rows in finite for row in rows]
        figure, axes = panels(1, 1 + many, width=5.2, height=4.0)
        for rows, style in zip(finite, styles_of(results), strict=True):
            bits = [row["bits_per_base"] for row in rows]
            size = {"markersize": 6.0 if len(rows) < 200 else 2.0, "alpha": 0.7 if len(rows) < 2000 else 0.2}
            dots = style | size | {"linestyle": "", "marker": style["marker"] or "."}
            axes[0].plot([row["length"] for row in rows], bits, **dots)
            if many and rows:
                outline = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.6}
                axes[1].hist(bits, bins=bin_edges(every, 60), histtype="step", **outline)
        axes[0].set_xscale("log")
        axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes[0].axhline(2.0, **REFERENCE)
        at = {"xycoords": ("axes fraction", "data"), "fontsize": 7.5, "color": "0.35", "va": "bottom"}
        axes[0].annotate("uniform", (0.01, 2.0), **at)
        axes[0].set(xlabel="length of the record (bases, log)", ylabel="bits per base", title="every record")
        if many:
            axes[1].set(xlabel="bits per base", ylabel="records", title=f"{len(results[0].rows):,} records")
            axes[1].axvline(2.0, **REFERENCE)
        for axis in axes:
            axis.grid(alpha=0.25, linewidth=0.6)
        finish(figure, axes, results, path)

    def show(self, results: list[ModelResult], console: Any, count: int = 20) -> None:
        """The first records and the totals: bits per base, a column for each model that the terminal has room for."""
        names = short_names(results)
        for part in slices(len(results), max(1, (console.width - 46) // 12)):
            console.print(_table(results[part], names[part], count))
        if (more := len(results[0].rows) - count) > 0:
            console.print(f"{more:,} more records in the files")


def base_nats(model: ZooModel, windows: np.ndarray, batch_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each base of windows (B, T), float64, and whether it counts; tokens share their cost evenly among bases."""
    if windows.shape[1] < step_of(load_tokenizer(model.config.tokenizer)):
        return np.zeros(windows.shape), np.zeros(windows.shape, bool)
    scores = score_windows(model, windows, strands="one", batch_tokens=batch_tokens, by_base=True)
    return scores.nll.numpy(), scores.bases.numpy() > 0


def _parts(genome: Genome, half: int, size: int) -> Iterator[list[Piece]]:
    """All windows of all records, in order, in parts of about `size` bases; a long record lies in several."""
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
    last = (piece.last - 1) * half  # start of the last one, which alone may be shorter
    return (piece.last - piece.first - 1) * 2 * half + min(2 * half, piece.length - last)


def _windows(number: int, piece: Piece, half: int) -> Iterator[Window]:
    for k in range(piece.first, piece.last):
        start = k * half
        stop = min(start + 2 * half, piece.length)
        yield Window(number, start, stop, start + half if k else 0)


def _batches(
    genome: Genome, pieces: list[Piece], windows: Iterable[Window], batch_tokens: int, turned: bool
) -> Iterator[tuple[list[Window], np.ndarray]]:
    """Windows of similar lengths together, padded with unknown bases, which a causal model reads last."""
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


def _table(results: Sequence[ModelResult], names: Sequence[str], count: int) -> Table:
    first = results[0].rows
    found = table("score: bits per base of every record", ["record"], ["length", "unknown", "GC", *names])
    found.columns[0].min_width = 14
    for n, row in enumerate(first[:count]):
        bits = (_number(result.rows[n]["bits_per_base"]) for result in results)
        found.add_row(row["name"], f"{row['length']:,}", f"{row['unknown']:,}", _number(row["gc"], ".1%"), *bits)
    found.add_section()
    bits = (_number(_total(result)) for result in results)
    length, unknown = (sum(row[name] for row in first) for name in ("length", "unknown"))
    found.add_row(f"all {len(first):,} records", f"{length:,}", f"{unknown:,}", "", *bits, style="bold")
    return found


def _number(value: float, how: str = ".4f") -> str:
    return "–" if math.isnan(value) else format(value, how)


def _total(result: ModelResult) -> float:
    """Bits per base over all counted bases of all records."""
    bits = sum(row["bits_per_base"] * row["bases"] for row in result.rows if row["bases"])
    bases = sum(row["bases"] for row in result.rows)
    return bits / bases if bases else math.nan
