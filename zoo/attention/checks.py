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
    q = call.q
    k = call.k
    v = call.v
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise ValueError(
            f"q, k and v must be tensors, got {', '.join(_brief(x) for x in (q, k, v))}"
        )
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be (B, heads, length, width): 4 axes, got {shapes}")
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    if not (batch == k.shape[0] == v.shape[0] and keys == v.shape[2]):
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
    device = q.device
    if k.device != device or v.device != device:
        raise ValueError(f"k and v must be on {device} as q is, got {k.device} and {v.device}")
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
    check_whole("sinks", call.sinks, 0)
    if call.sinks and call.table is not None and call.table.origin is None:
        raise ValueError(
            f"sinks={call.sinks}: they are of a line; prefix tokens of a grid have no prior as it is"
        )
    of_lanes = call.terms.sink is not None and call.terms.q_lanes is not None
    if (call.sinks or of_lanes) and queries > keys:
        raise ValueError(f"sinks need a key for every query, got {queries} queries, {keys} keys")
    if call.mask is not None:
        _check(
            "mask", call.mask, (batch, heads, queries, keys), device, free=2, dtypes=(torch.bool,)
        )
    if not 0 <= call.dropout < 1:
        raise ValueError(f"dropout must be a probability below 1, got {call.dropout}")
    inside = (
        0
        if call.terms.q_lanes is None or call.terms.k_lanes is not None
        else call.terms.q_lanes.shape[3]
    )
    if k.shape[3] != width + inside:
        raise ValueError(
            f"keys must be {width + inside} wide ({width} content columns as in q), got {k.shape[3]}"
        )


def _check_terms(call: AttentionCall, shape: tuple[int, int, int, int]) -> None:
    terms: object = call.terms
    if not isinstance(terms, PriorTerms):
        hint = "; PriorTerms(table=...) has a table" if isinstance(terms, RelativeTable) else ""
        raise ValueError(
            f"terms must be the PriorTerms that a prior returns, or None, got {_brief(terms)}{hint}"
        )
    device = call.q.device
    batch, heads, queries, keys = shape
    q_lanes = terms.q_lanes
    k_lanes = terms.k_lanes
    if q_lanes is not None or k_lanes is not None:
        if q_lanes is None or (k_lanes is not None and q_lanes.shape[-1:] != k_lanes.shape[-1:]):
            have, wanted = (
                "no" if x is None else x.shape[-1] if x.ndim else 0 for x in (q_lanes, k_lanes)
            )
            raise ValueError(
                f"the prior has {have} query lanes and {wanted} key lanes, expected as many"
            )
        lanes = q_lanes.shape[-1:]
        _check("the prior's query lanes", q_lanes, (batch, heads, queries, *lanes), device, free=2)
        if k_lanes is not None:
            _check("the prior's key lanes", k_lanes, (batch, heads, keys, *lanes), device, free=2)
    if terms.bias is not None:
        _check("the prior's bias", terms.bias, shape, device, free=2)
    if terms.sink is not None:
        _check("the prior's sink", terms.sink, (heads,), device)
    if terms.of_sinks is not None:
        _check(
            "the prior's K of sinks",
            terms.of_sinks,
            (batch, heads, queries, call.sinks),
            device,
            free=1,
        )
    offset = terms.offset
    if terms.table is not None:
        _check_table(call, terms.table, heads)
        if terms.table.origin is not None:
            offset = terms.table.origin - terms.table.center
    aligned = call.causal or call.window is not None or call.segments is not None
    if aligned and offset is not None and offset != call.offset:
        raise ValueError(
            f"the prior's terms have the first query {offset} rows after the first key, the call has it {call.offset} after: "
            f"its queries are the last {queries} of {keys} positions; {LINE}"
        )
    # A mask may be what makes a bidirectional call causal.
    if (
        terms.causal is not None
        and terms.causal != call.causal
        and (call.causal or call.mask is None)
    ):
        raise ValueError(
            f"the prior's terms are for causal={terms.causal} and the call has causal={call.causal}: "
            f"make them with causal={call.causal}"
        )


def _check_table(call: AttentionCall, table: RelativeTable, heads: int) -> None:
    values = table.table
    for what, code, length in (
        ("queries", table.q_code, call.num_queries),
        ("keys", table.k_code, call.num_keys),
    ):
        if (count := code.shape[-1]) != length:
            raise ValueError(
                f"the prior's table's {what} are of {count} positions, the call has {length}; {LINE}"
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
    if not (
        fits and all(size in (1, full) for size, full in zip(sizes[:free], shape, strict=False))
    ):
        may = ("", ", or 1 on its first axis", ", or 1 on its first two axes")[free]
        raise ValueError(f"{what} must be {shape}{may}, got {sizes}")
    if value.dtype not in dtypes:
        raise ValueError(f"{what} must be {EXPECTED[next(iter(dtypes))]}, got {value.dtype}")
    if value.device != device:
        hint = (
            "; a prior without parameters makes its terms on the device of x"
            if "prior" in what
            else ""
        )
        raise ValueError(f"{what} must be on {device} as q is, got {value.device}{hint}")


def _brief(value: object) -> str:
    """A value in an error message: tensors and long ones by their type."""
    text = "" if isinstance(value, Tensor) else repr(value)
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"
