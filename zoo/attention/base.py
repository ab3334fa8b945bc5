"""One attention call as data, the interface of a kernel, and helpers that kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zoo.errors import check_whole
from zoo.positions import Positions
from zoo.priors.base import RelativeTable, without_autocast
from zoo.priors.tables import BlockedBias
from zoo.priors.terms import PriorTerms

P = ParamSpec("P")
R = TypeVar("R")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EXPECTED = {
    torch.bool: "bool, True where a key may be seen",
    torch.int64: "whole numbers",
    FLOATS[0]: "floating numbers",
}
LINE = "make them with Positions.line(S).tail(T) and Positions.line(S)"

# Queries and keys of a call with lanes on the CPU, and of its blocks, come in multiples of this.
ALIGNMENT = 16


def traced_as_constant(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, which would import the compiler with this module."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@traced_as_constant
def cuda_capability(device: str) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) on ROCm, whose devices torch also calls
    "cuda"."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class AttentionCall:
    """A checked call of `prior_attention`; queries are the last T of the S positions.

    Logits are  z[i,j] = (<q_i, k_j>/sqrt(d_c) + K[h,i,j]) · query_scale[h,i],  masked, then softmax
    over j.

    q (B,H,T,d_c), k (B,Gk,S,d_c) or (B,Gk,S,R+d_c) with lanes folded in, v (B,G,S,D); Gk and G
    divide H. query_scale (1 or B, H, T); the others as in `prior_attention`. A row that sees
    nothing has output 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    terms: PriorTerms
    causal: bool
    query_scale: Tensor | None = None
    segments: Tensor | None = None
    window: int | None = None
    mask: Tensor | None = None
    dropout: float = 0.0
    sinks: int = 0

    @property
    def num_queries(self) -> int:
        return self.q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.k.shape[2]

    @property
    def offset(self) -> int:
        """Row index of the first query."""
        return self.num_keys - self.num_queries

    @property
    def on_cuda(self) -> bool:
        return self.q.device.type == "cuda"

    @property
    def table(self) -> RelativeTable | None:
        return self.terms.table

    @property
    def keys(self) -> Tensor:
        """(B, Gk, S, R+d_c): keys with their lanes folded in, which are 0 for sinks (see
        `level`)."""
        keys = self.k if self.terms.k_lanes is None else fold_lanes(self.k, self.terms.k_lanes)
        if not self.sinks or self.terms.q_lanes is None:
            return keys
        column = torch.arange(keys.shape[-1], device=keys.device) < self.terms.q_lanes.shape[-1]
        return keys.masked_fill(self.exempt[:, None, :, None] & column, 0.0)

    @property
    def exempt(self) -> Tensor:
        """(1 or B, S) bool: the sinks, which no prior and no window hides."""
        return self.places < self.sinks

    @property
    def places(self) -> Tensor:
        """(1 or B, S) int64 position of each key in its document."""
        positions = (
            Positions.line(self.num_keys)
            if self.segments is None
            else Positions.documents(self.segments)
        )
        return positions.index(self.q.device)

    @property
    def level(self) -> Tensor:
        """(1 or B, 1 or H, T, 1) K of sinks, in float32 or wider. Lanes are K but for a constant of
        each row, and 0 of it is what they are for the row's own key."""
        q_lanes = self.terms.q_lanes
        k_lanes = self.terms.k_lanes
        wide = torch.promote_types(self.q.dtype, torch.float32)
        if q_lanes is None:
            return torch.zeros(1, 1, self.num_queries, 1, dtype=wide, device=self.q.device)
        if k_lanes is None:
            k_lanes = repeat_heads(self.k[..., : q_lanes.shape[-1]], self.q.shape[1])
        return (q_lanes.to(wide) * k_lanes[:, :, self.offset :].to(wide)).sum(-1, keepdim=True)

    def exempt_sinks(self, prior: Tensor, heads: slice, rows: slice) -> Tensor:
        """K (1 or B, 1 or h, t, s) of some heads and rows and the first keys, with K of sinks in
        their columns."""
        level = self.level[:, :, rows]
        of_sinks = self.terms.of_sinks
        level = level if level.shape[1] == 1 else level[:, heads]
        places = self.places[:, None, None, : prior.shape[-1]]
        if of_sinks is not None:
            level = level + torch.take_along_dim(
                of_sinks[:, heads, rows], places.clamp(max=self.sinks - 1), dim=-1
            )
        return torch.where(places < self.sinks, level, prior)

    @property
    def sink_logits(self) -> Tensor | None:
        """(1 or B, H, T, 1) b_h of a learned sink in float32 or wider, above K of the row's own key
        where K is in lanes."""
        if self.terms.sink is None:
            return None
        level = self.level if self.query_scale is None else self.level * self.query_scale[..., None]
        return self.terms.sink.to(level.dtype)[:, None, None] + level

    @property
    def queries(self) -> Tensor:
        """(B, H, T, R+d_c): queries whose inner product with `keys` is the logit without table and
        bias.

        Scaled in float32 and rounded once, so kernels run with scale 1 and lanes of 1 stay exact
        (GOAT eq. 20–24).
        """
        scale = 1.0 / math.sqrt(self.q.shape[-1])
        wide = torch.promote_types(self.q.dtype, torch.float32)
        row = None if self.query_scale is None else self.query_scale.to(wide)[..., None]
        content = self.q * scale if row is None else self.q.to(wide) * (row * scale)
        if self.terms.q_lanes is None:
            return content.to(self.q.dtype)
        lanes = self.terms.q_lanes if row is None else self.terms.q_lanes * row
        return fold_lanes(content.to(self.q.dtype), lanes)

    @property
    def softmax_scale(self) -> float:
        """c, where c·<unscaled, keys> is the logit without row scale, table and bias: 1/sqrt(d_c),
        or 1 with lanes."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.terms.q_lanes is None else 1.0

    @property
    def unscaled(self) -> Tensor:
        """(B, H, T, R+d_c): queries for a kernel that scales float32 logits: q, or lanes and
        content scaled in that copy."""
        if self.terms.q_lanes is None:
            return self.q
        return fold_lanes(self.q * (1.0 / math.sqrt(self.q.shape[-1])), self.terms.q_lanes)


class Kernel(Protocol):
    """One way to compute an `AttentionCall`. Kernels hold no state of a call and may be shared."""

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this kernel cannot serve the call, for an error message; None where it can."""

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) attention output in q's dtype, for a call that `refuses` returned None
        for."""


def aligned(call: AttentionCall) -> tuple[AttentionCall, slice]:
    """A causal call with lanes, padded to multiples of `ALIGNMENT` queries and keys, and the rows
    of its output to use: with some left over, matrix products of CPUs sum in another order than
    that in which lanes cancel (`fold_lanes`)."""
    elsewhere = torch.compiler.is_compiling() or call.q.device.type != "cpu"
    if elsewhere or call.terms.q_lanes is None or not call.causal or call.num_queries == 1:
        return call, slice(None)
    after = -call.num_keys % ALIGNMENT
    before = min(-(call.num_queries + after) % ALIGNMENT, call.offset)
    terms = call.terms
    row_scale = call.query_scale
    segments = call.segments
    mask = call.mask
    bias = terms.bias
    assert terms.q_lanes is not None
    table = terms.table
    if (not before and not after) or (table is not None and table.origin is None):
        return call, slice(None)
    queries = (0, 0, before, after)
    keys = (0, 0, 0, after)
    if table is not None:
        assert table.origin is not None
        line = (
            Positions.line(call.num_queries + before + after),
            Positions.line(call.num_keys + after),
        )
        # The columns that are added are of distances that only padding has.
        table = RelativeTable.line(
            F.pad(table.table, (before + after, after)), *line, center=table.origin + after
        )
    if isinstance(bias, BlockedBias):
        bias = bias.padded(before, after)
    elif bias is not None:
        bias = F.pad(bias, (0, after, before, after))
    padded = replace(
        call,
        q=F.pad(call.q, queries),
        k=F.pad(call.k, keys),
        v=F.pad(call.v, keys),
        terms=replace(
            terms,
            q_lanes=F.pad(terms.q_lanes, queries),
            k_lanes=None if terms.k_lanes is None else F.pad(terms.k_lanes, keys),
            table=table,
            bias=bias,
        ),
        query_scale=None if row_scale is None else F.pad(row_scale, (before, after), value=1.0),
        segments=None
        if segments is None
        else torch.cat([segments, segments[:, -1:].expand(-1, after)], dim=1),
        mask=None if mask is None else F.pad(mask, (0, after, before, after), value=True),
    )
    return padded, slice(before, before + call.num_queries)


def fold_lanes(heads: Tensor, lanes: Tensor) -> Tensor:
    """Put lanes (1 or B, 1 or H, L, R) in front of head columns (B, G, L, d): (B, G or H, L, R+d).

    Lanes of an unbounded prior cancel, and should do so before content enters the float32
    accumulator. Lanes of each query head make the keys of a group differ, so grouped keys are
    repeated.
    """
    if lanes.shape[1] not in (1, heads.shape[1]):
        heads = repeat_heads(heads, lanes.shape[1])
    lanes = lanes.to(heads.dtype).expand(heads.shape[0], heads.shape[1], -1, -1)
    return torch.cat([lanes, heads], dim=-1)


def repeat_heads(heads: Tensor, num_heads: int) -> Tensor:
    """(B, G, L, D) → (B, num_heads, L, D): each key head serves num_heads/G neighbouring query
    heads."""
    groups = heads.shape[1]
    return heads if groups == num_heads else heads.repeat_interleave(num_heads // groups, dim=1)


def pad_heads(*heads: Tensor) -> list[Tensor]:
    """Pad columns with zeros to the widest, rounded up to a multiple of 8, as fused kernels
    require."""
    width = -(-max(h.shape[-1] for h in heads) // 8) * 8
    return [h if h.shape[-1] == width else F.pad(h, (0, width - h.shape[-1])) for h in heads]


def spread_gain(call: AttentionCall) -> AttentionCall:
    """The call with what `gain` adds to the content's logits as a dense bias, which takes T × S
    memory for each head."""
    if call.terms.gain is None:
        return call
    keys = repeat_heads(call.k, call.q.shape[1])
    width = call.q.shape[-1]
    wide = torch.promote_types(call.q.dtype, torch.float32)
    with without_autocast(call.q):
        content = call.q.to(wide) @ keys[..., -width:].to(wide).transpose(-1, -2) / math.sqrt(width)
        added = PriorTerms(bias=(call.terms.gain.dense().to(wide) - 1) * content)
    return replace(call, terms=replace(call.terms, gain=None) + added)


def needs_grad(*tensors: Tensor | BlockedBias | None) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: torch's fake tensors, and those on "meta", have
    shapes alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def bad_keys(call: AttentionCall) -> Tensor | None:
    """(B, Gk, S) bool: keys with a NaN or an infinity, where they may be hidden from a row: torch
    adds −∞ to their logits, which leaves NaN. None where there are none; on the CPU alone:
    elsewhere the question synchronises."""
    shows_all = (
        call.num_queries == 1
        and call.segments is None
        and call.window is None
        and call.mask is None
    )
    hides = call.causal or any(x is not None for x in (call.segments, call.window, call.mask))
    if (
        shows_all
        or not hides
        or call.k.device.type != "cpu"
        or torch.compiler.is_compiling()
        or not has_values(call.k)
    ):
        return None
    parts = [call.k] if call.terms.k_lanes is None else [call.k, call.terms.k_lanes]
    if torch._C._functorch.peek_interpreter_stack() or all(
        bool(part.detach().sum().isfinite()) for part in parts
    ):
        return None
    bad = ~call.keys.detach().isfinite().all(-1)
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
    bidirectional = call.sinks and call.segments is not None and not call.causal
    return "sinks of several documents need causal attention" if bidirectional else None


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
        mask = mask | call.exempt[:, None, None, :last_key]
    if call.causal:
        mask = mask & (distance >= 0)
    if call.segments is not None:
        rows = call.segments[:, call.offset + start : call.offset + stop]
        mask = mask & (rows[:, None, :, None] == call.segments[:, None, None, :last_key])
    return mask if shown is None else mask & shown


class Workspace:
    """One buffer reused by all blocks: allocating per block costs more than the arithmetic on
    it."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.buffer = torch.empty(0, dtype=dtype, device=device)

    def view(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if count > self.buffer.numel():
            self.buffer = self.buffer.new_empty(count)
        return self.buffer[:count].view(shape)


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
