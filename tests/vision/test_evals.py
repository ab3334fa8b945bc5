"""The resolution evaluator against direct computation, and against models whose answers are known beforehand."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from modalities.cost import Meter
from modalities.evaluation import ModelResult
from modalities.figures import curves, panels, styles_of
from modalities.heldout import Heldout
from modalities.paired import t_quantile
from modalities.results import Score, SeedMean, mean_of_seeds
from modalities.vision import VisionConfig, VisionTransformer, evaluation
from modalities.vision import data as data_module
from modalities.vision import model as model_module
from modalities.vision.data import HeldoutImages
from modalities.vision.evaluators import resolution as module
from modalities.vision.evaluators.resolution import SCALES, Resolution, ResolutionSettings
from modalities.vision.images import BadImage, ImageSet
from modalities.vision.shapes import width_to_height
from modalities.vision.transforms import eval_transform, preprocess
from recipes.report import load_results, print_results, write_results
from tests.launching import ROOT, command

CLASSES = 8


class Greys(ImageSet):
    """Images of one grey each, which is the class; the classes in turn."""

    def __init__(self, count=40, size=(64, 64), broken=()):
        self.count, self.size, self.broken = count, size, broken
        self.spec, self.classes, self.fingerprint = "greys", tuple(map(str, range(CLASSES))), "greys"

    def __len__(self):
        return self.count

    def read(self, index):
        if index in self.broken:
            raise BadImage("truncated")
        label = index % CLASSES
        size = self.size[index] if isinstance(self.size, list) else self.size
        return Image.new("RGB", size, (int((label + 0.5) / CLASSES * 255),) * 3), label


@pytest.fixture
def images(monkeypatch):
    """Makes `Greys(...)` what the evaluator opens, and returns its held-out items."""

    def use(**options):
        made = Heldout("greys", "greys", HeldoutImages(Greys(**options)))
        monkeypatch.setattr(evaluation, "open_heldout", lambda source: {"greys": made}[source])
        return made.items

    return use


@dataclass
class Config:
    img_size: int = 16
    train_size: tuple[int, int] = (16, 16)
    patch_size: int = 8
    num_classes: int = CLASSES
    position: str = "goat"
    ssmax: bool = False
    pad: bool = False
    mean: tuple = (0.0, 0.0, 0.0)
    std: tuple = (1.0, 1.0, 1.0)


class Reader(nn.Module):
    """Reads the class off the grey; `answer(true classes, images, logit_scale)` may say another one."""

    num_prefix_tokens = 0
    pixels = VisionTransformer.pixels

    def __init__(self, answer=lambda true, images, scale: true, **config):
        super().__init__()
        self.config, self.answer = Config(**config), answer
        self.weight = nn.Parameter(torch.zeros(1))
        self.batches = []

    def forward(self, images, logit_scale=1.0):
        self.batches.append(tuple(images.shape))
        true = (images.mean((1, 2, 3)) * CLASSES).long()
        return nn.functional.one_hot(self.answer(true, images, logit_scale), CLASSES).float()


def rows(model, **settings):
    evaluator = resolution(**settings)
    return {row["size"]: row for row in evaluator.rows(dict(evaluator.run(model)))}


def resolution(**settings):
    return Resolution(ResolutionSettings(source="greys", **settings))


def wrong_where(wrong):
    return lambda true, images, scale: torch.where(wrong(true, images, scale), (true + 1) % CLASSES, true)


# ------------------------------------------------------------------------------------------------------- scores


@pytest.mark.slow
def test_scores_are_the_direct_computation(images):
    held_out = images(count=37)
    torch.manual_seed(0)
    config = VisionConfig(
        img_size=16, patch_size=8, num_classes=CLASSES, dim=16, num_layers=1, num_heads=2, hidden_dim=16, position="goat",
        position_options={"rank": 1}, ssmax=False,
    )  # fmt: skip
    model = VisionTransformer(config).eval()
    measured = rows(model, sizes=(16, 32), batch_tokens=50)
    for size in (16, 32):
        top1 = top5 = nll = 0.0
        for image, label in (held_out[n] for n in range(37)):
            with torch.no_grad():
                pixels = preprocess(image, size, size, train_size=16, mean=config.mean, std=config.std)
                logits = model(pixels[None])[0]
            top1 += float(logits.argmax() == label)
            top5 += float(label in logits.topk(5).indices)
            nll -= float(logits.log_softmax(-1)[label])
        row = measured[size]
        assert (row["images"], row["skipped"]) == (37, 0)
        assert row["top1"] == pytest.approx(top1 / 37) and row["top5"] == pytest.approx(top5 / 37)
        assert row["nll"] == pytest.approx(nll / 37, abs=1e-5)
        assert row["images_per_second"] > 0 and row["device"] == "cpu"


def test_groups_of_images_are_what_errors_and_differences_are_over(images, monkeypatch):
    """Fonts of 10 images each; one model errs in a whole font, the other nowhere."""
    monkeypatch.setattr(Greys, "group", lambda self, index: f"font {index // 10}")
    items = images()
    results = []
    for label, wrong in (
        ("bad", lambda true, pixels, scale: true == 0),
        ("good", lambda true, pixels, scale: true < 0),
    ):
        evaluator, model = resolution(sizes=(16, 32)), Reader(wrong_where(wrong))
        cells = dict(evaluator.run(model))
        results.append(ModelResult(label, 16, evaluator.rows(cells), cells=cells))
    right = np.array([items[place][1] != 0 for place in range(40)], float)
    fonts = np.array([int(items.order[place]) // 10 for place in range(40)])
    sums = [(right - right.mean())[fonts == font].sum() for font in range(4)]
    error = math.sqrt(4 / 3 * sum(one**2 for one in sums)) / 40
    for row in results[0].rows:
        assert row["top1"] == right.mean() and row["top1_standard_error"] == pytest.approx(error)
    paired = evaluator.paired(results, "good")
    assert [(row["size"], row["score"], row["units"]) for row in paired] == [(16, "top1", 4), (32, "top1", 4)]
    for row in paired:
        assert row["difference"] == pytest.approx(right.mean() - 1)
        if error:
            assert row["high"] - row["difference"] == pytest.approx(t_quantile(0.95, 3) * error)


def test_ratio_is_to_the_training_size_which_is_always_measured(images):
    images()
    quarter = wrong_where(lambda true, images, scale: (true % 4 == 0) & (images.shape[-1] > 16))
    measured = rows(Reader(quarter), sizes=(32, 48))
    assert sorted(measured) == [16, 32, 48]
    assert [measured[size]["top1"] for size in (16, 32)] == [1.0, 0.75]
    assert measured[48]["ratio"] == pytest.approx(0.75) and measured[16]["ratio"] == 1.0
    assert measured[32]["top1_standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 40))
    assert "tuned_top1" not in measured[32]


def test_another_aspect_is_compared_with_the_training_image(images):
    images(size=(64, 48))
    half = wrong_where(lambda true, images, scale: (true % 2 == 0) & (images.shape[-1] > images.shape[-2]))
    model = Reader(half)
    measured = rows(model, sizes=(16, 24), aspect=(2, 1))
    assert {(row["height"], row["width"]) for row in measured.values()} == {(16, 32), (24, 48)}
    assert measured[16]["ratio"] == pytest.approx(0.5)  # of the square image's 1.0
    assert {shape[2:] for shape in model.batches} == {(16, 16), (16, 32), (24, 48)}
    assert {(r["height"], r["width"]) for r in rows(Reader(), sizes=(16,), aspect=(2, 4)).values()} == {(32, 16)}


def test_a_logit_that_is_no_number_is_wrong(images):
    images()
    model = Reader()
    model.forward = lambda images: torch.full((len(images), CLASSES), math.nan)
    row = rows(model, sizes=(16,))[16]
    assert (row["top1"], row["top5"]) == (0.0, 0.0) and math.isnan(row["ratio"])


def test_images_that_cannot_be_decoded_are_left_out_and_counted(images):
    images(broken=(0, 3, 39))
    row = rows(Reader(), sizes=(16,))[16]
    assert (row["images"], row["skipped"], row["top1"]) == (37, 3, 1.0)
    assert row["skipped_because"] == "3 truncated"
    images(broken=range(40))
    with pytest.raises(ValueError, match="none of the held-out images could be decoded"):
        rows(Reader(), sizes=(16,))
    with pytest.raises(ValueError, match=r"none of its first held-out images can be read; of .*: truncated"):
        rows(Reader())


def test_batches_hold_the_asked_number_of_tokens(images):
    images()
    model = Reader()
    rows(model, sizes=(16, 32), batch_tokens=64)
    assert {shape[0] for shape in model.batches if shape[-1] == 16} == {16, 8}  # 40 images of 4 tokens
    assert {shape[0] for shape in model.batches if shape[-1] == 32} == {4}


def test_no_more_images_than_a_batch_are_made_ready(images, monkeypatch):
    images()
    ready = []
    monkeypatch.setattr(model_module, "preprocess", lambda *a, **k: ready.append(1) or preprocess(*a, **k))
    model, most = Reader(), []
    answer = model.answer
    model.answer = lambda true, pixels, scale: most.append(len(ready)) or ready.clear() or answer(true, pixels, scale)
    row = rows(model, sizes=(16,), batch_tokens=16)[16]
    assert (max(most), row["images"], row["top1"]) == (4, 40, 1.0)


def test_the_first_pass_at_a_size_is_not_timed(images):
    images(count=300)
    model, timed = Reader(), []

    class Clock(Meter):
        def __enter__(self):
            timed.append(len(model.batches))
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Meter", Clock)
        rows(model, sizes=(16, 32))
    assert [shape[-1] for shape in model.batches] == [16] * 4 + [32] * 4  # three cells each, and one pass before them
    assert timed == [1, 2, 3, 5, 6, 7]


def test_five_classes_have_no_top_five(images):
    items = images(count=5)
    items.classes = []  # of which only five occur
    model = Reader(num_classes=5)
    model.forward = lambda pixels, logit_scale=1.0: torch.eye(5)[torch.zeros(len(pixels), dtype=torch.long)]
    row = rows(model, sizes=(16,), tune_temperature=True)[16]
    assert "top1" in row and "tuned_top1" in row and not [name for name in row if "top5" in name]


# -------------------------------------------------------------------------------------------------------- sizes


def test_default_sizes_stop_where_the_images_do(images):
    def points(**settings):
        return resolution(**settings).points(Reader())

    images(size=(64, 64))
    assert points() == (16, 24, 32, 48, 64)
    images(size=(100, 40))
    assert points(fit="crop") == (16, 24, 32)
    assert points(mode="upsampled") == (16, 24, 32, 48, 64)
    assert points() == points(mode="native", fit="crop")  # as in training, where no aspect is asked for
    assert points(mode="resized") == (16, 24, 32, 48, 64)
    assert points(aspect=(2, 1)) == (16, 24, 32, 48)  # extended to 100 × 50
    assert points(aspect=(3, 2)) == (16, 32, 48, 64)  # both sides whole patches; extended to 100 × 67


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": (16, 20)}, "size 20 .* 16 and 24"),
        ({"sizes": (4,)}, "8$"),
        ({"sizes": (24,), "aspect": (3, 2)}, "size 24 at aspect 3:2 .* 16 and 32"),
        ({"sizes": (16, 72)}, "size 72 .* 'greys' .* 64"),
        ({"sizes": (16, 40), "aspect": (1, 2), "fit": "crop"}, "size 40 .* aspect 1:2 is 32"),
        ({"aspect": (9, 1), "fit": "crop"}, "size 16 .* no stored image reaches .* aspect 9:1"),
        ({"sizes": (16,), "tune_temperature": True, "samples": 1}, "at least 2 images"),
    ],
)
def test_what_cannot_be_measured_is_known_before(images, settings, message):
    images()
    with pytest.raises(ValueError, match=message):
        resolution(**settings).cells(Reader())


def test_images_too_small_for_one_size_are_left_out_of_all(images):
    """Sizes are compared on the same images, and none of them is enlarged."""
    sizes = [(64, 64)] * 40
    sizes[3] = sizes[7] = (64, 20)  # by its shorter side large enough for 16 pixels, not for 32
    images(size=sizes)
    measured = rows(Reader(), sizes=(16, 32))
    assert {(row["images"], row["skipped"], row["skipped_because"]) for row in measured.values()} == {
        (38, 2, "2 too small")
    }
    assert rows(Reader(), sizes=(16,))[16]["images"] == 40
    resized = rows(Reader(), sizes=(16, 32), mode="resized")
    assert {(row["images"], row["skipped"], row["top1"]) for row in resized.values()} == {(40, 0, 1.0)}
    names = [[cell.name for cell in resolution(sizes=sizes).cells(Reader())] for sizes in ((16,), (16, 32), (16, 64))]
    assert names[0] == ["16x16/images=0-40"]  # a cell that depends on the other sizes is called by them
    assert names[1][0] == "16x16/images=0-40/of 16x16+32x32" and names[2][0] == "16x16/images=0-40/of 16x16+64x64"


def test_default_sizes_let_one_image_in_ten_go(images):
    images(size=[(64, 64)] * 37 + [(17, 17)] * 3)
    assert resolution().points(Reader()) == (16, 24, 32, 48, 64)
    images(size=[(64, 64)] * 30 + [(17, 17)] * 10)
    assert resolution().points(Reader()) == (16,)


def test_a_header_tells_the_size_of_the_upright_image():
    def size(image, **options):
        image.save(stored := io.BytesIO(), **options)
        return data_module._upright_size(stored.getvalue())

    lying, turned = Image.new("RGB", (30, 20)), Image.Exif()
    turned[0x0112] = 6
    assert size(lying, format="PNG") == size(lying, format="JPEG") == (30, 20)
    assert size(lying, format="JPEG", exif=turned) == (20, 30)
    with pytest.raises(BadImage):
        data_module._upright_size(b"no image")


def test_resized_images_are_those_of_training(images):
    """Cut out of the centre and resized, up or down: what `eval_transform` does, but for the order of the two."""
    images()
    ramp = Image.fromarray(np.linspace(0, 255, 40 * 24).reshape(24, 40).astype(np.uint8)).convert("RGB")
    for size in (16, 48):
        settings = ResolutionSettings(source="greys", mode="resized")
        pixels = Reader().pixels(ramp, size, size, mode=settings.mode, fit=settings.fitting)
        expected = eval_transform(size, (0, 0, 0), (1, 1, 1))(ramp)
        assert pixels.shape == expected.shape and float((pixels - expected).abs().mean()) < 0.01


def test_upsampled_images_may_be_larger_than_stored_ones(images):
    images(size=(20, 20))
    assert rows(Reader(), sizes=(16, 64), mode="upsampled")[64]["top1"] == 1.0


def test_a_source_of_other_classes_is_an_error(images):
    images()
    with pytest.raises(ValueError, match="'greys' has 8 classes and the model 14"):
        resolution().cells(Reader(num_classes=14))


def test_settings_refuse_nonsense():
    for wrong, message in (
        ({"sizes": ()}, "at least 1"),
        ({"sizes": (0,)}, "at least 1"),
        ({"aspect": (0, 1)}, "width:height"),
        ({"mode": "natve"}, "did you mean 'native'"),
        ({"fit": "pad"}, "expected extend or crop"),
        ({"samples": 0}, "samples"),
    ):
        with pytest.raises(ValueError, match=message):
            ResolutionSettings(**wrong)
    assert ResolutionSettings(sizes=(32, 16, 32), aspect=(4, 2)).sizes == (16, 32)
    assert ResolutionSettings(aspect=(4, 2)).aspect == (2, 1) == width_to_height("2:1")
    with pytest.raises(ValueError, match="'2x1'"):
        width_to_height("2x1")


def test_cells_do_not_depend_on_how_many_images_are_asked_for(images):
    images(count=300)
    few, all_ = (resolution(sizes=(16,), samples=n).cells(Reader()) for n in (128, None))
    assert [cell.name for cell in few] == ["16x16/images=0-128"]
    assert [cell.name for cell in all_] == [f"16x16/images={a}-{b}" for a, b in ((0, 128), (128, 256), (256, 300))]
    assert sum(cell.cost for cell in all_) == 300
    identity = resolution(sizes=(16,)).identity(Reader())
    assert identity == resolution(sizes=(16,), samples=128, batch_tokens=1).identity(Reader())
    assert identity != resolution(sizes=(16,), mode="upsampled").identity(Reader())


def test_images_are_taken_in_random_order_and_stay_decoded(images, monkeypatch):
    taken = images(count=64)
    labels = [taken[place][1] for place in range(64)]
    assert labels != [n % CLASSES for n in range(64)] and sorted(labels) == sorted(n % CLASSES for n in range(64))
    assert len(set(labels[:16])) > 4  # a folder's first images are all of one class
    taken.images.broken = range(64)
    assert [taken[place][1] for place in range(64)] == labels
    monkeypatch.setattr(data_module, "KEPT_BYTES", 10 * 3 * 64 * 64)
    taken = images(count=64)
    assert [taken[place][1] for place in range(64)] == labels and len(taken.kept) == 10


def test_a_recipe_decides_what_is_held_out_unless_a_source_does():
    data = {"source": "folder:a", "num_classes": 3}
    assert Resolution(None, data).source_name == "folder:a"
    assert Resolution(None, {**data, "heldout_source": "hf:b"}).source_name == "all of hf:b"
    assert Resolution(ResolutionSettings(source="glyphs-builtin"), data).source_name == "glyphs-builtin"
    assert Resolution().source_name == "glyphs"


def test_the_control_is_the_best_smaller_size(images):
    """What the same images give reduced before the model: it stands beside every size but the smallest."""
    images()
    best_at_32 = wrong_where(lambda true, images, scale: (true % 4 == 0) & (images.shape[-1] != 32))
    measured = rows(Reader(best_at_32), sizes=(8, 32, 48, 64))
    assert [measured[size]["top1"] for size in (8, 16, 32, 48, 64)] == [0.75, 0.75, 1.0, 0.75, 0.75]
    assert [measured[size].get("reduced_top1") for size in (8, 16, 32, 48, 64)] == [None, 0.75, 0.75, 1.0, 1.0]


# ------------------------------------------------------------------------------------------------------- tuning


def test_tuning_finds_the_scale_and_says_that_it_did(images):
    images()
    model = Reader(wrong_where(lambda true, images, scale: torch.full_like(true, scale != 2**0.5, dtype=torch.bool)))
    row = rows(model, sizes=(16, 32), tune_temperature=True)[32]
    assert (row["top1"], row["tuned_top1"]) == (0.0, 1.0)
    assert row["tuned_scale"] == pytest.approx(2**0.5)
    assert 2**0.5 in SCALES and 1.0 in SCALES


def test_no_image_is_scored_at_a_scale_it_helped_to_choose(images):
    """A half that is right at its own best scale alone is wrong at the other's."""
    taken = images()
    # Which half an image is in shows in nothing but its place, so the model is told by the order of its calls.
    model = Reader()
    halves = torch.tensor([place % 2 for place in range(40)], dtype=torch.bool)

    def forward(images, logit_scale=1.0):
        true = torch.tensor([taken[place][1] for place in range(40)])
        right = torch.where(halves, torch.tensor(logit_scale > 1), torch.tensor(logit_scale < 1))
        return nn.functional.one_hot(torch.where(right, true, (true + 1) % CLASSES), CLASSES).float()

    model.forward = forward
    row = rows(model, sizes=(16,), tune_temperature=True)[16]
    assert row["tuned_top1"] == 0.0
    assert row["tuned_scale"] == pytest.approx((2**0.25 + 2**-0.25) / 2)  # of equally good ones that nearest 1


# ------------------------------------------------------------------------------------------ seeds, figures, costs


def result(label, top1, group="", **more):
    table = [
        {"size": size, "top1": value, "ratio": value / top1[0] if top1[0] else math.nan, "device": "cpu"} | more
        for size, value in zip((96, 192), top1, strict=True)
    ]
    return ModelResult(label, 96, table, {}, method=label.split(".")[0], group=group)


def test_seeds_of_a_group_become_their_mean():
    seeds = [result("goat.a", (0.8, 0.5), "goat"), result("goat.b", (0.9, 0.7), "goat"), result("rope.a", (0.8, 0.2))]
    pooled = mean_of_seeds(seeds, "size")
    assert [r.label for r in pooled] == ["goat", "rope.a"]
    mean = pooled[0]
    assert isinstance(mean, SeedMean) and mean.seeds == 2
    assert mean.rows[1]["top1"] == pytest.approx(0.6) and mean.rows[1]["size"] == 192
    assert (mean.low[1]["top1"], mean.high[1]["top1"]) == (0.5, 0.7)
    assert mean.deviation[1]["top1"] == pytest.approx(0.1 * math.sqrt(2))
    assert mean.rows[0]["device"] == "cpu"
    with pytest.raises(ValueError, match="seeds of one set-up"):
        mean_of_seeds([seeds[0], replace(seeds[1], trained_at=128)], "size")


def test_seeds_that_failed_are_no_crash(tmp_path, capsys):
    """One seed knew nothing at the training size, so its ratios are no numbers."""
    good, bad = result("goat.a", (0.8, 0.5), "goat"), result("goat.b", (0.0, 0.1), "goat")
    mean = mean_of_seeds([bad, good], "size")[0].rows, mean_of_seeds([good, bad], "size")[0]
    assert math.isnan(mean[0][1]["ratio"]) and mean[0][1]["top1"] == pytest.approx(0.3)
    for rows in (mean[1].low, mean[1].high, mean[1].deviation):  # whichever seed comes first
        assert math.isnan(rows[1]["ratio"])
    infinite = [replace(good, rows=[{"size": 96, "nll": sign * math.inf}]) for sign in (1, -1)]
    pooled = mean_of_seeds(infinite, "size")[0]
    assert math.isnan(pooled.rows[0]["nll"]) and math.isnan(pooled.deviation[0]["nll"])
    for models in ([good, bad], [bad], [bad, replace(bad, label="goat.c")]):
        write_results(Resolution(), models, tmp_path)
        print_results(Resolution(), models)
        assert "nan" in capsys.readouterr().out
        assert "goat.b,goat,96,96,0.0,nan" in (tmp_path / "resolution.csv").read_text()
        assert (tmp_path / "resolution.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_draws_seeds_and_tuned_numbers(tmp_path):
    path = tmp_path / "figure.png"
    models = [result("goat.a", (0.8, 0.5), "g", tuned_top1=0.6, tuned_ratio=0.9),
              result("goat.b", (0.9, 0.7), "g", tuned_top1=0.7, tuned_ratio=0.9),
              result("nope", (0.3, 0.1))]  # fmt: skip
    Resolution().draw(models, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with Image.open(path) as tuned, _drawn(models[2:], tmp_path / "plain.png") as plain:
        assert tuned.width > 1.3 * plain.width  # a panel of its own


def test_training_at_several_sizes_is_a_range_of_the_figure(tmp_path):
    data = {"source": "folder:a", "shapes": ["64x64", "128x128", "64x144"]}
    assert (
        Resolution(None, data).trained_range == (64, 128)
        and Resolution(None, {"source": "folder:a"}).trained_range == ()
    )
    _, (axis,) = panels(1, 1, width=3, height=3)
    several = replace(result("goat.a", (0.8, 0.5)), trained_range=(64, 128))
    inside = replace(several, trained_range=(64, 400))
    for models, named, lines in (
        ([several], ["trained at 64 to 128"], [128]),  # of 96 to 192
        ([inside], ["trained at 64 to 400"], []),
        ([result("b", (0.8, 0.5))], ["trained at 96"], [96]),
        ([several, result("b", (0.8, 0.5))], ["trained at 64 to 128, 96"], [128, 96]),
        ([several, result("b", (0.8, 0.5)), replace(several, label="goat.c")], ["trained at 64 to 128, 96"], [128, 96]),
    ):
        axis.clear()
        curves(axis, models, Score("top1"), Resolution.axis)
        assert [text.get_text() for text in axis.texts] == named
        assert [line.get_xdata()[0] for line in axis.lines if line.get_xdata()[0] == line.get_xdata()[-1]] == lines
    seeds = [replace(several, group="g"), replace(several, label="goat.b", group="g")]
    assert mean_of_seeds(seeds, "size")[0].trained_range == (64, 128)
    with pytest.raises(ValueError, match="seeds of one set-up"):
        mean_of_seeds([seeds[0], replace(seeds[1], trained_range=())], "size")
    write_results(Resolution(), [several], tmp_path)
    (again,) = load_results(Resolution, tmp_path)
    assert again.trained_range == (64, 128)


def _drawn(models, path):
    Resolution().draw(models, path)
    return Image.open(path)


def test_styles_tell_methods_and_ssmax_apart():
    methods = ("goat", "goat_ssmax", "ggd2d", "ggd2d_separable", "ggd2d_separable_ssmax", "rope2d_axial",
               "rope2d_axial_ssmax", "rope2d_mixed", "alibi", "learned", "t5", "fire", "kerple")  # fmt: skip
    styles = styles_of([SimpleNamespace(method=method, label=method) for method in methods])
    looks = {(s["color"], s["marker"], s["markerfacecolor"]) for s in styles}
    assert len(looks) == len(methods)


METERED = """
import torch
from modalities.cost import Meter
meter = Meter("cpu")
for _ in range(2):
    with meter:
        values = [torch.ones(250_000) for _ in range(64)]  # 64 MB
    del values
assert meter.seconds > 0
print(meter.peak_bytes)
"""


def test_the_meter_sees_memory_that_is_gone_again():
    """In a process of its own: in this one other tests' memory may go meanwhile."""
    done = command([sys.executable, "-c", METERED], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\n" or 60e6 < int(done.stdout) < 80e6


class Shifted(nn.Module):
    """Knows the grey, but says the next class the more often the larger the image: its ranking stays, its decision moves."""

    num_prefix_tokens = 0
    pixels = VisionTransformer.pixels

    def __init__(self):
        super().__init__()
        self.config, self.weight = Config(num_classes=CLASSES), nn.Parameter(torch.zeros(1))

    def forward(self, images, logit_scale=1.0):
        true = images.mean((1, 2, 3)) * CLASSES - 0.5
        logits = -((true[:, None] - torch.arange(CLASSES)) ** 2)
        logits[:, 0] += 6.0 * (images.shape[-1] > 16)  # says class 0 too often
        return logits


def test_a_shift_of_the_decision_is_told_from_a_loss_of_the_ranking(images):
    images(count=64)
    evaluator = Resolution(ResolutionSettings(source="greys", sizes=(16, 32)))
    small, large = evaluator.rows(dict(evaluator.run(Shifted())))
    assert small["top1"] == small["balanced_accuracy"] == small["auc"] == 1.0
    assert large["top1"] == 0.75 and 0.9 < large["auc"] < 1 and large["ece"] > 0.2
    assert large["balanced_accuracy"] == pytest.approx(np.mean(large["per_class"])) and large["per_class"][0] == 1.0


def test_recalibration_is_of_the_training_size_and_marked(images):
    images(count=64)

    class Biased(Shifted):
        def forward(self, images, logit_scale=1.0):
            logits = super().forward(images[..., :16, :16])
            logits[:, 0] += 6.0  # at every size
            return logits

    evaluator = Resolution(ResolutionSettings(source="greys", sizes=(16, 32), recalibrate=True))
    for model, better in ((Biased(), True), (Shifted(), False)):  # what training's size does not show cannot be mended
        small, large = evaluator.rows(dict(evaluator.run(model)))
        assert (small["recalibrated_top1"] == 1.0) and ((large["recalibrated_top1"] > large["top1"] + 0.2) is better)
        assert {"recalibrated_ece", "recalibrated_balanced_accuracy", "recalibrated_nll"} <= small.keys()
    plain = Resolution(ResolutionSettings(source="greys", sizes=(16, 32)))
    assert not any("recalibrated" in name for row in plain.rows(dict(plain.run(Biased()))) for name in row)


def test_recalibration_needs_few_classes_and_two_images(images):
    images(count=40)
    evaluator = Resolution(ResolutionSettings(source="greys", recalibrate=True, samples=1))
    with pytest.raises(ValueError, match="at least 2 images"):
        evaluator.cells(Shifted())


class Unsure(Shifted):
    """A little wrong about classes 0 to 3 at 16 pixels, and about 4 to 7 at 32; surer where it is right."""

    def forward(self, images):
        true = (images.mean((1, 2, 3)) * CLASSES - 0.5).round().long()
        wrong = (true < 4) == (images.shape[-1] == 16)
        right = nn.functional.one_hot(true, CLASSES).float()
        return torch.where(wrong[:, None], 0.5 * right.roll(1, -1), right)


def test_a_larger_size_stands_beside_its_controls(images, tmp_path, monkeypatch):
    """By hand: at 32 pixels half are right, as at 16; the mean of both has each right where the surer one is."""
    images(count=64)
    evaluator = Resolution(ResolutionSettings(source="greys", sizes=(16, 32), enlarged=True))
    cells = dict(evaluator.run(Unsure()))
    small, large = evaluator.rows(cells)
    assert small["top1"] == large["top1"] == large["reduced_top1"] == 0.5 and large["gain"] == 0
    assert large["multi_scale_top1"] == 1.0 and large["multi_scale_gain"] == -0.5
    assert large["enlarged_top1"] == 0.5 and large["enlarged_gain"] == 0  # greys have nothing to lose
    assert small["chance_top1"] == 1 / CLASSES and not {"gain", "multi_scale_gain", "enlarged_gain"} & small.keys()
    apart = {row["control"]: (row["low"], row["high"]) for row in large["controls"]}
    assert apart["multi_scale"][0] < -0.5 < apart["multi_scale"][1] < 0 and list(apart) == [
        "reduced",
        "multi_scale",
        "enlarged",
    ]
    monkeypatch.setattr(Greys, "group", lambda self, index: f"font {index // 8}")  # all eight classes, so all alike
    images(count=64)
    grouped = evaluator.rows(dict(evaluator.run(Unsure())))[1]
    assert grouped["groups"] == 8 and all(math.isnan(row["low"]) for row in grouped["controls"])
    result = ModelResult("unsure", 16, evaluator.rows(cells), cells)
    evaluator.write([result], tmp_path)
    evaluator.draw([result], tmp_path / "controls.png")
    assert len((tmp_path / "resolution.controls.csv").read_text().splitlines()) == 1 + 3
    plain = Resolution(ResolutionSettings(source="greys", sizes=(16, 32)))
    again = plain.rows({name: cell for name, cell in cells.items() if not name.startswith("enlarged")})[1]
    assert again["multi_scale_gain"] == -0.5 and "enlarged_gain" not in again
    plain.draw([replace(result, rows=[small, again])], tmp_path / "plain.png")
    with Image.open(tmp_path / "controls.png") as all_, Image.open(tmp_path / "plain.png") as fewer:
        assert all_.width > 1.2 * fewer.width


def test_the_mean_of_sizes_has_no_answer_where_a_logit_is_no_number(images):
    class Infinite(Shifted):
        def forward(self, images):
            logits = super().forward(images[..., :16, :16])
            logits[:, 0] = -math.inf  # finite probabilities, of which the other classes' are right
            return logits

    images(count=64)
    evaluator = Resolution(ResolutionSettings(source="greys", sizes=(16, 32)))
    large = evaluator.rows(dict(evaluator.run(Infinite())))[1]
    assert large["top1"] == large["multi_scale_top1"] == 0.0


def test_controls_are_of_the_same_images(images):
    images(count=64)
    evaluator = Resolution(ResolutionSettings(source="greys", sizes=(16, 32)))
    cells = dict(evaluator.run(Shifted()))
    names = list(cells)
    for name, place in zip(names, (0, 5), strict=True):  # one image less, and not the same
        for column in ("labels", "said", "confidence", "odd", "groups", "logits"):
            cells[name] = cells[name] | {column: [x for n, x in enumerate(cells[name][column]) if n != place]}
    assert not {"gain", "multi_scale_gain"} & evaluator.rows(cells)[1].keys()


def test_tuning_reads_no_enlarged_image(images):
    images(count=8)
    seen = {}
    for tuned in (False, True):
        model = Reader()
        evaluator = Resolution(
            ResolutionSettings(source="greys", sizes=(16, 32), enlarged=True, tune_temperature=tuned)
        )
        evaluator.rows(dict(evaluator.run(model)))
        seen[tuned] = len(model.batches)
    assert seen[True] - seen[False] == 2 * (len(SCALES) - 1)  # at two sizes, and not at the enlarged


def test_enlarged_is_what_upsampled_measures(images, monkeypatch):
    """Stripes of one pixel are there at 32, and not in what was reduced to 16 and enlarged."""

    def striped(self, index):
        label = index % CLASSES
        grey = np.full((32, 32), (label + 0.5) / CLASSES * 255)
        grey[:, ::2] += 12
        grey[:, 1::2] -= 12
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB"), label

    monkeypatch.setattr(Greys, "read", striped)
    images(size=(32, 32))
    model = Reader(wrong_where(lambda true, pixels, scale: pixels.diff(dim=-1).abs().mean((1, 2, 3)) < 0.05))
    settings = {"source": "greys", "sizes": (16, 32)}
    beside, alone = (
        Resolution(ResolutionSettings(**settings, **more)) for more in ({"enlarged": True}, {"mode": "upsampled"})
    )
    row = beside.rows(dict(beside.run(model)))[1]
    assert row["top1"] == 1.0 and row["enlarged_top1"] == alone.rows(dict(alone.run(model)))[1]["top1"] == 0.0
    with pytest.raises(ValueError, match="--mode upsampled"):
        ResolutionSettings(mode="upsampled", enlarged=True)


def test_the_recall_of_every_class_is_a_file(images, tmp_path):
    images(count=64)
    evaluator = Resolution(ResolutionSettings(source="greys", sizes=(16, 32)))
    cells = dict(evaluator.run(Shifted()))
    evaluator.write([ModelResult("shifted", 16, evaluator.rows(cells), cells)], tmp_path)
    lines = (tmp_path / "resolution.shifted.classes.tsv").read_text().splitlines()
    assert lines[0] == "class\t16\t32" and len(lines) == 1 + CLASSES and lines[1].startswith("0\t1.0\t1.0")
