"""Lanes that stay exact in bfloat16: a number as a sum of pieces, and a growing ramp less its value
at the query."""

from __future__ import annotations

import torch
from torch import Tensor

# Four bfloat16 pieces carry 36 significant bits: a ramp of slope 1 has error 2^-16 at position
# 2^20. One more lane subtracts the bulk of the ramp at the query's own position, which keeps a
# kernel's float32 sums small.
RAMP_PIECES = 4
RAMP_LANES = RAMP_PIECES + 1


def ramp_lanes(ramp: Tensor, at_query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lanes of K[i,j] = ramp[j], exact to bfloat16 pieces, less a row constant near ramp at the
    query.

    Args:
        ramp: (1 or B, H, S) float64, differentiable; it may grow without bound.
        at_query: (1 or B, H, T) float64, the ramp's value at each query.
    Returns:
        q_lanes (1 or B, H, T, RAMP_LANES), k_lanes (1 or B, H, S, RAMP_LANES), in `dtype`.
    """
    pieces = bf16_pieces(ramp, RAMP_PIECES, dtype)
    if at_query is ramp:
        bulk = -pieces[0].detach()
    else:
        bulk = -at_query.to(torch.bfloat16).to(dtype).detach()
    q_ones = torch.ones_like(bulk)
    k_ones = torch.ones_like(pieces[0])
    # Largest first: bulk cancels the leading piece before the smaller ones are summed.
    q_lanes = torch.stack([bulk, *[q_ones] * RAMP_PIECES], dim=-1)
    k_lanes = torch.stack([k_ones, *pieces], dim=-1)
    return q_lanes, k_lanes


def bf16_pieces(value: Tensor, pieces: int, dtype: torch.dtype) -> list[Tensor]:
    """`value` (float64) as summands in `dtype`, all but the last exact in bfloat16, the last the
    remainder.

    Each piece adds 8 significant bits, so in bfloat16 the error of the sum is at most
    2^(−9·pieces)·abs(value). The gradient reaches `value` through the first piece alone: its lanes
    multiply the same partner as all the others.
    """
    rest = value.detach()
    parts = []
    for _ in range(pieces - 1):
        part = rest.to(torch.bfloat16)
        parts.append(part.to(dtype))
        rest = rest - part
    parts.append(rest.to(dtype))
    if value.requires_grad:
        # Plus 0, with the gradient.
        parts[0] = parts[0] + (value - value.detach()).to(dtype)
    return parts


# Pieces a of one factor and b of the other whose product counts: all others are below 2^−24 of K.
_PRODUCTS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))


def product_pieces(q_lanes: Tensor, k_lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Lanes of any numbers as lanes that are exact in bfloat16: six for each, the same K.

    Args:
        q_lanes, k_lanes: (…, R) in float32 or float64.
    Returns:
        both (…, 6·R) in their dtypes; their products sum to K but for 2^−24 of each lane's.
    """
    q_pieces = bf16_pieces(q_lanes.double(), 3, q_lanes.dtype)
    k_pieces = bf16_pieces(k_lanes.double(), 3, k_lanes.dtype)
    q_parts = [q_pieces[a] for a, _ in _PRODUCTS]
    k_parts = [k_pieces[b] for _, b in _PRODUCTS]
    return torch.cat(q_parts, dim=-1), torch.cat(k_parts, dim=-1)
