"""What a model thinks of variants: log p(alternative) − log p(reference) in windows of equal length."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from modalities.dna.bases import decode, encode
from modalities.dna.genome import Genome, open_genome
from modalities.dna.likelihood import strands_of
from modalities.dna.records import read_at_once, reading, step_of
from modalities.dna.scoring import score_windows
from modalities.dna.settings import DnaEvaluator, DnaSettings
from modalities.dna.tokenizers import load_tokenizer
from modalities.dna.vcf import Variant, read_variants
from modalities.evaluation import Cell, CellValue, Listing, ModelResult
from zoo.naming import did_you_mean

LEAST_PART, MOST_PARTS = 256, 64  # variants in a cell, cells of a file
NO_CONTIG = "a contig that the reference has not"
MISMATCH = "another base in the reference"
NO_ROOM = "no room for windows of equal length"
UNEVEN = "unknown bases in one window alone"


@dataclass(frozen=True, slots=True)
class Placed:
    """A variant and its windows: ``size`` bases from ``start`` on; or the reason why there are none."""

    variant: Variant
    start: int = 0
    size: int = 0
    reason: str = ""


class Variants(DnaEvaluator, Listing):
    """Log-likelihood ratio of every variant, log p(alt window) − log p(ref window): below 0 the model prefers the reference.

    Both windows have the same length, begin at the same base of the reference, and end where their own flank does: with
    ``at`` the first base of REF (from 0), R and A the lengths of REF and ALT, and M the greater of them, the window of
    W bases begins at ``at`` − ⌊(W − M) / 2⌋. The reference window is the reference's next W bases; the alternative one is
    the same with ALT in the place of REF, filled up on the right from the reference where ALT is shorter, and cut on the
    right where it is longer. At a contig's edges windows are moved inwards, and on a contig with fewer than
    W + max(0, R − A) bases they are that much shorter. A variant so near to a contig's end that
    no two windows of one length hold both alleles is listed with its reason, as is whatever else cannot be scored: alleles
    that are no sequences, contigs that the reference has not, REF that is not what stands there, windows of which only one
    holds unknown bases.

    ``window`` is W (default: the training length), rounded down to whole k-mers. With strands "both" a log-likelihood is the
    mean over a window and its reverse complement.
    """

    name = "variants"
    summary = "log-likelihood ratio of alternative to reference allele for every variant of a VCF or table"
    headline = ("llr_nats",)

    def source_name(self, settings: DnaSettings) -> str:
        return f"{settings.variants} on {settings.fasta}"

    def identity(self, model: nn.Module, settings: DnaSettings) -> dict[str, Any]:
        genome, digest = _opened(settings)
        window = read_at_once(model, settings.window, 1, even=False)
        return {"reference": genome.fingerprint, "variants": digest} | reading(model, settings, window)

    def cells(self, model: nn.Module, settings: DnaSettings) -> list[Cell]:
        if settings.samples is not None:
            raise ValueError(f"{self.name} reads every variant of its file; samples ({settings.samples}) do not apply")
        window = read_at_once(model, settings.window, 1, even=False)
        step = step_of(load_tokenizer(model.config.tokenizer))
        placed = _placed(settings.variants, settings.fasta, _opened(settings)[1], window, step)
        size = max(LEAST_PART, math.ceil(len(placed) / MOST_PARTS))
        return [
            Cell(
                f"variants={n}",
                cost=2 * sum(one.size for one in placed[n : n + size]),
                data={"placed": placed[n : n + size]},
            )
            for n in range(0, len(placed), size)
        ]

    def measure(self, model: nn.Module, cell: Cell, settings: DnaSettings) -> CellValue:
        genome, placed = open_genome(settings.fasta), cell.data["placed"]
        nats = np.full((len(placed), 2), math.nan)
        counted = np.zeros((len(placed), 2), np.int64)
        for size in sorted({one.size for one in placed if not one.reason}):
            mine = [n for n, one in enumerate(placed) if one.size == size and not one.reason]
            for at in range(0, len(mine), count := max(1, settings.batch_tokens // (2 * size))):
                part = mine[at : at + count]
                pairs = np.concatenate([allele_windows(genome, placed[n]) for n in part])
                scores = score_windows(
                    model, pairs, strands=strands_of(model, settings), batch_tokens=settings.batch_tokens
                )
                nats[part], counted[part] = scores.nats.view(-1, 2).numpy(), scores.counted.view(-1, 2).numpy()
        return {"rows": [_row(*values) for values in zip(placed, nats.tolist(), counted.tolist(), strict=True)]}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        return [row for cell in cells.values() for row in cell["rows"]]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.dna.plots import variants_figure

        variants_figure(results, path)

    def show(self, results: list[ModelResult], console: Any) -> None:
        from modalities.dna.terminal import show_variants

        show_variants(results, console)


def place_windows(at: int, ref: int, alt: int, length: int, window: int, step: int = 1) -> tuple[int, int] | None:
    """(start, size) of both windows of a variant, as `Variants` says; None where there is no room.

    Args:
        at: first base of REF, from 0.  ref, alt: bases of the alleles.  length: of the contig.
        window: bases asked for.  step: the size is a multiple of it.
    """
    longest, more = max(ref, alt), max(0, ref - alt)  # `more` bases to the right of the window fill the alternative one
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


def _opened(settings: DnaSettings) -> tuple[Genome, str]:
    """The reference, and a hash of the file of variants."""
    if settings.fasta is None or settings.variants is None:
        missing = "--fasta" if settings.fasta is None else "--variants"
        raise ValueError(f"variants needs a reference (--fasta) and a VCF or table (--variants); {missing} is missing")
    if not Path(settings.variants).is_file():
        next(read_variants(settings.variants))  # says so
    with open(settings.variants, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return open_genome(settings.fasta), digest


@lru_cache(maxsize=2)
def _placed(path: str, fasta: str, digest: str, window: int, step: int) -> tuple[Placed, ...]:
    """Every variant of a file, placed. ``digest`` makes a changed file another one.

    Raises ValueError where there is none, or where not one of them fits the reference, with what may be the cause.
    """
    genome = open_genome(fasta)
    placed = tuple(_place(genome, variant, path, window, step) for variant in read_variants(path))
    if not placed:
        raise ValueError(f"{path} holds no variant")
    asked = [one for one in placed if not one.variant.reason or one.variant.pos == 0]
    failed = [one for one in asked if one.variant.pos == 0 or one.reason.startswith((NO_CONTIG, MISMATCH))]
    if asked and len(failed) == len(asked):
        first = next((one for one in failed if one.variant.pos), failed[0])
        raise ValueError(
            f"not one of the {len(asked)} variants of {path} fits {fasta}; the first has {first.reason}. "
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
    """What a person should look at when nothing fits."""
    strange = [variant.chrom for variant in variants if variant.chrom not in genome]
    names = [contig.name for contig in genome.contigs]
    if strange:
        name = strange[0]
        other = next((n for n in (f"chr{name}", name.removeprefix("chr")) if n in genome), None)
        hint = (
            f"The reference calls it {other!r}: rename one of them. "
            if other
            else did_you_mean(name, names).capitalize()
        )
        return f"{hint}Contigs of the reference: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
    if sum(_matches(genome, variants)) > 0.9 * len(variants):
        return "They fit one base further right: are the positions counted from 0? Here they count from 1"
    return "Is the reference another assembly?"


def _matches(genome: Genome, variants: list[Variant]) -> Iterator[bool]:
    """Whether REF stands where a position counted from 0 would have it."""
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
