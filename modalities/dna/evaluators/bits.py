"""Bits per base of held-out DNA against length, and by position in a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modalities.decoder.scoring import position_buckets
from modalities.dna.baselines import BASELINES, MARKOV
from modalities.dna.evaluation import (
    BASES_LENGTH,
    DnaEvaluator,
    DnaLengthSettings,
    StrandSettings,
    step_of,
    strands_of,
    whole_kmers,
)
from modalities.dna.repeats import repetitive
from modalities.dna.scoring import BIT, score_windows, tokens_of
from modalities.dna.splits import Region
from modalities.dna.tokenizers import DnaTokenizer, load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, Observed, Score, Settings, option
from modalities.figures import RULE, curves, finish, name_panel, panels, position_curves, styles_of
from modalities.files import write_table
from modalities.results import mean_of_seeds
from zoo.model import ZooModel
from zoo.slices import slices

__all__ = [
    "LEFT_OUT",
    "Bits",
    "BitsSettings",
    "Likelihood",
    "LikelihoodSettings",
    "by_contig",
    "mean",
    "summary",
    "view",
    "with_styles",
]

PARTS = ("unique", "repeats", "soft-masked")
CELL_BASES = 1 << 16  # in a cell, at least one stretch
LEFT_OUT = Score("contigs_left_out", exception=True)


class Likelihood(DnaEvaluator):
    """Evaluators that score windows of held-out stretches: `samples` stretches of every held-out contig that has room; by
    default as many as read about `default_bases` at each length.

    Lengths are in bases; windows are rounded down to whole k-mers. A cell is a length and a few stretches of one contig.
    Stretches are at least as long as the longest length and serve every length, cut into windows that do not overlap, each read
    from BOS: all lengths, and all tokenizers, predict the same bases, up to the remainder of a stretch that is not a whole
    number of windows. Contigs weigh equally, whatever their size.
    """

    axis = BASES_LENGTH
    default_bases = 1 << 18

    def points(self, model: ZooModel) -> tuple[Any, ...]:
        """`lengths`, or the default ones that held-out contigs have room for."""
        lengths = self.lengths_for(model)
        return lengths if self.settings.lengths else self.with_room(model, lengths)

    def lengths(self, model: ZooModel) -> tuple[int, ...]:
        """In bases, ascending."""
        return self.points(model)

    def stretch(self, model: ZooModel) -> int:
        """Bases of a stretch."""
        return self.lengths(model)[-1]

    def samples(self, model: ZooModel) -> int:
        bases = len(self.heldout.items.contigs) * self.stretch(model)
        return self.settings.samples or max(1, self.default_bases // bases)

    def identity(self, model: ZooModel) -> dict[str, Any]:
        return {
            "heldout": self.heldout.fingerprint,
            "seed": self.settings.seed,
            "stretch": self.stretch(model),
            "samples": self.samples(model),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            **self.length_unit(model),
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        lengths = self.lengths(model)
        longest = self.stretch(model)
        found = self.stretches(longest, self.samples(model), self.settings.seed)
        group, left_out = max(1, CELL_BASES // longest), len(self.heldout.items.contigs) - len(found)
        cells = []
        for length in lengths:
            for contig, stretches in found.items():
                for part in slices(len(stretches), group):
                    name = f"length={length}/{contig}/stretches={part.start}-{part.stop}"
                    facts = {"length": length, "contig": contig, "contigs_left_out": left_out}
                    cost = sum(s.stop - s.start for s in stretches[part])
                    cells.append(Cell(name, cost=cost, data={"facts": facts, "stretches": stretches[part]}))
        return cells

    def stretches(self, length: int, count: int, seed: int) -> dict[str, list[Region]]:
        """By contig; contigs without room for one of `length` are left out."""
        return self.heldout.items.stretches(length, count, seed)

    def windows(self, model: ZooModel, cell: Cell) -> list[np.ndarray]:
        """The whole windows (N, window) of each stretch of a cell; a stretch shorter than a window is one window."""
        data, window = self.heldout.items, whole_kmers(model, cell.data["facts"]["length"])
        found = [data.codes(stretch) for stretch in cell.data["stretches"]]
        return [codes[: max(1, len(codes) // window) * window].reshape(-1, min(window, len(codes))) for codes in found]


@dataclass(frozen=True)
class LikelihoodSettings(DnaLengthSettings, StrandSettings):
    """Lengths of windows, and strands."""


@dataclass(frozen=True)
class BitsSettings(LikelihoodSettings):
    """As `LikelihoodSettings`, and the bases of the stretches that windows of every length are cut from."""

    stretch: int | None = option(None, "bases of a stretch; default: 65,536, or the longest length beyond that")
    repeats: bool = option(False, "also score repeats and unique sequence apart, at the longest length")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stretch is not None and self.stretch < 2:
            raise ValueError(f"stretch must be at least 2 bases, got {self.stretch}")


class Bits(Likelihood):
    """NLL, bits per base and next-base accuracy against length, and bits by position in windows of the longest length.

    Whichever lengths are asked for, and of whichever model, stretches have 65,536 bases (less, a power of two, where contigs
    have no room), or `stretch`: a length is of the same bases in every table. Without `stretch`, a longer length alone makes
    them longer.
    The standard error is that of the mean over stretches, drawn contig by contig; NaN where all have a single one. `change` is
    the difference to the next shorter length, and its standard error that of the mean of the stretches' own differences, far
    less than either length's: what stretches are easy is alike at every length.
    Positions count the start and the bases seen before a token, in octaves; they are left out for both strands, where a base is
    at two positions. A tokenizer of more than single bases has a token accuracy instead.

    bits.contigs.csv has the same by contig. With `repeats` it also has parts of the sequence at the longest length: a base of
    "repeats" lies in 24 bases all of whose words of 16 occur more than once, on either strand, in the file of its contig; the
    others are "unique"; "soft-masked" ones are lower case in the file.
    """

    name = "bits"
    version = 2  # of older ones some had stretches of the longest length, whatever it was
    summary = "NLL, bits per base and next-base accuracy of held-out contigs against length, and bits by position"
    scores: tuple[Score, ...] = (
        Score("bits_per_base", "bits per base", linear=True),
        Score("accuracy", linear=True),
        Score("token_accuracy", linear=True),
        LEFT_OUT,
    )
    settings_class: ClassVar[type[Settings]] = BitsSettings
    paired_over = "contigs"
    default_stretch = 1 << 16

    def stretch(self, model: ZooModel) -> int:
        longest, asked, data = super().stretch(model), self.settings.stretch, self.heldout.items
        if asked is None:
            return max(longest, self._common(model))
        if asked < longest:
            raise ValueError(f"stretches of {asked:,} bases hold no window of {longest:,}: at most --lengths {asked}")
        if asked > (most := max(len(data.longest(name)) for name in data.contigs)):
            raise ValueError(f"--stretch {asked}: the longest held-out region has {most} bases")
        return asked

    def _common(self, model: ZooModel | None) -> int:
        """Bases of stretches whose lengths ask for no more."""
        return self.with_room(model, tuple(1 << k for k in range(8, self.default_stretch.bit_length())))[-1]

    def show(self, results: list[ModelResult], console: Any) -> None:
        """That the bases are others than those of shorter lengths, where they are."""
        longest = max(row["length"] for result in results for row in result.rows)
        if self.settings.stretch is None and longest > (common := self._common(None)):
            console.print(
                f"note: stretches have {longest:,} bases, the longest length, and not {common:,}: where no length is beyond "
                "that, other bases are read",
                soft_wrap=True,
            )

    def identity(self, model: ZooModel) -> dict[str, Any]:
        key = super().identity(model) | {"strands": strands_of(model, self.settings)}
        return key | ({"repeats": True} if self.settings.repeats else {})

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        strands = strands_of(model, self.settings)
        values: dict[str, list[float]] = {name: [] for name in ("bits", "bases", "correct", "tokens")}
        bucket_bits, bucket_bases, left_over = np.zeros(0), np.zeros(0), 0
        by_stretch = self.windows(model, cell)
        for windows, stretch in zip(by_stretch, cell.data["stretches"], strict=True):
            asked: dict[str, Any] = dict(strands=strands, batch_tokens=self.settings.batch_tokens)
            scores = score_windows(model, windows, advance=self.advance, **asked)
            left_over += stretch.stop - stretch.start - windows.size + scores.left_over
            bits = scores.nll / BIT  # before sums, so that 2 bits stay exactly 2
            for name, value in (("bits", bits), ("bases", scores.bases), ("correct", scores.correct)):
                values[name].append(value.sum().item())
            values["tokens"].append(int((scores.bases > 0).sum()))
            if strands == "one":
                octaves = by_octave(load_tokenizer(model.config.tokenizer), windows, bits.numpy(), scores.bases.numpy())
                bucket_bits, bucket_bases = add(bucket_bits, octaves[0]), add(bucket_bases, octaves[1])
        accuracy = "accuracy" if load_tokenizer(model.config.tokenizer).bases_per_token == 1 else "token_accuracy"
        sums = {"left_over": left_over, "bucket_bits": bucket_bits.tolist(), "bucket_bases": bucket_bases.tolist()}
        if self.settings.repeats and cell.data["facts"]["length"] == self.lengths(model)[-1]:
            sums["parts"] = self._measure_parts(model, by_stretch, cell.data["stretches"])
        return {**cell.data["facts"], "window": by_stretch[0].shape[1], "score": accuracy, **values, **sums}

    def _measure_parts(
        self, model: ZooModel, by_stretch: Sequence[np.ndarray], stretches: Sequence[Region]
    ) -> dict[str, list[float]]:
        """[bits, bases] of each of `PARTS`, over all stretches of a cell."""
        totals, genome = {part: [0.0, 0.0] for part in PARTS}, self.heldout.items.genome
        for windows, stretch in zip(by_stretch, stretches, strict=True):
            options: dict[str, Any] = dict(strands=strands_of(model, self.settings), by_base=True)
            scores = score_windows(model, windows, batch_tokens=self.settings.batch_tokens, **options)
            bits, bases = np.zeros(windows.shape), np.zeros(windows.shape)
            width = scores.nll.shape[1]  # less than a window where bases at its end make no token
            bits[:, :width], bases[:, :width] = scores.nll / BIT, scores.bases
            place = stretch.contig, stretch.start, stretch.start + windows.size
            repeated, soft = repetitive(genome, *place), genome.soft_masked(*place)
            for part, mask in zip(PARTS, (~repeated, repeated, soft), strict=True):
                totals[part][0] += float(bits.ravel()[mask].sum())
                totals[part][1] += float(bases.ravel()[mask].sum())
        return totals

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Stretches of a contig."""
        yield from parts(cell["length"], cell["contig"], cell)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        shorter: list[CellValue] = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            mine = [cell for cell in cells.values() if cell["length"] == length]
            row = {"length": length} | summary(mine)
            if shorter:
                row |= _change(mine, shorter)
            shorter = mine
            bits, bases = (
                reduce(add, (np.array(cell[name]) for cell in mine)) for name in ("bucket_bits", "bucket_bases")
            )
            if len(bits):
                row["position_to"] = [2**k for k in range(len(bits))]
                row["position_bits"] = np.divide(bits, bases, out=np.full(len(bits), np.nan), where=bases > 0).tolist()
            rows.append(row)
        return rows

    def write(self, results: list[ModelResult], out: Path) -> None:
        """bits.contigs.csv: a row for each model, length and held-out contig; with `repeats` also for parts of the sequence."""
        rows: list[dict[str, Any]] = []
        for result in results:
            cells = list(result.cells.values())
            for length in sorted({cell["length"] for cell in cells}):
                for contig, group in by_contig([cell for cell in cells if cell["length"] == length]).items():
                    place = {"model": result.label, "length": length, "contig": contig}
                    sums = [sum(sum(cell[name]) for cell in group) for name in ("bits", "bases")]
                    for part, (bits, bases) in {"all": sums, **_sum_parts(group)}.items():
                        if bases:
                            rows.append(place | {"part": part, "bases": int(bases), "bits_per_base": bits / bases})
        if rows:
            write_table(out / f"{self.name}.contigs.csv", rows)

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Bits per base and accuracy against length, and bits by position inside windows of the longest length."""
        results, styles = with_styles(mean_of_seeds(results, self.axis.column), _bits_as_trained)
        figure, axes = panels(1, 3, width=4.2, height=3.9)
        titles = ("bits per base, less is better", "next base predicted right")
        chances = ((2.0, "2.000, uniform"), (0.25, "0.25, chance"))
        for axis, score, title, (chance, text) in zip(axes[:2], self.scores[:2], titles, chances, strict=True):
            curves(axis, results, score, self.axis, styles=styles, bare=BASELINES)
            name_panel(axis, title)
            axis.axhline(chance, **RULE)
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            axis.annotate(text, (0.99, chance), fontsize=7.5, color="0.35", **place)
            axis.set_ylim(view(results, score.column, chance))
        where = [n for n, result in enumerate(results) if result.method != "uniform"]
        if where:  # uniform is alike at every position
            known, their_styles = [results[n] for n in where], [styles[n] for n in where]
            position_curves(axes[2], known, "position_bits", "bits per base", styles=their_styles, unit="bases")
            axes[2].axhline(2.0, **RULE)
        axes[2].set_visible(bool(where))
        finish(figure, axes, results, path, unseeded=BASELINES)


def _sum_parts(cells: Sequence[CellValue]) -> dict[str, list[float]]:
    """[bits, bases] by part of the sequence; empty where parts were not measured."""
    totals: dict[str, list[float]] = {}
    for cell in cells:
        for part, sums in cell.get("parts", {}).items():
            totals[part] = [a + b for a, b in zip(totals.get(part, [0.0, 0.0]), sums, strict=True)]
    return totals


def by_octave(
    tokenizer: DnaTokenizer, windows: np.ndarray, bits: np.ndarray, bases: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(bits, bases) of token scores (B, N), summed by the octave of what a token's prediction sees: as `position_buckets`, of n
    that is 1 and the bases before the token."""
    step = step_of(tokenizer)
    if step == tokenizer.bases_per_token:  # every row alike
        octave = position_buckets(bits.shape[1] * step)[::step]
        return np.bincount(octave, weights=bits.sum(0)), np.bincount(octave, weights=bases.sum(0))
    spans = tokens_of(tokenizer, windows)[1]
    octave = position_buckets(windows.shape[1])[np.minimum(spans.cumsum(1) - spans, windows.shape[1] - 1)]
    return np.bincount(octave.ravel(), weights=bits.ravel()), np.bincount(octave.ravel(), weights=bases.ravel())


def parts(point: Any, unit: str, cell: CellValue, where: slice = slice(None)) -> Iterator[Observed]:
    """What the stretches `where` of a cell say about a unit: bits per base, and the accuracy where there is one."""
    yield Observed(point, unit, "bits_per_base", sum(cell["bits"][where]), sum(cell["bases"][where]))
    correct = sum(cell["correct"][where])
    if not math.isnan(correct):  # as where nothing is predicted
        yield Observed(point, unit, cell["score"], correct, sum(cell["tokens"][where]))


def _bits_as_trained(result: ModelResult) -> float:
    """At the training length, or the nearest."""
    return min(result.rows, key=lambda row: abs(math.log(row["length"] / result.trained_at)))["bits_per_base"]


def summary(cells: Sequence[CellValue]) -> dict[str, Any]:
    """Means over contigs of cells of one length, with their counts."""
    contigs = [contig for contig in _contigs(cells) if contig["bases"].sum()]
    bits = mean([contig["bits"].sum() / contig["bases"].sum() for contig in contigs])
    accuracy = mean([contig["correct"].sum() / contig["tokens"].sum() for contig in contigs])
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
    return {"change": mean(means), "change_standard_error": _standard_error(differences)}


def _contigs(cells: Sequence[CellValue]) -> list[dict[str, np.ndarray]]:
    """Sums of every stretch, contig by contig."""
    names = ("bits", "bases", "correct", "tokens")
    return [{name: _column(mine, name) for name in names} for mine in by_contig(cells).values()]


def _column(cells: Sequence[CellValue], name: str) -> np.ndarray:
    return np.array([value for cell in cells for value in cell[name]], dtype=np.float64)


def _standard_error(contigs: Sequence[np.ndarray]) -> float:
    """Of the mean over C contigs of the means over each one's n stretches: √(Σ s² / n) / C. A contig of a single stretch
    takes the mean s² of the others; NaN where all have one."""
    known = [values.var(ddof=1) for values in contigs if len(values) > 1]
    if not known:
        return math.nan
    other = np.mean(known)
    variances = [values.var(ddof=1) if len(values) > 1 else other for values in contigs]
    return math.sqrt(sum(s2 / len(values) for s2, values in zip(variances, contigs, strict=True))) / len(contigs)


def by_contig(cells: Sequence[CellValue]) -> dict[str, list[CellValue]]:
    found: dict[str, list[CellValue]] = {}
    for cell in cells:
        found.setdefault(cell["contig"], []).append(cell)
    return found


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return float(np.mean(values)) if len(values) else math.nan


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of two arrays, the shorter one continued with zeros."""
    total = np.zeros(max(len(a), len(b)))
    total[: len(a)] += a
    total[: len(b)] += b
    return total


# ------------------------------------------------------------------------------------------------ baselines in figures

GREYS = {"uniform": ("0.75", "-")}


def with_styles(
    results: Sequence[ModelResult], bits: Callable[[ModelResult], float]
) -> tuple[list[ModelResult], list[dict[str, Any]]]:
    """What figures draw, and its styles: models as everywhere, baselines as grey lines without markers.

    Of Markov chains only those of the fewest `bits` and of the highest order are drawn.
    """
    chains = [result for result in results if result.method in MARKOV]
    kept = [min(chains, key=bits), max(chains, key=lambda r: MARKOV.index(r.method))] if chains else []
    results = [result for result in results if result.method not in MARKOV or any(result is chain for chain in kept)]
    given = iter(styles_of([result for result in results if result.method not in (*GREYS, *MARKOV)]))
    styles: list[dict[str, Any]] = []
    seeds: dict[str, int] = {}
    for result in results:
        if result.method in MARKOV:
            color, dash, note = ("0.2", "-", "best order") if result is kept[0] else ("0.45", "--", "highest order")
            note = "best and highest order" if kept[0] is kept[1] else note
            note = f" ({note})" if len(chains) > 1 else ""
        elif result.method in GREYS:
            (color, dash), note = GREYS[result.method], ""
            again = seeds[result.method] = seeds.get(result.method, -1) + 1
            color = f"{min(float(color) + 0.25 * again, 0.75):g}"  # further seeds are lighter
        else:
            styles.append(next(given))
            continue
        plain = {"marker": "", "linewidth": 1.6, "zorder": 2, "label": result.label + note}
        styles.append({"color": color, "linestyle": dash, **plain})
    return results, styles


def view(results: Sequence[ModelResult], column: str, chance: float) -> tuple[float, float]:
    """Limits that hold `chance` and all results."""
    shown = [chance, *(value for result in results for value in _values(result, column))]
    room = 0.08 * (max(shown) - min(shown)) or 0.08 * chance
    return min(shown) - room, max(shown) + room


def _values(result: ModelResult, column: str) -> list[float]:
    return [row[column] for row in result.rows if math.isfinite(row.get(column, math.nan))]
