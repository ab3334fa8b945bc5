"""Parametric tables: the Jacobian reduces a gradient of K to that of the parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.zoo.priors_table import make
from zoo import Positions, RelativeTable, compose, create_prior
from zoo.priors import Prior

HEADS = 3
LINE = Positions.line(11)
GRID = Positions.grid(3, 5, num_prefix=2)
CASES = {
    "line": ("ggd", {}, LINE, LINE),
    "line-mu": ("ggd", {"train_mu": True}, LINE, LINE),
    "line-alibi": ("ggd", {"init": "alibi", "train_mu": True}, LINE, LINE),
    "line-offset": ("ggd", {"train_mu": True}, Positions.line(4, offset=7), LINE),
    "isotropic": ("ggd2d", {"form": "isotropic", "train_mu": True}, GRID, GRID),
    "isotropic-no-mu": ("ggd2d", {"form": "isotropic"}, GRID, GRID),
    "separable": ("ggd2d", {"form": "separable", "train_mu": True}, GRID, GRID),
    "kerple": ("kerple", {}, Positions.line(4, offset=7), LINE),
    "kerple-grid": ("kerple2d", {}, GRID, GRID),
    "separable-tall": ("ggd2d", {"form": "separable"}, Positions.grid(4, 2), Positions.grid(4, 2)),
}


def build(name: str, options: dict, q_pos: Positions, k_pos: Positions) -> tuple[Prior, RelativeTable]:
    prior = make(name, num_heads=HEADS, **({"train_mu": False, **options} if "ggd" in name else options))
    if name.startswith("kerple"):  # above the least values, below which there is no gradient
        for parameter in prior.parameters():
            parameter.data.abs_().add_(0.1)
    table = prior(q_pos, k_pos, causal=False).table
    assert table is not None
    return prior, table


def direction(table: RelativeTable) -> Tensor:
    """(1, H, T, S) a gradient of K, another one for every head."""
    shape = table.dense().shape
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_jacobian(table: RelativeTable, grad: Tensor) -> Tensor:
    """(P, H): Σ_ij dK_ij · ∂table/∂params, as a kernel sums it."""
    return torch.stack(
        [(replace(table, table=t, parametric=None).dense() * grad).sum((0, 2, 3)) for t in table.jacobian()]
    )


def gradients(prior: Prior, of: Tensor, grad: Tensor) -> dict[str, Tensor]:
    trained = {name: p for name, p in prior.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(of, list(trained.values()), grad, retain_graph=True)
    return dict(zip(trained, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_jacobians_sum_to_every_parameters_gradient(case: str) -> None:
    prior, table = build(*CASES[case])
    assert table.parametric is not None
    grad, params = direction(table), table.parametric.params
    assert params.shape == table.jacobian().shape[:2] and not table.jacobian().requires_grad
    expected = gradients(prior, table.dense(), grad)
    got = gradients(prior, params, by_jacobian(table, grad))
    assert len(expected) == len(params) > 0
    if table.parametric.log_factor:
        torch.testing.assert_close(table.jacobian()[0], table.table.detach(), rtol=1e-12, atol=0)
    for name, want in expected.items():
        # Sums of a few hundred float64 products in another order.
        torch.testing.assert_close(got[name], want, rtol=1e-11, atol=1e-11, msg=name)
        assert bool((want.abs() > 1e-3).all())


def test_a_sum_of_tables_is_not_parametric() -> None:
    prior, table = build(*CASES["line"])
    assert (table + table).parametric is None
    both = compose(prior, make("t5", num_heads=HEADS))(LINE, LINE, causal=True).table
    assert both is not None and both.parametric is None
    alone = compose(prior, create_prior("uniform", num_heads=HEADS))(LINE, LINE, causal=True).table
    assert alone is not None and alone.parametric is not None
    with pytest.raises(ValueError, match="not parametric"):
        both.jacobian()
