"""Held-out DNA: the genome and split of a source, opened once per process, and the stretches that evaluators read.

A stretch lies inside one held-out region. Stretches of a contig do not overlap, are spread over all of it, and hold at most a
tenth of unknown bases; which they are depends on (source, length, how many, seed) alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from modalities.dna.genome import Genome, open_genome
from modalities.dna.splits import Region, joined, load_regions, select

DEFAULT_SOURCE = "yeast-chr01"
MAX_UNKNOWN = 0.1  # of a stretch


@dataclass(frozen=True)
class DnaSource:
    """A genome and how it is split, in the words of a recipe's data section; split None is the source's own."""

    source: str = DEFAULT_SOURCE
    split: str | None = None


@dataclass(frozen=True)
class Stretch:
    """[start, stop) of a held-out contig, on the strand that is written."""

    contig: str
    start: int
    stop: int


class HeldOut:
    """The genome of a source, all its regions, and the held-out ones by contig, in the order of the file."""

    def __init__(self, source: DnaSource) -> None:
        self.name = source_name(source)
        self.genome: Genome = open_genome(source.source)
        self.regions: tuple[Region, ...] = load_regions(source.source, self.genome, source.split)
        order = {contig.name: n for n, contig in enumerate(self.genome.contigs)}
        self.contigs: dict[str, tuple[Region, ...]] = {}
        for region in sorted(joined(select(self.regions, "heldout")), key=lambda r: order[r.contig]):
            self.contigs[region.contig] = (*self.contigs.get(region.contig, ()), region)
        self.fingerprint = fingerprint(self.genome, self.regions)

    def longest(self, contig: str) -> Region:
        return max(self.contigs[contig], key=lambda region: region.stop - region.start)

    def reaching(self, share: float) -> int:
        """The greatest length such that contigs with this share of the held-out bases have a region that long."""
        sizes = {name: sum(r.stop - r.start for r in regions) for name, regions in self.contigs.items()}
        total, found = sum(sizes.values()), 0
        for length, size in sorted(((self._room(name), size) for name, size in sizes.items()), reverse=True):
            found += size
            if found >= share * total:
                return length
        return 0

    def _room(self, contig: str) -> int:
        region = self.longest(contig)
        return region.stop - region.start

    def stretches(self, length: int, count: int, seed: int) -> dict[str, list[Stretch]]:
        """At most ``count`` stretches of ``length`` bases by contig, in the order of their places.

        A contig with room for fewer has fewer; one with room for none is left out.

        Raises:
            ValueError: where no contig has room for one; it names the longest held-out region.
        """
        found = {name: self._draw(regions, length, count, seed) for name, regions in self.contigs.items()}
        found = {name: stretches for name, stretches in found.items() if stretches}
        if not found:
            longest = max(map(self._room, self.contigs))
            few_unknown = f", at most {MAX_UNKNOWN:.0%} of them unknown" if longest >= length else ""
            raise ValueError(
                f"no held-out region of {self.name!r} has {length} bases in one piece{few_unknown}; the longest region has "
                f"{longest}: choose shorter lengths, or a source that holds out more"
            )
        return found

    def _draw(self, regions: Sequence[Region], length: int, count: int, seed: int) -> list[Stretch]:
        """One place at random in each of ``count`` equal shares of the places there are on a grid."""
        contig = regions[0].contig
        name = int.from_bytes(hashlib.blake2b(contig.encode(), digest_size=8).digest(), "little")
        rng, runs = np.random.default_rng([seed, length, name]), self.genome[contig].unknown
        starts = [np.zeros(0, np.int64)]
        gaps = runs[runs[:, 1] - runs[:, 0] > MAX_UNKNOWN * length]  # the grid begins anew after each
        for start, stop in _between(regions, gaps):
            places, rest = divmod(stop - start, length)
            starts.append(start + int(rng.integers(rest + 1)) + np.arange(places) * length)
        places = np.concatenate(starts)
        places = places[unknown_bases(runs, places, length) <= MAX_UNKNOWN * length]
        bounds = np.arange(count + 1) * len(places) // count
        if len(places) > count:
            places = places[rng.integers(bounds[:-1], bounds[1:])]
        return [Stretch(contig, int(start), int(start) + length) for start in places]

    def codes(self, stretch: Stretch) -> np.ndarray:
        """Base codes (length,) uint8."""
        return self.genome.codes(stretch.contig, stretch.start, stretch.stop)


def _between(regions: Sequence[Region], gaps: np.ndarray) -> Iterator[tuple[int, int]]:
    """[start, stop) of the pieces that sorted, disjoint ``gaps`` (G, 2) leave of regions, in order."""
    for region in sorted(regions, key=lambda r: r.start):
        inside = gaps[(gaps[:, 1] > region.start) & (gaps[:, 0] < region.stop)]
        edges = [region.start, *inside.ravel().tolist(), region.stop]
        yield from ((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def unknown_bases(runs: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """(N,) how many of the ``length`` bases from each of ``starts`` lie in the sorted, disjoint ``runs`` (R, 2)."""
    if not len(runs):
        return np.zeros(len(starts), np.int64)
    before = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])

    def upto(places: np.ndarray) -> np.ndarray:
        run = np.searchsorted(runs[:, 0], places, side="right")
        beyond = np.where(run > 0, np.maximum(runs[run - 1, 1] - places, 0), 0)  # of the run that a place lies in
        return before[run] - beyond

    return upto(starts + length) - upto(starts)


def fingerprint(genome: Genome, regions: Sequence[Region]) -> str:
    """16 hex digits of a genome's bases and of regions in it: what a stored number must be keyed by."""
    digest = hashlib.sha256(genome.fingerprint.encode())
    for region in sorted(regions, key=lambda r: (r.contig, r.start)):
        digest.update(f"\n{region.contig}\t{region.start}\t{region.stop}\t{region.split}".encode())
    return digest.hexdigest()[:16]


def source_name(source: str | DnaSource | None) -> str:
    """What files call held-out data: "genomes", or "genome.fa split by genome.bed"."""
    if not isinstance(source, DnaSource):
        return source or DEFAULT_SOURCE
    return source.source + (f" split by {source.split}" if source.split else "")


def held_out(source: str | DnaSource | None) -> HeldOut:
    """The held-out data of a source, in the words of a recipe; None is DEFAULT_SOURCE.

    Errors: those of `open_genome` and `load_regions`.
    """
    return _held_out(source if isinstance(source, DnaSource) else DnaSource(source or DEFAULT_SOURCE))


@lru_cache(maxsize=2)
def _held_out(source: DnaSource) -> HeldOut:
    return HeldOut(source)
