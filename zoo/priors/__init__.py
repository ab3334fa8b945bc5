"""Priors by name. A new one is its own file, a line in `SHIPPED`, and a row of
tests/zoo/priors_table.py.

Priors of other packages and files come by `zoo.register_prior`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping
from importlib import import_module
from typing import Any

from zoo.errors import check_options, did_you_mean
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
    "by_heads": "zoo.priors.by_heads:ByHeads",
    "nape": "zoo.priors.by_heads:Nape",
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

    Raises:
        ValueError: for an unknown name, an unknown option or a missing one; it names the nearest
            valid choice.
    """
    if name not in PRIORS:
        raise ValueError(
            f"unknown prior {name!r}; {did_you_mean(name, PRIORS)}Known: {', '.join(list_priors())}"
        )
    check_options(f"prior {name!r}", PRIORS[name], options, fixed=("num_heads",))
    return PRIORS[name](num_heads, **options)
