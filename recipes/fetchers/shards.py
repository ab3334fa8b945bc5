"""Picture sets as WebDataset shards: KEY.cls (the label as a number), the picture and KEY.json in tar files."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.fetchers.common import tracked


@dataclass(frozen=True)
class Sample:
    """One picture as its file's bytes, its label, what else is known of it, and how its file's name ends."""

    picture: bytes
    label: int
    about: dict[str, Any]
    ending: str = "jpg"


def write_shards(
    folder: Path,
    samples: Iterable[Sample],
    *,
    name: str,
    per_shard: int,
    total: int,
    index: dict[str, Any],
) -> int:
    """Write `folder`/NAME-000000.tar …, and index.json last; returns the number of samples.

    Equal samples give equal bytes: the entries bear no time and no owner. `folder` should be a scratch folder that is
    moved into place as a whole: index.json lists {"file", "samples", "sha256"} of every shard beside what is in `index`.
    """
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    stream = tracked(samples, f"writing {name} {folder.name}", total)
    for number, part in enumerate(iter(lambda: list(itertools.islice(stream, per_shard)), [])):
        path = folder / f"{name}-{number:06d}.tar"
        _write_tar(path, part, first=number * per_shard)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shards.append({"file": path.name, "samples": len(part), "sha256": digest})
    count = sum(shard["samples"] for shard in shards)
    (folder / "index.json").write_text(json.dumps({**index, "samples": count, "shards": shards}, indent=1) + "\n")
    return count


def _write_tar(path: Path, samples: list[Sample], *, first: int) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for key, sample in enumerate(samples, start=first):
            about = json.dumps(sample.about, ensure_ascii=False, sort_keys=True).encode()
            for ending, content in (
                ("cls", str(sample.label).encode()),
                (sample.ending, sample.picture),
                ("json", about),
            ):
                entry = tarfile.TarInfo(f"{key:06d}.{ending}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
