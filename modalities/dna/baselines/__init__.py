"""Baselines beside models of DNA in the same evaluators: uniform, Markov chains, a context mixer.

A baseline scores single bases of a window and nothing before it, as a model does.

    uniform     exactly 2 bits for every base
    markov-K    a chain of order K of the training split (markov.py)
    mixer       counters of orders to 24 and inverted repeats, of 8.2M bases of the training split (or all, where it has less)
                and of the window, mixed by weights that are learned as it is read (mixer.py). The bases are those that
                models beside it read with data seed 0, but for rows with unknown ones; mixer-s1 and mixer-s2 read what
                seeds 1 and 2 do. Beside models of other contexts than 1,024 to 4,096 single bases they are other rows
    mixer-all   the same of every row of the training split: for models that read all of it. 16 bytes a base

General compressors are none of them: gzip and xz start anew in every window, and never come below 2 bits a base there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from modalities.dna.baselines.base import Baseline, BaselineConfig, Uniform
from modalities.dna.baselines.markov import ORDER, MarkovChain
from modalities.dna.baselines.mixer import MIXERS, ContextMixer
from zoo.naming import did_you_mean

__all__ = ["BASELINES", "MARKOV", "Baseline", "create_baseline"]

MARKOV = tuple(f"markov-{order}" for order in range(ORDER + 1))
_KINDS: dict[str, type[Baseline]] = {
    "uniform": Uniform,
    **dict.fromkeys(MARKOV, MarkovChain),
    **dict.fromkeys(MIXERS, ContextMixer),
}


def create_baseline(name: str, train_context: int = 256) -> Baseline:
    """A baseline by its name in BASELINES. ValueError for another name; it names the nearest."""
    if name not in _KINDS:
        beyond = f"orders go to {ORDER}; " if re.fullmatch(r"markov-\d+", name) else ""
        raise ValueError(f"no baseline {name!r}; {beyond}{did_you_mean(name, _KINDS)}there are {', '.join(_KINDS)}")
    kind, (position, _, seed) = _KINDS[name], name.partition("-s")
    return kind(BaselineConfig(position, train_context, version=kind.version, seed=int(seed or 0)))


BASELINES: dict[str, Callable[[int], Baseline]] = {name: partial(create_baseline, name) for name in _KINDS}
