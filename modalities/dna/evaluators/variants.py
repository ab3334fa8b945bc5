"""Log-likelihood ratios of variants: log p(alternative) − log p(reference) of windows that share both of their ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from modalities.dna.evaluation import FileEvaluator, FileSettings, print_table, strands_of
from modalities.dna.genome import Genome
from modalities.dna.tokenizers import decode, load_tokenizer
from modalities.dna.variants import Placed, Variant, effect, normalize, place, read_variants, score_haplotypes
from modalities.evaluation import Cell, CellValue, ModelResult, Score, option
from modalities.results import Row, short_names
from zoo.errors import did_you_mean
from zoo.files import file_sha256
from zoo.model import ZooModel

if TYPE_CHECKING:
    from rich.console import Console

LEAST_PART, MOST_PARTS = 256, 64  # variants in a cell, cells of a file
SHOWN = 10  # variants on the terminal
NO_CONTIG = "a contig that is not in the reference"
MISMATCH = "another base in the reference"
NO_ROOM = "no room in its windows"
UNSCORED = {"llr_nats": math.nan, "llr_bits": math.nan, "flank_llr_nats": math.nan, "window": 0, "flank": 0}


@dataclass(frozen=True)
class VariantSettings(FileSettings):
    """A reference, and its variants."""

    variants: str | None = option(None, "VCF or BCF")


class Variants(FileEvaluator[VariantSettings]):
    """Log-likelihood ratio of every variant, log p(alt window) − log p(ref window): below 0 the model prefers the reference.

    A variant is trimmed and left-aligned first, so every spelling of a haplotype has the same numbers. Both windows begin at
    one base of the reference and end at another (`modalities.dna.variants.place`): an insertion makes the alternative window
    longer, a deletion makes it shorter. So an indel's `llr_nats` has what its bases cost or save, about ln 4 each;
    `flank_llr_nats` is of the bases that both windows have, and compares like with like. With strands "one" that is what
    stands behind the alleles; with "both", a mean over a window and its reverse complement, what stands on either side.

    Variants that cannot be scored are listed with the reason: alleles, with all the bases that their repeat could move them
    over, longer than a window; alleles that are not sequences; contigs missing from the reference; REF that differs from it;
    windows in which other bases count, as where one of them has an unknown base, or, of k-mers, is no whole number of them.

    The column `pos` is VCF's POS, from 1. `window` is the length of the longer window (default: the training length), rounded
    down to whole k-mers.
    """

    name = "variants"
    version = 5  # 4 had other columns
    summary = "log-likelihood ratio of alternative to reference allele for every variant of a VCF or BCF"
    scores = (Score("llr_nats"),)
    default_window = 1

    @property
    def source_name(self) -> str:
        return f"{self.settings.variants} on {self.settings.fasta}"

    def identity(self, model: ZooModel) -> Row:
        digest = self.variants_digest()
        return {"reference": self.genome().fingerprint, "variants": digest} | super().identity(model)

    @property
    def path(self) -> str:
        """Of the file of variants."""
        if self.settings.variants is None:
            raise ValueError("variants needs a VCF or BCF: name one with --variants")
        return self.settings.variants

    def variants_digest(self) -> str:
        """A hash of the file of variants."""
        if not Path(self.path).is_file():
            next(read_variants(self.path))  # raises
        return file_sha256(self.path)[:16]

    def cells(self, model: ZooModel) -> list[Cell]:
        digest, genome, window = self.variants_digest(), self.genome(), self.window(model)
        entries = _entries(self.path, genome, digest, window, load_tokenizer(model.config.tokenizer).step)
        size = max(LEAST_PART, math.ceil(len(entries) / MOST_PARTS))
        parts = {n: entries[n : n + size] for n in range(0, len(entries), size)}
        costs = {n: sum(sum(placed.sizes) for _, placed in part if placed) for n, part in parts.items()}
        return [Cell(f"variants={n}", costs[n], {"entries": part}) for n, part in parts.items()]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        entries, strands = cell.data["entries"], strands_of(model, self.settings)
        placed = [where for _, where in entries if where]
        tokens = self.settings.batch_tokens
        costs = iter(score_haplotypes(model, self.genome(), placed, strands=strands, batch_tokens=tokens))
        rows = []
        for variant, where in entries:
            row = {name: getattr(variant, name) for name in ("chrom", "pos", "id", "ref", "alt")}
            row["kind"] = where.change.kind if where else ""
            numbers = effect(where, next(costs), both=strands == "both") if where else UNSCORED
            rows.append(row | {"reason": variant.reason} | numbers)
        return {"rows": rows}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        return [row for cell in cells.values() for row in cell["rows"]]

    def measured(self, results: list[ModelResult]) -> str:
        rows = results[0].rows
        reasons = Counter(row["reason"].split(":")[0] for row in rows if row["reason"])
        left_out = "".join(f"; not scored: {count:,} with {reason}" for reason, count in reasons.most_common())
        return f"variants: {len(rows) - reasons.total():,} of {len(rows):,} alleles of {self.source_name}{left_out}"

    def show(self, results: list[ModelResult], console: Console) -> None:
        """Each model's least likely alternative alleles."""
        for result, model in zip(results, short_names(results), strict=True):
            scored = sorted((row for row in result.rows if not row["reason"]), key=lambda row: row["llr_nats"])
            rows = []
            for row in scored[:SHOWN]:
                ref, alt = (text if len(text) <= 12 else f"{text[:11]}…" for text in (row["ref"], row["alt"]))
                ratios = (f"{row[name]:+.3f}" for name in ("llr_nats", "llr_bits"))
                rows.append([f"{row['chrom']}:{row['pos']}", row["id"], f"{ref}→{alt}", row["kind"], *ratios])
            title = f"variants: {model}; least likely alternatives"
            columns = ["log p(alt) − log p(ref), nats", "bits"]
            print_table(console, title, ["place", "id", "change", "kind"], columns, rows)


Entry = tuple[Variant, Placed | None]  # with a reason where it has no place


@lru_cache(maxsize=2)
def _entries(path: str, genome: Genome, digest: str, window: int, step: int) -> tuple[Entry, ...]:
    """Every variant of a file, placed. `digest`: the file's hash, so that a changed file is another one. ValueError for no
    variants, or none that fits the reference."""
    entries = tuple(_placed(genome, variant, window, step) for variant in read_variants(path))
    if not entries:
        raise ValueError(f"{path} has no variants")
    other = [variant for variant, _ in entries if variant.reason.startswith((NO_CONTIG, MISMATCH))]
    if other and not any(placed or variant.reason.startswith(NO_ROOM) for variant, placed in entries):
        names = [contig.name for contig in genome.contigs]
        raise ValueError(
            f"none of the {len(other)} variants of {path} fits {genome.files[0]}; the first has {other[0].reason}. "
            f"{did_you_mean(other[0].chrom, names)}contigs of the reference: {', '.join(names[:5])}; positions "
            "count from 1"
        )
    return entries


def _placed(genome: Genome, variant: Variant, window: int, step: int) -> Entry:
    if variant.reason:
        return variant, None
    if variant.chrom not in genome:
        return replace(variant, reason=f"{NO_CONTIG}: {variant.place}: {variant.chrom!r}"), None
    at, length = variant.pos - 1, genome[variant.chrom].length
    bases = decode(genome.codes(variant.chrom, min(at, length), min(at + len(variant.ref), length)))
    if bases != variant.ref:
        there = f"has {bases}" if bases else f"lies beyond its {length}"
        where = f"{variant.place}: REF is {variant.ref}, {variant.chrom}:{variant.pos} of the reference {there}"
        return replace(variant, reason=f"{MISMATCH}: {where}"), None
    change = normalize(genome, variant.chrom, at, variant.ref, variant.alt)
    placed = place(change, length, window, step)
    if isinstance(placed, Placed):
        return variant, placed
    alleles = f"the alleles, wherever their repeat can move them, span {change.longest:,} bases"
    sizes = f"the longer window has {placed:,}, the other {max(0, placed - abs(change.growth)):,}"
    return replace(variant, reason=f"{NO_ROOM}: {alleles}; {sizes}"), None
