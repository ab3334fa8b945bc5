"""The config, order and coverage over ranks and workers, exact resume, and what batches and held-out images hold."""

from __future__ import annotations

import itertools
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
)

IMAGENET = {
    "augment": "imagenet",
    "crop_scale": (0.08, 1.0),
    "hflip": 0.5,
    "rand_augment": "rand-m9-n2-mstd0.5",
    "random_erasing": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """60 solid images in five shards of unequal size, and the same as a folder with ten held out."""
    root = tmp_path_factory.mktemp("sources")
    write_folder(root / "folder/train", "abcd", 60)
    write_folder(root / "folder/val", "abcd", 10)
    return {"wds": f"wds:{write_shards(root / 'shards', [20, 7, 13, 1, 19])}", "folder": f"folder:{root / 'folder'}"}


def read(source, count, *, rank=0, world=1, micro_batch=5, **options):
    """The numbers in the first `count` batches."""
    loader = build_loader(config(source, **options), rank=rank, world=world, micro_batch=micro_batch)
    return [n for batch in take(loader, count) for n in numbers(batch)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "lihgt"}, "did you mean 'light'"),
        ({"image_size": 0}, "image_size=0"),
        ({"crop_scale": (0.7, 1.2)}, "crop_scale"),
        ({"std": (1, 0, 1)}, "std"),
        ({"mixup": -1.0}, "mixup=-1.0"),
        ({"random_erasing": 0.25}, "no effect with augment='light'"),
        ({"augment": "none", "hflip": 0.5}, "no effect with augment='none'"),
        ({"augment": "imagenet", "rand_augment": "m9-n2"}, "rand-m9-n2"),
        ({"target": "marks"}, "target 'marks'"),
        ({"target": "marked"}, "expected augment='window'"),
        ({"augment": "window"}, "expected augment='window'"),
        ({"target": "marked", "augment": "window", "mixup": 0.1}, "mixup=0.1 with target='marked'"),
        ({"shapes": ("0x96",)}, "shapes: '0x96'"),
    ],
)
def test_the_config_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        VisionDataConfig(**options)


# ---- order and coverage ----


@pytest.mark.parametrize(
    ("kind", "world", "workers"), [("wds", 1, 0), ("folder", 2, 2), ("wds", 2, 2), ("folder", 3, 0)]
)
def test_an_epoch_has_every_sample_once_over_ranks_and_workers(kind, world, workers, sources):
    found = []
    for rank in range(world):
        found += read(sources[kind], 60 // world // 5, rank=rank, world=world, num_workers=workers)
    assert sorted(found) == list(range(60)) != found


def test_batches_that_do_not_divide_an_epoch_run_over_into_the_next(sources):
    """60 samples, batches of 8 on 2 ranks: 15 batches a rank are four epochs, every sample four times, nothing dropped."""
    found = Counter(n for rank in (0, 1) for n in read(sources["wds"], 15, rank=rank, world=2, micro_batch=8))
    assert set(found.values()) == {4} and len(found) == 60


def test_labels_stay_with_their_images_and_epochs_differ(sources):
    batches = take(build_loader(config(sources["wds"]), micro_batch=20), 6)
    assert all([n % 4 for n in numbers(batch)] == batch["targets"].tolist() for batch in batches)
    epochs = [list(itertools.chain(*map(numbers, batches[i : i + 3]))) for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert read(sources["wds"], 1, micro_batch=20, seed=1) != numbers(batches[0])


def test_heldout_is_one_pass_with_equally_many_batches(sources):
    for kind, count in (("wds", 60), ("folder", 10)):
        options = {"heldout_source": sources["wds"]} if kind == "wds" else {}
        found = []
        for rank in range(2):
            loader = build_loader(config(sources[kind], **options), split="heldout", rank=rank, world=2, micro_batch=4)
            batches = list(loader)
            assert len(batches) == len(loader) == -(-count // 8)
            found += [pair for batch in batches for pair in zip(numbers(batch), batch["targets"].tolist(), strict=True)]
        assert len(found) == -(-count // 8) * 8 > count  # filled up, with places that do not count
        assert sorted(n for n, label in found if label >= 0) == list(range(count))
        assert all(label == n % 4 for n, label in found if label >= 0)
        again = take(loader, 2)
        state = loader.state_dict()
        assert [numbers(b) for b in again] == [numbers(b) for b in batches[:2]]
        assert [numbers(b) for b in loader] == [numbers(b) for b in batches]  # a pass begins anew, even a broken one
        loader.load_state_dict(state)
        assert [numbers(b) for b in loader] == [numbers(b) for b in batches[2:]]


@pytest.mark.parametrize(("world", "workers", "buffer"), [(1, 0, 1), (2, 2, 8), (15, 0, 1)])
def test_blocks_of_bad_images_alone_do_not_stop_training(world, workers, buffer, tmp_path):
    """One good image in ten; most blocks hold none. Every place is filled, and resuming stays exact."""
    damage = {n: {"png": b"", "cls": b"0"} for n in range(30) if n % 10}
    source = f"wds:{write_shards(tmp_path, [14, 16], damage=damage)}"
    options = config(source, num_workers=workers, shuffle_buffer=buffer)
    loaders = [build_loader(options, rank=world - 1, world=world, micro_batch=3) for _ in range(2)]
    batches = iter(loaders[0])
    found = [n for batch in take(batches, 10) for n in numbers(batch)]
    assert len(set(found)) > 1 and set(found) <= {0, 10, 20}
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert [numbers(b) for b in take(batches, 4)] == [numbers(b) for b in take(loaders[1], 4)]
    held = list(build_loader(config("wds:none", heldout_source=source), split="heldout", micro_batch=8))
    counted = [n for b in held for n, label in zip(numbers(b), b["targets"].tolist(), strict=True) if label >= 0]
    assert sorted(counted) == [0, 10, 20]  # what replaces a bad image does not count


# ---- exact resume ----


@pytest.mark.parametrize(("kind", "workers"), [("wds", 0), ("wds", 2), ("folder", 2)])
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
    assert len(pickle.dumps(state)) < 1000


def test_the_state_is_equal_on_all_ranks_and_checked(sources):
    for source in sources.values():
        loaders = [build_loader(config(source), rank=rank, world=2, micro_batch=4) for rank in range(2)]
        for loader in loaders:
            take(loader, 3)
        assert loaders[0].state_dict() == loaders[1].state_dict()
        with pytest.raises(ValueError, match="seed"):
            build_loader(config(source, seed=5), world=2, micro_batch=4).load_state_dict(loaders[0].state_dict())
    two, three = (build_loader(config(sources["wds"]), world=world, micro_batch=4) for world in (2, 3))
    with pytest.raises(ValueError, match="world=2, this loader 3"):
        three.load_state_dict(two.state_dict())


def test_an_indexed_loader_resumes_with_other_ranks_and_batches(sources):
    one = build_loader(config(sources["folder"]), micro_batch=6)
    batches = iter(one)
    take(batches, 2)
    state, found = one.state_dict(), []
    expected = [n for batch in take(batches, 2) for n in numbers(batch)]
    for rank in range(2):
        two = build_loader(config(sources["folder"], num_workers=1), rank=rank, world=2, micro_batch=3)
        two.load_state_dict(state)
        found += [n for batch in take(two, 2) for n in numbers(batch)]
    assert sorted(found) == sorted(expected)


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

    plain, mixed, smooth, full = first(), first(mixup=1.0), first(label_smoothing=0.2), first(**IMAGENET)
    onehot = torch.nn.functional.one_hot(plain["targets"], 4).float()
    apart = (onehot != onehot.flip(0)).any(1)
    share = mixed["targets"][apart].gather(1, plain["targets"][apart][:, None]).mean()
    assert 0 < share < 1
    torch.testing.assert_close(mixed["images"], share * plain["images"] + (1 - share) * plain["images"].flip(0))
    assert torch.equal(plain["images"], smooth["images"])
    torch.testing.assert_close(smooth["targets"], torch.full((10, 4), 0.05) + 0.8 * onehot)
    assert full["images"].shape == (10, 3, 12, 12) and full["images"].dtype == full["targets"].dtype == torch.float32
    torch.testing.assert_close(full["targets"].sum(1), torch.ones(10))
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)
    normal = (plain["images"] - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(first(mean=mean, std=std)["images"], normal)
    with pytest.raises(ValueError, match="micro_batch 3 must be even"):
        build_loader(config(sources["folder"], **IMAGENET), micro_batch=3)


def test_each_augmentation_changes_the_images_and_depends_on_the_epoch(tmp_path):
    data = encoded(picture(3))
    write_shards(tmp_path, [2], damage={n: {"png": data, "cls": b"0"} for n in range(2)})
    plain = {**PLAIN, "source": f"wds:{tmp_path}", "augment": "imagenet", "crop_scale": (1.0, 1.0), "image_size": 32}
    values = {"crop_scale": (0.3, 0.6), "hflip": 0.5, "color_jitter": 0.4, "random_erasing": 0.9}
    for name, value in (values | {"rand_augment": "rand-m9-n2-p1"}).items():
        batches = take(build_loader(VisionDataConfig(**plain | {name: value}), micro_batch=2), 8)
        pictures = {batch["images"][i].numpy().tobytes() for batch in batches for i in range(2)}
        assert len(pictures) >= (2 if name == "hflip" else 8)


# ---- held-out images ----


def test_held_out_shards_are_read_by_index(sources, tmp_path):
    held, found = opened(sources["wds"]), list(stored(sources["wds"]))
    assert len(held.items) == 60 and held.items.classes == list("abcd")
    for n in (59, 0, 27, 41):
        image, label = found[n]
        assert image.getpixel((0, 0)) == (n, 0, 7) and label == n % 4 and image.size == (12, 12)
    places = torch.utils.data.DataLoader(held.items, sampler=range(60), batch_size=None, num_workers=2)
    colours = [image.getpixel((0, 0))[0] for image, _ in places]  # forked workers read the same open file
    assert colours == held.items.order.tolist()
    same = opened(config("wds:none", heldout_source=sources["wds"]))
    assert held.fingerprint == same.fingerprint != opened(f"wds:{write_shards(tmp_path, [60])}").fingerprint


def test_a_training_decides_what_it_held_out():
    """The same for seeds and variants of a training, which differ in the rest of its data section."""
    data = {"source": "folder:a", "num_classes": 3, "image_size": 96, "seed": 1, "mixup": 0.2}
    one = heldout_by(data)
    assert one == heldout_by({**data, "seed": 2, "image_size": 48}) and heldout_name(one) == "folder:a"
    assert one != heldout_by({**data, "heldout_source": "folder:b"})
    assert heldout_name(heldout_by({**data, "heldout_source": "folder:b"})) == "all of folder:b, classes of folder:a"
    with pytest.raises(ValueError, match="--source"):
        heldout_by({"source": "wds:x-{0..3}.tar"})


@pytest.mark.parametrize(
    ("split", "count", "image_size", "side"),
    [("train", 1976, 48, 64), ("heldout", 416, 48, 64), ("heldout", 416, 96, 384)],
)
def test_the_built_in_letters(split, count, image_size, side):
    """A stored size with room for random crops; above the largest, pictures are enlarged."""
    images = build_loader(VisionDataConfig(source="glyphs-builtin", image_size=image_size), split=split, micro_batch=2)
    images = images.source.images
    assert len(images) == count and images.classes == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    picture, label = images.read(27)
    assert picture.size == (side, side) and picture.mode == "RGB" and label == 1
    assert images.fingerprint == {"train": "5136a41ba6080f3e", "heldout": "23db3152d34eb315"}[split]  # of stored cells
    assert opened("glyphs-builtin").items[1][0].size == (384, 384)


def test_classes_are_those_of_the_config_and_the_same_in_both_splits(sources, tmp_path):
    swapped = f"wds:{write_shards(tmp_path / 'swapped', [4], 'abdc')}"
    unknown = f"wds:{write_shards(tmp_path / 'unknown', [4], indexed=False)}/part-000.tar"
    for source in sources.values():
        for split in ("train", "heldout"):
            other = config(source, num_classes=3, heldout_source=sources["wds"])
            with pytest.raises(ValueError, match=r"4 classes, num_classes is 3: --set data\.num_classes=4"):
                build_loader(other, split=split, micro_batch=2)
        pair = config(source, heldout_source=swapped)
        for open_pair in (opened, lambda c: build_loader(c, split="heldout", micro_batch=2)):
            with pytest.raises(ValueError, match="label 2 is 'c' in training and 'd' in held-out images"):
                open_pair(pair)
        assert len(opened(replace(pair, heldout_source=unknown)).items) == 4
    assert len(opened(config(unknown, heldout_source=swapped)).items) == 4
    with pytest.raises(ValueError, match="set heldout_source"):
        build_loader(config(sources["wds"]), split="heldout", micro_batch=2)
