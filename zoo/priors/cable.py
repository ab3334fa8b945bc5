"""CABLE: a recency penalty with a learned rate per token (arXiv 2503.08067)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_flags, check_whole, nearest
from zoo.positions import Positions
from zoo.priors.base import Prior, linear_in, prior_dtype
from zoo.priors.lanes import bf16_pieces
from zoo.priors.terms import PriorTerms

# K = w_i·S_j as products of bfloat16 pieces, the significant ones only: piece a of w with piece b
# of S is of order 2^(−8(a+b)). S grows to about 2^20, so the dropped products (a + b >= 4) stay
# below 2^-10 logits.
_PIECES = [(a, total - a) for total in range(4) for a in range(min(total, 2) + 1)]
# w = 1 is its first piece.
_UNWEIGHTED = [(0, b) for b in range(4)]
# The decay's gate: the paper's, its released code's, and forgetting attention's, whose decay is
# −log sigmoid.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "softplus": F.softplus,
    "logsigmoid": lambda x: F.softplus(-x),
}


class Cable(Prior):
    """K[h,i,j] = −w_i·(S_i − S_j),  S = cumsum(gate(W_c x + b)),  w_i = softplus(W_s x_i);  causal
    only.

    w_i·S_i is a row constant, so K ≡ w_i·S_j: lanes in split precision. The paper prints the
    opposite sign, which would reward distance.

    Args:
        d_model: C, the width of the layer's input.
        weighted: False drops w (w = 1), as the released code does.
        gate: "relu" as the paper prints it, "softplus" as its code has it, or "logsigmoid": −log
            sigmoid(W_c x + b), which with `weighted=False` is forgetting attention (FoX, arXiv
            2503.02130).
        bias: whether W_c x has b; eq. 2 prints none, the released code has one.
    """

    depends_on_content = True
    has_state = True
    by_head = ()

    def __init__(
        self,
        num_heads: int,
        *,
        d_model: int,
        weighted: bool = True,
        gate: str = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__(num_heads)
        check_whole("d_model of cable", d_model, 1)
        check_flags(weighted=weighted, bias=bias)
        if gate not in GATES:
            raise ValueError(f"unknown gate {gate!r} of cable; {nearest(gate, GATES)}")
        self.gate = gate
        self.pieces = _PIECES if weighted else _UNWEIGHTED
        self.num_lanes = len(self.pieces) + 1
        self.decay = nn.Linear(d_model, num_heads, bias=bias)
        self.weight = nn.Linear(d_model, num_heads, bias=False) if weighted else None

    def content(self, x: Tensor) -> Tensor:
        """(B, H, L, 1 or 2) float32 or wider: the decay of each key, and the weight of each query
        where there are weights."""
        wide = x.to(prior_dtype(self))
        decay = GATES[self.gate](linear_in(self.decay, wide)).transpose(1, 2)
        if self.weight is None:
            return decay[..., None]
        # Contiguous before softplus: torch.compile's gradient of softplus confuses the strides of
        # input and output.
        weight = F.softplus(linear_in(self.weight, wide).transpose(1, 2).contiguous())
        return torch.stack([decay, weight], dim=-1)

    def rates(self, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Decay per key and weight per query, both (B, H, L) float64."""
        if x is None:
            raise ValueError("CABLE's log-prior depends on the layer's input: pass x (B, L, C)")
        content = self.content(x).double()
        decay = content[..., 0]
        weight = torch.ones_like(decay) if self.weight is None else content[..., 1]
        return decay, weight

    def forward(
        self,
        q_pos: Positions,
        k_pos: Positions,
        *,
        causal: bool,
        x: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> PriorTerms:
        """x holds the inputs at `k_pos`, whose last T are the queries; `carry` (B, H) float64 is S
        before the first key."""
        if not causal:
            raise ValueError("CABLE is defined for causal attention only")
        self.require_line(q_pos, k_pos)
        decay, weight = self.rates(x)
        total = decay.cumsum(-1)
        if carry is not None:
            total = total + carry[..., None]
        weight = weight[..., k_pos.length - q_pos.length :]
        at_query = total[..., k_pos.length - q_pos.length :]
        w = torch.stack(bf16_pieces(weight, 3, weight.dtype), dim=-1)
        s = torch.stack(bf16_pieces(total, 4, total.dtype), dim=-1)
        # Subtract the bulk of S_i first: a row constant that keeps a kernel's float32 sums small
        # near the query.
        bulk = -(weight * at_query).detach().to(torch.bfloat16).to(weight.dtype)[..., None]
        of_w = [a for a, _ in self.pieces]
        of_s = [b for _, b in self.pieces]
        q_lanes = torch.cat([bulk, w[..., of_w]], dim=-1)
        k_lanes = torch.cat([torch.ones_like(s[..., :1]), s[..., of_s]], dim=-1)
        dtype = prior_dtype(self)
        return PriorTerms(
            q_lanes.to(dtype),
            k_lanes.to(dtype),
            carry=total.detach(),
            causal=True,
            offset=q_pos.offset - k_pos.offset,
            in_pieces=True,
        )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        decay, weight = self.rates(x)
        total = decay.cumsum(-1)
        first = k_pos.length - q_pos.length
        return -weight[..., first:, None] * (total[..., first:, None] - total[..., None, :])
