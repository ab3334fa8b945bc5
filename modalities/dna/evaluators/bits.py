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

# Bases of a cell, which has at least one stretch.
CELL_BASES = 1 << 16
# Bases read at each length, of all contigs together.
DEFAULT_BASES = 1 << 18
DEFAULT_STRETCH = 1 << 16
PARTS = ("unique", "repeats", "soft-masked")
# Sums of each stretch of a cell.
SUMS = ("bits", "bases", "correct")
# Bases of a word; in a genome of 40 million, 2% of the words stand elsewhere by chance.
WORD = 16
# Fewest bases of a repeat; so many rarely recur by chance.
LEAST_REPEAT = 24


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

    `samples` stretches of every held-out contig that has room are read, by default so many that
    those of all contigs have about 2¹⁸ bases. A stretch has 65,536 bases (less, a power of two,
    where contigs have no room), or `stretch`; without `stretch` a longer length alone makes it
    longer. It is cut into windows that do not overlap, each read from BOS and rounded down to whole
    k-mers: all lengths, and all tokenizers, predict the same bases, up to the remainder of a
    stretch. Contigs weigh equally, whatever their size.

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
    version = 3
    summary = (
        "NLL, bits per base and next-base accuracy of held-out contigs against length, "
        "and by contig"
    )
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
        if size is None:
            # The same for all lengths, but for those beyond it.
            powers = tuple(1 << k for k in range(8, DEFAULT_STRETCH.bit_length()))
            return max(longest, self.with_room(powers)[-1])
        if size < longest:
            raise ValueError(
                f"stretches of {size:,} bases hold no window of {longest:,}: "
                f"at most --lengths {size}"
            )
        most = self.heldout.items.longest
        if size > most:
            raise ValueError(f"--stretch {size}: the longest held-out region has {most} bases")
        return size

    def samples(self, model: ZooModel) -> int:
        """Stretches of a contig."""
        if self.settings.samples:
            return self.settings.samples
        bases = len(self.heldout.items.contigs) * self.stretch(model)
        return max(1, DEFAULT_BASES // bases)

    def identity(self, model: ZooModel) -> Row:
        identity: Row = {
            "heldout": self.heldout.fingerprint,
            "seed": self.settings.seed,
            "stretch": self.stretch(model),
            "samples": self.samples(model),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "strands": strands_of(model, self.settings),
        }
        if self.settings.repeats:
            identity["repeats"] = True
        if self.settings.control:
            identity["control"] = self.settings.control
        return identity

    def cells(self, model: ZooModel) -> list[Cell]:
        """A cell is a length and a few stretches of one contig."""
        size = self.stretch(model)
        heldout = self.heldout.items
        by_contig = heldout.stretches(size, self.samples(model), self.settings.seed)
        left_out = len(heldout.contigs) - len(by_contig)
        cells = []
        for length in self.points(model):
            # Bases that are read for a window: under a control more than it has.
            windows = windows_of(length, self.at_once(model, length))
            bases_read = sum(part.stop - part.start for part, _ in windows)
            for contig, stretches in by_contig.items():
                facts = {"length": length, "contig": contig, "contigs_left_out": left_out}
                for part in slices(len(stretches), max(1, CELL_BASES // size)):
                    name = f"length={length}/{contig}/stretches={part.start}-{part.stop}"
                    cost = sum(map(len, stretches[part])) * bases_read // length
                    data = {"facts": facts, "stretches": stretches[part]}
                    cells.append(Cell(name, cost, data))
        return cells

    def windows(self, model: ZooModel, cell: Cell) -> list[np.ndarray]:
        """The whole windows (N, window) of each stretch of a cell."""
        window = whole_kmers(model, cell.data["facts"]["length"])
        windows = []
        for stretch in cell.data["stretches"]:
            codes = self.heldout.items.codes(stretch)
            whole = len(codes) // window * window
            windows.append(codes[:whole].reshape(-1, window))
        return windows

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        facts = cell.data["facts"]
        by_part = self.settings.repeats and facts["length"] == self.points(model)[-1]
        by_stretch = self.windows(model, cell)
        window = by_stretch[0].shape[1]
        values: CellValue = facts | {
            "window": window,
            "single": load_tokenizer(model.config.tokenizer).bases_per_token == 1,
            "left_over": 0,
            "bits": [],
            "bases": [],
            "correct": [],
        }
        parts = []
        for windows, stretch in zip(by_stretch, cell.data["stretches"], strict=True):
            scores = score_windows(
                model,
                windows,
                strands=strands_of(model, self.settings),
                batch_tokens=self.settings.batch_tokens,
                by_base=by_part,
                at_once=whole_kmers(model, self.at_once(model, window)),
            )
            values["left_over"] += len(stretch) - windows.size + scores.left_over
            # In bits before sums, so that 2 bits stay exactly 2.
            values["bits"].append((scores.nll / BIT).sum().item())
            values["bases"].append(scores.bases.sum().item())
            values["correct"].append(scores.correct.sum().item())
            if by_part:
                genome = self.heldout.items.genome
                parts.append(_sums_of_parts(scores, genome, stretch, windows.shape))
        if parts:
            values["parts"] = dict(zip(PARTS, np.sum(parts, axis=0).tolist(), strict=True))
        return values

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
            of_length = [cell for cell in cells.values() if cell["length"] == length]
            contigs = _contigs(of_length)
            bits = float(np.mean([_ratio(contig, "bits") for contig in contigs]))
            by_stretch = [_bits_of_stretches(contig) for contig in contigs]
            row = {
                "length": length,
                "bits_per_base": bits,
                "bits_per_base_standard_error": _standard_error(by_stretch),
                "nll": bits * BIT,
            }
            if of_length[0]["single"]:
                hits = [_ratio(contig, "correct") for contig in contigs]
                row["accuracy"] = float(np.mean(hits))
            row |= {
                "bases": sum(int(contig["bases"].sum()) for contig in contigs),
                "window_bases": max(cell["window"] for cell in of_length),
                "stretches": sum(len(contig["bits"]) for contig in contigs),
                "left_over": sum(cell["left_over"] for cell in of_length),
                "contigs": len(contigs),
                "contigs_left_out": of_length[0]["contigs_left_out"],
            }
            if shorter:
                row |= _change(contigs, shorter)
            shorter = contigs
            rows.append(row)
        return rows

    def measured(self, results: list[ModelResult]) -> str:
        return f"bits: {results[0].rows[-1]['bases']:,} bases measured of {self.contents()}"

    def write(self, results: list[ModelResult], out: Path) -> None:
        """bits.contigs.csv: a row for each model, length and held-out contig; with `repeats` also
        for parts of the sequence."""
        # Bits and bases, by model, length, contig and part.
        sums: dict[tuple[str, int, str, str], list[float]] = {}
        for result in results:
            for cell in result.cells.values():
                parts = {"all": [sum(cell["bits"]), sum(cell["bases"])]} | cell.get("parts", {})
                for part, (bits, bases) in parts.items():
                    key = (result.label, cell["length"], cell["contig"], part)
                    total = sums.setdefault(key, [0.0, 0.0])
                    total[0] += bits
                    total[1] += bases
        rows = []
        for (label, length, name, part), (bits, bases) in sums.items():
            if bases:
                rows.append(
                    {
                        "model": label,
                        "length": length,
                        "contig": name,
                        "part": part,
                        "bases": int(bases),
                        "bits_per_base": bits / bases,
                    }
                )
        write_table(out / f"{self.name}.contigs.csv", rows)


# The `SUMS` of every stretch.
Contig = dict[str, np.ndarray]


def _contigs(cells: Sequence[CellValue]) -> list[Contig]:
    """The sums of all stretches, contig by contig."""
    by_contig: dict[str, list[CellValue]] = {}
    for cell in cells:
        by_contig.setdefault(cell["contig"], []).append(cell)
    contigs = []
    for parts in by_contig.values():
        contig = {}
        for name in SUMS:
            contig[name] = np.concatenate([np.array(part[name], np.float64) for part in parts])
        contigs.append(contig)
    return contigs


def _ratio(contig: Contig, name: str) -> float:
    """A sum over all stretches, per base."""
    return contig[name].sum() / contig["bases"].sum()


def _bits_of_stretches(contig: Contig) -> np.ndarray:
    """Bits per base of each stretch."""
    return contig["bits"] / contig["bases"]


def _change(contigs: Sequence[Contig], shorter: Sequence[Contig]) -> Row:
    """The difference of bits per base to the next shorter length."""
    changes = []
    by_stretch = []
    for contig, at_shorter in zip(contigs, shorter, strict=True):
        changes.append(_ratio(contig, "bits") - _ratio(at_shorter, "bits"))
        by_stretch.append(_bits_of_stretches(contig) - _bits_of_stretches(at_shorter))
    return {
        "change": float(np.mean(changes)),
        "change_standard_error": _standard_error(by_stretch),
    }


def _standard_error(contigs: Sequence[np.ndarray]) -> float:
    """Of the mean over C contigs of the means over each one's n stretches: √(Σ s² / n) / C.

    A contig of a single stretch takes the mean s² of the others; NaN where all have one.
    """
    variances = [values.var(ddof=1) for values in contigs if len(values) > 1]
    if not variances:
        return math.nan
    of_others = np.mean(variances)
    total = 0.0
    for values in contigs:
        variance = values.var(ddof=1) if len(values) > 1 else of_others
        total += variance / len(values)
    return math.sqrt(total) / len(contigs)


def _sums_of_parts(
    scores: Scores, genome: Genome, stretch: Region, shape: tuple[int, ...]
) -> np.ndarray:
    """(PARTS, 2): the bits, and the number of scored bases, in each part of a stretch.

    shape: of its windows; scores: by base.
    """
    bits = np.zeros(shape)
    bases = np.zeros(shape)
    # Less than a window where bases at its end make no token.
    width = scores.nll.shape[1]
    bits[:, :width] = scores.nll / BIT
    bases[:, :width] = scores.bases
    place = (stretch.contig, stretch.start, stretch.start + bits.size)
    repeats = repetitive(genome, *place)
    sums = []
    for mask in (~repeats, repeats, genome.soft_masked(*place)):
        sums.append([bits.ravel()[mask].sum(), bases.ravel()[mask].sum()])
    return np.array(sums)


def repetitive(genome: Genome, contig: str, start: int, stop: int) -> np.ndarray:
    """(stop − start,) bool: the base lies in LEAST_REPEAT known bases, some perhaps beyond [start,
    stop), all of whose words of WORD bases stand more than once in the contig's file, on either
    strand."""
    first = max(0, start - LEAST_REPEAT + 1)
    last = min(genome[contig].length, stop + LEAST_REPEAT - 1)
    codes = genome.codes(contig, first, last)
    table = _words(genome, genome[contig].file)
    times = _times(codes, table)
    # A word that ends at e of the other strand ends at T − 1 − e + WORD − 1 of this one.
    times[WORD - 1 :] += _times(reverse_complement(codes), table)[WORD - 1 :][::-1]
    # Whether all words of the LEAST_REPEAT bases that end at each place stand more than once.
    word_count = LEAST_REPEAT - WORD + 1
    sums = np.pad(times > 1, (word_count, 0)).cumsum()
    repeat_ends = sums[word_count:] - sums[:-word_count] == word_count
    # Whether such a stretch ends at a base, or at one of the LEAST_REPEAT − 1 bases after it.
    sums = np.pad(repeat_ends, (1, LEAST_REPEAT - 1)).cumsum()
    in_repeat = sums[LEAST_REPEAT:] > sums[:-LEAST_REPEAT]
    return in_repeat[start - first : stop - first]


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
