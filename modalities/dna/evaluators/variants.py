"""Log-likelihood ratios of the variants of a VCF or BCF: log p(alternative) − log p(reference) of
windows that share both of their ends.

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
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modalities.dna.evaluation import FileEvaluator, FileSettings, strands_of
from modalities.dna.genome import Genome
from modalities.dna.scoring import BIT, score_windows
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from modalities.evaluation import Cell
from modalities.results import CellValue, ModelResult, Row, Score, short_names
from modalities.settings import option
from modalities.tables import print_table
from zoo.errors import did_you_mean, require
from zoo.files import file_sha256, near_file
from zoo.model import ZooModel
from zoo.positions import slices

if TYPE_CHECKING:
    from rich.console import Console

WindowCosts = tuple[np.ndarray, np.ndarray]  # of each base of a window: nats, and whether it counts
UNEVEN = (
    "bases that do not count alike in the two windows: unknown ones, or k-mers cut at their ends"
)
NOTHING_KNOWN = "no known base in its windows"
# variants in a cell, cells of a file
LEAST_PART = 256
MOST_PARTS = 64
SHOWN = 10  # variants on the terminal
NO_CONTIG = "a contig that is not in the reference"
MISMATCH = "another base in the reference"
NO_ROOM = "no room in its windows"
UNSCORED = {
    "llr_nats": math.nan,
    "llr_bits": math.nan,
    "flank_llr_nats": math.nan,
    "window": 0,
    "flank": 0,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One alternative allele, at a position from 1. place: "record 3". reason: why it cannot be
    scored, or ""."""

    chrom: str
    pos: int
    id: str
    ref: str
    alt: str
    place: str
    reason: str = ""


def read_variants(path: str | Path) -> Iterator[Variant]:
    """Every alternative allele of a VCF or BCF. FileNotFoundError for a missing file; ValueError
    with file, place and reason for another format and for a file that is malformed or truncated;
    ImportError without pysam."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no file of variants {str(path)!r}; {near_file(path)}expected a VCF or BCF"
        )
    require("pysam", str(path), "dna")
    import pysam

    # htslib says nothing on standard error meanwhile
    place = "the header"
    before = pysam.set_verbosity(0)
    try:
        with pysam.VariantFile(str(path)) as file:
            for number in itertools.count(1):
                place = f"record {number}"
                record = next(file, None)
                if record is None:
                    return
                str(record)  # raises for bytes that are no text
                ref = (record.ref or "").upper()
                chrom = sys.intern(record.chrom)
                for alt in record.alts or (".",):
                    alt = alt.upper() if alt.isalpha() else alt  # breakends name contigs
                    reason = _unscorable(record.pos, ref, alt)
                    yield Variant(chrom, record.pos, record.id or ".", ref, alt, place, reason)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        what = (
            "truncated, damaged or malformed VCF or BCF, or compressed with gzip and not with bgzip"
        )
        raise ValueError(f"{path}, {place}: {what} ({error})") from error
    finally:
        pysam.set_verbosity(before)


def _unscorable(pos: int, ref: str, alt: str) -> str:
    """Why two alleles are not two sequences; "" where they are."""
    if pos == 0:
        return "position 0: positions count from 1"
    if not alt.isalpha():
        return f"a symbolic allele: {alt or 'none'}"
    _, old, new = _trimmed(ref, alt)  # a common base may be an N before a deletion
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


def normalize(genome: Genome, chrom: str, at: int, ref: str, alt: str) -> Change:
    """The change that REF → ALT at base `at` (from 0) makes, equal for every spelling of a
    haplotype: common ends are cut off, and an insertion or deletion moves left while the base
    before it equals its last one."""
    cut, ref, alt = _trimmed(ref, alt)
    at += cut
    if ref and alt:
        return Change(chrom, at, ref, alt)
    length = genome[chrom].length
    unit = encode(ref or alt)
    stop = at + len(ref)
    left = _repeated(unit[::-1], lambda size: genome.codes(chrom, max(0, at - size), at)[::-1])
    right = _repeated(unit, lambda size: genome.codes(chrom, stop, min(length, stop + size)))
    unit_left = decode(np.roll(unit, left % len(unit)))
    return Change(
        chrom, at - left, unit_left if ref else "", "" if ref else unit_left, left + right
    )


def _common(one: str, other: str) -> int:
    """Letters that two strings begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _repeated(unit: np.ndarray, outward: Callable[[int], np.ndarray]) -> int:
    """For how many bases the sequence behind `unit` goes on with period len(unit). outward: size →
    so many of its bases, or all up to the contig's end."""
    size = 64
    while True:
        codes = outward(size)
        differ = np.flatnonzero(codes != np.concatenate([unit, codes])[: len(codes)])
        if len(differ) or len(codes) < size:
            return int(differ[0]) if len(differ) else len(codes)
        size *= 4


@dataclass(frozen=True, slots=True)
class Placed:
    """A change, and bases [start, stop) of the reference, from which both windows are made; they
    share the flanks, of `left` and `right` bases."""

    change: Change
    start: int
    stop: int

    @property
    def left(self) -> int:
        return self.change.start - self.start

    @property
    def right(self) -> int:
        return self.stop - self.change.stop

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the reference's window, and of the alternative one."""
        return self.stop - self.start, self.stop - self.start + self.change.growth


def place(change: Change, length: int, window: int, step: int = 1) -> Placed | int:
    """Where the windows of a change lie on a contig of `length` bases; the bases of the longer
    window, W (`window`, or what the contig allows, in whole `step`), where it has no room for the
    alleles, or the shorter one for no token. With M = `change.longest` the left flank has ⌊(W − M)
    / 2⌋ bases, the right one the rest; at a contig's edges windows move inwards.
    """
    size = min(window, length + max(0, change.growth)) // step * step
    if size < change.longest or size - abs(change.growth) < step:
        return size
    reference = size - max(0, change.growth)
    start = max(0, min(change.start - (size - change.longest) // 2, length - reference))
    return Placed(change, start, start + reference)


def haplotypes(genome: Genome, placed: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the reference's window and of the alternative one: both begin and end at the same
    bases of the reference."""
    change = placed.change
    codes = genome.codes(placed.change.chrom, placed.start, placed.stop)
    return codes, np.concatenate(
        [codes[: placed.left], encode(change.alt), codes[placed.left + len(change.ref) :]]
    )


def score_haplotypes(
    model: ZooModel, genome: Genome, placed: Sequence[Placed], *, strands: str, batch_tokens: int
) -> list[tuple[WindowCosts, WindowCosts]]:
    """Costs of the reference's window and of the alternative one, for each change. Equal windows,
    such as the reference's of all alleles at a site, are read once."""
    pairs = [tuple(codes.tobytes() for codes in haplotypes(genome, one)) for one in placed]
    windows = list(dict.fromkeys(window for pair in pairs for window in pair))
    costs: dict[bytes, WindowCosts] = {}
    for length in sorted({len(window) for window in windows}):
        alike = [window for window in windows if len(window) == length]
        for part in slices(
            len(alike), max(1, batch_tokens // length)
        ):  # scores take three times the memory of costs
            codes = np.stack([np.frombuffer(window, np.uint8) for window in alike[part]])
            scores = score_windows(
                model, codes, strands=strands, by_base=True, batch_tokens=batch_tokens
            )
            costs |= dict(
                zip(
                    alike[part],
                    zip(scores.nll.numpy(), scores.bases.numpy() > 0, strict=True),
                    strict=True,
                )
            )
    return [(costs[reference], costs[alternative]) for reference, alternative in pairs]


def effect(placed: Placed, costs: tuple[WindowCosts, WindowCosts], *, both: bool) -> Row:
    """What rows say of a change: log p(alternative window) − log p(reference window), NaN where
    other bases count in the two windows, with the `reason`. flank_llr_nats: the same of the bases
    of the flanks alone; NaN where no base that counts is read
    after the alleles. window, flank: bases of the longer window, and of both flanks together."""
    (nats, counts), (other_nats, other_counts) = costs

    def flanks(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[: placed.left], values[len(values) - placed.right :]])

    reason = ""
    if not counts.any() or not other_counts.any():
        reason = NOTHING_KNOWN
    elif (
        other_counts.sum() - counts.sum() != placed.change.growth
        or flanks(counts).sum() != flanks(other_counts).sum()
    ):
        reason = UNEVEN
    llr = math.nan if reason else float(nats.sum()) - float(other_nats.sum())
    behind = (
        flanks(counts) if both else counts[len(counts) - placed.right :]
    )  # read after the alleles, on some strand
    readable = not reason and behind.any()
    return {
        "llr_nats": llr,
        "llr_bits": llr / BIT,
        "flank_llr_nats": float(flanks(nats).sum()) - float(flanks(other_nats).sum())
        if readable
        else math.nan,
        "window": max(placed.sizes),
        "flank": placed.left + placed.right,
        "reason": reason,
    }


@dataclass(frozen=True)
class VariantSettings(FileSettings):
    """A reference, and its variants."""

    variants: str | None = option(None, "VCF or BCF")


class Variants(FileEvaluator[VariantSettings]):
    """Log-likelihood ratio of every variant, log p(alt window) − log p(ref window): below 0 the
    model prefers the reference.

    A variant is trimmed and left-aligned first, so every spelling of a haplotype has the same
    numbers. Both windows begin at one base of the reference and end at another (`place`): an
    insertion makes the alternative window longer, a deletion makes it shorter. So an indel's
    `llr_nats` has what its bases cost or save, about ln 4 each; `flank_llr_nats` is of the bases
    that both windows have, and compares like with like. With strands "one" that is what stands
    behind the alleles; with "both", a mean over a window and its reverse complement, what stands on
    either side.

    Variants that cannot be scored are listed with the reason: alleles, with all the bases that
    their repeat could move them over, longer than a window; alleles that are not sequences; contigs
    missing from the reference; REF that differs from it; windows in which other bases count, as
    where one of them has an unknown base, or, of k-mers, is no whole number of them.

    The column `pos` is VCF's POS, from 1. `window` is the length of the longer window (default: the
    training length), rounded down to whole k-mers.
    """

    name = "variants"
    version = 5  # 4 had other columns
    summary = (
        "log-likelihood ratio of alternative to reference allele for every variant of a VCF or BCF"
    )
    scores = (Score("llr_nats"),)
    default_window = 1

    @property
    def source_name(self) -> str:
        return f"{self.settings.variants} on {self.settings.fasta}"

    def identity(self, model: ZooModel) -> Row:
        return {
            "reference": self.genome().fingerprint,
            "variants": self.file()[1],
        } | super().identity(model)

    def file(self) -> tuple[str, str]:
        """The file of variants, and a hash of it."""
        path = self.settings.variants
        if path is None:
            raise ValueError("variants needs a VCF or BCF: name one with --variants")
        if not Path(path).is_file():
            next(read_variants(path))  # raises
        return path, file_sha256(path)[:16]

    def cells(self, model: ZooModel) -> list[Cell]:
        step = load_tokenizer(model.config.tokenizer).step
        entries = _entries(*self.file(), self.genome(), self.window(model), step)
        size = max(LEAST_PART, math.ceil(len(entries) / MOST_PARTS))
        parts = {n: entries[n : n + size] for n in range(0, len(entries), size)}
        costs = {
            n: sum(sum(placed.sizes) for _, placed in part if placed) for n, part in parts.items()
        }
        return [Cell(f"variants={n}", costs[n], {"entries": part}) for n, part in parts.items()]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        entries = cell.data["entries"]
        strands = strands_of(model, self.settings)
        placed = [where for _, where in entries if where]
        tokens = self.settings.batch_tokens
        costs = iter(
            score_haplotypes(model, self.genome(), placed, strands=strands, batch_tokens=tokens)
        )
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
        left_out = "".join(
            f"; not scored: {count:,} with {reason}" for reason, count in reasons.most_common()
        )
        return f"variants: {len(rows) - reasons.total():,} of {len(rows):,} alleles of {self.source_name}{left_out}"

    def show(self, results: list[ModelResult], console: Console) -> None:
        """Each model's least likely alternative alleles."""
        for result, model in zip(results, short_names(results), strict=True):
            scored = sorted(
                (row for row in result.rows if not row["reason"]), key=lambda row: row["llr_nats"]
            )
            rows = []
            for row in scored[:SHOWN]:
                ref, alt = (
                    text if len(text) <= 12 else f"{text[:11]}…"
                    for text in (row["ref"], row["alt"])
                )
                ratios = (f"{row[name]:+.3f}" for name in ("llr_nats", "llr_bits"))
                rows.append(
                    [
                        f"{row['chrom']}:{row['pos']}",
                        row["id"],
                        f"{ref}→{alt}",
                        row["kind"],
                        *ratios,
                    ]
                )
            title = f"variants: {model}; least likely alternatives"
            columns = ["log p(alt) − log p(ref), nats", "bits"]
            print_table(console, title, ["place", "id", "change", "kind"], columns, rows)


Entry = tuple[Variant, Placed | None]  # with a reason where it has no place


@lru_cache(maxsize=2)
def _entries(path: str, digest: str, genome: Genome, window: int, step: int) -> tuple[Entry, ...]:
    """Every variant of a file, placed. `digest`: the file's hash, so that a changed file is another
    one. ValueError for no variants, or none that fits the reference."""
    entries = tuple(_placed(genome, variant, window, step) for variant in read_variants(path))
    if not entries:
        raise ValueError(f"{path} has no variants")
    other = [variant for variant, _ in entries if variant.reason.startswith((NO_CONTIG, MISMATCH))]
    if other and not any(
        placed or variant.reason.startswith(NO_ROOM) for variant, placed in entries
    ):
        names = [contig.name for contig in genome.contigs]
        hint = "" if other[0].chrom in names else did_you_mean(other[0].chrom, names)
        raise ValueError(
            f"none of the {len(other)} variants of {path} fits {genome.files[0]}; the first has {other[0].reason}. "
            f"{hint}contigs of the reference: {', '.join(names[:5])}; positions count from 1"
        )
    return entries


def _placed(genome: Genome, variant: Variant, window: int, step: int) -> Entry:
    if variant.reason:
        return variant, None
    if variant.chrom not in genome:
        return replace(variant, reason=f"{NO_CONTIG}: {variant.place}: {variant.chrom!r}"), None
    at = variant.pos - 1
    length = genome[variant.chrom].length
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
