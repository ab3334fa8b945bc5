"""A context mixer for DNA, the classical kind of model that a learned one is measured against: counters and a few weights.

    p(x) ∝ exp Σ_i w_i log p_i(x),    p_i(x) = (n_i(c_i x) + a_i) / (n_i(c_i) + 4 a_i),    c_i the last k_i bases

n_i counts c_i x on both strands: of ORDERS in BASES of the training regions, or all that they have, and in the window so far,
of RECENT in the window alone. Nothing is fitted but the weights w, a set for each longest context that was seen before; they
go on learning as a window is read, by gradient steps on its log-likelihood. Counts and weights go back to what training left
after every window: nothing crosses windows. Log-linear mixing with weights learned online is that of PAQ (Mahoney 2005);
context models of several orders with inverted repeats are those of GeCo (Pratas et al. 2016).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from modalities.dna.baselines.base import Baseline
from modalities.dna.genome import Genome
from modalities.dna.splits import GenomeSplit, select
from modalities.dna.tokenizers import load_tokenizer
from modalities.dna.windows import WindowDataset
from modalities.heldout import Heldout
from modalities.native import library

__all__ = ["BASES", "MIXERS", "ORDERS", "RATE", "ROWS", "ContextMixer", "Mixer", "draw_rows"]

ORDERS = (1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 22, 24)
RECENT = (2, 4, 8, 11, 12, 16, 24)  # orders that also count inside the window alone
BASES = 8_192_000  # of training data, at most: what the tiny models read
ROWS = (1024, 4096)  # fewest and most bases of a row of them: words that a row's end cuts are not counted
# Of other rows, as how much of the held-out repeats a draw holds is luck; and of all.
MIXERS = ("mixer", "mixer-s1", "mixer-s2", "mixer-all")
TAUGHT = 786_432  # bases of the rows that teach the weights, too
LEARNING, RATE = 2e-4, 2e-3  # of the weights: while training windows teach them together, and in a window read alone
WORD, DIGITS = 25, 9  # bases of the words that are sorted, and of their prefixes whose places are in a table (mixer.c)

_SOURCE = Path(__file__).with_name("mixer.c")


def draw_rows(
    genome: Genome, split: GenomeSplit, *, bases: int | None = BASES, row: int = ROWS[1], seed: int = 0
) -> np.ndarray:
    """(bases // row, row) codes of known bases of the training regions, as training with that context and data seed draws them;
    those of one epoch of windows where `bases` is None, or they are fewer: what is counted twice would pass for a repeat.

    Raises ValueError where the training regions have no `row` known bases in a row.
    """
    data = WindowDataset(
        genome, select(split.regions, "train"), row, load_tokenizer("bases"), seed=seed, reverse_complement=0.5
    )
    found, place = [np.zeros((0, row), np.uint8)], 0
    many = data.epoch_windows if bases is None else bases // row
    while sum(map(len, found)) < many and place < data.epoch_windows:
        part = range(place, min(place + 256, data.epoch_windows))
        tokens = np.stack([sample["tokens"][1:].numpy() for sample in data.__getitems__(part)])
        found.append(tokens[(tokens < 4).all(1)].astype(np.uint8))
        place = part.stop
    rows = np.concatenate(found)[:many]
    if not len(rows):
        raise ValueError(f"the mixer counts stretches of {row:,} known bases: the training regions have none")
    return rows


@dataclass(frozen=True)
class Mixer:
    """Counters of training rows, and the weights that they teach.

    Attributes:
        words: sorted int64, the WORD bases from every place of the rows and of their reverse complements on, as digits 1 to 4
            in base 5; 0 after the end of a row.
        starts: (5^DIGITS + 1,) int64, how many words are below each prefix.
        weights: (orders + 1, experts) float32.
    """

    words: np.ndarray
    starts: np.ndarray
    weights: np.ndarray

    @classmethod
    def fit(cls, rows: np.ndarray, *, taught: int = TAUGHT) -> Mixer:
        """rows (N, T) codes of known bases: what is counted. `taught` of these bases teach the weights, without the counts of
        their own row that lie ahead. Takes 1 GB for 8 million bases."""
        words = np.sort(np.concatenate([_words(rows), _words(3 - rows[:, ::-1])]))
        starts = np.searchsorted(words, np.arange(5**DIGITS + 1, dtype=np.int64) * 5 ** (WORD - DIGITS))
        experts = len(ORDERS) + len(RECENT)
        mixer = cls(words, starts, np.full((len(ORDERS) + 1, experts), 2 / experts, np.float32))
        learn = np.ascontiguousarray(rows[: taught // rows.shape[1]], np.uint8)
        opinions = [mixer._opinions(row, own=True) for row in learn]
        logs, longest = (np.stack(each) for each in zip(*opinions, strict=True))
        for _ in range(2):
            _mix(learn, logs, longest, mixer.weights, LEARNING)
        return mixer

    def costs(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nats of every base of windows (N, T) of codes, and whether the likeliest is the true one (shared where several tie);
        both (N, T) float64, 0 where a base is unknown."""
        found = []
        for window in np.ascontiguousarray(windows, np.uint8):
            logs, longest = self._opinions(window)
            found.append(_mix(window[None], logs, longest, self.weights.copy(), RATE))
        nats, hits = (np.concatenate(each) for each in zip(*found, strict=True))
        return nats, hits

    def _opinions(self, window: np.ndarray, *, own: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Centred log p (T, experts, 4) float32, and the number of the longest context seen (T,) uint8."""
        experts = self.weights.shape[1]
        logs, longest = np.empty((len(window), experts, 4), np.float32), np.empty(len(window), np.uint8)
        orders = np.array(ORDERS, np.int32)
        recent = np.array([len(ORDERS) + RECENT.index(k) if k in RECENT else -1 for k in ORDERS], np.int32)
        sizes = ctypes.c_int(len(ORDERS)), ctypes.c_int(experts), ctypes.c_int(own)
        failed = library(_SOURCE).opinions(
            _at(window), ctypes.c_int64(len(window)), _at(self.words), _at(self.starts), _at(orders), _at(recent), *sizes,
            _at(logs), _at(longest),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the counters of a window of {len(window):,} bases")
        return logs, longest


class ContextMixer(Baseline):
    """The mixer of the first BASES, or all, that a model of its context, between ROWS, and its data seed reads in training, but
    for rows with unknown bases; of each name the last one is kept.

    Raises RuntimeError where it scores before `fit`, and OSError where there is no C compiler.
    """

    # By name, each 16 bytes a base: evaluators of one call share them.
    _kept: ClassVar[dict[tuple[str, int], tuple[tuple[str, int], Mixer]]] = {}
    version = 3  # raised as VERSION is
    source: Heldout[GenomeSplit] | None = None

    def fit(self, data: Heldout[GenomeSplit]) -> None:
        """Count when first used."""
        self.source = data

    @property
    def mixer(self) -> Mixer:
        if self.source is None:
            raise RuntimeError(f"{self.config.position} is not fitted: call fit(open_heldout(source)) first")
        row = min(max(self.config.train_context, ROWS[0]), ROWS[1])
        name, wanted = (self.config.position, self.config.seed), (self.source.fingerprint, row)
        if name not in self._kept or self._kept[name][0] != wanted:
            self._kept.pop(name, None)  # frees it before the next is made
            split = self.source.items
            bases = None if self.config.position == "mixer-all" else BASES
            rows = draw_rows(split.genome, split, bases=bases, row=row, seed=self.config.seed)
            self._kept[name] = wanted, Mixer.fit(rows)
        return self._kept[name][1]

    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        nats, hits = self.mixer.costs(windows)
        return torch.from_numpy(nats), torch.from_numpy(hits)


def _words(rows: np.ndarray) -> np.ndarray:
    """(N·T,) int64."""
    padded = np.pad(rows.astype(np.int64) + 1, ((0, 0), (0, WORD - 1)))
    found = np.zeros(rows.shape, np.int64)
    for k in range(WORD):
        found = 5 * found + padded[:, k : k + rows.shape[1]]
    return found.ravel()


def _mix(
    windows: np.ndarray, logs: np.ndarray, longest: np.ndarray, weights: np.ndarray, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """As `Mixer.costs` of windows (N, T) read side by side; `weights` learn."""
    nats, hits = np.empty(windows.shape), np.empty(windows.shape)
    gains = np.empty((len(windows), weights.shape[1]), np.float32)
    sizes = ctypes.c_int64(windows.shape[0]), ctypes.c_int64(windows.shape[1])
    steps = ctypes.c_int(weights.shape[1]), ctypes.c_float(rate)
    library(_SOURCE).mix(
        _at(windows), *sizes, _at(logs), _at(longest), _at(weights), *steps, _at(nats), _at(hits), _at(gains)
    )
    return nats, hits


def _at(values: np.ndarray) -> ctypes.c_void_p:
    assert values.flags.c_contiguous
    return ctypes.c_void_p(values.ctypes.data)
