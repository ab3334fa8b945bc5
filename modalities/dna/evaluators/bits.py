"""Bits per base of held-out DNA against length, by contig, and in repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from modalities.decoder.scoring import windows_of
from modalities.dna.evaluation import (
    BASES_LENGTH,
    DnaEvaluator,
    DnaLengthSettings,
    StrandSettings,
    strands_of,
    whole_kmers,
)
from modalities.dna.genome import Genome
from modalities.dna.kmers import kmers
from modalities.dna.scoring import BIT, Scores, score_windows
from modalities.dna.splits import Region
from modalities.dna.tokenizers import load_tokenizer, reverse_complement
from modalities.evaluation import Cell
from modalities.paired import Observed
from modalities.results import CellValue, ModelResult, Row, Score
from modalities.settings import CutSettings, option
from modalities.tables import write_table
from zoo.model import ZooModel
from zoo.positions import slices

CELL_BASES = 1 << 16  # in a cell, at least one stretch
DEFAULT_BASES = 1 << 18  # read at each length
DEFAULT_STRETCH = 1 << 16
PARTS = ("unique", "repeats", "soft-masked")
SUMS = ("bits", "bases", "correct")  # of each stretch of a cell
WORD = 16  # bases; of a genome of 40 million, 2% of the words stand elsewhere by chance
LEAST = 24  # bases of a repeat, which is none by chance


@dataclass(frozen=True)
class BitsSettings(DnaLengthSettings, StrandSettings, CutSettings):
    """Lengths of windows, and the bases of the stretches that windows of every length are cut
    from."""

    stretch: int | None = option(
        None, "bases of a stretch; default: 65,536, or the longest length beyond that"
    )
    repeats: bool = option(
        False, "also score repeats and unique sequence apart, at the longest length"
    )


class Bits(DnaEvaluator[BitsSettings]):
    """NLL, bits per base and next-base accuracy against length.

    `samples` stretches of every held-out contig that has room are read, by default as many as have
    2¹⁸ bases. A stretch has 65,536 bases (less, a power of two, where contigs have no room), or
    `stretch`; without `stretch` a longer length alone makes it longer. It is cut into windows that
    do not overlap, each read from BOS and rounded down to whole k-mers: all lengths, and all
    tokenizers, predict the same bases, up to the remainder of a stretch. Contigs weigh equally,
    whatever their size.

    The standard error is that of the mean over stretches, drawn contig by contig; NaN where all
    have a single one. `change` is the difference to the next shorter length, and its standard error
    that of the mean of the stretches' own differences. A tokenizer of more than single bases has no
    accuracy. With `control` each base is predicted from at most as many bases before it as training
    had, at least half as many.

    bits.contigs.csv has the same by contig. With `repeats` it also has parts of the sequence at the
    longest length: bases in "repeats" (24 known bases all of whose words of 16 stand more than once
    in the file, on either strand), the others, which are "unique", and those that the file has in
    lower case.
    """

    name = "bits"
    version = 3  # 2 had other names in its cells
    summary = "NLL, bits per base and next-base accuracy of held-out contigs against length, and by contig"
    scores = (
        Score(
            "bits_per_base",
            "bits per base",
            linear=True,
            title="bits per base, less is better",
            level=2.0,
        ),
        Score("accuracy", linear=True, title="next base predicted right", level=0.25),
        Score("contigs_left_out", exception=True),
    )
    axis = BASES_LENGTH
    paired_over = "contigs"

    def points(self, model: ZooModel) -> tuple[int, ...]:
        """`lengths`, or the default ones that held-out contigs have room for."""
        lengths = self.lengths_for(model)
        return lengths if self.settings.lengths else self.with_room(lengths)

    def stretch(self, model: ZooModel) -> int:
        """Bases of a stretch."""
        longest = self.points(model)[-1]
        size = self.settings.stretch
        data = self.heldout.items
        if size is None:  # of all lengths alike, but for those beyond it
            return max(
                longest,
                self.with_room(tuple(1 << k for k in range(8, DEFAULT_STRETCH.bit_length())))[-1],
            )
        if size < longest:
            raise ValueError(
                f"stretches of {size:,} bases hold no window of {longest:,}: at most --lengths {size}"
            )
        if size > data.longest:
            raise ValueError(
                f"--stretch {size}: the longest held-out region has {data.longest} bases"
            )
        return size

    def samples(self, model: ZooModel) -> int:
        return self.settings.samples or max(
            1, DEFAULT_BASES // (len(self.heldout.items.contigs) * self.stretch(model))
        )

    def identity(self, model: ZooModel) -> Row:
        return {
            "heldout": self.heldout.fingerprint,
            "seed": self.settings.seed,
            "stretch": self.stretch(model),
            "samples": self.samples(model),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "strands": strands_of(model, self.settings),
            **({"repeats": True} if self.settings.repeats else {}),
            **({"control": self.settings.control} if self.settings.control else {}),
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        """A cell is a length and a few stretches of one contig."""
        size = self.stretch(model)
        data = self.heldout.items
        by_contig = data.stretches(size, self.samples(model), self.settings.seed)
        left_out = len(data.contigs) - len(by_contig)
        cells = []
        for length in self.points(model):
            read = sum(
                part.stop - part.start
                for part, _ in windows_of(length, self.at_once(model, length))
            )
            for contig, stretches in by_contig.items():
                for part in slices(len(stretches), max(1, CELL_BASES // size)):
                    name = f"length={length}/{contig}/stretches={part.start}-{part.stop}"
                    facts = {"length": length, "contig": contig, "contigs_left_out": left_out}
                    cost = sum(map(len, stretches[part])) * read // length
                    cells.append(
                        Cell(name, cost=cost, data={"facts": facts, "stretches": stretches[part]})
                    )
        return cells

    def windows(self, model: ZooModel, cell: Cell) -> list[np.ndarray]:
        """The whole windows (N, window) of each stretch of a cell."""
        window = whole_kmers(model, cell.data["facts"]["length"])
        every = [self.heldout.items.codes(stretch) for stretch in cell.data["stretches"]]
        return [codes[: len(codes) // window * window].reshape(-1, window) for codes in every]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        strands = strands_of(model, self.settings)
        single = load_tokenizer(model.config.tokenizer).bases_per_token == 1
        parted = self.settings.repeats and cell.data["facts"]["length"] == self.points(model)[-1]
        by_stretch = self.windows(model, cell)
        tokens = self.settings.batch_tokens
        values: CellValue = {name: [] for name in SUMS}
        left_over = 0
        parts = []
        for windows, stretch in zip(by_stretch, cell.data["stretches"], strict=True):
            once = whole_kmers(model, self.at_once(model, windows.shape[1]))
            scores = score_windows(
                model, windows, strands=strands, batch_tokens=tokens, by_base=parted, at_once=once
            )
            left_over += len(stretch) - windows.size + scores.left_over
            bits = scores.nll / BIT  # before sums, so that 2 bits stay exactly 2
            for name, value in (
                ("bits", bits),
                ("bases", scores.bases),
                ("correct", scores.correct),
            ):
                values[name].append(value.sum().item())
            if parted:
                parts.append(
                    _sums_of_parts(scores, self.heldout.items.genome, stretch, windows.shape)
                )
        facts = {"window": by_stretch[0].shape[1], "single": single, "left_over": left_over}
        if parts:
            values["parts"] = dict(zip(PARTS, np.sum(parts, axis=0).tolist(), strict=True))
        return cell.data["facts"] | facts | values

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """The contig of a cell: bits per base, and the accuracy of single bases."""
        point = cell["length"]
        unit = cell["contig"]
        bases = sum(cell["bases"])
        yield Observed(point, unit, "bits_per_base", sum(cell["bits"]), bases)
        if cell["single"]:
            yield Observed(point, unit, "accuracy", sum(cell["correct"]), bases)

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows: list[Row] = []
        shorter: list[Contig] = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            here = [cell for cell in cells.values() if cell["length"] == length]
            contigs = _contigs(here)
            bits = float(np.mean([_bits(contig) for contig in contigs]))
            row = {
                "length": length,
                "bits_per_base": bits,
                "bits_per_base_standard_error": _standard_error(
                    [c["bits"] / c["bases"] for c in contigs]
                ),
                "nll": bits * BIT,
            }
            if here[0]["single"]:
                row["accuracy"] = float(
                    np.mean([c["correct"].sum() / c["bases"].sum() for c in contigs])
                )
            row |= {
                "bases": sum(int(contig["bases"].sum()) for contig in contigs),
                "window_bases": max(cell["window"] for cell in here),
                "stretches": sum(len(contig["bits"]) for contig in contigs),
                "left_over": sum(cell["left_over"] for cell in here),
                "contigs": len(contigs),
                "contigs_left_out": here[0]["contigs_left_out"],
            }
            if shorter:
                pairs = list(zip(contigs, shorter, strict=True))
                row["change"] = float(np.mean([_bits(a) - _bits(b) for a, b in pairs]))
                differences = [a["bits"] / a["bases"] - b["bits"] / b["bases"] for a, b in pairs]
                row["change_standard_error"] = _standard_error(differences)
            shorter = contigs
            rows.append(row)
        return rows

    def measured(self, results: list[ModelResult]) -> str:
        return f"bits: {results[0].rows[-1]['bases']:,} bases measured of {self.contents()}"

    def write(self, results: list[ModelResult], out: Path) -> None:
        """bits.contigs.csv: a row for each model, length and held-out contig; with `repeats` also
        for parts of the sequence."""
        sums: dict[tuple[str, int, str, str], list[float]] = {}  # bits and bases
        for result in results:
            for cell in result.cells.values():
                whole = [sum(cell["bits"]), sum(cell["bases"])]
                for part, values in {"all": whole, **cell.get("parts", {})}.items():
                    key = result.label, cell["length"], cell["contig"], part
                    sums[key] = np.add(sums.get(key, [0.0, 0.0]), values).tolist()
        names = ("model", "length", "contig", "part", "bases", "bits_per_base")
        rows = [(*key, int(bases), bits / bases) for key, (bits, bases) in sums.items() if bases]
        write_table(
            out / f"{self.name}.contigs.csv", [dict(zip(names, row, strict=True)) for row in rows]
        )


Contig = dict[str, np.ndarray]  # `SUMS` of every stretch


def _contigs(cells: Sequence[CellValue]) -> list[Contig]:
    values: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        contig = values.setdefault(cell["contig"], {name: [] for name in SUMS})
        for name in SUMS:
            contig[name] += cell[name]
    return [
        {name: np.array(column, np.float64) for name, column in contig.items()}
        for contig in values.values()
    ]


def _bits(contig: Contig) -> float:
    """Bits per base."""
    return contig["bits"].sum() / contig["bases"].sum()


def _standard_error(contigs: Sequence[np.ndarray]) -> float:
    """Of the mean over C contigs of the means over each one's n stretches: √(Σ s² / n) / C. A
    contig of a single stretch takes the mean s² of the others; NaN where all have one."""
    known = [values.var(ddof=1) for values in contigs if len(values) > 1]
    if not known:
        return math.nan
    variances = [values.var(ddof=1) if len(values) > 1 else np.mean(known) for values in contigs]
    return math.sqrt(
        sum(s2 / len(values) for s2, values in zip(variances, contigs, strict=True))
    ) / len(contigs)


def _sums_of_parts(
    scores: Scores, genome: Genome, stretch: Region, shape: tuple[int, ...]
) -> np.ndarray:
    """(PARTS, 2) bits and bases that count of a stretch's windows (`shape`), from scores by
    base."""
    bits = np.zeros(shape)
    bases = np.zeros(shape)
    width = scores.nll.shape[1]  # less than a window where bases at its end make no token
    bits[:, :width], bases[:, :width] = scores.nll / BIT, scores.bases
    place = stretch.contig, stretch.start, stretch.start + bits.size
    again = repetitive(genome, *place)
    masks = (~again, again, genome.soft_masked(*place))
    return np.array([[values.ravel()[mask].sum() for values in (bits, bases)] for mask in masks])


def repetitive(genome: Genome, contig: str, start: int, stop: int) -> np.ndarray:
    """(stop − start,) bool: the base lies in LEAST known bases, some perhaps beyond [start, stop),
    all of whose words of WORD bases stand more than once in the contig's file, on either strand."""
    before = max(0, start - LEAST + 1)
    after = min(genome[contig].length, stop + LEAST - 1)
    codes = genome.codes(contig, before, after)
    table = _words(genome, genome[contig].file)
    times = _times(codes, table)
    # A word that ends at e of the other strand ends at T − 1 − e + WORD − 1 of this one.
    times[WORD - 1 :] += _times(reverse_complement(codes), table)[WORD - 1 :][::-1]
    run = LEAST - WORD + 1
    sums = np.pad(times > 1, (run, 0)).cumsum()
    whole = sums[run:] - sums[:-run] == run  # of the LEAST bases that end at each place
    sums = np.pad(whole, (1, LEAST - 1)).cumsum()
    return (sums[LEAST:] > sums[:-LEAST])[start - before : stop - before]


def _times(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """(T,) how often the word that ends at each base of codes (T,) is in a sorted table."""
    words, ends = kmers(codes, WORD)
    times = np.zeros(len(codes), np.int64)
    times[ends] = np.searchsorted(table, words, side="right") - np.searchsorted(table, words)
    return times


@lru_cache(maxsize=2)
def _words(genome: Genome, file: str) -> np.ndarray:
    """Sorted words of the contigs of a file, one strand."""
    words = []
    for contig in genome.contigs:
        if contig.file == file:
            numbers, _ = kmers(genome.codes(contig.name), WORD)
            words.append(numbers)
    return np.sort(np.concatenate(words))
