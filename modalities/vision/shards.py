"""WebDataset shards: where they are, how many samples they hold, reading them in order or by index.

A shard is a tar in which members of one sample follow one another under one name: 00017.jpg, 00017.cls. Its label is
a `.cls` member (a whole number as text) or the field "label" of a `.json` member.

Ranks and workers share an epoch by samples, so the number of samples in every shard must be known. It comes from
`index.json` beside the shards ({"classes", "samples", "size", "shards": [{"file", "samples", "sha256"}]}), which
`write_index` writes, or, for local shards, from their headers.

Shards are files or URLs of `SCHEMES`. Commands (webdataset's "pipe:") are never run: a spec may come from someone else's
file. Members are bytes, also those that webdataset's decoders would unpickle. `tarfile` takes the end of a file, and a damaged
header, for the end of the archive, and allocates what headers claim; here an archive ends in its mark, or is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import webdataset
from webdataset.tariterators import group_by_keys

from modalities.files import data_folder
from modalities.vision.images import EXTENSIONS, BadImage, ImageSet
from modalities.vision.objects import Objects, parse_objects
from zoo.files import file_sha256, replacing_path, write_json
from zoo.inputs import LARGEST_JSON, parse_json, read_json

SCHEMES = ("http", "https", "hf", "gs")  # of which webdataset runs no shell
MOST_SAMPLES = 1 << 30  # of a shard
LARGEST_MEMBER, LARGEST_OTHER = 1 << 30, 1 << 20  # bytes of a file, and of a long name or a pax header
_REMOTE = re.compile(rf"^({'|'.join(SCHEMES)})://")
_OTHER = re.compile(r"^\s*(pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset leaves out
_LABELS = ("cls", "json", "mask.png")  # members that hold what is to be told
_TAIL = 64  # bytes at the end of other members


# ------------------------------------------------------------------------------------------------ tars


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:  # of which iterating a tar would hide most
            if bytes(buf) == bytes(tarfile.BLOCKSIZE):
                raise  # ends the iteration
            damaged = len(buf) == tarfile.BLOCKSIZE
            what = f"a damaged header ({error})" if damaged else "no end-of-archive mark: it is cut short"
            raise tarfile.ReadError(what) from error
        most = LARGEST_MEMBER if header.isreg() else LARGEST_OTHER
        if not 0 <= header.size <= most:
            raise tarfile.ReadError(f"{header.name[:80]!r} has {header.size:,} bytes; expected 0 to {most:,}")
        return header


def _members(stream: IO[bytes], place: str, *, read: bool) -> Iterator[dict[str, Any]]:
    """{"fname", "data", "__url__"} of every regular member, as `group_by_keys` takes them.

    data: its bytes; without `read`, of an uncompressed file, its (offset, size). Raises ValueError for a tar that cannot be
    read, has a sparse member, which unpacks to more than there is, or has no end.
    """
    errors = (tarfile.TarError, ValueError, OverflowError, IndexError)  # the last three: numbers in extended headers
    try:
        with tarfile.open(fileobj=stream, mode="r|*" if read else "r:", tarinfo=_Header) as tar:
            for member in tar:
                name, size = member.name, member.size
                if member.issparse():
                    raise tarfile.ReadError(f"{name[:80]!r} is a sparse file; archive it without holes")
                if not 0 <= size <= LARGEST_MEMBER:  # as a pax header may say
                    raise tarfile.ReadError(f"{name[:80]!r} has {size:,} bytes; at most {LARGEST_MEMBER:,}")
                if member.isreg() and not _META.match(name):
                    content = tar.extractfile(member) if read else None
                    data = content.read() if content else (member.offset_data, size)
                    yield {"fname": name, "data": data, "__url__": place}
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every member otherwise
            if tar.fileobj is not None and tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("no end-of-archive mark: it is cut short")
    except errors as error:
        what = str(error) if isinstance(error, errors[0]) else f"a damaged header ({error})"
        raise ValueError(f"shard {place} cannot be read: {what}") from error


def scan(path: Path) -> list[dict[str, Any]]:
    """Per sample of a local tar {"__key__", extension: (offset, size)}, by its headers. Raises ValueError."""
    with path.open("rb") as stream:
        samples = list(group_by_keys(_members(stream, str(path), read=False)))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


# ------------------------------------------------------------------------------------------------ shards


def _check_place(place: str) -> str:
    """A path or URL that may be opened. Raises ValueError for a scheme outside SCHEMES."""
    other = _OTHER.match(place)
    if other and not _REMOTE.match(place):
        raise ValueError(
            f"{place!r}: {other[1]!r} cannot be opened; expected a path or {', '.join(f'{s}://…' for s in SCHEMES)}"
        )
    return place


def _open(place: str) -> IO[bytes]:
    """A path or URL for reading. Paths bypass webdataset, which looks for schemes in them."""
    return webdataset.gopen(place) if _REMOTE.match(_check_place(place)) else Path(place).open("rb")


@dataclass(frozen=True)
class ShardSet:
    """Shards with their sizes; samples are numbered in shard order.

    Attributes:
        classes: where the index names them.
        hashes: sha256 of each shard, where the index has it; empty: of none.
    """

    spec: str
    urls: tuple[str, ...]
    counts: tuple[int, ...]
    classes: tuple[str, ...] | None
    fingerprint: str
    hashes: tuple[str | None, ...] = ()

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of each shard's first sample."""
        return tuple(accumulate(self.counts, initial=0))[:-1]

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, sample) of samples start…stop−1 of one shard, read in order from its beginning."""
        url, end = self.urls[shard], start
        with _open(url) as stream:
            samples = group_by_keys(_members(stream, url, read=True))
            for sample in islice(samples, start, stop):
                end += 1
                if end == self.counts[shard] and next(samples, None) is not None:
                    raise ValueError(f"shard {url} has more samples than the {end} that its index says")
                yield self.starts[shard] + end - 1, sample
        if end != stop:
            raise ValueError(f"shard {url} ends after {end} samples; its index says {self.counts[shard]}")


class Entry(NamedTuple):
    """A shard in an index; without a sha256 a local one is known by a digest of its members."""

    file: str
    samples: int
    sha256: str | None = None


def open_shards(spec: str, pattern: str) -> ShardSet:
    """The shards of a folder with index.json, or of a pattern with braces such as "a/train-{000..127}.tar".

    Raises FileNotFoundError for missing shards; ValueError for a scheme outside SCHEMES, and for an unknown number of
    samples.
    """
    place, _, named = pattern.partition("?index=")
    folder = Path(_check_place(place)).is_dir()
    urls = [] if folder else webdataset.shardlists.expand_urls(place)
    directory = place if folder else posixpath.dirname(urls[0])
    entries, classes = _read_index(named or posixpath.join(directory, "index.json")) or ({}, ())
    if not entries and named:
        raise FileNotFoundError(f"no index {named}")
    if folder:
        if not entries:
            raise FileNotFoundError(f"source {spec!r}: {place} has no index.json; give its tars as a pattern")
        urls = [str(Path(place) / file) for file in entries]
    local = [not _REMOTE.match(_check_place(url)) for url in urls]
    for url, here in zip(urls, local, strict=True):
        if here and not Path(url).is_file():
            raise FileNotFoundError(f"source {spec!r}: no shard {url}")
    by_name = {_file_name(file): entry for file, entry in entries.items()}
    if all(_file_name(url) in by_name for url in urls):
        chosen = [by_name[_file_name(url)] for url in urls]
    elif not all(local):
        raise ValueError(
            f"source {spec!r}: the number of samples in these remote shards is not known. Put an index.json beside them "
            "(modalities.vision.shards.write_index writes one from a local copy), or name a local one: '…tar?index=PATH'"
        )
    else:
        chosen = [Entry(Path(url).name, len(scan(Path(url)))) for url in urls]
    counts = tuple(entry.samples for entry in chosen)
    if not sum(counts):
        raise ValueError(f"source {spec!r}: its {len(urls)} shards hold no sample")
    contents = [
        [entry.file, entry.samples, entry.sha256 or (_digest(Path(url)) if here else None)]
        for entry, url, here in zip(chosen, urls, local, strict=True)
    ]
    fingerprint = hashlib.blake2b(json.dumps(contents).encode(), digest_size=16).hexdigest()
    hashes = tuple(entry.sha256 for entry in chosen)
    return ShardSet(spec, tuple(urls), counts, tuple(classes) or None, fingerprint, hashes)


def _file_name(url: str) -> str:
    """The name of the tar in a path or URL."""
    return ([*re.findall(r"[^/\s?]+\.tar(?:\.gz)?", url)] or [posixpath.basename(url)])[-1]


def _read_index(place: str) -> tuple[dict[str, Entry], list[str]] | None:
    """Entries by file, and classes, of an index; None where there is none. Raises ValueError for what is no index."""
    try:
        if not _REMOTE.match(_check_place(place)):
            content = read_json(place)
        else:
            with _open(place) as stream:
                content = parse_json(stream.read(LARGEST_JSON + 1), place)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        if not _REMOTE.match(place):
            raise
        return None  # an HTTP error, or the page that a server sends instead
    try:
        rows = [Entry(one["file"], one["samples"], one.get("sha256")) for one in content["shards"]]
        for file, samples, sha256 in rows:
            if not isinstance(file, str) or not file or "\0" in file:
                raise ValueError(f"file={file!r:.80}: expected the name of a tar")
            if type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
                raise ValueError(f"samples={samples!r:.80} of {file!r:.80}: expected 0 to {MOST_SAMPLES:,}")
            if not isinstance(sha256, str | None):
                raise ValueError(f"sha256={sha256!r:.80} of {file!r:.80}: expected hex digits")
        classes = content.get("classes") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError(f"classes={classes!r:.80}: expected a list of names")
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{place} is no index of shards: {type(error).__name__}: {error}") from error
    return {entry.file: entry for entry in rows}, classes


def _digest(path: Path) -> str:
    """Cheaper than hashing a whole local tar: a hash of its members' names and sizes, of labels and masks, and of the last
    bytes of others, where a PNG has its checksum and a JPEG pixels."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        for sample in scan(path):
            sizes = {name: place[1] for name, place in sample.items() if name != "__key__"}
            digest.update(json.dumps([sample["__key__"], sizes]).encode() + b"\n")
            for name, (start, size) in sorted((name, sample[name]) for name in sizes):
                read = size if name in _LABELS else min(size, _TAIL)
                digest.update(os.pread(stream.fileno(), read, start + size - read))
    return digest.hexdigest()


def write_index(folder: str | Path, classes: Sequence[str] = ()) -> Path:
    """Count and hash the *.tar of a folder into its index.json; returns that file's path."""
    folder = Path(folder)
    shards: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.tar")):
        shards.append({"file": path.name, "samples": len(scan(path)), "sha256": file_sha256(path)})
    index = {"classes": list(classes), "samples": sum(shard["samples"] for shard in shards), "shards": shards}
    write_json(folder / "index.json", index)
    return folder / "index.json"


def _local_copy(url: str, sha256: str | None) -> Path:
    """A shard as a local file: remote ones are copied once, into the data folder's `cache`.

    Raises ValueError for a copy, new or old, with another hash than the given one.
    """
    if not _REMOTE.match(_check_place(url)):
        return Path(url)
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    copy = data_folder() / "cache" / f"{name}-{_file_name(url)}"
    if copy.is_file():
        _check_hash(copy, sha256, f"{copy}, an earlier copy of {url}: delete it to copy again;")
        return copy
    with replacing_path(copy) as partial:  # ranks, and machines, may copy at once
        with partial.open("wb") as stream, _open(url) as source:
            shutil.copyfileobj(source, stream, 2**20)
        _check_hash(partial, sha256, f"{url}, to be copied to {copy}:")
    return copy


def _check_hash(path: Path, sha256: str | None, what: str) -> None:
    if sha256 is not None and (digest := file_sha256(path)) != sha256:
        raise ValueError(f"{what} its sha256 is {digest[:12]}…, the index says {sha256[:12]}…")


def packed(strings: Iterable[str]) -> np.ndarray:
    """Strings in one buffer: forked workers share it, while they would copy a list of objects page by page."""
    return np.array([os.fsencode(string) for string in strings])


class TarImages(ImageSet):
    """Shards by index, in their order; only what is requested is read. One file is open at a time."""

    def __init__(self, shards: ShardSet) -> None:
        self.spec, self.classes, self.fingerprint = shards.spec, shards.classes, shards.fingerprint
        hashes = shards.hashes or [None] * len(shards.urls)
        self.shards, self.paths = shards, [_local_copy(*shard) for shard in zip(shards.urls, hashes, strict=True)]
        samples = []
        for path, count in zip(self.paths, shards.counts, strict=True):
            found = scan(path)
            if len(found) != count:
                raise ValueError(
                    f"source {shards.spec!r}: {len(found)} samples found in {path}, its index says {count}"
                )
            samples += found
        self.keys = packed(sample.pop("__key__") for sample in samples)
        self.extensions = sorted({extension for sample in samples for extension in sample})
        numbers = {extension: number for number, extension in enumerate(self.extensions)}
        # Members (M, 3) as extension, offset, size; those of sample n are rows ends[n]…ends[n + 1]−1.
        members = [(numbers[extension], *place) for sample in samples for extension, place in sample.items()]
        self.members = np.array(members, dtype=np.int64).reshape(-1, 3)
        self.ends = np.cumsum([0, *map(len, samples)])
        self.shard_ends = np.cumsum(shards.counts)
        self._open: tuple[int, IO[bytes]] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        return f"{self.shards.urls[self._shard(index)]}:{os.fsdecode(self.keys[index])}"

    def read(self, index: int) -> tuple[bytes, int]:
        sample = self[index]
        return sample_image(sample), read_label(sample)

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        sample = self[index]
        return sample_image(sample), read_objects(sample)

    def group(self, index: int) -> str:
        """The field "group" of the `.json` member, or "font" as "glyphs" has it; "" without."""
        try:
            fields = _fields(self[index])
        except ValueError:
            return ""
        return str(fields.get("group") or fields.get("font") or "")

    def _shard(self, number: int) -> int:
        return int(np.searchsorted(self.shard_ends, number, side="right"))

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The sample as webdataset gives it: {"__key__", extension: bytes}."""
        shard = self._shard(number)
        sample: dict[str, Any] = {"__key__": os.fsdecode(self.keys[number])}
        if self._open is None or self._open[0] != shard:
            if self._open is not None:
                self._open[1].close()
            self._open = (shard, self.paths[shard].open("rb", buffering=0))
        for extension, offset, size in self.members[self.ends[number] : self.ends[number + 1]].tolist():
            # pread: forked workers share the file's position
            sample[self.extensions[extension]] = os.pread(self._open[1].fileno(), size, offset)
        return sample

    def __getstate__(self) -> dict[str, Any]:  # an open file is not shared between processes
        return {**self.__dict__, "_open": None}


# ------------------------------------------------------------------------------------------------ samples


def _names(sample: dict[str, Any]) -> list[str]:
    return sorted(name for name in sample if not name.startswith("__"))


def _fields(sample: dict[str, Any]) -> dict[str, Any]:
    """The fields of the `.json` member; {} without. Raises ValueError."""
    fields = parse_json(sample.get("json", b"{}"), "the member json")
    return fields if isinstance(fields, dict) else {}


def sample_image(sample: dict[str, Any]) -> bytes:
    """The image member of a sample. Raises BadImage "no image"."""
    for extension, data in sample.items():
        if not extension.startswith(("__", "mask.")) and f".{extension.rpartition('.')[2]}" in EXTENSIONS:
            return data
    raise BadImage("no image", f"members {_names(sample)}")


def read_label(sample: dict[str, Any]) -> int:
    """The label of a sample. Raises BadImage "no label", "bad label"."""
    try:
        label = int(sample["cls"]) if "cls" in sample else _fields(sample).get("label")
    except ValueError as error:
        raise BadImage("bad label", str(error)) from None
    if label is None:
        raise BadImage("no label", f"members {_names(sample)}")
    if type(label) is not int:  # True is an int to isinstance
        raise BadImage("bad label", f"label {label!r} is not a whole number")
    return label


def read_objects(sample: dict[str, Any]) -> Objects:
    """The objects of a sample: "objects" and "group" of its `.json` member, and its mask, a member `.mask.png`.

    Raises BadImage, as `parse_objects`.
    """
    try:
        fields = _fields(sample)
    except ValueError as error:
        raise BadImage("bad objects", str(error)) from None
    return parse_objects(fields.get("objects"), fields.get("group"), sample.get("mask.png"))
