"""The resolution evaluator on models whose answers are known beforehand, and on timm's, against a
loop of timm's own."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from modalities.loading import Heldout
from modalities.results import ModelResult
from modalities.statistics import t_quantile
from modalities.vision import MODALITY, VisionTransformer, evaluation
from modalities.vision.data import HeldoutImages
from modalities.vision.errors import BadImage
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.images import ImageSet
from modalities.vision.outside import OutsideClassifier
from tests.refusals import refuses
from tests.vision.image_files import write_folder

import timm  # isort: skip  (after the project: on a CPU build of torchvision it does not load before)
from timm.data import create_transform, resolve_model_data_config  # isort: skip

CLASSES = 8


class Greys(ImageSet):
    """Images of one grey each, which is the class; the classes in turn."""

    def __init__(self, count=40, size=(64, 64), broken=(), groups=0):
        self.count = count
        self.size = size
        self.broken = broken
        self.groups = groups
        self.spec = "greys"
        self.classes = tuple(map(str, range(CLASSES)))
        self.fingerprint = "greys"

    def __len__(self):
        return self.count

    def read(self, index):
        if index in self.broken:
            raise BadImage("truncated")
        label = index % CLASSES
        size = self.size[index] if isinstance(self.size, list) else self.size
        return Image.new("RGB", size, (int((label + 0.5) / CLASSES * 255),) * 3), label

    def group(self, index):
        return f"font {index // self.groups}" if self.groups else ""


@pytest.fixture
def images(monkeypatch):
    """Makes `Greys(...)` what the evaluator opens, and returns its held-out items."""

    def use(kind=Greys, **options):
        heldout = Heldout("greys", "greys", HeldoutImages(kind(**options)))
        monkeypatch.setattr(evaluation, "open_heldout", lambda source: {"greys": heldout}[source])
        return heldout.items

    return use


class Reader(nn.Module):
    """Reads the class off the grey; `wrong(true classes, images)` says where it names the next
    one."""

    num_prefix_tokens = 0
    pixels = VisionTransformer.pixels

    def __init__(self, wrong=lambda true, images: true < 0, **config):
        super().__init__()
        facts = {
            "train_size": (16, 16),
            "patch_size": 8,
            "num_classes": CLASSES,
            "mean": (0.0,) * 3,
            "std": (1.0,) * 3,
        }
        self.config = SimpleNamespace(**facts | config)
        self.wrong = wrong
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        true = (images.mean((1, 2, 3)) * CLASSES).long()
        return F.one_hot(
            torch.where(self.wrong(true, images), (true + 1) % CLASSES, true), CLASSES
        ).float()


class Unsure(Reader):
    """A little wrong about classes 0 to 3 at 16 pixels, and about 4 to 7 at 32; surer where it is
    right."""

    def forward(self, images):
        true = (images.mean((1, 2, 3)) * CLASSES - 0.5).round().long()
        right = F.one_hot(true, CLASSES).float()
        return torch.where(
            ((true < 4) == (images.shape[-1] == 16))[:, None], 0.5 * right.roll(1, -1), right
        )


def resolution(**settings):
    return Resolution(ResolutionSettings(source="greys", **settings))


def rows(model, **settings):
    evaluator = resolution(**settings)
    return {row["size"]: row for row in evaluator.rows(dict(evaluator.run(model)))}


def test_errors_are_over_groups(images):
    """Fonts of 10 images each; one model errs in a class, the other nowhere."""
    items = images(groups=10)
    results = []
    for label, model in (("bad", Reader(lambda true, pixels: true == 0)), ("good", Reader())):
        evaluator = resolution(sizes=(16, 32))
        cells = dict(evaluator.run(model))
        results.append(ModelResult(label, 16, evaluator.rows(cells), cells=cells))
    right = np.array([items[place][1] != 0 for place in range(40)], float)
    fonts = np.array([int(items.order[place]) // 10 for place in range(40)])
    sums = [(right - right.mean())[fonts == font].sum() for font in range(4)]
    error = math.sqrt(4 / 3 * sum(one**2 for one in sums)) / 40
    assert all(row["top1_standard_error"] == pytest.approx(error) for row in results[0].rows)
    paired = evaluator.paired(results, "good")
    assert [(row["size"], row["score"], row["units"]) for row in paired] == [
        (16, "top1", 4),
        (32, "top1", 4),
    ]
    for row in paired:
        assert row["difference"] == pytest.approx(right.mean() - 1)
        assert row["high"] - row["difference"] == pytest.approx(t_quantile(0.95, 3) * error)


def test_unreadable_is_counted(images):
    """What cannot be read is left out and counted."""
    images(broken=(0, 3, 39))
    row = rows(Reader(), sizes=(16,))[16]
    assert (row["images"], row["skipped"], row["top1"], row["skipped_because"]) == (
        37,
        3,
        1.0,
        "3 truncated",
    )
    images(broken=range(40))
    refuses("none of its held-out images can be read", rows, Reader())
    images(
        size=[(64, 64)] * 38 + [(64, 20)] * 2
    )  # large enough for 16 pixels, not for 32: the same images at both
    for mode, expected in (("native", (38, "2 too small")), ("resized", (40, ""))):
        measured = rows(Reader(), sizes=(16, 32), mode=mode).values()
        assert {(row["images"], row["skipped_because"]) for row in measured} == {expected}


def test_default_sizes_follow_images(images):
    """Default sizes stop where the images do."""
    for size, trained, expected in (
        ((100, 40), (16, 16), (16, 24, 32)),
        ((100, 100), (16, 24), (16, 32, 48, 64)),  # both sides whole patches
        (
            [(64, 64)] * 37 + [(17, 17)] * 3,
            (16, 16),
            (16, 24, 32, 48, 64),
        ),  # one image in ten may be smaller
    ):
        images(size=size)
        assert resolution().points(Reader(train_size=trained)) == expected


def test_unmeasurable_is_known_first(images):
    """What cannot be measured is known before."""
    images()
    for settings, message in (
        ({"sizes": (16, 20)}, "size 20 .* 16 and 24"),
        ({"sizes": (16, 72)}, "size 72 .* 'greys' .* 64"),
        ({"sizes": (2**20,)}, "images of at most"),
        ({"mode": "natve"}, "did you mean 'native'"),
    ):
        with pytest.raises(ValueError, match=message):
            resolution(**settings).cells(Reader())
    refuses("'greys' has 8 classes and the model 14", resolution().cells, Reader(num_classes=14))
    assert ResolutionSettings(sizes=(32, 16, 32)) == ResolutionSettings(sizes=(16, 32))


def test_stored_cells_keep_identity(images):
    """Names and identity of stored cells are those of 0 5 0."""
    items = images(count=300)
    few, every = (resolution(sizes=(16,), samples=n).cells(Reader()) for n in (128, None))
    assert [cell.name for cell in few] == ["16x16/images=0-128"]
    assert [cell.name for cell in every] == [
        f"16x16/images={a}-{b}" for a, b in ((0, 128), (128, 256), (256, 300))
    ]
    identity = resolution(sizes=(16,), samples=128, batch_tokens=1).identity(Reader())
    assert identity == {"images": "greys", "mode": "native", "fit": "crop", "scales": []}
    assert items.order.tolist() == np.random.default_rng(0).permutation(300).tolist()


def test_larger_size_has_controls(images):
    """By hand: at 32 pixels half are right, as at 16; the mean of both has each right where the
    surer one is."""
    images(count=64)
    evaluator = resolution(sizes=(16, 32), enlarged=True)
    small, large = evaluator.rows(dict(evaluator.run(Unsure())))
    assert small["top1"] == large["top1"] == large["reduced_top1"] == 0.5
    assert large["gain"] == 0
    assert large["multi_scale_top1"] == 1.0
    assert large["multi_scale_gain"] == -0.5
    # greys have nothing to lose
    assert large["enlarged_top1"] == 0.5
    assert large["enlarged_gain"] == 0
    assert small["chance_top1"] == 1 / CLASSES
    assert not {"gain", "multi_scale_gain", "enlarged_gain"} & small.keys()
    apart = {row["control"]: (row["low"], row["high"]) for row in large["controls"]}
    assert list(apart) == ["reduced", "multi_scale", "enlarged"]
    assert apart["multi_scale"][0] < -0.5 < apart["multi_scale"][1] < 0
    images(count=64, groups=8)  # each of all eight classes, so all alike
    grouped = evaluator.rows(dict(evaluator.run(Unsure())))[1]
    assert grouped["groups"] == 8
    assert all(math.isnan(row["low"]) for row in grouped["controls"])


def test_nan_logits_are_wrong(images):
    """Logits that are no numbers are wrong."""

    class Infinite(Reader):
        def forward(self, images):
            logits = super().forward(images)
            logits[:, 0] = -math.inf if images.shape[-1] > 16 else logits[:, 0]
            return logits

    images(count=64)
    small, large = rows(Infinite(), sizes=(16, 32)).values()
    assert small["top1"] == 1.0
    assert large["top1"] == large["top5"] == large["multi_scale_top1"] == 0.0


VIT = "vit_tiny_patch16_224"
OUTSIDE = MODALITY.outside["timm"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pictures of three classes, and a checkpoint of a ViT of three classes."""
    folder = tmp_path_factory.mktemp("timm")
    for part, count in (("train", 3), ("val", 6)):
        write_folder(folder / "images" / part, "abc", count)
    torch.manual_seed(1)
    model = timm.create_model(VIT, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    save_file(model.state_dict(), folder / "vit.safetensors")
    torch.save(model.state_dict(), folder / "vit.pth")
    (folder / "broken.pth").write_bytes(b"nothing")
    return folder


@pytest.mark.slow
def test_rows_equal_timm_loop(files):
    """Rows are those of a loop over timm s own transform."""
    model, trained = OUTSIDE.load(f"{VIT}@{files}/vit.safetensors")
    evaluator = Resolution(
        ResolutionSettings(source=f"folder:{files}/images", sizes=(160, 224), mode="resized")
    )
    rows = {row["size"]: row for row in evaluator.rows(dict(evaluator.run(model)))}
    ours = timm.create_model(
        VIT, num_classes=3, checkpoint_path=f"{files}/vit.pth", dynamic_img_size=True
    ).eval()
    data = resolve_model_data_config(ours)
    assert trained
    assert data["crop_pct"] == 0.9
    for size in (160, 224):
        transform = create_transform(**{**data, "input_size": (3, size, size)})
        right = 0
        nats = 0.0
        for label, name in enumerate("abc"):
            for path in sorted((files / "images" / "val" / name).iterdir()):
                with torch.inference_mode():
                    logits = ours(transform(Image.open(path).convert("RGB"))[None])[0].log_softmax(
                        -1
                    )
                right = right + int(logits.argmax() == label)
                nats = nats - float(logits[label])
        assert rows[size]["images"] == 6
        assert rows[size]["top1"] == right / 6
        assert rows[size]["nll"] == pytest.approx(nats / 6, rel=1e-4)


def test_fixed_size_refuses_another():
    """A model of one size refuses another."""
    model = OutsideClassifier(timm.create_model("mixer_s32_224", num_classes=4), "mixer_s32_224")
    with torch.inference_mode():
        assert model(torch.rand(1, 3, 224, 224)).shape == (1, 4)
        assert model.config.fixed
        refuses("takes images of 224×224 alone, not 96×96", model, torch.rand(2, 3, 96, 96))


def test_unloadable_is_one_line(files):
    """What cannot be loaded is one line."""
    for word, message in (
        ("vit_tiny_patch16_22", "did you mean 'vit_tiny_patch16_224'"),
        (VIT + "@{}/none.pth", "none.pth cannot be loaded"),
        (VIT + "@{}/broken.pth", "broken.pth cannot be loaded"),
        ("resnet10t@{}/vit.pth", "cannot be loaded: KeyError: 'fc.weight'"),
        ("vit_small_patch16_224@{}/vit.pth", "cannot be loaded: .*size mismatch"),
    ):
        refuses(message, OUTSIDE.load, word.format(files))
    assert isinstance(
        OUTSIDE.load("vision_goat_tiny_patch8")[0], VisionTransformer
    )  # registered with timm by the zoo
