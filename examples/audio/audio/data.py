"""Clips as items, and batches of windows on them."""

from dataclasses import dataclass

import numpy as np

from audio.sounds import CLASSES, FRAMES, MELS, SOUND, Clip, cut, make_clip
from modalities.encoder.batches import GridBatches
from modalities.encoder.config import GridData, Shape
from modalities.encoder.items import HeldoutItems, ItemSet, split_places
from modalities.encoder.samples import ItemSamples
from modalities.loading import IndexedLoader
from zoo.errors import bounded

CLIPS = 10_000


@dataclass(frozen=True)
class AudioData(GridData):
    """frames: of a training sample."""

    num_classes: int = len(CLASSES)
    frames: int = bounded(64, SOUND, FRAMES)

    @property
    def train_shapes(self) -> tuple[Shape, ...]:
        return ((MELS, self.frames),)


class Clips(ItemSet):
    """CLIPS clips made from their numbers, less those of the other split."""

    spec = "sounds"
    classes = CLASSES

    def __init__(self, split: str) -> None:
        self.numbers = split_places((f"clip {n}" for n in range(CLIPS)), split, key=b"audio")
        self.fingerprint = f"sounds 1 {split}"

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> tuple[Clip, int]:
        return make_clip(self.numbers[index])


class HeldoutClips(HeldoutItems):
    noun = "clip"

    def side(self, place: int, shape: Shape) -> int:
        return FRAMES


class AudioBatches(GridBatches):
    def sample(self, item: Clip, label: int, shape: Shape) -> tuple[np.ndarray, dict[str, object]]:
        return cut(item, shape[1], np.random.random()), {"targets": label}


def build_loader(
    data: AudioData, *, micro_batch: int, split: str = "train", rank: int = 0, world: int = 1
) -> IndexedLoader:
    items = Clips(split)
    samples = ItemSamples(items, AudioBatches(data), train=split == "train", seed=data.seed)
    return IndexedLoader(samples, micro_batch, rank=rank, world=world)
