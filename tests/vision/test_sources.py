"""Folders, shards and Hugging Face datasets, with what may be wrong in them."""

from __future__ import annotations

import contextlib
import os
import shutil

import pytest

from modalities.vision.data import build_loader
from modalities.vision.errors import BadImage
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.images import decode_image, heldout_places
from modalities.vision.shards import open_shards
from modalities.vision.sources import class_names, open_images
from tests.refusals import refuses
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
    write_index,
    write_shards,
    write_tar,
)  # fmt: skip
from zoo.files import write_json


def test_unknown_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    for spec, message in (
        ("glyps", "did you mean 'glyphs'"),
        ("hf:", "expected 'hf:NAME"),
        ("hf:x?img=a", "unknown option 'img'"),
        ("folder:/no/such/place", "no folder"),
        (os.curdir, "did you mean 'folder:.'"),
        ("glyphs", r"version 0.5.0 draws it; 'glyphs-builtin'"),
        (f"wds:pipe:touch {tmp_path}/ran", "no shard"),  # webdataset would run it
    ):
        refuses(message, open_images, spec, "all", error=(ValueError, FileNotFoundError))
    assert not (tmp_path / "ran").exists()
    write_shards(tmp_path / "vision/glyphs/heldout", [5], class_names("glyphs"))
    assert len(opened("glyphs").items) == len(opened(config("glyphs")).items) == 5


def test_what_a_folder_holds_out(tmp_path):
    """A tenth by names, its part called validation, or all of it."""
    spec = f"folder:{write_folder(tmp_path / 'one', 'abcd', 200)}"
    train, heldout = (open_images(spec, split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 200 == heldout.among
    assert 10 <= len(heldout) <= 32
    assert not set(train.paths.tolist()) & set(heldout.paths.tolist())
    # Shipped weights depend on these places.
    assert heldout_places((f"row {n}" for n in range(17)), "heldout") == [0, 1, 5, 16]
    note = Resolution(ResolutionSettings(source=spec)).note
    whole = note.split("'")[1]
    assert f"{len(heldout)} of the 200 pictures" in note
    assert len(open_images(whole, "heldout")) == 200
    refuses("is held out as a whole", open_images, whole, "train")
    write_folder(tmp_path / "a/train", "abcd", 8)
    refuses("set heldout_source", opened, f"folder:{tmp_path}/a")
    write_folder(tmp_path / "a/validation", "cd", 4)
    write_folder(tmp_path / "b", "bd", 4)
    assert [label for _, label in stored(f"folder:{tmp_path}/a")] == [
        2,
        2,
        3,
        3,
    ]  # numbered as in training
    ours = config(f"folder:{tmp_path}/a", heldout_source=f"folder:{tmp_path}/b")
    assert [label for _, label in stored(ours)] == [1, 1, 3, 3]
    write_folder(tmp_path / "b", "e", 1)
    refuses("has a class that training does not have: 'e'", opened, ours)


def test_folder_faults_are_counted(tmp_path):
    """What is wrong in a folder is counted and passed over."""
    write_folder(tmp_path / "train", "abd", 9)
    (tmp_path / "train/c").mkdir()
    (tmp_path / "train/a/notes.txt").write_text("no image")
    (tmp_path / "train/a/000.png").write_bytes(b"")
    (tmp_path / "train/a/000.jpg").symlink_to("nowhere")
    (tmp_path / "train/b/001.png").write_bytes(b"not an image at all")
    picture(1).convert("L").save(tmp_path / "train/d/002.png")
    loader = build_loader(config(f"folder:{tmp_path}", num_workers=2), micro_batch=9)
    batch = take(loader, 1)[0]
    reasons = ("empty", "unknown format", "unknown extension", "no regular file", "empty class")
    assert loader.report.skipped == dict.fromkeys(reasons, 1)
    assert {3, 4, 5, 6, 7, 8} <= set(numbers(batch))
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"all 9 images were skipped.*unknown format"):
        take(build_loader(config(f"folder:{tmp_path}"), micro_batch=2), 1)


def test_hidden_links_and_copies(tmp_path):
    """No hidden name is a class, no picture is read twice, and no copy is on both sides of the
    split."""
    folder = write_folder(tmp_path / "images", ["cat", "dog"], 60)
    shutil.move(folder / "cat", tmp_path / "store")
    (folder / "cat").symlink_to(tmp_path / "store")  # a linked class is read
    clean = open_images(f"folder:{folder}", "all").paths.tolist()
    for place in (folder, folder / "cat"):
        shutil.copytree(folder / "dog", place / ".ipynb_checkpoints")
    shutil.copy(folder / "dog/001.png", folder / "dog/._0.png")
    (folder / "dog/up").symlink_to(folder)
    (folder / "dog/again.png").symlink_to(folder / "dog/001.png")
    images = open_images(f"folder:{folder}", "all")
    assert images.paths.tolist() == clean
    assert len(clean) == 60
    assert images.classes == class_names(f"folder:{folder}") == ("cat", "dog")
    assert sorted(reason for reason, _ in images.problems) == [
        "linked folder in a class",
        "seen twice, by a link",
    ]
    for path in sorted((folder / "cat").iterdir()):
        if path.is_file():
            shutil.copy(path, path.with_name(f"{path.stem}-copy.png"))
    parts = (open_images(f"folder:{folder}", split) for split in ("train", "heldout"))
    train, heldout = ({part.read(n)[0] for n in range(len(part))} for part in parts)
    assert heldout
    assert not train & heldout


def test_shard_faults_are_counted(tmp_path):
    """What is wrong in shards is counted and passed over."""
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
    loader = build_loader(
        config(f"wds:{tmp_path}/a/part-{{000..001}}.tar", shuffle_buffer=64), micro_batch=12
    )
    batch = take(loader, 1)[0]
    assert set(numbers(batch)) == {0, 7, 9, 10, 11}
    assert batch["targets"][numbers(batch).index(7)] == 3
    reasons = ("no label", "bad label", "label out of range", "no image", "empty", "truncated")
    assert set(loader.report.skipped) == set(reasons)
    assert loader.report.names["no label"].endswith("part-000.tar:0001")
    write_shards(
        tmp_path / "b", [4], damage={2: {"png": encoded(solid(2)), "cls": b"4"}}
    )  # whose index lists classes
    for read in (
        lambda spec: take(build_loader(config(spec), micro_batch=4), 1),
        lambda spec: list(stored(spec)),
    ):
        refuses(r"0002 has label 4, outside 0…3", read, f"wds:{tmp_path}/b")


@pytest.mark.parametrize(
    "names", [("0.png", "0.cls", "0.png"), ("0.png", "0.PNG"), ("0.cls", "1.png", "0.cls")]
)
def test_repeated_name_is_error(names, tmp_path):
    """A name twice is an error."""
    path = write_tar(
        tmp_path / "a.tar",
        [(name.partition(".")[0], {name.partition(".")[2]: b"0"}) for name in names],
    )
    refuses(f"shard .*a.tar cannot be read: it has '{names[-1]}' twice", opened, f"wds:{path}")


def test_shards_counted_by_index(tmp_path):
    """Shards are counted by an index or by their headers."""
    write_shards(tmp_path, [3, 5], indexed=False)
    pattern = f"{tmp_path}/part-{{000..001}}.tar"
    assert open_shards("x", pattern).counts == (3, 5)
    assert open_shards("x", pattern).classes is None
    rows = [{"file": "part-000.tar", "samples": 4}, {"file": "part-001.tar", "samples": 5}]
    write_json(tmp_path / "index.json", {"shards": rows})
    for read in (lambda spec: take(build_loader(config(spec), micro_batch=9), 1), opened):
        refuses(r"part-000.tar has 3 samples, its index says 4", read, f"wds:{pattern}")
    for wrong in (
        {"a": 1},
        {"shards": [{"file": "part-000.tar", "samples": True}]},
        {"shards": [], "classes": "ab"},
    ):
        write_json(tmp_path / "index.json", wrong)
        refuses("is no index of shards", open_shards, "x", pattern)
    whole = (tmp_path / "part-000.tar").read_bytes()
    write_index(tmp_path)
    for damaged in (
        whole[:1800],
        whole[:1024] + b"x" * 512 + whole[1536:],
    ):  # cut short; the second header
        (tmp_path / "part-000.tar").write_bytes(damaged)
        refuses(
            r"part-000.tar cannot be read",
            take,
            build_loader(config(f"wds:{tmp_path}"), micro_batch=3),
            2,
        )


def test_shard_known_by_members(tmp_path):
    """Labels and pictures that change may leave a tar's size as it was."""
    prints = set()
    path = tmp_path / "a.tar"
    for number, label in ((1, b"0"), (2, b"0"), (2, b"1")):
        write_tar(path, [("0000", {"png": encoded(solid(number)), "cls": label})])
        prints.add(open_shards("x", str(path)).fingerprint)
    assert len(prints) == 3


def _saved(folder, *names, **columns):
    """A dataset saved with parts of 30 rows each, labelled x, y; row n of part p shows number 100·p
    + n."""
    import datasets

    image = columns.get("image", "image")
    label = columns.get("label", "label")
    features = datasets.Features(
        {image: datasets.Image(), label: datasets.ClassLabel(names=["x", "y"])}
    )
    parts = datasets.DatasetDict()
    for p, name in enumerate(names):
        rows = {
            image: [solid(100 * p + n) for n in range(30)] + [None],
            label: [n % 2 for n in range(30)] + [-1],
        }
        parts[name] = datasets.Dataset.from_dict(rows, features=features)
    parts.save_to_disk(folder)
    return f"hf:{folder}"


def _shown(spec, split):
    images = open_images(spec, split)
    shown = set()
    for n in range(len(images)):
        with contextlib.suppress(BadImage):  # the last row of a part has no image
            red, green, _ = decode_image(images.read(n)[0]).getpixel((0, 0))
            shown.add(red + 256 * green)
    return shown


def test_trained_is_never_heldout(tmp_path):
    """What is trained on is never held out."""
    one = set(range(30))
    two = set(range(100, 130))
    hashed = set(heldout_places((f"row {n}" for n in range(30)), "heldout"))
    alone = _saved(tmp_path / "alone", "train")
    both = _saved(tmp_path / "both", "train", "validation")
    assert (_shown(alone, "train"), _shown(alone, "heldout")) == (one - hashed, hashed)
    for spec in (f"{both}:train", both):
        assert (_shown(spec, "train"), _shown(spec, "heldout")) == (one, two)
    assert _shown(f"{alone}?split=heldout", "heldout") == one
    assert _shown(f"{both}:validation", "heldout") == two
    refuses("names a held-out split", open_images, f"{both}:validation", "train")


def test_columns_named_or_found(tmp_path):
    """Columns and splits are named or found."""
    spec = _saved(tmp_path, "train", image="picture", label="kind")
    batch = take(build_loader(config(spec, num_classes=2), micro_batch=4), 1)[0]
    assert [n % 2 for n in numbers(batch)] == batch["targets"].tolist()
    assert open_images(f"{spec}?image=picture", "all").classes == ("x", "y")
    for wrong, message in (
        (f"{spec}?image=pictur", "did you mean 'picture'"),
        (f"{spec}?label=picture", "expected one column of labels among picture, kind, got picture"),
        (f"{spec}:tain", "no split 'tain'.*did you mean 'train'"),
    ):
        refuses(message, open_images, wrong, "train")
