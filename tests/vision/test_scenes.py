"""Pictures with objects: read from every kind of source, cut into windows, asked for, and measured
with their controls."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn

from modalities.encoder.training import weight
from modalities.loading import Heldout
from modalities.results import ModelResult
from modalities.vision import MODALITY, VisionConfig, VisionDataConfig, VisionTransformer
from modalities.vision.changes import CHANGES, changed
from modalities.vision.data import HeldoutImages
from modalities.vision.errors import BadImage
from modalities.vision.evaluators import EVALUATORS
from modalities.vision.evaluators import scenes as module
from modalities.vision.evaluators.scenes import SceneSettings
from modalities.vision.images import ImageSet
from modalities.vision.modality import MAP_WEIGHT, loss
from modalities.vision.objects import check_objects, parse_objects, target_of, targets_of, window_on
from modalities.vision.rings import ring_centre
from tests.refusals import refuses
from tests.vision.image_files import encoded, write_tar

CLASSES = 6


def scene(number, *, size=(96, 96), marked=1, spread=24):
    """Squares of 8 pixels whose red is 40 + 30 · category, on a grid of 8, the marked ones blue too
    and close together."""
    rng = np.random.default_rng(number)
    rows = size[0] // 8
    columns = size[1] // 8
    pixels = np.zeros((*size, 3), np.uint8)
    fields = {"bbox": [], "category": [], "marked": []}
    corner = rng.integers([rows - spread // 8 + 1, columns - spread // 8 + 1])
    inside = [
        (corner[0] + r, corner[1] + c) for r in range(spread // 8) for c in range(spread // 8)
    ]
    everywhere = [(r, c) for r in range(rows) for c in range(columns) if (r, c) not in inside]
    places = [inside[n] for n in rng.permutation(len(inside))[:marked]]
    places += [everywhere[n] for n in rng.permutation(len(everywhere))[: rows * columns // 8]]
    for n, (row, column) in enumerate(places):
        category = int(rng.integers(CLASSES))
        pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = (
            40 + 30 * category,
            0,
            255 * (n < marked),
        )
        fields["bbox"].append([8 * int(column), 8 * int(row), 8, 8])
        fields["category"].append(category)
        fields["marked"].append(n < marked)
    return Image.fromarray(pixels), fields


class Scenes(ImageSet):
    def __init__(self, count=12, **options):
        self.pictures = [scene(number, **options) for number in range(count)]
        self.spec = "squares"
        self.classes = None
        self.fingerprint = "squares"

    def __len__(self):
        return len(self.pictures)

    def read_objects(self, index):
        image, fields = self.pictures[index]
        return image, parse_objects(fields, f"group {index % 4}")


def test_non_objects_are_skipped():
    """What are no objects is skipped by reason."""
    box = [[0, 0, 1, 1]]
    for fields, reason in (
        ({"bbox": box}, "no objects"),
        ({"bbox": [[0, 0, 1]], "category": [1]}, "bad objects: .* boxes of four numbers"),
        ({"bbox": box, "category": [1, 2]}, "bad objects: expected equally many"),
        ({"bbox": box, "category": [0.5]}, "bad objects: .* whole categories"),
        ({"bbox": [[0, 0, 0, 1]], "category": [1]}, "bad objects: .* above 0"),
        ({"bbox": box, "category": [1], "evidence": [1]}, "bad objects: .* evidence true or false"),
    ):
        refuses(reason, parse_objects, fields, error=BadImage)


def test_windows_hold_marked_objects():
    """Windows hold the marked objects and lie in one another."""
    for number in range(4):
        image, fields = scene(number, size=(96, 160), marked=3)
        objects = parse_objects(fields)
        at = tuple(np.random.default_rng(number).random(2))
        inner = objects.boxes[objects.marked]
        for shape in ((24, 24), (40, 40), (56, 72), (96, 160)):
            window = np.array(window_on(image.size, objects, shape, at), float)
            for box in inner:
                assert (window[:2] <= box[:2]).all()
                assert (window[:2] + window[2:] >= box[:2] + box[2:]).all()
            inner = [window]
    apart = parse_objects({"bbox": [[0, 0, 8, 8], [80, 0, 8, 8]], "category": [0, 1]})
    for shape, message in (
        ((64, 64), "spread: the objects to be shown take 88"),
        ((104, 96), "too small: 96×96"),
    ):
        refuses(message, window_on, (96, 96), apart, shape, (0, 0), error=BadImage)


def test_incomplete_windows_answer_0():
    """Windows without all that the question needs have answer 0."""
    boxes = [[0, 0, 8, 8], [40, 0, 8, 8]]
    objects = parse_objects(
        {"bbox": boxes, "category": [3, 1], "marked": [False, True], "evidence": [True, False]}
    )
    assert window_on((96, 96), objects, (56, 56), (0, 0)) == (0, 0, 56, 56)
    for window, answer in (((0, 0, 56, 56), 2), ((24, 0, 56, 56), 0)):
        assert targets_of(objects.in_window(window), (56, 56))["targets"] == answer


def test_unasked_pictures_have_reason():
    """Pictures that cannot be asked have a reason."""
    _, fields = scene(1)
    objects = parse_objects(fields)
    unmarked = replace(objects, marked=np.zeros_like(objects.marked))
    for wrong, size, target, message in (
        (unmarked, 96, "marked", "not one marked"),
        (objects, 96, "map", "label out of range"),
        (objects, 8, "map", "boxes lie outside of an image of 8×8"),
    ):
        refuses(
            message,
            check_objects,
            wrong,
            (size, size),
            target,
            [],
            max(fields["category"]) + 1,
            error=BadImage,
        )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Six scenes as a shard."""
    pairs = [scene(number) for number in range(6)]
    samples = [
        {"json": json.dumps({"objects": fields}).encode(), "png": encoded(image)}
        for image, fields in pairs
    ]
    path = tmp_path_factory.mktemp("stored") / "a.tar"
    return f"wds:{write_tar(path, [(str(n), sample) for n, sample in enumerate(samples)])}"


def config(stored, **options):
    settings = {
        "target": "marked+map",
        "num_classes": CLASSES + 1,
        "image_size": 32,
        "augment": "window",
    } | options
    return VisionDataConfig(source=stored, heldout_source=stored, **settings)


def test_window_batches_draw_shape(stored):
    """Batches of windows are what they ask for and draw a shape."""
    loader = MODALITY.loader(
        config(stored, shapes=("24x24", "32x48"), mean=(0, 0, 0), std=(1, 1, 1)), micro_batch=8
    )
    batches = [batch for _, batch in zip(range(6), loader, strict=False)]
    assert {tuple(batch["maps"].shape) for batch in batches} == {(8, 24, 24), (8, 32, 48)}
    for batch in batches:
        red, _, blue = (255 * batch["images"]).round().long().unbind(1)
        assert torch.equal(batch["maps"], torch.where(red > 0, (red - 40) // 30 + 1, 0))
        for answer, reds, mark in zip(batch["targets"], red, blue, strict=True):
            assert set(reds[mark == 255].tolist()) == {40 + 30 * (int(answer) - 1)}


def test_unmarked_windows_answer_0(stored):
    """Windows without a mark answer 0."""
    data = config(stored, unmarked=0.5, mean=(0, 0, 0), std=(1, 1, 1))
    batch = next(iter(MODALITY.loader(data, micro_batch=64)))
    marked = (batch["images"][:, 2] == 1).any((1, 2))
    assert torch.equal(batch["targets"] > 0, marked)
    assert 0.3 < marked.float().mean() < 0.7
    assert (data.unaugmented().unmarked, config(stored).unmarked) == (0, 0)


def small(**options):
    torch.manual_seed(0)
    sizes = {
        "img_size": 32,
        "patch_size": 8,
        "num_classes": CLASSES + 1,
        "dim": 16,
        "num_layers": 1,
        "num_heads": 1,
    }
    config = sizes | {"hidden_dim": 16, "position": "nope", "global_pool": ""} | options
    return VisionTransformer(VisionConfig(**config)).eval()


def test_loss_of_token_and_map(stored):
    """The loss is the class tokens and the maps."""
    batch = next(iter(MODALITY.loader(config(stored), micro_batch=5)))
    model = small()
    total, metrics = loss(model, batch)
    logits = model(batch["images"])
    here = batch["maps"][:, 4::8, 4::8].reshape(-1)
    token = F.cross_entropy(logits[:, 0], batch["targets"])
    assert torch.allclose(
        total, token + MAP_WEIGHT * F.cross_entropy(logits[:, 1:].reshape(-1, CLASSES + 1), here)
    )
    assert metrics["top1"] == (logits[:, 0].argmax(-1) == batch["targets"]).float().mean()


def test_cost_of_many_shapes(stored):
    """The cost of many shapes is their mean and memory is of the largest."""
    alone = {
        shape: MODALITY.cost(small(), config(stored, shapes=(shape,)), 4)
        for shape in ("24x24", "32x64")
    }
    both = MODALITY.cost(small(), config(stored, shapes=tuple(alone)), 4)
    assert both.flops == pytest.approx(sum(one.flops for one in alone.values()) / 2)
    assert (
        both.activation_bytes == alone["32x64"].activation_bytes > alone["24x24"].activation_bytes
    )


def test_heldout_windows_are_fixed(stored):
    """Heldout windows are the same every time and count once."""
    heldout = MODALITY.heldout(config(stored), samples=6, rank=0, world=1, micro_batch=4)
    one = list(heldout)
    two = list(heldout)
    assert all(torch.equal(a["images"], b["images"]) for a, b in zip(one, two, strict=True))
    assert sum(weight(batch)[0] for batch in one) == 6
    assert (one[-1]["maps"][one[-1]["targets"] < 0] == -1).all()


class Oracle(nn.Module):
    """Reads squares off their exact colours: of a picture whose squares are resized it sees
    nothing.

    noisy: names the next class at every third patch. wrong: names the next class for the picture
    where that is even.
    """

    num_prefix_tokens = 1
    pixels = VisionTransformer.pixels

    def __init__(self, *, noisy=False, wrong=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.noisy = noisy
        self.wrong = wrong
        facts = {"train_size": (32, 32), "patch_size": 8, "num_classes": CLASSES + 1}
        self.config = SimpleNamespace(
            **facts, class_token=True, global_pool="", mean=(0.0,) * 3, std=(1.0,) * 3
        )

    def forward(self, images):
        red, _, blue = (255 * images[:, :, 4::8, 4::8].flatten(2)).unbind(1)
        category = (red - 40) / 30
        named = torch.where(
            ((category - category.round()).abs() < 0.01) & (red > 30), category.round() + 1, 0
        ).long()
        answer = (named * ((blue > 250) & (named > 0))).amax(1)
        if self.wrong:
            answer = torch.where((answer > 0) & (answer % 2 == 0), answer - 1, answer)
        logits = F.one_hot(torch.cat([answer[:, None], named], 1), CLASSES + 1)
        if self.noisy:
            logits[:, 1::3] = logits[:, 1::3].roll(1, 2)
        return 20.0 * logits.float()


@pytest.fixture
def opened(monkeypatch):
    def use(**options):
        heldout = Heldout("squares", "squares", HeldoutImages(Scenes(**options), objects=True))
        monkeypatch.setattr(
            module, "open_heldout", lambda source, objects: {"squares": heldout}[source]
        )
        return heldout.items

    return use


def measured(name, model=None, **settings):
    evaluator = EVALUATORS[name](SceneSettings(source="squares", **settings))
    cells = dict(evaluator.run(model or Oracle()))
    return evaluator, cells, evaluator.rows(cells)


@pytest.mark.parametrize("name", ["find", "map"])
def test_oracle_reads_whole_pixels(opened, name):
    """An oracle is right where it reads pixels as they are."""
    opened()
    evaluator, _, rows = measured(name, sizes=(32, 64, 96))
    main = evaluator.main
    assert [row["size"] for row in rows] == [32, 64, 96]
    for row in rows:
        assert row["canvases"] == 12
        assert row["groups"] == 4
        assert row["skipped"] == 0
        assert row[main] == 1.0
        assert row[f"tiled_{main}"] == 1.0 or name != "map"
        assert row[f"chance_{main}"] < 1
        assert row[f"{main}_standard_error"] == 0
        assert row["size"] == 32 or row[f"reduced_{main}"] < 1
        best = max(row[f"{reading}_{main}"] for reading in evaluator.readings[1:])
        assert row["gain"] == pytest.approx(row[main] - best)


class Turned(Oracle):
    """Its classes are those of the scenes the other way round, behind the background."""

    class_names = ("background", *"fedcba")

    def forward(self, images):
        logits = super().forward(images)
        return torch.cat([logits[..., :1], logits[..., 1:].flip(-1)], -1)


@pytest.mark.parametrize("name", ["find", "map"])
def test_scenes_are_scored_by_name(opened, name):
    """Categories become the model's by the names of classes; strangers are an error."""
    scenes = opened().images
    scenes.classes = tuple("abcdef")
    evaluator, _, rows = measured(name, Turned(), sizes=(32, 64))
    assert all(row[evaluator.main] == 1.0 for row in rows)
    assert evaluator.identity(Turned())["labels"] == [5, 4, 3, 2, 1, 0]
    assert "labels" not in evaluator.identity(Oracle())
    scenes.classes = tuple("abcdeg")
    refuses("does not have: 'g'", evaluator.cells, Turned())


def test_ring_crop_is_control(opened):
    """Two pictures of 96 pixels with half circles; the window of 32 pixels round the closed ring
    holds the marked square."""
    items = opened(count=2)
    for number, (x, y) in enumerate(((30, 60), (70, 25))):
        image, fields = items.images.pictures[number]
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, 95, 95), fill=(130, 130, 130))
        for at, turn in (((x, y), 360), ((95 - x, 95 - y), 150)):
            draw.arc(
                (at[0] - 18, at[1] - 18, at[0] + 18, at[1] + 18),
                20,
                20 + turn,
                fill=(0, 220, 90),
                width=3,
            )
        fields |= {"bbox": [[x - x % 8, y - y % 8, 8, 8]], "category": [3], "marked": [True]}
        draw.rectangle((x - x % 8, y - y % 8, x - x % 8 + 7, y - y % 8 + 7), fill=(130, 0, 255))
        assert np.abs(np.subtract(ring_centre(np.asarray(image)), (x, y))).max() <= 1
    assert measured("find", sizes=(96,))[2][-1]["cropped_top1"] == 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_changed_picture_keeps_objects(name):
    """A red square is the one object; where the picture has colours, the box holds the red pixels
    and little else."""
    pixels = np.full((120, 120, 3), 130, np.uint8)
    pixels[50:66, 64:80] = (255, 0, 0)
    objects = parse_objects({"bbox": [[64, 50, 16, 16]], "category": [2]})
    image, moved = changed(Image.fromarray(pixels), objects, name)
    marked = (
        np.abs(np.array(image).astype(int) - np.array(image)[image.height // 2, 2]).sum(2) > 60
    ).nonzero()
    (box,) = moved.boxes
    assert (
        np.abs(
            [marked[1].mean() - box[0] - box[2] / 2, marked[0].mean() - box[1] - box[3] / 2]
        ).max()
        < 1
    )
    assert (
        abs(len(marked[0]) / (256 * {"smaller": 0.85**2, "larger": 1.35**2}.get(name, 1)) - 1)
        < 0.35
    )


@pytest.mark.slow
def test_mean_iou_by_confusion_matrix(opened):
    """Mean iou against a confusion matrix."""
    items = opened(count=20)
    results = []
    for label, model in (("goat", Oracle(noisy=True)), ("nope", Oracle())):
        evaluator, cells, rows = measured("map", model, sizes=(96,))
        results.append(ModelResult(label, 32, rows, cells))
    confusion = np.zeros((CLASSES + 1, CLASSES + 1))
    for place in range(20):
        true = target_of(items[place][1], "map", (96, 96))[4::8, 4::8].reshape(-1)
        said = true.copy()
        said[::3] = (said[::3] + 1) % (CLASSES + 1)
        np.add.at(confusion, (true, said), 1)
    union = confusion.sum(0) + confusion.sum(1) - np.diag(confusion)
    row = results[0].rows[-1]
    assert row["miou"] == pytest.approx((np.diag(confusion) / union).mean())
    assert row["objects"] == pytest.approx(np.diag(confusion)[1:].sum() / confusion[1:].sum())
    paired = [row for row in evaluator.paired(results, "nope") if row["score"] == "miou"]
    for row, noisy, exact in zip(paired, *(result.rows for result in results), strict=True):
        assert (row["value"], row["against_value"]) == pytest.approx((noisy["miou"], exact["miou"]))
        assert row["units"] == 4
        assert row["low"] < row["difference"] < row["high"] < 0


def test_unasked_model_is_refused(opened, stored):
    """A model that cannot be asked is refused."""
    opened()
    for name, model in (("find", small(class_token=False)), ("map", small(global_pool="token"))):
        refuses(r"data\.target='", measured, name, model, sizes=(32,))
    trained = {"source": "scenes", "target": "marked+map", "num_classes": 27, "augment": "window"}
    settings = SceneSettings(source="squares", sizes=(32,))
    for name, target in (("map", "label"), ("find", "count+map")):
        evaluator = EVALUATORS[name](settings, {"source": "glyphs", "target": target})
        refuses(rf"{name} asks .*target='{re.escape(target)}'", evaluator.cells, Oracle())
    assert EVALUATORS["find"](settings, {"source": "glyphs"}).cells(
        Oracle()
    )  # letters by label: it names one
    # A run is measured on what its training held out, where that can be asked.
    assert EVALUATORS["map"](SceneSettings(), trained).source_name == "scenes"
    assert EVALUATORS["find"](SceneSettings(), {"source": "glyphs"}).source == "scenes"
