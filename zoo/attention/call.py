"""One attention call as data, the interface of a kernel, and helpers that kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.attention.heads import fold_lanes, repeat_heads
from zoo.positions import Positions
from zoo.priors.base import RelativeTable, without_autocast
from zoo.priors.tables import BlockedBias
from zoo.priors.terms import PriorTerms

# Queries and keys of a call with lanes on the CPU, and of its blocks, come in multiples of this.
ALIGNMENT = 16


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
    def softmax_scale(self) -> float:
        """c, where c·<unscaled, keys> is the logit without row scale, table and bias: 1/sqrt(d_c),
        or 1 with lanes."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.terms.q_lanes is None else 1.0


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
    table = call.terms.table
    if table is not None and table.origin is None:
        return call, slice(None)
    after = -call.num_keys % ALIGNMENT
    before = min(-(call.num_queries + after) % ALIGNMENT, call.offset)
    if not before and not after:
        return call, slice(None)
    row_scale = call.query_scale
    if row_scale is not None:
        row_scale = F.pad(row_scale, (before, after), value=1.0)
    segments = call.segments
    if segments is not None:
        segments = torch.cat([segments, segments[:, -1:].expand(-1, after)], dim=1)
    mask = call.mask
    if mask is not None:
        mask = F.pad(mask, (0, after, before, after), value=True)
    padded = replace(
        call,
        q=F.pad(call.q, (0, 0, before, after)),
        k=F.pad(call.k, (0, 0, 0, after)),
        v=F.pad(call.v, (0, 0, 0, after)),
        terms=_padded_terms(call, before, after),
        query_scale=row_scale,
        segments=segments,
        mask=mask,
    )
    return padded, slice(before, before + call.num_queries)


def _padded_terms(call: AttentionCall, before: int, after: int) -> PriorTerms:
    """A call's terms with so many queries in front, and as many keys as queries at the end."""
    terms = call.terms
    assert terms.q_lanes is not None
    k_lanes = terms.k_lanes
    if k_lanes is not None:
        k_lanes = F.pad(k_lanes, (0, 0, 0, after))
    table = terms.table
    if table is not None:
        assert table.origin is not None
        # The columns that are added are of distances that only padding has.
        table = RelativeTable.line(
            F.pad(table.table, (before + after, after)),
            Positions.line(call.num_queries + before + after),
            Positions.line(call.num_keys + after),
            center=table.origin + after,
        )
    bias = terms.bias
    if isinstance(bias, BlockedBias):
        bias = bias.padded(before, after)
    elif bias is not None:
        bias = F.pad(bias, (0, after, before, after))
    q_lanes = F.pad(terms.q_lanes, (0, 0, before, after))
    return replace(terms, q_lanes=q_lanes, k_lanes=k_lanes, table=table, bias=bias)


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
        factor = call.terms.gain.dense().to(wide)
        added = PriorTerms(bias=(factor - 1) * content)
    return replace(call, terms=replace(call.terms, gain=None) + added)


def fold_keys(call: AttentionCall) -> Tensor:
    """(B, Gk, S, R+d_c): keys with their lanes folded in, which are 0 for sinks (see
    `sink_level`)."""
    keys = call.k if call.terms.k_lanes is None else fold_lanes(call.k, call.terms.k_lanes)
    if not call.sinks or call.terms.q_lanes is None:
        return keys
    is_lane = torch.arange(keys.shape[-1], device=keys.device) < call.terms.q_lanes.shape[-1]
    return keys.masked_fill(find_sinks(call)[:, None, :, None] & is_lane, 0.0)


def fold_queries(call: AttentionCall) -> Tensor:
    """(B, H, T, R+d_c): queries whose inner product with `fold_keys` is the logit without table and
    bias.

    Scaled in float32 and rounded once, so kernels run with scale 1 and lanes of 1 stay exact (GOAT
    eq. 20–24).
    """
    scale = 1.0 / math.sqrt(call.q.shape[-1])
    wide = torch.promote_types(call.q.dtype, torch.float32)
    if call.query_scale is None:
        row_scale = None
        content = call.q * scale
    else:
        row_scale = call.query_scale.to(wide)[..., None]
        content = call.q.to(wide) * (row_scale * scale)
    content = content.to(call.q.dtype)
    lanes = call.terms.q_lanes
    if lanes is None:
        return content
    return fold_lanes(content, lanes if row_scale is None else lanes * row_scale)


def fold_unscaled_queries(call: AttentionCall) -> Tensor:
    """(B, H, T, R+d_c): queries for a kernel that multiplies float32 logits by `softmax_scale` and
    the row scale: q, or lanes and content scaled in that copy."""
    if call.terms.q_lanes is None:
        return call.q
    return fold_lanes(call.q * (1.0 / math.sqrt(call.q.shape[-1])), call.terms.q_lanes)


def key_positions(call: AttentionCall) -> Tensor:
    """(1 or B, S) int64 position of each key in its document."""
    if call.segments is None:
        positions = Positions.line(call.num_keys)
    else:
        positions = Positions.documents(call.segments)
    return positions.index(call.q.device)


def find_sinks(call: AttentionCall) -> Tensor:
    """(1 or B, S) bool: the sinks, which no prior and no window hides."""
    return key_positions(call) < call.sinks


def sink_level(call: AttentionCall) -> Tensor:
    """(1 or B, 1 or H, T, 1) K of sinks, in float32 or wider.

    Lanes are K but for a constant of each row, and 0 of it is what they are for the row's own key.
    """
    q_lanes = call.terms.q_lanes
    k_lanes = call.terms.k_lanes
    wide = torch.promote_types(call.q.dtype, torch.float32)
    if q_lanes is None:
        return torch.zeros(1, 1, call.num_queries, 1, dtype=wide, device=call.q.device)
    if k_lanes is None:
        k_lanes = repeat_heads(call.k[..., : q_lanes.shape[-1]], call.q.shape[1])
    own_lanes = k_lanes[:, :, call.offset :].to(wide)
    return (q_lanes.to(wide) * own_lanes).sum(-1, keepdim=True)


def exempt_sinks(call: AttentionCall, prior: Tensor, heads: slice, rows: slice) -> Tensor:
    """K (1 or B, 1 or h, t, s) of some heads and rows and the first keys, with K of sinks in their
    columns."""
    level = sink_level(call)[:, :, rows]
    if level.shape[1] > 1:
        level = level[:, heads]
    positions = key_positions(call)[:, None, None, : prior.shape[-1]]
    of_sinks = call.terms.of_sinks
    if of_sinks is not None:
        column = positions.clamp(max=call.sinks - 1)
        level = level + torch.take_along_dim(of_sinks[:, heads, rows], column, dim=-1)
    return torch.where(positions < call.sinks, level, prior)


def sink_logits(call: AttentionCall) -> Tensor | None:
    """(1 or B, H, T, 1) b_h of a learned sink in float32 or wider, above K of the row's own key
    where K is in lanes; None without one."""
    if call.terms.sink is None:
        return None
    level = sink_level(call)
    if call.query_scale is not None:
        level = level * call.query_scale[..., None]
    return call.terms.sink.to(level.dtype)[:, None, None] + level
