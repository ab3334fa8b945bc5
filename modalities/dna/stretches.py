"""A split genome, and the stretches of it that evaluators read.

A stretch lies inside one held-out region. Stretches of a contig do not overlap, are spread over all of it, and are at most a
tenth unknown bases; they depend on (source, length, count, seed) alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from modalities.dna.genome import Genome, RunCounter
from modalities.dna.splits import Region, joined, select

__all__ = ["MAX_UNKNOWN", "GenomeSplit", "Stretch"]

MAX_UNKNOWN = 0.1  # of a stretch


@dataclass(frozen=True)
class Stretch:
    """[start, stop) of a held-out contig, on the strand as written."""

    contig: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class GenomeSplit:
    """A genome and its regions; `name` is the source's, for error messages."""

    name: str
    genome: Genome
    regions: tuple[Region, ...]

    @cached_property
    def contigs(self) -> dict[str, tuple[Region, ...]]:
        """The held-out regions by contig, in the order of the files."""
        order = {contig.name: n for n, contig in enumerate(self.genome.contigs)}
        found: dict[str, tuple[Region, ...]] = {}
        for region in sorted(joined(select(self.regions, "heldout")), key=lambda r: order[r.contig]):
            found[region.contig] = (*found.get(region.contig, ()), region)
        return found

    def longest(self, contig: str) -> Region:
        return max(self.contigs[contig], key=len)

    def reaching(self, share: float) -> int:
        """The greatest length such that contigs with this share of the held-out bases have a region that long."""
        sizes = {name: sum(map(len, regions)) for name, regions in self.contigs.items()}
        total, found = sum(sizes.values()), 0
        for length, size in sorted(((len(self.longest(name)), size) for name, size in sizes.items()), reverse=True):
            found += size
            if found >= share * total:
                return length
        return 0

    def stretches(self, length: int, count: int, seed: int) -> dict[str, list[Stretch]]:
        """At most `count` stretches of `length` bases by contig, in order of place; contigs without room are left out.

        Raises:
            ValueError: where no contig has room for one; it names the longest held-out region.
        """
        found = {name: self._draw(regions, length, count, seed) for name, regions in self.contigs.items()}
        found = {name: stretches for name, stretches in found.items() if stretches}
        if not found:
            longest = max(len(self.longest(name)) for name in self.contigs)
            few_unknown = f", at most {MAX_UNKNOWN:.0%} of them unknown" if longest >= length else ""
            raise ValueError(
                f"no held-out region of {self.name!r} has {length} bases in one piece{few_unknown}; the longest region has "
                f"{longest}: choose shorter lengths, or a source that holds out more"
            )
        return found

    def _draw(self, regions: Sequence[Region], length: int, count: int, seed: int) -> list[Stretch]:
        """A random place in each of `count` equal shares of the places on a grid."""
        contig = regions[0].contig
        name = int.from_bytes(hashlib.blake2b(contig.encode(), digest_size=8).digest(), "little")
        rng, runs = np.random.default_rng([seed, length, name]), self.genome[contig].unknown
        starts = [np.zeros(0, np.int64)]
        gaps = runs[runs[:, 1] - runs[:, 0] > MAX_UNKNOWN * length]  # the grid starts anew after each
        for start, stop in _between(regions, gaps):
            room, rest = divmod(stop - start, length)
            starts.append(start + int(rng.integers(rest + 1)) + np.arange(room) * length)
        places = np.concatenate(starts)
        places = places[RunCounter(runs).count(places, places + length) <= MAX_UNKNOWN * length]
        bounds = np.arange(count + 1) * len(places) // count
        if len(places) > count:
            places = places[rng.integers(bounds[:-1], bounds[1:])]
        return [Stretch(contig, int(start), int(start) + length) for start in places]

    def codes(self, stretch: Stretch) -> np.ndarray:
        """Base codes (length,) uint8."""
        return self.genome.codes(stretch.contig, stretch.start, stretch.stop)


def _between(regions: Sequence[Region], gaps: np.ndarray) -> Iterator[tuple[int, int]]:
    """[start, stop) of what sorted, disjoint `gaps` (G, 2) leave of regions, in order."""
    for region in sorted(regions, key=lambda r: r.start):
        inside = gaps[(gaps[:, 1] > region.start) & (gaps[:, 0] < region.stop)]
        edges = [region.start, *inside.ravel().tolist(), region.stop]
        yield from ((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)
