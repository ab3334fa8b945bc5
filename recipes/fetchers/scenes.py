"""Crowds of letters as shards: pictures, and what stands where in them.

    python recipes/fetchers/scenes.py --out FOLDER      without a download: matplotlib's fonts over textures, smaller sets
    python recipes/fetchers/scenes.py --out FOLDER --side 768 --seed 1 --train 1        other scenes, larger, to measure on

Two sets, `SCENES`: in "scenes" one letter is ringed, which is the label; in "scenes-count" none to `MOST_RINGS` are, and how
many is the label. KEY.json of both has {"objects": {"bbox": [[left, top, width, height], …], "category": […], "marked": […]}}
in pixels, as Hugging Face's detection sets have it; of "scenes" also "group", the font of the ringed letter.

Training pictures are larger than what models are trained at: a window on them that holds the rings is cut out for each view.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # `tools` from the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import PIL
import typer
from PIL import features

from modalities.files import new_folder
from recipes.fetchers.glyphs.crowds import Background, crowd, draw, texture
from recipes.fetchers.glyphs.letters import CLASSES, builtin_fonts
from recipes.fetchers.shards import Sample, write_shards
from zoo.cli import call

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])

SCENES = ("scenes", "scenes-count")
TRAIN_SIDE, HELDOUT_SIDE = 160, 384  # pixels
TRAIN_SCENES, HELDOUT_SCENES = 20_000, 520
MOST_RINGS = 4  # as many as 96 pixels have room for
WITHIN = 96  # pixels of a square that holds all rings, so that a window of training does


def write_scenes(
    folder: Path,
    kind: str,
    fonts: Mapping[str, Sequence[str]],
    backgrounds: Mapping[str, Background],
    *,
    counts: Mapping[str, int] | None = None,
    heldout_side: int = HELDOUT_SIDE,
    seed: int = 0,
    made_with: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Draw a set of `SCENES` into folder/train and folder/heldout; returns the number of pictures of each.

    fonts, backgrounds, counts: of each split. heldout_side: in pixels. Ringed letters walk through the letters, then the fonts.
    """
    made = {}
    for split, count in (counts or {"train": TRAIN_SCENES, "heldout": HELDOUT_SCENES}).items():
        versions = {"pillow": PIL.__version__, "freetype": features.version("freetype2"), "numpy": np.__version__}
        side = heldout_side if split == "heldout" else TRAIN_SIDE
        index = {"classes": CLASSES, "size": side, "seed": seed, "made_with": {**(made_with or {}), **versions}}
        jobs = [(kind, split, number, side, seed) for number in range(count)]
        with Pool(initializer=_give, initargs=(tuple(fonts[split]), backgrounds[split])) as pool:
            samples = pool.imap(_draw_sample, jobs, chunksize=16)
            made[split] = write_shards(folder / split, samples, name=kind, per_shard=2000, total=count, index=index)
    return made


_given: tuple[Sequence[str], Background]  # of a worker: once, since photographs are large


def _give(*given: Any) -> None:
    global _given
    _given = given


def _draw_sample(job: tuple[str, str, int, int, int]) -> Sample:
    """Picture `number` of a kind's split, of a side and seed."""
    (kind, split, number, side, seed), (fonts, background) = job, _given
    rng = np.random.default_rng([seed, SCENES.index(kind), split == "heldout", number])
    if kind == "scenes":
        label = number % len(CLASSES)
        marked = [(fonts[number // len(CLASSES) % len(fonts)], CLASSES[label])]
    else:
        label = number % (MOST_RINGS + 1)
        drawn = rng.integers([len(fonts), len(CLASSES)], size=(label, 2)).tolist()
        marked = [(fonts[font], CLASSES[letter]) for font, letter in drawn]
    what = crowd(rng, fonts, (side, side), marked=marked, within=WITHIN)
    picture, boxes = draw(what, background(rng, side, side))
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=92, subsampling=0)
    objects = {
        "bbox": boxes,
        "category": [CLASSES.index(letter.letter) for letter in what.letters],
        "marked": [letter.marked for letter in what.letters],
    }
    group = {"group": Path(marked[0][0]).name} if kind == "scenes" else {}
    return Sample(stream.getvalue(), label, {"objects": objects, **group})


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="folder to make; must not exist")],
    train: Annotated[int, typer.Option(min=1, help="training scenes of each set")] = 4000,
    heldout: Annotated[int, typer.Option(min=1, help="held-out scenes of each set")] = 104,
    side: Annotated[int, typer.Option(min=WITHIN, max=2048, help="pixels of a held-out scene's side")] = HELDOUT_SIDE,
    seed: Annotated[int, typer.Option(min=0, help="another one draws other scenes")] = 0,
) -> None:
    if out.exists():
        raise typer.BadParameter(f"{out} exists; remove it, or name another folder with --out")
    fonts = {split: [str(path) for path in builtin_fonts(split)] for split in ("train", "heldout")}
    with new_folder(out, "scenes/train/index.json") as folder:
        for kind in SCENES:
            grounds = {"train": texture, "heldout": texture}
            counts = {"train": train, "heldout": heldout}
            write_scenes(folder / kind, kind, fonts, grounds, counts=counts, heldout_side=side, seed=seed)


if __name__ == "__main__":
    sys.exit(call(app, None, prog="recipes/fetchers/scenes.py"))
