"""WebDataset shards: tars in which the members of a sample follow one another under one name,
00017.jpg, 00017.cls.

A label is a `.cls` member (a whole number as text) or the field "label" of a `.json` member. Ranks
and workers share an epoch by samples, so every shard's number of samples must be known: from
`index.json` beside the shards, {"classes": [NAME, …], "shards": [{"file", "samples", "sha256"},
…]}, where only "file" and "samples" are needed, or from the headers of all.

Hard links and symlinks are followed inside their shard. A sample whose picture or label is a link
to something else is skipped. `tarfile` reads headers alone. It takes a damaged one for the end of
an archive; here that is an error. webdataset's decoders, some of which unpickle, are not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import webdataset
from webdataset.tariterators import base_plus_ext

from modalities.digests import FileVersion, content_digests, file_version
from modalities.vision.errors import BadImage
from modalities.vision.images import EXTENSIONS, ImageSet
from modalities.vision.links import Place, TarLinks
from modalities.vision.objects import Objects, parse_objects
from zoo.files import parse_json, read_json

# Samples of a shard.
MOST_SAMPLES = 1 << 30
# Members that webdataset leaves out.
_META = re.compile(r"__[^/]*__($|/)")
_LABELS = ("cls", "json")
# Bytes at the end of other members that their digest covers.
_TAIL = 64

# Among a sample's members, what its links to no file of the tar name; a name that no member has.
_BROKEN = "__broken_link__"

# The content of a sample's members by extension.
Members = Mapping[str, bytes]


class Sample(NamedTuple):
    """Where a sample's members are in its shard: (offset, size) by extension; and its links that
    lead to no file there."""

    path: Path
    key: str
    places: dict[str, Place]
    broken: list[str]
    version: FileVersion

    @property
    def name(self) -> str:
        return f"{self.path}:{self.key}"

    def load(self) -> Members:
        """Raises ValueError where the shard is another one than that which was scanned."""
        with self.path.open("rb") as stream:
            version = file_version(stream.fileno())
            # Some network file systems number an unchanged file anew.
            if version[:2] != self.version[:2]:
                raise ValueError(
                    f"shard {self.path} changed while it was being read: start the command again"
                )
            members = {
                name: os.pread(stream.fileno(), size, offset)
                for name, (offset, size) in self.places.items()
            }
        if self.broken:
            members[_BROKEN] = ", ".join(self.broken).encode("utf-8", "surrogateescape")
        return members


def scan(path: Path) -> list[Sample]:
    """The samples of a tar; links are followed inside it. Raises ValueError for one that is
    damaged, has a name twice, or a sparse member."""
    try:
        with path.open("rb") as stream:
            version = file_version(stream.fileno())
            members = _read_headers(stream)
        return _samples_of(path, members, version)
    except (tarfile.TarError, ValueError, OverflowError, IndexError, MemoryError) as error:
        raise ValueError(f"shard {path} cannot be read: {error}") from error


def _read_headers(stream: IO[bytes]) -> list[tarfile.TarInfo]:
    """The members of a tar. Raises tarfile.ReadError for a damaged one."""
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        members = list(tar)
        stream.seek(tar.offset)
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("a damaged header, or no end-of-archive mark: it is cut short")
    for member in members:
        if member.issparse() or member.size < 0:
            raise tarfile.ReadError(f"{member.name[:80]!r} is a sparse file, or has no size")
    return members


def _samples_of(
    path: Path, members: Sequence[tarfile.TarInfo], version: FileVersion
) -> list[Sample]:
    links = TarLinks(members)
    samples: list[Sample] = []
    names: set[tuple[str, str]] = set()
    for member in members:
        is_link = member.islnk() or member.issym()
        key, extension = base_plus_ext(member.name)
        if not (member.isreg() or is_link) or _META.match(member.name) or key is None:
            continue
        extension = extension.lower()
        if (key, extension) in names:
            raise tarfile.ReadError(f"it has {member.name[:80]!r} twice")
        names.add((key, extension))
        if not samples or samples[-1].key != key:
            samples.append(Sample(path, key, {}, [], version))
        place = (member.offset_data, member.size)
        target = links.place(member.name) if is_link else place
        if target is None:
            samples[-1].broken.append(f"{member.name[:80]} → {member.linkname[:80]}")
        else:
            samples[-1].places[extension] = target
    return samples


class Entry(NamedTuple):
    """A shard in an index; one without a sha256 is known by a digest of its members."""

    file: str
    samples: int
    sha256: str | None = None


class Shards(ImageSet):
    """Shards with their sizes; samples are numbered in shard order. classes: where an index has
    them.

    fingerprint: of `indexed` shards of their bytes; else of what an index says, or of members'
    names, sizes and labels, which costs little where training streams large shards.
    """

    def __init__(
        self, spec: str, entries: Mapping[Path, Entry], classes: Sequence[str] = ()
    ) -> None:
        self.spec = spec
        self.files = tuple(entries)
        self.classes = tuple(classes) or None
        self.counts = tuple(entry.samples for entry in entries.values())
        self._entries = tuple(entries.values())
        self._samples: list[Sample] = []
        if not sum(self.counts):
            raise ValueError(f"source {spec!r}: its {len(entries)} shards hold no sample")

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        contents = [
            [entry.file, entry.samples, entry.sha256 or _digest_of_members(path)]
            for path, entry in zip(self.files, self._entries, strict=True)
        ]
        return _digest_of(contents)

    def __len__(self) -> int:
        return sum(self.counts)

    def samples(self, shard: int) -> list[Sample]:
        """Raises ValueError where they are not as many as the index says."""
        samples = scan(self.files[shard])
        count = self.counts[shard]
        if len(samples) != count:
            raise ValueError(
                f"shard {self.files[shard]} has {len(samples)} samples, its index says {count}"
            )
        return samples

    def indexed(self) -> Shards:
        """These shards with the places of all samples read, which reading by index needs."""
        digests = content_digests(self.files)
        self._samples = []
        for shard, digest in enumerate(digests):
            samples = self.samples(shard)
            self._samples += samples
            stated = self._entries[shard].sha256
            if stated and stated.lower() != digest:
                warnings.warn(
                    f"shard {self.files[shard]} has another SHA-256 than its index says: it was "
                    "replaced or damaged, or the index is old",
                    stacklevel=2,
                )
        # Classes are compared by name: other names are other labels.
        self.fingerprint = _digest_of([self.classes, self.counts, digests])
        return self

    def stream(self, shard: int, start: int, stop: int) -> Iterator[tuple[int, str, Members]]:
        """(number, name, members) of samples start…stop−1 of one shard."""
        samples_before = sum(self.counts[:shard])
        samples = self.samples(shard)[start:stop]
        for number, sample in enumerate(samples, samples_before + start):
            yield number, sample.name, sample.load()

    def name(self, index: int) -> str:
        return self._samples[index].name

    def read(self, index: int) -> tuple[bytes, int]:
        members = self._samples[index].load()
        return sample_image(members), read_label(members)

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        members = self._samples[index].load()
        return sample_image(members), read_objects(members)

    def group(self, index: int) -> str:
        """The field "group" of the `.json` member, or "font" as "glyphs" has it; "" without."""
        try:
            fields = _fields(self._samples[index].load())
        except ValueError:
            return ""
        return str(fields.get("group") or fields.get("font") or "")


def open_shards(spec: str, pattern: str) -> Shards:
    """The shards of a folder with index.json, or of a pattern with braces such as
    "a/train-{000..127}.tar".

    Raises FileNotFoundError for missing shards, ValueError for a wrong index and for shards without
    a sample.
    """
    folder, paths = _expand(pattern)
    index = folder / "index.json"
    entries, classes = _read_index(index)
    if not entries and not paths:
        raise FileNotFoundError(
            f"source {spec!r}: no index {index}; tars without one are named by a pattern"
        )
    paths = paths or [folder / file for file in entries]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"source {spec!r}: no shard {path}")
    by_path = {(folder / file).resolve(): entry for file, entry in entries.items()}
    if not all(path.resolve() in by_path for path in paths):
        by_path = {path.resolve(): Entry(path.name, len(scan(path))) for path in paths}
    return Shards(spec, {path: by_path[path.resolve()] for path in paths}, classes)


def listed_classes(pattern: str) -> tuple[str, ...]:
    """The classes that the index of a folder or pattern lists; () without an index or a list."""
    folder, _ = _expand(pattern)
    _, classes = _read_index(folder / "index.json")
    return tuple(classes)


def _expand(pattern: str) -> tuple[Path, list[Path]]:
    """(folder, shards that a pattern names); none where it is a folder."""
    folder = Path(pattern)
    if folder.is_dir():
        return folder, []
    paths = [Path(place) for place in webdataset.shardlists.expand_urls(pattern)]
    return paths[0].parent if paths else folder, paths


def _read_index(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """Entries by file, and classes; nothing where there is no index. Raises ValueError for what is
    none."""
    if not path.is_file():
        return {}, []
    content = read_json(path)
    try:
        entries = [
            Entry(row["file"], row["samples"], row.get("sha256")) for row in content["shards"]
        ]
        classes = content.get("classes") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError(f"classes={classes!r:.80}: expected a list of names")
        for entry in entries:
            _check_entry(entry)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no index of shards: {type(error).__name__}: {error}"
        ) from error
    return {entry.file: entry for entry in entries}, classes


def _check_entry(entry: Entry) -> None:
    file, samples, sha256 = entry
    named = isinstance(file, str) and file and "\0" not in file
    counted = type(samples) is int and 0 <= samples <= MOST_SAMPLES
    if not named or not counted or not isinstance(sha256, str | None):
        row = f"file={file!r:.80}, samples={samples!r:.80}, sha256={sha256!r:.80}"
        raise ValueError(f"{row}: expected a tar's name, 0 to {MOST_SAMPLES:,} and hex digits")


def _digest_of(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _digest_of_members(path: Path) -> str:
    """Of member names and sizes, labels, and the last bytes of other members: cheaper than the
    whole file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        for sample in scan(path):
            sizes = {name: size for name, (_, size) in sample.places.items()}
            digest.update(json.dumps([sample.key, sizes, *sample.broken]).encode() + b"\n")
            for name, (start, size) in sorted(sample.places.items()):
                tail = size if name in _LABELS else min(size, _TAIL)
                digest.update(os.pread(stream.fileno(), tail, start + size - tail))
    return digest.hexdigest()


def _fields(members: Members) -> Mapping[str, object]:
    """The fields of the `.json` member; {} without. Raises BadImage "bad json"."""
    try:
        fields = parse_json(members.get("json", b"{}"), "the member json")
    except ValueError as error:
        raise BadImage("bad json", str(error)) from None
    return fields if isinstance(fields, dict) else {}


def sample_image(members: Members) -> bytes:
    """The image of a sample. Raises BadImage "no image"."""
    for extension, data in members.items():
        suffix = "." + extension.rpartition(".")[2]
        if suffix in EXTENSIONS and not extension.startswith("mask."):
            return data
    raise _missing(members, "no image")


def _missing(members: Members, reason: str) -> BadImage:
    """The error for a sample that lacks a member, as a link may have named it."""
    if _BROKEN not in members:
        return BadImage(reason)
    return BadImage("broken link in the tar", members[_BROKEN].decode("utf-8", "replace"))


def read_label(members: Members) -> int:
    """The label of a sample. Raises BadImage "no label", "bad label", "bad json"."""
    label: object = members["cls"] if "cls" in members else _fields(members).get("label")
    if isinstance(label, bytes):
        with contextlib.suppress(ValueError):
            label = int(label)
    if label is None:
        raise _missing(members, "no label")
    # Not `isinstance`, to which True is an int.
    if type(label) is not int:
        raise BadImage("bad label", f"{label!r} is not a whole number")
    return label


def read_objects(members: Members) -> Objects:
    """The objects of a sample: "objects" and "group" of its `.json` member. Raises BadImage."""
    fields = _fields(members)
    if "json" not in members and _BROKEN in members:
        raise _missing(members, "no objects")
    return parse_objects(fields.get("objects"), fields.get("group"))
