"""Log-likelihood ratios of variants: log p(alternative) − log p(reference) of windows that share both of their ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from modalities.dna.alleles import Placed, effect, normalize, place, room, score_haplotypes, vcf_form
from modalities.dna.bases import decode
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
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.tokenizers import load_tokenizer
from modalities.dna.vcf import InfoField, Variant, annotated_suffix, check_annotation, read_variants, write_annotated
from modalities.evaluation import Cell, CellValue, ModelResult, Score, option
from modalities.figures import panels
from modalities.files import file_safe
from modalities.results import short_names
from zoo.files import file_sha256
from zoo.model import ZooModel
from zoo.naming import did_you_mean
from zoo.prior_plot import save_figure

__all__ = ["VariantSettings", "Variants"]

LEAST_PART, MOST_PARTS = 256, 64  # variants in a cell, cells of a file
NO_CONTIG = "a contig that is not in the reference"
MISMATCH = "another base in the reference"
NO_ROOM = "no room in its windows"
KINDS = {"snv": "#0072B2", "mnv": "#009E73", "insertion": "#E69F00", "deletion": "#D55E00"}


@dataclass(frozen=True)
class VariantSettings(FileSettings):
    """A reference, and its variants."""

    variants: str | None = option(None, "VCF or BCF, or a table of chrom, pos, ref, alt")
    info: str | None = option(
        None, "also write the records as VCF, with INFO fields of this name and with _FLANK behind it, such as LLR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.info is not None:
            self.fields("")  # raises for a name that VCF cannot have

    def fields(self, model: str) -> dict[str, InfoField]:
        """INFO fields by columns of rows; none without `info`."""
        if self.info is None:
            return {}
        about = "log p(alternative) - log p(reference), nats, both windows between the same two bases"
        return {
            "llr_nats": InfoField(self.info, f"{about}; {model}"),
            "flank_llr_nats": InfoField(f"{self.info}_FLANK", f"{about}, of the bases of their flanks alone; {model}"),
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """A variant, and where its windows are or why there are none."""

    variant: Variant
    placed: Placed | None = None
    reason: str = ""


class Variants(FileEvaluator[VariantSettings]):
    """Log-likelihood ratio of every variant, log p(alt window) − log p(ref window): below 0 the model prefers the reference.

    A variant is trimmed and left-aligned first, so every spelling of a haplotype has the same numbers. Both windows begin at
    one base of the reference and end at another (`modalities.dna.alleles.place`): an insertion makes the alternative window
    longer, a deletion makes it shorter. So an indel's `llr_nats` has what its bases cost or save, about ln 4 each;
    `flank_llr_nats` is of the bases that both windows have, and compares like with like. With strands "one" that is what
    stands behind the alleles; with "both", a mean over a window and its reverse complement, what stands on either side.

    Variants that cannot be scored are listed with the reason: alleles, with all the bases that their repeat could move them
    over, longer than a window; alleles that are not sequences; contigs missing from the reference; REF that differs from it;
    windows in which other unknown bases count.

    `window` is the length of the longer window (default: the training length), rounded down to whole k-mers. Bases behind the
    last whole k-mer count as `score_windows` says under `rest`. `info` names fields that the records get in
    variants.MODEL.vcf, or .vcf.gz where the file is compressed.
    """

    name = "variants"
    # 3 gave no score to spellings with an N that does not change, and failed where no base of a window was left.
    version = 4
    summary = "log-likelihood ratio of alternative to reference allele for every variant of a VCF, BCF or table"
    scores = (Score("llr_nats"),)
    default_window = 1

    @property
    def source_name(self) -> str:
        return f"{self.settings.variants} on {self.settings.fasta}"

    def identity(self, model: ZooModel) -> dict[str, Any]:
        reference, digest = self.genome().fingerprint, self.variants_digest()
        return {"reference": reference, "variants": digest} | super().identity(model)

    def genome(self) -> Genome:
        self.path()  # raises
        return super().genome()

    def path(self) -> str:
        """Of the file of variants."""
        if self.settings.variants is None:
            raise ValueError("variants needs a VCF or table of variants: name one with --variants")
        return self.settings.variants

    def variants_digest(self) -> str:
        """A hash of the file of variants."""
        if not Path(self.path()).is_file():
            next(read_variants(self.path()))  # raises
        return file_sha256(self.path())[:16]

    def cells(self, model: ZooModel) -> list[Cell]:
        self.genome()  # raises where a file is missing
        step, window = step_of(load_tokenizer(model.config.tokenizer)), self.window(model)
        reference, digest = find_source(cast(str, self.settings.fasta)), self.variants_digest()
        if self.settings.info is not None:
            check_annotation(self.path(), list(self.settings.fields("").values()))
        entries = _entries(self.path(), reference, digest, window, step)
        size = max(LEAST_PART, math.ceil(len(entries) / MOST_PARTS))
        parts = {n: entries[n : n + size] for n in range(0, len(entries), size)}
        costs = {n: sum(sum(one.placed.sizes) for one in part if one.placed) for n, part in parts.items()}
        return [Cell(f"variants={n}", costs[n], {"entries": part}) for n, part in parts.items()]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        genome, entries = self.genome(), cell.data["entries"]
        options = {"strands": strands_of(model, self.settings), "batch_tokens": self.settings.batch_tokens}
        placed = [one.placed for one in entries if one.placed]
        scores = iter(score_haplotypes(model, genome, placed, advance=self.advance, **options))
        return {"rows": [_row(genome, one, next(scores) if one.placed else None) for one in entries]}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        return [row for cell in cells.values() for row in cell["rows"]]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Histograms of the ratio by kind of variant, a panel a model."""
        figure, axes = panels(len(results), 1, width=7.2, height=2.9)
        for result, name, axis in zip(results, short_names(results), axes, strict=True):
            rows = [row for row in result.rows if not row["reason"]]
            values = [row["llr_nats"] for row in rows]
            bins = bin_edges(values, max(8, min(60, round(math.sqrt(len(values)) * 2)))).tolist() if values else 1
            for (kind, color), dash in zip(KINDS.items(), ("-", "--", "-.", ":"), strict=True):
                if group := [row["llr_nats"] for row in rows if row["kind"] == kind]:
                    label = f"{kind}, {len(group):,}: median {np.median(group):+.2f}"
                    axis.hist(
                        group, bins=bins, histtype="step", color=color, linestyle=dash, linewidth=1.8, label=label
                    )
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.axvline(0.0, **REFERENCE)
            axis.set_title(name, fontsize=9)
            axis.set_ylabel("variants")
            if values:
                axis.legend(fontsize=7, frameon=False, loc="upper left")
        axes[-1].set_xlabel("log p(alternative) − log p(reference), nats")
        save_figure(figure, path)

    def write(self, results: list[ModelResult], out: Path) -> None:
        """The tables, and with `info` the file of variants with INFO fields, one for each model."""
        super().write(results, out)
        for result in results if self.settings.info is not None else ():
            path = out / f"{self.name}.{file_safe(result.label)}{annotated_suffix(self.path())}"
            write_annotated(self.path(), path, self.settings.fields(result.label), result.rows)

    def show(self, results: list[ModelResult], console: Any, count: int = 10) -> None:
        """Each model's least likely alternative alleles, and counts of what could not be scored."""
        for result, model in zip(results, short_names(results), strict=True):
            scored = sorted((row for row in result.rows if not row["reason"]), key=lambda row: row["llr_nats"])
            title = f"variants: {model}, {len(scored):,} scored; least likely alternatives"
            found = table(title, ["place", "id", "change", "kind"], ["log p(alt) − log p(ref), nats", "bits"])
            for row in scored[:count]:
                change = f"{shorten(row['ref'])}→{shorten(row['alt'])}"
                numbers = (f"{row[name]:+.3f}" for name in ("llr_nats", "llr_bits"))
                found.add_row(f"{row['chrom']}:{row['pos']}", row["id"], change, row["kind"], *numbers)
            console.print(found)
        reasons = Counter(row["reason"].split(":")[0] for row in results[0].rows if row["reason"])
        for reason, times in reasons.most_common():
            console.print(f"not scored: {times:,} with {reason}")


@lru_cache(maxsize=2)
def _entries(path: str, reference: DnaSource, digest: str, window: int, step: int) -> tuple[Entry, ...]:
    """Every variant of a file, placed. `digest`: the file's hash, so that a changed file is another one.

    Raises:
        ValueError: for no variants, or none that fits the reference.
    """
    genome = open_genome(reference)
    entries = tuple(_entry(genome, variant, path, window, step) for variant in read_variants(path))
    if not entries:
        raise ValueError(f"{path} has no variants")
    tried = [one for one in entries if not one.variant.reason]
    if tried and all(one.reason.startswith((NO_CONTIG, MISMATCH)) for one in tried):
        names = [contig.name for contig in genome.contigs]
        raise ValueError(
            f"none of the {len(tried)} variants of {path} fits {reference.name}; the first has {tried[0].reason}. "
            f"{did_you_mean(tried[0].variant.chrom, names)}contigs of the reference: {', '.join(names[:5])}; positions "
            "count from 1"
        )
    return entries


def _entry(genome: Genome, variant: Variant, path: str, window: int, step: int) -> Entry:
    if variant.reason:
        return Entry(variant, reason=variant.reason)
    if variant.chrom not in genome:
        return Entry(variant, reason=f"{NO_CONTIG}: {path} {variant.place}: {variant.chrom!r}")
    at, length = variant.pos - 1, genome[variant.chrom].length
    found = decode(genome.codes(variant.chrom, min(at, length), min(at + len(variant.ref), length)))
    if found != variant.ref:
        where = f"{path} {variant.place}: REF is {variant.ref}, {variant.chrom}:{variant.pos} of the reference"
        return Entry(variant, reason=f"{MISMATCH}: {where} {f'has {found}' if found else f'lies beyond its {length}'}")
    change = normalize(genome, variant.chrom, at, variant.ref, variant.alt)
    placed = place(change, length, window, step)
    if placed:
        return Entry(variant, placed)
    longer = room(change, length, window, step)
    return Entry(
        variant,
        reason=f"{NO_ROOM}: the alleles, wherever their repeat can move them, span {change.longest:,} bases; the longer window "
        f"has {longer:,}, the other {max(0, longer - abs(change.growth)):,}",
    )


def _row(genome: Genome, entry: Entry, scores: Any) -> dict[str, Any]:
    """norm_pos, norm_ref, norm_alt: the variant as `bcftools norm` writes it; empty where it has no windows."""
    variant, change = entry.variant, entry.placed.change if entry.placed else None
    norm = vcf_form(genome, change) if change else ("", "", "")
    return {
        "chrom": variant.chrom,
        "pos": variant.pos,
        "id": variant.id,
        "ref": variant.ref,
        "alt": variant.alt,
        "kind": change.kind if change else "",
        **dict(zip(("norm_pos", "norm_ref", "norm_alt"), norm, strict=True)),
        **effect(entry.placed, scores, entry.reason),
    }


def shorten(allele: str, most: int = 12) -> str:
    return allele if len(allele) <= most else f"{allele[: most - 1]}…"
