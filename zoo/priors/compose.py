"""Sums of priors."""

from __future__ import annotations

from torch import Tensor

from zoo.positions import Positions
from zoo.priors.base import Prior, prior_device
from zoo.priors.terms import PriorTerms


class Compose(Prior):
    """K = Σ_n K_n of the named parts; part names are submodule names.

    State from chunk to chunk (`carry`) goes to the part that has one.
    """

    by_head = ()

    def __init__(self, **parts: Prior) -> None:
        for name, part in parts.items():
            if not isinstance(part, Prior):
                raise ValueError(
                    f"part {name!r} of a composed prior must be a zoo.Prior, got {part!r}"
                )
        heads = {part.num_heads for part in parts.values()}
        if len(heads) != 1:
            raise ValueError(
                f"composed priors need the same number of heads, got {sorted(heads) or 'no part'}"
            )
        super().__init__(heads.pop())
        for name, part in parts.items():
            self.add_module(name, part)
        self.num_lanes = sum(part.num_lanes for part in parts.values())
        self.has_state = any(part.has_state for part in parts.values())

    def forward(
        self,
        q_pos: Positions,
        k_pos: Positions,
        *,
        causal: bool,
        x: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> PriorTerms:
        terms = PriorTerms()
        for part in self.parts():
            state = {"carry": carry} if carry is not None and part.has_state else {}
            terms = terms + part(q_pos, k_pos, causal=causal, x=x, **state)
        return terms

    def beside_lanes(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        total = PriorTerms()
        for part in self.parts():
            terms = part.beside_lanes(q_pos, k_pos, causal=causal, x=x)
            total = total + PriorTerms(table=terms.table, bias=terms.bias, gain=terms.gain)
        return total

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        # A part without parameters, such as ALiBi of fixed slopes, is not told the device of the
        # others'.
        device = prior_device(self)
        first, *others = self.parts()
        total = first.log_prior(q_pos, k_pos, causal=causal, x=x).to(device=device)
        for part in others:
            total = total + part.log_prior(q_pos, k_pos, causal=causal, x=x).to(device=device)
        return total


def compose(*priors: Prior) -> Compose:
    """The sum of priors, as parts `0`, `1`, …"""
    return Compose(**{str(n): prior for n, prior in enumerate(priors)})
