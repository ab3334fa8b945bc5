"""The variants of a VCF or BCF, each in one form.

A record with several alternative alleles becomes a `Variant` for each. Alleles that are not two
sequences (symbolic alleles, breakends, missing alleles) become a `Variant` with a reason, so that
no record disappears.

One haplotype has many spellings: an insertion or deletion in a repeat can stand anywhere in it, and
alleles may carry bases that do not change. Here a variant is trimmed and left-aligned (A. Tan, G.
R. Abecasis, H. M. Kang, "Unified representation of genetic variants", Bioinformatics 31, 2015), and
everything that is computed follows from that form alone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modalities.dna.genome import Genome
from modalities.dna.tokenizers import decode, encode
from zoo.errors import require
from zoo.files import near_file


@dataclass(frozen=True, slots=True)
class Variant:
    """One alternative allele, at a position from 1.

    place: such as "record 3".
    reason: why it cannot be scored, or "".
    """

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str
    place: str
    reason: str = ""


def read_variants(path: str | Path) -> Iterator[Variant]:
    """Every alternative allele of a VCF or BCF.

    FileNotFoundError for a missing file; ValueError with file, place and reason for another format
    and for a file that is malformed or truncated; ImportError without pysam.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no file of variants {str(path)!r}; {near_file(path)}expected a VCF or BCF"
        )
    require("pysam", str(path), "dna")
    import pysam

    place = "the header"
    # htslib says nothing on standard error meanwhile.
    verbosity = pysam.set_verbosity(0)
    try:
        with pysam.VariantFile(str(path)) as file:
            for number in itertools.count(1):
                place = f"record {number}"
                record = next(file, None)
                if record is None:
                    return
                # Raises for bytes that are no text.
                str(record)
                ref = (record.ref or "").upper()
                chrom = sys.intern(record.chrom)
                for alt in record.alts or (".",):
                    # The others are symbolic, and breakends name contigs.
                    if alt.isalpha():
                        alt = alt.upper()
                    reason = _unscorable(record.pos, ref, alt)
                    yield Variant(chrom, record.pos, record.id or ".", ref, alt, place, reason)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        reason = (
            "truncated, damaged or malformed VCF or BCF, or compressed with gzip and not with bgzip"
        )
        raise ValueError(f"{path}, {place}: {reason} ({error})") from error
    finally:
        pysam.set_verbosity(verbosity)


def _unscorable(pos: int, ref: str, alt: str) -> str:
    """Why two alleles are not two sequences; "" where they are."""
    if pos == 0:
        return "position 0: positions count from 1"
    if not alt.isalpha():
        return f"a symbolic allele: {alt or 'none'}"
    # A common base may be an N before a deletion.
    _, old, new = _trimmed(ref, alt)
    if not ref or set(old + new) - set("ACGT"):
        return f"alleles that are not all A, C, G, T: {ref or 'none'}, {alt}"
    return "ALT equal to REF" if ref == alt else ""


@dataclass(frozen=True, slots=True)
class Change:
    """`ref` at `start` (from 0) of a contig becomes `alt`; trimmed, so either may be empty, and as
    far left as it goes. shift: bases by which it may move to the right without another
    haplotype."""

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


def _trimmed(ref: str, alt: str) -> tuple[int, str, str]:
    """Bases cut off on the left, and two alleles without the ends that they share; the right one is
    cut first."""
    cut = _common(ref[::-1], alt[::-1])
    ref = ref[: len(ref) - cut]
    alt = alt[: len(alt) - cut]
    cut = _common(ref, alt)
    return cut, ref[cut:], alt[cut:]


def normalize(genome: Genome, chrom: str, start: int, ref: str, alt: str) -> Change:
    """The change that REF → ALT at base `start` (from 0) makes, equal for every spelling of a
    haplotype: common ends are cut off, and an insertion or deletion moves left while the base
    before it equals its last one."""
    cut, ref, alt = _trimmed(ref, alt)
    start += cut
    if ref and alt:
        return Change(chrom, start, ref, alt)
    length = genome[chrom].length
    unit = encode(ref or alt)
    stop = start + len(ref)

    def leftward(size: int) -> np.ndarray:
        return genome.codes(chrom, max(0, start - size), start)[::-1]

    def rightward(size: int) -> np.ndarray:
        return genome.codes(chrom, stop, min(length, stop + size))

    left = _repeated(unit[::-1], leftward)
    right = _repeated(unit, rightward)
    # A unit that moves over part of itself begins at another of its bases.
    moved = decode(np.roll(unit, left % len(unit)))
    if ref:
        return Change(chrom, start - left, moved, "", left + right)
    return Change(chrom, start - left, "", moved, left + right)


def _common(one: str, other: str) -> int:
    """Letters that two strings begin with alike."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))


def _repeated(unit: np.ndarray, outward: Callable[[int], np.ndarray]) -> int:
    """For how many bases the sequence behind `unit` goes on with period len(unit).

    outward: size → so many of its bases, or all up to the contig's end.
    """
    size = 64
    while True:
        codes = outward(size)
        # Each base is compared with that one unit before it.
        period_before = np.concatenate([unit, codes])[: len(codes)]
        differ = np.flatnonzero(codes != period_before)
        if len(differ):
            return int(differ[0])
        if len(codes) < size:
            return len(codes)
        size *= 4
