"""One attention call as data, the interface of a kernel, and helpers that kernels share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zoo.positions import Positions
from zoo.priors.base import PriorTerms, RelativeTable
from zoo.priors.tables import BlockedBias, padded_bias

P = ParamSpec("P")
R = TypeVar("R")

# Queries and keys of a call with lanes on the CPU, and of its blocks, come in multiples of this.
ALIGNMENT = 16


def traced_as_constant(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, which would import the compiler with this module."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@traced_as_constant
def cuda_capability(device: str) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) on ROCm, whose devices torch also calls "cuda"."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class AttentionCall:
    """A checked call of `prior_attention`; queries are the last T of the S positions.

    Logits are  z[i,j] = (<q_i, k_j>/sqrt(d_c) + K[h,i,j]) · query_scale[h,i],  masked, then softmax over j.

    q (B,H,T,d_c), k (B,Gk,S,d_c) or (B,Gk,S,R+d_c) with lanes folded in, v (B,G,S,D); Gk and G divide H. query_scale
    (1 or B, H, T); the others as in `prior_attention`. A row that sees nothing has output 0.
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
        """(B, Gk, S, R+d_c): keys with their lanes folded in, which are 0 for sinks (see `level`)."""
        keys = self.k if self.terms.k_lanes is None else fold_lanes(self.k, self.terms.k_lanes)
        if not self.sinks or self.terms.q_lanes is None:
            return keys
        column = torch.arange(keys.shape[-1], device=keys.device) < self.terms.q_lanes.shape[-1]
        return keys.masked_fill(self.exempt[:, None, :, None] & column, 0.0)

    @property
    def exempt(self) -> Tensor:
        """(1 or B, S) bool: the sinks, which no prior and no window hides."""
        positions = Positions.line(self.num_keys) if self.segments is None else Positions.documents(self.segments)
        return positions.index(self.q.device) < self.sinks

    @property
    def level(self) -> Tensor:
        """(1 or B, 1 or H, T, 1) K of sinks, in float32 or wider. Lanes are K but for a constant of each row, and 0 of it is
        what they are for the row's own key."""
        q_lanes, k_lanes = self.terms.q_lanes, self.terms.k_lanes
        wide = torch.promote_types(self.q.dtype, torch.float32)
        if q_lanes is None:
            return torch.zeros(1, 1, self.num_queries, 1, dtype=wide, device=self.q.device)
        if k_lanes is None:
            k_lanes = repeat_heads(self.k[..., : q_lanes.shape[-1]], self.q.shape[1])
        return (q_lanes.to(wide) * k_lanes[:, :, self.offset :].to(wide)).sum(-1, keepdim=True)

    @property
    def queries(self) -> Tensor:
        """(B, H, T, R+d_c): queries whose inner product with `keys` is the logit without table and bias.

        Scaled in float32 and rounded once, so kernels run with scale 1 and lanes of 1 stay exact (GOAT eq. 20–24).
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
        """c, where c·<unscaled, keys> is the logit without row scale, table and bias: 1/sqrt(d_c), or 1 with lanes."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.terms.q_lanes is None else 1.0

    @property
    def unscaled(self) -> Tensor:
        """(B, H, T, R+d_c): queries for a kernel that scales float32 logits: q, or lanes and content scaled in that copy."""
        if self.terms.q_lanes is None:
            return self.q
        return fold_lanes(self.q * (1.0 / math.sqrt(self.q.shape[-1])), self.terms.q_lanes)


class Kernel(Protocol):
    """One way to compute an `AttentionCall`. Kernels hold no state of a call and may be shared."""

    def refuses(self, call: AttentionCall) -> str | None:
        """Why this kernel cannot serve the call, for an error message; None where it can."""

    def run(self, call: AttentionCall) -> Tensor:
        """(B, H, T, D) attention output in q's dtype, for a call that `refuses` returned None for."""


def aligned(call: AttentionCall) -> tuple[AttentionCall, slice]:
    """A causal call with lanes, padded to multiples of `ALIGNMENT` queries and keys, and the rows of its output to use.

    Lanes of a ramp are as large as the position, and cancel where they are summed before the content (`fold_lanes`). With a
    few rows or columns left over, matrix products of CPUs sum in another order, and 1e-3 of a weight is lost at 131,072.
    """
    elsewhere = torch.compiler.is_compiling() or call.q.device.type != "cpu"
    if elsewhere or call.terms.q_lanes is None or not call.causal or call.num_queries == 1:
        return call, slice(None)
    after = -call.num_keys % ALIGNMENT
    before = min(-(call.num_queries + after) % ALIGNMENT, call.offset)
    terms, row_scale, segments, mask = call.terms, call.query_scale, call.segments, call.mask
    assert terms.q_lanes is not None
    table = terms.table
    if (not before and not after) or (table is not None and table.origin is None):
        return call, slice(None)
    queries, keys = (0, 0, before, after), (0, 0, 0, after)
    if table is not None:
        assert table.origin is not None
        line = Positions.line(call.num_queries + before + after), Positions.line(call.num_keys + after)
        # The columns that are added are of distances that only padding has.
        table = RelativeTable.line(F.pad(table.table, (before + after, after)), *line, center=table.origin + after)
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
            bias=None if terms.bias is None else padded_bias(terms.bias, before, after),
        ),
        query_scale=None if row_scale is None else F.pad(row_scale, (before, after), value=1.0),
        segments=None if segments is None else torch.cat([segments, segments[:, -1:].expand(-1, after)], dim=1),
        mask=None if mask is None else F.pad(mask, (0, after, before, after), value=True),
    )
    return padded, slice(before, before + call.num_queries)


def fold_lanes(heads: Tensor, lanes: Tensor) -> Tensor:
    """Put lanes (1 or B, 1 or H, L, R) in front of head columns (B, G, L, d): (B, G or H, L, R+d).

    Lanes of an unbounded prior cancel, and should do so before content enters the float32 accumulator. Lanes of each query
    head make the keys of a group differ, so grouped keys are repeated.
    """
    if lanes.shape[1] not in (1, heads.shape[1]):
        heads = repeat_heads(heads, lanes.shape[1])
    lanes = lanes.to(heads.dtype).expand(heads.shape[0], heads.shape[1], -1, -1)
    return torch.cat([lanes, heads], dim=-1)


def repeat_heads(heads: Tensor, num_heads: int) -> Tensor:
    """(B, G, L, D) → (B, num_heads, L, D): each key head serves num_heads/G neighbouring query heads."""
    groups = heads.shape[1]
    return heads if groups == num_heads else heads.repeat_interleave(num_heads // groups, dim=1)


def pad_heads(*heads: Tensor) -> list[Tensor]:
    """Pad columns with zeros to the widest, rounded up to a multiple of 8, as fused kernels require."""
    width = -(-max(h.shape[-1] for h in heads) // 8) * 8
    return [h if h.shape[-1] == width else F.pad(h, (0, width - h.shape[-1])) for h in heads]


def needs_grad(*tensors: Tensor | BlockedBias | None) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: torch's fake tensors, and those on "meta", have shapes alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def bad_keys(call: AttentionCall) -> Tensor | None:
    """(B, Gk, S) bool: keys with a NaN or an infinity; None where there are none, or every row sees every key.

    Hidden keys must not reach a row, and torch adds −∞ to their logits, which leaves NaN. On the CPU alone: elsewhere the
    question synchronises.
    """
    shows_all = call.num_queries == 1 and call.segments is None and call.window is None and call.mask is None
    hides = call.causal or any(x is not None for x in (call.segments, call.window, call.mask))
    if shows_all or not hides or call.k.device.type != "cpu" or torch.compiler.is_compiling() or not has_values(call.k):
        return None
    parts = [call.k] if call.terms.k_lanes is None else [call.k, call.terms.k_lanes]
    if torch._C._functorch.peek_interpreter_stack() or all(bool(part.detach().sum().isfinite()) for part in parts):
        return None
    bad = ~call.keys.detach().isfinite().all(-1)
    return bad if bool(bad.any()) else None


def single_documents(segments: Tensor) -> Tensor:
    """(B,) bool: rows that hold a single document."""
    return (segments == segments[:, :1]).all(dim=1)


def needs_mask(call: AttentionCall) -> bool:
    """Whether torch's attention needs a T × S mask for the call."""
    parts = (call.table, call.terms.bias, call.mask, call.segments, call.window)
    if call.sinks or any(x is not None for x in parts):
        return True
    return call.causal and call.num_queries not in (call.num_keys, 1)


def refuses_mask_and_dropout(call: AttentionCall) -> str | None:
    """The answer of a kernel without a T × S matrix, which has neither a mask to read nor weights to drop."""
    if call.mask is not None:
        return "it reads no T × S mask"
    return "it does not drop weights" if call.dropout else None


def visible(call: AttentionCall, start: int = 0, stop: int | None = None, last_key: int | None = None) -> Tensor | None:
    """(1 or B, 1 or H, T, S) bool: keys visible to queries [start, stop) among keys [0, last_key), or None for all."""
    stop = call.num_queries if stop is None else stop
    last_key = call.num_keys if last_key is None else last_key
    shown = None if call.mask is None else call.mask[:, :, start:stop, :last_key]
    if not call.causal and call.window is None and call.segments is None:
        return shown
    i = torch.arange(call.offset + start, call.offset + stop, device=call.q.device)
    j = torch.arange(last_key, device=call.q.device)
    distance = i[:, None] - j[None, :]
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
    """One buffer reused by all blocks: allocating per block costs more than the arithmetic on it."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.buffer = torch.empty(0, dtype=dtype, device=device)

    def view(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if count > self.buffer.numel():
            self.buffer = self.buffer.new_empty(count)
        return self.buffer[:count].view(shape)
