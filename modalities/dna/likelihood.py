"""How well held-out DNA is predicted: bits per base against length, contig by contig, and on one strand and the other.

A cell is a length and a few stretches of one contig. Stretches are as long as the longest length and serve every length, cut
into windows that do not overlap, each read from BOS: all lengths predict the same bases, up to what is left of a stretch when
it is no whole number of windows. A window of L tokens is L times the tokenizer's mean bases a token, in bases. Contigs weigh
equally, whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from modalities.dna.bases import reverse_complement
from modalities.dna.held_out import HeldOut, Stretch, held_out
from modalities.dna.scoring import score_windows
from modalities.dna.settings import DnaEvaluator, DnaSettings
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, batches
from modalities.text.evals import bucket_of

CELL_BASES = 1 << 16  # in a cell, at least one stretch
ENOUGH = 0.9  # share of the held-out bases whose contigs have to have room for a default length
BIT = math.log(2)


class Likelihood(DnaEvaluator):
    """Evaluators that score windows of held-out stretches, ``samples`` of them in every held-out contig that has room; by
    default so many that a length reads about ``default_bases`` in all."""

    default_bases = 1 << 18

    def points(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        """The lengths asked for, or the default ones that held-out contigs have room for."""
        lengths = super().points(model, settings)
        if settings.lengths is not None:
            return lengths
        most = held_out(settings.source).reaching(ENOUGH)
        return tuple(length for length in lengths if window_of(model, length) <= most) or lengths[:1]

    def lengths(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        """In tokens, ascending."""
        return self.points(model, settings)

    def samples(self, model: nn.Module, settings: DnaSettings) -> int:
        data, stretch = held_out(settings.source), window_of(model, self.lengths(model, settings)[-1])
        return settings.samples or max(1, self.default_bases // (len(data.contigs) * stretch))

    def identity(self, model: nn.Module, settings: DnaSettings) -> dict[str, Any]:
        return {
            "held_out": held_out(settings.source).fingerprint,
            "seed": settings.seed,
            "stretch": window_of(model, self.lengths(model, settings)[-1]),
            "samples": self.samples(model, settings),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
        }

    def cells(self, model: nn.Module, settings: DnaSettings) -> list[Cell]:
        lengths, data = self.lengths(model, settings), held_out(settings.source)
        longest = window_of(model, lengths[-1])
        found = self.stretches(data, longest, self.samples(model, settings), settings.seed)
        group = max(1, CELL_BASES // longest)
        cells = []
        for length in lengths:
            for contig, stretches in found.items():
                for part in batches(len(stretches), group):
                    name = f"length={length}/{contig}/stretches={part.start}-{part.stop}"
                    facts = {"length": length, "contig": contig, "contigs_left_out": len(data.contigs) - len(found)}
                    cost = sum(s.stop - s.start for s in stretches[part])
                    cells.append(Cell(name, cost=cost, data={"facts": facts, "stretches": stretches[part]}))
        return cells

    def stretches(self, data: HeldOut, length: int, count: int, seed: int) -> dict[str, list[Stretch]]:
        """By contig; contigs without room for one of ``length`` are left out."""
        return data.stretches(length, count, seed)

    def windows(self, model: nn.Module, cell: Cell, settings: DnaSettings) -> list[np.ndarray]:
        """The whole windows (N, window) of each stretch of a cell; a stretch shorter than a window is one window."""
        data, window = held_out(settings.source), window_of(model, cell.data["facts"]["length"])
        found = [data.codes(stretch) for stretch in cell.data["stretches"]]
        return [codes[: max(1, len(codes) // window) * window].reshape(-1, min(window, len(codes))) for codes in found]


class Bits(Likelihood):
    """NLL, bits per base and next-base accuracy against length, and bits by position in windows of the longest length.

    The standard error is that of the mean over stretches, drawn contig by contig; NaN where all have a single one.
    Positions are in tokens, in octaves, and are left out where both strands count: a base is then at two of them. A
    tokenizer of more than single bases has a token accuracy instead; what predicts nothing has none.
    """

    name = "bits"
    summary = "NLL, bits per base and next-base accuracy of held-out contigs against length, and bits by position"
    headline = ("bits_per_base", "accuracy", "token_accuracy", "contigs_left_out")
    exceptions = ("contigs_left_out",)

    def identity(self, model: nn.Module, settings: DnaSettings) -> dict[str, Any]:
        return super().identity(model, settings) | {"strands": strands_of(model, settings)}

    def measure(self, model: nn.Module, cell: Cell, settings: DnaSettings) -> CellValue:
        facts, strands = cell.data["facts"], strands_of(model, settings)
        values: dict[str, list[float]] = {name: [] for name in ("bits", "bases", "correct", "tokens")}
        bucket_bits, bucket_bases, left_over = np.zeros(0), np.zeros(0), 0
        by_stretch = self.windows(model, cell, settings)
        for windows, stretch in zip(by_stretch, cell.data["stretches"], strict=True):
            scores = score_windows(model, windows, strands=strands, batch_tokens=settings.batch_tokens)
            left_over += stretch.stop - stretch.start - windows.size + scores.left_over
            bits = scores.nll / BIT  # before sums, so that 2 bits stay 2 exactly
            for name, value in (("bits", bits), ("bases", scores.bases), ("correct", scores.correct)):
                values[name].append(value.sum().item())
            values["tokens"].append(int((scores.bases > 0).sum()))
            if strands == "one":
                bucket = bucket_of(bits.shape[1])
                bucket_bits = _add(bucket_bits, np.bincount(bucket, weights=bits.sum(0).numpy()))
                bucket_bases = _add(bucket_bases, np.bincount(bucket, weights=scores.bases.sum(0).numpy()))
        accuracy = "accuracy" if load_tokenizer(model.config.tokenizer).bases_per_token == 1 else "token_accuracy"
        sums = {"left_over": left_over, "bucket_bits": bucket_bits.tolist(), "bucket_bases": bucket_bases.tolist()}
        return {**facts, "window": by_stretch[0].shape[1], "score": accuracy, **values, **sums}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            mine = [cell for cell in cells.values() if cell["length"] == length]
            row = {"length": length} | _summary(mine)
            sums = [reduce(_add, (np.array(cell[name]) for cell in mine)) for name in ("bucket_bits", "bucket_bases")]
            if len(sums[0]):
                row["position_to"] = [2**k for k in range(len(sums[0]))]
                row["position_bits"] = np.divide(*sums, out=np.full(len(sums[0]), np.nan), where=sums[1] > 0).tolist()
            rows.append(row)
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.likelihood_plots import bits_figure

        bits_figure(results, path)


class Contigs(Bits):
    """Bits per base and accuracy of each held-out contig, in windows of one length: the last one asked for, by default four
    times the training length. A contig without room for a window is one shorter window: its longest region."""

    name = "contigs"
    summary = "NLL, bits per base and next-base accuracy of each held-out contig at one length"
    headline = ("bits_per_base", "accuracy", "token_accuracy")
    axis = "contig"

    def points(self, model: nn.Module, settings: DnaSettings) -> tuple[str, ...]:
        return tuple(held_out(settings.source).contigs)

    def lengths(self, model: nn.Module, settings: DnaSettings) -> tuple[int, ...]:
        return (settings.lengths[-1] if settings.lengths else 4 * self.trained_at(model),)

    def stretches(self, data: HeldOut, length: int, count: int, seed: int) -> dict[str, list[Stretch]]:
        short = {name: data.longest(name) for name in data.contigs}
        short = {name: region for name, region in short.items() if region.stop - region.start < length}
        found = data.stretches(length, count, seed) if len(short) < len(data.contigs) else {}
        found |= {name: [Stretch(name, region.start, region.stop)] for name, region in short.items()}
        return {name: found[name] for name in data.contigs if name in found}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        by_contig: dict[str, list[CellValue]] = {}
        for cell in cells.values():
            by_contig.setdefault(cell["contig"], []).append(cell)
        return [{"contig": name, "length": mine[0]["length"]} | _summary(mine) for name, mine in by_contig.items()]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.likelihood_plots import contigs_figure

        contigs_figure(results, path)


class Strands(Likelihood):
    """How far a model says the same of a sequence and of its reverse complement.

    The mean over windows of |bits(x) − bits(rc x)| per base, Pearson r between the two over windows (NaN where either does
    not vary), the bits per base of the strand as written, and of both strands on average.
    """

    name = "strands"
    summary = "bits per base of windows and of their reverse complements, against length"
    headline = ("difference", "pearson_r", "one_strand_bits", "both_strands_bits", "contigs_left_out")
    exceptions = ("contigs_left_out",)
    default_bases = 1 << 17  # each read twice

    def measure(self, model: nn.Module, cell: Cell, settings: DnaSettings) -> CellValue:
        forth, back = [], []
        for windows in self.windows(model, cell, settings):
            turned = np.stack([reverse_complement(window) for window in windows])
            for found, strand in ((forth, windows), (back, turned)):
                scores = score_windows(model, strand, strands="one", batch_tokens=settings.batch_tokens)
                found += (scores.bits / scores.counted).tolist()
        return {**cell.data["facts"], "forth": forth, "back": back}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            by_contig: dict[str, list[np.ndarray]] = {}
            for cell in cells.values():
                if cell["length"] == length:
                    pairs = np.array([cell["forth"], cell["back"]])
                    by_contig.setdefault(cell["contig"], []).append(pairs[:, np.isfinite(pairs).all(0)])
            pairs = [np.concatenate(parts, axis=1) for parts in by_contig.values()]
            pairs = [pair for pair in pairs if pair.size]
            rows.append(
                {
                    "length": length,
                    "difference": _mean([np.abs(forth - back).mean() for forth, back in pairs]),
                    "pearson_r": _pearson(np.concatenate(pairs, axis=1)) if pairs else math.nan,
                    "one_strand_bits": _mean([forth.mean() for forth, _ in pairs]),
                    "both_strands_bits": _mean([pair.mean() for pair in pairs]),
                    "windows": sum(pair.shape[1] for pair in pairs),
                    "contigs": len(pairs),
                    "contigs_left_out": next(iter(cells.values()))["contigs_left_out"],
                }
            )
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.likelihood_plots import strands_figure

        strands_figure(results, path)


def strands_of(model: nn.Module, settings: DnaSettings) -> str:
    return settings.strands or getattr(model.config, "strands", "one")


def window_of(model: nn.Module, length: int) -> int:
    """Bases of a window of ``length`` tokens."""
    return round(length * load_tokenizer(model.config.tokenizer).bases_per_token)


def _summary(cells: Sequence[CellValue]) -> dict[str, Any]:
    """Means over contigs of cells of one length, with what they are means of."""
    by_contig: dict[str, list[CellValue]] = {}
    for cell in cells:
        by_contig.setdefault(cell["contig"], []).append(cell)
    contigs = [
        {name: _column(mine, name) for name in ("bits", "bases", "correct", "tokens")} for mine in by_contig.values()
    ]
    contigs = [contig for contig in contigs if contig["bases"].sum()]
    bits = _mean([contig["bits"].sum() / contig["bases"].sum() for contig in contigs])
    accuracy = _mean([contig["correct"].sum() / contig["tokens"].sum() for contig in contigs])
    return {
        "bits_per_base": bits,
        "standard_error": _standard_error([_ratio(contig["bits"], contig["bases"]) for contig in contigs]),
        "nll": bits * BIT,
        **({} if math.isnan(accuracy) else {cells[0]["score"]: accuracy}),
        "bases": sum(int(contig["bases"].sum()) for contig in contigs),
        "window_bases": max(cell["window"] for cell in cells),
        "stretches": sum(len(contig["bits"]) for contig in contigs),
        "left_over": sum(cell["left_over"] for cell in cells),
        "contigs": len(contigs),
        "contigs_left_out": cells[0]["contigs_left_out"],
    }


def _column(cells: Sequence[CellValue], name: str) -> np.ndarray:
    return np.array([value for cell in cells for value in cell[name]], dtype=np.float64)


def _ratio(bits: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """Of the stretches that have known bases."""
    return bits[bases > 0] / bases[bases > 0]


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
    return float(np.mean(values)) if len(values) else math.nan


def _pearson(pairs: np.ndarray) -> float:
    """Of (2, N); NaN where a row does not vary."""
    if pairs.shape[1] < 2 or not pairs.std(axis=1).all():
        return math.nan
    return float(np.corrcoef(pairs)[0, 1])


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of two arrays, the shorter one going on with zeros."""
    total = np.zeros(max(len(a), len(b)))
    total[: len(a)] += a
    total[: len(b)] += b
    return total
