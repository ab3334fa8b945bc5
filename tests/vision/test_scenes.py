"""Pictures with objects: read from every kind of source, cut into windows, asked for, and measured with their controls."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from modalities.heldout import Heldout
from modalities.paired import t_quantile
from modalities.results import ModelResult
from modalities.vision import MODALITY, VisionConfig, VisionDataConfig, VisionTransformer
from modalities.vision import scenes as module
from modalities.vision.data import HeldoutScenes
from modalities.vision.evaluators import EVALUATORS
from modalities.vision.evaluators.map import Map
from modalities.vision.images import BadImage, ImageSet
from modalities.vision.objects import (
    NO_OBJECTS,
    OBJECT_TARGETS,
    at_patches,
    check_objects,
    parse_objects,
    target_of,
    targets_of,
    window_on,
)
from modalities.vision.scenes import READINGS, Canvas, SceneSettings
from modalities.vision.sources import open_images
from modalities.vision.training import MAP_WEIGHT, loss, weight
from recipes.registry import find_recipe

CLASSES = 6
COLOURS = {  # of a category: the red of its squares; marked ones are blue too
    category: 40 + 30 * category for category in range(CLASSES)
}


def scene(number: int, *, size=(96, 96), marked=1, spread=24) -> tuple[Image.Image, dict]:
    """Squares of 8 pixels whose red is their category, on a grid of 8, the marked ones blue too and close together."""
    rng = np.random.default_rng(number)
    rows, columns = size[0] // 8, size[1] // 8
    pixels, fields = np.zeros((*size, 3), np.uint8), {"bbox": [], "category": [], "marked": []}
    corner = rng.integers([rows - spread // 8 + 1, columns - spread // 8 + 1])
    inside = [(corner[0] + r, corner[1] + c) for r in range(spread // 8) for c in range(spread // 8)]
    everywhere = [(r, c) for r in range(rows) for c in range(columns) if (r, c) not in inside]
    places = [inside[n] for n in rng.permutation(len(inside))[:marked]]
    places += [everywhere[n] for n in rng.permutation(len(everywhere))[: rows * columns // 8]]
    for n, (row, column) in enumerate(places):
        category = int(rng.integers(CLASSES))
        pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = (COLOURS[category], 0, 255 * (n < marked))
        fields["bbox"].append([8 * int(column), 8 * int(row), 8, 8])
        fields["category"].append(category)
        fields["marked"].append(n < marked)
    return Image.fromarray(pixels), fields


class Scenes(ImageSet):
    def __init__(self, count=12, broken=(), **options):
        self.made = [scene(number, **options) for number in range(count)]
        self.spec, self.classes, self.fingerprint, self.broken = "squares", None, f"squares {count} {options}", broken

    def __len__(self):
        return len(self.made)

    def read_objects(self, index):
        if index in self.broken:
            raise BadImage("no objects")
        image, fields = self.made[index]
        return image, parse_objects(fields, f"group {index % 4}")


# ---- objects ----


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, "no objects"),
        ({"category": [1]}, "no objects"),
        ({"bbox": [[0, 0, 1, 1]]}, "bad objects"),
        ({"bbox": [[0, 0, 1]], "category": [1]}, "bad objects"),
        ({"bbox": [[0, 0, 1, 1]], "category": [1, 2]}, "bad objects"),
        ({"bbox": [[0, 0, 1, 1]], "category": [0.5]}, "bad objects"),
        ({"bbox": [[0, 0, 1, 1]], "category": [-1]}, "bad objects"),
        ({"bbox": [[0, 0, 0, 1]], "category": [1]}, "bad objects"),
        ({"bbox": [[0, 0, math.nan, 1]], "category": [1]}, "bad objects"),
        ({"bbox": [[0, 0, 1, 1]], "category": [1], "marked": [1]}, "bad objects"),
    ],
)
def test_what_are_no_objects_is_skipped_by_reason(fields, reason):
    with pytest.raises(BadImage) as caught:
        parse_objects(fields)
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["category", "categories", "label"])
def test_categories_have_the_names_that_data_sets_use_and_all_are_marked_without_marks(name):
    objects = parse_objects({"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], name: [3, 1]})
    assert objects.categories.tolist() == [3, 1] and objects.marked.all() and objects.boxes.shape == (2, 4)
    assert parse_objects({"bbox": [], name: []}).boxes.shape == (0, 4)


@pytest.mark.parametrize("number", range(6))
def test_windows_hold_the_marked_objects_and_lie_in_one_another(number):
    image, fields = scene(number, size=(96, 160), marked=3)
    objects, rng = parse_objects(fields), np.random.default_rng(number)
    marked, at = objects.boxes[objects.marked], tuple(rng.random(2))
    before = None
    for shape in ((24, 24), (40, 40), (56, 72), (96, 160)):
        left, top, width, height = window_on(image.size, objects, shape, at)
        assert 0 <= left <= image.width - width and 0 <= top <= image.height - height
        assert (marked[:, 0] >= left).all() and (marked[:, 0] + marked[:, 2] <= left + width).all()
        assert (marked[:, 1] >= top).all() and (marked[:, 1] + marked[:, 3] <= top + height).all()
        if before:
            assert left <= before[0] and top <= before[1]
            assert left + width >= before[0] + before[2] and top + height >= before[1] + before[3]
        before = left, top, width, height


def test_windows_that_cannot_be_are_refused_by_reason():
    objects = parse_objects({"bbox": [[0, 0, 8, 8], [80, 0, 8, 8]], "category": [0, 1]})
    with pytest.raises(BadImage, match="spread: the marked objects take 88"):
        window_on((96, 96), objects, (64, 64), (0, 0))
    with pytest.raises(BadImage, match="too small: 96×96"):
        window_on((96, 96), objects, (104, 96), (0, 0))


def test_a_map_has_the_category_at_every_pixel_of_a_window():
    image, fields = scene(3, marked=2)
    window = (8, 16, 64, 48)
    objects = parse_objects(fields).in_window(window)
    red = np.asarray(image)[16:64, 8:72, 0].astype(int)
    expected = np.where(red > 0, (red - 40) // 30 + 1, 0)
    made = target_of(objects, "map", (48, 64))
    assert np.array_equal(made, expected) and made.any()
    patches = at_patches(torch.from_numpy(made)[None], 48)
    assert torch.equal(patches, torch.from_numpy(expected[4::8, 4::8].reshape(1, -1)))
    with pytest.raises(ValueError, match="48 × 64 pixels is not made up of 47"):
        at_patches(torch.from_numpy(made)[None], 47)


def test_a_mask_goes_before_boxes_and_its_255_is_not_asked_for():
    mask = np.array([[0, 1], [2, 255]], np.uint8).repeat(8, 0).repeat(8, 1)
    stream = io.BytesIO()
    Image.fromarray(mask).save(stream, "PNG")
    objects = parse_objects({"bbox": [[0, 0, 16, 16]], "category": [4]}, mask=stream.getvalue())
    expected = mask.astype(int)
    expected[mask == 255] = -1
    assert np.array_equal(target_of(objects, "map", (16, 16)), expected)
    assert np.array_equal(target_of(objects.in_window((8, 0, 8, 16)), "map", (16, 8)), expected[:, 8:])
    assert np.array_equal(target_of(objects.resized((16, 16), (8, 8)), "map", (8, 8)), expected[::2, ::2])
    with pytest.raises(BadImage, match="bad mask: 16×16 pixels of an image of 24×16"):
        check_objects(objects, (24, 16), "map", [(8, 8)], 9)
    with pytest.raises(BadImage, match="bad mask"):
        parse_objects(None, mask=b"no image")


def test_targets_of_one_picture():
    _, fields = scene(1, marked=1)
    objects = parse_objects(fields)
    answer = fields["category"][0]
    assert targets_of(objects, "marked", (96, 96))["targets"] == answer
    both = targets_of(objects, "marked+map", (96, 96))
    assert both["targets"] == answer + 1 and both["maps"].shape == (96, 96)
    assert targets_of(objects, "count", (96, 96))["targets"] == 1
    nothing = targets_of(None, "count+map", (8, 16))
    assert nothing["targets"] == -1 and (nothing["maps"] == -1).all() and nothing["maps"].shape == (8, 16)
    with pytest.raises(BadImage, match="not one marked"):
        check_objects(replace(objects, marked=np.zeros_like(objects.marked)), (96, 96), "marked", [], 6)
    with pytest.raises(BadImage, match="label out of range"):
        check_objects(objects, (96, 96), "map", [], max(fields["category"]) + 1)


# ---- sources ----


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same six scenes as shards, as a folder with metadata.jsonl and as a Hugging Face dataset; all with a mask."""
    import datasets

    root = tmp_path_factory.mktemp("stored")
    (root / "folder").mkdir()
    rows, lines = [], []
    with tarfile.open(root / "a.tar", "w") as tar:
        for number in range(6):
            image, fields = scene(number)
            mask = Image.fromarray(target_of(parse_objects(fields), "map", (96, 96)).astype(np.uint8))
            files = {}
            for name, picture in (("png", image), ("mask.png", mask)):
                stream = io.BytesIO()
                picture.save(stream, "PNG")
                files[name] = stream.getvalue()
                (root / "folder" / f"{number}.{name}").write_bytes(stream.getvalue())
            files["json"] = json.dumps({"objects": fields}).encode()
            for name, content in sorted(files.items()):
                entry = tarfile.TarInfo(f"{number}.{name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            lines.append({"file_name": f"{number}.png", "objects": fields, "mask_file_name": f"{number}.mask.png"})
            rows.append({"image": image, "objects": fields, "mask": mask})
    (root / "folder/metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    objects = {"bbox": datasets.Sequence(datasets.Value("float64")), "category": datasets.Value("int64")}
    features = {
        "image": datasets.Image(),
        "objects": datasets.Sequence(objects | {"marked": datasets.Value("bool")}),
        "mask": datasets.Image(),
    }
    made = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    made.save_to_disk(root / "hf")
    return root


@pytest.mark.parametrize("form", ["wds:{}/a.tar", "folder:{}/folder", "hf:{}/hf?image=image&mask=mask"])
def test_every_kind_of_source_gives_the_same_objects(stored, form):
    images = open_images(form.format(stored), "all", objects=True)
    assert len(images) == 6
    for number in range(6):
        payload, objects = images.read_objects(number)
        image, fields = scene(number)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(payload))), np.asarray(image))
        wanted = parse_objects(fields)
        assert np.array_equal(objects.boxes, wanted.boxes) and np.array_equal(objects.categories, wanted.categories)
        assert np.array_equal(objects.marked, wanted.marked)
        assert np.array_equal(objects.mask, target_of(wanted, "map", (96, 96)))


def test_a_folder_of_scenes_is_measured_as_a_whole_where_it_says_so(stored, tmp_path):
    assert len(open_images(f"folder:{stored}/folder?split=heldout", "heldout", objects=True)) == 6
    shutil.copytree(stored / "folder", tmp_path / "val")
    assert len(open_images(f"folder:{tmp_path}", "heldout", objects=True)) == 6
    (tmp_path / "metadata.jsonl").write_text((stored / "folder/metadata.jsonl").read_text())
    found = open_images(f"folder:{tmp_path}", "all", objects=True)  # as before: what lies in the folder itself
    assert found.root == tmp_path


@pytest.mark.parametrize("wrong", ["image=objects", "image=image&mask=objects", "image=image&objects=mask"])
def test_a_column_of_another_type_is_named(stored, wrong):
    with pytest.raises(ValueError, match=rf"found '{wrong.rpartition('=')[2]}' of another"):
        open_images(f"hf:{stored}/hf?{wrong}", "all", objects=True)


def test_sources_without_objects_say_so(tmp_path):
    with pytest.raises(ValueError, match="has no boxes and no masks"):
        open_images("glyphs-builtin", "heldout", objects=True).read_objects(0)
    with pytest.raises(FileNotFoundError, match=r"metadata\.jsonl"):
        open_images(f"folder:{tmp_path}", "all", objects=True)
    (tmp_path / "metadata.jsonl").write_text('{"objects": {}}\n')
    with pytest.raises(ValueError, match="line 1: expected"):
        open_images(f"folder:{tmp_path}", "all", objects=True)
    (tmp_path / "metadata.jsonl").write_bytes(b'\n{"file_name": "\xff.png"}\n')
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2: not JSON"):
        open_images(f"folder:{tmp_path}", "all", objects=True)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "mask_file_name": 5}\n')
    with pytest.raises(ValueError, match="line 1: mask_file_name: expected the name of a file, got 5"):
        open_images(f"folder:{tmp_path}", "all", objects=True)


@pytest.mark.parametrize("name", ["missing.png", ".", "a\0b.png", "x" * 5000])
def test_a_picture_without_a_file_is_told(tmp_path, name):
    row = {"file_name": name, "objects": {"bbox": [], "category": []}}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadImage, match="no file"):
        open_images(f"folder:{tmp_path}", "all", objects=True).read_objects(0)


def test_a_picture_or_mask_that_is_written_again_is_other_content(tmp_path):
    row = {"file_name": "a.png", "mask_file_name": "m.png"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    for name, mode in (("a.png", "RGB"), ("m.png", "L")):
        Image.new(mode, (8, 8)).save(tmp_path / name)
    found = [open_images(f"folder:{tmp_path}", "all", objects=True).fingerprint]
    for name in ("a.png", "m.png"):
        stat = (tmp_path / name).stat()
        os.utime(tmp_path / name, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
        found.append(open_images(f"folder:{tmp_path}", "all", objects=True).fingerprint)
    assert len(set(found)) == 3


def test_a_dataset_of_masks_alone_needs_no_name_of_its_pictures(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [Image.new("RGB", (8, 8))] * 2, "seg": [Image.new("L", (8, 8), 3)] * 2}
    features = datasets.Features(image=datasets.Image(), seg=datasets.Image())
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    _, objects = open_images(f"hf:{tmp_path}/saved?mask=seg", "all", objects=True).read_objects(1)
    assert not len(objects.boxes)
    assert np.array_equal(objects.mask, np.full((8, 8), 3))
    with pytest.raises(ValueError, match=r"no configuration 'tran'.*did you mean 'train'"):
        open_images(f"hf:{tmp_path}/saved:tran?mask=seg", "all", objects=True)


# ---- training ----


def config(stored, form="wds:{}/a.tar", **options):
    spec = form.format(stored)
    settings = {"target": "marked+map", "num_classes": CLASSES + 1, "image_size": 32, "augment": "window"} | options
    return VisionDataConfig(source=spec, heldout_source=spec, **settings)


@pytest.mark.parametrize("form", ["wds:{}/a.tar", "folder:{}/folder"])
def test_batches_of_windows_are_what_they_ask_for(stored, form):
    data = config(stored, form, mean=(0, 0, 0), std=(1, 1, 1))
    batch = next(iter(MODALITY.loader(data, micro_batch=8)))
    pixels = (255 * batch["images"]).round().long()
    red, blue = pixels[:, 0], pixels[:, 2]
    assert batch["maps"].shape == (8, 32, 32)
    assert torch.equal(batch["maps"], torch.where(red > 0, (red - 40) // 30 + 1, 0))
    for answer, own, mark in zip(batch["targets"], red, blue, strict=True):
        assert set(own[mark == 255].tolist()) == {COLOURS[int(answer) - 1]}


def test_shapes_are_drawn_by_batch_and_again_when_it_is_resumed(stored):
    data = config(stored, shapes=("24x24", "32x48", "48x32"))
    loader = MODALITY.loader(data, micro_batch=4)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    later = [next(batches) for _ in range(6)]
    assert len({tuple(batch["images"].shape[-2:]) for batch in later}) > 1
    again = MODALITY.loader(data, micro_batch=4)
    again.load_state_dict(state)
    for one, other in zip(later, iter(again), strict=False):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_heldout_windows_are_the_same_every_time_and_count_once(stored):
    heldout = MODALITY.heldout(config(stored), samples=6, rank=0, world=1, micro_batch=4)
    one, two = list(heldout), list(heldout)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)
    assert sum(weight(batch)[0] for batch in one) == 6
    assert (one[-1]["maps"][one[-1]["targets"] < 0] == -1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "marks"}, "target 'marks'"),
        ({"target": "marked", "augment": "light"}, "expected augment='window'"),
        ({"target": "label"}, "expected augment='window'"),
        ({"mixup": 0.1}, "mixup=0.1 with target='marked'"),
        ({"hflip": 0.5}, "hflip=0.5 has no effect"),
        ({"shapes": ("96",)}, "shapes: '96'"),
        ({"shapes": ("0x96",)}, "shapes: '0x96'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VisionDataConfig(**{"target": "marked", "augment": "window"} | settings)


def small(**options):
    torch.manual_seed(0)
    given = {"img_size": 32, "patch_size": 8, "num_classes": CLASSES + 1, "dim": 16, "num_layers": 1, "num_heads": 1}
    return VisionTransformer(
        VisionConfig(**given | {"hidden_dim": 16, "position": "nope", "global_pool": ""} | options)
    )


def test_the_loss_is_the_class_tokens_and_the_maps(stored):
    batch = next(iter(MODALITY.loader(config(stored), micro_batch=5)))
    model = small()
    found, metrics = loss(model, batch)
    logits = model(batch["images"])
    here = batch["maps"][:, 4::8, 4::8].reshape(-1)
    own = F.cross_entropy(logits[:, 0], batch["targets"])
    expected = own + MAP_WEIGHT * F.cross_entropy(logits[:, 1:].reshape(-1, CLASSES + 1), here)
    assert (
        torch.allclose(found, expected)
        and metrics["top1"] == (logits[:, 0].argmax(-1) == batch["targets"]).float().mean()
    )
    alone = {"images": batch["images"], "targets": batch["maps"]}
    assert torch.allclose(loss(model, alone)[0], (expected - own) / MAP_WEIGHT) and weight(alone) == (5.0, 5)
    with pytest.raises(ValueError, match="class_token=true"):
        loss(small(class_token=False), batch)
    with pytest.raises(ValueError, match="global_pool=''"):
        loss(small(global_pool="token"), alone)


@pytest.mark.parametrize("name", ["vision.ggd_goat_ssmax_scenes", "vision.rope2d_axial_count"])
def test_recipes_of_scenes_build_their_models(name):
    recipe = find_recipe(name)
    model = MODALITY.build(recipe.model.name, recipe.model.options, recipe.data)
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model(torch.zeros(1, 3, 64, 144)).shape == (1, 1 + 8 * 18, 27)


# ---- evaluators ----


class Oracle(nn.Module):
    """Reads squares off their colours: of a picture whose squares are reduced away it sees nothing."""

    num_prefix_tokens = 1
    pixels = VisionTransformer.pixels

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(
            train_size=(32, 32), patch_size=8, num_classes=CLASSES + 1, class_token=True, global_pool="", pad=False,
            mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0),
        )  # fmt: skip
        self.whole = "marked"

    def forward(self, images):
        middles = 255 * images[:, :, 4::8, 4::8].flatten(2)
        red, blue = middles[:, 0], middles[:, 2]
        # Exact colours alone: resizing blurs the squares, which are then nothing.
        named = ((red - 40) / 30).round() + 1
        exact = ((red - 40) / 30 + 1 - named).abs() < 0.01
        named = torch.where(exact & (red > 30), named, 0).long()
        marked = (blue > 250) & (named > 0)
        most = marked.sum(1).clamp(max=CLASSES)
        answer = (named * marked).amax(1) if self.whole == "marked" else most
        logits = torch.cat([answer[:, None], named], 1)
        return 20.0 * F.one_hot(logits, CLASSES + 1).float()


@pytest.fixture
def opened(monkeypatch):
    def use(**options):
        made = Heldout("squares", "squares", HeldoutScenes(Scenes(**options)))
        monkeypatch.setattr(module, "open_scenes", lambda source: {"squares": made}[source])
        return made.items

    return use


def measured(name, model=None, **settings):
    model = model or Oracle()
    model.whole = "count" if name == "count" else "marked"
    evaluator = EVALUATORS[name](SceneSettings(source="squares", **settings))
    cells = dict(evaluator.run(model))
    return evaluator, cells, evaluator.rows(cells)


@pytest.mark.parametrize("name", ["find", "count", "map"])
def test_an_oracle_is_right_where_it_reads_pixels_as_they_are(opened, name):
    opened(marked=2 if name == "count" else 1)
    evaluator, _, rows = measured(name, sizes=(32, 64, 96))
    main = evaluator.main
    assert [row["size"] for row in rows] == [32, 64, 96]
    for row in rows:
        assert row["canvases"] == 12 and row["groups"] == 4 and row["skipped"] == 0
        assert row[main] == row[f"tiled_{main}"] == 1.0 or (name != "map" and row[main] == 1.0)
        assert row[f"chance_{main}"] < 1 and row[f"{main}_standard_error"] == 0
        if row["size"] > 32:
            assert row[f"reduced_{main}"] < 1
        best = max(row[f"{reading}_{main}"] for reading in READINGS[1:])
        assert row["gain"] == pytest.approx(row[main] - best)


def test_canvases_may_be_oblong_and_need_room(opened):
    opened(size=(64, 128))
    _, _, rows = measured("find", sizes=(32, 64), aspect=(2, 1))
    assert [(row["height"], row["width"], row["top1"]) for row in rows] == [(32, 64, 1.0), (64, 128, 1.0)]
    assert (
        rows[0]["enlarged_top1"] == 1.0
    )  # a canvas of this aspect and the training size, which there is nothing to enlarge
    _, _, rows = measured("map", samples=4)
    assert [row["size"] for row in rows] == [32, 48, 64]  # as far as the pictures reach
    with pytest.raises(ValueError, match=r"size 96 is larger than every .*at aspect 1:1 the largest size is 64"):
        measured("find", sizes=(96,))
    with pytest.raises(ValueError, match="at aspect 1:2 the largest size is 32"):
        measured("find", sizes=(32, 64), aspect=(1, 2))
    with pytest.raises(ValueError, match="below the training size"):
        measured("find", sizes=(16,))
    with pytest.raises(ValueError, match="size 60 does not divide into patches of 8"):
        measured("find", sizes=(60,))


def test_boxes_outside_of_the_picture_are_wrong_whatever_is_asked():
    inside, outside = [0, 0, 8, 8], [96, 0, 8, 8]
    objects = parse_objects({"bbox": [inside, outside], "category": [0, 1], "marked": [True, False]})
    for target in OBJECT_TARGETS:
        check_objects(objects, (104, 96), target, [(32, 32)], 27)
        with pytest.raises(
            BadImage, match=r"bad objects: box \[96.0, 0.0, 8.0, 8.0\] lies outside of an image of 96×96"
        ):
            check_objects(objects, (96, 96), target, [(32, 32)], 27)


def test_what_cannot_be_asked_is_left_out_and_counted(opened):
    opened(broken=(2, 5))
    _, _, rows = measured("find", sizes=(64,))
    assert rows[0]["canvases"] == 10 and rows[0]["skipped"] == 2 and rows[0]["skipped_because"] == "2 no objects"


class Half(Oracle):
    """Right for every picture but those whose marked square is of an odd category, which it calls the next one."""

    def forward(self, images):
        logits = super().forward(images)
        answer = logits[:, 0].argmax(-1)
        wrong = (answer > 0) & (answer % 2 == 0)
        logits[:, 0] = torch.where(wrong[:, None], logits[:, 0].roll(-1, 1), logits[:, 0])
        return logits


def test_standard_errors_are_the_jackknife_over_groups(opened):
    items = opened(count=20)
    _, cells, rows = measured("find", Half(), sizes=(64,))
    cell = next(cell for name, cell in cells.items() if name.startswith("64x64"))
    right, groups = [tally[0] for tally in cell["tallies"]["native"]], np.array(cell["groups"])
    wanted = [int(objects.categories[objects.marked][0]) % 2 == 0 for _, objects in (items[n] for n in range(20))]
    assert right == [float(w) for w in wanted]
    row = next(row for row in rows if row["size"] == 64)
    assert row["top1"] == np.mean(wanted) and 0 < row["top1"] < 1
    left_out = [np.mean(np.array(wanted)[groups != group]) for group in sorted(set(groups))]
    expected = math.sqrt(3 / 4 * sum((value - np.mean(left_out)) ** 2 for value in left_out))
    assert row["top1_standard_error"] == pytest.approx(expected)


def test_native_less_each_control_has_an_interval_over_groups(opened, tmp_path):
    opened(count=20)
    evaluator, cells, rows = measured("find", Half(), sizes=(64,))
    cell, row = (next(one for one in many if one["size"] == 64) for many in (cells.values(), rows))
    by = {name: np.array([tally[0] for tally in cell["tallies"][name]]) for name in READINGS}
    groups, controls = np.array(cell["groups"]), {control["control"]: control for control in row["controls"]}
    assert tuple(controls) == READINGS[1:]
    for name, control in controls.items():
        gaps = [(by["native"] - by[name])[groups != group].mean() for group in sorted(set(groups))]
        half = t_quantile(0.95, 3) * math.sqrt(3 / 4 * sum((gap - np.mean(gaps)) ** 2 for gap in gaps)) or math.nan
        difference = row["top1"] - row[f"{name}_top1"]
        assert control["difference"] == pytest.approx(difference)
        assert (control["low"], control["high"]) == pytest.approx((difference - half, difference + half), nan_ok=True)
    assert row["gain"] == min(control["difference"] for control in controls.values())
    evaluator.write([ModelResult("goat", 32, rows)], tmp_path)
    with (tmp_path / "find.controls.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(row["model"], row["control"]) for row in written] == [("goat", name) for name in READINGS[1:]] * len(rows)
    evaluator.write([ModelResult("old", 32, [{"size": 32}])], tmp_path / "none")
    assert not (tmp_path / "none").exists()  # results of version 1


def test_a_place_is_taken_from_the_overlapping_tile_in_whose_middle_it_lies_most(opened):
    """Tiles 16 pixels apart at 0, 16, 32 and, of 72 pixels, 40: of 9 rows of patches 3, 2, 2 and 2 are nearest to each."""
    opened()
    evaluator = EVALUATORS["map"](SceneSettings(source="squares", sizes=(72,)))
    seen = []

    def stitched(tiles, owner, patch, tile):
        seen.append(([(left, top) for _, left, top in tiles], owner))
        return Map.stitched(evaluator, tiles, owner, patch, tile)

    evaluator.stitched = stitched
    image = Image.new("RGB", (72, 72))
    made = evaluator._overlapping(Oracle(), Canvas(image, NO_OBJECTS))
    (corners, owner), starts = seen[0], [0, 16, 32, 40]
    assert corners == [(left, top) for top in starts for left in starts] and made.shape[:2] == (9, 9)
    middles = [8 * k + 4 for k in range(9)]
    nearest = [min(range(4), key=lambda n: abs(starts[n] + 16 - y)) for y in middles]
    assert np.array_equal(owner, np.array(nearest)[:, None] * 4 + np.array(nearest))


def test_counts_of_overlapping_tiles_are_weighed_by_what_is_theirs(opened):
    opened(marked=2)
    evaluator = EVALUATORS["count"](SceneSettings(source="squares", sizes=(64,)))
    one = torch.eye(10).double()
    # Tiles of 4 × 4 patches half a side apart over 4 × 8: the outer ones own 3 columns, the middle one 2.
    owner = np.repeat([0, 0, 0, 1, 1, 2, 2, 2], 4).reshape(8, 4).T
    tiles = [(one[count], left, 0) for count, left in ((4, 0), (2, 16), (0, 32))]
    assert int(evaluator.stitched(tiles, owner, 8, (32, 32)).argmax()) == 4  # 4 · 3/4 + 2 · 2/4


def test_mean_iou_is_compared_class_by_class(opened):
    opened(count=20)

    class Noisy(Oracle):
        def forward(self, images):
            logits = super().forward(images)
            logits[:, 1::3] = logits[:, 1::3].roll(1, 2)
            return logits

    results = []
    for label, model in (("goat", Noisy()), ("nope", Oracle())):
        evaluator, cells, rows = measured("map", model, sizes=(64,))
        results.append(ModelResult(label, 32, rows, cells))
    paired = [row for row in evaluator.paired(results, "nope") if row["score"] == "miou"]
    for row, mine, theirs in zip(paired, *(result.rows for result in results), strict=True):
        assert (row["value"], row["against_value"]) == pytest.approx((mine["miou"], theirs["miou"]))
        assert row["units"] == 4 and row["low"] < row["difference"] < row["high"] < 0


def test_mean_iou_against_a_confusion_matrix(opened):
    items = opened(count=5)

    class Noisy(Oracle):
        def forward(self, images):
            logits = super().forward(images)
            logits[:, 1::3] = logits[:, 1::3].roll(1, 2)
            return logits

    _, _, rows = measured("map", Noisy(), sizes=(96,))
    confusion = np.zeros((CLASSES + 1, CLASSES + 1))
    for place in range(5):
        _, objects = items[place]
        true = target_of(objects, "map", (96, 96))[4::8, 4::8].reshape(-1)
        said = true.copy()
        said[::3] = (said[::3] + 1) % (CLASSES + 1)
        np.add.at(confusion, (true, said), 1)
    union = confusion.sum(0) + confusion.sum(1) - np.diag(confusion)
    row = next(row for row in rows if row["size"] == 96)
    assert row["miou"] == pytest.approx((np.diag(confusion) / union).mean())
    assert row["objects"] == pytest.approx(np.diag(confusion)[1:].sum() / confusion[1:].sum())


@pytest.mark.parametrize("name", ["find", "count", "map"])
def test_figures_and_paired_differences(opened, name, tmp_path):
    opened()
    evaluator, cells, rows = measured(name, sizes=(32, 64))
    results = [ModelResult(label, 32, rows, cells, method=label) for label in ("goat", "nope")]
    evaluator.draw(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    differences = evaluator.paired(results, "nope")
    assert differences and all(row["difference"] == 0 and row["units"] == 4 for row in differences)


@pytest.mark.parametrize("name", ["find", "map"])
def test_models_that_cannot_be_asked_are_refused(opened, name):
    opened()
    model = small(class_token=False) if name == "find" else small(global_pool="token")
    with pytest.raises(ValueError, match=r"data\.target='"):
        measured(name, model, sizes=(32,))


def test_what_a_model_was_not_trained_for_is_refused(opened):
    opened()
    trained = {"source": "scenes", "target": "marked+map", "num_classes": 27, "augment": "window"}
    asked = SceneSettings(source="squares", sizes=(32,))
    with pytest.raises(
        ValueError, match=r"count asks for 'count'; the model was trained with data\.target='marked\+map'"
    ):
        EVALUATORS["count"](asked, trained).cells(Oracle())
    with pytest.raises(ValueError, match=r"find asks for 'marked'; the model was trained with data\.target='count'"):
        EVALUATORS["find"](asked, trained | {"target": "count"}).cells(Oracle())
    assert EVALUATORS["find"](asked, {"source": "glyphs"}).cells(Oracle())  # letters by label: it names one
    with pytest.raises(ValueError, match=r"trained with data\.target='label'"):
        EVALUATORS["count"](asked, {"source": "glyphs"}).cells(Oracle())


def test_a_run_is_measured_on_what_its_training_held_out(stored, monkeypatch):
    trained = {"source": "scenes", "target": "marked+map", "num_classes": 27, "augment": "window"}
    assert EVALUATORS["find"](SceneSettings(), trained).source_name == "scenes"
    assert EVALUATORS["count"](SceneSettings(), trained).source == "scenes-count"
    own = EVALUATORS["map"](SceneSettings(), dict(config(stored).__dict__))
    assert own.source_name == f"all of wds:{stored}/a.tar" and len(own.heldout.items) == 6


def test_the_class_token_names_a_picture_of_which_every_token_has_an_answer(tmp_path):
    scene(0, size=(32, 32), spread=16)[0].save(tmp_path / "a.png")
    model = small().eval()
    model.class_names = tuple("abcdefg")
    named = dict(model.classify(str(tmp_path / "a.png")))
    logits = model(*model.read(str(tmp_path / "a.png")).inputs)[0, 0]
    assert [named[name] for name in "abcdefg"] == pytest.approx(logits.double().softmax(-1).tolist())
    with pytest.raises(ValueError, match="no class token"):
        small(class_token=False).classify(str(tmp_path / "a.png"))


def test_the_cost_of_many_shapes_is_their_mean_and_memory_is_of_the_largest(stored):
    model = small()
    alone = {shape: MODALITY.cost(model, config(stored, shapes=(shape,)), 4) for shape in ("24x24", "32x64")}
    both = MODALITY.cost(model, config(stored, shapes=tuple(alone)), 4)
    assert both.flops == pytest.approx(sum(one.flops for one in alone.values()) / 2)
    assert both.activation_bytes == alone["32x64"].activation_bytes > alone["24x24"].activation_bytes
