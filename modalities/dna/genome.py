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

# Each takes some hundred bytes of memory.
_MOST_CONTIGS = 1 << 22
# Bases in which unknown ones are looked for at once.
_PIECE = 1 << 24


@dataclass(frozen=True)
class Contig:
    """One sequence.

    unknown: (n, 2) int64, the runs [start, stop) of UNKNOWN codes, sorted and disjoint.
    """

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
        """contigs: name, length and number of the file of each.
        bases: code | SOFT of each base of all contigs.
        """
        self.files = files
        self.fingerprint = fingerprint
        self._store = np.frombuffer(bases, np.uint8)
        starts = np.cumsum([0, *(length for _, length, _ in contigs)])
        self.unknown = _unknown_runs(self._store, starts)
        # The first run of each contig.
        first = np.searchsorted(self.unknown[:, 0], starts)
        self.contigs = tuple(
            Contig(name, length, files[file], self.unknown[first[n] : first[n + 1]] - starts[n])
            for n, (name, length, file) in enumerate(contigs)
        )
        self._by_name = {contig.name: contig for contig in self.contigs}
        self.starts = {contig.name: int(starts[n]) for n, contig in enumerate(self.contigs)}
        self.known = sum(contig.known for contig in self.contigs)

    def __getitem__(self, name: str) -> Contig:
        """ValueError for an unknown name; it names the nearest."""
        if name not in self._by_name:
            names = list(self._by_name)
            listed = ", ".join(names[:5])
            if len(names) > 5:
                listed += ", …"
            hint = did_you_mean(str(name), names)
            raise ValueError(f"no contig {name!r}; {hint}there are {len(names)}: {listed}")
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
        offset = self.starts[name]
        if stop is None:
            stop = contig.length
        if not 0 <= start <= stop <= contig.length:
            raise ValueError(
                f"bases [{start}, {stop}) are outside contig {name!r}, which has {contig.length:,}"
            )
        return self._store[offset + start : offset + stop]


def _unknown_runs(codes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n, 2) int64 runs of UNKNOWN of contigs that begin at `starts`, laid one after the other;
    looked for in pieces."""
    edges = []
    last = np.zeros(1, bool)
    for start in range(0, len(codes), _PIECE):
        unknown = codes[start : start + _PIECE] & CODE == UNKNOWN
        edges.append(start + np.flatnonzero(np.diff(unknown, prepend=last)))
        last = unknown[-1:]
    if last[0]:
        edges.append(np.array([len(codes)]))
    # Where a contig that begins with unknown bases follows one that ends with them, a run ends and
    # another begins.
    inner = starts[1:-1]
    crossed = inner[(codes[inner - 1] & CODE == UNKNOWN) & (codes[inner] & CODE == UNKNOWN)]
    bounds = np.concatenate([*edges, crossed, crossed]).astype(np.int64)
    return np.sort(bounds).reshape(-1, 2)


class RunCounter:
    """Counts the bases of [start, stop) that lie in sorted, disjoint runs (R, 2)."""

    def __init__(self, runs: np.ndarray) -> None:
        # An empty run first: every place has one at or before it.
        self.runs = np.concatenate([[[-1, -1]], runs])
        self.total = np.cumsum(self.runs[:, 1] - self.runs[:, 0])

    def count(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """(N,) int64 of N intervals."""
        return self._before(stop) - self._before(start)

    def _before(self, place: np.ndarray) -> np.ndarray:
        run = np.searchsorted(self.runs[:, 0], place, side="right") - 1
        return self.total[run] - np.maximum(self.runs[run, 1] - place, 0)


def open_genome(source: DnaSource) -> Genome:
    """The genome of a source; opened again, it costs nothing.

    ValueError with file, place and reason for malformed files.
    """
    return _open(tuple((str(path.absolute()), _version(path)) for path in source.files))


# Of a file: its path with links resolved, its size and its time.
_Version = tuple[str, int, int]


def _version(path: Path) -> _Version:
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


@lru_cache(maxsize=4)
def _open(stats: tuple[tuple[str, _Version], ...]) -> Genome:
    bases = bytearray()
    contigs: list[tuple[str, int, int]] = []
    # Where each contig starts.
    places: dict[str, str] = {}
    digest = hashlib.blake2b(digest_size=8)
    for number, (file, version) in enumerate(stats):
        earlier = len(contigs)
        for piece in read_codes(Path(file)):
            if isinstance(piece, bytes):
                name, length, _ = contigs[-1]
                contigs[-1] = (name, length + len(piece), number)
                digest.update(piece)
                bases += piece
                continue
            name = piece[0]
            place = f"{file}, {piece[1]}"
            if name in places:
                raise ValueError(
                    f"{place}: a second contig {name!r}; the first is in {places[name]}"
                )
            if len(contigs) == _MOST_CONTIGS:
                most = f"{_MOST_CONTIGS:,} contigs, the most that a genome can have"
                raise ValueError(f"{place}: more than {most}")
            places[name] = place
            contigs.append((name, 0, number))
        if len(contigs) == earlier:
            raise ValueError(f"{file}: no sequence in it")
        if _version(Path(file)) != version:
            raise ValueError(
                f"{file}: changed while it was being read; open it again once it is complete"
            )
    for name, length, _ in contigs:
        if not length:
            raise ValueError(
                f"{places[name]}: contig {name!r} is empty: no base follows its header"
            )
    names_and_lengths = [contig[:2] for contig in contigs]
    digest.update(json.dumps(names_and_lengths).encode())
    return Genome(contigs, digest.hexdigest(), tuple(path for path, _ in stats), bases)
