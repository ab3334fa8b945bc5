"""Whether the parts of an attention call fit together, and what to say where they do not."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from zoo.attention.call import AttentionCall
from zoo.errors import check_whole
from zoo.priors.base import RelativeTable
from zoo.priors.tables import BlockedBias
from zoo.priors.terms import PriorTerms

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


EXPECTED = {
    torch.bool: "bool, True where a key may be seen",
    torch.int64: "whole numbers",
    FLOATS[0]: "floating numbers",
}


LINE = "make them with Positions.line(S).tail(T) and Positions.line(S)"


def check_call(call: AttentionCall) -> None:
    """Raise ValueError unless types, shapes, dtypes, devices and positions of a call fit
    together."""
    _check_heads(call)
    batch, heads, queries, width = call.q.shape
    keys = call.num_keys
    device = call.q.device
    if call.causal not in (True, False):
        raise ValueError(f"causal must be True or False, got {_brief(call.causal)}")
    if call.causal and queries > keys:
        raise ValueError(f"causal attention of {queries} queries needs as many keys, got {keys}")
    _check_terms(call, (batch, heads, queries, keys))
    if call.query_scale is not None:
        _check("query_scale", call.query_scale, (batch, heads, queries), device, free=1)
    if call.window is not None:
        check_whole("window", call.window, 1)
    if call.segments is not None:
        _check("segments", call.segments, (batch, keys), device, dtypes=IDS)
        if queries > keys:
            raise ValueError(
                f"documents need a key for every query, got {queries} queries, {keys} keys"
            )
    _check_sinks(call)
    if call.mask is not None:
        shape = (batch, heads, queries, keys)
        _check("mask", call.mask, shape, device, free=2, dtypes=(torch.bool,))
    if not 0 <= call.dropout < 1:
        raise ValueError(f"dropout must be a probability below 1, got {call.dropout}")
    # Keys of a cache hold their lanes.
    folded_lanes = 0
    if call.terms.q_lanes is not None and call.terms.k_lanes is None:
        folded_lanes = call.terms.q_lanes.shape[3]
    expected = width + folded_lanes
    if call.k.shape[3] != expected:
        raise ValueError(
            f"keys must be {expected} wide ({width} content columns as in q), got {call.k.shape[3]}"
        )


def _check_heads(call: AttentionCall) -> None:
    """Types, shapes, dtypes and devices of q, k and v."""
    q = call.q
    k = call.k
    v = call.v
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        values = ", ".join(_brief(x) for x in (q, k, v))
        raise ValueError(f"q, k and v must be tensors, got {values}")
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be (B, heads, length, width): 4 axes, got {shapes}")
    heads = q.shape[1]
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[2] == v.shape[2]):
        raise ValueError(f"q, k, v disagree: {shapes}")
    if 0 in (*q.shape[1:], *k.shape[1:], *v.shape[1:]):
        raise ValueError(f"q, k, v need at least one head, position and column each, got {shapes}")
    if heads % k.shape[1] or heads % v.shape[1]:
        raise ValueError(
            f"key heads must divide {heads} query heads, got {k.shape[1]} for k, {v.shape[1]} for v"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        names = ", ".join(map(str, FLOATS))
        raise ValueError(
            f"q, k and v must have one dtype of {names}, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"k and v must be on {q.device} as q is, got {k.device} and {v.device}")


def _check_sinks(call: AttentionCall) -> None:
    """Sinks by number, and the learned sink of a prior in lanes, which is level with a row's own
    key."""
    check_whole("sinks", call.sinks, 0)
    if call.sinks and call.table is not None and call.table.origin is None:
        raise ValueError(
            f"sinks={call.sinks}: they are of a line; prefix tokens of a grid have no prior as it "
            "is"
        )
    beside_lanes = call.terms.sink is not None and call.terms.q_lanes is not None
    if (call.sinks or beside_lanes) and call.num_queries > call.num_keys:
        raise ValueError(
            f"sinks need a key for every query, got {call.num_queries} queries, {call.num_keys} "
            "keys"
        )


def _check_terms(call: AttentionCall, shape: tuple[int, int, int, int]) -> None:
    """The prior's terms, of a call of `shape` (B, H, T, S)."""
    terms: object = call.terms
    if not isinstance(terms, PriorTerms):
        hint = "; PriorTerms(table=...) has a table" if isinstance(terms, RelativeTable) else ""
        raise ValueError(
            f"terms must be the PriorTerms that a prior returns, or None, got {_brief(terms)}{hint}"
        )
    device = call.q.device
    batch, heads, queries, keys = shape
    if terms.q_lanes is not None or terms.k_lanes is not None:
        _check_lanes(terms, shape, device)
    if terms.bias is not None:
        _check("the prior's bias", terms.bias, shape, device, free=2)
    if terms.sink is not None:
        _check("the prior's sink", terms.sink, (heads,), device)
    if terms.of_sinks is not None:
        of_sinks = (batch, heads, queries, call.sinks)
        _check("the prior's K of sinks", terms.of_sinks, of_sinks, device, free=1)
    offset = terms.offset
    if terms.table is not None:
        _check_table(call, terms.table, heads)
        if terms.table.origin is not None:
            offset = terms.table.origin - terms.table.center
    aligned = call.causal or call.window is not None or call.segments is not None
    if aligned and offset is not None and offset != call.offset:
        raise ValueError(
            f"the prior's terms have the first query {offset} rows after the first key, the call "
            f"has it {call.offset} after: its queries are the last {queries} of {keys} positions; "
            f"{LINE}"
        )
    # A mask may be what makes a bidirectional call causal.
    may_differ = not call.causal and call.mask is not None
    if terms.causal not in (None, call.causal) and not may_differ:
        raise ValueError(
            f"the prior's terms are for causal={terms.causal} and the call has "
            f"causal={call.causal}: make them with causal={call.causal}"
        )


def _check_lanes(terms: PriorTerms, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Query lanes, and as many key lanes or none."""
    batch, heads, queries, keys = shape
    q_lanes = terms.q_lanes
    k_lanes = terms.k_lanes
    if q_lanes is None or (k_lanes is not None and q_lanes.shape[-1:] != k_lanes.shape[-1:]):
        raise ValueError(
            f"the prior has {_count_lanes(q_lanes)} query lanes and {_count_lanes(k_lanes)} key "
            "lanes, expected as many"
        )
    lanes = q_lanes.shape[-1:]
    _check("the prior's query lanes", q_lanes, (batch, heads, queries, *lanes), device, free=2)
    if k_lanes is not None:
        _check("the prior's key lanes", k_lanes, (batch, heads, keys, *lanes), device, free=2)


def _count_lanes(lanes: Tensor | None) -> str:
    if lanes is None:
        return "no"
    return str(lanes.shape[-1] if lanes.ndim else 0)


def _check_table(call: AttentionCall, table: RelativeTable, heads: int) -> None:
    """A table over the call's queries and keys, with a column for each of their displacements."""
    values = table.table
    lengths = [
        ("queries", table.q_code, call.num_queries),
        ("keys", table.k_code, call.num_keys),
    ]
    for what, code, length in lengths:
        if code.shape[-1] != length:
            raise ValueError(
                f"the prior's table's {what} are of {code.shape[-1]} positions, the call has "
                f"{length}; {LINE}"
            )
    columns = values.shape[-1]
    if values.ndim != 2 or values.shape[0] != heads:
        raise ValueError(f"the prior's table is of {values.shape[0]} heads, q has {heads}")
    _check("the prior's table", values, (heads, columns), call.q.device)
    first = 0
    last = columns - 1
    if table.shape is not None:
        last = (2 * table.shape[0] - 1) * (2 * table.shape[1] - 1) - 1
    elif table.origin is not None:
        first = table.origin - (call.offset if call.causal else call.num_keys - 1)
        last = table.origin + call.num_queries - 1
    if first < 0 or last >= columns:
        raise ValueError(
            f"the prior's table has {columns} columns, and the call reads columns {first} to {last}"
        )


def _check(
    what: str,
    value: object,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    free: int = 0,
    dtypes: Collection[torch.dtype] = FLOATS,
) -> None:
    """ValueError unless `value` is a tensor (or blocked bias) of `shape`, whose first `free` axes
    may be 1."""
    if not isinstance(value, Tensor | BlockedBias):
        raise ValueError(f"{what} must be a tensor, got {_brief(value)}")
    sizes = tuple(value.shape)
    fits = len(sizes) == len(shape) and sizes[free:] == shape[free:]
    broadcasts = all(size in (1, full) for size, full in zip(sizes[:free], shape, strict=False))
    if not (fits and broadcasts):
        may = ("", ", or 1 on its first axis", ", or 1 on its first two axes")[free]
        raise ValueError(f"{what} must be {shape}{may}, got {sizes}")
    if value.dtype not in dtypes:
        raise ValueError(f"{what} must be {EXPECTED[next(iter(dtypes))]}, got {value.dtype}")
    if value.device != device:
        hint = ""
        if "prior" in what:
            hint = "; a prior without parameters makes its terms on the device of x"
        raise ValueError(f"{what} must be on {device} as q is, got {value.device}{hint}")


def _brief(value: object) -> str:
    """A value in an error message: tensors and long ones by their type."""
    text = "" if isinstance(value, Tensor) else repr(value)
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"
