"""Scale-invariant attention (arXiv 2505.17083)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zoo.errors import check_number
from zoo.positions import Positions
from zoo.priors.base import TablePrior
from zoo.priors.terms import PriorTerms


class ScaleInvariant(TablePrior):
    """Scale-invariant attention (arXiv 2505.17083): logits a(d)·⟨q, k⟩/√d_c + m(d), a(d)² = 1
    + 2·ln(1 + d/τ), K = m(d) = 1 − a(d)², d = abs(i − j). Of Gaussian logits tokens 10 to 100 back
    weigh in all what those 100 to 1000 back do.

    The factor makes a T × S matrix for each head. The paper adds it to a partial rotation:
    "rope+scale_invariant".

    Args:
        tau: τ, in tokens.
    """

    by_head = ()

    def __init__(self, num_heads: int, *, tau: float = 10.0) -> None:
        super().__init__(num_heads)
        check_number("tau", tau, above=0)
        self.tau = float(tau)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        return (-2 * torch.log1p(distance.abs() / self.tau)).expand(self.num_heads, *distance.shape)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        terms = super().forward(q_pos, k_pos, causal=causal, x=x)
        assert terms.table is not None
        return replace(terms, gain=replace(terms.table, table=(1 - terms.table.table).sqrt()))

    def next_row(self, length: int) -> None:
        return None
