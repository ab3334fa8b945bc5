"""How often a context was followed by each base before, on either strand: in what was read so far, and in a memory.

    n_k(x) = #{j ≤ i : w_j = c x} + #{j ≤ i : rc(w_j) = c x},    c the k bases that end at i, w_j the k + 1 bases that end at j

rc is the reverse complement, so the second sum finds inverted repeats. Nothing after i is counted. Bases are codes 0 to 3; any
other number is unknown, and no word holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LONGEST", "Index", "counts_so_far", "known_run"]

LONGEST = 24  # bases of a context; a word of one more is below 5²⁵ < 2⁶³
MOST_DOCUMENTS = 1 << 14  # of a row: a context of 48 bits leaves 15, and the sign
BLOCK = 1 << 14  # places whose words are made at a time: in a cache, and too few for torch to spread over threads


def known_run(codes: Tensor, segments: Tensor | None = None) -> Tensor:
    """(B, T) how many known bases of one document end at each place, itself included."""
    place = torch.arange(codes.shape[1], device=codes.device)
    unknown = (codes < 0) | (codes > 3)
    starts = unknown.clone()
    if segments is not None:  # the first base of a document is known, and nothing before it belongs to it
        starts[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    since = torch.where(starts, place + unknown, 0).cummax(1).values
    return place + 1 - since


def _shifted(codes: Tensor, back: int) -> Tensor:
    """(B, T) the codes `back` places before each; 0 where there is none."""
    return F.pad(codes, (back, 0))[:, : codes.shape[1]]


def counts_so_far(
    codes: Tensor, orders: Sequence[int], recent: int, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """n_k(x) in the row itself, and of the words alone that end in the last `recent` bases, i − recent < j ≤ i.

    Both (B, T, K, 4) int32, for every order k of `orders`, the same tensor where all of the row is recent; 0 where no k known
    bases end at a place. A stable sort by context keeps the words of a context in the order of reading; running sums over it
    are the counts. Time grows as K·T·log T.

    Args:
        codes: (B, T) int64.
        orders: ascending, from 1 to LONGEST.
        recent: in how many of the last bases, the one at a place included, a word has to end; from 1.
        segments: (B, T) document ids below MOST_DOCUMENTS; words of other documents do not count.
    """
    known, length = known_run(codes, segments), codes.shape[1]
    base = codes.clamp(0, 3)
    followers = torch.full_like(codes, -1)  # of the word that begins with the context at a place
    followers[:, :-1] = torch.where(known[:, 1:] > known[:, :-1], base[:, 1:], -1)
    document = torch.zeros_like(codes) if segments is None else segments + 1
    forth, back, found = torch.zeros_like(codes), torch.zeros_like(codes), []
    place = torch.arange(2 * length, device=codes.device)
    for k in range(1, max(orders) + 1):
        oldest = _shifted(base, k - 1)
        forth, back = forth + (oldest << 2 * (k - 1)), 4 * back + (3 - oldest)
        if k not in orders:
            continue
        # Entries in the order in which a reader knows them: the other strand's word that ends here, then the context here.
        before = torch.where(known > k, 3 - _shifted(base, k), -1)
        keys = torch.stack([back, forth], 2) | (document << 48)[..., None]
        words = torch.stack([before, torch.where(known >= k, followers, -1)], 2).flatten(1)
        keys = keys.where(torch.stack([known > k, known >= k], 2), -1).flatten(1)
        keys, order = keys.sort(dim=1, stable=True)
        one = F.one_hot(words.gather(1, order) + 1, 5)[..., 1:].to(torch.int32)
        sums = one.cumsum(1, dtype=torch.int32) - one  # of the entries before each
        new = F.pad(keys[:, 1:] != keys[:, :-1], (1, 0), value=True)
        starts = [
            torch.where(new, place, 0).cummax(1).values
        ]  # the first entry of the context, and the first recent one
        if recent < length:
            group = new.cumsum(1) * (2 * length)
            starts.append(torch.searchsorted(group + order, group + (order - 2 * recent).clamp(min=0)))
        since = [sums - sums.gather(1, start[..., None].expand_as(sums)) for start in starts]
        at, mine = order[..., None].expand_as(sums), (known >= k)[..., None]
        found.append([torch.empty_like(sums).scatter_(1, at, each)[:, 1::2] * mine for each in since])
    counts = [torch.stack(each, 2) for each in zip(*found, strict=True)]
    return counts[0], counts[-1]


class Index:
    """The words of sequences, sorted, for counts of any order up to LONGEST.

    A word is the LONGEST + 1 bases from a place on, as digits 1 to 4 in base 5, the first most significant; after the end of
    a sequence, or at an unknown base, come zeros. All words that begin with some bases are neighbours.

    Args:
        codes: (N,) of all sequences; what is no base ends one.
    """

    def __init__(self, codes: Tensor) -> None:
        digits = torch.where((codes >= 0) & (codes < 4), codes + 1, 0).to(torch.int8)
        other = torch.where(digits > 0, 5 - digits, 0).flip(0)
        words = torch.cat([self._words(digits), self._words(other)])
        if words.is_cpu:
            self.words = torch.from_numpy(np.sort(words.numpy()))  # torch would keep the order, too
        else:
            self.words = words.sort().values

    @classmethod
    def _words(cls, digits: Tensor) -> Tensor:
        """Those of one strand that have a base."""
        ended = F.pad(digits, (0, LONGEST))  # so that no block is shorter than a word
        blocks = (ended[start : start + BLOCK + LONGEST] for start in range(0, len(digits), BLOCK))
        words = torch.cat([cls._block(block.long())[:BLOCK] for block in blocks])
        return words[words > 0]

    @staticmethod
    def _block(digits: Tensor) -> Tensor:
        """The word at each digit; words of twice the length, and of one more, by the binary digits of LONGEST + 1."""

        def followed(by: Tensor, unbroken: Tensor, length: int) -> tuple[Tensor, Tensor]:
            after = F.pad(by[size:], (0, size)) * whole  # a word that ended stays ended
            return words * 5**length + after, whole & F.pad(unbroken[size:], (0, size))

        words, size, known = digits, 1, digits > 0
        whole = known  # whether a word has all of its bases
        for bit in f"{LONGEST + 1:b}"[1:]:
            (words, whole), size = followed(words, whole, size), 2 * size
            if bit == "1":
                (words, whole), size = followed(digits, known, 1), size + 1
        return words

    def counts(self, codes: Tensor, orders: Sequence[int], segments: Tensor | None = None) -> Tensor:
        """n_k(x) in the indexed sequences, (B, T, K, 4) int32; arguments as in `counts_so_far`."""
        known, digits = known_run(codes, segments), codes.clamp(0, 3) + 1
        found = torch.zeros(*codes.shape, len(orders), 4, dtype=torch.int32, device=codes.device)
        prefix, wanted = torch.zeros_like(codes), known >= 0
        for k in range(1, max(orders) + 1):
            prefix = prefix + _shifted(digits, k - 1) * 5 ** (k - 1)
            if k not in orders:
                continue
            wanted = wanted & (known >= k)
            edges = torch.arange(1, 6, device=codes.device) * 5 ** (LONGEST - k)
            counts = torch.searchsorted(self.words, prefix[wanted][:, None] * 5 ** (LONGEST + 1 - k) + edges).diff()
            found[:, :, list(orders).index(k)][wanted] = counts.to(torch.int32)
            wanted[wanted.clone()] = counts.sum(1) > 0  # what a shorter context has not seen a longer one has not
        return found
