"""Genomes: contigs with random access to their bases.

A file is parsed once into a store of one byte a base (sources.py) with a table of contigs; a read is a slice of it, which is
memory-mapped: all workers read the same pages. That of small files is in memory. Larger ones are stored under the cache folder,
keyed by paths, link targets, sizes and times. A store is complete or absent, and verified by its digests when it is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

import numpy as np

from modalities.dna.sources import DnaSource, read_codes
from modalities.dna.tokenizers import CODE, SOFT, UNKNOWN
from zoo.errors import did_you_mean
from zoo.files import data_folder, new_folder, seal, sealed_damage

_FORMAT = 3  # raise when the store or the reading of files changes
_SMALL = 8 * 2**20  # bytes of files that are held in memory
_MOST_CONTIGS = 1 << 22  # each takes some hundred bytes of memory
_PIECE = 1 << 24  # bases in which unknown ones are looked for at once


class Table(TypedDict):
    """What a store says of its bases."""

    contigs: list[tuple[str, int, int]]  # name, length, number of the file
    fingerprint: str


@dataclass(frozen=True)
class Contig:
    """One sequence. unknown: (n, 2) int64, the runs [start, stop) of UNKNOWN codes, sorted and disjoint."""

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

    fingerprint: 16 hex digits; equal ones mean equal names, lengths, bases and soft masks, in whatever format.
    files: absolute paths. starts: where each contig begins, and unknown: (n, 2) runs of UNKNOWN codes, with contigs laid one
    after the other.
    """

    def __init__(self, table: Table, files: tuple[str, ...], store: Path | bytes) -> None:
        self.files, self.fingerprint = files, table["fingerprint"]
        self._path = store if isinstance(store, Path) else None
        self._store = np.frombuffer(store, np.uint8) if isinstance(store, bytes) else _mapped(store)
        starts = np.cumsum([0, *(length for _, length, _ in table["contigs"])])
        self.unknown = _unknown_runs(self._store, starts)
        first = np.searchsorted(self.unknown[:, 0], starts)  # run of each contig
        self.contigs = tuple(
            Contig(name, length, files[file], self.unknown[first[n] : first[n + 1]] - starts[n])
            for n, (name, length, file) in enumerate(table["contigs"])
        )
        self._by_name = {contig.name: contig for contig in self.contigs}
        self.starts = {contig.name: int(at) for contig, at in zip(self.contigs, starts, strict=False)}
        self.known = sum(contig.known for contig in self.contigs)

    def __getstate__(self) -> dict[str, object]:  # a worker maps a stored file again
        return {key: value for key, value in self.__dict__.items() if key != "_store" or self._path is None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self._path is not None:
            self._store = _mapped(self._path)

    def __getitem__(self, name: str) -> Contig:
        """ValueError for an unknown name; it names the nearest."""
        if name not in self._by_name:
            names = list(self._by_name)
            few = f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            raise ValueError(f"no contig {name!r}; {did_you_mean(str(name), names)}there are {len(names)}: {few}")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Codes 0..4 of the bases [start, stop) of a contig, uint8, a fresh array. ValueError beyond its ends."""
        return self._read(name, start, stop) & CODE

    def soft_masked(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Which bases of [start, stop) are lower-case in the file (repeats, by convention): bool."""
        return self._read(name, start, stop) & SOFT != 0

    def _read(self, name: str, start: int, stop: int | None) -> np.ndarray:
        contig = self[name]
        at = self.starts[name]
        stop = contig.length if stop is None else stop
        if not 0 <= start <= stop <= contig.length:
            raise ValueError(f"bases [{start}, {stop}) are outside contig {name!r}, which has {contig.length:,}")
        return self._store[at + start : at + stop]


def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _unknown_runs(codes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n, 2) int64 runs of UNKNOWN of contigs that begin at `starts`, laid one after the other; looked for in pieces."""
    edges, before = [], np.zeros(1, bool)
    for at in range(0, len(codes), _PIECE):
        unknown = codes[at : at + _PIECE] & CODE == UNKNOWN
        edges.append(at + np.flatnonzero(np.diff(unknown, prepend=before)))
        before = unknown[-1:]
    edges.append(np.full(int(before[0]), len(codes)))
    inner = starts[1:-1]
    crossed = inner[(codes[inner - 1] & CODE == UNKNOWN) & (codes[inner] & CODE == UNKNOWN)]  # a run ends, one begins
    return np.sort(np.concatenate([*edges, crossed, crossed]).astype(np.int64)).reshape(-1, 2)


class RunCounter:
    """Counts the bases of [start, stop) that lie in sorted, disjoint runs (R, 2)."""

    def __init__(self, runs: np.ndarray) -> None:
        self.runs = np.concatenate([[[-1, -1]], runs])  # an empty run first: every place has one at or before it
        self.total = np.cumsum(self.runs[:, 1] - self.runs[:, 0])

    def count(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """(N,) int64 of N intervals."""
        return self._before(stop) - self._before(start)

    def _before(self, place: np.ndarray) -> np.ndarray:
        run = np.searchsorted(self.runs[:, 0], place, side="right") - 1
        return self.total[run] - np.maximum(self.runs[run, 1] - place, 0)


def open_genome(source: DnaSource, *, cache_dir: str | os.PathLike[str] | None = None) -> Genome:
    """The genome of a source; opened again, it costs nothing. ValueError with file, place and reason for malformed files.
    cache_dir: folder of its store; None: memory for files of 8 MiB or fewer, else <data folder>/cache."""
    stats = tuple((str(path.absolute()), _version(path)) for path in source.files)
    if cache_dir is None:
        if sum(size for _, (_, size, _) in stats) <= _SMALL:
            return _open(stats, None)
        cache_dir = data_folder() / "cache"
    return _open(stats, str(Path(cache_dir).absolute()))


_Version = tuple[str, int, int]  # of a file: its path with links resolved; its size; its time
_Files = tuple[tuple[str, _Version], ...]  # absolute paths


def _version(path: Path) -> _Version:
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


def _digest(values: object) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=4)
def _open(stats: _Files, cache_dir: str | None) -> Genome:
    files = tuple(path for path, _ in stats)
    if cache_dir is None:
        pieces: list[bytes] = []
        table = _parse(stats, pieces.append)
        return Genome(table, files, b"".join(pieces))
    versions = _digest([_FORMAT, *(version for _, version in stats)])
    folder = Path(cache_dir) / f"genome-{_digest(files)}-{versions}"
    stored = _stored(folder)
    table = stored or _write_store(folder, stats)
    if stored is None:
        for old in folder.parent.glob(f"genome-{_digest(files)}-*"):
            if old != folder:  # of these files as they were
                shutil.rmtree(old, ignore_errors=True)
    return Genome(table, files, folder / "bases.u8")


def _stored(folder: Path) -> Table | None:
    """The table of a store whose digests fit its content; a damaged one is removed."""
    if not folder.is_dir():  # nothing to remove, least of all what another process is about to rename to this
        return None
    if not sealed_damage(folder, ("bases.u8", "contigs.json")):
        return json.loads((folder / "contigs.json").read_text(encoding="utf-8"))
    warnings.warn(f"{folder} is damaged: the files of the genome are read again", stacklevel=2)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _write_store(folder: Path, stats: _Files) -> Table:
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(new_folder(folder, "contigs.json"))
        except OSError as error:
            raise OSError(
                f"cannot store the bases of {stats[0][0]}: {folder.parent} cannot be written ({error.strerror}); "
                "set cache_dir or $PRIORZOO_DATA to a writable folder"
            ) from error
        with open(temporary / "bases.u8", "wb") as file:
            table = _parse(stats, file.write)
        (temporary / "contigs.json").write_text(json.dumps(table), encoding="utf-8")
        seal(temporary)
    return table


def _parse(stats: _Files, write: Callable[[bytes], object]) -> Table:
    """The table of all contigs of all files; their bases go to `write`."""
    names: list[str] = []
    sizes: list[tuple[int, int]] = []  # length, and number of the file, of each
    places: dict[str, str] = {}  # where each contig starts
    digest = hashlib.blake2b(digest_size=8)
    for number, (name, version) in enumerate(stats):
        count = len(names)
        for piece in read_codes(Path(name)):
            if not isinstance(piece, bytes):
                contig, place = piece[0], f"{name}, {piece[1]}"
                if contig in places:
                    raise ValueError(f"{place}: a second contig {contig!r}; the first is in {places[contig]}")
                if len(names) == _MOST_CONTIGS:
                    raise ValueError(f"{place}: more than {_MOST_CONTIGS:,} contigs, the most that a genome can have")
                places[contig] = place
                names.append(contig)
                sizes.append((0, number))
            else:
                sizes[-1] = sizes[-1][0] + len(piece), number
                digest.update(piece)
                write(piece)
        if len(names) == count:
            raise ValueError(f"{name}: no sequence in it")
        if _version(Path(name)) != version:
            raise ValueError(f"{name}: changed while it was being read; open it again once it is complete")
    contigs = [(name, *size) for name, size in zip(names, sizes, strict=True)]
    for name, length, _ in contigs:
        if not length:
            raise ValueError(f"{places[name]}: contig {name!r} is empty: no base follows its header")
    digest.update(json.dumps([contig[:2] for contig in contigs]).encode())
    return {"contigs": contigs, "fingerprint": digest.hexdigest()}
