"""The oracle: dense logits in any dtype. O(T·S) memory."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.call import AttentionCall, exempt_sinks, sink_logits
from zoo.attention.heads import repeat_heads
from zoo.attention.masks import visible
from zoo.priors.tables import bias_block


class ReferenceKernel:
    """The oracle. Serves every call."""

    def refuses(self, call: AttentionCall) -> str | None:
        return None

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) attention output; below float32, inputs are cast to float32 and the result
        is rounded once."""
        return attend(call)[0]


REFERENCE = ReferenceKernel()


def logits_of(call: AttentionCall, rows: slice = slice(None)) -> Tensor:
    """(B, H, t, S) masked logits of some rows of a call, in float32 or wider."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    num_heads = call.q.shape[1]
    width = call.q.shape[-1]
    lanes = call.terms.q_lanes
    keys = repeat_heads(call.k, num_heads).to(wide)
    logits = call.q[:, :, rows].to(wide) @ keys[..., -width:].transpose(-1, -2) / math.sqrt(width)
    prior = torch.zeros_like(logits)
    if lanes is not None:
        k_lanes = keys[..., :-width] if call.terms.k_lanes is None else call.terms.k_lanes.to(wide)
        prior = prior + lanes[:, :, rows].to(wide) @ k_lanes.transpose(-1, -2)
    if call.table is not None:
        prior = prior + call.table.of_rows(rows).dense().to(wide)
    if call.terms.bias is not None:
        prior = prior + bias_block(call.terms.bias, slice(None), rows, call.num_keys).to(wide)
    if call.sinks:
        prior = exempt_sinks(call, prior, slice(None), rows)
    logits = logits + prior
    if call.query_scale is not None:
        logits = logits * call.query_scale[:, :, rows].to(wide)[..., None]
    start, stop, _ = rows.indices(call.num_queries)
    mask = visible(call, start, stop)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return logits


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, D) in q's dtype, and the weights (B, H, T, S), in float32 or wider and
    before dropout."""
    logits = logits_of(call)
    sink = sink_logits(call)
    if sink is not None:
        beside = torch.cat([sink.expand(*logits.shape[:3], 1), logits], dim=-1)
        weights = beside.softmax(-1)[..., 1:]
    elif call.mask is not None or call.offset < 0:
        # Rows may see no key. The softmax of nothing but −∞ is NaN, and so is its gradient,
        # whatever is put in its place afterwards. A row of NaN is not empty, and stays NaN.
        empty = (logits == -math.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    else:
        weights = logits.softmax(-1)
    dropped = F.dropout(weights, call.dropout) if call.dropout else weights
    out = dropped @ repeat_heads(call.v, call.q.shape[1]).to(logits.dtype)
    return out.to(call.q.dtype), weights
