"""Sequence parallelism by DeepSpeed-Ulysses (arXiv 2309.14509): ranks that hold a line of tokens
together.

Outside attention each rank has a part of the line and all heads; inside it some heads and the whole
line. Tokens and heads change places in an all-to-all exchange before attention and after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zoo.attention.dispatch import prior_attention
from zoo.attention.heads import repeat_heads
from zoo.positions import Positions
from zoo.priors.base import Prior, TablePrior, prior_device

# Nats below the largest value of a prior, from which on a key does not count as visible.
NEGLIGIBLE = 20.0
# Calls after which the order of a prior's heads is computed anew.
REFRESH_CALLS = 256


def visible_pairs(prior: Prior, length: int) -> Tensor:
    """(H,) causal (query, key) pairs of a line whose log-prior is within `NEGLIGIBLE` of the head's
    largest; parts of a prior that are no function of distance count as 0 everywhere."""
    # Distances that grow by a factor stand for those up to the next one.
    distance = torch.logspace(0, math.log2(length), 129, base=2, dtype=torch.float64)
    distance = distance.round().unique()
    distance = torch.cat([distance.new_zeros(1), distance[:-1]])
    curve = torch.zeros(prior.num_heads, len(distance), dtype=torch.float64)
    for part in [prior, *prior.parts()]:
        if isinstance(part, TablePrior):
            curve += part.curve(distance.to(prior_device(part)), causal=True).detach().cpu()
    widths = torch.diff(distance, append=distance.new_tensor([length]))
    visible = curve >= curve.amax(1, keepdim=True) - NEGLIGIBLE
    return (visible * (length - distance) * widths).sum(1)


def balanced_groups(pairs: Tensor, groups: int, ranks: int) -> list[int]:
    """An order of groups of heads, equally many for each rank in turn, in which ranks have about as
    many visible pairs.

    Args:
        pairs: (H,) of each head; the H/groups heads of a group follow each other.
        groups: a multiple of `ranks`.
    """
    work = pairs.view(groups, -1).sum(1)
    if work.min() == work.max():
        return list(range(groups))
    loads = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # The group with most work first, to the rank with least.
    for group in work.argsort(descending=True, stable=True).tolist():
        free = [rank for rank in range(ranks) if len(shares[rank]) < groups // ranks]
        rank = min(free, key=loads.__getitem__)
        shares[rank].append(group)
        loads[rank] += float(work[group])
    order: list[int] = []
    for share in shares:
        order += sorted(share)
    return order


@dataclass(frozen=True)
class SequenceGroup:
    """Rank r of N: it has tokens [r·T/N, (r+1)·T/N) of lines of T, and H/N of the heads inside
    attention.

    `exchange(x, cut, joined)` is a differentiable all-to-all of x (B, L, H, D): axis `cut` becomes
    this rank's N-th of it, and axis `joined` N times as long, in the order of ranks.
    """

    rank: int
    size: int
    exchange: Callable[[Tensor, int, int], Tensor]
    _orders: WeakKeyDictionary[Prior, tuple[int, list[int]]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def _range(self, total: int, what: str) -> slice:
        """This rank's share of range(total); ValueError where ranks do not divide it."""
        if total % self.size:
            raise ValueError(
                f"{total} {what} cannot be shared by {self.size} ranks, expected a multiple"
            )
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def order(self, prior: Prior, groups: int, length: int) -> list[int]:
        """The `balanced_groups` of a prior's heads, the same on all ranks.

        It reads the prior's parameters, which on a GPU waits for them: it is computed anew at every
        `REFRESH_CALLS`-th call for a prior.
        """
        calls, order = self._orders.get(prior, (0, []))
        if calls % REFRESH_CALLS == 0 or len(order) != groups:
            order = balanced_groups(visible_pairs(prior, length), groups, self.size)
        self._orders[prior] = calls + 1, order
        return order

    def part(self, x: Tensor) -> Tensor:
        """This rank's part (B, T/N, …) of x (B, T, …)."""
        return x[:, self._range(x.shape[1], "tokens of a line")]

    def part_of(self, positions: Positions) -> Positions:
        """The positions of this rank's tokens among those of a whole line."""
        part = self._range(positions.length, "tokens of a line")
        return positions.slice(part.start, part.stop)

    def to_heads(self, x: Tensor) -> Tensor:
        """(B, H, T/N, D) of this rank's tokens → (B, H/N, T, D) of its heads."""
        return self.exchange(x.transpose(1, 2), 2, 1).transpose(1, 2)

    def attend(
        self,
        prior: Prior,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions,
        *,
        causal: bool,
        query_scale: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """(B, H, T/N, D): this rank attends by its heads over the whole line, and the ranks
        exchange heads for tokens.

        Args:
            prior: of all heads.
            x: (B, T/N, C) the layer's input at this rank's tokens.
            q, k, v: (B, H, T/N, d_c), (B, G, T/N, d_c), (B, G, T/N, D).
            positions: of the whole line.
            query_scale, options: as in `prior_attention`.
        """
        # Heads with a key head in common stay together. Where ranks do not divide the key heads,
        # these are repeated as little as makes groups that ranks divide: H is a multiple of both.
        groups = math.lcm(k.shape[1], self.size)
        self._range(q.shape[1], "heads")
        group_size = q.shape[1] // groups
        order = self.order(prior, groups, positions.length)
        heads = [group * group_size + n for group in order for n in range(group_size)]
        k = repeat_heads(k, groups)[:, order]
        v = repeat_heads(v, groups)[:, order]
        # (B, groups, T/N, H/groups, d_c)
        by_group = q.unflatten(1, (groups, group_size))[:, order].transpose(2, 3)
        # One exchange for q, k and v.
        packed = self.to_heads(torch.cat([by_group.flatten(3), k, v], dim=-1))
        q_width = group_size * q.shape[-1]
        q, k, v = packed.split([q_width, k.shape[-1], v.shape[-1]], dim=-1)
        q = q.unflatten(3, (group_size, -1)).transpose(2, 3).flatten(1, 2)
        if query_scale is not None:
            query_scale = self.to_heads(query_scale[:, heads, :, None])[..., 0]
        content = prior.content(x)
        if content is not None:
            x = self.to_heads(content[:, heads])
        rank_heads = heads[self._range(len(heads), "heads")]
        terms = prior.of_heads(rank_heads)(positions, positions, causal=causal, x=x)
        out = prior_attention(q, k, v, terms, causal=causal, query_scale=query_scale, **options)
        out = self.exchange(out.transpose(1, 2), 1, 2).transpose(1, 2)
        if heads == sorted(heads):
            return out
        # Back to the order of the model's heads.
        return out[:, torch.tensor(heads).argsort().tolist()]
