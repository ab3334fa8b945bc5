"""Sinks for kernels that give the log-sum-exp of their rows: the first n tokens of a document,
exempt from the prior and the window, which such kernels leave out; and the learned sink, a logit in
the denominator.

Attention over the other keys and attention over the sinks are two calls, joined by their
log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zoo.attention.call import AttentionCall, key_positions, sink_level, sink_logits
from zoo.positions import Positions
from zoo.priors.tables import BlockedBias
from zoo.priors.terms import PriorTerms


def attend_with_sinks(call: AttentionCall, attend: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """(B, H, T, D) of any call; with sinks, its documents are alone in their rows or causal.

    attend: of a call without sinks the output, and the natural log-sum-exp (B, H, T) of its rows,
        with both gradients. With `wants_lse=False` that is empty.
    """
    if not call.sinks and call.terms.sink is None:
        return attend(call, wants_lse=False)[0]
    if call.sinks and call.segments is None and call.num_keys <= call.sinks:
        # All keys are sinks, which neither prior nor window touches.
        width = call.q.shape[-1]
        call = replace(
            call,
            k=call.k[..., -width:],
            terms=PriorTerms(sink=call.terms.sink),
            window=None,
            sinks=0,
        )
    if not call.sinks:
        out, lse = attend(call)
        sink = sink_logits(call)
        if sink is None:
            return out
        return (out * _share(lse, sink)).to(out.dtype)
    near, near_lse = _attend_sinks(call)
    if call.segments is not None:
        # Sinks are documents of their own: no other row sees them, and what their own rows give is
        # not used.
        later = Positions.documents(call.segments).index() >= call.sinks
        out, lse = attend(replace(call, segments=2 * call.segments + later, sinks=0))
        joined = _join(near, near_lse, out, lse)
        return torch.where(later[:, None, call.offset :, None], joined, near.to(out.dtype))
    # The first rows see sinks alone.
    rows = max(call.sinks - call.offset - _keys_ahead(call), 0)
    out, lse = attend(_cut(call, rows, call.sinks))
    joined = _join(near[:, :, rows:], near_lse[..., rows:], out, lse)
    if not rows:
        return joined
    return torch.cat([near[:, :, :rows].to(out.dtype), joined], dim=2)


def _keys_ahead(call: AttentionCall) -> int:
    """How many keys after its own a row may see."""
    if call.causal:
        return 0
    return call.num_keys if call.window is None else call.window - 1


def _join(near: Tensor, near_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """One softmax of two disjoint sets of keys, from the output and log-sum-exp of each."""
    share = (near_lse - lse).sigmoid()[..., None]
    return (out + (near - out) * share).to(out.dtype)


def _cut(call: AttentionCall, rows: int, keys: int) -> AttentionCall:
    """The call without its first queries and keys."""
    terms = call.terms
    table = call.table
    assert not isinstance(terms.bias, BlockedBias)
    if table is not None:
        assert table.origin is not None
        table = replace(
            table,
            q_code=table.q_code[rows:],
            k_code=table.k_code[keys:],
            origin=table.origin + rows - keys,
        )
    terms = replace(
        terms,
        q_lanes=None if terms.q_lanes is None else terms.q_lanes[:, :, rows:],
        k_lanes=None if terms.k_lanes is None else terms.k_lanes[:, :, keys:],
        table=table,
        bias=None if terms.bias is None else terms.bias[:, :, rows:, keys:],
    )
    return replace(
        call,
        q=call.q[:, :, rows:],
        k=call.k[:, :, keys:],
        v=call.v[:, :, keys:],
        terms=terms,
        query_scale=None if call.query_scale is None else call.query_scale[..., rows:],
        sinks=0,
    )


def _attend_sinks(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Of the sinks alone: the output (B, H, T, D) and the log-sum-exp (B, H, T), float32 or
    wider."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    width = call.q.shape[-1]
    q = call.q.to(wide) / math.sqrt(width)
    row = torch.arange(call.offset, call.num_keys, device=q.device)[:, None]
    # ([B, T,] sinks): the rows of the sinks that a query has.
    place = torch.arange(call.sinks, device=q.device)
    start = None
    if call.segments is not None:
        start = row[:, 0] - key_positions(call)[:, call.offset :]
        place = place + start[..., None]
    k = first_keys(call.k[..., -width:], start, call.sinks)
    v = first_keys(call.v, start, call.sinks)
    logits = by_group(q, k.to(wide).transpose(-1, -2)) + sink_level(call)
    if call.terms.of_sinks is not None:
        logits = logits + call.terms.of_sinks
    if call.query_scale is not None:
        logits = logits * call.query_scale[..., None].to(wide)
    if call.causal:
        logits = logits.masked_fill((place > row).view(-1, 1, *logits.shape[2:]), -math.inf)
    near = by_group(logits.softmax(-1), v.to(wide))
    lse = logits.logsumexp(-1)
    sink = sink_logits(call)
    if sink is None:
        return near, lse
    return near * _share(lse, sink), lse.logaddexp(sink[..., 0])


def _share(lse: Tensor, sink: Tensor) -> Tensor:
    """(B, H, T, 1) share of a row's weight that goes to keys of log-sum-exp `lse` and not to the
    learned sink."""
    return (lse[..., None] - sink).sigmoid()


def first_keys(x: Tensor, start: Tensor | None, count: int) -> Tensor:
    """(B, G, T or 1, count, D): of keys x (B, G, S, D) those from row `start`, (1 or B, T), on;
    None: from the first."""
    if start is None:
        return x[:, :, None, :count]
    place = start[..., None] + torch.arange(count, device=x.device)
    place = place.clamp(max=x.shape[2] - 1)
    row = torch.arange(len(x), device=x.device)[:, None, None]
    by_position = x.transpose(1, 2)[row, place]
    return by_position.permute(0, 3, 1, 2, 4)


def by_group(rows: Tensor, matrices: Tensor) -> Tensor:
    """(B, H, T, m) of rows (B, H, T, n) and matrices (B, G, T or 1, n, m): each group of heads
    shares its own."""
    grouped = rows.unflatten(1, (matrices.shape[1], -1))
    if matrices.shape[2] == 1:
        return (grouped @ matrices[:, :, 0, None]).flatten(1, 2)
    return (grouped[..., None, :] @ matrices[:, :, None]).squeeze(-2).flatten(1, 2)
