"""Items of a source, such as images or recordings: sets of them, the report of what was skipped,
the tenth that is held out, and held-out items for evaluation."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from modalities.sources import HashSplit

HELDOUT_FRACTION = 0.1
# Why something was skipped, and its name.
Event = tuple[str, str]
# Reads a sample: (item, label). Raises BadSample.
Read = Callable[[], tuple[Any, Any]]
_log = logging.getLogger(__name__)


class BadSample(ValueError):
    """A sample that is skipped: `reason` is what reports count, `detail` is for people."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class SkipReport:
    """Counts of what was skipped, by reason, and the first name of each, which is logged. noun:
    what a sample is called."""

    def __init__(self, noun: str = "sample") -> None:
        self.noun = noun
        self.skipped: Counter[str] = Counter()
        self.names: dict[str, str] = {}

    def extend(self, events: Iterable[Event]) -> None:
        """Count events, as workers hand them over."""
        for reason, name in events:
            self.skipped[reason] += 1
            if self.skipped[reason] == 1:
                self.names[reason] = name if len(name) <= 60 else "…" + name[-59:]
                message = "%s skipped (%s): %s; more of these are only counted"
                _log.warning(message, self.noun, reason, name)

    def __str__(self) -> str:
        """One line: "skipped 9 × corrupt (such as NAME), 1 × empty (such as NAME)"."""
        parts = [
            f"{count} × {reason} (such as {self.names[reason]})"
            for reason, count in self.skipped.most_common()
        ]
        return f"skipped {', '.join(parts)}" if parts else ""


class ItemSet:
    """Items by index, such as images or recordings. A source derives from it.

    spec: what a recipe calls the source.
    classes: names by label; None where the source has no list of them.
    fingerprint: changes with the items; kept in saved states and the key of stored cells.
    problems: events of listing the items.
    among: items that the held-out tenth was chosen from by name; 0: all are here.
    class_order: what orders the classes: "listed" is a list of the source's, "sorted" that of their
        names, "chosen" an order that the user named.
    """

    spec: str
    classes: tuple[str, ...] | None
    fingerprint: str
    problems: Sequence[Event] = ()
    among: int = 0
    class_order: str = "listed"

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> tuple[Any, Any]:
        """(item, label), as `GridBatches.sample` and evaluators take them. Raises BadSample."""
        raise NotImplementedError

    def group(self, index: int) -> str:
        """What the item shares with others that a measurement should not count as independent, such
        as a font or a speaker; ""."""
        return ""

    def name(self, index: int) -> str:
        """What a report calls the item."""
        return f"{self.spec}[{index}]"


def first_good(
    candidates: Iterable[tuple[str, Read]], events: list[Event], spec: str, noun: str
) -> tuple[Any, Any]:
    """(item, label) of the first of named candidates that can be read; `events` gets those before
    it. ValueError where there is none."""
    events_before = len(events)
    for name, read in candidates:
        try:
            return read()
        except BadSample as error:
            events.append((error.reason, name))
    report = SkipReport(noun)
    report.extend(events[events_before:])
    skipped = len(events) - events_before
    raise ValueError(f"source {spec!r}: all {skipped} {noun}s were skipped: {report}")


class HeldoutItems:
    """Items in one random order, the same whatever order they are stored in, so that the first of
    them are a fair sample: `[place]` is (item, label). classes: names by label; numbers without
    names, empty where unknown."""

    # What an item is called.
    noun: ClassVar[str] = "item"

    def __init__(self, items: ItemSet, num_classes: int = 0) -> None:
        self.items = items
        if items.classes is None:
            self.classes = [str(label) for label in range(num_classes)]
        else:
            self.classes = list(items.classes)
        self.order = np.random.default_rng(0).permutation(len(items))

    def __len__(self) -> int:
        return len(self.order)

    def index(self, place: int) -> int:
        """The index in `items`."""
        return int(self.order[place])

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        """Raises BadSample."""
        return self.items.read(self.index(place))

    def side(self, place: int, shape: tuple[int, int]) -> int:
        """The greatest size, as an evaluator counts it, at which the item has detail of its own, at
        the aspect of `shape`; 0 where it cannot be read."""
        raise NotImplementedError

    def group(self, place: int) -> str:
        """What the item shares with others (`ItemSet.group`); by default itself."""
        index = self.index(place)
        return self.items.group(index) or f"{self.noun} {index}"

    def name(self, place: int) -> str:
        """What a report calls the item."""
        return self.items.name(self.index(place))


def split_places(names: Iterable[str], split: str, key: bytes) -> list[int]:
    """Of a source without a held-out part, the places of the items of a split ("train" or
    "heldout"): held out is a tenth, by blake2b of their names with a modality's key."""
    hash_split = HashSplit(key, HELDOUT_FRACTION)
    wanted = split == "heldout"
    places = []
    for place, name in enumerate(names):
        if hash_split.is_heldout(name.encode("utf-8", "surrogatepass")) == wanted:
            places.append(place)
    return places


def digest_of(parts: Iterable[object]) -> str:
    """32 hex digits of BLAKE2b over the repr of every part."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
