"""Small images and shards for the tests of vision's data side."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from modalities.vision.config import VisionDataConfig
from modalities.vision.data import open_heldout
from modalities.vision.shards import scan
from zoo.files import file_sha256, write_json

PLAIN = {"augment": "none", "image_size": 12, "num_classes": 4, "mean": (0, 0, 0), "std": (1, 1, 1)}


def config(source, **options):
    """Of 12 pixels and four classes, without augmentation and normalisation: `numbers` reads its
    batches."""
    return VisionDataConfig(**{**PLAIN, "source": str(source), "shuffle_buffer": 8, **options})


def picture(number, size=(40, 40)):
    """A smooth picture whose mean brightness tells its number apart from its neighbours'."""
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )


def encoded(image, form="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def tar(samples):
    """The bytes of a WebDataset shard of samples (key, {extension: bytes})."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for key, members in samples:
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def write_tar(path, samples):
    Path(path).write_bytes(tar(samples))
    return path


def write_shards(folder, sizes, classes="abcd", indexed=True, damage=None):
    """Shards of numbered solid-colour images: image n is solid(n), its label n mod len(classes)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    number = itertools.count()
    for shard, size in enumerate(sizes):
        samples = []
        for n in itertools.islice(number, size):
            members = {"png": encoded(solid(n)), "cls": str(n % len(classes)).encode()}
            samples.append((f"{n:04d}", (damage or {}).get(n, members)))
        write_tar(folder / f"part-{shard:03d}.tar", samples)
    if indexed:
        write_index(folder, list(classes))
    return folder


def write_index(folder, classes=()):
    """index.json as the fetchers write it."""
    paths = sorted(Path(folder).glob("*.tar"))
    shards = [{"file": p.name, "samples": len(scan(p)), "sha256": file_sha256(p)} for p in paths]
    write_json(Path(folder) / "index.json", {"classes": list(classes), "shards": shards})


def write_folder(root, classes, count):
    """Class folders of solid images, the classes in turn."""
    for n in range(count):
        path = root / classes[n % len(classes)] / f"{n:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        solid(n).save(path)
    return root


def solid(number, size=(12, 12)):
    """One colour that is the number: red counts from 0 to 255, green counts the overflow."""
    return Image.new("RGB", size, (number % 256, number // 256, 7))


def numbers(batch):
    """The numbers of solid images in a batch of a loader with mean 0 and std 1."""
    colours = (255 * batch["images"][:, :, 0, 0]).round().long()
    return (colours[:, 0] + 256 * colours[:, 1]).tolist()


def take(iterable, count):
    return list(itertools.islice(iterable, count))


def opened(source):
    """`open_heldout` anew, for a source whose files may have changed."""
    return open_heldout.__wrapped__(source)


def stored(source):
    """The held-out images of a source in the order in which they are stored, read one at a time."""
    items = opened(source).items
    return (items[int(place)] for place in np.argsort(items.order))
