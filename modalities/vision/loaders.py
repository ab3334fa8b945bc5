"""Order, ranks and workers: batches from images by number (ImageLoader) or from shards in order (ShardLoader).

Both are endless in training, resumable to the byte, and skip bad images in the same way: the place of a skipped one is
taken by the next good one of the order, so that where a batch begins never depends on what was skipped. An epoch is not
cut to whole batches: its last samples share a batch with the next one's first. So all ranks can go on equally
long, and every sample is had exactly once per epoch.

What happens to an image follows from the seed and its place in the order, wherever it is read; but mixup's and CutMix's λ
and the images that are paired follow from the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from modalities.vision.images import BadImage, ImageReport, decode_image, to_rgb
from modalities.vision.shards import ShardSet, read_label, sample_image
from modalities.vision.sources import ImageSet, check_label
from modalities.vision.transforms import BatchMaker

if TYPE_CHECKING:
    from modalities.vision.data import VisionDataConfig

__all__ = ["ImageLoader", "ShardLine", "ShardLoader", "load_image"]

# First word of every random key after the seed, so that no two uses share a stream; transforms.py has its own.
_ORDER, _SHARDS, _BLOCK = 0, 1, 2
Event = tuple[str, str, str]  # "skipped" or "converted", reason, name
_Block = list[tuple[int, dict[str, Any]]]  # (number, sample)


def _decode(payload: bytes | Image.Image, name: str, events: list[Event]) -> Image.Image:
    image, notes = decode_image(payload) if isinstance(payload, bytes) else to_rgb(payload)
    events += [("converted", note, name) for note in notes]
    return image


def load_image(images: ImageSet, index: int, num_classes: int | None, events: list[Event]) -> tuple[Image.Image, int]:
    """(RGB image, label) of a set; conversions are added to events. Errors: BadImage; ValueError for a known class list
    that does not have the label."""
    payload, label = images.read(index)
    if num_classes is not None:
        check_label(label, num_classes, images.name(index), known=images.classes is not None)
    return _decode(payload, images.name(index), events), label


class _ImageBatches(Dataset):
    """Batches by the global numbers of their samples: [numbers] -> (batch, events)."""

    def __init__(self, images: ImageSet, config: VisionDataConfig, *, train: bool) -> None:
        self.images, self.train, self.seed = images, train, config.seed if train else 0
        self.num_classes = config.num_classes
        self.make = BatchMaker(config, train=train)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getstate__(self) -> dict[str, Any]:  # a cache cannot be pickled; a worker makes its own
        return {key: value for key, value in self.__dict__.items() if key != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, _ORDER, epoch]).permutation(len(self.images))

    def __getitem__(self, numbers: Sequence[int]) -> tuple[dict[str, Tensor], list[Event]]:
        events: list[Event] = []
        images, labels = zip(*(self._good(number, events) for number in numbers), strict=True)
        return self.make(images, labels, [(number,) for number in numbers], (numbers[0],)), events

    def _good(self, number: int, events: list[Event]) -> tuple[Image.Image, int]:
        epoch, position = divmod(number, len(self.images))
        order = self._order(epoch if self.train else 0)
        for step in range(len(order)):
            index = int(order[(position + step) % len(order)])
            try:
                image, label = load_image(self.images, index, self.num_classes, events)
                again = not self.train and (epoch or step)  # filled up, or in a skipped one's place
                return image, -1 if again else label
            except BadImage as error:
                events.append(("skipped", error.reason, self.images.name(index)))
        raise ValueError(f"source {self.images.spec!r}: all {len(order)} images were skipped: {_reasons(events)}")


def _reasons(events: Sequence[Event]) -> str:
    report = ImageReport()
    for kind, reason, name in events:
        if kind == "skipped":
            report.names.setdefault(reason, [name])
            report.skipped[reason] += 1
    return str(report)


class _Loader:
    """What both loaders share: checked ranks, the report, and the state's form."""

    def __init__(self, config: VisionDataConfig, micro_batch: int, rank: int, world: int) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch {micro_batch} must be at least 1")
        if (config.mixup > 0 or config.cutmix > 0) and micro_batch % 2:
            raise ValueError(f"micro_batch {micro_batch} must be even: mixup and cutmix mix images in pairs")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        self.config, self.micro_batch, self.rank, self.world = config, micro_batch, rank, world
        self.report = ImageReport()

    def _identity(self) -> dict[str, Any]:
        raise NotImplementedError

    def _check(self, state: dict[str, Any]) -> None:
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise ValueError(f"data state has {key}={state.get(key)!r}, this loader {mine!r}: samples would differ")


class ImageLoader(_Loader):
    """Batches of images that can be had by number, for one rank.

    Epoch e serves all N images in an order drawn from (seed, e). Micro-batch k of rank r holds samples
    start + (k·B + b)·world + r, b < B, of that endless line: any step's global batch is one run of consecutive
    samples, whatever the world size, the micro-batch and the number of workers; those may change between saving and
    resuming. The state is the same on all ranks. What happens to an image follows from (seed, its place on that line);
    only mixup's and CutMix's λ and partners follow from its batch.

    train=False is one pass, augmented by nothing, in an order that is the same for every seed. All ranks get equally
    many batches: the last ones are filled up from the pass's beginning (wrapped). Every image counts once: places that
    are filled up, and those of skipped images, have target −1, which may be all places of a rank's last batch.
    """

    def __init__(
        self,
        images: ImageSet,
        config: VisionDataConfig,
        micro_batch: int,
        *,
        rank: int = 0,
        world: int = 1,
        train: bool,
    ) -> None:
        super().__init__(config if train else config.with_options(mixup=0.0, cutmix=0.0), micro_batch, rank, world)
        if not len(images):
            raise ValueError(f"source {images.spec!r} has no image")
        self.images, self.train, self.next_sample, self.loaded = images, train, 0, False
        self.report.extend(images.problems)

    def __len__(self) -> int:
        """Batches of one pass; of an epoch, rounded up."""
        return -(-len(self.images) // (self.micro_batch * self.world))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Batches from `next_sample` on; a pass begins anew with every iteration, but for the first after loading a state."""
        if not self.train and not self.loaded:
            self.next_sample = 0
        self.loaded = False
        dataset = _ImageBatches(self.images, self.config, train=self.train)
        numbers = self._numbers(self.next_sample)
        loader = DataLoader(dataset, sampler=numbers, batch_size=None, num_workers=self.config.num_workers)
        for batch, events in loader:
            self.report.extend(events)
            self.next_sample += self.micro_batch * self.world
            yield batch

    def _numbers(self, start: int) -> Iterator[list[int]]:
        step = self.micro_batch * self.world
        while self.train or start < len(self.images):
            yield list(range(start + self.rank, start + step, self.world))
            start += step

    def state_dict(self) -> dict[str, Any]:
        """The next global sample and what makes its number meaningful; plain JSON values."""
        return {"next_sample": self.next_sample, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Other images or another seed are a ValueError; the augmentation may change."""
        self._check(state)
        self.next_sample, self.loaded = int(state["next_sample"]), True

    def _identity(self) -> dict[str, Any]:
        return {"kind": "images", "fingerprint": self.images.fingerprint, "seed": self.config.seed if self.train else 0}


class ShardLine:
    """The order of one epoch after the other, shared out to `slots` (ranks × workers) that each read shards in order.

    Epoch e lays the shards out in an order drawn from (seed, e) and cuts that line of N samples into equal segments,
    one per slot (they differ by one sample at most; slot s has segment (s + e) mod slots, so that the odd ones go
    round). A segment is read in blocks of about `buffer` samples, each mixed by (seed, e, where it begins). A block
    stands in for a shuffle buffer, whose content would be lost on resuming: a block can be read again.
    """

    def __init__(self, shards: ShardSet, *, seed: int, slots: int, buffer: int) -> None:
        self.shards, self.seed, self.slots, self.buffer = shards, seed, slots, buffer

    def segment(self, epoch: int, slot: int) -> tuple[int, int]:
        """(first, end) of a slot's samples on an epoch's line."""
        number, total = (slot + epoch) % self.slots, len(self.shards)
        return total * number // self.slots, total * (number + 1) // self.slots

    def spans(self, epoch: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(shard, start, stop) that make up samples first…end−1 of an epoch's line."""
        at = 0
        for shard in np.random.default_rng([self.seed, _SHARDS, epoch]).permutation(len(self.shards.urls)):
            count = self.shards.counts[shard]
            start, stop = max(first - at, 0), min(end - at, count)
            if start < stop:
                yield int(shard), start, stop
            at += count

    def blocks(self, slot: int, done: int) -> Iterator[tuple[int, _Block, int]]:
        """A slot's endless blocks after its first `done` samples: (epoch, mixed (number, sample), how many are done)."""
        epoch, done = done // len(self.shards) * self.slots, done % len(self.shards)  # `slots` epochs are N samples
        while True:
            first, end = self.segment(epoch, slot)
            pieces = -(-(end - first) // self.buffer)
            cuts = [first + (end - first) * piece // pieces for piece in range(pieces)] if pieces else []
            lengths = np.diff([*cuts, end]).tolist()
            while cuts and done >= lengths[0]:
                done -= lengths.pop(0)
                cuts.pop(0)
            spans = self.spans(epoch, cuts[0], end) if cuts else iter(())
            samples = (sample for span in spans for sample in self.shards.read(*span))
            for cut, length in zip(cuts, lengths, strict=True):
                block = list(islice(samples, length))
                order = np.random.default_rng([self.seed, _BLOCK, epoch, cut]).permutation(length)
                block = [block[place] for place in order]
                yield epoch, block, done
                del block  # before the next one is read; the reader does the same
                done = 0
            epoch += 1


class _ShardBatches(IterableDataset):
    """Endless (batch, events) of one rank from its batch number `batches` on."""

    def __init__(self, line: ShardLine, config: VisionDataConfig, micro_batch: int, rank: int, batches: int) -> None:
        self.line, self.micro_batch, self.rank, self.batches = line, micro_batch, rank, batches
        self.workers = max(1, config.num_workers)
        self.num_classes = config.num_classes
        self.make = BatchMaker(config, train=True)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], list[Event]]]:
        # A DataLoader asks its workers in turn, starting with its worker 0; after resuming that one plays the worker
        # whose turn it is. Worker w makes the rank's batches w, w + workers, …
        info = get_worker_info()
        worker = ((info.id if info else 0) + self.batches) % self.workers
        slot, batch = self.rank * self.workers + worker, -(-(self.batches - worker) // self.workers)
        events: list[Event] = []
        samples = self._samples(slot, batch * self.micro_batch, events)
        while True:
            keys, images, labels = zip(*islice(samples, self.micro_batch), strict=True)
            yield self.make(images, labels, keys, (slot, batch)), events[:]
            events.clear()
            batch += 1

    def _samples(self, slot: int, done: int, events: list[Event]) -> Iterator[tuple[tuple[int, int], Image.Image, int]]:
        end = done
        for epoch, block, first in self.line.blocks(slot, done):
            end += len(block) - first
            spare = None  # for all places of a block of which nothing is left
            for place in range(first, len(block)):
                found = spare or self._good(block, place, events)
                if found is None:
                    found = spare = self._good_after(slot, end, events)
                yield (epoch, block[place][0]), *found
            del block

    def _good(self, block: _Block, place: int, events: list[Event]) -> tuple[Image.Image, int] | None:
        """The first good image from a place of a block on, round to the place before; None if there is none."""
        shards = self.line.shards
        for step in range(len(block)):
            sample = block[(place + step) % len(block)][1]
            name = f"{sample['__url__']}:{sample['__key__']}"
            try:
                label, data = read_label(sample), sample_image(sample)
                check_label(label, self.num_classes, name, known=shards.classes is not None)
                return _decode(data, name, events), label
            except BadImage as error:
                events.append(("skipped", error.reason, name))
        return None

    def _good_after(self, slot: int, done: int, events: list[Event]) -> tuple[Image.Image, int]:
        """The next good image of a slot after its first `done` samples. Errors: ValueError if as many samples as an epoch
        has hold none."""
        tried, shards = 0, self.line.shards
        for _, block, _ in self.line.blocks(slot, done):
            found = self._good(block, 0, events)
            tried += len(block)
            if found is not None:
                return found
            if tried >= len(shards):
                break
            del block
        raise ValueError(f"source {shards.spec!r}: all of {tried} images in turn were skipped: {_reasons(events)}")


class ShardLoader(_Loader):
    """Endless batches of WebDataset shards for one rank, each worker reading its own part of every epoch in order.

    The order is ShardLine's. The state counts batches handed out, not those that workers have fetched ahead; it is the
    same on all ranks, and fits the same number of ranks and workers, the same micro-batch, buffer and seed. What
    happens to an image follows from (seed, epoch, its number); only mixup's and CutMix's λ and partners follow from its
    batch.
    """

    def __init__(
        self, shards: ShardSet, config: VisionDataConfig, micro_batch: int, *, rank: int = 0, world: int = 1
    ) -> None:
        super().__init__(config, micro_batch, rank, world)
        self.shards, self.batches = shards, 0
        self.workers = max(1, config.num_workers)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        config = self.config
        line = ShardLine(self.shards, seed=config.seed, slots=self.world * self.workers, buffer=config.shuffle_buffer)
        dataset = _ShardBatches(line, config, self.micro_batch, self.rank, self.batches)
        for batch, events in DataLoader(dataset, batch_size=None, num_workers=config.num_workers):
            self.report.extend(events)
            self.batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Batches handed out on each rank, and what makes their number meaningful; plain JSON values."""
        return {"batches": self.batches, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Another set-up is a ValueError; the augmentation may change."""
        self._check(state)
        self.batches = int(state["batches"])

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "shards",
            "fingerprint": self.shards.fingerprint,
            "seed": self.config.seed,
            "shuffle_buffer": self.config.shuffle_buffer,
            "world": self.world,
            "workers": self.workers,
            "micro_batch": self.micro_batch,
        }
