"""Baselines beside models of DNA in the same evaluators: uniform, compressors, Markov chains.

A baseline scores single bases of a window and nothing before it, as a model does.

    uniform     exactly 2 bits for every base
    gzip, xz    8 bits for every byte that `gzip -9` and `xz -9e` make of a window's letters, evenly over its bases. Headers
                and checksums count (18 bytes of gzip, about 60 of xz), which shows in short windows; nothing is predicted,
                so there is no accuracy
    markov-K    a chain of order K of the training split (markov.py)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from modalities.dna.baselines.base import COMPRESSORS, Baseline, BaselineConfig, Compressor, Uniform
from modalities.dna.baselines.markov import ORDER, MarkovChain
from zoo.naming import did_you_mean

__all__ = ["BASELINES", "COMPRESSORS", "MARKOV", "Baseline", "create_baseline"]

MARKOV = tuple(f"markov-{order}" for order in range(ORDER + 1))
_KINDS: dict[str, type[Baseline]] = {
    "uniform": Uniform,
    **dict.fromkeys(COMPRESSORS, Compressor),
    **dict.fromkeys(MARKOV, MarkovChain),
}


def create_baseline(name: str, train_context: int = 256) -> Baseline:
    """A baseline by its name in BASELINES. ValueError for another name; it names the nearest."""
    if name not in _KINDS:
        beyond = f"orders go to {ORDER}; " if re.fullmatch(r"markov-\d+", name) else ""
        raise ValueError(f"no baseline {name!r}; {beyond}{did_you_mean(name, _KINDS)}there are {', '.join(_KINDS)}")
    return _KINDS[name](BaselineConfig(name, train_context))


BASELINES: dict[str, Callable[[int], Baseline]] = {name: partial(create_baseline, name) for name in _KINDS}
