"""GOAT: a sink as a function of absolute position plus a short trigonometric series in the distance
(arXiv 2601.15380)."""

from __future__ import annotations

from zoo.priors.compose import Compose
from zoo.priors.key_bias import KeyBias, KeyBias2d
from zoo.priors.spectral import Spectral, Spectral2d


class Goat(Compose):
    """GOAT on a line: key_bias + spectral (arXiv 2601.15380; C4 settings R = 2, M = 8).

    Args:
        train_context, sink_rank: L_train, in tokens, and M of `.key_bias`.
        rank: R of `.spectral`.
        init: "seeded" starts near ALiBi; "uniform" starts at plain attention (the slope then has no
            gradient, see `KeyBias`).
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
        train_grid, rank, init, reach: of the spectral part, as in `Spectral2d`.
        sink_rank: M of `.key_bias`.
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
            spectral=Spectral2d(
                num_heads, rank=rank, train_grid=train_grid, init=init, reach=reach
            ),
        )
