"""The config, order and coverage over ranks and workers, exact resume, and what batches and held-out images hold."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader, heldout_by, heldout_name
from tests.vision.image_files import (
    PLAIN,
    config,
    encoded,
    numbers,
    opened,
    picture,
    stored,
    take,
    write_folder,
    write_shards,
)  # fmt: skip

IMAGENET = {"augment": "imagenet", "crop_scale": (0.08, 1.0), "hflip": 0.5, "rand_augment": "rand-m9-n2-mstd0.5"}
IMAGENET |= {"random_erasing": 0.5, "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """60 solid images in five shards of unequal size, and the same as a folder with ten held out."""
    root = tmp_path_factory.mktemp("sources")
    write_folder(root / "folder/train", "abcd", 60)
    write_folder(root / "folder/val", "abcd", 10)
    return {"wds": f"wds:{write_shards(root / 'shards', [20, 7, 13, 1, 19])}", "folder": f"folder:{root / 'folder'}"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "lihgt"}, "did you mean 'light'"),
        ({"crop_scale": (0.7, 1.2)}, "crop_scale"),
        ({"random_erasing": 0.25}, "no effect with augment='light'"),
        ({"augment": "imagenet", "rand_augment": "m9-n2"}, "rand-m9-n2"),
        ({"target": "marks"}, "target 'marks'"),
        ({"target": "marked+map"}, "expected augment='window'"),
        ({"target": "marked+map", "augment": "window", "mixup": 0.1}, "mixup=0.1 with target='marked"),
        ({"shapes": ("0x96",)}, "shapes: '0x96'"),
    ],
)
def test_bad_configs(options, message):
    with pytest.raises(ValueError, match=message):
        VisionDataConfig(**options)


# ---- order, coverage, resume ----


@pytest.mark.parametrize(
    ("kind", "world", "workers", "batches", "micro_batch", "times"),
    [("wds", 2, 2, 6, 5, 1), ("folder", 3, 1, 4, 5, 1), ("wds", 2, 0, 15, 8, 4)],  # the last: batches over epochs' ends
)
def test_every_sample_once_an_epoch(kind, world, workers, batches, micro_batch, times, sources):
    shown = []
    for rank in range(world):
        options = config(sources[kind], num_workers=workers)
        for batch in take(build_loader(options, rank=rank, world=world, micro_batch=micro_batch), batches):
            assert [n % 4 for n in numbers(batch)] == batch["targets"].tolist()
            shown += numbers(batch)
    assert Counter(shown) == Counter(list(range(60)) * times) and shown != list(range(60)) * times


@pytest.mark.parametrize("kind", ["wds", "folder"])
def test_heldout_is_one_pass_with_equally_many_batches(kind, sources):
    count, options = (60, {"heldout_source": sources["wds"]}) if kind == "wds" else (10, {})
    pairs = []
    for rank in range(2):
        loader = build_loader(config(sources[kind], **options), split="heldout", rank=rank, world=2, micro_batch=4)
        batches = list(loader)
        assert len(batches) == len(loader) == -(-count // 8)
        pairs += [pair for batch in batches for pair in zip(numbers(batch), batch["targets"].tolist(), strict=True)]
    assert len(pairs) == -(-count // 8) * 8  # filled up, with places that do not count
    assert sorted(n for n, label in pairs if label >= 0) == list(range(count))
    assert all(label == n % 4 for n, label in pairs if label >= 0)


def test_what_replaces_a_bad_image_does_not_count(tmp_path):
    """One good image in ten: every place of a block is filled; a block of bad ones alone is an error."""
    damage = {n: {"png": b"", "cls": b"0"} for n in range(30) if n % 10}
    source = f"wds:{write_shards(tmp_path, [14, 16], damage=damage)}"
    batches = take(build_loader(config(source, shuffle_buffer=64), micro_batch=3), 10)
    assert {n for batch in batches for n in numbers(batch)} == {0, 10, 20}
    held = list(build_loader(config("wds:none", heldout_source=source), split="heldout", micro_batch=8))
    counted = [n for b in held for n, label in zip(numbers(b), b["targets"].tolist(), strict=True) if label >= 0]
    assert sorted(counted) == [0, 10, 20]
    with pytest.raises(ValueError, match=r"all of . images were skipped: skipped . × empty"):
        take(build_loader(config(source, shuffle_buffer=4), micro_batch=3), 10)


@pytest.mark.parametrize(("kind", "workers"), [("wds", 2), ("folder", 0)])
def test_resume_is_exact_to_the_byte(kind, workers, sources):
    options = config(sources[kind], **{**IMAGENET, "num_workers": workers, "shuffle_buffer": 7})
    loader, again = (build_loader(options, rank=1, world=2, micro_batch=4) for _ in range(2))
    batches = iter(loader)
    take(batches, 9)  # in the middle of the second epoch, and of a round of workers
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    expected = take(batches, 6)
    again.load_state_dict(state)
    for one, other in zip(expected, again, strict=False):
        assert torch.equal(one["images"], other["images"]) and torch.equal(one["targets"], other["targets"])


def test_batches_neither_use_nor_change_the_programs_generators(sources):
    options = config(sources["folder"], **IMAGENET)
    batches = iter(build_loader(options, micro_batch=4))
    take(batches, 1)  # starting a DataLoader draws once
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    second = take(batches, 1)[0]
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert torch.equal(take(build_loader(options, micro_batch=4), 2)[1]["images"], second["images"])


# ---- what a batch holds ----


def test_targets_and_pixels_are_mixed_smoothed_and_normalised(sources):
    """Images of one colour: the share of the partner in the pixels is its share in the targets."""

    def first(**options):
        return take(build_loader(config(sources["folder"], **options), micro_batch=10), 1)[0]

    plain, mixed, smooth = first(), first(mixup=1.0), first(label_smoothing=0.2)
    onehot = torch.nn.functional.one_hot(plain["targets"], 4).float()
    apart = (onehot != onehot.flip(0)).any(1)
    share = mixed["targets"][apart].gather(1, plain["targets"][apart][:, None]).mean()
    assert 0 < share < 1
    torch.testing.assert_close(mixed["images"], share * plain["images"] + (1 - share) * plain["images"].flip(0))
    assert torch.equal(plain["images"], smooth["images"])
    torch.testing.assert_close(smooth["targets"], torch.full((10, 4), 0.05) + 0.8 * onehot)
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)
    normal = (plain["images"] - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(first(mean=mean, std=std)["images"], normal)
    with pytest.raises(ValueError, match="micro_batch 3 must be even"):
        build_loader(config(sources["folder"], **IMAGENET), micro_batch=3)


def test_each_augmentation_changes_the_images_and_depends_on_the_epoch(tmp_path):
    write_shards(tmp_path, [2], damage={n: {"png": encoded(picture(3)), "cls": b"0"} for n in range(2)})
    plain = {**PLAIN, "source": f"wds:{tmp_path}", "augment": "imagenet", "crop_scale": (1.0, 1.0), "image_size": 32}
    values = {"crop_scale": (0.3, 0.6), "hflip": 0.5, "color_jitter": 0.4, "random_erasing": 0.9}
    for name, value in (values | {"rand_augment": "rand-m9-n2-p1"}).items():
        batches = take(build_loader(VisionDataConfig(**plain | {name: value}), micro_batch=2), 8)
        pictures = {batch["images"][i].numpy().tobytes() for batch in batches for i in range(2)}
        assert len(pictures) >= (2 if name == "hflip" else 8)


# ---- held-out images ----


def test_held_out_shards_are_read_by_index_in_workers(sources):
    held, images = opened(sources["wds"]), list(stored(sources["wds"]))
    assert [(image.getpixel((0, 0)), label) for image, label in images] == [((n, 0, 7), n % 4) for n in range(60)]
    places = torch.utils.data.DataLoader(held.items, sampler=range(60), batch_size=None, num_workers=2)
    colours = [image.getpixel((0, 0))[0] for image, _ in places]  # forked workers read the same open file
    assert colours == held.items.order.tolist() != list(range(60))


def test_a_training_decides_what_it_held_out():
    """The same for seeds and variants of a training, which differ in the rest of its data section."""
    data = {"source": "folder:a", "num_classes": 3, "image_size": 96, "seed": 1, "mixup": 0.2}
    one = heldout_by(data)
    assert one == heldout_by({**data, "seed": 2, "image_size": 48}) and heldout_name(one) == "folder:a"
    assert heldout_name(heldout_by({**data, "heldout_source": "folder:b"})) == "all of folder:b, classes of folder:a"
    with pytest.raises(ValueError, match="--source"):
        heldout_by({"source": "wds:x-{0..3}.tar"})


@pytest.mark.parametrize(("split", "count", "size", "side"), [("train", 1976, 48, 64), ("heldout", 416, 96, 384)])
def test_the_built_in_letters(split, count, size, side):
    """A stored size with room for random crops; above the largest, pictures are enlarged."""
    images = build_loader(VisionDataConfig(source="glyphs-builtin", image_size=size), split=split, micro_batch=2)
    images = images.source.images
    assert len(images) == count and images.classes == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    picture, label = images.read(27)
    assert picture.size == (side, side) and picture.mode == "RGB" and label == 1
    assert images.fingerprint == {"train": "5136a41ba6080f3e", "heldout": "23db3152d34eb315"}[split]  # of stored cells


def test_classes_are_those_of_the_config_and_the_same_in_both_splits(sources, tmp_path):
    swapped = f"wds:{write_shards(tmp_path / 'swapped', [4], 'abdc')}"
    unknown = f"wds:{write_shards(tmp_path / 'unknown', [4], indexed=False)}/part-000.tar"
    for source in sources.values():
        for split in ("train", "heldout"):
            with pytest.raises(ValueError, match=r"4 classes, num_classes is 3: --set data\.num_classes=4"):
                other = config(source, num_classes=3, heldout_source=sources["wds"])
                build_loader(other, split=split, micro_batch=2)
        pair = config(source, heldout_source=swapped)
        with pytest.raises(ValueError, match="label 2 is 'c' in training and 'd' in held-out images"):
            opened(pair)
        assert len(opened(replace(pair, heldout_source=unknown)).items) == 4
    with pytest.raises(ValueError, match="set heldout_source"):
        build_loader(config(sources["wds"]), split="heldout", micro_batch=2)
