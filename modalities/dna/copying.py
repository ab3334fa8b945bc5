"""A copy expert: what followed the same bases before, here or in training, as a prior on the logits
of the next base.

    logits(x) = W h + Σ_e g_e log p_e(x),    p_e(x) = (n_e(x) + a_e) / (Σ_y n_e(y) + 4 a_e)
    n_k(x) = #{j ≤ i : w_j = c x} + #{j ≤ i : rc(w_j) = c x}
    c: the k bases that end at i;  w_j: the k + 1 bases that end at j

n_e is n_k of an order k, once in all that was read, the memory of training bases and the row so
far, and once in the recent bases of the row alone, as many as a row of training has: among these a
match is rarely by chance. rc is the reverse complement, so the second sum finds inverted repeats.
Nothing after i is counted. The gates g_e depend on the decoder's features h, on how often and how
clearly each expert has seen its context, and on how well it predicted the bases just read. Bases
are codes 0 to 3; any other number is unknown, and no word holds it.

After PAQ (Mahoney 2005), GeCo (Pratas et al. 2016), XM (Cao et al. 2007) and kNN-LM (arXiv
1911.00172).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Bases of a context.
LONGEST = 24
# Digits of a word, a context and the base after it; its number is below 5²⁵ < 2⁶³.
WORD = LONGEST + 1
# Places whose words are made at a time: in a cache, and too few for torch to spread over threads.
BLOCK = 1 << 14
# Bases over which an expert's success is averaged.
RECENT = (8, 32)
# Hidden width of the gate.
GATE = 32
# From this order on a context is rarely seen by chance, and a single observation says much.
RARE = 12
# Digits of base 5 in a byte.
PACKED = 3
# Times that the index is made anew while the memory doubles.
REFRESHED = 8


class CopyExpert(nn.Module):
    """Adds to the logits of the next base what followed its context before.

    `memory` bases of training rows are kept while training reads (`remember`), as part of the
    weights. Training sees them in steps: the first m of n bases held, m the largest multiple of an
    eighth of the last power of 2. That depends on n alone, so a run that is resumed sees what it
    would have. `recent`: bases of the row that experts of the row alone look at.
    """

    # (⌈memory / 3⌉,) uint8, three digits to a byte: 1 to 4 a base, 0 none.
    memory: Tensor
    # () int64: bytes written.
    held: Tensor

    def __init__(self, dim: int, orders: Sequence[int], memory: int, recent: int) -> None:
        super().__init__()
        self.recent = recent
        self.orders = tuple(orders)
        experts = 2 * len(orders)
        self.gate_in = nn.Linear(dim + (2 + len(RECENT)) * experts, GATE)
        self.gate_out = nn.Linear(GATE, experts)
        nn.init.zeros_(self.gate_out.weight)
        nn.init.zeros_(self.gate_out.bias)
        self.register_buffer("memory", torch.zeros(-(-memory // PACKED), dtype=torch.uint8))
        self.register_buffer("held", torch.zeros((), dtype=torch.int64))
        self._index: tuple[tuple[int, torch.device], Index] | None = None

    def remember(self, tokens: Tensor, segments: Tensor) -> None:
        """Keep the bases of rows (B, L+1), if there is room for all.

        Ids above 3, as a row's start, and padding part them. ValueError in a run of several
        processes, whose memories would differ.
        """
        if not len(self.memory):
            return
        if torch.distributed.is_initialized():
            processes = torch.distributed.get_world_size()
            if processes > 1:
                raise ValueError(
                    f"copy_memory is written by one process, not by {processes}: "
                    "train on one, or set it to 0"
                )
        digits = torch.where((tokens < 4) & (segments >= 0), tokens + 1, 0)
        digits = F.pad(digits.flatten(), (0, -digits.numel() % PACKED)).view(-1, PACKED)
        # Not a matrix product, which CUDA does not have for integers.
        packed = (digits * torch.tensor([25, 5, 1], device=digits.device)).sum(1).to(torch.uint8)
        start = int(self.held)
        if start + len(packed) <= len(self.memory):
            self.memory[start : start + len(packed)] = packed
            self.held += len(packed)

    def index(self) -> Index | None:
        """The words of the memory; None while it is empty."""
        held = int(self.held)
        if self.training and held:
            step = max(1, 2 ** (held.bit_length() - 1) // REFRESHED)
            held = held // step * step
        if not held:
            return None
        key = (held, self.memory.device)
        if self._index is None or self._index[0] != key:
            # Frees the last index before the next one is made.
            self._index = None
            packed = self.memory[:held].to(torch.int64)
            digits = torch.stack([packed // 25, packed // 5 % 5, packed % 5], 1)
            self._index = (key, Index(digits.flatten() - 1))
        return self._index[1]

    def _load_from_state_dict(self, *args: object) -> None:
        super()._load_from_state_dict(*args)
        self._index = None

    def forward(self, tokens: Tensor, features: Tensor, segments: Tensor | None = None) -> Tensor:
        """(B, S, 4), in float32 or wider, Σ_e g_e log p_e up to a constant, of the base after each
        of the last S of tokens (B, T), whose features are (B, S, C). Nothing of another document,
        by segments (B, T), counts."""
        wide = torch.promote_types(features.dtype, torch.float32)
        with torch.no_grad():
            log_p, statistics = self._evidence(tokens, features.shape[1], segments, wide)
        inputs = torch.cat([features, statistics.to(features.dtype)], -1)
        gates = self.gate_out(F.silu(self.gate_in(inputs))).to(wide)
        return torch.einsum("bse,bsex->bsx", gates, log_p)

    def _evidence(
        self, tokens: Tensor, last: int, segments: Tensor | None, wide: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Centred log p_e (B, S, E, 4), and what the gates are told of it (B, S, (2 + RECENT)·E),
        at the last S tokens."""
        # Success is averaged over places before the last ones.
        places = min(tokens.shape[1], last + max(RECENT))
        counts = self._counts(tokens, places, segments).to(wide)
        number = counts.sum(-1)
        pseudo_counts = [1.0 if order < RARE else 1 / 16 for order in self.orders * 2]
        floor = torch.tensor(pseudo_counts).to(counts)[:, None]
        log_p = ((counts + floor) / (number[..., None] + 4 * floor)).log()
        success = self._success(log_p, tokens[:, -places:], _last(segments, places))
        statistics = torch.cat([number.log1p() / 4, log_p.amax(-1) + math.log(4), *success], -1)
        centred = log_p - log_p.mean(-1, keepdim=True)
        return centred[:, -last:], statistics[:, -last:]

    def _counts(self, tokens: Tensor, places: int, segments: Tensor | None) -> Tensor:
        """(B, places, E, 4) int32: n_e of the experts of all that was read, then of the row's
        recent bases, at the last places."""
        row, recent = counts_so_far(tokens, self.orders, self.recent, segments)
        everywhere = row[:, -places:]
        index = self.index()
        if index is not None:
            reach = places + LONGEST
            memory = index.counts(tokens[:, -reach:], self.orders, _last(segments, reach))
            everywhere = everywhere + memory[:, -places:]
        return torch.cat([everywhere, recent[:, -places:]], 2)

    @staticmethod
    def _success(log_p: Tensor, tokens: Tensor, segments: Tensor | None) -> list[Tensor]:
        """For each width of RECENT (B, S, E): mean of log(4 p_e) of the bases up to a place, 0 for
        those of other documents."""
        known = known_run(tokens, segments)
        continues = known[:, 1:] > known[:, :-1]
        outcome = tokens[:, 1:].clamp(0, 3)[:, :, None, None]
        forecast = log_p[:, :-1]
        forecast = forecast.gather(-1, outcome.expand(*forecast.shape[:3], 1))[..., 0]
        gains = (forecast + math.log(4)) * continues[..., None]
        # Of the outcomes known at each place.
        sums = F.pad(gains.double().cumsum(1), (0, 0, 1, 0))
        place = torch.arange(tokens.shape[1], device=tokens.device)
        changed = torch.zeros_like(tokens, dtype=torch.bool)
        if segments is not None:
            changed[:, 1:] = segments[:, 1:] != segments[:, :-1]
        first = torch.where(changed, place, 0).cummax(1).values
        means = []
        for width in RECENT:
            start = torch.maximum(first, place - width).clamp(min=0)
            earlier = sums.gather(1, start[..., None].expand_as(sums))
            means.append(((sums - earlier) / width).to(log_p.dtype))
        return means


def _last(segments: Tensor | None, places: int) -> Tensor | None:
    return None if segments is None else segments[:, -places:]


def known_run(codes: Tensor, segments: Tensor | None = None) -> Tensor:
    """(B, T) how many known bases of one document end at each place, itself included."""
    place = torch.arange(codes.shape[1], device=codes.device)
    unknown = (codes < 0) | (codes > 3)
    starts = unknown.clone()
    if segments is not None:
        # The first base of a document is known, and nothing before it belongs to it.
        starts[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    return place + 1 - torch.where(starts, place + unknown, 0).cummax(1).values


def _shifted(codes: Tensor, back: int) -> Tensor:
    """(B, T) the codes `back` places before each; 0 where there is none."""
    return F.pad(codes, (back, 0))[:, : codes.shape[1]]


def counts_so_far(
    codes: Tensor, orders: Sequence[int], recent: int, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """n_k(x) in the row itself, and of the words alone that end in its last `recent` bases,
    i − recent < j ≤ i.

    Both (B, T, K, 4) int32, for every order k of `orders`, the same tensor where all of the row is
    recent; 0 where no k known bases end at a place. codes and segments are (B, T) int64; there are
    fewer than 2¹⁴ documents in a row.
    """
    known = known_run(codes, segments)
    length = codes.shape[1]
    base = codes.clamp(0, 3)
    # Of the word that begins with the context at a place.
    followers = torch.full_like(codes, -1)
    followers[:, :-1] = torch.where(known[:, 1:] > known[:, :-1], base[:, 1:], -1)
    document = torch.zeros_like(codes) if segments is None else segments + 1
    # The k bases that end at a place in base 4, and their reverse complement.
    forth = torch.zeros_like(codes)
    back = torch.zeros_like(codes)
    by_order = []
    for k in range(1, max(orders) + 1):
        oldest = _shifted(base, k - 1)
        forth = forth + (oldest << 2 * (k - 1))
        back = 4 * back + (3 - oldest)
        if k not in orders:
            continue
        # Two entries a place, in the order in which a reader knows them: the other strand's word
        # that ends here, then the context here.
        is_entry = torch.stack([known > k, known >= k], 2)
        contexts = torch.stack([back, forth], 2) | (document << 48)[..., None]
        contexts = contexts.where(is_entry, -1).flatten(1)
        bases = torch.stack([3 - _shifted(base, k), followers], 2)
        bases = bases.where(is_entry, -1).flatten(1)
        ends = (known >= k)[..., None]
        by_order.append([n[:, 1::2] * ends for n in _counts_before(contexts, bases, 2 * recent)])
    row = torch.stack([counts[0] for counts in by_order], 2)
    if recent >= length:
        return row, row
    return row, torch.stack([counts[1] for counts in by_order], 2)


def _counts_before(contexts: Tensor, bases: Tensor, recent: int) -> list[Tensor]:
    """(B, N, 4) int32, how often each base stands at the entries of the same context before each of
    N entries; then, where `recent` < N, at those among the `recent` entries before it.

    contexts, bases: (B, N) int64, in the order of reading; a base of −1 counts as none. A stable
    sort by context keeps the entries of a context in that order; running sums over it are the
    counts.
    """
    entries = contexts.shape[1]
    contexts, order = contexts.sort(dim=1, stable=True)
    one_hot = F.one_hot(bases.gather(1, order) + 1, 5)[..., 1:].to(torch.int32)
    # Sums over the entries before each.
    sums = one_hot.cumsum(1, dtype=torch.int32) - one_hot
    place = torch.arange(entries, device=contexts.device)
    new = F.pad(contexts[:, 1:] != contexts[:, :-1], (1, 0), value=True)
    starts = [torch.where(new, place, 0).cummax(1).values]
    if recent < entries:
        # `rank` ascends along the sorted entries, so a search finds the first one of the context
        # that is recent.
        group = new.cumsum(1) * entries
        rank = group + order
        starts.append(torch.searchsorted(rank, group + (order - recent).clamp(min=0)))
    reading_order = order[..., None].expand_as(sums)
    counts = []
    for start in starts:
        since = sums - sums.gather(1, start[..., None].expand_as(sums))
        counts.append(torch.empty_like(sums).scatter_(1, reading_order, since))
    return counts


class Index:
    """The words of sequences, sorted, for counts of any order up to LONGEST.

    A word is the WORD bases from a place on, as digits 1 to 4 in base 5, the first most
    significant; after the end of a sequence, or at an unknown base, come zeros. All words that
    begin with some bases are neighbours. codes: (N,) of all sequences; what is no base ends one.
    """

    def __init__(self, codes: Tensor) -> None:
        digits = torch.where((codes >= 0) & (codes < 4), codes + 1, 0).to(torch.int8)
        complement = torch.where(digits > 0, 5 - digits, 0)
        words = torch.cat([self._words(digits), self._words(complement.flip(0))])
        if words.is_cpu:
            # torch would keep the order of equal words, too, which takes longer.
            self.words = torch.from_numpy(np.sort(words.numpy()))
        else:
            self.words = words.sort().values

    @staticmethod
    def _words(digits: Tensor) -> Tensor:
        """Those of one strand that have a base."""
        # With a word's end, so that no block is shorter than a word.
        ended = F.pad(digits, (0, LONGEST))
        blocks = []
        for start in range(0, len(digits), BLOCK):
            block = ended[start : start + BLOCK + LONGEST]
            blocks.append(words_at(block.long())[:BLOCK])
        words = torch.cat(blocks)
        return words[words > 0]

    def counts(
        self, codes: Tensor, orders: Sequence[int], segments: Tensor | None = None
    ) -> Tensor:
        """n_k(x) in the indexed sequences, (B, T, K, 4) int32; arguments as in `counts_so_far`."""
        known = known_run(codes, segments)
        digits = codes.clamp(0, 3) + 1
        totals = torch.zeros(*codes.shape, len(orders), 4, dtype=torch.int32, device=codes.device)
        prefix = torch.zeros_like(codes)
        wanted = known >= 0
        for k in range(1, max(orders) + 1):
            prefix = prefix + _shifted(digits, k - 1) * 5 ** (k - 1)
            if k not in orders:
                continue
            wanted = wanted & (known >= k)
            # Words that begin with the context and base x lie between edges x and x + 1.
            edges = torch.arange(1, 6, device=codes.device) * 5 ** (LONGEST - k)
            edges = prefix[wanted][:, None] * 5 ** (WORD - k) + edges
            counts = torch.searchsorted(self.words, edges).diff()
            totals[:, :, list(orders).index(k)][wanted] = counts.to(torch.int32)
            # What a shorter context has not seen a longer one has not.
            wanted[wanted.clone()] = counts.sum(1) > 0
        return totals


def words_at(digits: Tensor) -> Tensor:
    """(N,) the word that begins at each of N digits, 0 to 4; zeros from its first 0 on."""
    words = _numbers(digits, WORD)
    place = torch.arange(len(digits), device=digits.device)
    # The first 0 at or after each place.
    end = torch.where(digits > 0, len(digits), place).flip(0).cummin(0).values.flip(0)
    known = (end - place).clamp(max=WORD)
    unit = 5 ** torch.arange(WORD, -1, -1, device=digits.device)[known]
    return words // unit * unit


def _numbers(digits: Tensor, size: int) -> Tensor:
    """(N,) the numbers in base 5 of the `size` digits from each place on; 0s follow the last digit.

    One of 2n digits is one of n digits before another one. That is a third of the time of adding
    digits one by one; a memory of 8 million bases then takes 4 seconds less to index.
    """
    if size == 1:
        return digits
    half = size // 2
    halves = _numbers(digits, half)
    numbers = halves * 5**half + _ahead(halves, half)
    if size % 2:
        numbers = numbers * 5 + _ahead(digits, 2 * half)
    return numbers


def _ahead(values: Tensor, places: int) -> Tensor:
    """(N,) the value so many places after each; 0 where there is none."""
    return F.pad(values[places:], (0, places))
