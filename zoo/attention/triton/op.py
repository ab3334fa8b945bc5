"""The fused kernels as operators of torch: shapes for its compiler, gradients for autograd.

`priorzoo::attention` is opaque to torch.compile, so a whole model compiles without a graph break.
It saves O(T + S) for the backward pass beside its inputs: the output, one log-sum-exp per row, and
the plan's intervals of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.attention.tracing import has_values
from zoo.attention.triton import common
from zoo.attention.triton.backward import attention_backward, output_gradient
from zoo.attention.triton.common import Geometry, Operands, cdiv, last_axis_contiguous
from zoo.attention.triton.decode import decode
from zoo.attention.triton.forward import attention_forward
from zoo.attention.triton.plan import Plan, make_plan
from zoo.attention.triton.table_grad import table_gradient


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    place: list[int],
    softmax_scale: float,
) -> Operands:
    """An operator's flat arguments, which torch asks for, as one object.

    place: [causal, window, origin, lanes] on a line; on a grid with its [height, width, prefix]
    behind.
    """
    batch, heads, queries, width_k = q.shape
    causal, window, origin, lanes, *grid = place
    height, width, prefix = grid or (0, 0, 0)
    geometry = Geometry(
        batch=batch,
        heads=heads,
        groups=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        width_k=width_k,
        width_v=v.shape[3],
        lanes=lanes,
        causal=bool(causal),
        window=window,
        origin=origin,
        grid_height=height,
        grid_width=width,
        prefix=prefix,
        softmax_scale=softmax_scale,
    )
    return Operands(q, k, v, table, row_scale, segments, geometry)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    params: Tensor | None,
    jacobian: Tensor | None,
    place: list[int],
    softmax_scale: float,
    constant_from: int,
    skip: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output (B,H,T,Dv), log2-sum-exp (B,H,T) and the plan's rows, empty without `skip`, of
    `Operands` and `Geometry`.

    params, jacobian: of a parametric table, (P, H) and (P or, see `FusedTable`, P − 1, H, N):
    params get the gradient Σ_ij dS_ij·row_scale_i·jacobian[p, h, index(i, j)], and the table gets
    none. constant_from: as in `table_gradient`.
    """
    call = operands(q, k, v, table, row_scale, segments, place, softmax_scale)
    plan = make_plan(call) if skip else None
    out, lse2 = attention_forward(call, plan)
    if plan is None:
        rows = torch.empty(2, 0, 0, dtype=torch.int32, device=q.device)
    else:
        rows = plan.rows
    return out, lse2, rows


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
    params: Tensor | None,
    jacobian: Tensor | None,
    out: Tensor,
    lse2: Tensor,
    rows: Tensor,
    place: list[int],
    softmax_scale: float,
    constant_from: int,
    needs_table: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, table, row_scale and params; empty tensors for absent ones."""
    call = operands(q, k, v, table, row_scale, segments, place, softmax_scale)
    plan = Plan(rows, call.geometry) if rows.numel() else None
    upstream = output_gradient(grad_out, out, lse2, call.geometry, grad_lse2)
    log_factor = params is not None and jacobian is not None and len(params) > len(jacobian)
    dq, dk, dv, d_scale, d_params = attention_backward(call, upstream, plan, jacobian, log_factor)
    d_table = None
    if needs_table and table is not None:
        d_table = table_gradient(call, upstream, plan, constant_from)
    if d_scale is not None and row_scale is not None:
        # The batch shares its scales.
        if row_scale.shape[0] == 1 and q.shape[0] != 1:
            d_scale = d_scale.sum(0, keepdim=True)

    def or_empty(gradient: Tensor | None) -> Tensor:
        return torch.empty(0, device=q.device) if gradient is None else gradient

    return dq, dk, dv, or_empty(d_table), or_empty(d_scale), or_empty(d_params)


# For torch.compile. An eager call takes `_Attention`: an operator's bookkeeping takes the host
# longer than all launches.
attention_op = torch.library.custom_op("priorzoo::attention", mutates_args=())(_attention)


@attention_op.register_fake
def _(q, k, v, table, row_scale, segments, params, jacobian, *scalars):
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse2 = q.new_empty(q.shape[:3], dtype=torch.float32)
    skip = scalars[-1]
    shape = (2, 0, 0)
    if skip:
        shape = (2, q.shape[0] * q.shape[1], cdiv(q.shape[2], common.TILE))
    return out, lse2, q.new_empty(shape, dtype=torch.int32)


@_backward_op.register_fake
def _(grad_out, grad_lse2, q, k, v, table, row_scale, segments, params, jacobian, *rest):
    def gradient(x):
        return q.new_empty(0 if x is None else x.shape, dtype=torch.float32)

    needs_table = rest[-1]
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        gradient(table if needs_table else None),
        gradient(row_scale),
        gradient(params),
    )


def _setup_context(ctx, inputs, output):
    # Eight tensors come before the scalars, of which the backward pass does not ask the last, skip.
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.scalars = inputs[8:-1]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_out, grad_lse2, *_):
    needs = ctx.needs_input_grad
    needs_table = needs[3]
    dq, dk, dv, d_table, d_scale, d_params = _backward_op(
        grad_out, grad_lse2, *ctx.saved_tensors, *ctx.scalars, needs_table
    )
    # In the order of `_attention`'s arguments; those left out have no gradient.
    return (
        dq,
        dk,
        dv,
        d_table if needs_table else None,
        d_scale if needs[4] else None,
        None,
        d_params if needs[6] else None,
        *[None] * 5,
    )


def _no_second_derivative(ctx, *_):
    raise RuntimeError(
        "kernel 'triton' has no second derivative; use kernel='reference' with create_graph=True"
    )


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
    """The attention of `attention_op`, with its arguments, and the log2-sum-exp; both
    differentiable."""
    # The compiler, and fake tensors, propagate shapes by the operator.
    by_operator = torch.compiler.is_compiling() or not has_values(q)
    attend = attention_op if by_operator else _Attention.apply
    return attend(q, *others)[:2]


def fused_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    row_scale: Tensor | None,
    segments: Tensor | None,
    place: list[int],
    softmax_scale: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`attention_op` of few queries on a line, without gradients: its output and log2-sum-exp,
    empty if not wanted."""
    table = None if table is None else last_axis_contiguous(table)
    call = operands(q, k, v, table, row_scale, segments, place, softmax_scale)
    return decode(call, wants_lse=wants_lse)


# The operator is for torch.compile; eager decoding calls the function directly and saves the
# operator's host overhead.
decode_op = torch.library.custom_op("priorzoo::attention_decode", mutates_args=())(fused_decode)


@decode_op.register_fake
def _(q, k, v, *rest):
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3] if rest[-1] else 0, dtype=torch.float32)
