"""Shards: links in a tar, and what a shard is known by."""

from __future__ import annotations

import io
import os
import tarfile

import numpy as np
import pytest

from modalities.vision.data import build_loader
from modalities.vision.errors import BadImage
from modalities.vision.images import decode_image
from modalities.vision.shards import open_shards
from modalities.vision.sources import _digests_of_rows
from tests.refusals import refuses
from tests.vision.image_files import (
    config,
    encoded,
    numbers,
    opened,
    picture,
    solid,
    take,
    write_index,
    write_shards,
    write_tar,
)  # fmt: skip
from zoo.files import read_object, write_json

HARD = tarfile.LNKTYPE
SOFT = tarfile.SYMTYPE


def linked_tar(path, members):
    """A tar of (name, data) and of (name, kind of link, target)."""
    with tarfile.open(path, "w") as archive:
        for name, *rest in members:
            info = tarfile.TarInfo(name)
            if len(rest) == 1:
                info.size = len(rest[0])
                archive.addfile(info, io.BytesIO(rest[0]))
            else:
                info.type, info.linkname = rest
                archive.addfile(info)
    return path


def read_numbers(path):
    """What each sample shows, and its label; of one that cannot be read, the reason."""
    shards = open_shards("x", str(path)).indexed()
    answers = []
    for index in range(len(shards)):
        try:
            data, label = shards.read(index)
        except BadImage as error:
            answers.append(error.reason)
        else:
            answers.append((int(np.asarray(decode_image(data))[0, 0, 0]), label))
    return answers


PNG = [encoded(solid(number)) for number in range(3)]
BROKEN = "broken link in the tar"


@pytest.mark.parametrize(
    ("links", "answers"),
    [
        pytest.param(
            [("1.png", HARD, "0.png"), ("1.cls", HARD, "0.cls")], [(0, 5)], id="a hard link"
        ),
        pytest.param([("1.png", SOFT, "0.png"), ("1.cls", b"3")], [(0, 3)], id="a symlink"),
        pytest.param(
            [("d/1.png", SOFT, "../0.png"), ("d/1.cls", HARD, "./0.cls")],
            [(0, 5)],
            id="from a folder",
        ),
        pytest.param(
            [("1.png", SOFT, "z.png"), ("1.cls", b"1"), ("z.png", HARD, "0.png"), ("z.cls", b"2")],
            [(0, 1), (0, 2)],
            id="a chain, before its target",
        ),
        pytest.param(
            [("1.png", SOFT, "/0.png"), ("1.cls", HARD, "/0.cls")], [(0, 5)], id="from the root"
        ),
        pytest.param(
            [
                ("now", SOFT, "deep/er"),
                ("deep/er/k", b""),
                ("1.png", SOFT, "now/../../0.png"),
                ("1.cls", b"1"),
            ],
            [(0, 1)],
            id="through a linked folder",
        ),
        pytest.param([("1.png", SOFT, "9.png"), ("1.cls", b"1")], [BROKEN], id="missing"),
        pytest.param([("1.png", b"x"), ("1.cls", HARD, "9.cls")], [BROKEN], id="missing label"),
        pytest.param(
            [("1.png", HARD, "9.png"), ("1.json", SOFT, "9.json")], [BROKEN], id="all missing"
        ),
        pytest.param([("1.png", SOFT, "../0.png"), ("1.cls", b"1")], [BROKEN], id="above the tar"),
        pytest.param(
            [("1.png", SOFT, "2.png"), ("1.cls", b"1"), ("2.png", SOFT, "1.png")],
            [BROKEN, BROKEN],
            id="a circle",
        ),
        pytest.param(
            [("1.png", PNG[1]), ("1.cls", b"1"), ("1.txt", SOFT, "gone")],
            [(1, 1)],
            id="a member that is not needed",
        ),
    ],
)
def test_links_followed_or_counted(links, answers, tmp_path):
    """No sample vanishes because a tar stores it as a link."""
    (tmp_path / "0.png").write_bytes(PNG[2])
    members = [("0.png", PNG[0]), ("0.cls", b"5"), *links]
    path = linked_tar(tmp_path / "a.tar", members)
    assert read_numbers(path) == [(0, 5), *answers]


def test_links_in_training(tmp_path):
    """The stream reads what the index counts, and reports links that lead nowhere."""
    members = [("0.png", PNG[0]), ("0.cls", b"0"), ("1.png", HARD, "0.png"), ("1.cls", b"1")]
    members += [("2.png", SOFT, "gone.png"), ("2.cls", b"2"), ("3.png", PNG[1]), ("3.cls", b"3")]
    linked_tar(tmp_path / "part-0.tar", members)
    write_index(tmp_path, "abcd")
    loader = build_loader(config(f"wds:{tmp_path}"), micro_batch=4)
    batch = take(loader, 1)[0]
    assert set(numbers(batch)) == {0, 1}
    assert set(batch["targets"].tolist()) == {0, 1, 3}
    assert loader.report.skipped == {BROKEN: 1}


def test_a_link_beside_the_tar(tmp_path):
    """A link never reads this machine's files."""
    (tmp_path / "secret.png").write_bytes(PNG[0])
    members = [("0.png", SOFT, str(tmp_path / "secret.png")), ("0.cls", b"0")]
    assert read_numbers(linked_tar(tmp_path / "a.tar", members)) == [BROKEN]


def repacked(folder, form, turn, foot=255):
    """Three pictures that end alike, in a tar of the same size whatever they show."""
    samples = []
    for number in range(3):
        image = picture(10 * turn + number)
        image.paste((foot,) * 3, (0, 36, 40, 40))
        samples.append((f"{number}", {form.lower(): encoded(image, form), "cls": b"0"}))
    folder.mkdir(exist_ok=True)
    return write_tar(folder / "s.tar", samples)


@pytest.mark.parametrize("form", ["PPM", "BMP", "TIFF", "PNG"])
def test_shards_known_by_bytes(form, tmp_path):
    prints = {opened(f"wds:{repacked(tmp_path, form, turn)}").fingerprint for turn in range(3)}
    assert len(prints) == 3


def test_old_index_is_not_trusted(tmp_path):
    """The SHA-256 of an index is compared with the shard's."""
    repacked(tmp_path, "PPM", 0)
    write_index(tmp_path)
    first = opened(f"wds:{tmp_path}").fingerprint
    path = repacked(tmp_path, "PPM", 1)
    with pytest.warns(UserWarning, match="another SHA-256 than its index says"):
        second = opened(f"wds:{tmp_path}").fingerprint
    write_index(tmp_path)
    assert first != second == opened(f"wds:{tmp_path}").fingerprint
    (tmp_path / "index.json").unlink()
    assert opened(f"wds:{path}").fingerprint == second


def test_classes_are_part_of_the_key(tmp_path):
    """Labels mean what the index calls them."""
    prints = {
        opened(f"wds:{write_shards(tmp_path, [3], classes=names)}").fingerprint
        for names in ("abc", "cba")
    }
    assert len(prints) == 2


def test_shard_replaced_while_read(tmp_path):
    """Places in a tar are of the tar that was scanned."""
    spec = f"wds:{write_shards(tmp_path, [3])}"
    items = opened(spec).items
    items[0]
    write_shards(tmp_path, [4])
    refuses("part-000.tar changed while it was being read", items.__getitem__, 1)


def test_folders_known_by_bytes(tmp_path):
    """Pictures of one size that are put back with their old times are other pictures."""
    path = tmp_path / "a/0.ppm"
    path.parent.mkdir()
    prints = set()
    for number in range(2):
        path.write_bytes(encoded(solid(number), "PPM"))
        os.utime(path, ns=(10**18, 10**18))
        prints.add(opened(f"folder:{tmp_path}?split=heldout").fingerprint)
    assert len(prints) == 2


def save_rows(folder, number):
    """A saved dataset of one picture, with one and the same fingerprint beside its rows."""
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])}
    )
    rows = {"image": [solid(number)], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    state = read_object(folder / "state.json")
    write_json(folder / "state.json", state | {"_fingerprint": "0" * 16})


def test_datasets_known_by_bytes(tmp_path):
    """The fingerprint beside the rows of a saved dataset does not say what is in them."""
    prints = set()
    for number in range(2):
        save_rows(tmp_path / str(number), number)
        (tmp_path / str(number)).rename(tmp_path / "rows")
        prints.add(opened(f"hf:{tmp_path}/rows?split=heldout").fingerprint)
        (tmp_path / "rows").rename(tmp_path / f"old {number}")
    assert len(prints) == 2


def test_named_pictures_known_by_bytes(tmp_path):
    """Rows of a dataset may only name their pictures, which change behind them."""
    import datasets
    import pyarrow as pa

    path = tmp_path / "p.png"
    rows = {"image": [{"bytes": None, "path": str(path)}], "label": [0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = pa.table(rows, schema=features.arrow_schema)
    file = str(tmp_path / "rows.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = datasets.Dataset.from_file(file)
    data = data.cast_column("image", datasets.Image(decode=False))
    digests = set()
    for number in range(2):
        path.write_bytes(encoded(solid(number)))
        digests.add(tuple(_digests_of_rows(data, "image")))
    assert len(digests) == 2
