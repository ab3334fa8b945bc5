"""Upper bound on a key's future attention weight: pages below the threshold can be evicted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from zoo.layers import Attention, Block
from zoo.positions import Positions
from zoo.priors.base import Prior

__all__ = ["EvictionBound"]

# Seven roundings to bfloat16, 2^-9 each: normed input, projection, rotation, temperature, prior scale, row scale, and the other
# factor of the product.
ROUNDED = 1.015
# Relative error of the log-prior: row scale on lanes in bfloat16, table in float32; a generous bound.
TAIL_ROUNDED = 2.0**-7


@dataclass(frozen=True)
class EvictionBound:
    """Bounds on the logits of one layer, for all inputs, at positions below `horizon`.

    The layer's input is normed, x̂ = g ∘ u with ‖u‖ ≤ √C, so for any tokens, without biases (with them, b_n of the norm and b
    of the projection, plus ‖W b_n + b‖)

        ‖q_h‖/(τ√d_c) ≤ Q_h = σ(W_q^h diag g)·√(C/d_c)/τ,  ‖k_g‖ ≤ K_g = σ(W_k^g diag g)·√C       (σ the largest singular value)

    Rotations keep norms. A future query sees its own key, whose logit is at least −Q_h·K_g + K(0), K times the prior's scale;
    a key on a page of past keys, d or more positions back, has at most Q_h·max‖k‖ + sup_{d' ≥ d} K(d'). With ρ the row scale,
    the page is evictable when for every head of its group

        ρ_min·( Q_h·(max‖k‖ + K_g) + tail_h(d) ) < −(24 ln 2 + ln horizon)         where ρ multiplies the prior too,
        ρ_max·Q_h·(max‖k‖ + K_g) + tail_h(d)     < −(24 ln 2 + ln horizon)         where it does not

    Then a key's weight is below 2^−24/horizon of the own key's, and all evicted keys together are below 2^−24 of the sum.

    Attributes:
        query, key: (H,) Q_h and (G,) K_g, with 1.5% added for rounding.
        tail: (H, n) `Prior.tail` at distances 0, step, 2·step, …
        step: distance between its columns.
        horizon: maximum length of the sequence.
        scale: (H,) SSMax's s, ρ = s·ln(keys seen); None where ρ = 1.
        scale_prior: whether ρ multiplies the prior too.
        window: keys a query sees; None for all.
    """

    query: Tensor
    key: Tensor
    tail: Tensor
    step: int
    horizon: int
    scale: Tensor | None = None
    scale_prior: bool = True
    window: int | None = None

    @staticmethod
    @torch.no_grad()
    def of(block: Block, horizon: int, step: int) -> EvictionBound:
        """From a block's weights, in float64; the attention's input is the output of the norm before it.

        Raises:
            ValueError: where another layer stands in place of a linear one (an adapter, int8), whose weights these are not.
        """
        attention, norm = block.attention, block.attention_norm
        if not EvictionBound.knows(block):
            raise ValueError("no bound is known where linear layers of attention were replaced; use a dense cache")
        width, gain = attention.content_dim, cast(Tensor, norm.weight)
        growth = ROUNDED * _rotary_norm(attention)
        distance = torch.arange(0, horizon, step, device=gain.device)
        # A gate may turn the prior off, which then promises nothing about far keys.
        prior = attention.prior if attention.prior_gate is None else Prior(len(attention.prior_gate.bias))
        return EvictionBound(
            query=_longest(attention.query, norm, width) * growth / math.sqrt(width) / attention.temperature,
            key=_longest(attention.key, norm, width) * growth,
            tail=attention.prior_scale * prior.tail(distance, horizon),
            step=step,
            horizon=horizon,
            scale=None if attention.ssmax is None else attention.ssmax.s.double(),
            scale_prior=attention.scale_prior,
            window=attention.window,
        )

    @staticmethod
    def knows(block: Block) -> bool:
        """Whether queries and keys of the block are made by plain linear layers."""
        return type(block.attention.query) is type(block.attention.key) is nn.Linear

    def held_at_most(self) -> float:
        """The share of the keys that is held at the horizon, were all keys as long as the bound allows."""
        last = torch.arange(self.step - 1, self.horizon, self.step, device=self.key.device)
        longest = self.key[None, :, None].float().expand(-1, -1, len(last))
        evicted = self.evictable(longest, last.expand_as(longest), self.horizon - 1, documents=False)
        return 1 - float(evicted.double().mean())

    def evictable(self, max_norm: Tensor, last: Tensor, now: int, *, documents: bool) -> Tensor:
        """(B, G', n) bool: pages whose keys get negligible weight from every query at position `now` or later.

        Args:
            max_norm: (B, G', n) max‖k‖ of each page, content columns; G' is G, or H where lanes made keys differ per head.
            last: (B, G', n) int, position of each page's last key.
            now: position of the next token.
            documents: positions restart at documents, so a query may see as few keys as its distance to the page.
        """
        groups, heads = max_norm.shape[1], len(self.query)
        away = now - last
        column = (away.clamp(min=0) // self.step).clamp(max=self.tail.shape[1] - 1)
        tail = self.tail.unflatten(0, (groups, -1)).expand(len(away), -1, -1, -1)
        column = column[:, :, None].expand(-1, -1, heads // groups, -1).long()
        tail = tail.gather(3, column)
        tail = tail + TAIL_ROUNDED * tail.abs()
        query = self.query.view(groups, -1, 1)
        key = self.key.repeat_interleave(groups // len(self.key))[:, None, None]
        gap = self._scaled(query * (max_norm[:, :, None].double() + key), tail, away, now, documents)
        limit = 24 * math.log(2) + math.log(self.horizon)
        evictable = (gap < -limit).all(dim=2)  # 0 · ∞ = NaN compares False: the page is kept
        return evictable if self.window is None else evictable | (away >= self.window)

    def _scaled(self, content: Tensor, tail: Tensor, away: Tensor, now: int, documents: bool) -> Tensor:
        """(B, G', r, n) upper bound of the page's largest logit minus the own key's, at the least favourable row scale."""
        if self.scale is None:
            return content + tail
        s = self.scale.view(content.shape[1], -1, 1)
        most = min(self.horizon, self.window or self.horizon)
        if not self.scale_prior:
            return s.abs() * math.log(most) * content + tail
        # A query that sees a key d positions back in its document sees at least d + 1 keys.
        seen = away.clamp(min=0)[:, :, None] + 1 if documents else torch.full_like(away[:, :, None], now + 1)
        return s.clamp(min=0) * seen.clamp(max=most).double().log() * (content + tail)


def _longest(linear: nn.Linear, norm: nn.Module, width: int) -> Tensor:
    """(heads,) float64: at least the norm of each head's rows of linear(norm(x)), for all x (see `EvictionBound`)."""
    gain = cast(Tensor, norm.weight).double()
    weight = linear.weight.double()
    rows = (weight * gain).unflatten(0, (-1, width))
    largest = torch.linalg.eigvalsh(rows @ rows.mT)[:, -1].clamp(min=0).sqrt() * math.sqrt(len(gain))
    shift = getattr(norm, "bias", None)
    constant = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.double()
    constant = constant if shift is None else constant + weight @ shift.double()
    return largest + constant.unflatten(0, (-1, width)).norm(dim=-1)


def _rotary_norm(attention: Attention) -> float:
    """Factor by which the rotation scales norms: 1, or YaRN's factor. Read at position 0, where the angle is 0."""
    if attention.rotary is None:
        return 1.0
    at_origin = attention.rotary(torch.ones(1, 1, 1, attention.content_dim, dtype=torch.float64), Positions.line(1))
    return float(at_origin.abs().max())
