"""torch's scaled_dot_product_attention on heads widened by the lanes; masks are made a block at a
time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.attention.call import (
    ALIGNMENT,
    AttentionCall,
    aligned,
    exempt_sinks,
    fold_keys,
    fold_queries,
    sink_level,
    sink_logits,
)
from zoo.attention.heads import in_half_precision, pad_heads, repeat_heads
from zoo.attention.masks import bad_keys, needs_mask, visible
from zoo.attention.tracing import needs_grad
from zoo.attention.workspace import Workspace
from zoo.positions import slices
from zoo.priors.base import without_autocast
from zoo.priors.tables import BlockedBias, UnrolledTable, bias_block

# Without a mask torch's fused attention on the CPU leaves NaN out of a row's maximum where keys
# fill less than a vector register, and a row without a maximum is 0: with fewer keys than this it
# is given a mask, with which it does not.
FEWEST_KEYS = 16


@dataclass(frozen=True)
class SdpaKernel:
    """torch's scaled_dot_product_attention, of every call; what needs a T × S mask gets it a block
    at a time.

    mask_limit: logits per head of a block, of all heads where the bias is made by blocks: 64 MiB of
    float32. small_limit: of bidirectional calls on the CPU (images) all mask elements of a block,
    26 MiB. block_rows: torch's fused CPU attention takes 256 rows at a time from here on, 10%
    faster: blocks shrink in heads first.
    """

    mask_limit: int = 1 << 24
    small_limit: int = 13 << 19
    block_rows: int = 768

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        """The output (B, H, T, D).

        Queries and keys are [lanes, content], padded with zeros to a common width, a multiple of 8.
        """
        call, columns = aligned(call)
        # In half precision torch takes δ of the rounded output, so dS has a sum in its row, and
        # what the row's logits have in common (with lanes, much) adds to the gradient of the row
        # scale.
        rounded = in_half_precision(call.q) and call.q.device.type == "cpu"
        q = fold_queries(call)
        k = fold_keys(call)
        v = call.v
        if rounded and call.terms.q_lanes is not None and needs_grad(call.query_scale):
            q = q.float()
            k = k.float()
            v = v.float()
        return self._attend(call, q, k, v).to(call.q.dtype)[:, :, columns]

    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`run` of a call's queries, keys and values, which may be wider than its own."""
        num_heads = call.q.shape[1]
        width = call.v.shape[-1]
        bad = bad_keys(call)
        masked = bad is not None or needs_mask(call)
        short = k.shape[2] < FEWEST_KEYS and call.q.device.type == "cpu" and not call.dropout
        q, k, v = pad_heads(q, repeat_heads(k, num_heads), repeat_heads(v, num_heads))
        if masked:
            if bad is not None:
                bad = repeat_heads(bad, num_heads)
                k = k.nan_to_num(0.0, 0.0, 0.0)
            return self._masked(call, q, k, v, bad)[..., :width]
        # Causal without a mask is one query, which sees all keys, or as many queries as keys.
        is_causal = call.causal and bool(call.num_queries == call.num_keys)
        shown = None
        if short:
            shown = q.new_zeros(1, 1, 1, call.num_keys)
            if is_causal:
                shown = q.new_full((call.num_queries, call.num_keys), -torch.inf).triu_(1)
                is_causal = False
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=shown, is_causal=is_causal, dropout_p=call.dropout, scale=1.0
        )
        return out[..., :width]

    def _masked(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, bad: Tensor | None
    ) -> Tensor:
        """Attention in blocks of queries and heads; without gradients only one block's mask is in
        memory.

        bad: (B, H, S) bool, keys that make the logits of rows that see them NaN, as in `bad_keys`.
        """
        dtype = q.dtype
        wide = dtype
        with_sink = call.terms.sink is not None
        if call.sinks or with_sink or call.table is not None or call.terms.bias is not None:
            # In bfloat16 a log-prior of −100 is off by 0.25, so the bias and its product stay in
            # float32.
            wide = torch.promote_types(dtype, torch.float32)
        if with_sink:
            # A key and a value of zeros in front, whose logit the mask has.
            k = F.pad(k, (0, 0, 1, 0))
            v = F.pad(v, (0, 0, 1, 0))
        tracked = needs_grad(
            q,
            k,
            v,
            None if call.table is None else call.table.table,
            call.terms.bias,
            call.query_scale,
            call.terms.sink,
            call.terms.of_sinks,
        )
        space = None
        if not tracked and call.table is not None and call.table.shape is not None:
            space = Workspace(wide, k.device)
        out = None if tracked else torch.empty_like(q)
        rows, heads = self.block_size(call)
        remade = tracked and isinstance(call.terms.bias, BlockedBias) and rows < call.num_queries
        columns: list[Tensor] = []
        for group in slices(q.shape[1], heads):
            kg = k[:, group].to(wide)
            vg = v[:, group].to(wide)
            table = None if call.table is None else call.table.of_heads(group).unroll(wide)
            parts: list[Tensor] = []
            for block in slices(q.shape[2], rows):
                last = block.stop + call.offset if call.causal else call.num_keys
                make_mask = partial(_mask, call, table, block, group, last, space, bad)
                end = last + with_sink
                qb = q[:, group, block].to(wide)
                inputs = (qb, kg[:, :, :end], vg[:, :, :end], make_mask, call)
                if remade:
                    # A bias made by blocks is made again in the backward pass, and so are the
                    # weights.
                    part = checkpoint(_one_block, *inputs, use_reentrant=False)
                else:
                    part = _one_block(*inputs)
                if out is None:
                    parts.append(part.to(dtype))
                else:
                    out[:, group, block] = part
            if out is None:
                columns.append(torch.cat(parts, dim=2) if len(parts) > 1 else parts[0])
        if out is not None:
            return out
        return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]

    def block_size(self, call: AttentionCall) -> tuple[int, int]:
        """(queries, heads) of a block."""
        num_heads = call.q.shape[1]
        if call.causal or call.q.device.type != "cpu":
            row = call.num_keys
            if isinstance(call.terms.bias, BlockedBias):
                # It is made again with its weights: smaller blocks cost nothing.
                row *= num_heads
            rows = self.mask_limit // row
            return max(rows - rows % ALIGNMENT, rows % ALIGNMENT, 1), num_heads
        parts = (call.terms.bias, call.query_scale, call.mask)
        batched = call.segments is not None or any(x is not None and x.shape[0] > 1 for x in parts)
        row = call.num_keys
        if batched:
            row *= call.q.shape[0]
        heads = num_heads
        if call.num_queries * num_heads * row > self.small_limit:
            rows = min(self.block_rows, call.num_queries)
            heads = min(max(self.small_limit // (row * rows), 1), num_heads)
        return max(self.small_limit // (row * heads), 1), heads


def _one_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Callable[[], Tensor | None], call: AttentionCall
) -> Tensor:
    # Autocast would round the bias to half precision.
    with without_autocast(q):
        bias = mask()
        # On the CPU torch takes the same products for a mask with a gradient, and two passes more
        # to find rows without a key.
        shows_all = call.terms.bias is None and not call.dropout and visible(call, 0, 1) is None
        if shows_all and q.device.type == "cpu" and bias is not None and bias.requires_grad:
            return (q @ k.mT + bias).softmax(-1) @ v
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=call.dropout, scale=1.0
        )


def _mask(
    call: AttentionCall,
    table: UnrolledTable | None,
    block: slice,
    heads: slice,
    last: int,
    space: Workspace | None,
    bad: Tensor | None,
) -> Tensor | None:
    """(1 or B, 1 or heads, queries, last): bool without a bias, else the additive bias; with a
    learned sink's logit in front, one wider. `table` holds only `heads`."""
    shown = visible(call, block.start, block.stop, last)
    if shown is not None and shown.shape[1] > 1:
        shown = shown[:, heads]
    bias = None
    out = None
    if table is not None:
        if space is not None:
            out = space.view(1, heads.stop - heads.start, block.stop - block.start, call.num_keys)
        bias = table.rows(block.start, block.stop, last, out=out)
    if call.terms.bias is not None:
        dense = bias_block(call.terms.bias, heads, block, last)
        bias = dense if bias is None else bias + dense
    has_lanes = call.terms.q_lanes is not None
    has_prior = bias is not None or has_lanes or call.terms.of_sinks is not None
    if call.sinks and has_prior:
        prior = sink_level(call).new_zeros(last) if bias is None else bias
        bias = exempt_sinks(call, prior, heads, block)
    if bias is None and bad is None and call.terms.sink is None:
        return shown
    if bias is not None and call.query_scale is not None:
        scale = call.query_scale[:, heads, block, None]
        owned = out is not None and call.terms.bias is None and scale.shape[0] == 1
        bias = bias.mul_(scale) if owned else bias * scale
    if bad is not None:
        nan_of_bad = torch.zeros_like(bad, dtype=torch.float32).masked_fill(bad, torch.nan)
        column = nan_of_bad[:, heads, None, :last]
        bias = column if bias is None else bias + column
    wide = torch.promote_types(call.q.dtype, torch.float32)
    if bias is None:
        bias = torch.zeros(1, 1, block.stop - block.start, last, dtype=wide, device=call.q.device)
    if shown is not None:
        bias = bias.masked_fill(~shown, -torch.inf)
    sink = sink_logits(call)
    if sink is not None:
        sink = sink[:, heads, block].to(wide)
        shape = (max(len(bias), len(sink)), *sink.shape[1:3], -1)
        bias = torch.cat([sink.expand(shape), bias.to(wide).expand(shape)], dim=-1)
    return bias.to(wide)
