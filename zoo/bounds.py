"""Configurations checked by their fields: types by annotation, bounds beside the default.

    @dataclass(frozen=True)
    class Config:
        dim: int = bounded(128, 1, 2**17)
        tied: bool = True

        def __post_init__(self) -> None:
            check_fields(self)

Upper bounds, far above what anyone trains, are for files and command lines: a number with too many digits is an error in
one line before it takes memory or time.
"""

from __future__ import annotations

import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any

__all__ = ["LARGEST_SEED", "LONGEST_CONTEXT", "MOST_PARAMETERS", "bounded", "check_fields", "check_parameters"]

LARGEST_SEED = 2**63 - 1
LONGEST_CONTEXT = 2**24  # tokens, or patches, of a training sample
MOST_PARAMETERS = 2**40  # of a model

_WORDS = {bool: "true or false", str: "a string", type(None): "none", dict: "values by name"}


def bounded(default: Any, least: float, most: float) -> Any:
    """A dataclass field whose numbers lie in [least, most]."""
    return field(default=default, metadata={"bounds": (least, most)})


def check_fields(config: Any, prefix: str = "") -> None:
    """ValueError for the first field of a dataclass that does not fit its annotation and bounds; floats must be finite.

    A whole number is a float too, lists and tuples are one kind (JSON knows lists alone), and a bool is no number.
    """
    hints = _hints(config.__class__)
    for each in fields(config):
        value, bounds = getattr(config, each.name), each.metadata.get("bounds", (-math.inf, math.inf))
        if not _fits(value, hints[each.name], bounds):
            raise ValueError(f"{prefix}{each.name}={value!r:.80}: expected {_expected(hints[each.name], bounds)}")


def check_parameters(count: int) -> None:
    """ValueError for a configuration of about `count` parameters, more than `MOST_PARAMETERS`."""
    if count > MOST_PARAMETERS:
        raise ValueError(f"a model of about {count:,} parameters; at most {MOST_PARAMETERS:,} (2⁴⁰)")


@cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any, bounds: tuple[float, float]) -> bool:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is Any:
        return True
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, part, bounds) for part in parts)
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        if not issubclass(value.__class__, number) or value.__class__ is bool:
            return False
        try:
            return math.isfinite(value) and bounds[0] <= value <= bounds[1]
        except OverflowError:  # of a whole number beyond all floats
            return False
    if kind in (list, tuple):
        if not isinstance(value, list | tuple):
            return False
        if kind is list or parts[1:] == (Ellipsis,):
            return all(_fits(one, parts[0], bounds) for one in value)
        return len(value) == len(parts) and all(map(_fits, value, parts, [bounds] * len(parts)))
    return isinstance(value, Mapping if kind is dict else kind)


def _expected(hint: Any, bounds: tuple[float, float]) -> str:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_expected(part, bounds) for part in parts)
    if kind in (int, float):
        least, most = (None if math.isinf(end) else f"{end:,}" for end in bounds)
        word = "a whole number" if kind is int else "a number"
        if least is not None and most is not None:
            return f"{word} from {least} to {most}"
        return word if least is None else f"{word}, at least {least}"
    if kind in (list, tuple):
        many = "a list" if kind is list or parts[1:] == (Ellipsis,) else f"{len(parts)} values"
        return f"{many}, each {_expected(parts[0], bounds)}"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
