"""Vision data as `modalities.loading` takes it: map-style image sets (`ImageSamples`), shards in
order (`ShardStream`).

The place of a skipped image is taken by the next good one of the order. What happens to an image
follows from the seed and its place in the order; only mixup's and CutMix's λ, and which images are
paired, follow from its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count, islice

import numpy as np
from PIL import Image
from torch import Tensor

from modalities.encoder.items import Event, Read, SkipReport, first_good
from modalities.encoder.samples import ItemSamples
from modalities.vision.batches import ImageBatches
from modalities.vision.classes import target_names
from modalities.vision.config import VisionDataConfig
from modalities.vision.images import ImageSet, checked_image
from modalities.vision.objects import Objects, check_objects
from modalities.vision.shards import Members, Shards, read_label, read_objects, sample_image

# First word of every random key after the seed, so that no two uses share a stream;
# `modalities.encoder` has others.
_SHARDS = 1
_BLOCK = 2
Batch = dict[str, Tensor]
Sample = tuple[Image.Image, int | Objects]
# (number, name, sample) of each.
Block = list[tuple[int, str, Members]]


class ImageSamples(ItemSamples):
    """Samples of an image set, augmented in training only."""

    kind = "images"
    noun = "image"

    def __init__(self, images: ImageSet, config: VisionDataConfig, *, train: bool) -> None:
        config = config if train else config.unaugmented()
        super().__init__(images, ImageBatches(config), train=train, seed=config.seed)
        self.images = images
        self.config = config

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of a model that learns from them; () where the source has none."""
        return target_names(self.images.classes, self.config.target)

    def read(self, index: int) -> Sample:
        images = self.images
        read = images.read if self.config.target == "label" else images.read_objects
        payload, label = read(index)
        listed = images.classes is not None
        return _checked(payload, label, images.name(index), self.config, listed), label


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
        self.make = ImageBatches(config)
        self.report = SkipReport("image")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of a model that learns from them; () where the index has none."""
        return target_names(self.shards.classes, self.config.target)

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
        return first_good(self._from(block, place), events, self.shards.spec, "image")

    def _from(self, block: Block, place: int) -> Iterator[tuple[str, Read]]:
        """The samples of a block from `place` on, wrapping around: (name, what reads it)."""
        for step in range(len(block)):
            _, name, members = block[(place + step) % len(block)]
            yield name, partial(self._sample, members, name)

    def _sample(self, members: Members, name: str) -> Sample:
        payload = sample_image(members)
        read_answer = read_label if self.config.target == "label" else read_objects
        label = read_answer(members)
        listed = self.shards.classes is not None
        return _checked(payload, label, name, self.config, listed), label


def _checked(
    payload: bytes | Image.Image,
    label: int | Objects,
    name: str,
    config: VisionDataConfig,
    listed: bool,
) -> Image.Image:
    """An image that training can ask for. Raises BadImage; ValueError for a label outside those
    that a source lists."""
    num_classes = config.num_classes
    image = checked_image(payload, label, name, num_classes=num_classes, listed=listed)
    if isinstance(label, Objects):
        check_objects(label, image.size, config.target, config.train_shapes, num_classes)
    return image
