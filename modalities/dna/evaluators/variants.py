"""Log-likelihood ratios of variants: log p(alternative) − log p(reference) in windows of equal length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.bases import decode, encode
from modalities.dna.evaluation import (
    REFERENCE,
    FileEvaluator,
    FileSettings,
    bin_edges,
    step_of,
    strands_of,
    table,
)
from modalities.dna.genome import Genome, open_genome
from modalities.dna.scoring import score_windows
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.tokenizers import load_tokenizer
from modalities.dna.vcf import Variant, read_variants
from modalities.evaluation import Cell, CellValue, ModelResult, Score, option
from modalities.figures import panels
from modalities.results import short_names
from zoo.files import file_sha256
from zoo.model import ZooModel
from zoo.naming import did_you_mean
from zoo.prior_plot import save_figure

__all__ = ["VariantSettings", "Variants"]

LEAST_PART, MOST_PARTS = 256, 64  # variants in a cell, cells of a file
NO_CONTIG = "a contig that is not in the reference"
MISMATCH = "another base in the reference"
NO_ROOM = "no room for windows of equal length"
UNEVEN = "unknown bases in one of the two windows"
KINDS = {"snv": "#0072B2", "mnv": "#009E73", "insertion": "#E69F00", "deletion": "#D55E00"}
TRANSITIONS = {("A", "G"), ("G", "A"), ("C", "T"), ("T", "C")}


@dataclass(frozen=True)
class VariantSettings(FileSettings):
    """A reference, and its variants."""

    variants: str | None = option(None, "VCF, or a table of chrom, pos, ref, alt")


@dataclass(frozen=True, slots=True)
class Placed:
    """A variant and its windows, `size` bases from `start` on; or the reason why there are none."""

    variant: Variant
    start: int = 0
    size: int = 0
    reason: str = ""


class Variants(FileEvaluator):
    """Log-likelihood ratio of every variant, log p(alt window) − log p(ref window): below 0 the model prefers the reference.

    Both windows have the same length, begin at the same base of the reference, and end where their own flank does: with
    `at` the first base of REF (from 0), R and A the lengths of REF and ALT, and M the greater of them, the window of W bases
    begins at `at` − ⌊(W − M) / 2⌋. The reference window is the reference's next W bases; the alternative one has ALT in the
    place of REF, is filled from the reference on the right where ALT is shorter, and cut on the right where it is longer.
    At a contig's edges windows move inwards, and on a contig with fewer than W + max(0, R − A) bases they are that much
    shorter. Variants that cannot be scored are listed with the reason: too near to a contig's end for two windows of one
    length, alleles that are not sequences, contigs missing from the reference, REF that differs from it, windows of which
    one alone has unknown bases.

    `window` is W (default: the training length), rounded down to whole k-mers. With strands "both" a log-likelihood is the
    mean over a window and its reverse complement.
    """

    name = "variants"
    summary = "log-likelihood ratio of alternative to reference allele for every variant of a VCF or table"
    scores = (Score("llr_nats"),)
    settings_class = VariantSettings
    default_window = 1

    @property
    def source_name(self) -> str:
        return f"{self.settings.variants} on {self.settings.fasta}"

    def identity(self, model: ZooModel) -> dict[str, Any]:
        reference, digest = self.genome().fingerprint, self.variants_digest()
        return {"reference": reference, "variants": digest} | super().identity(model)

    def genome(self) -> Genome:
        if self.settings.variants is None:
            raise ValueError("variants needs a VCF or table of variants: name one with --variants")
        return super().genome()

    def variants_digest(self) -> str:
        """A hash of the file of variants."""
        if not Path(self.settings.variants).is_file():
            next(read_variants(self.settings.variants))  # raises
        return file_sha256(self.settings.variants)[:16]

    def cells(self, model: ZooModel) -> list[Cell]:
        self.genome()  # raises where a file is missing
        step, window = step_of(load_tokenizer(model.config.tokenizer)), self.window(model)
        reference = find_source(self.settings.fasta)
        placed = _placed(self.settings.variants, reference, self.variants_digest(), window, step)
        size = max(LEAST_PART, math.ceil(len(placed) / MOST_PARTS))
        parts = {n: placed[n : n + size] for n in range(0, len(placed), size)}
        return [Cell(f"variants={n}", 2 * sum(one.size for one in part), {"placed": part}) for n, part in parts.items()]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        genome, placed, batch_tokens = self.genome(), cell.data["placed"], self.settings.batch_tokens
        strands = strands_of(model, self.settings)
        nats = np.full((len(placed), 2), math.nan)
        counted = np.zeros((len(placed), 2), np.int64)
        for size in sorted({one.size for one in placed if not one.reason}):
            mine = [n for n, one in enumerate(placed) if one.size == size and not one.reason]
            for at in range(0, len(mine), count := max(1, batch_tokens // (2 * size))):
                part = mine[at : at + count]
                pairs = np.concatenate([allele_windows(genome, placed[n]) for n in part])
                scores = score_windows(model, pairs, strands=strands, batch_tokens=batch_tokens)
                nats[part], counted[part] = scores.nats.view(-1, 2).numpy(), scores.counted.view(-1, 2).numpy()
        return {"rows": [_row(*values) for values in zip(placed, nats.tolist(), counted.tolist(), strict=True)]}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        return [row for cell in cells.values() for row in cell["rows"]]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Histograms of the ratio, by kind of variant, and of transitions beside transversions; a row of panels a model."""
        figure, axes = panels(len(results), 2, width=5.2, height=2.9)
        for result, name, left, right in zip(results, short_names(results), axes[::2], axes[1::2], strict=True):
            rows = [row for row in result.rows if not row["reason"]]
            kinds = {kind: [row["llr_nats"] for row in rows if row["kind"] == kind] for kind in KINDS}
            changes: dict[str, list[float]] = {"transitions": [], "transversions": []}
            for row in rows:
                if row["kind"] == "snv":
                    change = "transitions" if (row["ref"], row["alt"]) in TRANSITIONS else "transversions"
                    changes[change].append(row["llr_nats"])
            _histograms(left, kinds, list(KINDS.values()))
            _histograms(right, changes, ["#0072B2", "#D55E00"])
            left.set_title(f"{name}: by kind", fontsize=9)
            right.set_title("single bases", fontsize=9)
            left.set_ylabel("variants")
        for axis in axes[-2:]:
            axis.set_xlabel("log p(alternative) − log p(reference), nats")
        save_figure(figure, path)

    def show(self, results: list[ModelResult], console: Any, count: int = 10) -> None:
        """Each model's least likely alternative alleles, and counts of what could not be scored."""
        for result, model in zip(results, short_names(results), strict=True):
            scored = sorted((row for row in result.rows if not row["reason"]), key=lambda row: row["llr_nats"])
            title = f"variants: {model}, {len(scored):,} scored; least likely alternatives"
            found = table(title, ["place", "id", "change", "kind"], ["log p(alt) − log p(ref), nats", "bits"])
            for row in scored[:count]:
                change = f"{_cut(row['ref'])}→{_cut(row['alt'])}"
                numbers = (f"{row[name]:+.3f}" for name in ("llr_nats", "llr_bits"))
                found.add_row(f"{row['chrom']}:{row['pos']}", row["id"], change, row["kind"], *numbers)
            console.print(found)
        reasons = Counter(row["reason"].split(":")[0] for row in results[0].rows if row["reason"])
        for reason, times in reasons.most_common():
            console.print(f"not scored: {times:,} with {reason}")


def place_windows(at: int, ref: int, alt: int, length: int, window: int, step: int = 1) -> tuple[int, int] | None:
    """(start, size) of both windows of a variant, as in `Variants`; None where there is no room.

    Args:
        at: first base of REF, from 0.  ref, alt: lengths of the alleles.  length: of the contig.
        window: most bases.  step: the size is a multiple of it.
    """
    longest, more = max(ref, alt), max(0, ref - alt)  # `more`: bases right of the window that fill the alternative one
    size = max(0, min(window, length - more)) // step * step
    start = max(0, min(at - (size - longest) // 2, length - more - size))
    return (start, size) if at >= start and at - start + longest <= size else None


def allele_windows(genome: Genome, placed: Placed) -> np.ndarray:
    """(2, size) codes: the reference window, then the alternative one."""
    variant, left = placed.variant, placed.variant.pos - 1 - placed.start
    more = max(0, len(variant.ref) - len(variant.alt))
    codes = genome.codes(variant.chrom, placed.start, placed.start + placed.size + more)
    alternative = np.concatenate([codes[:left], encode(variant.alt), codes[left + len(variant.ref) :]])
    return np.stack([codes[: placed.size], alternative[: placed.size]])


@lru_cache(maxsize=2)
def _placed(path: str, reference: DnaSource, digest: str, window: int, step: int) -> tuple[Placed, ...]:
    """Every variant of a file, placed. `digest`: the file's hash, so that a changed file is another one.

    Raises:
        ValueError: for no variants, or none that fits the reference, with the likely cause.
    """
    genome = open_genome(reference)
    placed = tuple(_place(genome, variant, path, window, step) for variant in read_variants(path))
    if not placed:
        raise ValueError(f"{path} has no variants")
    tried = [one for one in placed if not one.variant.reason or one.variant.pos == 0]
    failed = [one for one in tried if one.variant.pos == 0 or one.reason.startswith((NO_CONTIG, MISMATCH))]
    if tried and len(failed) == len(tried):
        first = next((one for one in failed if one.variant.pos), failed[0])
        raise ValueError(
            f"none of the {len(tried)} variants of {path} fits {reference.name}; the first has {first.reason}. "
            + _cause(genome, [one.variant for one in failed])
        )
    return placed


def _place(genome: Genome, variant: Variant, path: str, window: int, step: int) -> Placed:
    if variant.reason:
        return Placed(variant, reason=variant.reason)
    if variant.chrom not in genome:
        return Placed(variant, reason=f"{NO_CONTIG}: {path} line {variant.line}: {variant.chrom!r}")
    at, length = variant.pos - 1, genome[variant.chrom].length
    found = decode(genome.codes(variant.chrom, min(at, length), min(at + len(variant.ref), length)))
    if found != variant.ref:
        place = f"{path} line {variant.line}: REF is {variant.ref}, {variant.chrom}:{variant.pos} of the reference"
        return Placed(variant, reason=f"{MISMATCH}: {place} {f'has {found}' if found else f'lies beyond its {length}'}")
    start_size = place_windows(at, len(variant.ref), len(variant.alt), length, window, step)
    return Placed(variant, *start_size) if start_size else Placed(variant, reason=NO_ROOM)


def _cause(genome: Genome, variants: list[Variant]) -> str:
    """The likely cause when no variant fits."""
    strange = [variant.chrom for variant in variants if variant.chrom not in genome]
    names = [contig.name for contig in genome.contigs]
    if strange:
        name = strange[0]
        other = next((n for n in (f"chr{name}", name.removeprefix("chr")) if n in genome), None)
        hint = (
            f"The reference calls it {other!r}: rename one of the two. "
            if other
            else did_you_mean(name, names).capitalize()
        )
        return f"{hint}Contigs of the reference: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
    if sum(_matches(genome, variants)) > 0.9 * len(variants):
        return "They fit one base further right: are positions counted from 0? They must count from 1"
    return "Is the reference another assembly?"


def _matches(genome: Genome, variants: list[Variant]) -> Iterator[bool]:
    """Whether REF is in the reference at a position counted from 0."""
    for variant in variants:
        stop = variant.pos + len(variant.ref)
        inside = stop <= genome[variant.chrom].length
        yield inside and decode(genome.codes(variant.chrom, variant.pos, stop)) == variant.ref


def _row(placed: Placed, nats: list[float], counted: list[int]) -> dict[str, Any]:
    variant, reason = placed.variant, placed.reason
    if not reason and counted[0] != counted[1]:
        reason = UNEVEN
    if not reason and not counted[0]:
        reason = "no known base in its windows"
    llr, bits = (math.nan, math.nan) if reason else (nats[0] - nats[1], nats[0] / counted[0] / math.log(2))
    return {
        "chrom": variant.chrom,
        "pos": variant.pos,
        "id": variant.id,
        "ref": variant.ref,
        "alt": variant.alt,
        "kind": variant.kind,
        "llr_nats": llr,
        "llr_bits": llr / math.log(2),
        "ref_bits_per_base": bits,
        "window": placed.size,
        "reason": reason,
    }


def _histograms(axis: Any, groups: dict[str, list[float]], colors: Sequence[str]) -> None:
    """An outline for each group on common bins, each with a dash pattern and its median in the legend."""
    values = [value for group in groups.values() for value in group]
    axis.grid(alpha=0.25, linewidth=0.6)
    if not values:
        axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", color="0.35")
        return
    bins = bin_edges(values, max(8, min(60, round(math.sqrt(len(values)) * 2))))
    for (name, group), color, dash in zip(groups.items(), colors, ("-", "--", "-.", ":"), strict=False):
        if group:
            label = f"{name}, {len(group):,}: median {np.median(group):+.2f}"
            axis.hist(group, bins=bins, histtype="step", color=color, linestyle=dash, linewidth=1.8, label=label)
    axis.axvline(0.0, **REFERENCE)
    axis.set_ylim(top=axis.get_ylim()[1] * (1.1 + 0.1 * sum(map(bool, groups.values()))))  # room for the legend
    axis.legend(fontsize=7, frameon=False, loc="upper left")


def _cut(allele: str, most: int = 12) -> str:
    return allele if len(allele) <= most else f"{allele[: most - 1]}…"
