"""SHA-256 of files that numbers are measured on: what is stored is keyed by the bytes, since names,
sizes and times may stay as they were when other data takes a file's place."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zoo.files import data_folder, file_sha256, read_object, write_json

# Bytes of files that are digested anew each time, rather than looked up.
UNCACHED = 1 << 26
# A file that changed as recently may change again within a tick of its file system's clock.
SETTLED_NS = 2_000_000_000
# Bytes of a cache: that of some ten million files.
_LARGEST_CACHE = 1 << 31


class FileVersion(NamedTuple):
    """What changes with a file's content, by its file system; `changed_ns` also where a tool sets
    the modification time back."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int


def file_version(file: str | os.PathLike[str] | int) -> FileVersion:
    """The version of a file, or of an open one by its descriptor."""
    status = os.stat(file)
    return FileVersion(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def content_digests(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Hex SHA-256 of every file, in order.

    <data folder>/cache/digests keeps those of many bytes, and a digest counts as long as the file's
    version is the same. ValueError for a file that changes meanwhile.
    """
    files = [os.path.realpath(path) for path in paths]
    versions = {file: file_version(file) for file in files}
    total = sum(version.size for version in versions.values())
    cache = None
    if total > UNCACHED:
        cache = _cache_of(files)
    known = {} if cache is None else _read_cache(cache)
    digests: dict[str, str] = {}
    for file, version in versions.items():
        entry = known.get(file)
        if entry is not None and entry[:-1] == list(version):
            digests[file] = entry[-1]
            continue
        digests[file] = file_sha256(file)
        if file_version(file) != version:
            raise ValueError(
                f"{file}: changed while it was being read; open it again once it is complete"
            )
    if cache is not None:
        _write_cache(cache, versions, digests, known)
    return [digests[file] for file in files]


def _cache_of(files: list[str]) -> Path:
    """The cache of files by the folder that all are in."""
    folder = os.path.commonpath(files)
    name = hashlib.blake2b(os.fsencode(folder), digest_size=16).hexdigest()
    return data_folder() / "cache" / "digests" / f"{name}.json"


def _read_cache(cache: Path) -> dict[str, list]:
    """[*version, digest] by file; {} where there is no cache, or a damaged one."""
    known: dict[str, list] = {}
    with suppress(OSError, ValueError):
        for file, entry in read_object(cache, most=_LARGEST_CACHE).items():
            if isinstance(entry, list) and entry and isinstance(entry[-1], str):
                known[file] = entry
    return known


def _write_cache(
    cache: Path,
    versions: Mapping[str, FileVersion],
    digests: Mapping[str, str],
    known: Mapping[str, list],
) -> None:
    """Keep the digests of settled files with those of others; a disk that is full, or that cannot
    be written, keeps none."""
    settled = time.time_ns() - SETTLED_NS
    entries = dict(known)
    for file, version in versions.items():
        if max(version.modified_ns, version.changed_ns) < settled:
            entries[file] = [*version, digests[file]]
    if entries != known:
        with suppress(OSError):
            write_json(cache, entries)
