"""Relative tables on the CPU: exact attention, forward and backward, without a T × S matrix.

On a line K[h,i,j] = t[h, i − j] is a Toeplitz matrix. With the rows of a block of queries flipped,
it is a strided view of the reversed table, both strides 1, which torch's fused CPU attention
accepts as `attn_mask` without a copy. Causal masks and windows are functions of i − j too: entries
of −∞ in the same table, at no cost.

The backward pass recomputes a block's weights P. The gradient of the table sums dS = P ∘ (dP − δ)
along its diagonals; in a buffer one column wider than the block, a view whose row stride is one
less than the buffer's has those diagonals as its columns, so the sums are column sums, in a fixed
order. Memory beyond inputs and outputs is O(T + S) plus three blocks of at most `one_head`
elements, or one head's 64 × S if that is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.blocks import Block, plan_blocks, shorten_blocks, split_blocks
from zoo.attention.call import AttentionCall, aligned, fold_keys, fold_queries
from zoo.attention.heads import pad_heads, repeat_heads
from zoo.attention.masks import needs_mask, refuses_matrix
from zoo.attention.reach import LEFT_OUT, SKIPS, TALLY, Reach, find_reach
from zoo.attention.sinks import attend_with_sinks
from zoo.attention.tracing import has_values
from zoo.attention.workspace import Workspace

FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class ToeplitzKernel:
    """Serves tables on a line, and calls without a table, on the CPU.

    Rows of a block: from 192 on the fused kernel takes 64 at a time; more than 256 waste more of
    the causal half. workspace: logits of a block, 2 MiB of float32; one head's may grow to
    `one_head` before it gets fewer rows. keep_keys: keys per head column up to which P is kept for
    the backward pass. one_block: up to so many logits per head some documents are one masked
    block. least_keys: below it, finding keys of negligible weight costs more than it saves;
    `skips`: whether they are left out.
    """

    forward_rows: int = 256
    backward_rows: int = 256
    short_rows: int = 64
    least_rows: int = 64
    workspace: int = 1 << 19
    one_head: int = 1 << 22
    keep_keys: int = 8
    one_block: int = 256 * 256
    least_keys: int = 4096
    skips: bool = True

    def refuses(self, call: AttentionCall) -> str | None:
        if call.q.device.type != "cpu":
            return f"it runs on the CPU, and the queries are on {call.q.device}"
        if not has_values(call.q):
            return "it needs concrete tensors; fake tensors are not supported"
        if call.terms.bias is not None:
            return "a dense bias is not a function of i − j"
        if call.table is not None and (call.table.origin is None or call.table.num_prefix):
            return "the table is over a grid, where K is not a function of i − j"
        if call.window is not None and -call.offset >= call.window:
            return "no key is in the window of the first queries, and it needs one in each row"
        return refuses_matrix(call)

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) attention output, float32 accumulation, float64 for float64 inputs."""
        return attend_with_sinks(call, self.attend)

    def attend(self, call: AttentionCall, *, wants_lse: bool = True) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of the logits (B, H, T), or no numbers where it is not
        wanted."""
        call, columns = aligned(call)
        out, lse = self._attend(call, wants_lse)
        return out[:, :, columns], lse[..., columns]

    def _attend(self, call: AttentionCall, wants_lse: bool) -> tuple[Tensor, Tensor]:
        num_heads = call.q.shape[1]
        width = call.v.shape[-1]
        queries = fold_queries(call)
        keys = fold_keys(call)
        values = call.v
        if keys.shape[-1] != width:
            # The fused kernel has one width for all three.
            widest = max(keys.shape[-1], width)
            queries = F.pad(queries, (0, widest - queries.shape[-1]))
            keys = F.pad(keys, (0, widest - keys.shape[-1]))
            values = F.pad(values, (0, widest - values.shape[-1]))
        table = _reversed_table(call)
        scale = call.query_scale if call.table is not None else None
        if scale is not None:
            scale = scale.to(table.dtype)
        keys = repeat_heads(keys, num_heads)
        values = repeat_heads(values, num_heads)
        reach, left_out, _ = self.find_reach(call, queries, keys, table, scale)
        tally = TALLY.get()
        if tally is not None:
            tally.left_out += left_out
        plain = reach is None and not wants_lse and not needs_mask(call)
        if plain and call.num_keys >= self.least_keys:
            queries, keys, values = pad_heads(queries, keys, values)
            # Torch would show a single query the first key alone.
            causal = call.causal and call.num_queries > 1
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, scale=1.0)
            return out[..., :width], out.new_empty(0)
        job = _Job(call, self, reach, wants_lse)
        out, lse = _ToeplitzAttention.apply(queries, keys, values, table, scale, job)
        return out[..., :width], lse

    def kept_rows(self, call: AttentionCall) -> int:
        """Rows of a block whose P is kept: two blocks leave out a quarter of the causal square;
        more save no time."""
        return max(self.short_rows, -(-call.num_queries // 2))

    def may_skip(self, call: AttentionCall) -> bool:
        """Whether a prior may hide keys of a call, and it is long enough to find out."""
        least_keys = max(self.least_keys, call.num_queries)
        long = call.num_queries >= self.forward_rows and call.num_keys >= least_keys
        has_prior = call.table is not None or call.terms.q_lanes is not None
        return self.skips and long and has_prior

    @torch.no_grad()
    def find_reach(
        self,
        call: AttentionCall,
        queries: Tensor,
        keys: Tensor,
        table: Tensor,
        scale: Tensor | None,
    ) -> tuple[Reach | None, int, int]:
        """The keys that blocks need, the logits left out, and all of them; (None, 0, 1) where less
        than a tenth is left out."""
        if not (SKIPS.get() and self.may_skip(call)):
            return None, 0, 1
        if call.terms.q_lanes is None:
            # Then the table has to fall far enough.
            fall = table.amax(1) - table.amin(1)
            if scale is not None:
                fall = fall * scale.abs().amax((0, 2))
            if float(fall.max()) < -math.log(LEFT_OUT):
                return None, 0, 1
        mask = _reversed_mask(call, table.dtype)
        if mask is not None:
            table = table + mask
        reach = find_reach(call, queries, keys, table, scale, self.forward_rows)
        needed = _count_logits(plan_blocks(call, self.forward_rows, self.one_block, reach))
        whole = _count_logits(plan_blocks(call, self.forward_rows, self.one_block))
        if needed >= 0.9 * whole:
            return None, 0, 1
        return reach, whole - needed, whole

    def skipped_share(self, call: AttentionCall) -> float:
        """The share of the logits, visible or in a block with visible ones, that are left out of
        this call."""
        scale = call.query_scale if call.table else None
        _, left_out, whole = self.find_reach(
            call, fold_queries(call), fold_keys(call), _reversed_table(call), scale
        )
        return left_out / whole


def _count_logits(blocks: list[Block]) -> int:
    return sum(math.prod(block.shape) for block in blocks)


def _reversed_table(call: AttentionCall) -> Tensor:
    """(H or 1, T+S−1) r with K[h,i,j] = r[h, T−1−i+j]; zeros where the call has no table."""
    num_queries = call.num_queries
    num_keys = call.num_keys
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    if call.table is None:
        return torch.zeros(1, num_queries + num_keys - 1, dtype=dtype)
    origin = call.table.origin
    assert origin is not None
    return call.table.table[:, origin - num_keys + 1 : origin + num_queries].to(dtype).flip(1)


def _reversed_mask(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """(T+S−1,) 0 or −∞ by distance, in the order of `_reversed_table`; None if every distance is
    visible."""
    if not call.causal and call.window is None:
        return None
    distance = torch.arange(call.num_keys - 1, -call.num_queries, -1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if call.causal:
        hidden |= distance < 0
    if call.window is not None:
        hidden |= distance.abs() >= call.window
    return torch.zeros(len(distance), dtype=dtype).masked_fill_(hidden, -torch.inf)


class _Bias:
    """The log-prior of any block from O(T + S) values: `table` with hidden distances at −∞, or,
    with a row scale, table and mask separately (0 · −∞ = NaN)."""

    def __init__(self, call: AttentionCall, table: Tensor, scale: Tensor | None) -> None:
        self.call = call
        self.table = table
        self.scale = scale
        self.mask = _reversed_mask(call, table.dtype)
        if scale is None and self.mask is not None:
            self.table = table + self.mask
        elif self.mask is None:
            self.mask = torch.zeros(table.shape[1], dtype=table.dtype)

    def column(self, block: Block) -> int:
        """Column of the reversed table at the block's last query and first key."""
        return self.call.num_queries - block.hi + block.first

    def block(self, block: Block, out: Tensor | None = None) -> Tensor:
        """(1 or B, 1 or H, rows, keys), rows flipped: a view if nothing depends on the row itself,
        else written to `out` (B, H, rows, keys)."""
        place = (self.column(block), block.hi - block.lo, block.last - block.first)
        table = self.table if self.table.shape[0] == 1 else self.table[block.heads]
        bias = _toeplitz(table, *place)
        if self.scale is not None:
            assert self.mask is not None
            scale = self.scale_of(block)[..., None]
            if out is not None:
                # A scale that batch rows share is written once.
                out = out[: scale.shape[0]]
            bias = torch.addcmul(_toeplitz(self.mask[None], *place), bias, scale, out=out)
        if block.mixed:
            assert self.call.segments is not None
            segments = self.call.segments[block.batch]
            offset = self.call.offset
            row_ids = segments[:, offset + block.lo : offset + block.hi].flip(1)
            other = row_ids[:, None, :, None] != segments[:, None, None, block.keys]
            bias = bias.masked_fill(other, -torch.inf)
        return bias

    def scale_of(self, block: Block) -> Tensor:
        """(1 or B, heads, rows) of the row scale, rows flipped."""
        assert self.scale is not None
        scale = self.scale if self.scale.shape[0] == 1 else self.scale[block.batch]
        return scale[:, block.heads, block.rows].flip(2)


def _toeplitz(line: Tensor, start: int, rows: int, keys: int) -> Tensor:
    """(1, H, rows, keys) view whose entry [r, c] is line[:, start + r + c]."""
    offset = line.storage_offset() + start
    return line.as_strided((1, line.shape[0], rows, keys), (0, line.stride(0), 1, 1), offset)


class _ToeplitzAttention(torch.autograd.Function):
    """softmax(q·kᵀ + scale ∘ K) v with equal heads and widths. q, k, v (B,H,·,D); table as
    `_reversed_table`; scale (1 or B, H, T) or None."""

    @staticmethod
    def forward(ctx, q, k, v, table, scale, job):
        bias = _Bias(job.call, table, scale)
        few_keys = k.shape[2] <= job.sizes.keep_keys * k.shape[3]
        lse = bias.table.new_empty(q.shape[:3] if job.wants_lse else 0)
        weights = []
        if q.shape[2] > 1 and few_keys and not job.wants_lse:
            out, weights = job.forward_short(bias, q, k, v)
        else:
            out = job.forward(bias, q, k, v, lse)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, table, scale, out, *weights)
            ctx.job = job
        if not job.wants_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        # Gradients are enabled under create_graph. Autograd's own guard silently accepts a constant
        # grad_out.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "kernel 'toeplitz' has no second derivative; create_graph=True needs "
                "kernel='reference'"
            )
        q, k, v, table, scale, out, *weights = ctx.saved_tensors
        job = ctx.job
        bias = _Bias(job.call, table, scale)
        grads = (grad_out, grad_lse if job.wants_lse else None)
        needs = ctx.needs_input_grad
        return *job.backward(bias, q, k, v, table, out, grads, needs, weights), None


@dataclass(frozen=True)
class _Job:
    """A call in blocks, forward and backward."""

    call: AttentionCall
    sizes: ToeplitzKernel
    reach: Reach | None
    wants_lse: bool

    def forward(self, bias: _Bias, q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> Tensor:
        """Output, from the fused kernel, a block of queries at a time; `lse` is written where it is
        wanted."""
        sizes = self.sizes
        out = torch.empty_like(q)
        space = Workspace(bias.table.dtype)
        blocks = plan_blocks(self.call, sizes.forward_rows, sizes.one_block, self.reach)
        written = bias.scale is not None or any(block.mixed for block in blocks)
        # A bias that is a view takes no memory, whatever the block's size.
        limit = 4 * sizes.workspace if written else q.shape[0] * q.shape[1] << 40
        for block in split_blocks(blocks, limit):
            queries_of = (block.batch, block.heads, block.rows)
            keys_of = (block.batch, block.heads, block.keys)
            buffer = None
            if bias.scale is not None:
                lead = 1 if bias.scale.shape[0] == 1 else block.shape[0]
                buffer = space.view(lead, *block.shape[1:])
            mask = bias.block(block, buffer)
            inputs = (q[queries_of].flip(2), k[keys_of], v[keys_of])
            part, part_lse = FUSED(*inputs, 0.0, False, attn_mask=mask, scale=1.0)
            out[queries_of] = part.flip(2)
            if self.wants_lse:
                lse[queries_of] = part_lse.flip(2)
        return out

    def forward_short(
        self, bias: _Bias, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Output and the weights P of every block. Only for calls of few keys: see `keep_keys`."""
        wide = bias.table.dtype
        out = torch.empty_like(q)
        # Slices below then need no copies.
        k = k.to(wide).contiguous()
        v = v.to(wide).contiguous()
        weights = []
        blocks = plan_blocks(self.call, self.sizes.kept_rows(self.call), self.sizes.one_block)
        for block in split_blocks(blocks, self.sizes.workspace):
            queries_of = (block.batch, block.heads, block.rows)
            keys_of = (block.batch, block.heads, block.keys)
            qb = q[queries_of].flip(2).to(wide).flatten(0, 1)
            kb = k[keys_of].flatten(0, 1)
            vb = v[keys_of].flatten(0, 1)
            p = _weights(bias, block, qb, kb, torch.empty(block.shape, dtype=wide))
            out[queries_of] = torch.bmm(p, vb).unflatten(0, block.shape[:2]).flip(2)
            weights.append(p)
        return out, weights

    def backward(
        self,
        bias: _Bias,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        out: Tensor,
        grads: tuple[Tensor, Tensor | None],
        needs: tuple[bool, ...],
        weights: list[Tensor],
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, table and scale, block by block in float32 or float64."""
        call = self.call
        sizes = self.sizes
        wide = table.dtype
        scale = bias.scale
        grad_out, grad_lse = grads
        keys_all = k.to(wide).contiguous()
        values_all = v.to(wide).contiguous()
        # dS has no sum in its row, but for the rounding of δ. The gradient of a row scale is the
        # sum of dS times logits, to which that adds what they have in common, large where a prior
        # has grown. δ = Σ P ∘ dP rounds as its own terms do; that of an output in half precision is
        # off by the output's rounding.
        scaled = call.query_scale is not None and call.query_scale.requires_grad
        delta = None if scaled or out.dtype != wide else (grad_out * out).sum(-1)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(keys_all)
        grad_v = torch.zeros_like(values_all)
        grad_table = torch.zeros_like(table) if needs[3] else None
        grad_scale = torch.zeros_like(scale) if scale is not None and needs[4] else None
        finite = table.clamp_min(torch.finfo(wide).min)
        p_space = Workspace(wide)
        dp_space = Workspace(wide)
        ds_space = Workspace(wide)
        padded = None
        blocks = split_blocks(self._backward_blocks(bool(weights)), sizes.workspace)
        for index, block in enumerate(blocks):
            heads = block.heads
            queries_of = (block.batch, heads, block.rows)
            keys_of = (block.batch, heads, block.keys)
            kb = keys_all[keys_of].flatten(0, 1)
            vb = values_all[keys_of].flatten(0, 1)
            qb = q[queries_of].to(wide).flip(2).flatten(0, 1)
            gb = grad_out[queries_of].to(wide).flip(2).flatten(0, 1)
            *lead, num_rows, width = block.shape
            if weights:
                p = weights[index]
            else:
                p = _weights(bias, block, qb, kb, p_space.view(*block.shape))
            # Causal rows end in zeros, which pad all diagonals but one; otherwise every row needs
            # its own padding.
            pad = 1 if call.causal else num_rows
            buffer = ds_space.view(len(p), num_rows, width + pad)
            if padded != buffer.shape:
                # The padding is written only here.
                buffer[..., width:] = 0
                padded = buffer.shape
            dp = torch.bmm(gb, vb.transpose(1, 2), out=dp_space.view(len(p), num_rows, width))
            if delta is not None:
                dp.sub_(delta[queries_of].flip(2).reshape(-1, num_rows, 1))
            ds = torch.mul(dp, p, out=buffer[..., :width])
            if delta is None:
                ds.addcmul_(p, ds.sum(-1, keepdim=True), value=-1)
            if grad_lse is not None:
                ds.addcmul_(p, grad_lse[queries_of].flip(2).reshape(-1, num_rows, 1))
            grad_v[keys_of] += torch.bmm(p.transpose(1, 2), gb).unflatten(0, lead)
            grad_k[keys_of] += torch.bmm(ds.transpose(1, 2), qb).unflatten(0, lead)
            grad_q[queries_of] = torch.bmm(ds, kb).unflatten(0, lead).flip(2)
            start = bias.column(block)
            length = width + pad - 1
            if grad_table is not None:
                # A row stride of one less than the buffer's: columns of this view are diagonals.
                shape = (len(p), num_rows, length)
                strides = (num_rows * (width + pad), length, 1)
                diagonals = buffer.as_strided(shape, strides)
                if scale is None:
                    sums = diagonals.sum(1)
                else:
                    row_scales = bias.scale_of(block).expand(*lead, -1).reshape(-1, 1, num_rows)
                    sums = torch.bmm(row_scales, diagonals)
                grad_table[heads, start : start + length] += sums.view(*lead, length).sum(0)
            if grad_scale is not None:
                line = _toeplitz(finite[heads], start, num_rows, width)
                # dP is not needed any more: its memory takes the product.
                product = torch.mul(ds.unflatten(0, lead), line, out=dp.unflatten(0, lead))
                part = product.sum(-1).flip(2)
                if grad_scale.shape[0] == 1:
                    grad_scale[:, heads, block.rows] += part.sum(0, keepdim=True)
                else:
                    grad_scale[queries_of] += part
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_table, grad_scale

    def _backward_blocks(self, kept: bool) -> Iterable[Block]:
        call = self.call
        sizes = self.sizes
        if kept:
            return plan_blocks(call, sizes.kept_rows(call), sizes.one_block)
        if self.reach is None:
            rows = max(sizes.least_rows, min(sizes.backward_rows, sizes.one_head // call.num_keys))
            return plan_blocks(call, rows, sizes.one_block)
        blocks = plan_blocks(call, sizes.backward_rows, sizes.one_block, self.reach)
        return shorten_blocks(
            call,
            blocks,
            least_rows=sizes.least_rows,
            most_rows=sizes.backward_rows,
            one_head=sizes.one_head,
        )


def _weights(bias: _Bias, block: Block, q: Tensor, k: Tensor, out: Tensor) -> Tensor:
    """P of a block into `out` (B, H, rows, keys). q: (B·H, rows, D) flipped; k: (B·H, keys, D)."""
    bias_block = bias.block(block, out)
    in_place = bias_block.data_ptr() == out.data_ptr()
    if in_place and bias_block.shape != out.shape:
        # Written to the first batch row of `out`, for all of them.
        bias_block = bias_block.clone()
        in_place = False
    if not in_place:
        out.copy_(bias_block)
    logits = out.flatten(0, 1).baddbmm_(q, k.transpose(1, 2))
    return torch.softmax(logits, -1, out=logits)
