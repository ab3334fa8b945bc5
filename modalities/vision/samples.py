"""Vision data as `modalities.loading` takes it: map-style image sets (`ImageSamples`), shards in
order (`ShardStream`).

An epoch is not cut to whole batches: its last samples share a batch with the next one's first, so
every sample occurs exactly once per epoch. The place of a skipped image is taken by the next good
one of the order, so where a batch begins never depends on what was skipped. What happens to an
image follows from the seed and its place in the order; only mixup's and CutMix's λ, and which
images are paired, follow from its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice

import numpy as np
from PIL import Image
from torch import Tensor

from modalities.vision.batches import BatchMaker
from modalities.vision.config import VisionDataConfig
from modalities.vision.errors import BadImage
from modalities.vision.images import Event, ImageReport, ImageSet, checked_image
from modalities.vision.objects import Objects, check_objects
from modalities.vision.shards import Members, Shards, read_label, read_objects, sample_image

# First word of every random key after the seed, so that no two uses share a stream; batches.py has
# its own.
_ORDER = 0
_SHARDS = 1
_BLOCK = 2
Batch = dict[str, Tensor]
Sample = tuple[Image.Image, int | Objects]
Read = Callable[[], tuple[bytes | Image.Image, int | Objects]]
# (number, name, sample) of each.
Block = list[tuple[int, str, Members]]


class ImageSamples:
    """Samples of an image set. Training is endless: epoch e serves all N images in an order drawn
    from (seed, e). train=False is one pass without augmentation, in an order that is the same for
    every seed. Every image counts once in it: numbers beyond the end, and what replaces a skipped
    image, have target −1."""

    def __init__(self, images: ImageSet, config: VisionDataConfig, *, train: bool) -> None:
        if not len(images):
            raise ValueError(f"source {images.spec!r} has no image")
        self.images = images
        self.train = train
        self.seed = config.seed if train else 0
        self.size = None if train else len(images)
        self.make = BatchMaker(config if train else config.unaugmented())
        self.report = ImageReport()
        self.report.extend(images.problems)
        # Of the last two epochs read.
        self._orders: dict[int, np.ndarray] = {}

    def identity(self) -> dict[str, object]:
        return {"kind": "images", "fingerprint": self.images.fingerprint, "seed": self.seed}

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            while len(self._orders) > 1:
                oldest = next(iter(self._orders))
                del self._orders[oldest]
            rng = np.random.default_rng([self.seed, _ORDER, epoch])
            self._orders[epoch] = rng.permutation(len(self.images))
        return self._orders[epoch]

    def __getitem__(self, numbers: list[int]) -> tuple[Batch, list[Event]]:
        events: list[Event] = []
        samples = [self._good(number, events) for number in numbers]
        images, labels = zip(*samples, strict=True)
        keys = [(number,) for number in numbers]
        return self.make(images, labels, keys, (numbers[0],)), events

    def _good(self, number: int, events: list[Event]) -> Sample:
        """The image of a number, or the next good one of the order."""
        epoch, position = divmod(number, len(self.images))
        order = self._order(epoch if self.train else 0)
        events_before = len(events)
        image, label = _first_good(
            self._from(order, position),
            self.make.config,
            self.images.classes is not None,
            events,
            self.images.spec,
        )
        skipped = len(events) > events_before
        if not self.train and (epoch or skipped):
            # Beyond the end, or in place of a skipped one: it does not count.
            label = -1
        return image, label

    def _from(self, order: np.ndarray, position: int) -> Iterator[tuple[str, Read]]:
        """The images of an order from `position` on, wrapping around: (name, what reads it)."""
        images = self.images
        read = images.read if self.make.config.target == "label" else images.read_objects
        for step in range(len(order)):
            index = int(order[(position + step) % len(order)])
            yield images.name(index), partial(read, index)


class ShardStream:
    """Endless batches of WebDataset shards; each of `slots` (ranks × workers) reads its own part of
    them.

    Epoch e lays the shards out in an order drawn from (seed, e) and cuts that line of N samples
    into equal segments, one per slot (lengths differ by one at most; slot s has segment (s + e) mod
    slots, so that the longer ones rotate). A segment is read in blocks of about `shuffle_buffer`
    samples, each shuffled by (seed, e, its start). Unlike a shuffle buffer, a block can be read
    again on resuming.
    """

    def __init__(self, shards: Shards, config: VisionDataConfig, micro_batch: int) -> None:
        self.shards = shards
        self.config = config
        self.micro_batch = micro_batch
        self.make = BatchMaker(config)
        self.report = ImageReport()

    def identity(self) -> dict[str, object]:
        facts = {"kind": "shards", "fingerprint": self.shards.fingerprint}
        return facts | {"seed": self.config.seed, "shuffle_buffer": self.config.shuffle_buffer}

    def batches(
        self, slot: int, slots: int, done: int, state: None
    ) -> Iterator[tuple[Batch, list[Event], None]]:
        events: list[Event] = []
        samples = self._samples(slot, slots, done * self.micro_batch, events)
        for batch in count(done):
            keys, images, labels = zip(*islice(samples, self.micro_batch), strict=True)
            yield self.make(images, labels, keys, (slot, batch)), events[:], None
            events.clear()

    def _samples(
        self, slot: int, slots: int, done: int, events: list[Event]
    ) -> Iterator[tuple[tuple[int, int], Image.Image, int | Objects]]:
        """((epoch, number), image, label) of a slot after its first `done` samples."""
        for epoch, block, first in self._blocks(slot, slots, done):
            for place in range(first, len(block)):
                yield (epoch, block[place][0]), *self._good(block, place, events)
            # Before the next one is read.
            del block

    def _blocks(self, slot: int, slots: int, done: int) -> Iterator[tuple[int, Block, int]]:
        """A slot's endless blocks after its first `done` samples: (epoch, shuffled samples, how
        many of them are done)."""
        total = len(self.shards)
        seed = self.config.seed
        # `slots` epochs are N samples.
        epoch = done // total * slots
        done = done % total
        while True:
            segment = (slot + epoch) % slots
            first = total * segment // slots
            end = total * (segment + 1) // slots
            # Rounded up.
            pieces = -(-(end - first) // self.config.shuffle_buffer)
            cuts = [first + (end - first) * piece // pieces for piece in range(pieces)]
            lengths = np.diff([*cuts, end]).tolist()
            while cuts and done >= lengths[0]:
                done -= lengths.pop(0)
                cuts.pop(0)
            samples = self._read(epoch, cuts[0], end) if cuts else iter(())
            for cut, length in zip(cuts, lengths, strict=True):
                block = list(islice(samples, length))
                order = np.random.default_rng([seed, _BLOCK, epoch, cut]).permutation(length)
                block = [block[place] for place in order]
                yield epoch, block, done
                # Before the next one is read; the caller does the same.
                del block
                done = 0
            epoch += 1

    def _read(self, epoch: int, first: int, end: int) -> Iterator[tuple[int, str, Members]]:
        """(number, name, sample) of the samples first…end−1 of an epoch."""
        rng = np.random.default_rng([self.config.seed, _SHARDS, epoch])
        order = rng.permutation(len(self.shards.files))
        # Samples in the shards of the order before this one.
        offset = 0
        for shard in order.tolist():
            count = self.shards.counts[shard]
            start = max(first - offset, 0)
            stop = min(end - offset, count)
            if start < stop:
                yield from self.shards.stream(shard, start, stop)
            offset += count

    def _good(self, block: Block, place: int, events: list[Event]) -> Sample:
        """The first good image of a block from `place` on, wrapping around."""
        return _first_good(
            self._from(block, place),
            self.config,
            self.shards.classes is not None,
            events,
            self.shards.spec,
        )

    def _from(self, block: Block, place: int) -> Iterator[tuple[str, Read]]:
        """The samples of a block from `place` on, wrapping around: (name, what reads it)."""
        read_answer = read_label if self.config.target == "label" else read_objects
        for step in range(len(block)):
            _, name, members = block[(place + step) % len(block)]
            yield name, partial(_read_sample, members, read_answer)


def _read_sample(
    members: Members, read_answer: Callable[[Members], int | Objects]
) -> tuple[bytes, int | Objects]:
    return sample_image(members), read_answer(members)


def _first_good(
    candidates: Iterable[tuple[str, Read]],
    config: VisionDataConfig,
    listed: bool,
    events: list[Event],
    spec: str,
) -> Sample:
    """The first of named images that training can ask for; `events` gets the others. ValueError
    where there is none."""
    events_before = len(events)
    num_classes = config.num_classes
    for name, read in candidates:
        try:
            payload, label = read()
            image = checked_image(payload, label, name, num_classes=num_classes, listed=listed)
            if isinstance(label, Objects):
                check_objects(label, image.size, config.target, config.train_shapes, num_classes)
            return image, label
        except BadImage as error:
            events.append((error.reason, name))
    report = ImageReport()
    report.extend(events[events_before:])
    skipped = len(events) - events_before
    raise ValueError(f"source {spec!r}: all {skipped} images were skipped: {report}")
