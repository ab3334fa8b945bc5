"""What a model of DNA is measured against, in the same evaluators: no knowledge, compressors, Markov chains.

A baseline scores single bases of a window and nothing before it, as a model does.

    uniform     2 bits for every base, exactly
    gzip, xz    8 bits for every byte that `gzip -9` and `xz -9e` make of a window's letters, evenly over its bases. Headers
                and checksums count (18 bytes of gzip, about 60 of xz), which shows in short windows; nothing is predicted,
                so there is no accuracy
    markov-K    a chain of order K of the training split (markov.py)
"""

from __future__ import annotations

import gzip
import lzma
import math
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from modalities.dna.bases import UNKNOWN, decode
from modalities.dna.held_out import HeldOut
from modalities.dna.markov import ORDER, VERSION, Markov, load
from modalities.dna.scoring import Scores
from modalities.evaluation import batches
from zoo.naming import did_you_mean

CHUNK = 1 << 18  # bases that Markov chains work on at a time
BIT = math.log(2)
UNIFORM = 2 * BIT  # nats of one base in four: over BIT exactly 2
MARKOV = tuple(f"markov-{order}" for order in range(ORDER + 1))


@dataclass(frozen=True)
class BaselineConfig:
    """What tables, figures and evaluators ask of a model's configuration.

    Attributes:
        position: the baseline's name, for its style in figures.
        train_context: what default lengths are multiples of; that of the models beside it.
        version: of what a chain learns and how, so that stored numbers of before are not reused.
    """

    position: str
    train_context: int = 256
    ssmax: bool = False
    tokenizer: str = "bases"
    strands: str = "one"
    version: int = VERSION


class Baseline(nn.Module):
    """A baseline: a module without parameters, so that it stands among models."""

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__()
        self.config = config

    def learn_from(self, data: HeldOut) -> None:
        """Take what there is to learn from the training split of a source; none but Markov chains learn."""

    def score(self, windows: np.ndarray) -> Scores:
        """Scores (B, T) of windows (B, T) of base codes, of every base that is known."""
        nll, correct = self.costs(windows)
        known = torch.from_numpy(windows < UNKNOWN)
        return Scores(nll.where(known, 0.0), known.long(), correct.where(known, 0.0))

    @abstractmethod
    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """nll and correct as in `Scores`, both (B, T) float64, whatever they are where a base is unknown."""


class Uniform(Baseline):
    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        return tuple(torch.full(windows.shape, value, dtype=torch.float64) for value in (UNIFORM, 0.25))


class Compressor(Baseline):
    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        known = [window[window < UNKNOWN] for window in windows]
        sizes = [len(COMPRESSORS[self.config.position](decode(codes).encode())) for codes in known]
        each = np.array([8 * BIT * size / max(1, len(k)) for size, k in zip(sizes, known, strict=True)])
        nll = torch.from_numpy(each)[:, None].expand(windows.shape)
        return nll, torch.full(windows.shape, math.nan, dtype=torch.float64)


class MarkovChain(Baseline):
    """Raises RuntimeError where it is asked before `learn_from`. The last source's chain is kept, for all orders."""

    _kept: tuple[str, Markov] | None = None  # of the class: one table serves all orders

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__(config)
        self.order = int(config.position.removeprefix("markov-"))
        self.source: HeldOut | None = None

    def learn_from(self, data: HeldOut) -> None:
        self.source = data

    @property
    def chain(self) -> Markov:
        """Fitted, or read, when first asked for."""
        if self.source is None:
            raise RuntimeError(f"{self.config.position} has learnt nothing: call learn_from(held_out(source)) first")
        if MarkovChain._kept is None or MarkovChain._kept[0] != self.source.fingerprint:
            MarkovChain._kept = self.source.fingerprint, load(self.source.genome, self.source.regions)
        return MarkovChain._kept[1]

    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        nll, correct = np.empty(windows.shape), np.empty(windows.shape)
        for part in batches(windows.shape[1], max(1, CHUNK // len(windows))):
            before = min(part.start, self.order)  # a context is all that a chunk needs of the one before
            read = windows[:, part.start - before : part.stop]
            p = self.chain.probabilities(read, self.order)[:, before:]
            true = np.minimum(read[:, before:], UNKNOWN - 1).astype(np.int64)[..., None]
            nll[:, part] = -np.log(np.take_along_axis(p, true, axis=-1)[..., 0])
            best = p == p.max(-1, keepdims=True)
            correct[:, part] = (np.take_along_axis(best, true, axis=-1) / best.sum(-1, keepdims=True))[..., 0]
        return torch.from_numpy(nll), torch.from_numpy(correct)

    def complete(self, prompts: np.ndarray, *, new_bases: int, temperature: float, seed: int) -> np.ndarray:
        """(B, new_bases) codes after prompts (B, P): drawn from p^(1/temperature), the likeliest at temperature 0."""
        rng, known = np.random.default_rng(seed), prompts[:, -max(1, self.order) :]
        for _ in range(new_bases):
            last = known[:, -max(1, self.order) :]
            asked = np.concatenate([last, np.zeros_like(last[:, :1])], axis=1)
            p = self.chain.probabilities(asked, self.order)[:, -1]
            if temperature > 0:
                p = np.exp((np.log(p) - np.log(p.max(1, keepdims=True))) / temperature)
                chosen = (rng.random((len(p), 1)) * p.sum(1, keepdims=True) >= p.cumsum(1)).sum(1)
            else:
                chosen = p.argmax(1)
            known = np.concatenate([known, chosen[:, None].astype(known.dtype)], axis=1)
        return known[:, -new_bases:]


def _xz(letters: bytes) -> bytes:
    # A dictionary beyond the data is of no use, and costs time to clear; 4 KiB is the least there is.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(4096, len(letters))}]
    return lzma.compress(letters, filters=filters)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"gzip": partial(gzip.compress, compresslevel=9, mtime=0), "xz": _xz}


def create_baseline(name: str, train_context: int = 256) -> Baseline:
    """A baseline by its name in BASELINES. ValueError for another name; it says which is near."""
    kinds = dict.fromkeys(MARKOV, MarkovChain) | dict.fromkeys(COMPRESSORS, Compressor) | {"uniform": Uniform}
    if name not in kinds:
        beyond = f"orders go to {ORDER}; " if re.fullmatch(r"markov-\d+", name) else ""
        raise ValueError(f"no baseline {name!r}; {beyond}{did_you_mean(name, kinds)}there are {', '.join(BASELINES)}")
    return kinds[name](BaselineConfig(name, train_context))


BASELINES: dict[str, Callable[..., Baseline]] = {
    name: partial(create_baseline, name) for name in ("uniform", *COMPRESSORS, *MARKOV)
}
