"""Which bases of a genome stand in it more than once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from modalities.dna.baselines import contexts, kmers
from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.genome import Genome

__all__ = ["LEAST", "WORD", "repeated_words", "repetitive"]

WORD = 16  # bases; of a genome of 40 million, 2% of the words stand elsewhere by chance
LEAST = 24  # bases of a repeat, which is none by chance


def repeated_words(genome: Genome, contig: str, windows: np.ndarray) -> np.ndarray:
    """(N, T) bool: the WORD bases that end at each base of windows (N, T) of a contig are known, and stand more than once in
    the contig's file, on either strand."""
    table, found = _words(genome, genome[contig].file), np.zeros(windows.shape, np.int64)
    for strand, turned in ((windows, False), (reverse_complement(windows), True)):
        context, known = (each.reshape(windows.shape) for each in contexts(strand, WORD - 1))
        whole, counts = (known >= WORD - 1) & (strand < UNKNOWN), np.zeros(windows.shape, np.int64)
        words = (context[whole] << 2 | strand[whole]).astype(np.uint32)
        counts[whole] = np.searchsorted(table, words, side="right") - np.searchsorted(table, words)
        # A word that ends at e of the other strand ends at T − 1 − e + WORD − 1 of this one.
        found[:, WORD - 1 :] += counts[:, WORD - 1 :][:, ::-1] if turned else counts[:, WORD - 1 :]
    return found > 1


def repetitive(genome: Genome, contig: str, start: int, stop: int) -> np.ndarray:
    """(stop − start,) bool: the base lies in LEAST bases, some perhaps beyond [start, stop), all of whose words stand more than
    once (`repeated_words`)."""
    before, after = max(0, start - LEAST + 1), min(genome[contig].length, stop + LEAST - 1)
    words = repeated_words(genome, contig, genome.codes(contig, before, after)[None])[0]
    run = LEAST - WORD + 1
    sums = np.pad(words, (run, 0)).cumsum()
    whole = sums[run:] - sums[:-run] == run  # of the LEAST bases that end at each place
    sums = np.pad(whole, (1, LEAST - 1)).cumsum()
    return (sums[LEAST:] > sums[:-LEAST])[start - before : stop - before]


@lru_cache(maxsize=2)
def _words(genome: Genome, file: str) -> np.ndarray:
    """Sorted words of the contigs of a file, one strand."""
    return np.sort(np.concatenate([kmers(genome.codes(c.name), WORD) for c in genome.contigs if c.file == file]))
