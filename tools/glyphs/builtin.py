"""Draw the pictures of the source "glyphs-builtin", which ship with the vision modality.

    python tools/glyphs/builtin.py [--out FOLDER]

Capitals in the fonts that matplotlib ships: training at 64 pixels, held out at 64 (the loss during training) and 384
(evaluation); one lossless sheet for each font. index.json names the versions of Pillow and FreeType that drew them: others
may shape an outline differently.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # `tools` from the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import PIL
import typer
from PIL import Image, features

from modalities.files import new_folder
from modalities.vision.sources import BUILTIN, BUILTIN_SIZES
from recipes.fetchers.glyphs.letters import CLASSES, builtin_fonts
from recipes.fetchers.glyphs.scenes import (
    HELDOUT_CAP,
    MAX_CLUTTER_CONTRAST,
    MAX_ROTATION,
    MIN_CONTRAST,
    TRAIN_CAP,
    Scene,
    View,
    draw,
    heldout_example,
    training_example,
)
from zoo.cli import call
from zoo.files import write_json

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])


@dataclass
class BuiltinGlyphs:
    """Map-style dataset of letters in matplotlib's fonts: [i] is (RGB picture, label), drawn when asked for.

    Every font and letter has `scenes_per_letter` scenes; consecutive items walk through the letters, then the fonts.
    An item depends on its index, the split and the seed, and never on `size`: the same composition at every size.
    """

    split: str
    size: int = 128
    scenes_per_letter: int = 4
    seed: int = 0
    classes: tuple[str, ...] = field(default=CLASSES, init=False)

    def __post_init__(self) -> None:
        self.fonts = builtin_fonts(self.split)
        made_by = (HELDOUT_CAP, TRAIN_CAP, MAX_ROTATION, MIN_CONTRAST, MAX_CLUTTER_CONTRAST)
        what = ("glyphs-builtin 2", made_by, self.split, self.scenes_per_letter, self.seed)
        digest = hashlib.sha256(repr(what).encode())
        for font in self.fonts:
            digest.update(font.name.encode() + font.read_bytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.fonts) * len(self.classes) * self.scenes_per_letter

    def example(self, index: int) -> tuple[Scene, View]:
        """The scene and view of an item."""
        rest, label = divmod(index, len(self.classes))
        font = self.fonts[rest % len(self.fonts)]
        rng = np.random.default_rng([self.seed, self.split == "heldout", index, 1])
        make = training_example if self.split == "train" else heldout_example
        return make(rng, font, self.classes[label])

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        scene, view = self.example(index)
        return draw(scene, (self.size, self.size), view), index % len(self.classes)


def versions() -> dict[str, Any]:
    """What decides the pixels beside this code and the fonts."""
    return {"pillow": PIL.__version__, "freetype": features.version("freetype2")}


def write_sheets(folder: Path) -> None:
    """A sheet for every split, size and font, its letters side by side and its scenes below one another; and index.json."""
    index: dict[str, Any] = {"classes": CLASSES, "made_with": versions()}
    for split, sizes in BUILTIN_SIZES.items():
        for size in sizes:
            glyphs = BuiltinGlyphs(split, size=size)
            names = [font.stem for font in glyphs.fonts]
            index[split] = {"fingerprint": glyphs.fingerprint, "scenes": glyphs.scenes_per_letter, "fonts": names}
            for name, picture in zip(names, sheets(glyphs), strict=True):
                picture.save(folder / f"{split}-{size}-{name}.webp", lossless=True, quality=100, method=6)
    write_json(folder / "index.json", index)


def sheets(glyphs: BuiltinGlyphs) -> Iterator[Image.Image]:
    """The pictures of each font in turn."""
    across, size = len(glyphs.classes), glyphs.size
    for font in range(len(glyphs.fonts)):
        sheet = Image.new("RGB", (across * size, glyphs.scenes_per_letter * size))
        for scene in range(glyphs.scenes_per_letter):
            first = (scene * len(glyphs.fonts) + font) * across
            for letter in range(across):
                sheet.paste(glyphs[first + letter][0], (letter * size, scene * size))
        yield sheet


@app.command()
def main(out: Annotated[Path, typer.Option(help="folder to make; must not exist")] = BUILTIN) -> None:
    if out.exists():
        raise typer.BadParameter(f"{out} exists; remove it, or name another folder with --out")
    with new_folder(out, "index.json") as folder:
        write_sheets(folder)


if __name__ == "__main__":
    sys.exit(call(app, None, prog="tools/glyphs/builtin.py"))
