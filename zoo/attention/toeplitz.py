"""Relative tables on the CPU: exact attention, forward and backward, without a T × S matrix.

On a line K[h,i,j] = t[h, i − j] is a Toeplitz matrix. With the rows of a block of queries flipped, it is a strided view of the
reversed table, both strides 1, which torch's fused CPU attention takes as its `attn_mask` without a copy (SPEC §2). Causal
masks and windows are functions of i − j too, so they are entries of −∞ in the same table and cost nothing.

The backward pass recomputes a block's weights P from the saved log-sum-exp. The gradient of the table sums
dS = P ∘ (dP − δ) along its diagonals; in a buffer one column wider than the block, a view whose row stride is one less than
the buffer's has those diagonals as its columns, so the sums are column sums, in a fixed order. Memory beyond inputs and
outputs is O(T + S) plus a few blocks of BLOCK_ROWS × S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.attention.base import AttentionCall, repeat_heads
from zoo.attention.toeplitz_plan import Block, plan_blocks

__all__ = ["refuses", "run"]

FORWARD_ROWS = 256
BACKWARD_ROWS = 128

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def refuses(call: AttentionCall) -> str | None:
    """It serves tables on a line, and calls without a table, on the CPU."""
    if call.q.device.type != "cpu":
        return f"it runs on the CPU, and the queries are on {call.q.device}"
    if call.terms.bias is not None:
        return "a dense bias is not a function of i − j"
    if call.table is not None and (call.table.origin is None or call.table.num_prefix):
        return "the table is over a grid, where K is not a function of i − j"
    return None


def run(call: AttentionCall) -> Tensor:
    """(B, H, T, D) attention output, float32 accumulation, float64 for float64 inputs."""
    num_heads, width = call.q.shape[1], call.v.shape[-1]
    queries, keys, values = call.queries, call.keys, call.v
    if keys.shape[-1] != width:  # the fused kernel has one width for all three
        widest = max(keys.shape[-1], width)
        queries, keys, values = (F.pad(x, (0, widest - x.shape[-1])) for x in (queries, keys, values))
    table = _reversed_table(call)
    scale = call.query_scale if call.table is not None else None
    if scale is not None:
        scale = scale.to(table.dtype)
    if call.num_queries > 1 or keys.shape[1] != values.shape[1]:
        keys, values = repeat_heads(keys, num_heads), repeat_heads(values, num_heads)
    elif keys.shape[1] != num_heads and not _needs_grad(queries, keys, values, table, scale):
        return _decode_grouped(call, queries, keys, values, table, scale)[..., :width]
    keys, values = repeat_heads(keys, num_heads), repeat_heads(values, num_heads)
    return _ToeplitzAttention.apply(queries, keys, values, table, scale, call)[..., :width]


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _reversed_table(call: AttentionCall) -> Tensor:
    """(H or 1, T+S−1) r with K[h,i,j] = r[h, T−1−i+j]; zeros where the call has no table."""
    num_queries, num_keys = call.num_queries, call.num_keys
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    if call.table is None:
        return torch.zeros(1, num_queries + num_keys - 1, dtype=dtype)
    origin = call.table.origin
    assert origin is not None
    return call.table.table[:, origin - num_keys + 1 : origin + num_queries].to(dtype).flip(1)


def _reversed_mask(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """(T+S−1,) 0 or −∞ by distance, in the order of `_reversed_table`; None where every distance is visible."""
    if not call.causal and call.window is None:
        return None
    distance = torch.arange(call.num_keys - 1, -call.num_queries, -1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if call.causal:
        hidden |= distance < 0
    if call.window is not None:
        hidden |= distance.abs() >= call.window
    return torch.zeros(len(distance), dtype=dtype).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class _Bias:
    """The log-prior of any block, out of O(T + S) numbers: `table` with hidden distances at −∞, or, where rows are scaled,
    the table and the mask apart (0 · −∞ is not a number)."""

    table: Tensor
    mask: Tensor | None
    scale: Tensor | None
    segments: Tensor | None
    num_queries: int
    offset: int

    @staticmethod
    def of(call: AttentionCall, table: Tensor, scale: Tensor | None) -> _Bias:
        mask = _reversed_mask(call, table.dtype)
        if scale is None and mask is not None:
            table, mask = table + mask, None
        elif scale is not None and mask is None:
            mask = torch.zeros(table.shape[1], dtype=table.dtype)
        return _Bias(table, mask, scale, call.segments, call.num_queries, call.offset)

    def column(self, block: Block) -> int:
        """Column of the reversed table at the block's last query and first key."""
        return self.num_queries - block.hi + block.first

    def block(self, block: Block) -> Tensor:
        """(1 or B, 1 or H, rows, keys), rows flipped: a view where nothing depends on the row itself."""
        rows, keys, start = block.hi - block.lo, block.last - block.first, self.column(block)
        bias = _toeplitz(self.table, start, rows, keys)
        if self.scale is not None:
            assert self.mask is not None
            scale = self.scale if self.scale.shape[0] == 1 else self.scale[block.batch]
            scale = scale[:, :, block.lo : block.hi].flip(2)[..., None]
            bias = torch.addcmul(_toeplitz(self.mask[None], start, rows, keys), bias, scale)
        if block.mixed:
            assert self.segments is not None
            segments = self.segments[block.batch]
            mine = segments[:, self.offset + block.lo : self.offset + block.hi].flip(1)
            other = mine[:, None, :, None] != segments[:, None, None, block.first : block.last]
            bias = bias.masked_fill(other, -torch.inf)
        return bias


def _toeplitz(line: Tensor, start: int, rows: int, keys: int) -> Tensor:
    """(1, H, rows, keys) view whose entry [r, c] is line[:, start + r + c]."""
    offset = line.storage_offset() + start
    return line.as_strided((1, line.shape[0], rows, keys), (0, line.stride(0), 1, 1), offset)


def _decode_grouped(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: Tensor | None
) -> Tensor:
    """One query per head: the heads of a group are the rows of one call that shares their keys, which need no copies."""
    groups = k.shape[1]
    bias = _Bias.of(call, table, scale)
    parts = []
    for block in plan_blocks(call, 1):
        here = slice(block.first, block.last)
        mask = bias.block(block)
        mask = mask.expand(mask.shape[0], q.shape[1], 1, here.stop - here.start).unflatten(1, (groups, -1)).squeeze(3)
        rows = q[block.batch].unflatten(1, (groups, -1)).squeeze(3)
        part = _fused(rows, k[block.batch, :, here], v[block.batch, :, here], 0.0, False, attn_mask=mask, scale=1.0)
        parts.append(part[0].flatten(1, 2)[:, :, None])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class _ToeplitzAttention(torch.autograd.Function):
    """softmax(q·kᵀ + scale ∘ K) v with equal heads and widths. q, k, v (B,H,·,D); table as `_reversed_table`; scale
    (1 or B, H, T) or None."""

    @staticmethod
    def forward(ctx, q, k, v, table, scale, call):
        bias = _Bias.of(call, table, scale)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=table.dtype)
        for block in plan_blocks(call, FORWARD_ROWS):
            rows, keys, here = slice(block.lo, block.hi), slice(block.first, block.last), block.batch
            part, part_lse = _fused(
                q[here, :, rows].flip(2),
                k[here, :, keys],
                v[here, :, keys],
                0.0,
                False,
                attn_mask=bias.block(block),
                scale=1.0,
            )
            out[here, :, rows] = part.flip(2)
            lse[here, :, rows] = part_lse.flip(2)
        ctx.save_for_backward(q, k, v, table, scale, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, table, scale, out, lse = ctx.saved_tensors
        return *_backward(ctx.call, q, k, v, table, scale, out, lse, grad_out, ctx.needs_input_grad), None


def _backward(call, q, k, v, table, scale, out, lse, grad_out, needs):
    """Gradients of q, k, v, table and scale, block by block in float32 or float64."""
    wide = table.dtype
    bias = _Bias.of(call, table, scale)
    num_heads = q.shape[1]
    keys_all, values_all = k.to(wide).contiguous(), v.to(wide).contiguous()
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(keys_all), torch.zeros_like(values_all)
    grad_table = torch.zeros_like(table) if needs[3] else None
    grad_scale = torch.zeros_like(scale) if scale is not None and needs[4] else None
    finite = table.clamp_min(torch.finfo(wide).min) if grad_scale is not None else None
    for block in plan_blocks(call, BACKWARD_ROWS):
        here, lo, hi = block.batch, block.lo, block.hi
        rows, width = hi - lo, block.last - block.first
        kb, vb = (x[here, :, block.first : block.last] for x in (keys_all, values_all))
        batch = kb.shape[0]
        heads = batch * num_heads
        kb, vb = (x.reshape(heads, width, -1) for x in (kb, vb))
        qb, gb = (x[here, :, lo:hi].to(wide).flip(2).reshape(heads, rows, -1) for x in (q, grad_out))
        lse_b, delta_b = (x[here, :, lo:hi].flip(2).reshape(heads, rows, 1) for x in (lse, delta))
        p = torch.empty(batch, num_heads, rows, width, dtype=wide).copy_(bias.block(block)).view(heads, rows, width)
        p.baddbmm_(qb, kb.transpose(1, 2)).sub_(lse_b).exp_()
        # With causal rows the buffer's own zeros pad all diagonals but one; otherwise every row needs its own padding.
        pad = 1 if call.causal else rows
        buffer = torch.empty(heads, rows, width + pad, dtype=wide)
        buffer[..., width:] = 0
        ds = buffer[..., :width]
        torch.bmm(gb, vb.transpose(1, 2), out=ds)
        ds.sub_(delta_b).mul_(p)
        lead = (batch, num_heads, -1, q.shape[-1])
        grad_v[here, :, block.first : block.last] += torch.bmm(p.transpose(1, 2), gb).view(lead)
        grad_k[here, :, block.first : block.last] += torch.bmm(ds.transpose(1, 2), qb).view(lead)
        grad_q[here, :, lo:hi] = torch.bmm(ds, kb).view(lead).flip(2)
        if grad_table is None and grad_scale is None:
            continue
        length, start = width + pad - 1, bias.column(block)
        diagonals = buffer.as_strided((heads, rows, length), (rows * (width + pad), length, 1))
        weights = None
        if scale is not None:
            weights = scale.expand(q.shape[0], -1, -1)[here, :, lo:hi].flip(2)
        if grad_table is not None:
            if weights is None:
                sums = diagonals.sum(1)
            else:
                sums = torch.bmm(weights.reshape(heads, 1, rows), diagonals)
            grad_table[:, start : start + length] += sums.view(batch, num_heads, length).sum(0)
        if grad_scale is not None:
            line = finite[:, start : start + length].expand(batch, num_heads, length).reshape(heads, length, 1)
            part = torch.bmm(diagonals, line).view(batch, num_heads, rows).flip(2)
            if grad_scale.shape[0] == 1:
                grad_scale[:, :, lo:hi] += part.sum(0, keepdim=True)
            else:
                grad_scale[here, :, lo:hi] += part
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_table, grad_scale
