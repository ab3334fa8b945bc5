"""The config, order over ranks and workers, exact resume, what batches hold, and every kind of
image."""

from __future__ import annotations

import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from modalities.vision import images
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader, heldout_by, heldout_name
from modalities.vision.errors import BadImage
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.images import decode_image, limit_aspect, preprocess, to_rgb
from tests.refusals import refuses
from tests.vision.image_files import (
    config,
    encoded,
    numbers,
    picture,
    solid,
    take,
    write_folder,
    write_shards,
)

IMAGENET = {
    "augment": "imagenet",
    "crop_scale": (0.08, 1.0),
    "hflip": 0.5,
    "rand_augment": "rand-m9-n2-mstd0.5",
}
IMAGENET |= {"random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """60 solid images in five shards of unequal size, and the same as a folder with ten held
    out."""
    root = tmp_path_factory.mktemp("sources")
    write_folder(root / "folder/train", "abcd", 60)
    write_folder(root / "folder/val", "abcd", 10)
    return {
        "wds": f"wds:{write_shards(root / 'shards', [20, 7, 13, 1, 19])}",
        "folder": f"folder:{root / 'folder'}",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "lihgt"}, "did you mean 'light'"),
        ({"crop_scale": (0.7, 1.2)}, "crop_scale"),
        ({"random_erasing": 0.25}, "no effect with augment='light'"),
        ({"augment": "imagenet", "rand_augment": "m9-n2"}, "rand-m9-n2"),
        ({"target": "marked+map"}, "expected augment='window'"),
        (
            {"target": "marked+map", "augment": "window", "mixup": 0.1},
            "mixup=0.1 with target='marked",
        ),
        ({"shapes": ("0x96",)}, "shapes: '0x96'"),
    ],
)
def test_bad_configs(options, message):
    refuses(message, VisionDataConfig, **options)


# ---- order, coverage, resume ----


@pytest.mark.parametrize(
    ("kind", "world", "workers", "batches", "micro_batch", "times"),
    [
        ("wds", 2, 2, 6, 5, 1),
        ("folder", 3, 1, 4, 5, 1),
        ("wds", 2, 0, 15, 8, 4),
    ],  # the last: batches over epochs' ends
)
def test_every_sample_once_an_epoch(kind, world, workers, batches, micro_batch, times, sources):
    shown = []
    for rank in range(world):
        options = config(sources[kind], num_workers=workers)
        for batch in take(
            build_loader(options, rank=rank, world=world, micro_batch=micro_batch), batches
        ):
            assert [n % 4 for n in numbers(batch)] == batch["targets"].tolist()
            shown += numbers(batch)
    assert Counter(shown) == Counter(list(range(60)) * times)
    assert shown != list(range(60)) * times


@pytest.mark.parametrize("kind", ["wds", "folder"])
def test_heldout_is_one_pass(kind, sources):
    """Heldout is one pass with equally many batches."""
    count, options = (60, {"heldout_source": sources["wds"]}) if kind == "wds" else (10, {})
    pairs = []
    for rank in range(2):
        loader = build_loader(
            config(sources[kind], **options), split="heldout", rank=rank, world=2, micro_batch=4
        )
        batches = list(loader)
        assert len(batches) == len(loader) == -(-count // 8)
        pairs += [
            pair
            for batch in batches
            for pair in zip(numbers(batch), batch["targets"].tolist(), strict=True)
        ]
    assert len(pairs) == -(-count // 8) * 8  # filled up, with places that do not count
    assert sorted(n for n, label in pairs if label >= 0) == list(range(count))
    assert all(label == n % 4 for n, label in pairs if label >= 0)


def test_replacement_does_not_count(tmp_path):
    """One good image in ten: every place of a block is filled; a block of bad ones alone is an
    error."""
    damage = {n: {"png": b"", "cls": b"0"} for n in range(30) if n % 10}
    source = f"wds:{write_shards(tmp_path, [14, 16], damage=damage)}"
    batches = take(build_loader(config(source, shuffle_buffer=64), micro_batch=3), 10)
    assert {n for batch in batches for n in numbers(batch)} == {0, 10, 20}
    held = list(
        build_loader(config("wds:none", heldout_source=source), split="heldout", micro_batch=8)
    )
    counted = [
        n
        for b in held
        for n, label in zip(numbers(b), b["targets"].tolist(), strict=True)
        if label >= 0
    ]
    assert sorted(counted) == [0, 10, 20]
    with pytest.raises(ValueError, match=r"all . images were skipped: skipped . × empty"):
        take(build_loader(config(source, shuffle_buffer=4), micro_batch=3), 10)


@pytest.mark.parametrize(("kind", "workers"), [("wds", 2), ("folder", 0)])
def test_resume_is_exact(kind, workers, sources):
    """Resume is exact to the byte."""
    options = config(sources[kind], **{**IMAGENET, "num_workers": workers, "shuffle_buffer": 7})
    loader, again = (build_loader(options, rank=1, world=2, micro_batch=4) for _ in range(2))
    batches = iter(loader)
    take(batches, 9)  # in the middle of the second epoch, and of a round of workers
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    expected = take(batches, 6)
    again.load_state_dict(state)
    for one, other in zip(expected, again, strict=False):
        assert torch.equal(one["images"], other["images"])
        assert torch.equal(one["targets"], other["targets"])


def test_batches_keep_generators(sources):
    """Batches neither use nor change the programs generators."""
    options = config(sources["folder"], **IMAGENET)
    batches = iter(build_loader(options, micro_batch=4))
    take(batches, 1)  # starting a DataLoader draws once
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    second = take(batches, 1)[0]
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert torch.equal(take(build_loader(options, micro_batch=4), 2)[1]["images"], second["images"])


# ---- what a batch holds ----


def test_targets_mixed_and_smoothed(sources):
    """Images of one colour: the share of the partner in the pixels is its share in the targets."""

    def first(**options):
        return take(build_loader(config(sources["folder"], **options), micro_batch=10), 1)[0]

    plain, mixed, smooth = first(), first(mixup=1.0), first(label_smoothing=0.2)
    onehot = torch.nn.functional.one_hot(plain["targets"], 4).float()
    apart = (onehot != onehot.flip(0)).any(1)
    share = mixed["targets"][apart].gather(1, plain["targets"][apart][:, None]).mean()
    assert 0 < share < 1
    torch.testing.assert_close(
        mixed["images"], share * plain["images"] + (1 - share) * plain["images"].flip(0)
    )
    assert torch.equal(plain["images"], smooth["images"])
    torch.testing.assert_close(smooth["targets"], torch.full((10, 4), 0.05) + 0.8 * onehot)
    torch.testing.assert_close(
        first(mean=(0.5,) * 3, std=(0.25,) * 3)["images"], (plain["images"] - 0.5) / 0.25
    )
    refuses(
        "micro_batch 3 must be even",
        build_loader,
        config(sources["folder"], **IMAGENET),
        micro_batch=3,
    )


def test_augmentations_depend_on_epoch(tmp_path):
    """Each augmentation changes the images and depends on the epoch."""
    write_shards(
        tmp_path, [2], damage={n: {"png": encoded(picture(3)), "cls": b"0"} for n in range(2)}
    )
    plain = {"augment": "imagenet", "crop_scale": (1.0, 1.0), "image_size": 32}
    values = {"crop_scale": (0.3, 0.6), "hflip": 0.5, "color_jitter": 0.4, "random_erasing": 0.9}
    for name, value in (values | {"rand_augment": "rand-m9-n2-p1"}).items():
        batches = take(
            build_loader(config(f"wds:{tmp_path}", **plain | {name: value}), micro_batch=2), 8
        )
        pictures = {batch["images"][i].numpy().tobytes() for batch in batches for i in range(2)}
        assert len(pictures) >= (2 if name == "hflip" else 8)


# ---- held-out images ----


def test_training_decides_heldout():
    """The same for seeds and variants of a training, which differ in the rest of its data
    section."""
    data = {"source": "folder:a", "num_classes": 3, "image_size": 96, "seed": 1, "mixup": 0.2}
    one = heldout_by(data)
    several = Resolution(None, {**data, "shapes": ["64x64", "128x128", "64x144"]})
    assert several.source_name == "folder:a"
    assert several.trained_range == (64, 128)
    assert (
        Resolution(ResolutionSettings(source="glyphs-builtin"), data).source_name
        == "glyphs-builtin"
    )
    assert one == heldout_by({**data, "seed": 2, "image_size": 48})
    assert heldout_name(one) == "folder:a"
    assert (
        heldout_name(heldout_by({**data, "heldout_source": "folder:b"}))
        == "all of folder:b, classes of folder:a"
    )
    refuses("--source", heldout_by, {"source": "wds:x-{0..3}.tar"})


@pytest.mark.parametrize(
    ("split", "count", "size", "side"), [("train", 1976, 48, 64), ("heldout", 416, 96, 384)]
)
def test_the_built_in_letters(split, count, size, side):
    """A stored size with room for random crops; above the largest, pictures are enlarged."""
    images = build_loader(
        VisionDataConfig(source="glyphs-builtin", image_size=size), split=split, micro_batch=2
    )
    images = images.source.images
    assert len(images) == count
    assert images.classes == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    picture, label = images.read(27)
    assert picture.size == (side, side)
    assert picture.mode == "RGB"
    assert label == 1
    assert (
        images.fingerprint == {"train": "5136a41ba6080f3e", "heldout": "23db3152d34eb315"}[split]
    )  # of stored cells


def test_classes_equal_in_splits(sources, tmp_path):
    """Classes are those of the config and the same in both splits."""
    swapped = f"wds:{write_shards(tmp_path / 'swapped', [4], 'abdc')}"
    for source in sources.values():
        for split in ("train", "heldout"):
            with pytest.raises(
                ValueError, match=r"4 classes, num_classes is 3: --set data\.num_classes=4"
            ):
                build_loader(
                    config(source, num_classes=3, heldout_source=sources["wds"]),
                    split=split,
                    micro_batch=2,
                )
        ours = build_loader(config(source, heldout_source=swapped), split="heldout", micro_batch=4)
        [batch] = take(ours, 1)
        # The names of numbers 2 and 3 are swapped.
        assert sorted(batch["targets"].tolist()) == [0, 1, 2, 3]
        images = ours.source.images
        assert images.classes == tuple("abcd")
        assert [images.read(n)[1] for n in range(4)] == [0, 1, 3, 2]
    refuses(
        "set heldout_source", build_loader, config(sources["wds"]), split="heldout", micro_batch=2
    )


# ---- images ----

RED = (200, 30, 40)


def red(mode="RGB"):
    return Image.new("RGB", (6, 4), RED).convert(mode)


def half_transparent():
    image = Image.new("RGBA", (6, 4), (*RED, 255))
    image.paste((0, 0, 255, 0), (3, 0, 6, 4))
    return image


CONVERTED = {
    "grey": (encoded(red("L")), (82, 82, 82)),
    "1-bit": (encoded(Image.new("1", (6, 4), 1)), (255, 255, 255)),
    "palette": (encoded(red().quantize(4)), RED),
    "cmyk": (encoded(red("CMYK"), "TIFF"), RED),
    "ycbcr": (encoded(red("YCbCr"), "TIFF"), RED),
    "alpha": (encoded(half_transparent()), RED),
    "16-bit": (encoded(Image.fromarray(np.full((4, 6), 40000, np.uint16))), (155, 155, 155)),
    "32-bit integers within 16 bits": (
        encoded(Image.new("I", (6, 4), 40000), "TIFF"),
        (155, 155, 155),
    ),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_every_kind_becomes_rgb(kind):
    data, colour = CONVERTED[kind]
    image = decode_image(data)
    assert image.mode == "RGB"
    assert image.size == (6, 4)
    assert np.abs(np.subtract(image.getpixel((0, 0)), colour)).max() <= (0 if "16" in kind else 3)
    assert kind != "alpha" or image.getpixel((5, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation_is_applied_once(form):
    upright = picture(5, (48, 32))
    for orientation, angle in ((1, 0), (3, 180), (6, 90), (8, 270)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"quality": 100} if form == "JPEG" else {}
        data = encoded(upright.rotate(angle, expand=True), form, exif=exif, **options)
        image = decode_image(data)
        assert images.upright_size(data) == image.size == to_rgb(image).size == (48, 32)
        assert np.abs(np.asarray(image, int) - np.asarray(upright, int)).mean() < 4
    assert decode_image(encoded(solid(5), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")).size == (
        12,
        12,
    )


JPEG = encoded(picture(1, (80, 80)), "JPEG", quality=95)
PNG = encoded(picture(1, (80, 80)))
SKIPPED = {
    "empty": (b"", "empty"),
    "text": (b"<html>404 not found</html>", "unknown format"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "half a png": (PNG[: len(PNG) // 2], "truncated"),
    "png with a broken chunk": (PNG[:60] + bytes(40) + PNG[100:], "corrupt"),
    "float": (encoded(Image.new("F", (6, 4), 0.5), "TIFF"), "unsupported mode"),
    "32-bit": (encoded(Image.new("I", (6, 4), 1 << 20), "TIFF"), "unsupported mode"),
    "lab": (encoded(Image.new("LAB", (6, 4)), "TIFF"), "unsupported mode"),
    "a transparent grey of 16 bits": (
        encoded(Image.new("I;16", (6, 4)), transparency=9),
        "unsupported mode",
    ),
}


def test_bad_images_have_a_reason(monkeypatch):
    for data, reason in SKIPPED.values():
        with pytest.raises(BadImage) as error:
            decode_image(data)
        assert error.value.reason == reason
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    refuses("too large: 12×12 pixels", decode_image, encoded(solid(1)), error=BadImage)


def test_largest_central_window():
    """The largest central window is read."""
    image = Image.new("RGB", (100, 100))
    image.paste(RED, (0, 25, 100, 75))
    pixels = preprocess(image, 48, 96, mean=(0, 0, 0), std=(1, 1, 1))
    assert (255 * pixels).round().unique(dim=1).shape[1] == 1
    assert abs(255 * pixels[0, 0, 0] - RED[0]) < 1


def test_thin_pictures_take_no_memory():
    """Resizing 60000 × 2 pixels to a shorter side of 32 would make 30 million."""
    image = Image.new("RGB", (60_000, 2), "white")
    image.paste(RED, (29_999, 0, 30_001, 2))
    assert limit_aspect(image).size == (16, 2)
    assert limit_aspect(image).getpixel((8, 0)) == RED
