"""Composition of a genome, counted a few million bases at a time (`priorzoo prepare-genome`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from modalities.dna.bases import BASES
from modalities.dna.genome import Contig, Genome

__all__ = ["Composition", "contig_statistics", "total"]

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Composition:
    """Counts of a contig, or of several together. All but `length` and `soft_masked` are of known bases alone.

    counts: of A, C, G and T. cpg: places where a G follows a C on this strand. unknown_runs, longest_unknown_run: stretches
    of anything but A, C, G and T, and the length of the longest.
    """

    name: str
    length: int
    counts: tuple[int, int, int, int]
    cpg: int
    soft_masked: int
    unknown_runs: int
    longest_unknown_run: int

    @property
    def known(self) -> int:
        return sum(self.counts)

    @property
    def gc(self) -> float | None:
        """(G + C) / known bases; None where no base is known."""
        return (self.counts[1] + self.counts[2]) / self.known if self.known else None

    @property
    def cpg_ratio(self) -> float | None:
        """CpG observed / expected = n_CpG · known / (n_C · n_G) (Gardiner-Garden & Frommer 1987); None without C or G."""
        expected = self.counts[1] * self.counts[2]
        return self.cpg * self.known / expected if expected else None

    @property
    def soft_masked_share(self) -> float:
        """Lower-case letters / all letters."""
        return self.soft_masked / self.length

    def as_dict(self) -> dict[str, Any]:
        """JSON values: counts, and what follows from them."""
        return asdict(self) | {
            "counts": dict(zip(BASES, self.counts, strict=True)),
            "known": self.known,
            "gc": self.gc,
            "cpg_observed_over_expected": self.cpg_ratio,
            "soft_masked_share": self.soft_masked_share,
        }


def contig_statistics(genome: Genome, contig: Contig) -> Composition:
    """The composition of one contig; memory is a few megabytes, whatever its length."""
    counts, cpg, masked = np.zeros(4, np.int64), 0, 0
    for start in range(0, contig.length, _CHUNK):
        stop = min(start + _CHUNK, contig.length)
        codes = genome.codes(contig.name, start, min(stop + 1, contig.length))  # one more: a CpG may cross
        cpg += int(np.count_nonzero((codes[:-1] == 1) & (codes[1:] == 2)))
        counts += [np.count_nonzero(codes[: stop - start] == code) for code in range(4)]
        masked += int(np.count_nonzero(genome.soft_masked(contig.name, start, stop)))
    runs = contig.unknown[:, 1] - contig.unknown[:, 0]
    a, c, g, t = map(int, counts)
    return Composition(
        contig.name, contig.length, (a, c, g, t), cpg, masked, len(runs), int(runs.max()) if len(runs) else 0
    )


def total(parts: Iterable[Composition], name: str = "total") -> Composition:
    """Several contigs as one. ValueError for none."""
    parts = tuple(parts)
    if not parts:
        raise ValueError("no contig to add up")
    a, c, g, t = (sum(part.counts[base] for part in parts) for base in range(4))
    added = ("length", "cpg", "soft_masked", "unknown_runs")
    sums = {field: sum(getattr(part, field) for part in parts) for field in added}
    longest = max(part.longest_unknown_run for part in parts)
    return Composition(name, counts=(a, c, g, t), longest_unknown_run=longest, **sums)
