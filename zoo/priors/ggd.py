"""GGD-BAM: a generalised Gaussian over distance (Bayesian Attention Mechanism, arXiv
2505.22842)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zoo.errors import check_flags, check_number, nearest
from zoo.priors.alibi import alibi_slopes
from zoo.priors.base import GridPrior, TablePrior, prior_dtype

EPSILON = 1e-5
# Heads that look away grow steep at distance 0: θβ = −8 is −1e40 there, beyond float32. A key below
# −1e4 has a weight of 0 beside any that is not, and alone in its row it has the whole weight
# whatever its prior: its gradient is 0, but for rounding times that number.
STEEP = 1e4
LOWEST = -1e30

# How θα and θβ start, by what BAM's released code and paper call it.
INITS = ("uniform", "alibi", "linear", "sampled")


def _start(init: str, num_heads: int) -> tuple[Tensor, Tensor]:
    """(H,) θα and θβ of one of INITS."""
    if init == "uniform":
        return torch.zeros(num_heads), torch.zeros(num_heads)
    if init == "sampled":
        return torch.randn(num_heads), torch.randn(num_heads)
    log_slopes = alibi_slopes(num_heads).log().float()
    if init == "linear":
        return log_slopes, torch.linspace(0, 1, num_heads)
    return log_slopes, torch.ones(num_heads)


def _curve(alpha: Tensor, beta: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """(−exp(θα)·r^θβ, at least LOWEST; where it is below −STEEP, and so without gradients)."""
    with torch.no_grad():
        exponent = (beta * r.log()).add_(alpha)
        steep = exponent > math.log(STEEP)
        there = exponent.clamp_(max=math.log(-LOWEST)).exp_().neg_()
    # The root's square: r^θβ alone would leave float32's range.
    root = (0.5 * alpha).exp() * r.masked_fill(steep, 1.0) ** (0.5 * beta)
    return torch.where(steep, there, -root * root), steep


@dataclass(frozen=True)
class GgdTable:
    """table = Σ over axes of t,  t = −exp(θα)·r^θβ,  r = |x| + 1e−5,  x = −d − μ,  μ = 2·sinh θμ,
    and so

        ∂t/∂θα = t,    ∂t/∂θβ = t·ln r,    ∂t/∂θμ = −2·cosh θμ · t·θβ/r · sign x,    all 0 where t <
        −1e4.

    Attributes:
        theta: (A, 3, H) θα, θβ, θμ of each axis.
        axes: displacement of each axis: "d" of a line; "y", "x", or "r" = √(y² + x²), of a grid.
        train_mu: whether θμ is one of the params; these are ordered by axis, then (θα, θβ, θμ).
    """

    theta: Tensor
    axes: tuple[str, ...]
    train_mu: bool

    @staticmethod
    def of(priors: Sequence[Ggd], axes: tuple[str, ...]) -> GgdTable:
        """From one prior per axis. Copies their parameters, which a sharding engine may free after
        the prior's forward."""
        rows = []
        for prior in priors:
            theta = torch.stack([prior.theta_alpha, prior.theta_beta, prior.theta_mu])
            rows.append(theta.to(prior_dtype(prior)))
        train_mu = any(prior.theta_mu.requires_grad for prior in priors)
        return GgdTable(torch.stack(rows), axes, train_mu)

    @property
    def log_factor(self) -> bool:
        return len(self.axes) == 1

    @property
    def params(self) -> Tensor:
        return (self.theta if self.train_mu else self.theta[:, :2]).flatten(0, 1)

    def of_heads(self, heads: slice | Tensor | Sequence[int]) -> GgdTable:
        return replace(self, theta=self.theta[:, :, heads])

    def jacobian(self, displacements: dict[str, Tensor]) -> Tensor:
        rows = []
        for axis, theta in zip(self.axes, self.theta.detach()[..., None], strict=True):
            if axis == "r":
                distance = torch.hypot(displacements["y"], displacements["x"])
            else:
                distance = displacements[axis]
            alpha, beta, mu = theta
            x = -distance - 2 * mu.sinh()
            r = x.abs() + EPSILON
            t, steep = _curve(alpha, beta, r)
            t = t.masked_fill(steep, 0.0)
            rows += [t, t * r.log()]
            if self.train_mu:
                rows.append(-2 * mu.cosh() * t * beta / r * x.sign())
        return torch.stack(rows)


class Ggd(TablePrior):
    """K[h,i,j] = −exp(θα_h)·(|j − i − μ_h| + 1e−5)^θβ_h, μ = e^θμ − e^−θμ; at least −1e30, and
    below −1e4 without gradients.

    θβ = 0 is no prior, θβ = 1 is ALiBi of slope exp(θα), θβ < 0 looks away from the query (a
    retrieval head).

    Args:
        init: "uniform" (θα = θβ = 0, the paper's best), "alibi" (θα = ln of the ALiBi slopes, θβ
            = 1), "linear" (θβ from 0 to 1 over the heads, slopes as ALiBi's) or "sampled" (both
            standard normal); or numbers, {"alpha": −36, "beta": 8}, of alpha, beta and mu; 0 where
            not named.
        train_alpha, train_beta, train_mu: whether each is trained; the others stay as they start.
    """

    by_head = ("theta_alpha", "theta_beta", "theta_mu")

    def __init__(
        self,
        num_heads: int,
        *,
        init: str | Mapping[str, float] = "uniform",
        train_alpha: bool = True,
        train_beta: bool = True,
        train_mu: bool = False,
    ) -> None:
        super().__init__(num_heads)
        check_flags(train_alpha=train_alpha, train_beta=train_beta, train_mu=train_mu)
        mu = torch.zeros(num_heads)
        if isinstance(init, Mapping):
            for name, value in init.items():
                if name not in ("alpha", "beta", "mu"):
                    raise ValueError(
                        f"init of a ggd prior: unknown parameter {name!r}; expected alpha, beta or "
                        "mu"
                    )
                check_number(f"init of a ggd prior: {name}", value)
            alpha = torch.full((num_heads,), float(init.get("alpha", 0)))
            beta = torch.full((num_heads,), float(init.get("beta", 0)))
            mu = torch.full((num_heads,), float(init.get("mu", 0)))
        elif init in INITS:
            alpha, beta = _start(init, num_heads)
        else:
            raise ValueError(f"unknown init {init!r} of a ggd prior; {nearest(str(init), INITS)}")
        self.theta_alpha = nn.Parameter(alpha, requires_grad=train_alpha)
        self.theta_beta = nn.Parameter(beta, requires_grad=train_beta)
        self.theta_mu = nn.Parameter(mu, requires_grad=train_mu)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        dtype = torch.promote_types(distance.dtype, torch.float32)
        lead = (self.num_heads,) + (1,) * distance.ndim
        alpha = self.theta_alpha.to(dtype).view(lead)
        beta = self.theta_beta.to(dtype).view(lead)
        mu = self.theta_mu.to(dtype).view(lead)
        r = (-distance - 2 * mu.sinh()).abs() + EPSILON
        return _curve(alpha, beta, r)[0]

    def parametric(self) -> GgdTable:
        return GgdTable.of([self], ("d",))

    def retrieval_heads(self, turned: Tensor | None = None) -> Tensor:
        """(H,) bool: θβ < 0 (BAM, theorems 3 and 4), or θβ > 0 where K is turned round."""
        looks_away = self.theta_beta < 0
        if turned is None:
            return looks_away
        return looks_away != turned.to(looks_away.device)


class Ggd2d(GridPrior):
    """The generalised Gaussian over the grid of patches; prefix tokens get 0.

    "isotropic": over the Euclidean patch distance, K = −exp(θα)·(√(dy² + dx²) + 1e−5)^θβ, part
    `.r`; "separable": a sum over the axes, parts `.y` and `.x`.

    Args:
        form: "isotropic" or "separable".
        init, train_alpha, train_beta: as in `Ggd`.
        train_mu: train θμ, which moves the centre of a separable prior off the query, so that a
            head can look to one side, and turns an isotropic one into a ring.
    """

    by_head = ()

    def __init__(
        self,
        num_heads: int,
        *,
        form: str = "isotropic",
        init: str | Mapping[str, float] = "uniform",
        train_alpha: bool = True,
        train_beta: bool = True,
        train_mu: bool = False,
    ) -> None:
        super().__init__(num_heads)
        if form not in ("isotropic", "separable"):
            raise ValueError(f"unknown form {form!r} of ggd2d; known: isotropic, separable")
        self.axes = ("r",) if form == "isotropic" else ("y", "x")
        for axis in self.axes:
            of_axis = Ggd(
                num_heads,
                init=init,
                train_alpha=train_alpha,
                train_beta=train_beta,
                train_mu=train_mu,
            )
            self.add_module(axis, of_axis)

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        distances = (torch.hypot(dy, dx),) if self.axes == ("r",) else (dy, dx)
        curves = [
            getattr(self, axis).curve(distance, causal=False)
            for axis, distance in zip(self.axes, distances, strict=True)
        ]
        return sum(curves[1:], curves[0])

    def parametric(self) -> GgdTable:
        return GgdTable.of([getattr(self, axis) for axis in self.axes], self.axes)
