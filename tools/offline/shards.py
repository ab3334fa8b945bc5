"""Pictures as WebDataset shards, with an index.json that counts and hashes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from webdataset import ShardWriter

from recipes.fetchers.common import tracked
from zoo.files import file_sha256


class Sample(NamedTuple):
    """One picture as the bytes of its JPEG file, its label, and what else is known of it."""

    picture: bytes
    label: int
    about: Mapping[str, object]


def write_shards(
    folder: Path,
    samples: Iterable[Sample],
    name: str,
    per_shard: int,
    total: int,
    index: Mapping[str, object],
) -> None:
    """Write NAME-000000.tar …, and index.json last.

    Equal samples give equal bytes: entries have no time and no owner.
    """
    folder.mkdir(parents=True)
    entries = dict(encoder=False, user="", group="", mode=0o644, mtime=0)
    pattern = str(folder / f"{name}-%06d.tar")
    with ShardWriter(pattern, maxcount=per_shard, verbose=0, **entries) as writer:
        for key, sample in enumerate(tracked(samples, f"writing {name} {folder.name}", total)):
            about = json.dumps(sample.about, ensure_ascii=False, sort_keys=True)
            writer.write(
                {
                    "__key__": f"{key:06d}",
                    "cls": str(sample.label).encode(),
                    "jpg": sample.picture,
                    "json": about.encode(),
                }
            )
    shards = []
    for number, path in enumerate(sorted(folder.glob("*.tar"))):
        count = min(per_shard, total - number * per_shard)
        shards.append({"file": path.name, "samples": count, "sha256": file_sha256(path)})
    text = json.dumps({**index, "samples": total, "shards": shards}, indent=1)
    (folder / "index.json").write_text(text + "\n")
