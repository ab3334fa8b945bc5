"""WebDataset shards: where they are, how many samples they hold, reading them in order or by index.

A shard is a tar in which members of one sample follow one another under one name: 00017.jpg, 00017.cls. Its label is
a `.cls` member (a whole number as text) or the field "label" of a `.json` member.

Ranks and workers share an epoch by samples, so the number of samples in every shard must be known. It comes from
`index.json` beside the shards ({"classes", "samples", "size", "shards": [{"file", "samples", "sha256"}]}, or what
webdataset's `widsindex` writes), from timm's `_info.json`, or, for local shards, from their headers. `write_index` writes
an index.json.

Shards are files or URLs of `SCHEMES`. Commands (webdataset's "pipe:") are never run: a spec may come from someone else's
file. Members are bytes: those that webdataset's decoders would unpickle are members like any other.
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
from typing import IO, Any

import numpy as np
import webdataset
from webdataset.tariterators import group_by_keys

from modalities.files import data_folder
from modalities.vision.images import EXTENSIONS, BadImage, ImageSet
from modalities.vision.objects import Objects, parse_objects
from modalities.vision.tars import scan, stream_members
from zoo.files import file_sha256, replacing_path, write_json
from zoo.inputs import LARGEST_JSON, parse_json, read_json

__all__ = [
    "PackedStrings",
    "ShardSet",
    "TarImages",
    "open_shards",
    "read_label",
    "read_objects",
    "sample_image",
    "write_index",
]

SCHEMES = ("http", "https", "hf", "gs")  # of which webdataset runs no shell
_REMOTE = re.compile(rf"^({'|'.join(SCHEMES)})://")
MOST_SAMPLES = 1 << 30  # of a shard
_LABELS = ("cls", "json", "mask.png")  # members that hold what is to be told
_TAIL = 64  # bytes at the end of other members
_OTHER = re.compile(r"^\s*(pipe:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)


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
        url, found = self.urls[shard], 0
        tar_error = tarfile.TarError  # looked up now: the module is gone when interpreter exit closes an open reader
        with _open(url) as stream:
            samples = group_by_keys(stream_members(stream, url))
            try:
                for position, sample in enumerate(islice(samples, start, stop), start):
                    found += 1
                    if position + 1 == self.counts[shard] and next(samples, None) is not None:
                        raise ValueError(f"shard {url} has more samples than the {position + 1} that its index says")
                    yield self.starts[shard] + position, sample
            except tar_error as error:
                raise ValueError(f"shard {url} cannot be read: {error}") from error
        if found != stop - start:
            raise ValueError(f"shard {url} ends after {start + found} samples; its index says {self.counts[shard]}")


def open_shards(spec: str, pattern: str) -> ShardSet:
    """The shards of a folder with index.json, or of a pattern with braces such as "a/train-{000..127}.tar".

    Raises FileNotFoundError for missing shards; ValueError for a scheme outside SCHEMES, and for an unknown number of
    samples.
    """
    place, _, query = pattern.partition("?index=")
    if Path(_check_place(place)).is_dir():
        index = _read_json(query or str(Path(place) / "index.json"))
        if index is None:
            raise FileNotFoundError(f"source {spec!r}: {place} has no index.json; give its tars as a pattern")
        index = _as_index(index, query or str(Path(place) / "index.json"))
        urls = [str(Path(place) / entry["file"]) for entry in index["shards"]]
    else:
        urls = webdataset.shardlists.expand_urls(place)
        index = _find_index(urls, query)
    local = [not _REMOTE.match(_check_place(url)) for url in urls]
    for url, here in zip(urls, local, strict=True):
        if here and not Path(url).is_file():
            raise FileNotFoundError(f"source {spec!r}: no shard {url}")
    known = {_file_name(entry["file"]): entry for entry in index["shards"]} if index else {}
    if all(_file_name(url) in known for url in urls):
        entries = [known[_file_name(url)] for url in urls]
    elif not all(local):
        raise ValueError(
            f"source {spec!r}: the number of samples in these remote shards is not known. Put an index.json beside them "
            "(modalities.vision.shards.write_index writes one from a local copy), or name a local one: '…tar?index=PATH'"
        )
    else:
        entries = [_entry(Path(url)) for url in urls]
    if not sum(entry["samples"] for entry in entries):
        raise ValueError(f"source {spec!r}: its {len(urls)} shards hold no sample")
    classes = tuple(index["classes"]) or None if index else None
    hashes = tuple(entry.get("sha256") for entry in entries)
    contents = [
        sha256 or entry.get("members") or (_digest(url) if here else None)
        for sha256, entry, url, here in zip(hashes, entries, urls, local, strict=True)
    ]
    content = json.dumps([[e["file"], e["samples"], found] for e, found in zip(entries, contents, strict=True)])
    digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    return ShardSet(spec, tuple(urls), tuple(int(entry["samples"]) for entry in entries), classes, digest, hashes)


def _file_name(url: str) -> str:
    """The name of the tar in a path or URL."""
    return ([*re.findall(r"[^/\s?]+\.tar(?:\.gz)?", url)] or [posixpath.basename(url)])[-1]


def _find_index(urls: Sequence[str], named: str) -> dict[str, Any] | None:
    if named:
        index = _read_json(named)
        if index is None:
            raise FileNotFoundError(f"no index {named}")
        return _as_index(index, named)
    folder = posixpath.dirname(urls[0])
    for name in ("index.json", "_info.json"):
        index = _read_json(posixpath.join(folder, name))
        if index is not None:
            return _as_index(index, posixpath.join(folder, name))
    return None


def _as_index(found: Any, place: str) -> dict[str, Any]:
    """An index of ours, timm's {"splits": {…: {"filenames", "shard_lengths"}}} or webdataset's {"shardlist"} as ours.

    Raises ValueError for what is none of them, and for entries that cannot be right.
    """
    if not isinstance(found, dict) or not {"shards", "shardlist", "splits"} & found.keys():
        what = sorted(map(str, found)) if isinstance(found, dict) else repr(found)[:80]
        raise ValueError(f"{place} is no index of shards: expected 'shards', 'shardlist' or 'splits' among {what}")
    try:
        if "shards" in found:
            entries = [{"sha256": None, **entry} for entry in found["shards"]]
        elif "shardlist" in found:
            entries = [
                {"file": entry["url"], "samples": entry["nsamples"], "sha256": None} for entry in found["shardlist"]
            ]
        else:
            pairs = [p for s in found["splits"].values() for p in zip(s["filenames"], s["shard_lengths"], strict=True)]
            entries = [{"file": file, "samples": samples, "sha256": None} for file, samples in pairs]
        for entry in entries:
            _check_entry(entry)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{place} is no index of shards: {type(error).__name__}: {error}") from error
    classes = found.get("classes") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{place}: classes={classes!r:.80}: expected a list of names")
    return {"shards": entries, "classes": classes}


def _check_entry(entry: dict[str, Any]) -> None:
    file, samples, sha256 = entry["file"], entry["samples"], entry["sha256"]
    if not isinstance(file, str) or not file or "\0" in file:
        raise ValueError(f"file={file!r:.80}: expected the name of a tar")
    if type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
        raise ValueError(f"samples={samples!r:.80} of {file!r:.80}: expected a whole number from 0 to {MOST_SAMPLES:,}")
    if sha256 is not None and not isinstance(sha256, str):
        raise ValueError(f"sha256={sha256!r:.80} of {file!r:.80}: expected hex digits")


def _read_json(place: str) -> Any:
    if not _REMOTE.match(_check_place(place)):
        return read_json(place) if Path(place).is_file() else None
    try:
        with _open(place) as stream:
            return parse_json(stream.read(LARGEST_JSON + 1), place)
    except (OSError, ValueError):  # missing: an HTTP error, or the page that a server sends instead
        return None


def _entry(path: Path) -> dict[str, Any]:
    """A local shard's entry of an index, from its headers."""
    samples = scan(path)
    return {"file": path.name, "samples": len(samples), "members": _digest(path, samples)}


def _digest(path: str | Path, samples: Sequence[dict[str, Any]] | None = None) -> str:
    """Cheaper than hashing a whole local tar: a hash of its members' names and sizes, of labels and masks, and of the last
    bytes of others, where a PNG has its checksum and a JPEG pixels."""
    digest = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as stream:
        for sample in scan(Path(path)) if samples is None else samples:
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


def local_copy(url: str, sha256: str | None = None) -> Path:
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
    if sha256 is None:
        return
    found = file_sha256(path)
    if found != sha256:
        raise ValueError(f"{what} its sha256 is {found[:12]}…, the index says {sha256[:12]}…")


class PackedStrings(Sequence[str]):
    """Strings in two buffers: forked workers share them, while they would copy a list of objects page by page."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [os.fsencode(string) for string in strings]
        self.data, self.ends = b"".join(encoded), np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"string {number} is outside 0..{len(self) - 1}")
        return os.fsdecode(self.data[self.ends[number] : self.ends[number + 1]])


class TarImages(ImageSet):
    """Shards by index, in their order; only what is requested is read. One file is open at a time."""

    def __init__(self, shards: ShardSet) -> None:
        self.spec, self.classes, self.fingerprint = shards.spec, shards.classes, shards.fingerprint
        hashes = shards.hashes or [None] * len(shards.urls)
        self.shards, self.paths = shards, [local_copy(*shard) for shard in zip(shards.urls, hashes, strict=True)]
        samples = []
        for path, count in zip(self.paths, shards.counts, strict=True):
            found = scan(path)
            if len(found) != count:
                raise ValueError(
                    f"source {shards.spec!r}: {len(found)} samples found in {path}, its index says {count}"
                )
            samples += found
        members = [[(ext, *place) for ext, place in s.items() if ext != "__key__"] for s in samples]
        self.keys = PackedStrings(sample["__key__"] for sample in samples)
        self.extensions = sorted({ext for sample in members for ext, _, _ in sample})
        numbers = {ext: number for number, ext in enumerate(self.extensions)}
        # Members (M, 3) as extension, offset, size; those of sample n are rows ends[n]…ends[n + 1]−1.
        flat = [(numbers[ext], offset, size) for sample in members for ext, offset, size in sample]
        self.members = np.array(flat, dtype=np.int64).reshape(-1, 3)
        self.ends = np.cumsum([0, *map(len, members)])
        self.shard_ends = np.cumsum(shards.counts)
        self._open: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def shard(self, number: int) -> int:
        """The shard that holds a sample."""
        return int(np.searchsorted(self.shard_ends, number, side="right"))

    def name(self, index: int) -> str:
        return f"{self.shards.urls[self.shard(index)]}:{self.keys[index]}"

    def read(self, index: int) -> tuple[bytes, int]:
        sample = self[index]
        return sample_image(sample), read_label(sample)

    def group(self, index: int) -> str:
        """The field "group" of the `.json` member, or "font" as "glyphs" has it; "" without."""
        try:
            fields = parse_json(self[index].get("json", b"{}"), "the member json")
        except ValueError:
            return ""
        return str(fields.get("group") or fields.get("font") or "") if isinstance(fields, dict) else ""

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        sample = self[index]
        return sample_image(sample), read_objects(sample)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The sample as webdataset gives it: {"__key__", extension: bytes}."""
        shard, sample = self.shard(number), {"__key__": self.keys[number]}
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


def sample_image(sample: dict[str, Any]) -> bytes:
    """The image member of a sample. Raises BadImage "no image"."""
    for extension, data in sample.items():
        if not extension.startswith(("__", "mask.")) and f".{extension.rpartition('.')[2]}" in EXTENSIONS:
            return data
    raise BadImage("no image", f"members {sorted(name for name in sample if not name.startswith('__'))}")


def read_label(sample: dict[str, Any]) -> int:
    """The label of a sample. Raises BadImage "no label", "bad label"."""
    try:
        if "cls" in sample:
            return int(sample["cls"])
        fields = parse_json(sample.get("json", b"{}"), "the member json")
    except ValueError as error:
        raise BadImage("bad label", str(error)) from None
    label = fields.get("label") if isinstance(fields, dict) else None
    if label is None:
        raise BadImage("no label", f"members {sorted(name for name in sample if not name.startswith('__'))}")
    if type(label) is not int:  # True is an int to isinstance
        raise BadImage("bad label", f"label {label!r} is not a whole number")
    return label


def read_objects(sample: dict[str, Any]) -> Objects:
    """The objects of a sample: "objects" and "group" of its `.json` member, and its mask, a member `.mask.png`.

    Raises BadImage, as `parse_objects`.
    """
    try:
        fields = parse_json(sample.get("json", b"{}"), "the member json")
    except ValueError as error:
        raise BadImage("bad objects", str(error)) from None
    fields = fields if isinstance(fields, dict) else {}
    return parse_objects(fields.get("objects"), fields.get("group"), sample.get("mask.png"))
