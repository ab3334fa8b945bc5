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
# 1, 2, 5, 10 … 5 million.
TAUS = tuple(digit * 10.0**power for power in range(7) for digit in (1, 2, 5))
# Bases in a piece of training data that is set aside to choose τ, or not.
BLOCK = 4096
ASIDE = 0.02
# Blocks set aside at most: a million bases are enough.
MOST_ASIDE = 256
# Bases counted at a time.
CHUNK = 1 << 20
# Bases scored at a time.
SCORED = 1 << 18


class MarkovChain(WindowScorer):
    """The chain of one order; one table serves all orders.

    Raises RuntimeError where it scores before `fit`.
    """

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
            # A context is all that a chunk needs of the previous one.
            overlap = min(part.start, self.order)
            codes = windows[:, part.start - overlap : part.stop]
            p = chain.probabilities(codes, self.order)[:, overlap:]
            true = np.minimum(codes[:, overlap:], UNKNOWN - 1).astype(np.int64)[..., None]
            nll[:, part] = -np.log(np.take_along_axis(p, true, axis=-1)[..., 0])
            # Equal bases share the hit.
            best = p == p.max(-1, keepdims=True)
            hits = np.take_along_axis(best, true, axis=-1) / best.sum(-1, keepdims=True)
            correct[:, part] = hits[..., 0]
        known = torch.from_numpy(windows < UNKNOWN)
        return Scores(
            nll=torch.from_numpy(nll).where(known, 0.0),
            bases=known.long(),
            correct=torch.from_numpy(correct).where(known, 0.0),
        )


BASELINES: dict[str, Callable[[int], MarkovChain]] = {
    f"markov-{order}": partial(MarkovChain, order) for order in range(ORDER + 1)
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
        context, known = contexts(windows, order)
        p = np.full((context.size, 4), 0.25)
        for k in range(order + 1):
            rows = slice(None) if k == 0 else np.flatnonzero(known >= k)
            counts = _counts_after(self.tables[k], context[rows], k)
            p[rows] = _posterior(counts, self.taus[k], p[rows])
        return p.reshape(*windows.shape, 4)


@lru_cache(maxsize=1)
def _fitted(data: Heldout[GenomeSplit]) -> Markov:
    if not any(region.label == "train" for region in data.items.regions):
        reason = "a Markov chain learns from training regions, and all of it is held out"
        raise ValueError(f"{reason}: give --split BED")
    return fit(data.items.genome, data.items.regions, ORDER)


def fit(genome: Genome, regions: Sequence[Region], order: int) -> Markov:
    """The chain of the training regions among `regions`; the pieces that choose the τ are counted
    last."""
    train = joined(select(regions, "train"))
    counted, aside = _pieces(train)
    size = order + 1
    # A count fits: it is at most twice the longest run of one k-mer.
    table = np.zeros(4**size, np.uint32)
    for region in counted:
        _count(genome, region.contig, region.start, region.stop, table, size)
    taus = _choose_taus(_lower_orders(_both_strands(table, size)), _codes(genome, aside))
    for piece in aside:
        home = next(region for region in train if _holds(region, piece))
        # With the contexts that reach into it from both sides.
        start = max(piece.start - order, home.start)
        stop = min(piece.stop + order, home.stop)
        _count(genome, piece.contig, start, stop, table, size)
    return Markov(_lower_orders(_both_strands(table, size)), taus)


def _holds(region: Region, piece: Region) -> bool:
    return region.contig == piece.contig and region.start <= piece.start < region.stop


def _codes(genome: Genome, pieces: Sequence[Region]) -> np.ndarray:
    """Codes of all pieces, an unknown base after each, so that no context crosses its end."""
    codes = []
    for piece in pieces:
        codes.append(genome.codes(piece.contig, piece.start, piece.stop))
        codes.append(np.array([UNKNOWN], np.uint8))
    return np.concatenate(codes)


def _counts_after(table: np.ndarray, context: np.ndarray, k: int) -> np.ndarray:
    """(N, 4) float64 counts of each base after the k bases in the last 2k bits of contexts (N,)."""
    return table[context & (4**k - 1)].astype(np.float64)


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
        counts = _counts_after(table, context[rows], k)
        prior = p[rows]
        total = counts.sum(1)
        # Of the true base.
        true_base = (np.arange(len(rows)), true[rows])
        hits = counts[true_base]
        prior_hits = prior[true_base]
        gains = []
        for tau in TAUS:
            likelihoods = (hits + tau * prior_hits) / (total + tau)
            gains.append(float(np.log(likelihoods).sum()))
        best = TAUS[int(np.argmax(gains))]
        p[rows] = _posterior(counts, best, prior)
        taus.append(best)
    return tuple(taus)


def _pieces(regions: Sequence[Region]) -> tuple[list[Region], list[Region]]:
    """Training regions cut into what is counted and what is set aside, neighbours of one kind in
    one piece."""
    block = min(BLOCK, max(1, round(ASIDE * sum(map(len, regions)))))
    blocks: list[tuple[Region, int]] = []
    for region in regions:
        blocks += [(region, start) for start in range(region.start, region.stop, block)]
    number = min(MOST_ASIDE, max(1, round(ASIDE * len(blocks))))
    chosen = set(np.random.default_rng(0).choice(len(blocks), number, replace=False).tolist())
    counted: list[Region] = []
    aside: list[Region] = []
    previous: tuple[Region, bool] | None = None
    for n, (region, start) in enumerate(blocks):
        stop = min(start + block, region.stop)
        kind = n in chosen
        pieces = aside if kind else counted
        if previous == (region, kind):
            start = pieces.pop().start
        pieces.append(Region(region.contig, start, stop, region.label))
        previous = (region, kind)
    return counted, aside


def _count(
    genome: Genome, contig: str, start: int, stop: int, table: np.ndarray, size: int
) -> None:
    """Add the stretches of `size` known bases inside [start, stop), as written, to `table`
    (4^size,)."""
    for part in slices(max(0, stop - start - size + 1), CHUNK):
        codes = genome.codes(contig, start + part.start, start + part.stop + size - 1)
        numbers, _ = kmers(codes, size)
        np.add.at(table, numbers, np.uint32(1))


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
