"""Training batches of grids: shapes, erasing and mixing, each draw keyed.

Every random draw follows from a key of integers such as (seed, epoch, sample). timm and torchvision
draw from the global generators, so `seeded(key)` sets those and `preserve_rng_state()` restores
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from modalities.encoder.config import Shape

# First word of every random key after the seed, so that no two uses share a stream; `samples` has
# its own.
_AUGMENT = 10
_ERASE = 11
_MIX = 12
_SHAPE = 13


def seeded(*key: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator by a key."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=24).digest()
    # 64 bits for Python, 32 for numpy, which takes no more, and 63 for torch, whose seed is signed.
    for_python, for_numpy, for_torch = struct.unpack("<QIxxxxQ", digest)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch >> 1)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the three generators afterwards."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


class BatchSettings(Protocol):
    """What `GridBatches` asks of a data section.

    train_shapes: (height, width) of the training batches, among which each draws one.
    random_erasing: probability that a rectangle of a sample becomes noise.
    mixup, cutmix: the α of their Beta(α, α), 0 is off; with both on, each batch takes one of them.
    label_smoothing: ε.
    """

    @property
    def seed(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def train_shapes(self) -> tuple[Shape, ...]: ...
    @property
    def random_erasing(self) -> float: ...
    @property
    def mixup(self) -> float: ...
    @property
    def cutmix(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...


class GridBatches(ABC):
    """Items of one batch -> {`inputs`: float32 (B, in_chans, H, W), "targets"}.

    (H, W) is one of `train_shapes`, drawn for the batch. targets: int64 (B,), and what else
    `sample` gives; with mixup, cutmix or label smoothing float32 (B, num_classes) summing to 1.
    Mixup pairs sample b with B−1−b; B is even. A subclass says what a sample is.
    """

    # What a batch calls the grids.
    inputs: ClassVar[str] = "inputs"

    def __init__(self, config: BatchSettings) -> None:
        self.settings = config
        self.shapes = config.train_shapes
        self.erase = None
        if config.random_erasing:
            self.erase = RandomErasing(config.random_erasing, mode="pixel", device="cpu")
        self.mix = None
        if config.mixup > 0 or config.cutmix > 0:
            self.mix = Mixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                label_smoothing=config.label_smoothing,
                num_classes=config.num_classes,
            )

    @abstractmethod
    def sample(
        self, item: Any, label: Any, shape: Shape
    ) -> tuple[np.ndarray, Mapping[str, object]]:
        """One item at a shape, as an array, and its answers: {"targets": label, …}. Random draws
        are from the global generators of Python, numpy and torch, which are seeded for it. A label
        of −1 does not count and stays −1."""

    def tensor(self, arrays: np.ndarray) -> Tensor:
        """(B, in_chans, H, W) float32, normalised, from the stacked arrays of `sample`."""
        return torch.from_numpy(arrays).to(torch.float32)

    def __call__(
        self,
        items: Sequence[Any],
        labels: Sequence[Any],
        keys: Sequence[tuple[int, ...]],
        batch_key: tuple[int, ...],
    ) -> dict[str, Tensor]:
        """keys: one per item; batch_key: of what is drawn once per batch. The seed precedes
        each."""
        settings = self.settings
        shape = self._shape(batch_key)
        arrays = []
        answers = []
        with preserve_rng_state():
            for item, label, key in zip(items, labels, keys, strict=True):
                seeded(settings.seed, _AUGMENT, *key)
                array, answer = self.sample(item, label, shape)
                arrays.append(array)
                answers.append(answer)
            batch = self.tensor(np.stack(arrays))
            tensors = {name: _stacked(answers, name) for name in answers[0]}
            if self.erase is not None:
                for sample, key in zip(batch, keys, strict=True):
                    seeded(settings.seed, _ERASE, *key)
                    self.erase(sample)
            if self.mix is not None:
                seeded(settings.seed, _MIX, *batch_key)
                batch, tensors["targets"] = self.mix(batch, tensors["targets"])
            elif settings.label_smoothing:
                tensors["targets"] = mixup_target(
                    tensors["targets"],
                    settings.num_classes,
                    smoothing=settings.label_smoothing,
                )
        return {self.inputs: batch} | tensors

    def _shape(self, batch_key: tuple[int, ...]) -> Shape:
        """One of the training shapes, drawn for the batch."""
        if len(self.shapes) == 1:
            return self.shapes[0]
        rng = np.random.default_rng([self.settings.seed, _SHAPE, *batch_key])
        return self.shapes[int(rng.integers(len(self.shapes)))]


def _stacked(answers: Sequence[Mapping[str, object]], name: str) -> Tensor:
    """(B, …) int64: one of the answers of every sample."""
    return torch.tensor(np.array([answer[name] for answer in answers]), dtype=torch.int64)
