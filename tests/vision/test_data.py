"""The config, order and coverage over ranks and workers, exact resume, and what training batches hold."""

from __future__ import annotations

import itertools
import pickle
import random
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader, heldout_by, heldout_name
from modalities.vision.samples import ShardOrder
from modalities.vision.shards import ShardSet, open_shards
from tests.vision.image_files import encoded, numbers, opened, picture, solid, stored, take, write_shards

PLAIN = {"augment": "none", "image_size": 12, "num_classes": 4, "mean": (0, 0, 0), "std": (1, 1, 1)}
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
def shards(tmp_path_factory):
    """60 solid images in five shards of unequal size."""
    return write_shards(tmp_path_factory.mktemp("shards"), [20, 7, 13, 1, 19])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for part, count in (("train", 60), ("val", 10)):
        for n in range(count):
            path = root / part / "abcd"[n % 4] / f"{n:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            solid(n).save(path)
    return root


def config(source, **options):
    return VisionDataConfig(**{**PLAIN, "source": str(source), "shuffle_buffer": 8, **options})


# ---- the config ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "lihgt"}, "did you mean 'light'"),
        ({"image_size": 0}, "image_size=0"),
        ({"crop_scale": (0.7, 1.2)}, "crop_scale"),
        ({"std": (1, 0, 1)}, "std"),
        ({"mixup": -1.0}, "mixup=-1.0"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
        ({"random_erasing": 0.25}, "no effect with augment='light'"),
        ({"augment": "none", "hflip": 0.5}, "no effect with augment='none'"),
        ({"augment": "imagenet", "rand_augment": "m9-n2"}, "rand-m9-n2"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_the_config_refuses_what_it_cannot_do(options, message):
    with pytest.raises(ValueError, match=message):
        VisionDataConfig(**options)


# ---- order and coverage ----


@pytest.mark.parametrize("kind", ["wds", "folder"])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (3, 0)])
def test_an_epoch_has_every_sample_once_over_ranks_and_workers(kind, world, workers, shards, folder):
    source = f"wds:{shards}" if kind == "wds" else f"folder:{folder}"
    found = []
    for rank in range(world):
        loader = build_loader(config(source, num_workers=workers), rank=rank, world=world, micro_batch=5)
        found += [n for batch in take(loader, 60 // world // 5) for n in numbers(batch)]
    assert sorted(found) == list(range(60))
    assert found != list(range(60))


def test_batches_that_do_not_divide_an_epoch_run_over_into_the_next(shards):
    """60 samples, batches of 8 on 2 ranks: 15 batches a rank are four epochs, every sample four times, nothing dropped."""
    found = Counter()
    for rank in range(2):
        loader = build_loader(config(f"wds:{shards}"), rank=rank, world=2, micro_batch=8)
        found.update(n for batch in take(loader, 15) for n in numbers(batch))
    assert set(found.values()) == {4} and len(found) == 60


def test_labels_stay_with_their_images_and_epochs_differ(shards):
    batches = take(build_loader(config(f"wds:{shards}"), micro_batch=20), 6)
    for batch in batches:
        assert [n % 4 for n in numbers(batch)] == batch["targets"].tolist()
    epochs = [list(itertools.chain(*map(numbers, batches[i : i + 3]))) for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    other = take(build_loader(config(f"wds:{shards}", seed=1), micro_batch=20), 1)[0]
    assert numbers(other) != numbers(batches[0])


def test_segments_partition_every_epoch():
    """Segments of all slots make up each epoch, for more slots than samples too."""
    for counts, slots in [((3, 5, 1), 2), ((4, 4), 3), ((2, 1), 5)]:
        total = sum(counts)
        order = ShardOrder(ShardSet("x", tuple("abc"[: len(counts)]), counts, None, ""), seed=3, slots=slots, buffer=2)
        for epoch in range(slots + 1):
            seen = [
                (shard, n)
                for slot in range(slots)
                for shard, start, stop in order.spans(epoch, *order.segment(epoch, slot))
                for n in range(start, stop)
            ]
            assert sorted(seen) == [(shard, n) for shard, count in enumerate(counts) for n in range(count)]
        for slot in range(slots):
            lengths = [end - first for first, end in (order.segment(epoch, slot) for epoch in range(slots))]
            assert sum(lengths) == total and max(lengths) - min(lengths) <= 1


def test_heldout_is_one_pass_with_equally_many_batches(shards, folder):
    for source, count in ((f"wds:{shards}", 60), (f"folder:{folder}", 10)):
        options = {"heldout_source": source} if source.startswith("wds:") else {}
        found = []
        for rank in range(2):
            loader = build_loader(config(source, **options), split="heldout", rank=rank, world=2, micro_batch=4)
            batches = list(loader)
            assert len(batches) == len(loader) == -(-count // 8)
            assert all(batch["targets"].dtype == torch.int64 and len(batch["targets"]) == 4 for batch in batches)
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


def test_the_replacement_of_a_bad_heldout_image_does_not_count(tmp_path):
    spec = f"wds:{write_shards(tmp_path, [8], damage={3: {'png': b'', 'cls': b'3'}})}"
    batch = next(iter(build_loader(config("wds:none", heldout_source=spec), split="heldout", micro_batch=8)))
    counted = [n for n, label in zip(numbers(batch), batch["targets"].tolist(), strict=True) if label >= 0]
    assert sorted(counted) == [0, 1, 2, 4, 5, 6, 7] and len(batch["targets"]) == 8


@pytest.mark.parametrize(("world", "workers", "buffer"), [(1, 0, 1), (1, 0, 3), (2, 2, 8), (15, 0, 1)])
def test_blocks_of_bad_images_alone_do_not_stop_training(world, workers, buffer, tmp_path):
    """One good image in ten; most blocks hold none. Every place is filled, and resuming stays exact."""
    damage = {n: {"png": b"", "cls": b"0"} for n in range(30) if n % 10}
    options = config(
        f"wds:{write_shards(tmp_path, [14, 16], damage=damage)}", num_workers=workers, shuffle_buffer=buffer
    )
    loaders = [build_loader(options, rank=world - 1, world=world, micro_batch=3) for _ in range(2)]
    batches = iter(loaders[0])
    found = [n for batch in take(batches, 10) for n in numbers(batch)]
    assert len(set(found)) > 1 and set(found) <= {0, 10, 20}
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert [numbers(b) for b in take(batches, 4)] == [numbers(b) for b in take(loaders[1], 4)]


def test_shards_without_a_good_image_are_an_error(tmp_path):
    write_shards(tmp_path, [5, 3], damage={n: {"png": b"", "cls": b"0"} for n in range(8)})
    with pytest.raises(ValueError, match=r"8 images.* skipped \d+ × empty"):
        take(build_loader(config(f"wds:{tmp_path}", shuffle_buffer=2), micro_batch=2), 1)


def test_a_block_is_dropped_before_the_next_is_read(shards, monkeypatch):
    class Sample(dict):
        pass

    alive, most, read = set(), [], ShardSet.read

    def counted(self, *span):
        for number, sample in read(self, *span):
            held = Sample(sample)
            alive.add(id(held))
            weakref.finalize(held, alive.discard, id(held))
            most.append(len(alive))
            yield number, held

    monkeypatch.setattr(ShardSet, "read", counted)
    take(build_loader(config(f"wds:{shards}", shuffle_buffer=10), micro_batch=5), 36)
    assert len(most) >= 170 and max(most) <= 12


# ---- exact resume ----


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["wds", "folder"])
def test_resume_is_exact_to_the_byte(kind, workers, shards, folder):
    source = f"wds:{shards}" if kind == "wds" else f"folder:{folder}"
    options = config(source, **{**IMAGENET, "num_workers": workers, "shuffle_buffer": 7})
    loader = build_loader(options, rank=1, world=2, micro_batch=4)
    batches = iter(loader)
    take(batches, 9)  # in the middle of the second epoch, and of a round of workers
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    expected = take(batches, 6)
    again = build_loader(options, rank=1, world=2, micro_batch=4)
    again.load_state_dict(state)
    for one, other in zip(expected, again, strict=False):
        assert torch.equal(one["images"], other["images"]) and torch.equal(one["targets"], other["targets"])
    assert len(pickle.dumps(state)) < 1000


def test_the_state_is_equal_on_all_ranks_and_checked(shards, folder):
    for source in (f"wds:{shards}", f"folder:{folder}"):
        loaders = [build_loader(config(source), rank=rank, world=2, micro_batch=4) for rank in range(2)]
        for loader in loaders:
            take(loader, 3)
        assert loaders[0].state_dict() == loaders[1].state_dict()
        other = build_loader(config(source, seed=5), world=2, micro_batch=4)
        with pytest.raises(ValueError, match="seed"):
            other.load_state_dict(loaders[0].state_dict())
    wider = build_loader(config(f"wds:{shards}"), world=3, micro_batch=4)
    with pytest.raises(ValueError, match="world=2, this loader 3"):
        wider.load_state_dict(build_loader(config(f"wds:{shards}"), world=2, micro_batch=4).state_dict())


def test_an_indexed_loader_resumes_with_other_ranks_and_batches(folder):
    one = build_loader(config(f"folder:{folder}"), micro_batch=6)
    batches = iter(one)
    take(batches, 2)
    state = one.state_dict()
    expected = [n for batch in take(batches, 2) for n in numbers(batch)]
    found = []
    for rank in range(2):
        two = build_loader(config(f"folder:{folder}", num_workers=1), rank=rank, world=2, micro_batch=3)
        two.load_state_dict(state)
        found += [n for batch in take(two, 2) for n in numbers(batch)]
    assert sorted(found) == sorted(expected)


def test_batches_neither_use_nor_change_the_programs_generators(folder):
    options = config(f"folder:{folder}", **IMAGENET)
    first = build_loader(options, micro_batch=4)
    batches = iter(first)
    take(batches, 1)  # starting a DataLoader draws once
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    second = take(batches, 1)[0]
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert torch.equal(take(build_loader(options, micro_batch=4), 2)[1]["images"], second["images"])


# ---- what a batch holds ----


def test_mixed_targets_are_distributions(folder):
    batch = take(build_loader(config(f"folder:{folder}", **IMAGENET), micro_batch=8), 1)[0]
    assert batch["images"].shape == (8, 3, 12, 12) and batch["images"].dtype == torch.float32
    assert batch["targets"].shape == (8, 4) and batch["targets"].dtype == torch.float32
    torch.testing.assert_close(batch["targets"].sum(1), torch.ones(8))
    assert (batch["targets"] >= 0.1 / 4 - 1e-6).all()
    with pytest.raises(ValueError, match="micro_batch 3 must be even"):
        build_loader(config(f"folder:{folder}", **IMAGENET), micro_batch=3)


def test_label_smoothing_alone(folder):
    plain, smooth = (
        take(build_loader(config(f"folder:{folder}", label_smoothing=e), micro_batch=5), 1)[0] for e in (0.0, 0.2)
    )
    assert plain["targets"].dtype == torch.int64 and torch.equal(plain["images"], smooth["images"])
    expected = torch.full((5, 4), 0.05).scatter(1, plain["targets"][:, None], 0.85)
    torch.testing.assert_close(smooth["targets"], expected)


def test_mixup_mixes_images_as_it_mixes_targets(folder):
    """Images of one colour: the share of the partner in the pixels is its share in the targets."""
    options = {"micro_batch": 10}
    plain = take(build_loader(config(f"folder:{folder}"), **options), 1)[0]
    mixed = take(build_loader(config(f"folder:{folder}", mixup=1.0), **options), 1)[0]
    partner = plain["images"].flip(0)
    onehot = torch.nn.functional.one_hot(plain["targets"], 4).float()
    apart = (onehot != onehot.flip(0)).any(1)
    share = mixed["targets"][apart].gather(1, plain["targets"][apart][:, None]).mean()
    assert 0 < share < 1
    torch.testing.assert_close(mixed["images"], share * plain["images"] + (1 - share) * partner)


@pytest.mark.parametrize("name", ["crop_scale", "hflip", "color_jitter", "rand_augment", "random_erasing"])
def test_each_augmentation_changes_the_images_and_depends_on_the_epoch(name, tmp_path):
    data = encoded(picture(3))
    write_shards(tmp_path, [2], damage={n: {"png": data, "cls": b"0"} for n in range(2)})
    values = {"crop_scale": (0.3, 0.6), "hflip": 0.5, "color_jitter": 0.4, "rand_augment": "rand-m9-n2-p1"}
    options = {**PLAIN, "source": f"wds:{tmp_path}", "augment": "imagenet", "crop_scale": (1.0, 1.0), "image_size": 32}
    options[name] = values.get(name, 0.9)
    batches = take(build_loader(VisionDataConfig(**options), micro_batch=2), 8)
    pictures = {batch["images"][i].numpy().tobytes() for batch in batches for i in range(2)}
    assert len(pictures) >= (2 if name == "hflip" else 8)


def test_the_papers_recipe_can_be_written_and_runs():
    """ImageNet as ViT-S/16 is trained on it: RandAugment 2/9, mixup 0.8, cutmix 1.0, smoothing 0.1, erasing 0.25."""
    options = VisionDataConfig(
        source="glyphs-builtin", image_size=32, num_classes=26, **{**IMAGENET, "random_erasing": 0.25}
    )
    batch = take(build_loader(options, micro_batch=4), 1)[0]
    assert batch["targets"].shape == (4, 26) and torch.isfinite(batch["images"]).all()


def test_normalisation(folder):
    options = config(f"folder:{folder}", mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0))
    plain = take(build_loader(config(f"folder:{folder}"), micro_batch=4), 1)[0]["images"]
    normal = take(build_loader(options, micro_batch=4), 1)[0]["images"]
    expected = (plain - torch.tensor([0.5, 0.25, 0.0])[:, None, None]) / torch.tensor([0.5, 0.25, 2.0])[:, None, None]
    torch.testing.assert_close(normal, expected)


# ---- held-out images ----


def test_held_out_shards_are_read_by_index(shards, tmp_path):
    held = opened(f"wds:{shards}")
    assert len(held.items) == 60 and held.items.classes == list("abcd")
    found = list(stored(f"wds:{shards}"))
    for n in (59, 0, 27, 41):
        image, label = found[n]
        assert image.getpixel((0, 0)) == (n, 0, 7) and label == n % 4 and image.size == (12, 12)
    with pytest.raises(IndexError):
        held.items[60]
    places = torch.utils.data.DataLoader(held.items, sampler=range(60), batch_size=None, num_workers=2)
    colours = [image.getpixel((0, 0))[0] for image, _ in places]  # forked workers read the same open file
    assert colours == held.items.order.tolist()
    same = opened(config("wds:none", heldout_source=f"wds:{shards}"))
    other = opened(f"wds:{write_shards(tmp_path, [60])}")
    assert held.fingerprint == same.fingerprint != other.fingerprint


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


def test_held_out_builtin_letters_are_large():
    held = opened("glyphs-builtin")
    assert held.items[1][0].size == (384, 384) and len(held.items.classes) == 26
    assert held.fingerprint == opened(VisionDataConfig(source="glyphs-builtin")).fingerprint


@pytest.mark.parametrize("classes", [3, 5])
def test_a_config_with_another_number_of_classes_is_refused(classes, shards, folder):
    for source, own in ((f"wds:{shards}", {"heldout_source": f"wds:{shards}"}), (f"folder:{folder}", {})):
        for split in ("train", "heldout"):
            with pytest.raises(ValueError, match=f"4 classes, num_classes is {classes}: --set data.num_classes=4"):
                build_loader(config(source, num_classes=classes, **own), split=split, micro_batch=2)


def test_training_and_held_out_images_have_the_same_classes_in_one_order(shards, folder, tmp_path):
    swapped = f"wds:{write_shards(tmp_path / 'swapped', [4], 'abdc')}"
    unknown = f"wds:{write_shards(tmp_path / 'unknown', [4], indexed=False)}/part-000.tar"
    for source in (f"wds:{shards}", f"folder:{folder}"):
        pair = config(source, heldout_source=swapped)
        for read in (opened, lambda c: build_loader(c, split="heldout", micro_batch=2)):
            with pytest.raises(ValueError, match="label 2 is 'c' in training and 'd' in held-out images"):
                read(pair)
        assert len(opened(replace(pair, heldout_source=unknown)).items) == 4
        assert len(opened(replace(pair, heldout_source=f"wds:{shards}")).items) == 60
    assert len(opened(config(unknown, heldout_source=swapped)).items) == 4


def test_shards_without_a_split_ask_for_one(shards):
    assert len(open_shards("x", str(shards))) == 60
    with pytest.raises(ValueError, match="set heldout_source"):
        build_loader(config(f"wds:{shards}"), split="heldout", micro_batch=2)
