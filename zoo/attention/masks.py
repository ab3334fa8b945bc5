"""Which keys a query sees, and which calls need a T × S mask to say so."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.attention.call import AttentionCall, find_sinks, fold_keys
from zoo.attention.tracing import has_values


def bad_keys(call: AttentionCall) -> Tensor | None:
    """(B, Gk, S) bool: keys with a NaN or an infinity, where they may be hidden from a row: torch
    adds −∞ to their logits, which leaves NaN. None where there are none; on the CPU alone:
    elsewhere the question synchronises."""
    restricted = any(x is not None for x in (call.segments, call.window, call.mask))
    one_causal_query = call.causal and call.num_queries == 1
    hides = restricted or (call.causal and not one_causal_query)
    if not hides or call.k.device.type != "cpu":
        return None
    if torch.compiler.is_compiling() or not has_values(call.k):
        return None
    # Under torch.func a value cannot be read.
    if torch._C._functorch.peek_interpreter_stack():
        return None
    parts = [call.k] if call.terms.k_lanes is None else [call.k, call.terms.k_lanes]
    # A sum is finite unless one of its summands is not: one pass without a mask.
    if all(bool(part.detach().sum().isfinite()) for part in parts):
        return None
    bad = ~fold_keys(call).detach().isfinite().all(-1)
    return bad if bool(bad.any()) else None


def single_documents(segments: Tensor) -> Tensor:
    """(B,) bool: rows that hold a single document."""
    return (segments == segments[:, :1]).all(dim=1)


def needs_mask(call: AttentionCall) -> bool:
    """Whether torch's attention needs a T × S mask for the call."""
    parts = (call.table, call.terms.bias, call.mask, call.segments, call.window, call.terms.sink)
    if call.sinks or any(x is not None for x in parts):
        return True
    return call.causal and call.num_queries not in (call.num_keys, 1)


def refuses_matrix(call: AttentionCall) -> str | None:
    """Why a kernel without a T × S matrix cannot serve a call: it has neither a mask to read nor
    weights to drop."""
    if call.mask is not None:
        return "it reads no T × S mask"
    if call.dropout:
        return "it does not drop weights"
    if call.sinks and call.segments is not None and not call.causal:
        return "sinks of several documents need causal attention"
    return None


def visible(
    call: AttentionCall, start: int = 0, stop: int | None = None, last_key: int | None = None
) -> Tensor | None:
    """(1 or B, 1 or H, T, S) bool: keys visible to queries [start, stop) among keys [0, last_key),
    or None for all."""
    stop = call.num_queries if stop is None else stop
    last_key = call.num_keys if last_key is None else last_key
    shown = None if call.mask is None else call.mask[:, :, start:stop, :last_key]
    if not call.causal and call.window is None and call.segments is None:
        return shown
    i = torch.arange(call.offset + start, call.offset + stop, device=call.q.device)
    distance = i[:, None] - torch.arange(last_key, device=call.q.device)[None, :]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if call.window is not None:
        mask &= distance.abs() < call.window
    mask = mask[None, None]
    if call.window is not None and call.sinks:
        mask = mask | find_sinks(call)[:, None, None, :last_key]
    if call.causal:
        mask = mask & (distance >= 0)
    if call.segments is not None:
        q_documents = call.segments[:, call.offset + start : call.offset + stop]
        k_documents = call.segments[:, :last_key]
        mask = mask & (q_documents[:, None, :, None] == k_documents[:, None, None, :])
    return mask if shown is None else mask & shown
