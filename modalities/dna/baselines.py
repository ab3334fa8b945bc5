"""Baselines that the evaluators of DNA measure like models: Markov chains `markov-0` to
`markov-12`.

p_k(x | c) = (n(c x) + τ_k p_{k−1}(x | c')) / (n(c) + τ_k), where c' is c without its first base and
p_{−1} = 1/4: a Dirichlet prior around the chain of the order below, worth τ_k observations. n
counts stretches of ORDER+1 known bases of the training regions and of their reverse complements;
lower orders are summed out of one table. Each τ_k, in turn from order 0, is the likeliest of a grid
on a fixed pseudo-random fiftieth of the training regions, with counts of the rest; in the end all
training regions are counted. Held-out bases are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from modalities.dna.genome import Genome
from modalities.dna.kmers import contexts, kmers
from modalities.dna.scoring import BaselineConfig, Scores, WindowScorer
from modalities.dna.splits import GenomeSplit, Region, joined, select
from modalities.dna.tokenizers import UNKNOWN
from modalities.loading import Heldout
from zoo.positions import slices

ORDER = 12
TAUS = tuple(digit * 10.0**power for power in range(7) for digit in (1, 2, 5))  # 1 to 5 million
BLOCK = 4096  # bases in a piece of training data that is set aside to choose τ, or not
ASIDE = 0.02
MOST_ASIDE = 256  # blocks: a million bases are enough
CHUNK = 1 << 20  # bases counted at a time
SCORED = 1 << 18  # bases scored at a time


class MarkovChain(WindowScorer):
    """The chain of one order; one table serves all orders. Raises RuntimeError where it scores
    before `fit`."""

    def __init__(self, order: int, train_context: int = 256) -> None:
        super().__init__()
        self.config = BaselineConfig(f"markov-{order}", train_context)
        self.order = order
        self.data: Heldout[GenomeSplit] | None = None

    def fit(self, data: Heldout[GenomeSplit]) -> None:
        """Learn from the training regions of a source, when first used."""
        self.data = data

    def score(self, windows: np.ndarray) -> Scores:
        if self.data is None:
            raise RuntimeError(
                f"{self.config.position} is not fitted: call fit(open_heldout(source)) first"
            )
        chain = _fitted(self.data)
        nll = np.empty(windows.shape)
        correct = np.empty(windows.shape)
        for part in slices(windows.shape[1], max(1, SCORED // len(windows))):
            before = min(
                part.start, self.order
            )  # a context is all that a chunk needs of the previous one
            read = windows[:, part.start - before : part.stop]
            p = chain.probabilities(read, self.order)[:, before:]
            true = np.minimum(read[:, before:], UNKNOWN - 1).astype(np.int64)[..., None]
            nll[:, part] = -np.log(np.take_along_axis(p, true, axis=-1)[..., 0])
            best = p == p.max(-1, keepdims=True)
            correct[:, part] = (
                np.take_along_axis(best, true, axis=-1) / best.sum(-1, keepdims=True)
            )[..., 0]
        known = torch.from_numpy(windows < UNKNOWN)
        values = (torch.from_numpy(array).where(known, 0.0) for array in (nll, correct))
        return Scores(next(values), known.long(), next(values))


BASELINES: dict[str, Callable[[int], MarkovChain]] = {
    f"markov-{n}": partial(MarkovChain, n) for n in range(ORDER + 1)
}


@dataclass(frozen=True)
class Markov:
    """Of one training split: for k = 0 .. order, (4^k, 4) counts of each base after each context of
    k bases, the first base the most significant digit; and (order + 1,) pseudo-counts."""

    tables: tuple[np.ndarray, ...]
    taus: tuple[float, ...]

    def probabilities(self, windows: np.ndarray, order: int) -> np.ndarray:
        """(B, T, 4) float64: p_k of each base at each place of windows (B, T) of codes, given what
        precedes it there. k is `order`, or the number of known bases since the window's start or
        the last unknown base, where that is less."""
        codes, known = contexts(windows, order)
        p = np.full((codes.size, 4), 0.25)
        for k in range(order + 1):
            rows = slice(None) if k == 0 else np.flatnonzero(known >= k)
            p[rows] = _posterior(
                self.tables[k][codes[rows] & (4**k - 1)].astype(np.float64), self.taus[k], p[rows]
            )
        return p.reshape(*windows.shape, 4)


@lru_cache(maxsize=1)
def _fitted(data: Heldout[GenomeSplit]) -> Markov:
    if not any(region.label == "train" for region in data.items.regions):
        raise ValueError(
            "a Markov chain learns from training regions, and all of it is held out: give --split BED"
        )
    return fit(data.items.genome, data.items.regions, ORDER)


def fit(genome: Genome, regions: Sequence[Region], order: int) -> Markov:
    """The chain of the training regions among `regions`; the pieces that choose the τ are counted
    last."""
    train = joined(select(regions, "train"))
    counted, aside = _pieces(train)
    table = np.zeros(
        4 ** (order + 1), np.uint32
    )  # a count fits: it is at most twice the longest run of one k-mer
    for region in counted:
        _count(genome, region.contig, region.start, region.stop, table, order + 1)
    # An unknown base after each piece, so that no context crosses its end.
    chosen = np.concatenate(
        [np.append(genome.codes(r.contig, r.start, r.stop), np.uint8(UNKNOWN)) for r in aside]
    )
    taus = _choose_taus(_lower_orders(_both_strands(table, order + 1)), chosen)
    for region in aside:  # with the contexts that reach into it from both sides
        home = next(
            r for r in train if r.contig == region.contig and r.start <= region.start < r.stop
        )
        start = max(region.start - order, home.start)
        stop = min(region.stop + order, home.stop)
        _count(genome, region.contig, start, stop, table, order + 1)
    return Markov(_lower_orders(_both_strands(table, order + 1)), taus)


def _posterior(counts: np.ndarray, tau: float, prior: np.ndarray) -> np.ndarray:
    return (counts + tau * prior) / (counts.sum(1, keepdims=True) + tau)


def _choose_taus(tables: Sequence[np.ndarray], codes: np.ndarray) -> tuple[float, ...]:
    """For each order in turn the τ of TAUS, the least of equals, under which `codes` (N,) are
    likeliest."""
    context, known = contexts(codes[None], len(tables) - 1)
    scored = np.flatnonzero(codes < UNKNOWN)
    context = context[scored]
    known = known[scored]
    true = codes[scored]
    p = np.full((len(scored), 4), 0.25)
    taus = []
    for k, table in enumerate(tables):
        rows = np.flatnonzero(known >= k)
        counts = table[context[rows] & (4**k - 1)].astype(np.float64)
        prior = p[rows]
        here = np.arange(len(rows)), true[rows]
        total = counts.sum(1)
        hits = counts[here]
        before = prior[here]
        gains = [float(np.log((hits + tau * before) / (total + tau)).sum()) for tau in TAUS]
        taus.append(TAUS[int(np.argmax(gains))])
        p[rows] = _posterior(counts, taus[-1], prior)
    return tuple(taus)


def _pieces(regions: Sequence[Region]) -> tuple[list[Region], list[Region]]:
    """Training regions cut into what is counted and what is set aside, neighbours of one kind in
    one piece."""
    block = min(BLOCK, max(1, round(ASIDE * sum(map(len, regions)))))
    blocks = [
        (region, start, min(start + block, region.stop))
        for region in regions
        for start in range(region.start, region.stop, block)
    ]
    number = min(MOST_ASIDE, max(1, round(ASIDE * len(blocks))))
    aside = set(np.random.default_rng(0).choice(len(blocks), number, replace=False).tolist())
    pieces: tuple[list[Region], list[Region]] = ([], [])
    before: tuple[Region, bool] | None = None
    for n, (region, start, stop) in enumerate(blocks):
        kind = n in aside
        if before == (region, kind):
            start = pieces[kind].pop().start
        pieces[kind].append(Region(region.contig, start, stop, region.label))
        before = region, kind
    return pieces


def _count(
    genome: Genome, contig: str, start: int, stop: int, table: np.ndarray, size: int
) -> None:
    """Add the stretches of `size` known bases inside [start, stop), as written, to `table`
    (4^size,)."""
    for part in slices(max(0, stop - start - size + 1), CHUNK):
        words = kmers(genome.codes(contig, start + part.start, start + part.stop + size - 1), size)
        np.add.at(table, words, np.uint32(1))


def _both_strands(table: np.ndarray, size: int) -> np.ndarray:
    """Counts (4^size,) of k-mers and of their reverse complements: each digit d becomes 3 − d, and
    their order reverses."""
    digits = table.reshape((4,) * size)
    return (digits + digits[(slice(None, None, -1),) * size].transpose()).reshape(-1)


def _lower_orders(table: np.ndarray) -> tuple[np.ndarray, ...]:
    """Counts (4^(k+1),) as (4^j, 4) for j = 0 .. k: the first base summed out repeatedly."""
    tables = [table.reshape(-1, 4)]
    while len(tables[0]) > 1:
        tables.insert(0, tables[0].reshape(4, -1, 4).sum(0, dtype=np.int64))
    return tuple(tables)
