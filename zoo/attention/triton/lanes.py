"""Lanes put in front of the columns of q and k: one launch, which casts, scales and repeats. Lanes of a ramp: another."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.attention.triton.common import cdiv, located, narrow, on_device, power_of_two

ROWS = 64  # of a program
NUMBERS = 256  # of a ramp, of a program


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


@triton.jit(do_not_specialize=["programs", "queries", "keys"])
def _ramp(at_query, q_lanes, ramp, k_lanes, programs, queries, keys, LANES: tl.constexpr, NUMBERS: tl.constexpr):
    """The first `programs` programs write the lanes of queries, the others those of keys."""
    program = tl.program_id(0)
    of_query = program < programs
    count = tl.where(of_query, queries, keys)
    n = tl.where(of_query, program, program - programs) * NUMBERS + tl.arange(0, NUMBERS)
    inside = n < count
    far = n.to(tl.int64) * LANES
    if of_query:
        rest = tl.load(at_query + n, mask=inside, other=0.0)
        bulk = narrow(rest.to(tl.float32), tl.bfloat16).to(q_lanes.dtype.element_ty)
        tl.store(q_lanes + far, -bulk, mask=inside)
        for lane in tl.static_range(1, LANES):
            tl.store(q_lanes + far + lane, 1.0, mask=inside)
    else:
        rest = tl.load(ramp + n, mask=inside, other=0.0)
        tl.store(k_lanes + far, 1.0, mask=inside)
        for lane in tl.static_range(1, LANES - 1):
            piece = narrow(rest.to(tl.float32), tl.bfloat16)
            tl.store(k_lanes + far + lane, piece.to(k_lanes.dtype.element_ty), mask=inside)
            rest -= piece.to(tl.float64)
        tl.store(k_lanes + far + (LANES - 1), rest.to(k_lanes.dtype.element_ty), mask=inside)


class _RampLanes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ramp: Tensor, at_query: Tensor, lanes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ramp, at_query = ramp.contiguous(), at_query.contiguous()
        q_lanes, k_lanes = (x.new_empty(*x.shape, lanes, dtype=dtype) for x in (at_query, ramp))
        programs, of_keys = (cdiv(x.numel(), NUMBERS) for x in (at_query, ramp))
        with on_device(ramp):
            _ramp[(programs + of_keys,)](
                at_query, q_lanes, ramp, k_lanes, programs, at_query.numel(), ramp.numel(), LANES=lanes, NUMBERS=NUMBERS,
                num_warps=4,
            )  # fmt: skip
        ctx.mark_non_differentiable(q_lanes)
        ctx.dtype = ramp.dtype
        return q_lanes, k_lanes

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[..., 1].to(ctx.dtype), None, None, None


def ramp_lanes(ramp: Tensor, at_query: Tensor, lanes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `zoo.priors.alibi.ramp_lanes` makes by torch, to the bit, with its gradient.

    Args:
        ramp, at_query: (1 or B, H, S) and (1 or B, H, T) float64.

    Returns:
        (1 or B, H, T, `lanes`), (1 or B, H, S, `lanes`) in `dtype`: float32 or float64.
    """
    return _RampLanes.apply(ramp, at_query.detach(), lanes, dtype)
