"""Crowds of letters: as many a pixel on every canvas, boxes round the ink, rings round the marked, and shards that are read."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from modalities.vision.objects import window_on
from modalities.vision.sources import open_images
from recipes.fetchers import scenes
from recipes.fetchers.glyphs import crowds
from recipes.fetchers.glyphs.crowds import AREA, Photographs, crowd, draw, texture
from recipes.fetchers.glyphs.letters import builtin_fonts

FONTS = [str(path) for path in builtin_fonts("train")]
PAPER = np.full((384, 384, 3), 255, np.uint8)


def made(number, size, marked=1, within=96):
    rng = np.random.default_rng(number)
    return crowd(rng, FONTS, size, marked=[(FONTS[n], "QRSTU"[n]) for n in range(marked)], within=within)


@pytest.mark.parametrize("size", [(96, 96), (160, 160), (384, 384), (96, 384)])
def test_letters_have_one_size_and_density_on_every_canvas(size):
    found = [made(number, size) for number in range(4)]
    caps = np.array([letter.cap for one in found for letter in one.letters])
    assert (caps >= crowds.CAP[0]).all() and (caps <= crowds.CAP[1]).all()
    wanted = size[0] * size[1] / AREA
    assert all(0.6 * wanted <= len(one.letters) <= max(1, round(wanted)) for one in found)
    for one in found:
        assert [letter.letter for letter in one.letters if letter.marked] == ["Q"]
        assert sum(stroke.angles == (0.0, 360.0) for stroke in one.strokes) == 1


@pytest.mark.parametrize("marked", [0, 2, 4])
def test_marked_letters_are_close_and_apart_from_all_others(marked):
    for number in range(5):
        one = made(number, (384, 384), marked)
        ringed = [letter for letter in one.letters if letter.marked]
        assert len(ringed) == marked
        for letter in ringed:
            assert all(np.subtract(letter.at, other.at).__abs__().max() <= 96 for other in ringed)
            others = (other for other in one.letters if other is not letter)
            assert all(np.hypot(*np.subtract(letter.at, o.at)) >= letter.radius + o.radius for o in others)
    with pytest.raises(ValueError, match="5 marked letters find no room in 48 pixels"):
        made(0, (384, 384), 5, within=48)


def test_boxes_are_round_the_ink_and_equal_crowds_give_equal_pixels():
    what = made(1, (384, 384))
    bare = crowds.Crowd(what.size, what.letters, ())
    picture, boxes = draw(bare, PAPER)
    dark = np.asarray(picture).min(-1) < 200
    assert dark.any()
    for left, top, width, height in boxes:
        assert dark[top : top + height, left : left + width].any()
        assert 6 <= height <= 2.2 * crowds.CAP[1] and width <= 2.5 * crowds.CAP[1]
        dark[top : top + height, left : left + width] = False
    assert not dark.any()
    assert draw(what, PAPER)[0].tobytes() == draw(made(1, (384, 384)), PAPER)[0].tobytes()


def test_backgrounds_are_lighter_than_ink_and_of_any_size(tmp_path):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    for background in (texture, Photographs([tmp_path / "a.png"]), Photographs([(tmp_path / "a.png").read_bytes()])):
        for height, width in ((64, 64), (96, 200)):
            found = background(rng, height, width)
            assert found.shape == (height, width, 3) and found.dtype == np.uint8 and found.std() > 0
            picture, _ = draw(crowds.Crowd((height, width), (), ()), found)
            assert np.asarray(picture).min() >= crowds.BRIGHTEST_DARK > crowds.DARKEST_INK


@pytest.mark.parametrize("kind", scenes.SCENES)
def test_sets_are_read_as_what_was_drawn(kind, tmp_path):
    fonts = {split: [str(path) for path in builtin_fonts(split)] for split in ("train", "heldout")}
    grounds = {"train": texture, "heldout": texture}
    counts = {"train": 5, "heldout": 5}
    assert scenes.write_scenes(tmp_path / kind, kind, fonts, grounds, counts=counts, heldout_side=448) == counts
    for split, side in (("train", scenes.TRAIN_SIDE), ("heldout", 448)):
        images = open_images(f"wds:{tmp_path / kind / split}", "all", objects=True)
        for number in range(5):
            _, objects = images.read_objects(number)
            label = images.read(number)[1]
            marked = objects.categories[objects.marked]
            assert label == (marked[0] if kind == "scenes" else len(marked))
            assert len(marked) == (1 if kind == "scenes" else number)
            window_on((side, side), objects, (96, 96), (0.3, 0.7))  # raises where the marked ones do not fit
            assert bool(objects.group) == (kind == "scenes")


def test_another_seed_draws_other_scenes(tmp_path):
    fonts, grounds = {"heldout": [str(path) for path in builtin_fonts("heldout")]}, {"heldout": texture}
    tars = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        scenes.write_scenes(
            tmp_path / name, "scenes", fonts, grounds, counts={"heldout": 2}, heldout_side=96, seed=seed
        )
        tars.append((tmp_path / name / "heldout" / "scenes-000000.tar").read_bytes())
    assert tars[0] == tars[1] != tars[2]
