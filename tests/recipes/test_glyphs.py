"""Letters in scenes: the same picture at every size, with more in the larger one; the letter always whole."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from modalities.vision.sources import BUILTIN, BUILTIN_SIZES
from recipes.fetchers.glyphs import letters, scenes
from recipes.fetchers.glyphs.scenes import View, draw, heldout_example, training_example
from tools.glyphs import builtin
from tools.glyphs.builtin import BuiltinGlyphs

FONTS = {split: letters.builtin_fonts(split) for split in ("train", "heldout")}


def examples(count, make=training_example, fonts=FONTS["train"]):
    for number in range(count):
        rng = np.random.default_rng(number)
        yield make(rng, fonts[number % len(fonts)], letters.CLASSES[number % 26])


def pixels(picture):
    return np.asarray(picture, np.float32)


# ---- drawing ----


def test_a_scene_and_its_picture_follow_from_the_generator():
    (scene, view), (again, view_again) = next(examples(1)), next(examples(1))
    assert scene == again and view == view_again
    assert draw(scene, (64, 64), view).tobytes() == draw(again, (64, 64), view).tobytes()
    other, _ = training_example(np.random.default_rng(99), FONTS["train"][0], "A")
    assert other != scene


@pytest.mark.parametrize("make", [training_example, heldout_example])
def test_every_size_shows_the_same_composition(make):
    for scene, view in examples(20, make):
        small, large = draw(scene, (96, 96), view), draw(scene, (384, 384), view)
        reduced = large.reduce(4)
        assert np.abs(pixels(small) - pixels(reduced)).mean() < 0.5
        assert np.abs(pixels(small) - pixels(reduced)).max() < 48  # no edge has moved by much of a pixel


def test_the_larger_picture_has_detail_that_the_enlarged_one_has_not():
    sharper = 0
    for scene, view in examples(20, heldout_example, FONTS["heldout"]):
        large = pixels(draw(scene, (384, 384), view))
        enlarged = pixels(draw(scene, (96, 96), view).resize((384, 384), Image.Resampling.BICUBIC))
        assert np.abs(large - enlarged).max() > 60
        steps = [np.abs(np.diff(image, axis=1)).max() for image in (large, enlarged)]
        sharper += steps[0] > 1.5 * steps[1]
    assert sharper >= 18


def test_a_longer_side_shows_more_at_the_same_scale():
    scene, view = next(examples(1))
    square, wide = draw(scene, (64, 64), view), draw(scene, (64, 128), view)
    assert wide.size == (128, 64)
    difference = np.abs(pixels(wide)[:, 32:96] - pixels(square))
    assert difference.max() <= 8 and difference.mean() < 0.5  # shapes that reach beyond the square meet other edges


def test_a_view_is_the_crop_it_says():
    scene, _ = next(examples(1, heldout_example))
    cropped = draw(scene, (256, 256)).crop((0, 0, 128, 128))
    seen = draw(scene, (128, 128), View(2.0, (0.25, 0.25)))
    assert np.abs(pixels(cropped) - pixels(seen)).mean() < 0.5


def test_tilt_is_counter_clockwise():
    scene, _ = next(examples(1, heldout_example))
    mask = {}
    for angle in (-10.0, 10.0):
        tilted = replace(
            scene, letter="I", font=str(FONTS["train"][-1]), centre=(0.5, 0.5), rotation=angle, cap_height=0.8
        )
        canvas = scenes._Canvas(96, 96, 2, View())
        rows = np.asarray(scenes._placed_letter(tilted, canvas), np.float32)
        top, bottom = (
            (rows[part] * np.arange(192)).sum() / rows[part].sum() for part in (slice(0, 70), slice(122, 192))
        )
        mask[angle] = top - bottom
    assert mask[10.0] < -10 and mask[-10.0] > 10


# ---- composition ----


@pytest.mark.parametrize(("make", "split"), [(training_example, "train"), (heldout_example, "heldout")])
def test_the_letter_is_whole_in_the_view(make, split):
    for scene, view in examples(80, make, FONTS[split]):
        half = 0.5 / view.zoom
        assert all(half - 1e-9 <= place <= 1 - half + 1e-9 for place in view.centre)
        seen = np.asarray(scenes._placed_letter(scene, scenes._Canvas(128, 128, 2, view)), np.float32)
        assert not seen[[0, -1]].any() and not seen[:, [0, -1]].any()
        alone = replace(scene, centre=(0.5, 0.5))  # the same letter in the middle, twice as large
        full = np.asarray(scenes._placed_letter(alone, scenes._Canvas(256, 256, 2, replace(view, centre=(0.5, 0.5)))))
        assert seen.sum() == pytest.approx(full.sum() / 4, rel=0.02)


def test_cap_heights_are_log_uniform():
    for example_of, (low, high) in ((heldout_example, scenes.HELDOUT_CAP), (training_example, scenes.TRAIN_CAP)):
        caps = np.array([scenes.cap_height_in(*example) for example in examples(600, example_of)])
        assert low <= caps.min() < 1.03 * low and 0.9 * high < caps.max() <= high
        assert 0.44 < np.mean(caps < math.sqrt(low * high)) < 0.56  # wide letters stop before `high`, but above this
    low, high = scenes.HELDOUT_CAP
    assert all(low <= scene.cap_height <= high for scene, _ in examples(100))


def test_the_letter_stands_out_and_clutter_does_not():
    for scene, _ in examples(200):
        assert min(scenes._contrast(scene.ink, side) for side in scene.paper) >= scenes.MIN_CONTRAST
        assert all(scenes._luminance(scene.ink) < scenes._luminance(side) for side in scene.paper)
        spread = scenes._contrast(*scene.paper)
        for shape in scene.clutter:
            assert max(scenes._contrast(shape.colour, side) for side in scene.paper) <= 1.4 * spread
    assert scenes._contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert {len(scene.clutter) for scene, _ in examples(200)} == set(range(7))


# ---- fonts and the built-in source ----


def test_usable_fonts(tmp_path):
    folder = FONTS["train"][0].parent
    assert all(letters.usable(path) for path in FONTS["heldout"])
    for name in ("STIXSizOneSymReg.ttf", "cmex10.ttf", "DejaVuSansDisplay.ttf", "LastResortHE-Regular.ttf"):
        assert (folder / name).is_file() and not letters.usable(folder / name), name
    (tmp_path / "x.ttf").write_text("no font")
    assert not letters.usable(tmp_path / "x.ttf")


def test_letters_are_measured_in_cap_heights():
    font = str(FONTS["train"][0])
    assert letters.letter_box(font, "H")[1] == pytest.approx(1)
    assert 1.1 < letters.letter_box(font, "Q")[1] < 1.5  # its tail
    assert letters.letter_box(font, "I")[0] < 0.6 < letters.letter_box(font, "W")[0]


def test_builtin_splits_share_no_family():
    names = {split: {path.name for path in paths} for split, paths in FONTS.items()}
    assert len(names["train"]) >= 15 and len(names["heldout"]) == 4
    assert all(name.startswith("STIX") for name in names["heldout"])
    assert not any(name.startswith("STIX") for name in names["train"])


def test_builtin_source_has_every_letter_of_every_font_equally_often():
    source = BuiltinGlyphs("heldout", size=32, scenes_per_letter=2)
    assert len(source) == 2 * 26 * 4 and source.classes == letters.CLASSES
    found = {(source.example(index)[0].font, source.example(index)[0].letter) for index in range(len(source) // 2)}
    assert len(found) == 26 * 4
    picture, label = source[27]
    assert picture.size == (32, 32) and picture.mode == "RGB" and (label, source.example(27)[0].letter) == (1, "B")


def test_builtin_items_depend_on_seed_and_not_on_size():
    base = BuiltinGlyphs("train", size=32)
    large, seeded = BuiltinGlyphs("train", size=64), BuiltinGlyphs("train", size=32, seed=1)
    assert base.example(5) == large.example(5) != seeded.example(5)
    assert base.fingerprint == large.fingerprint != seeded.fingerprint
    assert len({base.fingerprint, seeded.fingerprint, BuiltinGlyphs("heldout", size=32).fingerprint}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("split", "size"), [(split, size) for split, sizes in BUILTIN_SIZES.items() for size in sizes])
def test_the_shipped_sheets_are_what_this_draws(split, size):
    index = json.loads((BUILTIN / "index.json").read_text())
    if index["made_with"] != builtin.versions():
        pytest.skip(f"the sheets were drawn with {index['made_with']}")
    glyphs = BuiltinGlyphs(split, size=size)
    assert [font.stem for font in glyphs.fonts] == index[split]["fonts"]
    assert glyphs.fingerprint == index[split]["fingerprint"]
    for name, drawn in zip(index[split]["fonts"], builtin.sheets(glyphs), strict=True):
        with Image.open(BUILTIN / f"{split}-{size}-{name}.webp") as shipped:
            assert shipped.tobytes() == drawn.tobytes()
