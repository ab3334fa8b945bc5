"""Classes by name: what the numbers of a model and those of a source have to do with each other.

A model answers with a number, and a source labels its items with numbers. What a number means is
said by a list of names on either side: a model's `class_names`, and a source's `classes`. Names are
equal where their letters are, in Unicode's composed form (NFC): some file systems take "é" apart.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from zoo.errors import did_you_mean, nearest

# Names that a message lists before it stops.
LISTED = 6


def composed(name: str) -> str:
    """The name as it is compared."""
    return unicodedata.normalize("NFC", name)


def listing(names: Sequence[str]) -> str:
    """The first names, for a message."""
    rest = len(names) - LISTED
    words = ", ".join(repr(name) for name in names[:LISTED])
    return f"{words} and {rest:,} more" if rest > 0 else words


def places_by_name(names: Sequence[str], owner: str) -> dict[str, int]:
    """Name as it is compared → number. ValueError for a name that is listed twice."""
    counts = Counter(map(composed, names))
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"{owner} lists the class {name!r} {count} times: a name decides where it is alone"
            )
    return {composed(name): place for place, name in enumerate(names)}


def label_numbers(
    source_names: Sequence[str], model_names: Sequence[str], *, source: str, model: str
) -> tuple[int, ...]:
    """By label of a source, the number of that class in a model.

    source, model: what messages call them. ValueError for classes that the model does not have, and
    for a name that a list has twice where the lists differ.
    """
    if list(map(composed, source_names)) == list(map(composed, model_names)):
        return tuple(range(len(model_names)))
    numbers = places_by_name(model_names, model)
    places_by_name(source_names, source)
    strangers = [name for name in source_names if composed(name) not in numbers]
    if strangers:
        raise ValueError(
            f"{source} has {_counted(strangers)} that {model} does not have: "
            f"{listing(strangers)}; {_nearest_of(strangers, model_names)}"
        )
    return tuple(numbers[composed(name)] for name in source_names)


def shared_classes(names: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """(number in `names`, number in `others`) of every class that is in both lists. ValueError for
    a name that a list has twice where the lists differ."""
    if list(map(composed, names)) == list(map(composed, others)):
        return [(number, number) for number in range(len(names))]
    numbers = places_by_name(others, "one list")
    places = places_by_name(names, "the other list")
    return [(place, numbers[name]) for name, place in places.items() if name in numbers]


def _counted(names: Sequence[str]) -> str:
    return "a class" if len(names) == 1 else f"{len(names)} classes"


def _nearest_of(strangers: Sequence[str], names: Sequence[str]) -> str:
    """The closest name of each stranger that has one; all names where none has."""
    hints = []
    for stranger in strangers[:LISTED]:
        hint = did_you_mean(stranger, names, cutoff=0.5).strip()
        if hint:
            hints.append(hint if len(strangers) == 1 else f"for {stranger!r} {hint}")
    if hints:
        return " ".join(hints)
    if len(names) <= LISTED:
        return nearest(strangers[0], names)
    return f"valid: {listing(names)}"


def is_identity(numbers: Iterable[int]) -> bool:
    """Whether labels are the model's numbers as they are."""
    return all(label == number for label, number in enumerate(numbers))


def known_names(model: Any) -> tuple[str, ...]:
    """The names of a model's classes; () where they are unknown, or not as many as its classes."""
    names = tuple(getattr(model, "class_names", ()))
    return names if len(names) == model.config.num_classes else ()
