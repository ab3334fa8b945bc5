"""Lanes: one ordinary scaled_dot_product_attention call on wider heads."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.base import AttentionCall, repeat_heads, visible
from zoo.priors.base import PriorTerms

__all__ = ["needs_mask", "refuses", "run"]

# Logits per head whose mask is made at once: 64 MiB of float32.
MASK_LIMIT = 1 << 24


def needs_mask(call: AttentionCall) -> bool:
    """Whether the call can only be written with a T × S mask, which costs O(T·S) memory."""
    if call.table is not None or call.terms.bias is not None or call.segments is not None or call.window is not None:
        return True
    return call.causal and call.num_queries not in (1, call.num_keys)


def refuses(call: AttentionCall) -> str | None:
    """It serves every call; with a table, documents, a window or a causal offset it needs a T × S mask."""
    return None


def run(call: AttentionCall) -> Tensor:
    """(B, H, T, D). Queries and keys are [lanes, content], padded with zeros to a common width, a multiple of 8.

    A long causal call that needs a mask is made in blocks of queries, so that without gradients one block's mask is all
    that is held.
    """
    rows = max(MASK_LIMIT // call.num_keys, 1)
    if call.causal and needs_mask(call) and call.num_queries > rows:
        starts = range(0, call.num_queries, rows)
        return torch.cat([_run(_rows(call, a, min(a + rows, call.num_queries))) for a in starts], dim=2)
    return _run(call)


def _rows(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """The causal call of queries [start, stop) over the keys up to the last of them."""
    last, terms = stop + call.offset, call.terms
    table = None if terms.table is None else terms.table.rows(start, stop, last)
    bias = None if terms.bias is None else terms.bias[:, :, start:stop, :last]
    q_lanes = None if terms.q_lanes is None else terms.q_lanes[:, :, start:stop]
    k_lanes = None if terms.k_lanes is None else terms.k_lanes[:, :, :last]
    return replace(
        call,
        q=call.q[:, :, start:stop],
        k=call.k[:, :, :last],
        v=call.v[:, :, :last],
        terms=PriorTerms(q_lanes, k_lanes, table, bias),
        query_scale=None if call.query_scale is None else call.query_scale[..., start:stop],
        segments=None if call.segments is None else call.segments[:, :last],
    )


def _run(call: AttentionCall) -> Tensor:
    num_heads, width = call.q.shape[1], call.v.shape[-1]
    q, k, v = call.queries, call.keys, call.v
    if num_heads != k.shape[1] and call.num_queries == 1 and k.shape[1] == v.shape[1] and not needs_mask(call):
        # One query: the heads of a group become rows that share its keys, which then need no copies.
        q, k, v = pad_heads(q, k, v)
        out = F.scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)).squeeze(3), k, v, scale=1.0)
        return out.flatten(1, 2)[:, :, None, :width]
    q, k, v = pad_heads(q, repeat_heads(k, num_heads), repeat_heads(v, num_heads))
    mask = _mask(call) if needs_mask(call) else None
    if mask is not None and mask.dtype != torch.bool and q.dtype in (torch.bfloat16, torch.float16):
        # In half precision a log-prior of −100 is off by a quarter. The bias stays float32, and so does this call.
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, scale=1.0)
        return out[..., :width].to(q.dtype)
    is_causal = call.causal and mask is None and call.num_queries > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=1.0)[..., :width]


def pad_heads(*heads: Tensor) -> list[Tensor]:
    """Zero columns up to the widest of them, rounded up to a multiple of 8: what fused kernels take."""
    width = -(-max(h.shape[-1] for h in heads) // 8) * 8
    return [h if h.shape[-1] == width else F.pad(h, (0, width - h.shape[-1])) for h in heads]


def _mask(call: AttentionCall) -> Tensor:
    """(1 or B, 1 or H, T, S): bool where only visibility matters, else the additive bias."""
    mask = visible(call)
    parts = [t for t in (call.table.dense() if call.table is not None else None, call.terms.bias) if t is not None]
    if not parts:
        assert mask is not None
        return mask
    bias = sum(parts[1:], parts[0])
    if call.query_scale is not None:
        bias = bias * call.query_scale[..., None]
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf)
    return bias.to(torch.promote_types(call.q.dtype, torch.float32))
