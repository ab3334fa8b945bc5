"""Sequence parallelism by DeepSpeed-Ulysses (arXiv 2309.14509): ranks that hold a line of tokens together.

Outside attention each rank has a part of the line and all heads; inside it some heads and the whole line. Tokens and heads
change places in an all-to-all exchange before attention and after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.attention.base import repeat_heads
from zoo.attention.dispatch import prior_attention
from zoo.positions import Positions
from zoo.priors.base import Prior

__all__ = ["SequenceGroup"]


@dataclass(frozen=True)
class SequenceGroup:
    """Rank r of N: it has tokens [r·T/N, (r+1)·T/N) of lines of T, and heads [r·H/N, (r+1)·H/N) inside attention.

    `exchange(x, cut, joined)` is a differentiable all-to-all of x (B, L, H, D): axis `cut` becomes this rank's N-th of it, and
    axis `joined` N times as long, in the order of ranks.
    """

    rank: int
    size: int
    exchange: Callable[[Tensor, int, int], Tensor]

    def _range(self, total: int, what: str) -> slice:
        if total % self.size:
            raise ValueError(f"{total} {what} cannot be shared by {self.size} ranks, expected a multiple")
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def heads(self, num_heads: int) -> slice:
        """The heads of this rank."""
        return self._range(num_heads, "heads")

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
        """(B, H, T/N, D): this rank attends by its heads over the whole line, and the ranks exchange heads for tokens.

        Args:
            prior: of all heads.
            x: (B, T/N, C) the layer's input at this rank's tokens.
            q, k, v: (B, H, T/N, d_c), (B, G, T/N, d_c), (B, G, T/N, D).
            positions: of the whole line.
            query_scale, options: as in `prior_attention`.
        """
        # Where ranks do not divide the key heads, the least repetition that they do: H is a multiple of both.
        groups = math.lcm(k.shape[1], self.size)
        num_heads = q.shape[1]
        q, k, v = (self.to_heads(heads) for heads in (q, repeat_heads(k, groups), repeat_heads(v, groups)))
        if query_scale is not None:
            query_scale = self.to_heads(query_scale[..., None])[..., 0]
        content = prior.content(x)
        x = x if content is None else self.to_heads(content)
        terms = prior.of_heads(self.heads(num_heads))(positions, positions, causal=causal, x=x)
        out = prior_attention(q, k, v, terms, causal=causal, query_scale=query_scale, **options)
        return self.exchange(out.transpose(1, 2), 1, 2).transpose(1, 2)
