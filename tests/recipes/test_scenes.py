"""Pictures of letters: the same composition at every size, boxes round the ink, the pixels of the shipped data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from modalities.vision.objects import window_on
from modalities.vision.sources import BUILTIN, open_images
from recipes.fetchers import scenes
from recipes.fetchers.scenes import CLASSES, Photographs, builtin_fonts, crowd, draw_crowd, draw_scene, texture

FONTS = {split: builtin_fonts(split) for split in ("train", "heldout")}


def test_equal_seeds_give_the_pixels_of_the_shipped_data() -> None:
    if json.loads((BUILTIN / "index.json").read_text())["made_with"]["pillow"] != scenes.versions()["pillow"]:
        pytest.skip("another Pillow draws other pixels")
    digest = hashlib.sha256()
    for training in (True, False):
        for n in range(6):
            scene = scenes.random_scene(np.random.default_rng(n), FONTS["train"][n], CLASSES[n], training=training)
            digest.update(draw_scene(scene, 48).tobytes())
            small, large = (np.asarray(draw_scene(scene, side), np.float32) for side in (96, 384))
            assert np.abs(small - large.reshape(96, 4, 96, 4, 3).mean((1, 3))).mean() < 0.5  # of one composition
    assert digest.hexdigest()[:16] == "dde2ebba22cb7528"
    rng = np.random.default_rng(0)
    what = crowd(rng, FONTS["train"], (160, 224), [(FONTS["train"][0], "Q")], 96)
    picture, _ = draw_crowd(*what, texture(rng, 160, 224))
    assert hashlib.sha256(picture.tobytes()).hexdigest()[:16] == "ba0ffc7180a96c95"


@pytest.mark.parametrize(("size", "marked"), [((96, 96), 1), ((384, 384), 4), ((96, 384), 0)])
def test_crowds_have_one_density_and_boxes_round_the_ink(size, marked: int) -> None:
    fonts, rng = FONTS["train"], np.random.default_rng(1)
    letters, strokes = crowd(rng, fonts, size, [(fonts[n], "QRST"[n]) for n in range(marked)], 96)
    wanted = size[0] * size[1] / scenes.AREA
    assert 0.6 * wanted <= len(letters) <= max(1, round(wanted))
    ringed = [letter for letter in letters if letter.marked]
    assert len(ringed) == marked == sum(stroke.angles == (0.0, 360.0) for stroke in strokes)
    assert all(np.abs(np.subtract(a.at, b.at)).max() <= 96 for a in ringed for b in ringed)
    picture, boxes = draw_crowd(letters, [], np.full((*size, 3), 255, np.uint8))
    dark = np.asarray(picture).min(-1) < 200
    for left, top, width, height in boxes:
        assert dark[top : top + height, left : left + width].any() and 6 <= height <= 2.2 * scenes.CAP[1]
        dark[top : top + height, left : left + width] = False
    assert not dark.any()
    with pytest.raises(ValueError, match="5 marked letters find no room in 48 pixels"):
        crowd(rng, fonts, (384, 384), [(fonts[0], "Q")] * 5, 48)


def test_backgrounds_are_lighter_than_ink(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    for background in (texture, Photographs([(tmp_path / "a.png").read_bytes()])):
        field = background(rng, 96, 200)
        assert field.shape == (96, 200, 3) and field.dtype == np.uint8 and field.std() > 0
        assert np.asarray(draw_crowd([], [], field)[0]).min() >= scenes.BRIGHTEST_DARK > scenes.DARKEST_INK


@pytest.mark.parametrize("kind", scenes.SCENES)
def test_sets_are_read_as_what_was_drawn(kind: str, tmp_path: Path) -> None:
    grounds, counts = dict.fromkeys(FONTS, texture), {"train": 3, "heldout": 5}
    scenes.write_scenes(tmp_path / kind, kind, FONTS, grounds, counts=counts, heldout_side=192)
    assert json.loads((tmp_path / kind / "train/index.json").read_text())["samples"] == 3
    images = open_images(f"wds:{tmp_path / kind / 'heldout'}", "all", objects=True)
    for n in range(5):
        _, objects = images.read_objects(n)
        marked, label = objects.categories[objects.marked], images.read(n)[1]
        assert label == (marked[0] if kind == "scenes" else len(marked))
        assert len(marked) == (1 if kind == "scenes" else n) and bool(objects.group) == (kind == "scenes")
        window_on((192, 192), objects, (96, 96), (0.3, 0.7))  # raises where the marked ones do not fit
