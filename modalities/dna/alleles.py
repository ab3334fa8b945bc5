"""Alleles as haplotypes: what a variant changes, however it is written, and two windows that share both of their ends.

One haplotype has many spellings: an insertion or deletion in a repeat can stand anywhere in it, and alleles may carry bases
that do not change. Here a variant is trimmed and left-aligned (A. Tan, G. R. Abecasis, H. M. Kang, "Unified representation of
genetic variants", Bioinformatics 31, 2015), and everything that is computed follows from that form alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modalities.dna.bases import decode, encode
from modalities.dna.genome import Genome
from modalities.dna.scoring import BIT, score_windows
from zoo.slices import slices

__all__ = [
    "Change",
    "HaplotypeScores",
    "Placed",
    "effect",
    "haplotypes",
    "normalize",
    "place",
    "room",
    "score_haplotypes",
    "trimmed",
    "vcf_form",
]


@dataclass(frozen=True, slots=True)
class Change:
    """`ref` at `start` (from 0) of a contig becomes `alt`; trimmed, so either may be empty, and as far left as it goes.

    shift: bases by which it may move to the right without another haplotype; 0 where neither allele is empty.
    """

    chrom: str
    start: int
    ref: str
    alt: str
    shift: int = 0

    @property
    def stop(self) -> int:
        """Behind the last base of the reference that any spelling changes."""
        return self.start + len(self.ref) + self.shift

    @property
    def longest(self) -> int:
        """Bases between the flanks, in the longer one of the haplotypes."""
        return self.stop - self.start + max(0, self.growth)

    @property
    def growth(self) -> int:
        """Bases by which the alternative haplotype is longer; negative where it is shorter."""
        return len(self.alt) - len(self.ref)

    @property
    def kind(self) -> str:
        """snv, mnv (equal lengths above 1), insertion or deletion (by the lengths)."""
        if not self.growth:
            return "snv" if len(self.ref) == 1 else "mnv"
        return "insertion" if self.growth > 0 else "deletion"


def trimmed(ref: str, alt: str) -> tuple[int, str, str]:
    """Bases cut off on the left, and two alleles without the ends that they share; the right one is cut first."""
    cut = _common(ref[::-1], alt[::-1])
    ref, alt = ref[: len(ref) - cut], alt[: len(alt) - cut]
    cut = _common(ref, alt)
    return cut, ref[cut:], alt[cut:]


def normalize(genome: Genome, chrom: str, at: int, ref: str, alt: str) -> Change:
    """The change that REF → ALT at base `at` (from 0) makes: equal for every spelling of a haplotype.

    Common ends are cut off. An insertion or deletion that remains moves left while the base before it equals its last one.
    REF must be what the reference has there, and what is not common A, C, G and T; the alleles must differ.
    """
    cut, ref, alt = trimmed(ref, alt)
    at += cut
    if ref and alt:
        return Change(chrom, at, ref, alt)
    length, unit, stop = genome[chrom].length, encode(ref or alt), at + len(ref)
    left = _repeated(unit[::-1], lambda size: genome.codes(chrom, max(0, at - size), at)[::-1])
    right = _repeated(unit, lambda size: genome.codes(chrom, stop, min(length, stop + size)))
    unit_left = decode(np.roll(unit, left % len(unit)))
    return Change(chrom, at - left, unit_left if ref else "", "" if ref else unit_left, left + right)


def _common(one: str, other: str) -> int:
    """Letters that two strings begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _repeated(unit: np.ndarray, outward: Callable[[int], np.ndarray]) -> int:
    """For how many bases the sequence behind `unit` goes on with period len(unit). outward: size → so many of its bases, or
    all up to the contig's end."""
    size = 64
    while True:
        found = outward(size)
        differ = np.flatnonzero(found != np.concatenate([unit, found])[: len(found)])
        if len(differ) or len(found) < size:
            return int(differ[0]) if len(differ) else len(found)
        size *= 4


def vcf_form(genome: Genome, change: Change) -> tuple[int, str, str]:
    """(POS from 1, REF, ALT) as `bcftools norm` writes a change: no empty allele, but the base before it; at a contig's start
    the one behind it."""
    if change.ref and change.alt:
        return change.start + 1, change.ref, change.alt
    if change.start:
        anchor = decode(genome.codes(change.chrom, change.start - 1, change.start))
        return change.start, anchor + change.ref, anchor + change.alt
    stop = len(change.ref)
    anchor = decode(genome.codes(change.chrom, stop, min(stop + 1, genome[change.chrom].length)))
    return 1, change.ref + anchor, change.alt + anchor


@dataclass(frozen=True, slots=True)
class Placed:
    """A change, and bases [start, stop) of the reference, from which both windows are made."""

    change: Change
    start: int
    stop: int

    @property
    def left(self) -> int:
        """Bases of the left flank, which both windows share."""
        return self.change.start - self.start

    @property
    def right(self) -> int:
        return self.stop - self.change.stop

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the reference's window, and of the alternative one."""
        return self.stop - self.start, self.stop - self.start + self.change.growth


def room(change: Change, length: int, window: int, step: int = 1) -> int:
    """W, the bases of the longer window: `window`, or as many as a contig of `length` bases allows, rounded down to a multiple
    of `step`."""
    return min(window, length + max(0, change.growth)) // step * step


def place(change: Change, length: int, window: int, step: int = 1) -> Placed | None:
    """Where the windows of a change lie; None where `window` bases have no room for them, or the shorter one for no token.

    The longer window has W bases (`room`). With M = `change.longest` the left flank has ⌊(W − M) / 2⌋ bases and the right one
    the rest, whatever the spelling; at a contig's edges the windows move inwards. Where W − M is even, as for a substitution in
    an odd window, the flanks are equal and the windows of the reverse-complemented genome are the reverse complements of these;
    else theirs lie one base off.
    """
    size = room(change, length, window, step)
    if size < change.longest or size - abs(change.growth) < step:
        return None
    reference = size - max(0, change.growth)
    start = max(0, min(change.start - (size - change.longest) // 2, length - reference))
    return Placed(change, start, start + reference)


def haplotypes(genome: Genome, placed: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the reference's window and of the alternative one: both begin and end at the same bases of the reference."""
    change, codes = placed.change, genome.codes(placed.change.chrom, placed.start, placed.stop)
    return codes, np.concatenate([codes[: placed.left], encode(change.alt), codes[placed.left + len(change.ref) :]])


@dataclass(frozen=True, slots=True)
class HaplotypeScores:
    """Of a window: nats and bases that count, in all of it and in its two flanks, and those of the flanks that a strand reads
    after the allele (`behind`)."""

    nats: float
    counted: int
    flank_nats: float
    flank_counted: int
    behind: int


def score_haplotypes(
    model: Any, genome: Genome, placed: Sequence[Placed], **options: Any
) -> list[tuple[HaplotypeScores, HaplotypeScores]]:
    """Scores of the reference's window and of the alternative one, for each change. options: of `score_windows`.

    Windows that come several times, such as the reference's of all alleles at a site, are read once.
    """
    numbers: dict[tuple[bytes, int, int], int] = {}  # of a window and its flanks
    pairs = []
    for one in placed:
        keys = [(codes.tobytes(), one.left, one.right) for codes in haplotypes(genome, one)]
        pairs.append([numbers.setdefault(key, len(numbers)) for key in keys])
    different = list(numbers)
    found: dict[int, HaplotypeScores] = {}
    for length in sorted({len(codes) for codes, _, _ in different}):
        alike = [n for n, (codes, _, _) in enumerate(different) if len(codes) == length]
        for part in slices(len(alike), max(1, options["batch_tokens"] // length)):
            windows = np.stack([np.frombuffer(different[n][0], np.uint8) for n in alike[part]])
            scores = score_windows(model, windows, by_base=True, rest=True, **options)
            for n, nats, bases in zip(alike[part], scores.nll.numpy(), scores.bases.numpy(), strict=True):
                found[n] = _sums(nats, bases, *different[n][1:], both=options["strands"] == "both")
    return [(found[reference], found[alternative]) for reference, alternative in pairs]


def _sums(nats: np.ndarray, bases: np.ndarray, left: int, right: int, *, both: bool) -> HaplotypeScores:
    before, after = np.arange(left), np.arange(len(nats) - right, len(nats))
    flanks = np.concatenate([before, after])
    behind = int(bases[flanks if both else after].sum())
    return HaplotypeScores(
        float(nats.sum()), int(bases.sum()), float(nats[flanks].sum()), int(bases[flanks].sum()), behind
    )


UNEVEN = "unknown bases that do not count alike in the two windows"
NOTHING_KNOWN = "no known base in its windows"


def effect(
    placed: Placed | None, scores: tuple[HaplotypeScores, HaplotypeScores] | None, reason: str
) -> dict[str, Any]:
    """What rows say of a change: NaN where there are no scores, or where other bases count in the two windows.

    llr_nats, llr_bits: log p(alternative window) − log p(reference window).
    flank_llr_nats: the same of the bases of the flanks alone, which both windows have, whatever an indel adds or takes away;
    NaN where no base that counts is read after the alleles, as behind the last base of a contig on one strand.
    ref_bits_per_base, alt_bits_per_base: −log₂ p of a window over its bases.
    window, flank: bases of the longer window, and of both flanks together.
    """
    if scores is not None:
        reference, alternative = scores
        assert placed is not None
        grown = alternative.counted - reference.counted == placed.change.growth
        if not reference.counted or not alternative.counted:
            reason = NOTHING_KNOWN
        elif not grown or alternative.flank_counted != reference.flank_counted:
            reason = UNEVEN
    names = ("llr_nats", "llr_bits", "flank_llr_nats", "ref_bits_per_base", "alt_bits_per_base")
    values = dict.fromkeys(names, math.nan)
    if scores is not None and not reason:
        llr = reference.nats - alternative.nats
        bits = [one.nats / one.counted / BIT for one in scores]
        flank = reference.flank_nats - alternative.flank_nats if reference.behind else math.nan
        values = dict(zip(names, (llr, llr / BIT, flank, *bits), strict=True))
    sizes = {"window": max(placed.sizes), "flank": placed.left + placed.right} if placed else {"window": 0, "flank": 0}
    return values | sizes | {"reason": reason}
