"""Log-likelihood ratios of the variants of a VCF or BCF: log p(alternative) − log p(reference) of
windows that share both of their ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modalities.dna.evaluation import FileEvaluator, FileSettings, strands_of
from modalities.dna.genome import Genome
from modalities.dna.scoring import BIT, score_windows
from modalities.dna.tokenizers import decode, encode, load_tokenizer
from modalities.dna.variants import Change, Variant, normalize, read_variants
from modalities.evaluation import Cell
from modalities.results import CellValue, ModelResult, Row, Score, short_names
from modalities.settings import option
from modalities.tables import print_table
from zoo.errors import did_you_mean
from zoo.files import file_sha256
from zoo.model import ZooModel
from zoo.positions import slices

if TYPE_CHECKING:
    from rich.console import Console

# Of each base of a window: nats, and whether it counts.
WindowCosts = tuple[np.ndarray, np.ndarray]
UNEVEN = (
    "bases that do not count alike in the two windows: unknown ones, or k-mers cut at their ends"
)
NOTHING_KNOWN = "no known base in its windows"
# Variants in a cell.
LEAST_PART = 256
# Cells of a file.
MOST_PARTS = 64
# Variants on the terminal.
SHOWN = 10
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
class Placement:
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


def place(change: Change, length: int, window: int, step: int = 1) -> Placement | int:
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
    return Placement(change, start, start + reference)


def haplotypes(genome: Genome, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the reference's window and of the alternative one: both begin and end at the same
    bases of the reference."""
    change = placement.change
    codes = genome.codes(change.chrom, placement.start, placement.stop)
    behind = codes[placement.left + len(change.ref) :]
    return codes, np.concatenate([codes[: placement.left], encode(change.alt), behind])


def score_haplotypes(
    model: ZooModel,
    genome: Genome,
    placements: Sequence[Placement],
    *,
    strands: str,
    batch_tokens: int,
) -> list[tuple[WindowCosts, WindowCosts]]:
    """Costs of the reference's window and of the alternative one, for each change.

    Equal windows, such as the reference's of all alleles at a site, are read once.
    """
    pairs = []
    windows: dict[bytes, None] = {}
    for placement in placements:
        reference, alternative = haplotypes(genome, placement)
        pair = (reference.tobytes(), alternative.tobytes())
        pairs.append(pair)
        windows |= dict.fromkeys(pair)
    costs: dict[bytes, WindowCosts] = {}
    for length in sorted(set(map(len, windows))):
        of_length = [window for window in windows if len(window) == length]
        # A batch at a time: scores take three times the memory of costs.
        for part in slices(len(of_length), max(1, batch_tokens // length)):
            codes = np.stack([np.frombuffer(window, np.uint8) for window in of_length[part]])
            scores = score_windows(
                model, codes, strands=strands, by_base=True, batch_tokens=batch_tokens
            )
            nats = scores.nll.numpy()
            counts = scores.bases.numpy() > 0
            for n, window in enumerate(of_length[part]):
                costs[window] = (nats[n], counts[n])
    return [(costs[reference], costs[alternative]) for reference, alternative in pairs]


def effect(placement: Placement, costs: tuple[WindowCosts, WindowCosts], *, both: bool) -> Row:
    """What rows say of a change: log p(alternative window) − log p(reference window), NaN where
    other bases count in the two windows, with the `reason`. flank_llr_nats: the same of the bases
    of the flanks alone; NaN where no base that counts is read after the alleles. window, flank:
    bases of the longer window, and of both flanks together."""
    nats, counts = costs[0]
    alt_nats, alt_counts = costs[1]

    def flanks(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[: placement.left], values[len(values) - placement.right :]])

    growth = alt_counts.sum() - counts.sum()
    reason = ""
    if not counts.any() or not alt_counts.any():
        reason = NOTHING_KNOWN
    elif growth != placement.change.growth or flanks(counts).sum() != flanks(alt_counts).sum():
        reason = UNEVEN
    llr = math.nan
    if not reason:
        llr = float(nats.sum()) - float(alt_nats.sum())
    # Bases that are read after the alleles, on some strand.
    after_alleles = flanks(counts) if both else counts[len(counts) - placement.right :]
    flank_llr = math.nan
    if not reason and after_alleles.any():
        flank_llr = float(flanks(nats).sum()) - float(flanks(alt_nats).sum())
    return {
        "llr_nats": llr,
        "llr_bits": llr / BIT,
        "flank_llr_nats": flank_llr,
        "window": max(placement.sizes),
        "flank": placement.left + placement.right,
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
    version = 5
    summary = (
        "log-likelihood ratio of alternative to reference allele for every variant of a VCF or BCF"
    )
    scores = (Score("llr_nats"),)
    default_window = 1

    @property
    def source_name(self) -> str:
        return f"{self.settings.variants} on {self.settings.fasta}"

    def identity(self, model: ZooModel) -> Row:
        _, digest = self.file()
        identity: Row = {"reference": self.genome().fingerprint, "variants": digest}
        return identity | super().identity(model)

    def file(self) -> tuple[str, str]:
        """The file of variants, and a hash of it."""
        path = self.settings.variants
        if path is None:
            raise ValueError("variants needs a VCF or BCF: name one with --variants")
        if not Path(path).is_file():
            # Raises, with the nearest name.
            next(read_variants(path))
        return path, file_sha256(path)[:16]

    def cells(self, model: ZooModel) -> list[Cell]:
        step = load_tokenizer(model.config.tokenizer).step
        entries = _entries(*self.file(), self.genome(), self.window(model), step)
        size = max(LEAST_PART, math.ceil(len(entries) / MOST_PARTS))
        cells = []
        for start in range(0, len(entries), size):
            part = entries[start : start + size]
            cost = sum(sum(placement.sizes) for _, placement in part if placement)
            cells.append(Cell(f"variants={start}", cost, {"entries": part}))
        return cells

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        entries = cell.data["entries"]
        strands = strands_of(model, self.settings)
        costs = iter(
            score_haplotypes(
                model,
                self.genome(),
                [placement for _, placement in entries if placement],
                strands=strands,
                batch_tokens=self.settings.batch_tokens,
            )
        )
        rows = []
        for variant, placement in entries:
            row = {
                "chrom": variant.chrom,
                "pos": variant.pos,
                "id": variant.id,
                "ref": variant.ref,
                "alt": variant.alt,
                "kind": placement.change.kind if placement else "",
                "reason": variant.reason,
            }
            if placement:
                row |= effect(placement, next(costs), both=strands == "both")
            else:
                row |= UNSCORED
            rows.append(row)
        return {"rows": rows}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows: list[Row] = []
        for cell in cells.values():
            rows += cell["rows"]
        return rows

    def measured(self, results: list[ModelResult]) -> str:
        rows = results[0].rows
        reasons = Counter(row["reason"].split(":")[0] for row in rows if row["reason"])
        scored = len(rows) - reasons.total()
        text = f"variants: {scored:,} of {len(rows):,} alleles of {self.source_name}"
        for reason, count in reasons.most_common():
            text += f"; not scored: {count:,} with {reason}"
        return text

    def show(self, results: list[ModelResult], console: Console) -> None:
        """Each model's least likely alternative alleles."""
        for result, model in zip(results, short_names(results), strict=True):
            scored = [row for row in result.rows if not row["reason"]]
            scored.sort(key=lambda row: row["llr_nats"])
            lines = []
            for row in scored[:SHOWN]:
                lines.append(
                    [
                        f"{row['chrom']}:{row['pos']}",
                        row["id"],
                        f"{_shortened(row['ref'])}→{_shortened(row['alt'])}",
                        row["kind"],
                        f"{row['llr_nats']:+.3f}",
                        f"{row['llr_bits']:+.3f}",
                    ]
                )
            title = f"variants: {model}; least likely alternatives"
            columns = ["log p(alt) − log p(ref), nats", "bits"]
            print_table(console, title, ["place", "id", "change", "kind"], columns, lines)


def _shortened(allele: str) -> str:
    return allele if len(allele) <= 12 else f"{allele[:11]}…"


# A variant has a reason where it has no placement.
Entry = tuple[Variant, Placement | None]


@lru_cache(maxsize=2)
def _entries(path: str, digest: str, genome: Genome, window: int, step: int) -> tuple[Entry, ...]:
    """Every variant of a file, and where its windows lie.

    `digest`: the file's hash, so that a changed file is another one. ValueError for no variants, or
    none that fits the reference.
    """
    entries = tuple(
        _place_variant(genome, variant, window, step) for variant in read_variants(path)
    )
    if not entries:
        raise ValueError(f"{path} has no variants")
    misfits = [one for one, _ in entries if one.reason.startswith((NO_CONTIG, MISMATCH))]
    fits = any(placement or one.reason.startswith(NO_ROOM) for one, placement in entries)
    if misfits and not fits:
        first = misfits[0]
        names = [contig.name for contig in genome.contigs]
        hint = "" if first.chrom in names else did_you_mean(first.chrom, names)
        raise ValueError(
            f"none of the {len(misfits)} variants of {path} fits {genome.files[0]}; "
            f"the first has {first.reason}. {hint}"
            f"contigs of the reference: {', '.join(names[:5])}; positions count from 1"
        )
    return entries


def _place_variant(genome: Genome, variant: Variant, window: int, step: int) -> Entry:
    if variant.reason:
        return variant, None
    chrom = variant.chrom
    if chrom not in genome:
        return replace(variant, reason=f"{NO_CONTIG}: {variant.place}: {chrom!r}"), None
    start = variant.pos - 1
    length = genome[chrom].length
    codes = genome.codes(chrom, min(start, length), min(start + len(variant.ref), length))
    bases = decode(codes)
    if bases != variant.ref:
        content = f"has {bases}" if bases else f"lies beyond its {length}"
        detail = f"REF is {variant.ref}, {chrom}:{variant.pos} of the reference {content}"
        return replace(variant, reason=f"{MISMATCH}: {variant.place}: {detail}"), None
    change = normalize(genome, chrom, start, variant.ref, variant.alt)
    outcome = place(change, length, window, step)
    if isinstance(outcome, Placement):
        return variant, outcome
    shorter = max(0, outcome - abs(change.growth))
    alleles = f"the alleles, wherever their repeat can move them, span {change.longest:,} bases"
    sizes = f"the longer window has {outcome:,}, the other {shorter:,}"
    return replace(variant, reason=f"{NO_ROOM}: {alleles}; {sizes}"), None
