"""Priors by name. A new one is its own file, a line in `SHIPPED`, and a row of
tests/zoo/priors_table.py.

Priors of other packages and files come by `zoo.register_prior`.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import MutableMapping
from importlib import import_module
from typing import Any

from zoo.errors import Options, check_options, did_you_mean, nearest
from zoo.priors.base import GridPrior, Prior, RelativeTable, TablePrior
from zoo.priors.terms import PriorTerms

__all__ = [
    "PRIORS",
    "GridPrior",
    "Prior",
    "PriorTerms",
    "RelativeTable",
    "TablePrior",
    "create_prior",
    "list_priors",
    "on_grid",
]

# Where each prior is; its file is imported when the prior is made.
SHIPPED: dict[str, str] = {
    "uniform": "zoo.priors.uniform:Uniform",
    "sink": "zoo.priors.sink:Sink",
    "by_heads": "zoo.priors.by_heads:ByHeads",
    "nape": "zoo.priors.by_heads:Nape",
    "alibi": "zoo.priors.alibi:Alibi",
    "alibi2d": "zoo.priors.alibi:Alibi2d",
    "spectral": "zoo.priors.spectral:Spectral",
    "spectral2d": "zoo.priors.spectral:Spectral2d",
    "key_bias": "zoo.priors.key_bias:KeyBias",
    "key_bias2d": "zoo.priors.key_bias:KeyBias2d",
    "goat": "zoo.priors.goat:Goat",
    "goat2d": "zoo.priors.goat:Goat2d",
    "ggd": "zoo.priors.ggd:Ggd",
    "ggd2d": "zoo.priors.ggd:Ggd2d",
    "cable": "zoo.priors.cable:Cable",
    "fox": "zoo.priors.fox:Fox",
    "t5": "zoo.priors.t5:T5",
    "t5_2d": "zoo.priors.t5:T52d",
    "kerple": "zoo.priors.kerple:Kerple",
    "kerple2d": "zoo.priors.kerple:Kerple2d",
    "scale_invariant": "zoo.priors.scale_invariant:ScaleInvariant",
    "lookhere2d": "zoo.priors.lookhere:Lookhere2d",
    "fire": "zoo.priors.fire:Fire",
    "fire2d": "zoo.priors.fire:Fire2d",
    "table": "zoo.priors.table:Table",
}
# Sums with a name of their own.
SUMS = {"ggd_goat": "ggd+spectral+key_bias"}
# What these parts start with in a sum, where it differs from their defaults and they have the
# option: the key bias without a slope of its own, since the other parts hold the recency, and a
# spectral prior small and seeded.
SUM_OPTIONS: dict[str, Options] = {
    "spectral": {"rank": 2, "init": "seeded"},
    "key_bias": {"init": "uniform"},
}


class Priors(UserDict[str, Any]):
    """Classes of priors by name; one that ships is imported when it is read."""

    def __getitem__(self, name: str) -> type[Prior]:
        prior = self.data[name]
        if isinstance(prior, str):
            file, _, kind = prior.partition(":")
            prior = self.data[name] = getattr(import_module(file), kind)
        return prior


PRIORS: MutableMapping[str, type[Prior]] = Priors(SHIPPED)


def on_grid(name: str, prior: type[Prior] | None = None) -> bool:
    """Whether a prior is one of grids of patches: its name ends in "2d", or its class is a
    `GridPrior`."""
    if name.endswith("2d") or name in SHIPPED:
        return name.endswith("2d")
    return issubclass(prior or PRIORS[name], GridPrior)


def list_priors() -> list[str]:
    """Names that `create_prior` knows."""
    return sorted(PRIORS)


def create_prior(name: str, *, num_heads: int, **options) -> Prior:
    """A prior by name; its class documents the formula and the options.

    A sum has the names of its parts, "ggd+spectral", or one of `SUMS`. Its options are those of
    each part by the part's name, and `train_context` and the like for every part that takes them:
    `create_prior("ggd+key_bias", num_heads=4, ggd={"init": "alibi"}, train_context=256)`.

    Raises:
        ValueError: for an unknown name, an unknown option or a missing one; it names the nearest
            valid choice.
    """
    names = SUMS.get(name, name).split("+")
    if len(names) > 1:
        return _create_sum(name, names, num_heads, options)
    if name not in PRIORS:
        raise ValueError(
            f"unknown prior {name!r}; {did_you_mean(name, PRIORS)}Known: {', '.join(list_priors())}"
        )
    check_options(f"prior {name!r}", PRIORS[name], options, fixed=("num_heads",))
    return PRIORS[name](num_heads, **options)


def _create_sum(name: str, names: list[str], num_heads: int, options: Options) -> Prior:
    """The sum of several priors, each of which occurs once."""
    from zoo.priors.compose import Compose

    for part in names:
        if part not in PRIORS:
            raise ValueError(f"part {part!r} of {name!r} is no prior; {nearest(part, PRIORS)}")
        if names.count(part) > 1:
            raise ValueError(f"{name!r} has the part {part!r} twice")
    parts: dict[str, Prior] = {}
    shared = {key: value for key, value in options.items() if key not in names}
    unread = set(shared)
    for part in names:
        taken = inspect.signature(PRIORS[part]).parameters
        # What a part starts with in a sum, then what all parts are given, then its own.
        values = {key: value for key, value in SUM_OPTIONS.get(part, {}).items() if key in taken}
        values |= {key: value for key, value in shared.items() if key in taken}
        values |= options.get(part, {})
        unread -= set(taken)
        parts[part] = create_prior(part, num_heads=num_heads, **values)
    if unread:
        raise ValueError(
            f"no part of {name!r} has the option {min(unread)!r}; options of a part are given "
            f"under its name: {', '.join(names)}"
        )
    return Compose(**parts)
