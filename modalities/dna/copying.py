"""A copy expert: what followed the same bases before, here or in training, as a prior on the logits of the next base.

    logits(x) = W h + Σ_e g_e log p_e(x),    p_e(x) = (n_e(x) + a_e) / (Σ_y n_e(y) + 4 a_e)

n_e counts what followed the last k_e bases, on either strand (`modalities.dna.matches`): for each order k once in all that was
read, the memory of training bases and the row so far, and once in the recent bases of the row alone, as many as a row of
training has. Among these a match is rarely by chance; what lies further back counts as what lies in memory. The gates g_e
depend on the decoder's features h, on how often and how clearly each expert has seen its context, and on how well it predicted
the bases just read.

Log-linear mixing of counters whose weights follow recent success is that of PAQ (Mahoney 2005), counters of several orders with
inverted repeats those of GeCo (Pratas et al. 2016), copy experts of DNA those of XM (Cao et al. 2007), and a memory of training
data beside the weights that of kNN-LM (arXiv 1911.00172).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modalities.dna.matches import LONGEST, Index, counts_so_far, known_run

__all__ = ["RECENT", "CopyExpert"]

RECENT = (8, 32)  # bases over which an expert's success is averaged
GATE = 32  # hidden width of the gate
RARE = 12  # from this order on a context is rarely seen by chance, and a single observation says much
PACKED = 3  # digits of base 5 in a byte
REFRESHED = 8  # times that the index is made anew while the memory doubles


class CopyExpert(nn.Module):
    """Adds to the logits of the next base what followed its context before.

    The memory is written while training reads (`remember`), and is part of the weights. Training sees it in steps: the first
    m of n bases held, m the largest multiple of an eighth of the last power of 2. That depends on n alone, so a run that
    is resumed sees what it would have.

    Args:
        dim: C, the width of features.
        orders: k, ascending, 1 to LONGEST.
        memory: bases of training rows that are kept, the start of a row counting as one, rounded up to a multiple of 3. What is
            read when it is full is not kept.
        recent: bases of the row that experts of the row alone look at.
    """

    memory: Tensor  # (⌈memory / 3⌉,) uint8, three digits to a byte: 1 to 4 a base, 0 none
    held: Tensor  # () int64, bytes written

    def __init__(self, dim: int, orders: Sequence[int], memory: int, recent: int) -> None:
        super().__init__()
        self.recent = recent
        self.orders, experts = tuple(orders), 2 * len(orders)
        self.gate_in = nn.Linear(dim + (2 + len(RECENT)) * experts, GATE)
        self.gate_out = nn.Linear(GATE, experts)
        nn.init.zeros_(self.gate_out.weight)
        nn.init.zeros_(self.gate_out.bias)
        self.register_buffer("memory", torch.zeros(-(-memory // PACKED), dtype=torch.uint8))
        self.register_buffer("held", torch.zeros((), dtype=torch.int64))
        self._index: tuple[Any, Index] | None = None

    # ---- the memory ----

    def remember(self, tokens: Tensor, segments: Tensor) -> None:
        """Keep the bases of rows (B, L+1), if there is room for all. Ids above 3, as a row's start, and padding part them.

        Raises:
            ValueError: in a run of several processes, whose memories would differ.
        """
        if not len(self.memory):
            return
        if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
            raise ValueError(
                f"a memory is written by one process, and this run has {ranks}: train on one, or set copy_memory to 0"
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
        key = held, self.memory.device
        if self._index is None or self._index[0] != key:
            self._index = None  # frees it before the next is made
            packed = self.memory[:held].to(torch.int64)
            digits = torch.stack([packed // 25, packed // 5 % 5, packed % 5], 1).flatten()
            self._index = key, Index(digits - 1)
        return self._index[1]

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._index = None

    # ---- the prior ----

    def forward(self, tokens: Tensor, features: Tensor, segments: Tensor | None = None) -> Tensor:
        """(B, S, 4), in float32 or wider, Σ_e g_e log p_e up to a constant, of the base after each of the last S tokens.

        Args:
            tokens: (B, T) ids of all that was read; those above 3 are no bases.
            features: (B, S, C) of the last S tokens.
            segments: (B, T) document ids; nothing of another document counts.
        """
        wide = torch.promote_types(features.dtype, torch.float32)
        with torch.no_grad():
            log_p, statistics = self._evidence(tokens, features.shape[1], segments, wide)
        given = torch.cat([features, statistics.to(features.dtype)], -1)
        gates = self.gate_out(F.silu(self.gate_in(given))).to(wide)
        return torch.einsum("bse,bsex->bsx", gates, log_p)

    def _evidence(self, tokens: Tensor, last: int, segments: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Centred log p_e (B, S, E, 4), and what the gates are told of it (B, S, (2 + RECENT)·E), at the last S tokens."""
        seen = min(tokens.shape[1], last + max(RECENT))  # success is averaged over places before
        total, row = (n[:, -seen:] for n in counts_so_far(tokens, self.orders, self.recent, segments))
        index = self.index()
        if index is not None:
            reach = seen + LONGEST
            ids = None if segments is None else segments[:, -reach:]
            total = total + index.counts(tokens[:, -reach:], self.orders, ids)[:, -seen:]
        counts = torch.cat([total, row], 2).to(wide)
        number = counts.sum(-1)
        floor = torch.tensor([1.0 if k < RARE else 1 / 16 for k in self.orders * 2]).to(counts)[:, None]
        log_p = ((counts + floor) / (number[..., None] + 4 * floor)).log()
        clear = log_p.amax(-1) + math.log(4)
        success = self._success(log_p, tokens[:, -seen:], None if segments is None else segments[:, -seen:])
        statistics = torch.cat([number.log1p() / 4, clear, *success], -1)
        return (log_p - log_p.mean(-1, keepdim=True))[:, -last:], statistics[:, -last:]

    @staticmethod
    def _success(log_p: Tensor, tokens: Tensor, segments: Tensor | None) -> list[Tensor]:
        """For each width of RECENT (B, S, E): mean of log(4 p_e) of the bases up to a place, 0 for those of other documents."""
        follows, known = tokens[:, 1:], known_run(tokens, segments)
        picked = log_p[:, :-1].gather(-1, follows.clamp(0, 3)[:, :, None, None].expand(*log_p[:, :-1].shape[:3], 1))
        gains = (picked[..., 0] + math.log(4)) * (known[:, 1:] > known[:, :-1])[..., None]
        sums = F.pad(gains.double().cumsum(1), (0, 0, 1, 0))  # of the outcomes known at each place
        place = torch.arange(tokens.shape[1], device=tokens.device)
        changed = torch.zeros_like(tokens, dtype=torch.bool)
        if segments is not None:
            changed[:, 1:] = segments[:, 1:] != segments[:, :-1]
        first = torch.where(changed, place, 0).cummax(1).values
        found = []
        for width in RECENT:
            start = torch.maximum(first, place - width).clamp(min=0)
            mean = (sums - sums.gather(1, start[..., None].expand_as(sums))) / width
            found.append(mean.to(log_p.dtype))
        return found
