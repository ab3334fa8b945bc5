"""Lanes put in front of the columns of q and k: one launch, which casts, scales and repeats on the way."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton.common import cdiv, located, narrow, on_device, power_of_two

__all__ = ["fold", "unfold_keys", "unfold_queries"]

ROWS = 64  # of a program


@triton.jit
def _fold_rows(
    heads, lanes, out, row, start, count, length, share, scale, LANES: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_LANES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS rows of head `row` (of all batch rows and `count` heads), from `start` on, with their lanes."""
    heads, heads_b, heads_h, heads_t, heads_c = heads
    lanes, lanes_b, lanes_h, lanes_t, lanes_c = lanes
    b, h = row // count, row % count
    r, c, at = start + tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :], tl.arange(0, PADDED_LANES)[None, :]
    far, inside = r.to(tl.int64), r < length
    heads += b * heads_b + h // share * heads_h
    content = tl.load(heads + far * heads_t + c * heads_c, mask=inside & (c < WIDTH), other=0.0)
    lanes += b * lanes_b + h * lanes_h
    value = tl.load(lanes + far * lanes_t + at * lanes_c, mask=inside & (at < LANES), other=0.0)
    out += (row * length + far) * (LANES + WIDTH)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + LANES + c, narrow(content.to(tl.float32) * scale, dtype), mask=inside & (c < WIDTH))
    tl.store(out + at, narrow(value.to(tl.float32), dtype), mask=inside & (at < LANES))


@triton.jit(do_not_specialize=["programs", "q_heads", "k_heads", "queries", "keys", "share"])
def _fold(
    q, q_lanes, q_out, k, k_lanes, k_out, programs, q_heads, k_heads, queries, keys, share, scale,
    LANES: tl.constexpr, WIDTH: tl.constexpr, PADDED_LANES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The first `programs` programs fold queries, the others keys."""
    at = tl.program_id(0)
    if at < programs:
        blocks = tl.cdiv(queries, ROWS)
        row = (at // blocks).to(tl.int64)
        _fold_rows(
            q, q_lanes, q_out, row, at % blocks * ROWS, q_heads, queries, 1, scale,
            LANES, WIDTH, PADDED_LANES, PADDED, ROWS,
        )  # fmt: skip
    elif k_out is not None:
        blocks, at = tl.cdiv(keys, ROWS), at - programs
        row = (at // blocks).to(tl.int64)
        _fold_rows(
            k, k_lanes, k_out, row, at % blocks * ROWS, k_heads, keys, share, 1.0,
            LANES, WIDTH, PADDED_LANES, PADDED, ROWS,
        )  # fmt: skip


def fold(q: Tensor, k: Tensor, q_lanes: Tensor, k_lanes: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What `AttentionCall.unscaled` and `AttentionCall.keys` are: q over the square root of its width, lanes in front of both.

    Args:
        q, k: (B,H,T,d), (B,G,S,d), any strides.
        q_lanes, k_lanes: (1 or B, 1 or H, T, R), (1 or B, 1 or H, S, R) of any floating dtype and strides; None: k has its.

    Returns:
        (B,H,T,R+d); (B,G',S,R+d) or None, G' being H where heads have key lanes of their own, else G.
    """
    (batch, heads, queries, width), keys, lanes = q.shape, k.shape[2], q_lanes.shape[3]
    q_out = q.new_empty(batch, heads, queries, lanes + width)
    groups, k_out, at_k = k.shape[1], None, None
    if k_lanes is not None:
        groups = max(groups, k_lanes.shape[1])
        k_out, at_k = k.new_empty(batch, groups, keys, lanes + width), located(k_lanes)
    of_q, of_k = (cdiv(length, ROWS) * batch * count for length, count in ((queries, heads), (keys, groups)))
    with on_device(q):
        _fold[(of_q + (0 if k_out is None else of_k),)](
            located(q), located(q_lanes), q_out, located(k), at_k, k_out, of_q, heads, groups, queries, keys,
            groups // k.shape[1], 1.0 / math.sqrt(width), LANES=lanes, WIDTH=width,
            PADDED_LANES=power_of_two(lanes), PADDED=power_of_two(width), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


def unfold_queries(grad: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """The gradients of q and of its lanes in each batch row and head, from that of what `fold` makes of them."""
    return grad[..., lanes:] * (1.0 / math.sqrt(grad.shape[-1] - lanes)), grad[..., :lanes]


def unfold_keys(grad: Tensor, lanes: int, groups: int) -> tuple[Tensor, Tensor]:
    """Those of k (B, `groups`, S, d) and of its lanes."""
    content = grad[..., lanes:]
    if groups != grad.shape[1]:
        content = content.unflatten(1, (groups, -1)).sum(2)
    return content, grad[..., :lanes]
