"""DNA data: a config to a resumable loader of batches, whose rows are windows of a genome.

A sample is a row of L+1 tokens, the start first: inputs are tokens[:-1], targets tokens[1:], so the
first base is predicted too. A batch also has segments (0, padding −1), the weight of each target,
and its sample numbers, whose origin is `loader.source.rows.samples(batch["sample"])`.

A region is cut at its long runs of unknown bases into stretches, and a stretch into windows, which
never cross its end. A window follows from its sample number by arithmetic on the table of
stretches; no list of windows is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from modalities.dna.config import DnaDataConfig
from modalities.dna.genome import Genome, RunCounter, open_genome
from modalities.dna.sources import find_source
from modalities.dna.splits import Region, between, joined, load_regions, select
from modalities.dna.tokenizers import load_tokenizer, reverse_complement
from modalities.loading import IndexedLoader, RowBatches, State, hash64, permuted

# First word of every random key after the seed, so that no two uses share random bits.
_ORDER = 0
_OFFSET = 1
_STRAND = 2
# Windows with too many unknown bases that are skipped in search of one sample.
_MOST_TRIES = 10_000
# Windows, in random order, of which the report counts those that are skipped.
_LOOKED_AT = 4096


def build_loader(
    config: DnaDataConfig, *, split: str = "train", rank: int = 0, world: int = 1, micro_batch: int
) -> IndexedLoader:
    """The loader of one split for one rank: iterable of {"tokens", "segments", "weights",
    "sample"}, (B, L+1) and (B,).

    "train" is endless and shuffled; "heldout" one pass on the + strand, shuffled by one seed, so
    that the first batches represent all regions and runs compare.
    """
    source = find_source(config.source, config.split)
    genome = open_genome(source)
    regions = select(load_regions(source, genome), split)
    rows = WindowDataset(genome, regions, config, one_pass=split != "train")
    return IndexedLoader(
        RowBatches(rows),
        micro_batch,
        rank=rank,
        world=world,
        num_workers=config.num_workers,
    )


class Sample(NamedTuple):
    """Origin of a row: bases [start, stop) of the + strand, read forwards ("+") or as their reverse
    complement ("-")."""

    contig: str
    start: int
    stop: int
    strand: str
    epoch: int


class WindowDataset(Dataset):
    """Rows of [start] + `context` tokens, which depend on (genome, regions, settings, n) alone.

    A window has w = context · bases_per_token bases. Training is endless. An epoch has ⌊n / w⌋
    windows of a stretch of n bases, 1 of a shorter one, which is padded. With an offset o drawn
    from (seed, epoch, stretch) they start at o, o + w, …; where the last would cross the end, it is
    taken from the end, or from the start if more is uncovered there. A window with more than
    `max_unknown` unknown bases is skipped, and another takes its place; ValueError where all are.
    Sample n is window π(n mod W) of epoch n div W, with a permutation π for each epoch. one_pass:
    one epoch of seed 0 on the + strand, without offsets, the last window of a stretch padded.

    A row: tokens, segments int64 (L+1,); segments 0, padding −1; weights float32 (L+1,): 0 for
    unknown bases and padding, soft_mask_weight for tokens more than half of whose bases are
    soft-masked, else 1; sample int64 (), n itself, or −1.
    """

    def __init__(
        self,
        genome: Genome,
        regions: Sequence[Region],
        config: DnaDataConfig,
        *,
        one_pass: bool = False,
    ) -> None:
        self.genome = genome
        self.regions = joined(regions)
        self.one_pass = one_pass
        self.context = config.context
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.seed = 0 if one_pass else config.seed
        self.reverse_complement = 0.0 if one_pass else config.reverse_complement
        self.soft_mask_weight = config.soft_mask_weight
        self.max_unknown = config.max_unknown
        self.window = max(1, round(self.context * self.tokenizer.bases_per_token))
        self._unknown = RunCounter(genome.unknown)
        self._lay_out()
        self.size = self.epoch_windows if one_pass else None
        if not self.one_pass:
            # Raises where no window is usable.
            self._places(np.zeros(1, np.int64))

    def _lay_out(self) -> None:
        """The table of stretches."""
        width = self.window
        limit = width
        if not self.one_pass:
            limit = min(width, math.floor(self.max_unknown * width) + 1)
        parts = []
        for region in self.regions:
            bounds = _stretches(region, self.genome[region.contig].unknown, limit)
            if not self.one_pass and len(bounds) > 1:
                bounds = bounds[bounds[:, 1] - bounds[:, 0] >= (1 - self.max_unknown) * width]
            parts.append(bounds)
        self._region = np.repeat(np.arange(len(parts)), [len(bounds) for bounds in parts])
        self._start, self._stop = np.concatenate([np.empty((0, 2), np.int64), *parts]).T
        # A stretch of fewer bases than a token has no window.
        least = self.tokenizer.step
        bases = (self._stop - self._start) // least * least
        if self.one_pass:
            self._windows = -(-bases // width)
        else:
            self._windows = np.maximum(bases // width, bases > 0)
        # Where the windows of each stretch end on the line of all windows.
        self._ends = np.cumsum(self._windows)
        self.epoch_windows = int(self._windows.sum())
        if not self.epoch_windows:
            total = sum(map(len, self.regions))
            raise ValueError(
                f"{len(self.regions)} regions have no stretch of known bases for windows of "
                f"{width} in their {total:,} bases"
            )

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Rows of many samples. IndexError outside 0..size − 1."""
        rows = []
        for sample, number in zip(self.samples(indices), indices, strict=True):
            row = self.padding_row()
            self._fill(
                sample,
                row["tokens"].numpy(),
                row["segments"].numpy(),
                row["weights"].numpy(),
            )
            row["sample"] = torch.tensor(int(number))
            rows.append(row)
        return rows

    def samples(self, indices: Sequence[int]) -> list[Sample]:
        """Origins of samples, such as a batch's "sample". IndexError outside 0..size − 1."""
        numbers = np.asarray(indices, dtype=np.int64)
        if len(numbers):
            self._check_index(int(numbers.min()))
            self._check_index(int(numbers.max()))
        stretches, starts, stops = self._places(numbers)
        # The upper 53 bits of a hash as a number in [0, 1).
        chances = (hash64(self.seed, _STRAND, numbers) >> np.uint64(11)) * 2.0**-53
        samples = []
        for n, number in enumerate(numbers.tolist()):
            samples.append(
                Sample(
                    contig=self.regions[self._region[stretches[n]]].contig,
                    start=int(starts[n]),
                    stop=int(stops[n]),
                    strand="-" if chances[n] < self.reverse_complement else "+",
                    epoch=number // self.epoch_windows,
                )
            )
        return samples

    def _check_index(self, index: int) -> None:
        if index < 0 or (self.size is not None and index >= self.size):
            last = "" if self.size is None else self.size - 1
            raise IndexError(f"sample {index} is outside 0..{last}")

    def identity(self) -> State:
        """What determines a sample besides its number (`modalities.loading.Samples`)."""
        bounds = ";".join(f"{part.contig}:{part.start}-{part.stop}" for part in self.regions)
        return {
            "kind": "windows",
            "genome": self.genome.fingerprint,
            "regions": hashlib.blake2b(bounds.encode(), digest_size=8).hexdigest(),
            "tokenizer": self.tokenizer.fingerprint,
            "context": self.context,
            "seed": self.seed,
            "reverse_complement": self.reverse_complement,
            "soft_mask_weight": self.soft_mask_weight,
            "max_unknown": self.max_unknown,
            "shuffle": True,
            "one_pass": self.one_pass,
        }

    def padding_row(self) -> dict[str, torch.Tensor]:
        """A row of padding alone: no target."""
        length = self.context + 1
        return {
            "tokens": torch.full((length,), self.tokenizer.pad_id),
            "segments": torch.full((length,), -1),
            "weights": torch.zeros(length),
            "sample": torch.tensor(-1),
        }

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(stretch, start, stop on its contig) of samples, each (N,) int64, bad windows
        replaced."""
        places = self._grid(numbers)
        if self.one_pass or not len(self.genome.unknown):
            return places
        # A step coprime to W reaches every window; a long one replaces a bad window by a distant
        # one.
        step = max(1, round(0.618 * self.epoch_windows))
        while math.gcd(step, self.epoch_windows) > 1:
            step += 1
        bad = np.flatnonzero(self._too_unknown(*places))
        for tries in range(1, _MOST_TRIES + 1):
            if not len(bad):
                return places
            others = self._grid(numbers[bad] + tries * step)
            for column, new in zip(places, others, strict=True):
                column[bad] = new
            bad = bad[self._too_unknown(*others)]
        raise ValueError(
            f"{_MOST_TRIES:,} windows of {self.window} bases in a row have more than "
            f"max_unknown={self.max_unknown} unknown bases; "
            "raise max_unknown, shorten the context, or check the source"
        )

    def _grid(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `_places`, without a look at unknown bases."""
        epoch, position = np.divmod(numbers, self.epoch_windows)
        position = permuted(position, self.epoch_windows, self.seed, _ORDER, epoch)
        stretch = np.searchsorted(self._ends, position, side="right")
        windows = self._windows[stretch]
        length = (self._stop - self._start)[stretch]
        number_in_stretch = position - self._ends[stretch] + windows
        first = number_in_stretch * self.window
        if not self.one_pass:
            offset = hash64(self.seed, _OFFSET, epoch, stretch) % np.uint64(self.window)
            offset = offset.astype(np.int64)
            first += offset
            # At most the last window; it moves to where more bases are uncovered.
            beyond = first + self.window > length
            front = 2 * offset > length - (windows - 1) * self.window
            moved = np.where(front, 0, np.maximum(length - self.window, 0))
            first = np.where(beyond, moved, first)
        start = self._start[stretch] + first
        return stretch, start, np.minimum(start + self.window, self._stop[stretch])

    def _too_unknown(self, stretch: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """(N,) bool: the window has more than `max_unknown` unknown bases."""
        contigs = [self.regions[n].contig for n in self._region[stretch]]
        offset = np.array([self.genome.starts[contig] for contig in contigs], np.int64)
        unknown = self._unknown.count(offset + start, offset + stop)
        return unknown > self.max_unknown * (stop - start)

    def _fill(
        self, sample: Sample, tokens: np.ndarray, segments: np.ndarray, weights: np.ndarray
    ) -> None:
        """Write a sample into one row of padding."""
        bounds = (sample.contig, sample.start, sample.stop)
        codes = self.genome.codes(*bounds)
        if sample.strand == "-":
            codes = reverse_complement(codes)
        encoded = self.tokenizer.encode(codes)
        ids = encoded.ids[: self.context]
        end = len(ids) + 1
        tokens[0] = self.tokenizer.bos_id
        tokens[1:end] = ids
        segments[:end] = 0
        weights[0] = 1
        weights[1:end] = ids != self.tokenizer.unknown_id
        if self.soft_mask_weight != 1 and len(ids):
            soft = self.genome.soft_masked(*bounds)
            if sample.strand == "-":
                soft = soft[::-1]
            spans = encoded.spans[: len(ids)]
            masked = np.add.reduceat(soft[: spans.sum()], np.cumsum(spans) - spans, dtype=np.int64)
            weights[1:end][2 * masked > spans] *= self.soft_mask_weight

    @property
    def report(self) -> str:
        parts = [f"{self.epoch_windows:,} windows of {self.window} bases"]
        left_out = sum(map(len, self.regions)) - int((self._stop - self._start).sum())
        if left_out:
            parts.append(
                f"{left_out:,} bases left out in long runs of unknown ones and between them"
            )
        if not self.one_pass:
            looked_at = min(self.epoch_windows, _LOOKED_AT)
            skipped = int(self._too_unknown(*self._grid(np.arange(looked_at))).sum())
            if skipped:
                why = f"for more than {self.max_unknown:.0%} unknown bases"
                parts.append(f"{skipped:,} of {looked_at:,} windows skipped {why}")
        return "; ".join(parts)


def _stretches(region: Region, unknown: np.ndarray, limit: int) -> np.ndarray:
    """(n, 2) bounds of a region cut at runs of `limit` or more unknown bases, and trimmed of those
    at its ends."""
    first = np.searchsorted(unknown[:, 1], region.start, "right")
    last = np.searchsorted(unknown[:, 0], region.stop)
    runs = unknown[first:last].clip(region.start, region.stop)
    at_end = (runs[:, 0] == region.start) | (runs[:, 1] == region.stop)
    return between(region, runs[(runs[:, 1] - runs[:, 0] >= limit) | at_end])
