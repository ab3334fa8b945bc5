"""WebDataset shards: where they are, how many samples they hold, reading them in order or by number.

A shard is a tar in which members of one sample follow one another under one name: 00017.jpg, 00017.cls. Its label is
a `.cls` member (a whole number as text) or the field "label" of a `.json` member.

How many samples every shard holds must be known, since ranks and workers share an epoch out by sample. It is taken from
`index.json` beside the shards ({"classes", "samples", "size", "shards": [{"file", "samples", "sha256"}]}, or what
webdataset's `widsindex` writes), from timm's `_info.json`, or, for local shards, by reading their headers.
`write_index` writes an index.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import webdataset
from webdataset.cache import download
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from modalities.vision.images import EXTENSIONS, BadImage

__all__ = ["ShardSet", "TarImages", "data_folder", "open_shards", "read_label", "sample_image", "write_index"]

_REMOTE = re.compile(r"^([a-z][a-z0-9+.-]+)://|^pipe:")


@dataclass(frozen=True)
class ShardSet:
    """Shards with their sizes. Sample number n is in shard order; `classes` where the index names them."""

    spec: str
    urls: tuple[str, ...]
    counts: tuple[int, ...]
    classes: tuple[str, ...] | None
    fingerprint: str

    def __len__(self) -> int:
        return sum(self.counts)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of each shard's first sample."""
        return tuple(accumulate(self.counts, initial=0))[:-1]

    def read(self, shard: int, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, sample) of samples start…stop−1 of one shard, read in order from its beginning."""
        url, found = self.urls[shard], 0
        tar_error = tarfile.TarError  # looked up now: gone when the interpreter's end closes an open reader
        with webdataset.gopen(url) as stream:
            samples = group_by_keys(tar_file_expander([{"url": url, "stream": stream}]))
            try:
                for position, sample in enumerate(islice(samples, start, stop), start):
                    found += 1
                    yield self.starts[shard] + position, sample
            except tar_error as error:
                raise ValueError(f"shard {url} cannot be read: {error}") from error
        if found != stop - start:
            raise ValueError(f"shard {url} ends after {start + found} samples; its index says {self.counts[shard]}")


def open_shards(spec: str, pattern: str) -> ShardSet:
    """The shards of a folder with index.json, or of a pattern with braces such as "a/train-{000..127}.tar".

    Errors: FileNotFoundError for shards that are not there; ValueError where the number of samples is not to be had.
    """
    place, _, query = pattern.partition("?index=")
    remote = bool(_REMOTE.match(place))
    if not remote and Path(place).is_dir():
        index = _read_json(query or str(Path(place) / "index.json"))
        if index is None:
            raise FileNotFoundError(f"source {spec!r}: {place} has no index.json; give its tars as a pattern")
        urls = [str(Path(place) / entry["file"]) for entry in index["shards"]]
    else:
        urls = webdataset.shardlists.expand_urls(place)
        index = _find_index(urls, query)
    for url in urls:
        if not remote and not Path(url).is_file():
            raise FileNotFoundError(f"source {spec!r}: no shard {url}")
    known = {_file_name(entry["file"]): entry for entry in index["shards"]} if index else {}
    if all(_file_name(url) in known for url in urls):
        entries = [known[_file_name(url)] for url in urls]
    elif remote:
        raise ValueError(
            f"source {spec!r}: how many samples these remote shards hold is not known. Put an index.json beside them "
            "(modalities.vision.shards.write_index writes one from a local copy), or name a local one: '…tar?index=PATH'"
        )
    else:
        entries = [_entry(Path(url)) for url in urls]
    if not sum(entry["samples"] for entry in entries):
        raise ValueError(f"source {spec!r}: its {len(urls)} shards hold no sample")
    classes = tuple(index["classes"]) if index and index.get("classes") else None
    content = json.dumps([[e["file"], e["samples"], e.get("sha256")] for e in entries])
    digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    return ShardSet(spec, tuple(urls), tuple(int(entry["samples"]) for entry in entries), classes, digest)


def _file_name(url: str) -> str:
    """The name of the tar in a path, URL or "pipe:" command."""
    return ([*re.findall(r"[^/\s?]+\.tar(?:\.gz)?", url)] or [posixpath.basename(url)])[-1]


def _find_index(urls: Sequence[str], named: str) -> dict[str, Any] | None:
    if named:
        index = _read_json(named)
        if index is None:
            raise FileNotFoundError(f"no index {named}")
        return _as_index(index, named)
    folder = posixpath.dirname(urls[0])
    for name in () if folder.startswith("pipe:") else ("index.json", "_info.json"):
        index = _read_json(posixpath.join(folder, name))
        if index is not None:
            return _as_index(index, posixpath.join(folder, name))
    return None


def _as_index(found: dict[str, Any], place: str) -> dict[str, Any]:
    """An index of ours, timm's {"splits": {…: {"filenames", "shard_lengths"}}} or webdataset's {"shardlist"} as ours."""
    if "shards" in found:
        return found
    if "shardlist" in found:
        return {"shards": [{"file": entry["url"], "samples": entry["nsamples"]} for entry in found["shardlist"]]}
    if "splits" in found:
        pairs = [
            pair for s in found["splits"].values() for pair in zip(s["filenames"], s["shard_lengths"], strict=True)
        ]
        return {"shards": [{"file": file, "samples": samples} for file, samples in pairs]}
    raise ValueError(f"{place} is no index of shards: expected 'shards', 'shardlist' or 'splits' among {sorted(found)}")


def _read_json(place: str) -> dict[str, Any] | None:
    if not _REMOTE.match(place):
        return json.loads(Path(place).read_text()) if Path(place).is_file() else None
    try:
        with webdataset.gopen(place) as stream:
            return json.loads(stream.read())
    except (OSError, ValueError):  # not there: an HTTP error, or the page that a server sends instead
        return None


def _entry(path: Path) -> dict[str, Any]:
    """A local shard's line of an index; its size stands in for a hash of the content."""
    return {"file": path.name, "samples": len(_scan(path)), "sha256": f"size {path.stat().st_size}"}


def write_index(folder: str | Path, classes: Sequence[str] = ()) -> Path:
    """Count and hash the *.tar of a folder into its index.json; returns that file's path."""
    folder = Path(folder)
    shards = []
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        shards.append({"file": path.name, "samples": len(_scan(path)), "sha256": digest})
    index = {"classes": list(classes), "samples": sum(shard["samples"] for shard in shards), "shards": shards}
    (folder / "index.json").write_text(json.dumps(index, indent=1))
    return folder / "index.json"


def _scan(path: Path) -> list[dict[str, Any]]:
    """Per sample of a local tar {"__key__", extension: (offset, size)}; grouped as webdataset groups them."""
    samples: list[dict[str, Any]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                prefix, suffix = base_plus_ext(member.name)
                if not member.isreg() or prefix is None or re.match(r"__[^/]*__($|/)", member.name):
                    continue
                if not samples or samples[-1]["__key__"] != prefix:
                    samples.append({"__key__": prefix})
                samples[-1][suffix.lower()] = (member.offset_data, member.size)
                tar.members = []  # tarfile keeps every member otherwise
    except tarfile.TarError as error:
        raise ValueError(f"shard {path} cannot be read: {error}") from error
    return samples


def data_folder() -> Path:
    """$PRIORZOO_DATA, or ./data."""
    return Path(os.environ.get("PRIORZOO_DATA") or "data")


def local_copy(url: str) -> Path:
    """A shard as a local file: remote ones are copied once, into the data folder's `cache`."""
    if not _REMOTE.match(url):
        return Path(url)
    name = hashlib.blake2b(url.encode(), digest_size=8).hexdigest()
    copy = data_folder() / "cache" / f"{name}-{_file_name(url)}"
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        download(url, str(copy))  # under another name first, so that ranks may do it at once
    return copy


class TarImages:
    """Samples of shards by number, without reading what is not asked for. One file is open at a time."""

    def __init__(self, shards: ShardSet) -> None:
        self.shards, self.paths = shards, [local_copy(url) for url in shards.urls]
        self.samples = [(shard, sample) for shard, path in enumerate(self.paths) for sample in _scan(path)]
        if len(self.samples) != len(shards):
            raise ValueError(f"source {shards.spec!r}: {len(self.samples)} samples found, its index says {len(shards)}")
        self._open: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """The sample as webdataset gives it: {"__key__", extension: bytes}."""
        shard, members = self.samples[number]
        if self._open is None or self._open[0] != shard:
            if self._open is not None:
                self._open[1].close()
            self._open = (shard, self.paths[shard].open("rb", buffering=0))
        sample: dict[str, Any] = {"__key__": members["__key__"]}
        for extension, place in members.items():
            if extension != "__key__":  # pread: forked workers share the file's position
                sample[extension] = os.pread(self._open[1].fileno(), place[1], place[0])
        return sample

    def __getstate__(self) -> dict[str, Any]:  # an open file is not shared between processes
        return {**self.__dict__, "_open": None}


def sample_image(sample: dict[str, Any]) -> bytes:
    """The image member of a sample. Errors: BadImage "no image"."""
    for extension, data in sample.items():
        if not extension.startswith("__") and f".{extension.rpartition('.')[2]}" in EXTENSIONS:
            return data
    raise BadImage("no image", f"members {sorted(name for name in sample if not name.startswith('__'))}")


def _json_label(data: bytes) -> int | None:
    fields = json.loads(data)
    label = fields.get("label") if isinstance(fields, dict) else None
    if label is None or (isinstance(label, int) and not isinstance(label, bool)):
        return label
    raise ValueError(f"label {label!r} is not a whole number")


def read_label(sample: dict[str, Any]) -> int:
    """The label of a sample. Errors: BadImage "no label", "bad label"."""
    try:
        if "cls" in sample:
            return int(sample["cls"])
        label = _json_label(sample["json"]) if "json" in sample else None
    except ValueError as error:
        raise BadImage("bad label", str(error)) from None
    if label is not None:
        return label
    raise BadImage("no label", f"members {sorted(name for name in sample if not name.startswith('__'))}")
