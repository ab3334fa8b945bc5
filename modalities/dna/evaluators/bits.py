"""Bits per base of held-out DNA against length, by position in a window, by contig, and in repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modalities.decoder.scoring import position_buckets
from modalities.dna.evaluation import (
    BASES_LENGTH,
    DnaEvaluator,
    DnaLengthSettings,
    StrandSettings,
    strands_of,
    whole_kmers,
)
from modalities.dna.genome import Genome
from modalities.dna.repeats import repetitive
from modalities.dna.scoring import BIT, Scores, score_windows, tokens_of
from modalities.dna.splits import Region
from modalities.dna.tokenizers import DnaTokenizer, load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, Observed, Score, option
from modalities.files import write_table
from zoo.model import ZooModel
from zoo.slices import slices

__all__ = ["Bits", "BitsSettings"]

CELL_BASES = 1 << 16  # in a cell, at least one stretch
DEFAULT_BASES = 1 << 18  # read at each length
DEFAULT_STRETCH = 1 << 16
PARTS = ("unique", "repeats", "soft-masked")
SUMS = ("bits", "bases", "correct", "tokens")  # of each stretch of a cell


@dataclass(frozen=True)
class BitsSettings(DnaLengthSettings, StrandSettings):
    """Lengths of windows, and the bases of the stretches that windows of every length are cut from."""

    stretch: int | None = option(None, "bases of a stretch; default: 65,536, or the longest length beyond that")
    repeats: bool = option(False, "also score repeats and unique sequence apart, at the longest length")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stretch is not None and self.stretch < 2:
            raise ValueError(f"stretch must be at least 2 bases, got {self.stretch}")


class Bits(DnaEvaluator[BitsSettings]):
    """NLL, bits per base and next-base accuracy against length, and bits by position in windows of the longest length.

    `samples` stretches of every held-out contig that has room are read, by default as many as have 2¹⁸ bases. A stretch has
    65,536 bases (less, a power of two, where contigs have no room), or `stretch`; without `stretch` a longer length alone makes
    it longer. It is cut into windows that do not overlap, each read from BOS and rounded down to whole k-mers: all lengths, and
    all tokenizers, predict the same bases, up to the remainder of a stretch. Contigs weigh equally, whatever their size.

    The standard error is that of the mean over stretches, drawn contig by contig; NaN where all have a single one. `change` is
    the difference to the next shorter length, and its standard error that of the mean of the stretches' own differences.
    Positions count the start and the bases seen before a token, in octaves; they are left out for both strands, where a base is
    at two positions. A tokenizer of more than single bases has a token accuracy instead.

    bits.contigs.csv has the same by contig. With `repeats` it also has parts of the sequence at the longest length: bases in
    "repeats" (`modalities.dna.repeats`), the others, which are "unique", and those that the file has in lower case.
    """

    name = "bits"
    version = 2  # of older ones some had stretches of the longest length, whatever it was
    summary = "NLL, bits per base and next-base accuracy of held-out contigs against length, by position and by contig"
    scores = (
        Score("bits_per_base", "bits per base", linear=True, title="bits per base, less is better", level=2.0),
        Score("accuracy", linear=True, title="next base predicted right", level=0.25),
        Score("token_accuracy", linear=True),
        Score("position_bits", "bits per base", level=2.0, by_position=True, tabled=False),
        Score("contigs_left_out", exception=True),
    )
    axis = BASES_LENGTH
    paired_over = "contigs"

    def points(self, model: ZooModel) -> tuple[Any, ...]:
        """`lengths`, or the default ones that held-out contigs have room for."""
        lengths = self.lengths_for(model)
        return lengths if self.settings.lengths else self.with_room(lengths)

    def stretch(self, model: ZooModel) -> int:
        """Bases of a stretch."""
        longest, size, data = self.points(model)[-1], self.settings.stretch, self.heldout.items
        if size is None:  # of all lengths alike, but for those beyond it
            return max(longest, self.with_room(tuple(1 << k for k in range(8, DEFAULT_STRETCH.bit_length())))[-1])
        if size < longest:
            raise ValueError(f"stretches of {size:,} bases hold no window of {longest:,}: at most --lengths {size}")
        if size > (most := max(len(data.longest(name)) for name in data.contigs)):
            raise ValueError(f"--stretch {size}: the longest held-out region has {most} bases")
        return size

    def samples(self, model: ZooModel) -> int:
        bases = len(self.heldout.items.contigs) * self.stretch(model)
        return self.settings.samples or max(1, DEFAULT_BASES // bases)

    def identity(self, model: ZooModel) -> dict[str, Any]:
        return {
            "heldout": self.heldout.fingerprint,
            "seed": self.settings.seed,
            "stretch": self.stretch(model),
            "samples": self.samples(model),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            **self.length_unit(model),
            "strands": strands_of(model, self.settings),
            **({"repeats": True} if self.settings.repeats else {}),
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        """A cell is a length and a few stretches of one contig."""
        size, data = self.stretch(model), self.heldout.items
        by_contig = data.stretches(size, self.samples(model), self.settings.seed)
        left_out = len(data.contigs) - len(by_contig)
        cells = []
        for length in self.points(model):
            for contig, stretches in by_contig.items():
                for part in slices(len(stretches), max(1, CELL_BASES // size)):
                    name = f"length={length}/{contig}/stretches={part.start}-{part.stop}"
                    facts = {"length": length, "contig": contig, "contigs_left_out": left_out}
                    cost = sum(map(len, stretches[part]))
                    cells.append(Cell(name, cost=cost, data={"facts": facts, "stretches": stretches[part]}))
        return cells

    def windows(self, model: ZooModel, cell: Cell) -> list[np.ndarray]:
        """The whole windows (N, window) of each stretch of a cell."""
        window = whole_kmers(model, cell.data["facts"]["length"])
        every = [self.heldout.items.codes(stretch) for stretch in cell.data["stretches"]]
        return [codes[: len(codes) // window * window].reshape(-1, window) for codes in every]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        strands, tokenizer = strands_of(model, self.settings), load_tokenizer(model.config.tokenizer)
        single = tokenizer.bases_per_token == 1
        parted = self.settings.repeats and cell.data["facts"]["length"] == self.points(model)[-1]
        by_stretch = self.windows(model, cell)
        values: dict[str, list[float]] = {name: [] for name in SUMS}
        by_position: list[np.ndarray] = []
        left_over, parts = 0, []
        for windows, stretch in zip(by_stretch, cell.data["stretches"], strict=True):
            options: dict[str, Any] = dict(strands=strands, batch_tokens=self.settings.batch_tokens)
            scores = score_windows(model, windows, advance=self.advance, **options)
            left_over += len(stretch) - windows.size + scores.left_over
            bits = scores.nll / BIT  # before sums, so that 2 bits stay exactly 2
            for name, value in (("bits", bits), ("bases", scores.bases), ("correct", scores.correct)):
                values[name].append(value.sum().item())
            values["tokens"].append(int((scores.bases > 0).sum()))
            if strands == "one":
                by_position.append(by_octave(tokenizer, windows, bits.numpy(), scores.bases.numpy()))
            if parted:
                by_base = scores if single else score_windows(model, windows, by_base=True, **options)
                parts.append(_sums_of_parts(by_base, self.heldout.items.genome, stretch, windows.shape))
        buckets = np.sum(by_position, axis=0) if by_position else np.zeros((2, 0))
        cell_value: CellValue = {
            **cell.data["facts"],
            "window": by_stretch[0].shape[1],
            "score": "accuracy" if single else "token_accuracy",
            **values,
            "left_over": left_over,
            "bucket_bits": buckets[0].tolist(),
            "bucket_bases": buckets[1].tolist(),
        }
        return cell_value | ({"parts": dict(zip(PARTS, np.sum(parts, axis=0).tolist(), strict=True))} if parts else {})

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """The contig of a cell: bits per base, and the accuracy where something is predicted."""
        point, unit = cell["length"], cell["contig"]
        yield Observed(point, unit, "bits_per_base", sum(cell["bits"]), sum(cell["bases"]))
        if not math.isnan(correct := sum(cell["correct"])):
            yield Observed(point, unit, cell["score"], correct, sum(cell["tokens"]))

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        shorter: list[CellValue] = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            here = [cell for cell in cells.values() if cell["length"] == length]
            row = {"length": length} | summary(here)
            if shorter:
                row |= _change(here, shorter)
            shorter = here
            bits, bases = (np.sum([cell[name] for cell in here], axis=0) for name in ("bucket_bits", "bucket_bases"))
            if len(bits):
                row["position_to"] = [2**k for k in range(len(bits))]
                row["position_bits"] = np.divide(bits, bases, out=np.full(len(bits), np.nan), where=bases > 0).tolist()
            rows.append(row)
        return rows

    def measured(self, results: list[ModelResult]) -> str:
        return f"bits: {results[0].rows[-1]['bases']:,} bases measured of {self.contents()}"

    def write(self, results: list[ModelResult], out: Path) -> None:
        """bits.contigs.csv: a row for each model, length and held-out contig; with `repeats` also for parts of the sequence."""
        sums: dict[tuple[str, int, str, str], list[float]] = {}  # bits and bases
        for result in results:
            for cell in result.cells.values():
                whole = [sum(cell["bits"]), sum(cell["bases"])]
                for part, values in {"all": whole, **cell.get("parts", {})}.items():
                    key = result.label, cell["length"], cell["contig"], part
                    sums[key] = np.add(sums.get(key, [0.0, 0.0]), values).tolist()
        names = ("model", "length", "contig", "part", "bases", "bits_per_base")
        rows = [
            dict(zip(names, (*key, int(bases), bits / bases), strict=True))
            for key, (bits, bases) in sums.items()
            if bases
        ]
        if rows:
            write_table(out / f"{self.name}.contigs.csv", rows)


def by_octave(tokenizer: DnaTokenizer, windows: np.ndarray, bits: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """(2, octaves) bits and bases of token scores (B, N), summed by the octave of what a token's prediction sees: as
    `position_buckets`, of n that is 1 and the bases before the token."""
    spans, octaves = tokens_of(tokenizer, windows)[1], position_buckets(windows.shape[1])
    octave = octaves[np.minimum(spans.cumsum(1) - spans, windows.shape[1] - 1)].ravel()
    return np.stack([np.bincount(octave, values.ravel(), octaves[-1] + 1) for values in (bits, bases)])


# ------------------------------------------------------------------------------------------------ sums and means


def summary(cells: Sequence[CellValue]) -> dict[str, Any]:
    """Means over contigs of cells of one length, with their counts."""
    contigs = [contig for contig in _contigs(cells) if contig["bases"].sum()]
    bits = _mean([contig["bits"].sum() / contig["bases"].sum() for contig in contigs])
    accuracy = _mean([contig["correct"].sum() / contig["tokens"].sum() for contig in contigs])
    return {
        "bits_per_base": bits,
        "bits_per_base_standard_error": _standard_error(
            [c["bits"][c["bases"] > 0] / c["bases"][c["bases"] > 0] for c in contigs]
        ),
        "nll": bits * BIT,
        **({} if math.isnan(accuracy) else {cells[0]["score"]: accuracy}),
        "bases": sum(int(contig["bases"].sum()) for contig in contigs),
        "window_bases": max(cell["window"] for cell in cells),
        "stretches": sum(len(contig["bits"]) for contig in contigs),
        "left_over": sum(cell["left_over"] for cell in cells),
        "contigs": len(contigs),
        "contigs_left_out": cells[0]["contigs_left_out"],
    }


def _change(cells: Sequence[CellValue], shorter: Sequence[CellValue]) -> dict[str, float]:
    """Bits per base less those at a shorter length, the mean over contigs, and the standard error by stretches."""
    pairs = [
        pair for pair in zip(_contigs(cells), _contigs(shorter), strict=True) if all(c["bases"].sum() for c in pair)
    ]
    means = [np.subtract(*(c["bits"].sum() / c["bases"].sum() for c in pair)) for pair in pairs]
    read = [(a["bases"] > 0) & (b["bases"] > 0) for a, b in pairs]
    differences = [
        a["bits"][where] / a["bases"][where] - b["bits"][where] / b["bases"][where]
        for (a, b), where in zip(pairs, read, strict=True)
    ]
    return {"change": _mean(means), "change_standard_error": _standard_error(differences)}


def _contigs(cells: Sequence[CellValue]) -> list[dict[str, np.ndarray]]:
    """`SUMS` of every stretch, contig by contig."""
    values: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        contig = values.setdefault(cell["contig"], {name: [] for name in SUMS})
        for name in SUMS:
            contig[name] += cell[name]
    return [{name: np.array(column, np.float64) for name, column in contig.items()} for contig in values.values()]


def _standard_error(contigs: Sequence[np.ndarray]) -> float:
    """Of the mean over C contigs of the means over each one's n stretches: √(Σ s² / n) / C. A contig of a single stretch
    takes the mean s² of the others; NaN where all have one."""
    known = [values.var(ddof=1) for values in contigs if len(values) > 1]
    if not known:
        return math.nan
    other = np.mean(known)
    variances = [values.var(ddof=1) if len(values) > 1 else other for values in contigs]
    return math.sqrt(sum(s2 / len(values) for s2, values in zip(variances, contigs, strict=True))) / len(contigs)


def _mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return float(np.mean(values)) if len(values) else math.nan


def _sums_of_parts(scores: Scores, genome: Genome, stretch: Region, shape: tuple[int, ...]) -> np.ndarray:
    """(PARTS, 2) bits and bases that count of a stretch's windows (`shape`), from scores by base."""
    bits, bases = np.zeros(shape), np.zeros(shape)
    width = scores.nll.shape[1]  # less than a window where bases at its end make no token
    bits[:, :width], bases[:, :width] = scores.nll / BIT, scores.bases
    place = stretch.contig, stretch.start, stretch.start + bits.size
    again = repetitive(genome, *place)
    masks = (~again, again, genome.soft_masked(*place))
    return np.array([[values.ravel()[mask].sum() for values in (bits, bases)] for mask in masks])
