"""Which bases of a genome stand in it more than once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from modalities.dna.baselines import contexts, kmers
from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.genome import Genome

__all__ = ["LEAST", "WORD", "repetitive"]

WORD = 16  # bases; of a genome of 40 million, 2% of the words stand elsewhere by chance
LEAST = 24  # bases of a repeat, which is none by chance


def repetitive(genome: Genome, contig: str, start: int, stop: int) -> np.ndarray:
    """(stop − start,) bool: the base lies in LEAST known bases, some perhaps beyond [start, stop), all of whose words of WORD
    bases stand more than once in the contig's file, on either strand."""
    before, after = max(0, start - LEAST + 1), min(genome[contig].length, stop + LEAST - 1)
    codes, table = genome.codes(contig, before, after), _words(genome, genome[contig].file)
    times = _times(codes, table)
    # A word that ends at e of the other strand ends at T − 1 − e + WORD − 1 of this one.
    times[WORD - 1 :] += _times(reverse_complement(codes), table)[WORD - 1 :][::-1]
    run = LEAST - WORD + 1
    sums = np.pad(times > 1, (run, 0)).cumsum()
    whole = sums[run:] - sums[:-run] == run  # of the LEAST bases that end at each place
    sums = np.pad(whole, (1, LEAST - 1)).cumsum()
    return (sums[LEAST:] > sums[:-LEAST])[start - before : stop - before]


def _times(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """(T,) how often the word that ends at each base of codes (T,) is in a sorted table."""
    context, known = contexts(codes[None], WORD - 1)
    whole, times = (known >= WORD - 1) & (codes < UNKNOWN), np.zeros(len(codes), np.int64)
    words = (context[whole] << 2 | codes[whole]).astype(np.uint32)
    times[whole] = np.searchsorted(table, words, side="right") - np.searchsorted(table, words)
    return times


@lru_cache(maxsize=2)
def _words(genome: Genome, file: str) -> np.ndarray:
    """Sorted words of the contigs of a file, one strand."""
    return np.sort(np.concatenate([kmers(genome.codes(c.name), WORD) for c in genome.contigs if c.file == file]))
