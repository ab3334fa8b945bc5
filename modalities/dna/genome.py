"""Genomes: contigs with random access to their bases.

Whatever the format, a file is parsed once into a store of one byte a base (formats.py) with a table of contigs; a read is a
slice of it. Small genomes stay in memory. Larger ones are stored under the cache folder, keyed by paths, link targets, sizes
and times, and memory-mapped: all workers and processes read the same pages. A store is complete or absent.

Bases stream through; what stays in memory meanwhile, contigs and their runs of unknown bases, has limits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.bases import AMBIGUITY, CODE, NORMAL, SOFT, UNKNOWN, URACIL, runs
from modalities.dna.formats import Start, read_codes
from modalities.dna.sources import DnaSource
from modalities.files import data_folder, new_folder
from zoo.naming import did_you_mean

__all__ = ["Contig", "Genome", "RunCounter", "open_genome"]

_FORMAT = 1  # raise when the store or the reading of files changes
_IN_MEMORY = 32 * 2**20  # bases, whatever the size of the files that they are compressed in
_MOST_CONTIGS = 1 << 22  # each takes some hundred bytes
_MOST_RUNS = 1 << 24  # of unknown bases, 16 bytes each


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
    files: absolute paths. report: what was converted on reading ("3 IUPAC codes read as N, 120 U as T"), or "".
    """

    def __init__(self, table: dict[str, Any], unknown: np.ndarray, files: tuple[str, ...], store: Path | np.ndarray):
        ends = np.cumsum([0, *(row[3] for row in table["contigs"])])
        unknown.flags.writeable = False
        self.files, self.fingerprint, self.report = files, table["fingerprint"], table["report"]
        self.contigs = tuple(
            Contig(name, length, files[file], unknown[ends[i] : ends[i + 1]])
            for i, (name, length, file, _) in enumerate(table["contigs"])
        )
        starts = np.cumsum([0, *(contig.length for contig in self.contigs)])
        self._places = {contig.name: (contig, int(at)) for contig, at in zip(self.contigs, starts, strict=False)}
        self.bases = int(starts[-1])
        self.known = sum(contig.known for contig in self.contigs)
        self._from = store
        self._store = _mapped(store)

    def __getstate__(self) -> dict[str, Any]:  # a worker maps the file again
        return {key: value for key, value in self.__dict__.items() if key != "_store"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._store = _mapped(self._from)

    def __getitem__(self, name: str) -> Contig:
        """ValueError for an unknown name; it names the nearest."""
        return self._place(name)[0]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Codes 0..4 of the bases [start, stop) of a contig, uint8, a fresh array. ValueError beyond its ends."""
        return self._read(name, start, stop) & CODE

    def soft_masked(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Which bases of [start, stop) are lower-case in the file (repeats, by convention): bool."""
        return self._read(name, start, stop) & SOFT != 0

    def _read(self, name: str, start: int, stop: int | None) -> np.ndarray:
        contig, at = self._place(name)
        stop = contig.length if stop is None else stop
        if not 0 <= start <= stop <= contig.length:
            raise ValueError(f"bases [{start}, {stop}) are outside contig {name!r}, which has {contig.length:,}")
        return self._store[at + start : at + stop]

    def _place(self, name: str) -> tuple[Contig, int]:
        if name not in self._places:
            names = [contig.name for contig in self.contigs]
            few = f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            raise ValueError(f"no contig {name!r}; {did_you_mean(str(name), names)}there are {len(names)}: {few}")
        return self._places[name]


def open_genome(source: DnaSource, *, cache_dir: str | os.PathLike[str] | None = None) -> Genome:
    """The genome of a source; opened again, it costs nothing.

    Args:
        cache_dir: folder of its store. None: in memory where it has 2²⁵ bases or fewer, else <data folder>/cache.

    Raises:
        ValueError: with file, line and reason for malformed files; with the limit for more contigs or runs of unknown bases
            than a genome can have here.
        OSError: where the store cannot be written.
    """
    stats = tuple((str(path.absolute()), _version(path)) for path in source.files)
    folder = str(Path(data_folder() / "cache" if cache_dir is None else cache_dir).absolute())
    # Files that are large, or stored already, are not read in vain.
    if (
        cache_dir is None
        and sum(size for _, (_, size, _) in stats) <= _IN_MEMORY
        and not _place(stats, folder).is_dir()
    ):
        with contextlib.suppress(_Large):
            return _open(stats, None)
    return _open(stats, folder)


class RunCounter:
    """Counts the bases of [start, stop) that lie in sorted, disjoint runs (R, 2)."""

    def __init__(self, runs: np.ndarray) -> None:
        self.runs = np.concatenate([[[-1, -1]], runs])  # an empty run first: every place has one at or before it
        self.total = np.cumsum(self.runs[:, 1] - self.runs[:, 0])

    def __bool__(self) -> bool:
        return len(self.runs) > 1

    def count(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """(N,) int64 of N intervals."""
        return self._before(stop) - self._before(start)

    def _before(self, place: np.ndarray) -> np.ndarray:
        run = np.searchsorted(self.runs[:, 0], place, side="right") - 1
        return self.total[run] - np.maximum(self.runs[run, 1] - place, 0)


# ------------------------------------------------------------------------------------------------ the store


_Version = tuple[str, int, int]  # of a file: its path with links resolved; its size; its time
_Files = tuple[tuple[str, _Version], ...]  # absolute paths


def _place(stats: _Files, cache_dir: str) -> Path:
    """The store of these files as they are now."""
    versions = _digest([_FORMAT, *(version for _, version in stats)])
    return Path(cache_dir) / f"genome-{_digest([path for path, _ in stats])}-{versions}"


class _Large(Exception):
    """A genome has more bases than memory is to hold."""


def _version(path: Path) -> _Version:
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


@lru_cache(maxsize=4)
def _open(stats: _Files, cache_dir: str | None) -> Genome:
    files = tuple(path for path, _ in stats)
    if cache_dir is None:
        memory = bytearray()

        def keep(piece: bytes) -> None:
            memory.extend(piece)
            if len(memory) > _IN_MEMORY:
                raise _Large

        table, unknown = _parse(stats, keep)
        return Genome(table, unknown, files, np.frombuffer(memory, np.uint8))
    folder = _place(stats, cache_dir)
    stored = _stored(folder)
    if stored is None:
        stored = _write_store(folder, stats)
        for old in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
            if old != folder:  # of these files as they were
                shutil.rmtree(old, ignore_errors=True)
    return Genome(*stored, files, folder / "bases.u8")


def _mapped(store: Path | np.ndarray) -> np.ndarray:
    array = np.asarray(np.memmap(store, np.uint8, mode="r")) if isinstance(store, Path) else store
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _digest(values: Any) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).hexdigest()


def _stored(folder: Path) -> tuple[dict[str, Any], np.ndarray] | None:
    """The table and unknown runs of a complete store; a damaged one is removed."""
    if not folder.is_dir():  # nothing to remove, least of all what another process is about to rename to this
        return None
    try:
        table = json.loads((folder / "contigs.json").read_text(encoding="utf-8"))
        unknown = np.load(folder / "unknown.npy")
        bases, count = (sum(row[column] for row in table["contigs"]) for column in (1, 3))
        if (folder / "bases.u8").stat().st_size == bases and len(unknown) == count:
            return table, unknown
    except (FileNotFoundError, EOFError, ValueError, KeyError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _write_store(folder: Path, stats: _Files) -> tuple[dict[str, Any], np.ndarray]:
    with contextlib.ExitStack() as stack:
        try:
            temporary = stack.enter_context(new_folder(folder, "contigs.json"))
        except OSError as error:
            raise OSError(
                f"cannot store the bases of {stats[0][0]}: {folder.parent} cannot be written ({error.strerror}); "
                "set cache_dir or $PRIORZOO_DATA to a writable folder"
            ) from error
        with open(temporary / "bases.u8", "wb") as file:
            table, unknown = _parse(stats, file.write)
        np.save(temporary / "unknown.npy", unknown)
        (temporary / "contigs.json").write_text(json.dumps(table), encoding="utf-8")
    return table, unknown


def _parse(stats: _Files, write: Callable[[bytes], object]) -> tuple[dict[str, Any], np.ndarray]:
    """(table for JSON, unknown runs of all contigs) of all files; their bases go to `write`."""
    contigs = _Contigs(write)
    for number, (name, version) in enumerate(stats):
        path = Path(name)
        for piece in read_codes(path):
            if isinstance(piece, Start):
                contigs.start(piece, number, path)
            else:
                contigs.add(piece)
        contigs.end(path)
        if _version(path) != version:
            raise ValueError(f"{path}: changed while it was being read; open it again once it is complete")
    return contigs.table(), np.concatenate([np.empty((0, 2), np.int64), *contigs.unknown])


class _Contigs:
    """The table of contigs, filled piece by piece."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.write = write
        self.rows: list[list[Any]] = []  # name, length, number of the file, number of unknown runs
        self.unknown: list[np.ndarray] = []
        self.num_runs = 0
        self.places: dict[str, str] = {}
        self.digest = hashlib.blake2b(digest_size=8)
        self.ambiguous = self.uracil = 0
        self.open_place: str | None = None

    def start(self, start: Start, file: int, path: Path) -> None:
        self._close(path)
        place = f"{path}, {start.place}"
        if start.name in self.places:
            raise ValueError(f"{place}: a second contig {start.name!r}; the first is in {self.places[start.name]}")
        self.places[start.name] = self.open_place = place
        if len(self.rows) == _MOST_CONTIGS:
            raise ValueError(f"{place}: more than {_MOST_CONTIGS:,} contigs, the most that a genome can have")
        self.rows.append([start.name, 0, file, 0])

    def end(self, path: Path) -> None:
        """End of a file."""
        if self.open_place is None:
            raise ValueError(f"{path}: no sequence in it")
        self._close(path)
        self.open_place = None

    def _close(self, path: Path) -> None:
        if self.open_place is not None and self.rows[-1][1] == 0:
            raise ValueError(f"{self.open_place}: contig {self.rows[-1][0]!r} is empty: no base follows its header")

    def add(self, piece: bytes) -> None:
        """The next bases of the current contig."""
        if any(code in piece for code in (AMBIGUITY, URACIL, AMBIGUITY | SOFT, URACIL | SOFT)):
            self.ambiguous += piece.count(AMBIGUITY) + piece.count(AMBIGUITY | SOFT)
            self.uracil += piece.count(URACIL) + piece.count(URACIL | SOFT)
            piece = piece.translate(NORMAL)
        row = self.rows[-1]
        if UNKNOWN in piece or UNKNOWN | SOFT in piece:
            found = runs(np.frombuffer(piece, np.uint8) & CODE == UNKNOWN) + row[1]
            if row[3] and self.unknown[-1][-1, 1] == found[0, 0]:  # continues the last piece's
                self.unknown[-1][-1, 1] = found[0, 1]
                found = found[1:]
            if len(found):
                self.unknown.append(found)
                row[3] += len(found)
                self.num_runs += len(found)
                if self.num_runs > _MOST_RUNS:
                    raise ValueError(
                        f"{self.open_place}: more than {_MOST_RUNS:,} runs of unknown bases, the most that a genome can have"
                    )
        row[1] += len(piece)
        self.digest.update(piece)
        self.write(piece)

    def table(self) -> dict[str, Any]:
        self.digest.update(json.dumps([row[:2] for row in self.rows]).encode())
        counts = ((self.ambiguous, "IUPAC codes read as N"), (self.uracil, "U as T"))
        report = ", ".join(f"{count:,} {what}" for count, what in counts if count)
        return {"contigs": self.rows, "fingerprint": self.digest.hexdigest(), "report": report}
