"""GGD-BAM: a generalised Gaussian over distance (Bayesian Attention Mechanism, arXiv 2505.22842)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.priors.alibi import alibi_slopes
from zoo.priors.base import GridPrior, TablePrior

__all__ = ["EPSILON", "Ggd", "Ggd2d"]

EPSILON = 1e-5


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
        laws = [law for law in self.children() if isinstance(law, Ggd)]
        curves = [law.curve(distance, causal=False) for law, distance in zip(laws, distances, strict=True)]
        return sum(curves[1:], curves[0])
