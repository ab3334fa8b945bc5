"""Sums of priors, and GOAT, which is one."""

from __future__ import annotations

from torch import Tensor

from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms, prior_device
from zoo.priors.key_bias import KeyBias, KeyBias2d
from zoo.priors.spectral import Spectral, Spectral2d

__all__ = ["Compose", "Goat", "Goat2d", "compose"]


class Compose(Prior):
    """K = Σ_n K_n of the named parts; part names are submodule names.

    Raises:
        ValueError: for parts with different numbers of heads, or no parts.
    """

    by_head = ()

    def __init__(self, **parts: Prior) -> None:
        for name, part in parts.items():
            if not isinstance(part, Prior):
                raise ValueError(f"part {name!r} of a composed prior must be a zoo.Prior, got {part!r}")
        heads = {part.num_heads for part in parts.values()}
        if len(heads) != 1:
            raise ValueError(f"composed priors need the same number of heads, got {sorted(heads) or 'no part'}")
        super().__init__(heads.pop())
        for name, part in parts.items():
            self.add_module(name, part)
        self.num_lanes = sum(part.num_lanes for part in parts.values())

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        terms = PriorTerms()
        for part in self.parts():
            terms = terms + part(q_pos, k_pos, causal=causal, x=x, carry=carry)
        return terms

    def _beside_lanes(self, q_pos: Positions, k_pos: Positions, causal: bool) -> PriorTerms:
        parts = (part._beside_lanes(q_pos, k_pos, causal) for part in self.parts())
        return sum((PriorTerms(table=terms.table, bias=terms.bias) for terms in parts), PriorTerms())

    def log_prior(self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None) -> Tensor:
        # A part without parameters, such as ALiBi of fixed slopes, is not told the device of the others'.
        device = prior_device(self)
        first, *others = (part.log_prior(q_pos, k_pos, causal=causal, x=x).to(device=device) for part in self.parts())
        return sum(others, first)


def compose(*priors: Prior) -> Compose:
    """The sum of priors, as parts `0`, `1`, …"""
    return Compose(**{str(n): prior for n, prior in enumerate(priors)})


class Goat(Compose):
    """GOAT on a line: key_bias + spectral (arXiv 2601.15380; C4 settings R = 2, M = 8).

    Args:
        num_heads: H.
        train_context: L_train of the key bias, in tokens.
        rank: R of `.spectral`.
        sink_rank: M of `.key_bias`.
        init: "seeded" starts near ALiBi; "uniform" starts at plain attention (the slope then has no gradient, see `KeyBias`).
    """

    def __init__(
        self,
        num_heads: int,
        *,
        train_context: int,
        rank: int = 2,
        sink_rank: int = 8,
        init: str = "seeded",
    ) -> None:
        super().__init__(
            key_bias=KeyBias(num_heads, train_context=train_context, rank=sink_rank, init=init),
            spectral=Spectral(num_heads, rank=rank, init=init),
        )


class Goat2d(Compose):
    """GOAT on a grid of patches: key_bias2d + spectral2d; 16 frequency pairs in all.

    Args:
        num_heads: H.
        train_grid: (height, width) in patches.
        rank: R per axis.
        sink_rank: M of `.key_bias`.
        init: "uniform" or "seeded", of the spectral part.
        reach: as in `Spectral2d`.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        train_grid: tuple[int, int] = (14, 14),
        rank: int = 8,
        sink_rank: int = 8,
        init: str = "seeded",
        reach: float = 1.0,
    ) -> None:
        super().__init__(
            key_bias=KeyBias2d(num_heads, rank=sink_rank),
            spectral=Spectral2d(num_heads, rank=rank, train_grid=train_grid, init=init, reach=reach),
        )
