"""What a prior returns to attention for a call: lanes, a table, a dense bias, a sink, factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from zoo.priors.lanes import product_pieces
from zoo.priors.tables import Bias, BlockedBias, RelativeTable, whole_bias

_N = TypeVar("_N", bound=int)


@dataclass(frozen=True)
class PriorTerms:
    """The output of a prior: data, never closures. Terms of two priors over the same positions add.

    Attributes:
        q_lanes: (1 or B, 1 or H, T, R) head columns; K += <q_lanes, k_lanes>.
        k_lanes: (1 or B, 1 or H, S, R); None beside q_lanes means that the keys hold them already
            (a KV cache).
        table: a relative table.
        bias: (1 or B, 1 or H, T, S) a matrix, or what is made by blocks of rows (FIRE).
        carry: (B, H, S) state after each key (CABLE's running sum), or None; that after the last is
            passed to the next chunk.
        causal: whether they are for causal attention alone (True) or for bidirectional attention
            alone (False); None: for both.
        sink: (H,) b_h of a learned sink, a key without value: each row's denominator is exp b_h
            + Σ_j exp z_ij. Masks and row scales leave it as it is. Where K is in lanes, z counts
            from K of the row's own key.
        gain: a relative table of factors of the content's logits, ⟨q, k⟩/√d_c.
        offset: the first query's row less the first key's, which lanes do not tell; None where any
            will do, or a table tells.
        of_sinks: (1 or B, H, T, n) K of the n sinks of each row's document, instead of 0.
        in_pieces: whether lanes may be rounded to half precision as they are: pieces that are exact
            there (`zoo.priors.lanes`), or bounded numbers. Other lanes are cut into pieces where
            queries are in half precision.
    """

    q_lanes: Tensor | None = None
    k_lanes: Tensor | None = None
    table: RelativeTable | None = None
    bias: Bias | None = None
    carry: Tensor | None = None
    causal: bool | None = None
    offset: int | None = None
    sink: Tensor | None = None
    gain: RelativeTable | None = None
    of_sinks: Tensor | None = None
    in_pieces: bool = False

    def __add__(self, other: PriorTerms) -> PriorTerms:
        def add(a, b):
            if a is None or b is None:
                return b if a is None else a
            return a + b

        first = self
        second = other
        if self.q_lanes is not None and other.q_lanes is not None:
            if self.in_pieces != other.in_pieces:
                first = self.cut_lanes()
                second = other.cut_lanes()
        if self.carry is not None and other.carry is not None:
            raise ValueError(
                "only one part of a composed prior may carry state from chunk to chunk"
            )
        if self.gain is not None and other.gain is not None:
            raise ValueError("only one part of a composed prior may multiply logits")
        return PriorTerms(
            _join(first.q_lanes, second.q_lanes),
            _join(first.k_lanes, second.k_lanes),
            add(self.table, other.table),
            add(self.bias, other.bias),
            add(self.carry, other.carry),
            _agreed("causal", self.causal, other.causal),
            _agreed("offset", self.offset, other.offset),
            add(self.sink, other.sink),
            add(self.gain, other.gain),
            add(self.of_sinks, other.of_sinks),
            in_pieces=first.in_pieces or second.in_pieces,
        )

    def cut_lanes(self) -> PriorTerms:
        """The terms with lanes in pieces; as they are where there are no lanes, or they are in
        pieces already. ValueError for query lanes whose key lanes are elsewhere."""
        if self.q_lanes is None or self.in_pieces:
            return self
        if self.k_lanes is None:
            raise ValueError("lanes of keys that are stored already cannot be cut into pieces")
        q_lanes, k_lanes = product_pieces(self.q_lanes, self.k_lanes)
        return replace(self, q_lanes=q_lanes, k_lanes=k_lanes, in_pieces=True)

    def of_heads(self, heads: Sequence[int]) -> PriorTerms:
        """The terms of some heads, in their order."""

        def cut(x: Tensor | None) -> Tensor | None:
            if x is None or x.shape[1] == 1:
                return x
            return x[:, list(heads)]

        bias = self.bias.of_heads(heads) if isinstance(self.bias, BlockedBias) else cut(self.bias)
        return PriorTerms(
            q_lanes=cut(self.q_lanes),
            k_lanes=cut(self.k_lanes),
            table=None if self.table is None else self.table.of_heads(heads),
            bias=bias,
            carry=cut(self.carry),
            causal=self.causal,
            offset=self.offset,
            sink=None if self.sink is None else self.sink[list(heads)],
            gain=None if self.gain is None else self.gain.of_heads(heads),
            of_sinks=cut(self.of_sinks),
            in_pieces=self.in_pieces,
        )

    def dense(self) -> Tensor:
        """(1 or B, H, T, S): K as a matrix, lanes multiplied out."""
        parts = []
        if self.q_lanes is not None:
            if self.k_lanes is None:
                raise ValueError("the dense form needs k_lanes, but these are folded into the keys")
            parts.append(self.q_lanes @ self.k_lanes.transpose(-1, -2))
        if self.table is not None:
            parts.append(self.table.dense())
        if self.bias is not None:
            parts.append(whole_bias(self.bias))
        return sum(parts[1:], parts[0]) if parts else torch.zeros(1, 1, 1, 1)


def _agreed(what: str, a: _N | None, b: _N | None) -> _N | None:
    """The value that both terms have, or the one that has any."""
    if a is not None and b is not None and a != b:
        raise ValueError(f"terms of one call are added: one has {what}={a}, the other {what}={b}")
    return b if a is None else a


def _join(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Lanes side by side, batch and head axes broadcast to each other."""
    if a is None or b is None:
        return b if a is None else a
    # torch.broadcast_shapes takes the host 30 µs.
    batch = max(a.shape[0], b.shape[0])
    heads = max(a.shape[1], b.shape[1])
    a = a.expand(batch, heads, *a.shape[2:])
    b = b.expand(batch, heads, *b.shape[2:])
    return torch.cat([a, b], dim=-1)
