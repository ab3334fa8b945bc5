"""Priors by name. A new one is its own file, a line in `PRIORS`, and a row of tests/zoo/priors_table.py."""

from __future__ import annotations

from zoo.naming import check_options, did_you_mean
from zoo.priors.alibi import Alibi, Alibi2d
from zoo.priors.base import GridPrior, Prior, PriorTerms, RelativeTable, TablePrior
from zoo.priors.cable import Cable
from zoo.priors.compose import Compose, Goat, Goat2d, compose
from zoo.priors.fire import Fire, Fire2d
from zoo.priors.ggd import Ggd, Ggd2d
from zoo.priors.kerple import Kerple, Kerple2d
from zoo.priors.key_bias import KeyBias, KeyBias2d
from zoo.priors.spectral import Spectral, Spectral2d
from zoo.priors.t5 import T5, T52d
from zoo.priors.uniform import Uniform

__all__ = [
    "PRIORS",
    "Compose",
    "GridPrior",
    "Prior",
    "PriorTerms",
    "RelativeTable",
    "TablePrior",
    "compose",
    "create_prior",
    "list_priors",
]

PRIORS: dict[str, type[Prior]] = {
    "uniform": Uniform,
    "alibi": Alibi,
    "alibi2d": Alibi2d,
    "spectral": Spectral,
    "spectral2d": Spectral2d,
    "key_bias": KeyBias,
    "key_bias2d": KeyBias2d,
    "goat": Goat,
    "goat2d": Goat2d,
    "ggd": Ggd,
    "ggd2d": Ggd2d,
    "cable": Cable,
    "t5": T5,
    "t5_2d": T52d,
    "kerple": Kerple,
    "kerple2d": Kerple2d,
    "fire": Fire,
    "fire2d": Fire2d,
}


def list_priors() -> list[str]:
    """Names that `create_prior` knows."""
    return sorted(PRIORS)


def create_prior(name: str, *, num_heads: int, **options) -> Prior:
    """A prior by name; its class documents the formula and the options.

    Raises:
        ValueError: for an unknown name, an unknown option or a missing one; it names the nearest valid choice.
    """
    if name not in PRIORS:
        raise ValueError(f"unknown prior {name!r}; {did_you_mean(name, PRIORS)}Known: {', '.join(list_priors())}")
    check_options(f"prior {name!r}", PRIORS[name], options, fixed=("num_heads",))
    return PRIORS[name](num_heads, **options)
