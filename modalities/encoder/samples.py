"""Items as samples with numbers, which `modalities.loading.IndexedLoader` takes.

An epoch is not cut to whole batches: its last samples share a batch with the next one's first, so
every sample occurs exactly once per epoch. The next good item of the order takes the place of a
skipped one, so where a batch begins never depends on what was skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from modalities.encoder.batches import GridBatches
from modalities.encoder.items import Event, ItemSet, Read, SkipReport, first_good
from modalities.loading import EpochCache

# First word of the random key of an epoch's order, after the seed; `batches` has others.
_ORDER = 0


class ItemSamples:
    """Samples of an item set. Training is endless: epoch e serves all N items in an order drawn
    from (seed, e). train=False is one pass in an order that is the same for every seed; `batches`
    should then not augment. Every item counts once in it: numbers beyond the end, and what replaces
    a skipped item, have target −1."""

    # The class of data in saved states, and what an item is called.
    kind: ClassVar[str] = "items"
    noun: ClassVar[str] = "item"

    def __init__(self, items: ItemSet, batches: GridBatches, *, train: bool, seed: int = 0) -> None:
        if not len(items):
            raise ValueError(f"source {items.spec!r} has no {self.noun}")
        self.items = items
        self.batches = batches
        self.train = train
        self.seed = seed if train else 0
        self.size = None if train else len(items)
        self.report = SkipReport(self.noun)
        self.report.extend(items.problems)
        self._orders = EpochCache(self._order)

    def identity(self) -> dict[str, object]:
        return {"kind": self.kind, "fingerprint": self.items.fingerprint, "seed": self.seed}

    def read(self, index: int) -> tuple[Any, Any]:
        """(item, label) as `batches` take them. Raises BadSample."""
        return self.items.read(index)

    def _order(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, _ORDER, epoch])
        return rng.permutation(len(self.items))

    def __getitem__(self, numbers: list[int]) -> tuple[dict[str, Tensor], list[Event]]:
        events: list[Event] = []
        samples = [self._good(number, events) for number in numbers]
        items, labels = zip(*samples, strict=True)
        keys = [(number,) for number in numbers]
        return self.batches(items, labels, keys, (numbers[0],)), events

    def _good(self, number: int, events: list[Event]) -> tuple[Any, Any]:
        """The item of a number, or the next good one of the order."""
        epoch, position = divmod(number, len(self.items))
        order = self._orders[epoch if self.train else 0]
        events_before = len(events)
        candidates = self._from(order, position)
        item, label = first_good(candidates, events, self.items.spec, self.noun)
        skipped = len(events) > events_before
        if not self.train and (epoch or skipped):
            # Beyond the end, or in place of a skipped one: it does not count.
            label = -1
        return item, label

    def _from(self, order: np.ndarray, position: int) -> Iterator[tuple[str, Read]]:
        """The items of an order from `position` on, wrapping around: (name, what reads it)."""
        for step in range(len(order)):
            index = int(order[(position + step) % len(order)])
            yield self.items.name(index), partial(self.read, index)
