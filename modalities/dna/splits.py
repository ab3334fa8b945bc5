"""Regions of a genome, from BED files; and which are for training and which are held out: by a BED
file of four columns, or whole contigs by rule.

    chr1    0    248956422    train
    chr20   0    64444167     heldout

Bounds are 0-based and half-open. "valid", "validation", "val" and "test" mean heldout. Bases that
no row covers are not used. Rows of different splits may not share a base. BED is plain or gzipped,
and read line by line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from modalities.dna.genome import Contig, Genome, RunCounter, open_genome
from modalities.dna.sources import DnaSource
from modalities.loading import Heldout, fingerprint_of
from modalities.sources import HashSplit
from zoo.errors import did_you_mean
from zoo.files import near_file, open_decompressed

_SPLIT = HashSplit(key=b"priorzoo held-out contigs", fraction=0.05)
# Held-out share of a genome that is a single contig.
HELDOUT_OF_ONE = 0.1
# Largest share of unknown bases in a stretch.
MAX_UNKNOWN = 0.1
# A contig that would raise the held-out share above this many times that of `_SPLIT` stays in
# training.
_MOST = 3
_SPLITS = ("train", "heldout", "valid", "validation", "val", "test")
_LONGEST_LINE = 1 << 20
_MOST_ROWS = 1 << 22


@dataclass(frozen=True)
class Region:
    """Bases [start, stop) of a contig, 0-based. label: the split it is in, "train" or "heldout"; of
    other BED files the fourth column. strand: "-" where the sixth column says so: the row means the
    reverse complement."""

    contig: str
    start: int
    stop: int
    label: str = ""
    strand: str = "+"

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The label, or CONTIG:FIRST-LAST, both from 1."""
        return self.label or f"{self.contig}:{self.start + 1}-{self.stop}"


def read_bed(
    path: Path, genome: Genome, *, splits: bool = False, others: bool = False
) -> tuple[Region, ...]:
    """The rows of a BED file, in its order; comments (#), `track`, `browser` and blank lines are
    ignored. ValueError with file, line and reason for malformed rows, a contig that the genome
    lacks, or no row at all.

    Columns are separated by tabs, where a line has them, so that names may have spaces, else by
    spaces. splits: the fourth one is the split. others: ignore rows of contigs that the genome does
    not have.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no BED file {path}; {near_file(path)}".rstrip("; "))
    rows: list[Region] = []
    number = 0
    with open_decompressed(path) as file:
        while line := file.readline(_LONGEST_LINE):
            number += 1
            try:
                row = _row(line, genome, splits, others)
                if len(rows) == _MOST_ROWS:
                    raise ValueError(f"more than {_MOST_ROWS:,} rows, the most that are read")
            except ValueError as error:
                reason = "not plain text" if isinstance(error, UnicodeDecodeError) else error
                raise ValueError(f"{path}, line {number}: {reason}") from error
            if row is not None:
                rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no row for any of the {len(genome.contigs)} contigs")
    return tuple(rows)


def _row(raw: bytes, genome: Genome, splits: bool, others: bool) -> Region | None:
    if len(raw) == _LONGEST_LINE:
        raise ValueError(f"{_LONGEST_LINE:,} bytes or more; not BED")
    line = raw.decode("utf-8-sig").strip()
    words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
    if not words or words[0].startswith("#") or words[0].split()[:1] in (["track"], ["browser"]):
        return None
    if others and words[0] not in genome:
        return None
    columns = ["contig", "start", "stop"]
    if splits:
        columns.append(f"split (such as {' '.join(_SPLITS)})")
    if len(words) < len(columns):
        raise ValueError(f"{len(words)} columns, expected {len(columns)}: {', '.join(columns)}")
    contig = genome[words[0]]
    bounds = words[1:3]
    if not all(bound.isascii() and bound.isdigit() and len(bound) <= 18 for bound in bounds):
        raise ValueError(
            f"start {bounds[0][:40]!r} and stop {bounds[1][:40]!r} must be whole numbers from 0"
        )
    start = int(bounds[0])
    stop = int(bounds[1])
    if start >= stop:
        raise ValueError(f"start {start} is not below stop {stop}: the region is empty")
    if stop > contig.length:
        raise ValueError(
            f"stop {stop:,} is beyond the end of {contig.name!r}, which has {contig.length:,} bases"
        )
    label = words[3] if len(words) > 3 else ""
    if splits:
        if label not in _SPLITS:
            hint = did_you_mean(label.lower(), _SPLITS)
            raise ValueError(f"split {label!r}; {hint}expected one of {', '.join(_SPLITS)}")
        return Region(contig.name, start, stop, "train" if label == "train" else "heldout")
    strand = words[5] if len(words) > 5 else "."
    if strand not in ("+", "-", "."):
        raise ValueError(f"strand {strand[:40]!r}, expected +, - or .")
    return Region(contig.name, start, stop, label, "-" if strand == "-" else "+")


def load_regions(source: DnaSource, genome: Genome) -> tuple[Region, ...]:
    """The regions of a source: of its BED file where it has one, all held out where it is `whole`,
    else of `split_contigs`."""
    if source.whole:
        return tuple(
            Region(contig.name, 0, contig.length, "heldout")
            for contig in genome.contigs
            if contig.known
        )
    if source.bed is None:
        return split_contigs(genome.contigs)
    regions = read_bed(source.bed, genome, splits=True, others=source.subset)
    parts: list[Region] = []
    for split in ("train", "heldout"):
        parts += joined([region for region in regions if region.label == split])
    for one, following in pairwise(sorted(parts, key=_place)):
        if one.contig == following.contig and following.start < one.stop:
            bases = f"{following.start:,} to {min(one.stop, following.stop):,} of {one.contig!r}"
            raise ValueError(
                f"{source.bed}: train and heldout share bases {bases}: each base is in one split"
            )
    return regions


def _place(region: Region) -> tuple[str, int]:
    return region.contig, region.start


def split_contigs(contigs: Sequence[Contig]) -> tuple[Region, ...]:
    """Every contig as a region; whole ones are held out, in the order of blake2b of their names,
    until they have 5% of the known bases; one that would raise the share above 15%
    is passed over. If that leaves none, the contig with the fewest known bases is held out; of a
    single contig the last tenth."""
    usable = [contig for contig in contigs if contig.known]
    if not usable:
        raise ValueError("no contig has a known base")
    if len(usable) == 1:
        name = usable[0].name
        length = usable[0].length
        cut = length - int(length * HELDOUT_OF_ONE)
        if not 0 < cut < length:
            raise ValueError(f"contig {name!r} has {length} bases: too few to split")
        return Region(name, 0, cut, "train"), Region(name, cut, length, "heldout")
    total = sum(contig.known for contig in usable)
    wanted = _SPLIT.fraction * total
    most = _MOST * _SPLIT.fraction * total
    known = 0
    names: set[str] = set()
    for contig in sorted(usable, key=lambda contig: _rank(contig.name)):
        if known < wanted and known + contig.known <= most:
            known += contig.known
            names.add(contig.name)
    if not names:
        names.add(min(usable, key=lambda contig: (contig.known, _rank(contig.name))).name)
    regions = []
    for contig in usable:
        split = "heldout" if contig.name in names else "train"
        regions.append(Region(contig.name, 0, contig.length, split))
    return tuple(regions)


def _rank(name: str) -> int:
    return _SPLIT.rank(name.encode())


def select(regions: Iterable[Region], split: str) -> tuple[Region, ...]:
    """The regions of a split, "train" or "heldout"; ValueError where there is none."""
    selected = tuple(region for region in regions if region.label == split)
    if not selected:
        raise ValueError(f"no region is in the split {split!r}; splits are train and heldout")
    return selected


def joined(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Regions that share bases merged, so that no base counts twice; unchanged where none do."""
    union: list[Region] = []
    for region in sorted(regions, key=_place):
        if union and union[-1].contig == region.contig and region.start < union[-1].stop:
            union[-1] = replace(union[-1], stop=max(union[-1].stop, region.stop))
        else:
            union.append(region)
    return tuple(union if len(union) < len(regions) else regions)


def between(region: Region, runs: np.ndarray) -> np.ndarray:
    """(n, 2) bounds of what sorted, disjoint runs (R, 2) leave of a region."""
    inside = runs.clip(region.start, region.stop).ravel()
    bounds = np.concatenate([[region.start], inside, [region.stop]]).reshape(-1, 2)
    return bounds[bounds[:, 1] > bounds[:, 0]]


@dataclass(frozen=True, eq=False)
class GenomeSplit:
    """A genome and its regions, and the stretches of the held-out ones that evaluators read.

    A stretch lies inside one region. Stretches of a contig do not overlap, are spread over all of
    it, and are at most a tenth unknown bases; they depend on (source, length, count, seed) alone.
    `name` is the source's, for error messages.
    """

    name: str
    genome: Genome
    regions: tuple[Region, ...]

    @cached_property
    def contigs(self) -> dict[str, tuple[Region, ...]]:
        """The held-out regions by contig, in the order of the files."""
        by_contig: dict[str, list[Region]] = {contig.name: [] for contig in self.genome.contigs}
        for region in joined(select(self.regions, "heldout")):
            by_contig[region.contig].append(region)
        return {name: tuple(regions) for name, regions in by_contig.items() if regions}

    @property
    def longest(self) -> int:
        """Bases of the longest held-out region."""
        return max(len(region) for regions in self.contigs.values() for region in regions)

    def reaching(self, share: float) -> int:
        """The greatest length such that contigs with this share of the held-out bases have a region
        that long."""
        sizes = [list(map(len, regions)) for regions in self.contigs.values()]
        longest_first = sorted(sizes, key=max, reverse=True)
        totals = np.cumsum([sum(lengths) for lengths in longest_first])
        enough = int(np.searchsorted(totals, share * totals[-1]))
        return max(longest_first[enough])

    def stretches(self, length: int, count: int, seed: int) -> dict[str, list[Region]]:
        """At most `count` stretches of `length` bases by contig, in order of place; contigs without
        room are left out. ValueError where no contig has room for one; it names the longest
        held-out region."""
        by_contig = {}
        for name, regions in self.contigs.items():
            stretches = self._draw(regions, length, count, seed)
            if stretches:
                by_contig[name] = stretches
        if not by_contig:
            piece = f"{length} bases in one piece"
            if self.longest >= length:
                piece += f", at most {MAX_UNKNOWN:.0%} of them unknown"
            raise ValueError(
                f"no held-out region of {self.name!r} has {piece}; the longest region has "
                f"{self.longest}: choose shorter lengths, or a source that holds out more"
            )
        return by_contig

    def _draw(self, regions: Sequence[Region], length: int, count: int, seed: int) -> list[Region]:
        """A random place in each of `count` equal shares of the places on a grid."""
        contig = regions[0].contig
        name = int.from_bytes(hashlib.blake2b(contig.encode(), digest_size=8).digest(), "little")
        rng = np.random.default_rng([seed, length, name])
        runs = self.genome[contig].unknown
        starts = [np.zeros(0, np.int64)]
        # The grid starts anew after each gap.
        gaps = runs[runs[:, 1] - runs[:, 0] > MAX_UNKNOWN * length]
        for region in sorted(regions, key=_place):
            for start, stop in between(region, gaps).tolist():
                room, rest = divmod(stop - start, length)
                starts.append(start + int(rng.integers(rest + 1)) + np.arange(room) * length)
        places = np.concatenate(starts)
        places = places[RunCounter(runs).count(places, places + length) <= MAX_UNKNOWN * length]
        if len(places) > count:
            bounds = np.arange(count + 1) * len(places) // count
            places = places[rng.integers(bounds[:-1], bounds[1:])]
        return [Region(contig, start, start + length, "heldout") for start in places.tolist()]

    def codes(self, region: Region) -> np.ndarray:
        """Base codes (length,) uint8."""
        return self.genome.codes(region.contig, region.start, region.stop)


@lru_cache(maxsize=2)
def open_heldout(source: DnaSource) -> Heldout[GenomeSplit]:
    """The split genome of a source, opened once per process.

    Raises as `open_genome` and `load_regions` do.
    """
    genome = open_genome(source)
    regions = load_regions(source, genome)
    lines = [genome.fingerprint]
    for region in sorted(regions, key=_place):
        lines.append(f"\n{region.contig}\t{region.start}\t{region.stop}\t{region.label}")
    fingerprint = fingerprint_of(line.encode() for line in lines)
    return Heldout(source.name, fingerprint, GenomeSplit(source.name, genome, regions))
