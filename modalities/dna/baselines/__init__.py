"""Baselines in the same evaluators as models of DNA: uniform bases and Markov chains.

A baseline scores single bases of a window and nothing before it, as a model does.

    uniform     exactly 2 bits for every base
    markov-K    a chain of order K of the training split (markov.py)

General compressors are none of them: gzip and xz start anew in every window, and never come below 2 bits a base there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from modalities.dna.baselines.base import Baseline, BaselineConfig, Uniform
from modalities.dna.baselines.markov import ORDER, MarkovChain
from zoo.naming import did_you_mean

__all__ = ["BASELINES", "MARKOV", "Baseline", "create_baseline"]

MARKOV = tuple(f"markov-{order}" for order in range(ORDER + 1))
_KINDS: dict[str, type[Baseline]] = {
    "uniform": Uniform,
    **dict.fromkeys(MARKOV, MarkovChain),
}


def create_baseline(name: str, train_context: int = 256) -> Baseline:
    """A baseline by its name in BASELINES. ValueError for another name; it names the nearest."""
    if name not in _KINDS:
        beyond = f"orders go to {ORDER}; " if re.fullmatch(r"markov-\d+", name) else ""
        raise ValueError(f"no baseline {name!r}; {beyond}{did_you_mean(name, _KINDS)}there are {', '.join(_KINDS)}")
    kind = _KINDS[name]
    return kind(BaselineConfig(name, train_context, version=kind.version))


BASELINES: dict[str, Callable[[int], Baseline]] = {name: partial(create_baseline, name) for name in _KINDS}
