"""Folders, shards and Hugging Face datasets, with what may be wrong in them."""

from __future__ import annotations

import functools
import http.server
import os
import threading

import pytest

from modalities.vision.data import build_loader
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.images import BadImage, decode_image, is_heldout
from modalities.vision.shards import open_shards, write_index
from modalities.vision.sources import open_images
from tests.vision.image_files import (
    config,
    encoded,
    numbers,
    opened,
    picture,
    solid,
    stored,
    take,
    write_folder,
    write_json,
    write_shards,
    write_tar,
)


def test_unknown_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    for spec, message in (
        ("glyps", "did you mean 'glyphs'"),
        ("", "non-empty string"),
        ("hf:", "expected 'hf:NAME"),
        ("hf:x?img=a", "unknown option 'img'"),
        ("folder:/no/such/place", "no folder"),
        (os.curdir, "did you mean 'folder:.'"),
        ("glyphs", r"fetch-data vision glyphs.*glyphs-builtin"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_images(spec, "train")
    write_shards(tmp_path / "vision/glyphs/heldout", [5])
    assert len(opened("glyphs").items) == len(opened(config("glyphs")).items) == 5


# ---- folders ----


def test_what_a_folder_holds_out(tmp_path):
    """A tenth by names, its part called validation, or all of it."""
    spec = f"folder:{write_folder(tmp_path / 'one', 'abcd', 200)}"
    train, heldout = (open_images(spec, split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 200 == heldout.among and 10 <= len(heldout) <= 32
    assert not set(train.paths.tolist()) & set(heldout.paths.tolist())
    # Never to change: weights depend on it.
    assert [n for n in range(17) if is_heldout(f"row {n}")] == [0, 1, 5, 16]
    note = Resolution(ResolutionSettings(source=spec)).note
    whole = note.split("'")[1]
    assert (
        f"{len(heldout)} of the 200 pictures of {spec} are read" in note and len(open_images(whole, "heldout")) == 200
    )
    with pytest.raises(ValueError, match="is held out as a whole"):
        open_images(whole, "train")
    write_folder(tmp_path / "a/train", "abcd", 8)
    with pytest.raises(ValueError, match="set heldout_source"):
        opened(f"folder:{tmp_path}/a")
    write_folder(tmp_path / "a/validation", "cd", 4)
    write_folder(tmp_path / "b", "bd", 4)
    assert [label for _, label in stored(f"folder:{tmp_path}/a")] == [2, 2, 3, 3]  # numbered as in training
    ours = config(f"folder:{tmp_path}/a", heldout_source=f"folder:{tmp_path}/b")
    assert [label for _, label in stored(ours)] == [1, 1, 3, 3]
    write_folder(tmp_path / "b", "e", 1)
    with pytest.raises(ValueError, match="class 'e' that training does not have"):
        opened(ours)


def test_what_is_wrong_in_a_folder_is_counted_and_passed_over(tmp_path):
    write_folder(tmp_path / "train", "abd", 9)
    (tmp_path / "train/c").mkdir()
    (tmp_path / "train/a/notes.txt").write_text("no image")
    (tmp_path / "train/a/000.png").write_bytes(b"")
    (tmp_path / "train/b/001.png").write_bytes(b"not an image at all")
    picture(1).convert("L").save(tmp_path / "train/d/002.png")
    loader = build_loader(config(f"folder:{tmp_path}", num_workers=2), micro_batch=9)
    batch = take(loader, 1)[0]
    assert loader.report.skipped == dict.fromkeys(("empty", "unknown format", "unknown extension", "empty class"), 1)
    assert {3, 4, 5, 6, 7, 8} <= set(numbers(batch))
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"all 9 images were skipped.*unknown format"):
        take(build_loader(config(f"folder:{tmp_path}"), micro_batch=2), 1)


# ---- shards ----


def test_what_is_wrong_in_shards_is_counted_and_passed_over(tmp_path):
    good = encoded(solid(77))
    damage = {
        1: {"png": good},
        2: {"png": good, "cls": b"cat"},
        3: {"png": good, "cls": b"9"},
        4: {"cls": b"1"},
        5: {"png": b"", "cls": b"1"},
        6: {"png": encoded(picture(6))[:-60], "cls": b"1"},
        7: {"png": encoded(solid(7)), "json": b'{"label": 3, "source": "x"}'},
        8: {"png": encoded(solid(8)), "json": b'{"label": 2.5}'},
    }
    write_shards(tmp_path / "a", [7, 5], damage=damage, indexed=False)
    loader = build_loader(config(f"wds:{tmp_path}/a/part-{{000..001}}.tar", shuffle_buffer=64), micro_batch=12)
    batch = take(loader, 1)[0]
    assert set(numbers(batch)) == {0, 7, 9, 10, 11} and batch["targets"][numbers(batch).index(7)] == 3
    reasons = ("no label", "bad label", "label out of range", "no image", "empty", "truncated")
    assert set(loader.report.skipped) == set(reasons)
    assert loader.report.names["no label"].endswith("part-000.tar:0001")
    write_shards(tmp_path / "b", [4], damage={2: {"png": encoded(solid(2)), "cls": b"4"}})  # whose index lists classes
    for read in (lambda spec: take(build_loader(config(spec), micro_batch=4), 1), lambda spec: list(stored(spec))):
        with pytest.raises(ValueError, match=r"0002 has label 4, outside 0…3"):
            read(f"wds:{tmp_path}/b")


@pytest.mark.parametrize("names", [("0.png", "0.cls", "0.png"), ("0.png", "0.PNG"), ("0.cls", "1.png", "0.cls")])
def test_a_name_twice_is_one_error_of_both_readers(names, tmp_path):
    """It names the shard and the member; an index of somebody else's does not hide it."""
    path = write_tar(tmp_path / "a.tar", [(name.partition(".")[0], {name.partition(".")[2]: b"0"}) for name in names])
    message = f"shard .*a.tar cannot be read: it has '{names[-1]}' twice"
    for indexed in (False, True):
        if indexed:
            write_json(tmp_path / "index.json", {"shards": [{"file": "a.tar", "samples": 1}]})
        for read in (lambda spec: take(build_loader(config(spec), micro_batch=1), 1), opened):
            with pytest.raises(ValueError, match=message):
                read(f"wds:{path}")


def test_shards_are_counted_by_an_index_or_by_their_headers(tmp_path):
    write_shards(tmp_path, [3, 5], indexed=False)
    pattern = f"{tmp_path}/part-{{000..001}}.tar"
    assert open_shards("x", pattern).counts == (3, 5) and open_shards("x", pattern).classes is None
    for samples, streamed in ((4, "ends after 3 samples; its index says 4"), (2, "has more samples than the 2")):
        rows = [{"file": "part-000.tar", "samples": samples}, {"file": "part-001.tar", "samples": 5}]
        write_json(tmp_path / "index.json", {"shards": rows})
        with pytest.raises(ValueError, match=streamed):
            take(build_loader(config(f"wds:{pattern}"), micro_batch=9), 1)
        with pytest.raises(ValueError, match=f"3 samples found in .*part-000.tar, its index says {samples}"):
            opened(f"wds:{pattern}")
    for wrong in ({"a": 1}, {"shards": [{"file": "part-000.tar", "samples": True}]}, {"shards": [], "classes": "ab"}):
        write_json(tmp_path / "index.json", wrong)
        with pytest.raises(ValueError, match="is no index of shards"):
            open_shards("x", pattern)
    whole = (tmp_path / "part-000.tar").read_bytes()
    write_index(tmp_path)
    (tmp_path / "part-000.tar").write_bytes(whole[:1800])
    with pytest.raises(ValueError, match=r"part-000.tar cannot be read|ends after"):
        take(build_loader(config(f"wds:{tmp_path}"), micro_batch=3), 2)


def test_a_local_shard_without_hashes_is_known_by_its_members(tmp_path):
    """Labels and pictures that change may leave a tar's size as it was."""
    prints, path = set(), tmp_path / "a.tar"
    for number, label in ((1, b"0"), (2, b"0"), (2, b"1")):
        write_tar(path, [("0000", {"png": encoded(solid(number)), "cls": label})])
        prints.add(open_shards("x", str(path)).fingerprint)
    assert len(prints) == 3


def test_shards_run_no_command(tmp_path):
    """Whatever way a command gets into a spec, an index's place or a list of shards."""
    write_shards(tmp_path, [2])
    shard, command = tmp_path / "part-000.tar", f"pipe:touch {tmp_path}/ran; cat {tmp_path}/part-000.tar"
    forms = (
        command,
        f" {command}",
        command.upper(),
        f"{shard}::{command}",
        "ftp://x/a.tar",
    )
    for pattern in forms:
        for read in (lambda spec: build_loader(config(spec), micro_batch=2), opened):
            with pytest.raises(ValueError, match="cannot be opened; expected a path or http"):
                read(f"wds:{pattern}")
    assert not (tmp_path / "ran").exists()


def test_remote_shards_are_streamed(tmp_path):
    write_shards(tmp_path, [6, 6])
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"wds:http://127.0.0.1:{server.server_port}/part-{{000..001}}.tar"
        batches = take(build_loader(config(url), micro_batch=4), 3)
        assert sorted(n for batch in batches for n in numbers(batch)) == list(range(12))
        with pytest.raises(ValueError, match="expected files, got http"):
            opened(url)
        (tmp_path / "index.json").unlink()
        with pytest.raises(ValueError, match="put an index"):
            build_loader(config(url), micro_batch=4)
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


# ---- Hugging Face ----


def _saved(folder, *names):
    """A dataset saved with parts of 30 rows each, labelled x, y; row n of part p shows number 100·p + n."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    parts = datasets.DatasetDict()
    for p, name in enumerate(names):
        rows = {"image": [solid(100 * p + n) for n in range(30)], "label": [n % 2 for n in range(30)]}
        parts[name] = datasets.Dataset.from_dict(rows, features=features)
    parts.save_to_disk(folder)
    return f"hf:{folder}"


def _shown(spec, split):
    images = open_images(spec, split)
    colours = [decode_image(images.read(n)[0]).getpixel((0, 0)) for n in range(len(images))]
    return {red + 256 * green for red, green, _ in colours}


PART = [set(range(100 * p, 100 * p + 30)) for p in range(3)]
HASHED = {n for n in range(30) if is_heldout(f"row {n}")}
REFUSED = "held-out split: train on train"


@pytest.mark.parametrize(
    ("parts", "named", "train", "heldout", "whole"),
    [
        (["test"], ":test", PART[0] - HASHED, HASHED, PART[0]),
        (["validation", "test"], "", PART[0], PART[1], PART[1]),
        (["train", "validation", "test"], ":train", PART[0], PART[1], PART[0]),
        (["train", "validation", "test"], ":validation", REFUSED, PART[1], PART[1]),
    ],
)
def test_what_is_trained_on_is_never_held_out(parts, named, train, heldout, whole, tmp_path):
    spec = _saved(tmp_path / "data", *parts) + named
    held = _shown(spec, "heldout")
    assert _shown(spec, "all") == whole and heldout in (None, held)
    if isinstance(train, str):
        with pytest.raises(ValueError, match=train):
            open_images(spec, "train")
    else:
        trained = _shown(spec, "train")
        assert trained and held and not trained & held and train in (None, trained)


def test_columns_and_splits_are_named_or_found(tmp_path):
    import datasets

    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["x", "y"])})
    rows = {"picture": [solid(n) for n in range(39)] + [None], "kind": [n % 2 for n in range(39)] + [-1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "one")
    spec = f"hf:{tmp_path / 'one'}"
    batch = take(build_loader(config(spec, num_classes=2), micro_batch=4), 1)[0]
    assert [n % 2 for n in numbers(batch)] == batch["targets"].tolist()
    images = open_images(f"{spec}?image=picture&split=heldout", "heldout")
    assert len(images) == 40 and images.classes == ("x", "y")
    with pytest.raises(BadImage, match="no image"):
        images.read(39)
    saved = _saved(tmp_path / "two", "train")
    for wrong, message in (
        (f"{spec}?image=pictur", "did you mean 'picture'"),
        (f"{spec}?label=picture", "expected one column of type ClassLabel among picture, kind, got picture"),
        (f"{saved}::tain", "no split 'tain'"),
        (f"{saved}:tain", "no configuration 'tain'.*did you mean 'train'"),
    ):
        with pytest.raises(ValueError, match=message):
            open_images(wrong, "train")
