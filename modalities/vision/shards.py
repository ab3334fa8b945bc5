"""WebDataset shards: tars in which the members of a sample follow one another under one name, 00017.jpg, 00017.cls.

A label is a `.cls` member (a whole number as text) or the field "label" of a `.json` member. Ranks and workers share an epoch
by samples, so every shard's number of samples must be known: from `index.json` beside the shards, which `write_index` writes,
{"classes", "samples", "shards": [{"file", "samples", "sha256"}]}, or from the headers of local shards.

Shards are files or URLs of `SCHEMES`. webdataset's commands ("pipe:") are never run, and its decoders, some of which unpickle,
are not used. `tarfile` takes a damaged header for the end of an archive and allocates what headers claim; here both are errors.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import webdataset
from webdataset.tariterators import base_plus_ext, group_by_keys

from modalities.vision.images import EXTENSIONS, BadImage, ImageSet
from modalities.vision.objects import Objects, parse_objects
from zoo.files import LARGEST_JSON, file_sha256, parse_json, write_json

SCHEMES = ("http", "https", "hf", "gs")  # of which webdataset runs no shell
MOST_SAMPLES = 1 << 30  # of a shard
LARGEST_MEMBER, LARGEST_OTHER = 1 << 30, 1 << 20  # bytes of a file, and of a long name or a pax header
_REMOTE = re.compile(rf"^({'|'.join(SCHEMES)})://")
_OTHER = re.compile(r"^\s*(pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_META = re.compile(r"__[^/]*__($|/)")  # members that webdataset leaves out
_LABELS = ("cls", "json")
_TAIL = 64  # bytes at the end of other members that their digest covers

Members = Mapping[str, Any]  # of a sample by extension: bytes, in `scan` (offset, size); and "__key__", "__url__"


# ------------------------------------------------------------------------------------------------ tars


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if bytes(buf) == bytes(tarfile.BLOCKSIZE):
                raise  # ends the iteration, as every HeaderError does
            damaged = len(buf) == tarfile.BLOCKSIZE
            what = f"a damaged header ({error})" if damaged else "no end-of-archive mark: it is cut short"
            raise tarfile.ReadError(what) from error
        _check_size(header, LARGEST_MEMBER if header.isreg() else LARGEST_OTHER)
        return header


def _check_size(header: tarfile.TarInfo, most: int) -> None:
    if not 0 <= header.size <= most:
        raise tarfile.ReadError(f"{header.name[:80]!r} has {header.size:,} bytes; expected 0 to {most:,}")


def _members(stream: IO[bytes], place: str, *, read: bool) -> Iterator[dict[str, Any]]:
    """{"fname", "data", "__url__"} of every regular member; without `read`, its (offset, size) in place of its bytes.

    Raises ValueError for a tar that cannot be read, has no end, has a name twice, or has a sparse member, which unpacks to
    more than it holds.
    """
    names: set[tuple[str, str]] = set()
    errors = (tarfile.TarError, ValueError, OverflowError, IndexError)  # the last three: numbers in extended headers
    try:
        with tarfile.open(fileobj=stream, mode="r|*" if read else "r:", tarinfo=_Header) as tar:
            for member in tar:
                if member.issparse():
                    raise tarfile.ReadError(f"{member.name[:80]!r} is a sparse file; archive it without holes")
                _check_size(member, LARGEST_MEMBER)  # again: a pax header may have changed it
                key, extension = base_plus_ext(member.name)
                if member.isreg() and not _META.match(member.name) and key is not None:
                    if (name := (key, extension.lower())) in names:  # readers see extensions in lower case
                        raise tarfile.ReadError(f"it has {member.name[:80]!r} twice")
                    names.add(name)
                    content = tar.extractfile(member) if read else None
                    data = content.read() if content else (member.offset_data, member.size)
                    yield {"fname": member.name, "data": data, "__url__": place}
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every member otherwise
            if tar.fileobj is not None and tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("no end-of-archive mark: it is cut short")
    except errors as error:
        what = str(error) if isinstance(error, tarfile.TarError) else f"a damaged header ({error})"
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
        schemes = ", ".join(f"{scheme}://…" for scheme in SCHEMES)
        raise ValueError(f"{place!r}: {other[1]!r} cannot be opened; expected a path or {schemes}")
    return place


def _open(place: str) -> IO[bytes]:
    """A path or URL for reading. Paths bypass webdataset, which looks for schemes in them."""
    return webdataset.gopen(place) if _REMOTE.match(_check_place(place)) else Path(place).open("rb")


class Entry(NamedTuple):
    """A shard in an index; without a sha256 a local one is known by a digest of its members."""

    file: str
    samples: int
    sha256: str | None = None


@dataclass(frozen=True)
class ShardSet:
    """Shards with their sizes; samples are numbered in shard order. classes: where an index has them."""

    spec: str
    urls: tuple[str, ...]
    counts: tuple[int, ...]
    classes: tuple[str, ...] | None
    fingerprint: str

    def __len__(self) -> int:
        return sum(self.counts)

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[int, Members]]:
        """(number, sample) of samples start…stop−1 of one shard, read in order from its beginning."""
        url, end, first = self.urls[shard], start, sum(self.counts[:shard])
        with _open(url) as stream:
            samples = group_by_keys(_members(stream, url, read=True))
            for sample in islice(samples, start, stop):
                end += 1
                if end == self.counts[shard] and next(samples, None) is not None:
                    raise ValueError(f"shard {url} has more samples than the {end} that its index says")
                yield first + end - 1, sample
        if end != stop:
            raise ValueError(f"shard {url} ends after {end} samples; its index says {self.counts[shard]}")


def open_shards(spec: str, pattern: str) -> ShardSet:
    """The shards of a folder with index.json, or of a pattern with braces such as "a/train-{000..127}.tar".

    Raises FileNotFoundError for missing shards, ValueError for a scheme outside SCHEMES and an unknown number of samples.
    """
    folder = Path(_check_place(pattern)).is_dir()
    urls = [] if folder else webdataset.shardlists.expand_urls(pattern)
    index = posixpath.join(pattern if folder else posixpath.dirname(urls[0]), "index.json")
    entries, classes = _read_index(index)
    if not entries and folder:
        raise FileNotFoundError(f"source {spec!r}: no index {index}; tars without one are named by a pattern")
    if folder:
        urls = [str(Path(pattern) / file) for file in entries]
    local = [not _REMOTE.match(_check_place(url)) for url in urls]
    for url, here in zip(urls, local, strict=True):
        if here and not Path(url).is_file():
            raise FileNotFoundError(f"source {spec!r}: no shard {url}")
    by_name = {posixpath.basename(file): entry for file, entry in entries.items()}
    if all(posixpath.basename(url) in by_name for url in urls):
        chosen = [by_name[posixpath.basename(url)] for url in urls]
    elif all(local):
        chosen = [Entry(Path(url).name, len(scan(Path(url)))) for url in urls]
    else:
        why = "the number of samples in these remote shards is not known"
        way_out = "put an index.json beside them, which modalities.vision.shards.write_index writes from a local copy"
        raise ValueError(f"source {spec!r}: {why}; {way_out}")
    counts = tuple(entry.samples for entry in chosen)
    if not sum(counts):
        raise ValueError(f"source {spec!r}: its {len(urls)} shards hold no sample")
    contents = [
        [entry.file, entry.samples, entry.sha256 or (_digest(Path(url)) if here else None)]
        for entry, url, here in zip(chosen, urls, local, strict=True)
    ]
    fingerprint = hashlib.blake2b(json.dumps(contents).encode(), digest_size=16).hexdigest()
    return ShardSet(spec, tuple(urls), counts, tuple(classes) or None, fingerprint)


def _read_index(place: str) -> tuple[dict[str, Entry], list[str]]:
    """Entries by file, and classes, of an index; nothing where there is none. Raises ValueError for what is no index."""
    try:
        with _open(place) as stream:
            content = parse_json(stream.read(LARGEST_JSON + 1), place)
    except (OSError, ValueError) as error:  # of a server: an HTTP error, or the page that it sends instead
        if _REMOTE.match(place) or isinstance(error, FileNotFoundError):
            return {}, []
        raise
    try:
        entries = [Entry(row["file"], row["samples"], row.get("sha256")) for row in content["shards"]]
        classes = content.get("classes") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError(f"classes={classes!r:.80}: expected a list of names")
        for file, samples, sha256 in entries:
            named = isinstance(file, str) and file and "\0" not in file and isinstance(sha256, str | None)
            if not named or type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
                row = f"file={file!r:.80}, samples={samples!r:.80}, sha256={sha256!r:.80}"
                raise ValueError(f"{row}: expected a tar's name, 0 to {MOST_SAMPLES:,} and hex digits")
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{place} is no index of shards: {type(error).__name__}: {error}") from error
    return {entry.file: entry for entry in entries}, classes


def _digest(path: Path) -> str:
    """Of a tar's member names and sizes, labels and masks, and the last bytes of other members: cheaper than all of it."""
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
    entries = [Entry(path.name, len(scan(path)), file_sha256(path)) for path in sorted(folder.glob("*.tar"))]
    shards = [entry._asdict() for entry in entries]
    index = {"classes": list(classes), "samples": sum(entry.samples for entry in entries), "shards": shards}
    write_json(folder / "index.json", index)
    return folder / "index.json"


# ------------------------------------------------------------------------------------------------ samples


class TarImages(ImageSet):
    """Shards by index, in their order; only what is requested is read."""

    def __init__(self, shards: ShardSet) -> None:
        self.spec, self.classes, self.fingerprint = shards.spec, shards.classes, shards.fingerprint
        self.samples: list[tuple[Path, str, Members]] = []  # file, name, (offset, size) by extension
        for url, count in zip(shards.urls, shards.counts, strict=True):
            if _REMOTE.match(url):
                raise ValueError(
                    f"source {shards.spec!r}: held-out shards are read by index; expected files, got {url}"
                )
            samples = scan(Path(url))
            if len(samples) != count:
                what = f"{len(samples)} samples found in {url}"
                raise ValueError(f"source {shards.spec!r}: {what}, its index says {count}")
            self.samples += [(Path(url), f"{url}:{sample.pop('__key__')}", sample) for sample in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples[index][1]

    def read(self, index: int) -> tuple[bytes, int]:
        sample = self._sample(index)
        return sample_image(sample), read_label(sample)

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        sample = self._sample(index)
        return sample_image(sample), read_objects(sample)

    def group(self, index: int) -> str:
        """The field "group" of the `.json` member, or "font" as "glyphs" has it; "" without."""
        try:
            fields = _fields(self._sample(index))
        except ValueError:
            return ""
        return str(fields.get("group") or fields.get("font") or "")

    def _sample(self, index: int) -> Members:
        path, _, places = self.samples[index]
        with path.open("rb") as stream:
            return {name: os.pread(stream.fileno(), size, offset) for name, (offset, size) in places.items()}


def _fields(sample: Members) -> dict[str, Any]:
    """The fields of the `.json` member; {} without. Raises ValueError."""
    fields = parse_json(sample.get("json", b"{}"), "the member json")
    return fields if isinstance(fields, dict) else {}


def sample_image(sample: Members) -> bytes:
    """The image member of a sample. Raises BadImage "no image"."""
    for extension, data in sample.items():
        if not extension.startswith(("__", "mask.")) and f".{extension.rpartition('.')[2]}" in EXTENSIONS:
            return data
    raise BadImage("no image")


def read_label(sample: Members) -> int:
    """The label of a sample. Raises BadImage "no label", "bad label"."""
    try:
        label = int(sample["cls"]) if "cls" in sample else _fields(sample).get("label")
    except ValueError as error:
        raise BadImage("bad label", str(error)) from None
    if label is None:
        raise BadImage("no label")
    if type(label) is not int:  # True is an int to isinstance
        raise BadImage("bad label", f"label {label!r} is not a whole number")
    return label


def read_objects(sample: Members) -> Objects:
    """The objects of a sample: "objects" and "group" of its `.json` member. Raises BadImage."""
    try:
        fields = _fields(sample)
    except ValueError as error:
        raise BadImage("bad objects", str(error)) from None
    return parse_objects(fields.get("objects"), fields.get("group"))
