"""Genomes: contigs with random access to their bases, one byte each, in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from modalities.dna.sources import DnaSource, read_codes
from modalities.dna.tokenizers import CODE, SOFT, UNKNOWN
from zoo.errors import did_you_mean

_MOST_CONTIGS = 1 << 22  # each takes some hundred bytes of memory
_PIECE = 1 << 24  # bases in which unknown ones are looked for at once


@dataclass(frozen=True)
class Contig:
    """One sequence. unknown: (n, 2) int64, the runs [start, stop) of UNKNOWN codes, sorted and
    disjoint."""

    name: str
    length: int
    file: str
    unknown: np.ndarray = field(compare=False, repr=False)

    @property
    def known(self) -> int:
        """Bases that are A, C, G or T."""
        return self.length - int((self.unknown[:, 1] - self.unknown[:, 0]).sum())


class Genome:
    """Contigs in the order of their files; `open_genome` makes one. Immutable.

    fingerprint: 16 hex digits; equal ones mean equal names, lengths, bases and soft masks, in
    whatever format.
    files: absolute paths. starts: where each contig begins, and unknown: (n, 2) runs of UNKNOWN
    codes, with contigs laid one after the other.
    """

    def __init__(
        self,
        contigs: list[tuple[str, int, int]],
        fingerprint: str,
        files: tuple[str, ...],
        bases: bytearray,
    ) -> None:
        """contigs: name, length and number of the file of each. bases: of all of them, code |
        SOFT."""
        self.files = files
        self.fingerprint = fingerprint
        self._store = np.frombuffer(bases, np.uint8)
        starts = np.cumsum([0, *(length for _, length, _ in contigs)])
        self.unknown = _unknown_runs(self._store, starts)
        first = np.searchsorted(self.unknown[:, 0], starts)  # run of each contig
        self.contigs = tuple(
            Contig(name, length, files[file], self.unknown[first[n] : first[n + 1]] - starts[n])
            for n, (name, length, file) in enumerate(contigs)
        )
        self._by_name = {contig.name: contig for contig in self.contigs}
        self.starts = {
            contig.name: int(at) for contig, at in zip(self.contigs, starts, strict=False)
        }
        self.known = sum(contig.known for contig in self.contigs)

    def __getitem__(self, name: str) -> Contig:
        """ValueError for an unknown name; it names the nearest."""
        if name not in self._by_name:
            names = list(self._by_name)
            few = f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            raise ValueError(
                f"no contig {name!r}; {did_you_mean(str(name), names)}there are {len(names)}: {few}"
            )
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Codes 0..4 of the bases [start, stop) of a contig, uint8, a fresh array. ValueError
        beyond its ends."""
        return self._read(name, start, stop) & CODE

    def soft_masked(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Which bases of [start, stop) are lower-case in the file (repeats, by convention):
        bool."""
        return self._read(name, start, stop) & SOFT != 0

    def _read(self, name: str, start: int, stop: int | None) -> np.ndarray:
        contig = self[name]
        at = self.starts[name]
        stop = contig.length if stop is None else stop
        if not 0 <= start <= stop <= contig.length:
            raise ValueError(
                f"bases [{start}, {stop}) are outside contig {name!r}, which has {contig.length:,}"
            )
        return self._store[at + start : at + stop]


def _unknown_runs(codes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n, 2) int64 runs of UNKNOWN of contigs that begin at `starts`, laid one after the other;
    looked for in pieces."""
    edges = []
    before = np.zeros(1, bool)
    for at in range(0, len(codes), _PIECE):
        unknown = codes[at : at + _PIECE] & CODE == UNKNOWN
        edges.append(at + np.flatnonzero(np.diff(unknown, prepend=before)))
        before = unknown[-1:]
    edges.append(np.full(int(before[0]), len(codes)))
    inner = starts[1:-1]
    crossed = inner[
        (codes[inner - 1] & CODE == UNKNOWN) & (codes[inner] & CODE == UNKNOWN)
    ]  # a run ends, one begins
    return np.sort(np.concatenate([*edges, crossed, crossed]).astype(np.int64)).reshape(-1, 2)


class RunCounter:
    """Counts the bases of [start, stop) that lie in sorted, disjoint runs (R, 2)."""

    def __init__(self, runs: np.ndarray) -> None:
        self.runs = np.concatenate(
            [[[-1, -1]], runs]
        )  # an empty run first: every place has one at or before it
        self.total = np.cumsum(self.runs[:, 1] - self.runs[:, 0])

    def count(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """(N,) int64 of N intervals."""
        return self._before(stop) - self._before(start)

    def _before(self, place: np.ndarray) -> np.ndarray:
        run = np.searchsorted(self.runs[:, 0], place, side="right") - 1
        return self.total[run] - np.maximum(self.runs[run, 1] - place, 0)


def open_genome(source: DnaSource) -> Genome:
    """The genome of a source; opened again, it costs nothing. ValueError with file, place and
    reason for malformed files."""
    return _open(tuple((str(path.absolute()), _version(path)) for path in source.files))


_Version = tuple[str, int, int]  # of a file: its path with links resolved; its size; its time


def _version(path: Path) -> _Version:
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


@lru_cache(maxsize=4)
def _open(stats: tuple[tuple[str, _Version], ...]) -> Genome:
    bases = bytearray()
    names: list[str] = []
    sizes: list[tuple[int, int]] = []  # length, and number of the file, of each
    places: dict[str, str] = {}  # where each contig starts
    digest = hashlib.blake2b(digest_size=8)
    for number, (name, version) in enumerate(stats):
        count = len(names)
        for piece in read_codes(Path(name)):
            if not isinstance(piece, bytes):
                contig = piece[0]
                place = f"{name}, {piece[1]}"
                if contig in places:
                    raise ValueError(
                        f"{place}: a second contig {contig!r}; the first is in {places[contig]}"
                    )
                if len(names) == _MOST_CONTIGS:
                    raise ValueError(
                        f"{place}: more than {_MOST_CONTIGS:,} contigs, the most that a genome can have"
                    )
                places[contig] = place
                names.append(contig)
                sizes.append((0, number))
            else:
                sizes[-1] = sizes[-1][0] + len(piece), number
                digest.update(piece)
                bases += piece
        if len(names) == count:
            raise ValueError(f"{name}: no sequence in it")
        if _version(Path(name)) != version:
            raise ValueError(
                f"{name}: changed while it was being read; open it again once it is complete"
            )
    contigs = [(name, *size) for name, size in zip(names, sizes, strict=True)]
    for name, length, _ in contigs:
        if not length:
            raise ValueError(
                f"{places[name]}: contig {name!r} is empty: no base follows its header"
            )
    digest.update(json.dumps([contig[:2] for contig in contigs]).encode())
    return Genome(contigs, digest.hexdigest(), tuple(path for path, _ in stats), bases)
