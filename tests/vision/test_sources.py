"""Folders, shards, Hugging Face datasets and torchvision's own, with what may be wrong in them."""

from __future__ import annotations

import functools
import http.server
import json
import logging
import os
import threading
from collections import Counter

import pytest
import torch
from PIL import Image

from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.images import BadImage, decode_image, is_heldout
from modalities.vision.shards import open_shards, packed, write_index
from modalities.vision.sources import open_images
from modalities.vision.transforms import eval_transform
from tests.vision.image_files import (
    encoded,
    numbers,
    opened,
    picture,
    solid,
    stored,
    take,
    write_json,
    write_shards,
    write_tar,
)

PLAIN = {"augment": "none", "image_size": 12, "num_classes": 4, "mean": (0, 0, 0), "std": (1, 1, 1)}


def config(source, **options):
    return VisionDataConfig(**{**PLAIN, "source": str(source), "shuffle_buffer": 64, **options})


def write_folder(root, classes, count):
    for n in range(count):
        path = root / classes[n % len(classes)] / f"{n:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        solid(n).save(path)
    return root


# ---- names ----


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("glyps", "did you mean 'glyphs'"),
        ("", "non-empty string"),
        ("hf:", "expected 'hf:NAME"),
        ("hf:x?img=a", "unknown option 'img'"),
    ],
)
def test_unknown_sources(spec, message):
    with pytest.raises(ValueError, match=message):
        open_images(spec, "train")


def test_a_plain_path_is_told_how_to_be_written(tmp_path):
    with pytest.raises(ValueError, match=f"did you mean 'folder:{tmp_path}'"):
        open_images(str(tmp_path), "train")


def test_fetched_sources_name_the_command_that_fetches_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"fetch_data.py vision glyphs.*glyphs-builtin"):
        build_loader(config("glyphs"), micro_batch=2)
    with pytest.raises(FileNotFoundError, match=r"fetch_data.py vision photos"):
        opened("photos")
    write_shards(tmp_path / "vision/glyphs/train", [6])
    write_shards(tmp_path / "vision/glyphs/heldout", [5])
    assert sorted(numbers(take(build_loader(config("glyphs"), micro_batch=6), 1)[0])) == list(range(6))
    assert len(opened("glyphs").items) == len(opened(config("glyphs")).items) == 5


# ---- folders ----


def test_a_folder_without_split_holds_out_a_tenth(tmp_path):
    write_folder(tmp_path, "abcd", 200)
    spec = f"folder:{tmp_path}"
    train, heldout = (open_images(spec, split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 200 and 10 <= len(heldout) <= 32
    assert not set(train.paths.tolist()) & set(heldout.paths.tolist())
    assert [n for n in range(200) if is_heldout(f"row {n}")][:4] == PINNED  # never to change: weights depend on it
    assert len(open_images(spec, "all")) == len(open_images(spec, "train", hold_out=False)) == 200
    assert train.fingerprint != heldout.fingerprint


PINNED = [0, 1, 5, 16]


def test_a_folder_may_be_held_out_as_a_whole(tmp_path):
    write_folder(tmp_path, "abcd", 40)
    spec = f"folder:{tmp_path}"
    note = Resolution(ResolutionSettings(source=spec)).note
    heldout = open_images(spec, "heldout")
    assert heldout.among == 40 and f"{len(heldout)} of the 40 pictures of {spec} are read" in note
    whole = note.split("'")[1]
    assert whole == f"{spec}?split=heldout" and len(open_images(whole, "heldout")) == 40
    assert not Resolution(ResolutionSettings(source=whole)).note
    with pytest.raises(ValueError, match="is held out as a whole"):
        open_images(whole, "train")


def test_a_held_out_folder_needs_none_to_train_on(tmp_path):
    write_folder(tmp_path / "val", "ab", 6)
    found = open_images(f"folder:{tmp_path}", "heldout")
    assert found.classes == ("a", "b") and len(found) == 6 and not found.among
    (tmp_path / ".cache").mkdir()
    assert len(open_images(f"folder:{tmp_path}", "all")) == 6
    with pytest.raises(ValueError, match="has val and no train"):
        open_images(f"folder:{tmp_path}", "train")


def test_held_out_folders_are_labelled_as_the_training_folder(tmp_path):
    write_folder(tmp_path / "train", "abcd", 8)
    write_folder(tmp_path / "validation", "cd", 4)
    write_folder(tmp_path / "elsewhere", "bd", 4)
    assert [label for _, label in stored(f"folder:{tmp_path}")] == [2, 2, 3, 3]
    own = config(f"folder:{tmp_path}", heldout_source=f"folder:{tmp_path / 'elsewhere'}")
    assert [label for _, label in stored(own)] == [1, 1, 3, 3]
    write_folder(tmp_path / "elsewhere", "e", 1)
    with pytest.raises(ValueError, match="class 'e' that training does not have"):
        opened(own)


def test_a_folder_of_train_alone_asks_for_the_rest(tmp_path):
    write_folder(tmp_path / "train", "ab", 4)
    with pytest.raises(ValueError, match="set heldout_source"):
        opened(f"folder:{tmp_path}")
    with pytest.raises(FileNotFoundError, match="no folder"):
        open_images("folder:/no/such/place", "train")


def test_a_class_may_be_called_train(tmp_path):
    write_folder(tmp_path, ["plane", "train"], 6)
    assert open_images(f"folder:{tmp_path}", "all").classes == ("plane", "train")


def test_what_is_wrong_in_a_folder_is_counted_and_passed_over(tmp_path, caplog):
    write_folder(tmp_path / "train", "abd", 9)
    (tmp_path / "train" / "c").mkdir()
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "a" / "000.png").write_bytes(b"")
    (tmp_path / "train" / "b" / "001.png").write_bytes(b"not an image at all")
    picture(1).convert("L").save(tmp_path / "train" / "d" / "002.png")
    for workers in (0, 2):
        loader = build_loader(config(f"folder:{tmp_path}", num_workers=workers), micro_batch=9)
        with caplog.at_level(logging.WARNING):
            batch = take(loader, 1)[0]
        assert loader.report.skipped["empty"] == loader.report.skipped["unknown format"] == 1
        assert loader.report.skipped["unknown extension"] == loader.report.skipped["empty class"] == 1
        assert loader.report.converted == {"grey": 1}
        assert set(batch["targets"].tolist()) <= {0, 1, 3} and len(batch["targets"]) == 9
        found = set(numbers(batch))
        assert {3, 4, 5, 6, 7, 8} <= found and not found & {0, 1}
    assert "train/c" in loader.report.names["empty class"][0] and "000.png" in caplog.text


def test_nothing_left_is_an_error(tmp_path):
    write_folder(tmp_path / "train", "ab", 3)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"all 3 images were skipped.*unknown format"):
        take(build_loader(config(f"folder:{tmp_path}", num_classes=2), micro_batch=2), 1)
    (tmp_path / "none" / "train" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="no image for split"):
        build_loader(config(f"folder:{tmp_path / 'none'}"), micro_batch=2)


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
    write_shards(tmp_path, [7, 5], damage=damage, indexed=False)
    loader = build_loader(config(f"wds:{tmp_path}/part-{{000..001}}.tar"), micro_batch=12)
    batch = take(loader, 1)[0]
    assert set(numbers(batch)) == {0, 7, 9, 10, 11} and len(numbers(batch)) == 12
    assert batch["targets"][numbers(batch).index(7)] == 3
    reasons = ("no label", "bad label", "label out of range", "no image", "empty", "truncated")
    assert set(loader.report.skipped) == set(reasons)
    assert loader.report.names["no label"][0].endswith("part-000.tar:0001")


def test_a_known_list_of_classes_makes_a_strange_label_an_error(tmp_path):
    write_shards(tmp_path, [4], damage={2: {"png": encoded(solid(2)), "cls": b"4"}})
    with pytest.raises(ValueError, match=r"0002 has label 4, outside 0…3"):
        take(build_loader(config(f"wds:{tmp_path}"), micro_batch=4), 1)
    with pytest.raises(ValueError, match=r"0002 has label 4"):
        list(stored(f"wds:{tmp_path}"))


def test_a_bad_held_out_image_has_a_reason(tmp_path):
    items = opened(f"wds:{write_shards(tmp_path, [3], damage={1: {'png': b'', 'cls': b'1'}})}").items
    place = items.order.tolist().index(1)
    with pytest.raises(BadImage) as error:
        items[place]
    assert error.value.reason == "empty" and sorted(items[n][1] for n in range(3) if n != place) == [0, 2]


def test_the_group_of_an_image_is_its_font_where_the_source_says_so(tmp_path):
    about = ({"group": "g", "font": "f"}, {"font": "f"}, {}, [])
    members = [{"png": encoded(picture(n)), "cls": b"0", "json": json.dumps(a).encode()} for n, a in enumerate(about)]
    members += [{"png": encoded(picture(9)), "cls": b"0"}]
    write_tar(tmp_path / "a.tar", [(f"{n}", one) for n, one in enumerate(members)])
    items = opened(f"wds:{tmp_path}/a.tar").items
    groups = [items.group(place) for place in items.order.argsort()]
    assert groups == ["g", "f", "image 2", "image 3", "image 4"]
    fonts = open_images("glyphs-builtin", "heldout")
    assert [fonts.group(n) for n in (0, 25, 26)] == ["STIXGeneral", "STIXGeneral", "STIXGeneralBol"]


def test_indexes_of_other_tools_and_counting(tmp_path):
    write_shards(tmp_path, [3, 5], indexed=False)
    pattern = f"{tmp_path}/part-{{000..001}}.tar"
    counted = open_shards("x", pattern)
    assert counted.counts == (3, 5) and counted.classes is None
    files = {"filenames": ["part-000.tar", "part-001.tar"], "shard_lengths": [3, 5]}
    write_json(tmp_path / "_info.json", {"splits": {"train": files}})
    assert open_shards("x", pattern).counts == (3, 5)
    shardlist = [{"url": f"part-00{n}.tar", "nsamples": count} for n, count in enumerate((3, 5))]
    other = write_json(tmp_path / "wids.json", {"shardlist": shardlist})
    assert open_shards("x", f"{pattern}?index={other}").counts == (3, 5)
    with pytest.raises(ValueError, match="is no index of shards"):
        open_shards("x", f"{pattern}?index={write_json(tmp_path / 'z.json', {'a': 1})}")
    with pytest.raises(FileNotFoundError, match="no shard"):
        open_shards("x", f"{tmp_path}/part-{{000..002}}.tar")


def test_an_index_that_is_wrong_is_an_error(tmp_path):
    write_shards(tmp_path, [4])
    write_tar(tmp_path / "part-000.tar", [(f"{n}", {"png": encoded(solid(n)), "cls": b"0"}) for n in range(3)])
    with pytest.raises(ValueError, match=r"ends after 3 samples.*4"):
        take(build_loader(config(f"wds:{tmp_path}"), micro_batch=4), 1)
    with pytest.raises(ValueError, match=r"3 samples found in .*part-000.tar, its index says 4"):
        opened(f"wds:{tmp_path}")
    whole = (tmp_path / "part-000.tar").read_bytes()
    write_index(tmp_path)
    (tmp_path / "part-000.tar").write_bytes(whole[:1800])
    with pytest.raises(ValueError, match=r"part-000.tar cannot be read|ends after"):
        take(build_loader(config(f"wds:{tmp_path}"), micro_batch=3), 1)


def test_samples_beyond_the_index_are_an_error(tmp_path):
    write_shards(tmp_path, [4, 3])
    samples = [(f"{n}", {"png": encoded(solid(n)), "cls": b"0"}) for n in range(6)]
    write_tar(tmp_path / "part-000.tar", samples)
    with pytest.raises(ValueError, match=r"part-000.tar has more samples than the 4 that its index says"):
        take(build_loader(config(f"wds:{tmp_path}"), micro_batch=7), 1)
    with pytest.raises(ValueError, match="6 samples found"):
        opened(f"wds:{tmp_path}")


def test_shards_run_no_command(tmp_path):
    """Whatever way a command gets into a spec, an index's place or a list of shards."""
    write_shards(tmp_path, [2])
    ran, shard = tmp_path / "ran", tmp_path / "part-000.tar"
    command = f"pipe:touch {ran}; cat {shard}"
    for pattern in (
        command,
        f" {command}",
        command.replace("pipe", "PIPE"),
        f"{shard}?index={command}",
        f"{shard}::{command}",
        f"{shard}::pipe:touch {ran}; cat {tmp_path}/part-000.tar?index={tmp_path}/index.json",
        f"ftp://x/a.tar?index={tmp_path}/index.json",
    ):
        for read in (lambda spec: build_loader(config(spec), micro_batch=2), opened):
            with pytest.raises(ValueError, match="cannot be opened; expected a path or http"):
                read(f"wds:{pattern}")
    assert not ran.exists()


def test_a_local_shard_without_hashes_is_known_by_its_members(tmp_path):
    """Labels that change leave a tar's size as it was."""
    prints = set()
    for label, key in ((b"0", "0000"), (b"1", "0000"), (b"1", "0001")):
        write_tar(tmp_path / "part-000.tar", [(key, {"png": encoded(solid(1)), "cls": label})])
        prints.add(open_shards("x", str(tmp_path / "part-000.tar")).fingerprint)
        shardlist = [{"url": "part-000.tar", "nsamples": 1}]
        index = write_json(tmp_path / "wids.json", {"shardlist": shardlist})
        prints.add(open_shards("x", f"{tmp_path}/part-000.tar?index={index}").fingerprint)
    assert len(prints) == 3


def test_a_picture_or_mask_of_as_many_bytes_is_other_content(tmp_path):
    prints, sizes = set(), set()
    for number, shade in ((1, 3), (1, 4), (2, 4)):
        mask = encoded(Image.new("L", (4, 4), shade))
        write_tar(tmp_path / "a.tar", [("0000", {"png": encoded(solid(number)), "mask.png": mask})])
        sizes.add((tmp_path / "a.tar").stat().st_size)
        prints.add(open_shards("x", str(tmp_path / "a.tar")).fingerprint)
    assert len(sizes) == 1 and len(prints) == 3


def test_remote_shards_are_streamed_and_held_out_ones_copied(tmp_path, monkeypatch):
    write_shards(tmp_path, [6, 6])
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"wds:http://127.0.0.1:{server.server_port}/part-{{000..001}}.tar"
        found = [n for batch in take(build_loader(config(url), micro_batch=4), 3) for n in numbers(batch)]
        assert sorted(found) == list(range(12))
        monkeypatch.setenv("PRIORZOO_DATA", str(tmp_path / "data"))
        assert [image.getpixel((0, 0))[0] for image, _ in stored(url)] == list(range(12))
        copies = sorted((tmp_path / "data" / "cache").iterdir())
        assert len(copies) == 2
        copies[0].write_bytes(copies[0].read_bytes().replace(b"\0\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\1"))
        with pytest.raises(ValueError, match=f"{copies[0].name}.*http.*delete it"):
            opened(url)
        copies[0].unlink()
        (tmp_path / "part-000.tar").write_bytes((tmp_path / "part-001.tar").read_bytes())
        (tmp_path / "part-001.tar").write_bytes(b"")
        with pytest.raises(ValueError, match=f"to be copied to .*{copies[0].name}"):
            opened(url)
        assert sorted((tmp_path / "data" / "cache").iterdir()) == copies[1:]
        (tmp_path / "index.json").unlink()
        with pytest.raises(ValueError, match="is not known"):
            build_loader(config(url), micro_batch=4)
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


# ---- other people's datasets ----


def test_hugging_face_datasets(tmp_path):
    import datasets

    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["x", "y"])})
    rows = {"picture": [solid(n) for n in range(40)], "kind": [n % 2 for n in range(40)]}
    data = datasets.Dataset.from_dict(rows, features=features)
    data.save_to_disk(tmp_path / "one")
    spec = f"hf:{tmp_path / 'one'}"
    loader = build_loader(config(spec, num_classes=2), micro_batch=4)
    batch = take(loader, 1)[0]
    assert [n % 2 for n in numbers(batch)] == batch["targets"].tolist()
    train, heldout = (open_images(spec, split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 40 and len(heldout) == sum(is_heldout(f"row {n}") for n in range(40)) > 0
    assert len(open_images(spec, "all")) == 40 and train.classes == ("x", "y")

    parts = datasets.DatasetDict({"train": data, "validation": data.select(range(6))})
    parts.save_to_disk(tmp_path / "two")
    held, found = opened(f"hf:{tmp_path / 'two'}"), list(stored(f"hf:{tmp_path / 'two'}"))
    assert len(found) == 6 and held.items.classes == ["x", "y"] and found[3][0].getpixel((0, 0)) == (3, 0, 7)
    assert len(open_images(f"hf:{tmp_path / 'two'}", "train")) == 40
    with pytest.raises(ValueError, match="no split 'tain'"):
        open_images(f"hf:{tmp_path / 'two'}::tain", "train")
    with pytest.raises(ValueError, match="did you mean 'picture'"):
        open_images(f"{spec}?image=pictur", "train")
    for wrong in ("image=kind", "label=picture"):
        with pytest.raises(
            ValueError, match=f"expected one column of type .*, found '{wrong.partition('=')[2]}' of another"
        ):
            open_images(f"{spec}?{wrong}", "train")
    assert len(open_images(f"{spec}?image=picture&split=heldout", "heldout")) == 40

    wrong = datasets.Dataset.from_dict({"picture": [None, solid(1)], "kind": [0, -1]}, features=features)
    wrong.save_to_disk(tmp_path / "wrong")
    held = open_images(f"hf:{tmp_path / 'wrong'}", "all")
    for index, reason in enumerate(("no image", "no label")):
        with pytest.raises(BadImage) as error:
            held.read(index)
        assert error.value.reason == reason


def _parts(folder, *names):
    """A dataset saved with parts of 30 rows each, labelled x, y; row n of part p shows number 100·p + n."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    parts = {
        name: datasets.Dataset.from_dict(
            {"image": [solid(100 * p + n) for n in range(30)], "label": [n % 2 for n in range(30)]}, features=features
        )
        for p, name in enumerate(names)
    }
    datasets.DatasetDict(parts).save_to_disk(folder)
    return f"hf:{folder}"


def _shown(spec, split, **options):
    images = open_images(spec, split, **options)
    colours = [decode_image(images.read(n)[0])[0].getpixel((0, 0)) for n in range(len(images))]
    return {red + 256 * green for red, green, _ in colours}


PART = [set(range(100 * p, 100 * p + 30)) for p in range(3)]
HASHED = {n for n in range(30) if is_heldout(f"row {n}")}


@pytest.mark.parametrize(
    ("parts", "named", "train", "heldout", "whole"),
    [
        (["test"], "", PART[0] - HASHED, HASHED, PART[0]),
        (["test"], ":test", PART[0] - HASHED, HASHED, PART[0]),
        (["train"], ":train[:80%]", set(range(24)) - HASHED, set(range(24)) & HASHED, set(range(24))),
        (["train"], "::train[3:-2]", None, None, set(range(3, 28))),
        (["validation", "test"], "", PART[0], PART[1], PART[1]),
        (["validation", "test"], ":validation", PART[0], PART[1], PART[0]),
        (["train", "validation", "test"], "", PART[0], PART[1], PART[1]),
        (["train", "validation", "test"], ":train[50%:]", set(range(15, 30)), PART[1], set(range(15, 30))),
        (["train", "validation", "test"], ":validation", "held-out split: train on train", PART[1], PART[1]),
        (["train", "validation", "test"], ":test[:10]", "held-out split: train on train", None, set(range(200, 210))),
    ],
)
def test_what_is_trained_on_is_never_held_out(parts, named, train, heldout, whole, tmp_path):
    spec = _parts(tmp_path / "data", *parts) + named
    assert _shown(spec, "all") == whole
    held = _shown(spec, "heldout")
    if isinstance(train, str):
        with pytest.raises(ValueError, match=train):
            open_images(spec, "train")
    else:
        trained = _shown(spec, "train")
        assert not trained & held and trained and held
        assert train is None or trained == train
    assert heldout is None or held == heldout


def test_names_are_kept_in_two_buffers():
    names = ["a", "", "ü/日本", "b\udcff"]  # the last as Linux gives names that are not UTF-8
    assert list(map(os.fsdecode, packed(names))) == names and packed(names).dtype.kind == "S"


def test_listed_samples_are_no_python_objects(tmp_path):
    """What grows with the number of images is in buffers, so that forked workers share it."""
    write_folder(tmp_path / "folder", "ab", 50)
    write_shards(tmp_path / "shards", [30, 20])
    for images in (
        open_images(f"folder:{tmp_path / 'folder'}", "all"),
        open_images(f"wds:{tmp_path / 'shards'}", "all"),
    ):
        assert len(images) == 50 and images.read(49)[1] in (1, 0)
        for part in (images, getattr(images, "samples", images)):
            large = [
                name for name, value in vars(part).items() if isinstance(value, list | tuple | dict) and len(value) > 20
            ]
            assert not large


def test_a_slice_of_nothing_is_an_error(tmp_path):
    spec = _parts(tmp_path / "data", "train")
    with pytest.raises(ValueError, match=r"split 'train\[30:\]' has no row"):
        open_images(f"{spec}:train[30:]", "train")
    with pytest.raises(ValueError, match=r"no split 'train\[a:\]'"):
        open_images(f"{spec}:train[a:]", "train")


def test_torchvision_datasets_and_a_plain_data_loader(tmp_path):
    from torchvision.datasets import FakeData, ImageFolder

    write_folder(tmp_path, "ab", 6)
    for dataset in (
        FakeData(6, (3, 40, 30), num_classes=2, transform=eval_transform(24)),
        ImageFolder(str(tmp_path), transform=eval_transform(24)),
    ):
        loader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=1)
        batches = list(loader)
        assert [tuple(images.shape) for images, _ in batches] == [(3, 3, 24, 24)] * 2
    assert Counter(label.item() for _, labels in batches for label in labels) == {0: 3, 1: 3}
