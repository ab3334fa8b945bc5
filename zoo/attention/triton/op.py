"""The fused kernels as operators of torch: shapes for its compiler, gradients for autograd.

`priorzoo::attention` is opaque to torch.compile, so a whole model compiles without a graph break. It saves O(T + S) for the
backward pass beside its inputs: the output, one log-sum-exp per row, and the plan's intervals of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.attention.base import has_values
from zoo.attention.triton import common
from zoo.attention.triton.backward import attention_backward, output_gradient
from zoo.attention.triton.bias_grad import bias_gradient
from zoo.attention.triton.common import Geometry, Operands, cdiv, last_axis_contiguous
from zoo.attention.triton.decode import decode
from zoo.attention.triton.forward import attention_forward
from zoo.attention.triton.lanes import fold, unfold_keys, unfold_queries
from zoo.attention.triton.plan import Plan, make_plan
from zoo.attention.triton.table_grad import table_gradient


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: int,
    origin: int,
    grid: list[int],
    lanes: int,
    softmax_scale: float,
    table2: Tensor | None = None,
) -> Operands:
    """An operator's flat arguments, which torch asks for, as one object; grid [height, width, prefix], or [] on a line."""
    height, width, prefix = grid or (0, 0, 0)
    geometry = Geometry(
        batch=q.shape[0],
        heads=q.shape[1],
        groups=k.shape[1],
        queries=q.shape[2],
        keys=k.shape[2],
        width_k=q.shape[3],
        width_v=v.shape[3],
        lanes=lanes,
        causal=causal,
        window=window,
        origin=origin,
        grid_height=height,
        grid_width=width,
        prefix=prefix,
        softmax_scale=softmax_scale,
    )
    return Operands(q, k, v, table, row_scale, segments, geometry, bias, table2)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    bias: Tensor | None,
    params: Tensor | None,
    jacobian: Tensor | None,
    table2: Tensor | None,
    q_lanes: Tensor | None,
    k_lanes: Tensor | None,
    causal: bool,
    window: int,
    origin: int,
    grid: list[int],
    lanes: int,
    softmax_scale: float,
    constant_from: int,
    skip: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """softmax( row_scale ∘ (softmax_scale·q·kᵀ + table[index] + bias) ) v over the visible keys.

    Args:
        q, k, v: (B,H,T,Dk), (B,G,S,Dk), (B,G,S,Dv), lanes first; less their lanes where those are given apart.
        table, row_scale, segments, bias: see `Operands`.
        params, jacobian: (P, H) and (P, H, N) float32 of a parametric table: params then get the gradient
            Σ_ij dS_ij·row_scale_i·jacobian[p, h, index(i, j)], and the table gets none. A jacobian of P − 1 rows lacks the
            first, which is the table.
        table2: the table in base 2, see `Operands`; None: made here. The backward pass makes its own, whose memory is aligned.
        q_lanes, k_lanes: lanes as a prior gives them, to be put in front of q, scaled, and k (`fold`), or None.
        causal, window (0: none), origin, grid, lanes, softmax_scale: see `Geometry`.
        constant_from: the distance from which on the table's gradient may be in one column (0: none), see `table_gradient`.
        skip: skip tiles whose weight the plan bounds as negligible.

    Returns:
        out (B,H,T,Dv); log2-sum-exp (B,H,T); the plan's rows, empty without a plan; q and k with the lanes that
        were apart, empty where none were.
    """
    folded_q = folded_k = None
    if q_lanes is not None:
        q, folded_k = fold(q, k, q_lanes, k_lanes)
        folded_q, k = q, k if folded_k is None else folded_k
    call = operands(
        q, k, v, table, row_scale, segments, bias, causal, window, origin, grid, lanes, softmax_scale, table2
    )
    plan = make_plan(call) if skip else None
    out, lse2 = attention_forward(call, plan)
    rows = torch.empty(2, 0, 0, dtype=torch.int32, device=q.device) if plan is None else plan.rows
    folded_q, folded_k = (q.new_empty(0) if x is None else x for x in (folded_q, folded_k))
    return out, lse2, rows, folded_q, folded_k


@torch.library.custom_op("priorzoo::attention_backward", mutates_args=())
def _backward_op(
    grad_out: Tensor,
    grad_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    bias: Tensor | None,
    params: Tensor | None,
    jacobian: Tensor | None,
    out: Tensor,
    lse2: Tensor,
    rows: Tensor,
    causal: bool,
    window: int,
    origin: int,
    grid: list[int],
    lanes: int,
    softmax_scale: float,
    constant_from: int,
    needs_table: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, table, row_scale, bias and params; empty tensors for absent ones."""
    call = operands(q, k, v, table, row_scale, segments, bias, causal, window, origin, grid, lanes, softmax_scale)
    plan = Plan(rows, call.geometry) if rows.numel() else None
    upstream = output_gradient(grad_out, out, lse2, call.geometry, grad_lse2)
    log_factor = params is not None and jacobian is not None and len(params) > len(jacobian)
    dq, dk, dv, d_scale, d_params = attention_backward(call, upstream, plan, jacobian, log_factor)
    d_table = None
    if needs_table and table is not None:
        d_table = table_gradient(call, upstream, plan, constant_from)
    d_bias = bias_gradient(call, upstream) if needs_bias and bias is not None else None
    if d_scale is not None and row_scale is not None and row_scale.shape[0] == 1 != q.shape[0]:
        d_scale = d_scale.sum(0, keepdim=True)
    none = torch.empty(0, device=q.device)
    d_table, d_scale, d_bias, d_params = (
        none.clone() if x is None else x for x in (d_table, d_scale, d_bias, d_params)
    )
    return dq, dk, dv, d_table, d_scale, d_bias, d_params


# The operator is for torch.compile; an eager call takes `_Attention`: the operator's bookkeeping takes the host longer than all
# that it launches.
attention_op = torch.library.custom_op("priorzoo::attention", mutates_args=())(_attention)


@attention_op.register_fake
def _(q, k, v, table, row_scale, segments, bias, params, jacobian, table2, q_lanes, k_lanes, *scalars):
    lanes, skip = scalars[4], scalars[-1]
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse2 = q.new_empty(q.shape[:3], dtype=torch.float32)
    heads = q.shape[0] * q.shape[1]
    rows = q.new_empty((2, heads, cdiv(q.shape[2], common.TILE)) if skip else (2, 0, 0), dtype=torch.int32)
    wide_q = q.new_empty(0 if q_lanes is None else (*q.shape[:3], q.shape[3] + lanes))
    groups = k.shape[1] if k_lanes is None else max(k.shape[1], k_lanes.shape[1])
    wide_k = k.new_empty(0 if k_lanes is None else (k.shape[0], groups, k.shape[2], k.shape[3] + lanes))
    return out, lse2, rows, wide_q, wide_k


@_backward_op.register_fake
def _(grad_out, grad_lse2, q, k, v, table, row_scale, segments, bias, params, jacobian, *rest):
    def like(x: Tensor | None) -> Tensor:
        return q.new_empty(0 if x is None else x.shape, dtype=torch.float32)

    needs_table, needs_bias = rest[-2:]
    d_table = like(table if needs_table else None)
    d_bias = torch.empty_like(bias) if needs_bias and bias is not None else like(None)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_table, like(row_scale), d_bias, like(params)


def _setup_context(ctx, inputs, output):
    q, k, *others, _, q_lanes, k_lanes, causal, window, origin, grid, lanes, softmax_scale, constant_from, _ = inputs
    *outputs, folded_q, folded_k = output
    q_saved, k_saved = q if q_lanes is None else folded_q, k if k_lanes is None else folded_k
    ctx.save_for_backward(q_saved, k_saved, *others, *outputs)
    ctx.scalars = (causal, window, origin, grid, lanes, softmax_scale, constant_from)
    ctx.groups, ctx.apart = k.shape[1], [None if x is None else (x.shape, x.dtype) for x in (q_lanes, k_lanes)]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_out, grad_lse2, *_):
    needs, lanes = ctx.needs_input_grad, ctx.scalars[4]
    dq, dk, dv, *grads = _backward_op(grad_out, grad_lse2, *ctx.saved_tensors, *ctx.scalars, needs[3], needs[6])
    of = (needs[3], needs[4], needs[6], needs[7])
    d_table, d_scale, d_bias, d_params = (g if need else None for g, need in zip(grads, of, strict=True))
    lane_grads: list[Tensor | None] = [None, None]
    if ctx.apart[0] is not None:
        dq, lane_grads[0] = unfold_queries(dq, lanes)
    if ctx.apart[1] is not None:
        dk, lane_grads[1] = unfold_keys(dk, lanes, ctx.groups)
    for n, grad in enumerate(lane_grads):
        if grad is not None:  # summed over batch rows or heads that share lanes
            shape, dtype = ctx.apart[n]
            lane_grads[n] = grad.sum_to_size(shape).to(dtype) if needs[10 + n] else None
    return (dq, dk, dv, d_table, d_scale, None, d_bias, d_params, None, None, *lane_grads, *[None] * 8)


def _no_second_derivative(ctx, *_):
    raise RuntimeError("kernel 'triton' has no second derivative; use kernel='reference' with create_graph=True")


attention_op.register_autograd(_gradients, setup_context=_setup_context)
_backward_op.register_autograd(_no_second_derivative)


class _Attention(torch.autograd.Function):
    """`attention_op` of an eager call; the same functions in both directions."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _attention(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


def fused_attention(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """The attention of `attention_op`, with its arguments, and the log2-sum-exp; both differentiable."""
    by_torch = torch.compiler.is_compiling() or not has_values(q)  # which propagates shapes by the operator
    attend = attention_op if by_torch else _Attention.apply
    return attend(q, *others)[:2]


def fused_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    causal: bool,
    window: int,
    origin: int,
    grid: list[int],
    lanes: int,
    softmax_scale: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`attention_op` of few queries on a line, without gradients: its output and log2-sum-exp, empty if not wanted."""
    table = None if table is None else last_axis_contiguous(table)
    return decode(
        operands(q, k, v, table, row_scale, segments, None, causal, window, origin, grid, lanes, softmax_scale),
        wants_lse=wants_lse,
    )


# The operator is for torch.compile; eager decoding calls the function directly and saves the operator's host overhead.
decode_op = torch.library.custom_op("priorzoo::attention_decode", mutates_args=())(fused_decode)


@decode_op.register_fake
def _(q, k, v, *rest):
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3] if rest[-1] else 0, dtype=torch.float32)
