"""What sources of every modality share: finding the files of a spec, and the split by hash."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.errors import did_you_mean
from zoo.files import matching_files, near_file

# What compression adds to a suffix; bgzip's files are gzip's.
_COMPRESSED = ("", ".gz", ".bgz")


@dataclass(frozen=True)
class HashSplit:
    """Holds out a share of a source's items by a hash of what identifies each, so that an item
    stays in its split whatever is added or moved.

    Attributes:
        key: of the hash. Never change one: shipped weights were trained on what it leaves to
            training.
        fraction: the held-out share.
    """

    key: bytes
    fraction: float

    def rank(self, identity: bytes) -> int:
        """A number from 0 to 2⁶⁴ − 1, as if drawn for the item: 64 bits of BLAKE2b."""
        digest = hashlib.blake2b(identity, digest_size=8, key=self.key).digest()
        return int.from_bytes(digest, "big")

    def is_heldout(self, identity: bytes) -> bool:
        return self.rank(identity) < self.fraction * 2**64


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file's name ends so, in any case, before ".gz" or ".bgz"."""
    return name.lower().removesuffix(".bgz").removesuffix(".gz").endswith(suffixes)


def find_files(
    spec: str, place: str, suffixes: tuple[str, ...], names: Sequence[str]
) -> list[Path]:
    """The files of `place`, a path or glob in a source's spec.

    FileNotFoundError names the nearest file; ValueError for a file without one of these suffixes.

    names: what else a spec may be, for the error.
    """
    if os.path.isdir(place):
        example = _glob_of(place, suffixes)
        raise FileNotFoundError(
            f"source {spec!r}: {place} is a folder; name its files, such as '{example}'"
        )
    # A name may have brackets in it.
    if os.path.isfile(place):
        paths = [Path(place)]
    elif any(mark in place for mark in "*?["):
        paths = matching_files(place)
        if not paths:
            raise FileNotFoundError(f"source {spec!r}: no file matches {place}")
    else:
        hint = near_file(place, lambda name: has_suffix(name, suffixes))
        hint = hint or did_you_mean(place, names, cutoff=0.4)
        expected = f"expected a file, {', '.join(names)}"
        raise FileNotFoundError(f"source {spec!r}: no file {place!r}; {hint}{expected}")
    for path in paths:
        if not has_suffix(path.name, suffixes):
            expected = f"{', '.join(suffixes)}, with or without .gz or .bgz"
            raise ValueError(f"source {spec!r}: {path} is none of {expected}")
    return paths


def _glob_of(folder: str, suffixes: tuple[str, ...]) -> str:
    """A glob of the files of a folder: those of the first suffix that it has."""
    pattern = f"{glob.escape(folder.rstrip('/'))}/*"
    for compressed in _COMPRESSED:
        for suffix in suffixes:
            if any(glob.iglob(pattern + suffix + compressed)):
                return pattern + suffix + compressed
    return pattern + suffixes[0]
