"""Heads of queries, keys and values: lanes in front, grouped heads repeated, widths padded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_PRECISION = (torch.bfloat16, torch.float16)


def fold_lanes(heads: Tensor, lanes: Tensor) -> Tensor:
    """Put lanes (1 or B, 1 or H, L, R) in front of head columns (B, G, L, d): (B, G or H, L, R+d).

    Lanes of an unbounded prior cancel, and should do so before content enters the float32
    accumulator. Lanes of each query head make the keys of a group differ, so grouped keys are
    repeated.
    """
    if lanes.shape[1] not in (1, heads.shape[1]):
        heads = repeat_heads(heads, lanes.shape[1])
    lanes = lanes.to(heads.dtype).expand(heads.shape[0], heads.shape[1], -1, -1)
    return torch.cat([lanes, heads], dim=-1)


def repeat_heads(heads: Tensor, num_heads: int) -> Tensor:
    """(B, G, L, D) → (B, num_heads, L, D): each key head serves num_heads/G neighbouring query
    heads."""
    groups = heads.shape[1]
    return heads if groups == num_heads else heads.repeat_interleave(num_heads // groups, dim=1)


def pad_heads(*heads: Tensor) -> list[Tensor]:
    """Pad columns with zeros to the widest, rounded up to a multiple of 8, as fused kernels
    require."""
    width = -(-max(h.shape[-1] for h in heads) // 8) * 8
    return [h if h.shape[-1] == width else F.pad(h, (0, width - h.shape[-1])) for h in heads]


def in_half_precision(heads: Tensor) -> bool:
    """Whether heads are in bfloat16 or float16, to which lanes are rounded."""
    return heads.dtype in HALF_PRECISION
