"""GGD-BAM: a generalised Gaussian over distance (Bayesian Attention Mechanism, arXiv 2505.22842)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zoo.positions import Positions
from zoo.priors.alibi import alibi_slopes
from zoo.priors.base import GridPrior, PriorTerms, TablePrior, prior_dtype
from zoo.priors.tables import Law

__all__ = ["EPSILON", "Ggd", "Ggd2d", "GgdLaw"]

EPSILON = 1e-5


@dataclass(frozen=True)
class GgdLaw(Law):
    """table = Σ over axes of t,  t = −exp(θα)·r^θβ,  r = |x| + 1e−5,  x = −d − μ,  μ = 2·sinh θμ,  and so

        ∂t/∂θα = t,    ∂t/∂θβ = t·ln r,    ∂t/∂θμ = 2·cosh θμ · exp(θα)·θβ·r^(θβ−1) · sign x.

    Attributes:
        theta: (A, 3, H) θα, θβ, θμ of each axis.
        axes: which displacement d of the table each is about: "d" of a line; "y", "x", or "r" = √(y² + x²), of a grid.
        train_mu: whether θμ is among the numbers, which are those of each axis in turn.
    """

    theta: Tensor
    axes: tuple[str, ...]
    train_mu: bool

    @staticmethod
    def of(laws: Sequence[Ggd], axes: tuple[str, ...]) -> GgdLaw:
        """Of priors, one per axis. Copies their parameters: whoever shards them may take them away after the prior ran."""
        rows = [p.to(prior_dtype(law)) for law in laws for p in (law.theta_alpha, law.theta_beta, law.theta_mu)]
        return GgdLaw(torch.stack(rows).unflatten(0, (-1, 3)), axes, any(law.theta_mu.requires_grad for law in laws))

    @property
    def numbers(self) -> Tensor:
        return (self.theta if self.train_mu else self.theta[:, :2]).flatten(0, 1)

    def of_heads(self, heads: slice) -> GgdLaw:
        return replace(self, theta=self.theta[:, :, heads])

    def tangents(self, displacements: dict[str, Tensor]) -> Tensor:
        rows = []
        for axis, numbers in zip(self.axes, self.theta.detach()[..., None], strict=True):
            distance = torch.hypot(displacements["y"], displacements["x"]) if axis == "r" else displacements[axis]
            alpha, beta, mu = numbers
            x = -distance - 2 * mu.sinh()
            r = x.abs() + EPSILON
            t = -alpha.exp() * r**beta
            rows += [t, t * r.log()]
            if self.train_mu:
                rows.append(2 * mu.cosh() * alpha.exp() * beta * r ** (beta - 1) * x.sign())
        return torch.stack(rows)


class Ggd(TablePrior):
    """K[h,i,j] = −exp(θα_h)·(|j − i − μ_h| + 1e−5)^θβ_h, μ = e^θμ − e^−θμ.

    θβ = 0 is no prior, θβ = 1 is ALiBi of slope exp(θα), θβ < 0 looks away from the query (a retrieval head).

    Args:
        num_heads: H.
        init: "uniform" (θα = θβ = 0, the paper's best) or "alibi" (θβ = 1, θα = ln of the ALiBi slopes).
        train_mu: train θμ; else it stays 0.
    """

    def __init__(self, num_heads: int, *, init: str = "uniform", train_mu: bool = False) -> None:
        super().__init__(num_heads)
        if init not in ("uniform", "alibi"):
            raise ValueError(f"unknown init {init!r} of a ggd prior; known: uniform, alibi")
        alibi = init == "alibi"
        self.theta_alpha = nn.Parameter(alibi_slopes(num_heads).log().float() if alibi else torch.zeros(num_heads))
        self.theta_beta = nn.Parameter(torch.full((num_heads,), 1.0 if alibi else 0.0))
        self.theta_mu = nn.Parameter(torch.zeros(num_heads), requires_grad=train_mu)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        dtype = torch.promote_types(distance.dtype, torch.float32)
        lead = (self.num_heads,) + (1,) * distance.ndim
        alpha, beta, mu = (p.to(dtype).view(lead) for p in (self.theta_alpha, self.theta_beta, self.theta_mu))
        return -alpha.exp() * ((-distance - 2 * mu.sinh()).abs() + EPSILON) ** beta

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        return _with_law(super().forward(q_pos, k_pos, causal=causal, x=x), GgdLaw.of([self], ("d",)))


class Ggd2d(GridPrior):
    """The same law over the grid of patches; prefix tokens get 0.

    "isotropic": over the Euclidean patch distance, K = −exp(θα)·(√(dy² + dx²) + 1e−5)^θβ, part `.r`; "separable": the sum
    of one law per axis, parts `.y` and `.x`.

    Args:
        num_heads: H.
        form: "isotropic" or "separable".
        init: as in `Ggd`.
        train_mu: train θμ, which moves the centre of a separable law off the query, so that a head can look to one side, and
            makes a ring of an isotropic one.
    """

    def __init__(
        self, num_heads: int, *, form: str = "isotropic", init: str = "uniform", train_mu: bool = False
    ) -> None:
        super().__init__(num_heads)
        if form not in ("isotropic", "separable"):
            raise ValueError(f"unknown form {form!r} of ggd2d; known: isotropic, separable")
        self.form = form
        for axis in ("r",) if form == "isotropic" else ("y", "x"):
            self.add_module(axis, Ggd(num_heads, init=init, train_mu=train_mu))

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        distances = (torch.hypot(dy, dx),) if self.form == "isotropic" else (dy, dx)
        curves = [law.curve(distance, causal=False) for law, distance in zip(self.laws(), distances, strict=True)]
        return sum(curves[1:], curves[0])

    def laws(self) -> list[Ggd]:
        """One per axis: of r, or of y and x."""
        return [law for law in self.children() if isinstance(law, Ggd)]

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        axes = ("r",) if self.form == "isotropic" else ("y", "x")
        return _with_law(super().forward(q_pos, k_pos, causal=causal, x=x), GgdLaw.of(self.laws(), axes))


def _with_law(terms: PriorTerms, law: GgdLaw) -> PriorTerms:
    assert terms.table is not None
    return replace(terms, table=replace(terms.table, law=law))
