"""Several priors side by side: each has a group of the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.errors import Options
from zoo.positions import Positions
from zoo.priors import create_prior
from zoo.priors.base import Prior, prior_device
from zoo.priors.tables import RelativeTable
from zoo.priors.terms import PriorTerms


class ByHeads(Prior):
    """K[h] = K_n[h] for the heads h of group n.

    Heads are shared out in the order of `parts`, evenly or with one more in the first groups.
    ("uniform", "alibi") is NAPE (arXiv 2506.16640): half of the heads have no position, half have
    ALiBi with the slopes of so many heads.

    Args:
        parts: names of priors of a line of tokens, as many as divide the heads. They have lanes or
            tables alone, and read no content.
        options: options of a part by its name.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        parts: Sequence[str],
        options: Mapping[str, Options] | None = None,
    ) -> None:
        super().__init__(num_heads)
        names = list(parts)
        if not 1 <= len(names) <= num_heads:
            raise ValueError(f"parts={names}: expected 1 to {num_heads} priors, one a head at most")
        unknown = sorted(set(options or {}) - set(names))
        if unknown:
            raise ValueError(f"options of {unknown[0]!r}, which is not in parts={names}")
        each, remainder = divmod(num_heads, len(names))
        for number, name in enumerate(names):
            group_heads = each + (number < remainder)
            group_options = dict((options or {}).get(name, {}))
            part = create_prior(name, num_heads=group_heads, **group_options)
            if part.depends_on_content or part.has_state:
                raise ValueError(f"prior {name!r} reads content: it cannot have a group of heads")
            self.add_module(f"{number}_{name}", part)
        self.num_lanes = max(part.num_lanes for part in self.parts())

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        groups = []
        for part in self.parts():
            terms = part(q_pos, k_pos, causal=causal, x=x).cut_lanes()
            _check_terms(part, terms)
            groups.append((part.num_heads, terms))
        offsets = [terms.offset for _, terms in groups if terms.offset is not None]
        return PriorTerms(
            q_lanes=_join_lanes([(heads, terms.q_lanes) for heads, terms in groups]),
            k_lanes=_join_lanes([(heads, terms.k_lanes) for heads, terms in groups]),
            table=_join_tables(groups),
            causal=causal,
            offset=offsets[0] if offsets else None,
            in_pieces=True,
        )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        device = prior_device(self)
        parts = []
        for part in self.parts():
            parts.append(part.log_prior(q_pos, k_pos, causal=causal, x=x).to(device=device))
        return torch.cat(parts, dim=1)

    def next_row(self, length: int) -> tuple[Tensor, Tensor] | None:
        rows = self.rows_of_parts(length)
        if rows is None:
            return None
        by_distance, by_key = rows
        return torch.cat(by_distance), torch.cat(by_key)

    def lanes_at_query(self) -> Tensor:
        return torch.cat([part.lanes_at_query() for part in self.parts()])

    def retrieval_heads(self, turned: Tensor | None = None) -> Tensor:
        flags = []
        first = 0
        for part in self.parts():
            last = first + part.num_heads
            flags.append(part.retrieval_heads(None if turned is None else turned[first:last]).cpu())
            first = last
        return torch.cat(flags)


class Nape(ByHeads):
    """Half of the heads without position, half with ALiBi (arXiv 2506.16640)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads, parts=("uniform", "alibi"))


def _check_terms(part: Prior, terms: PriorTerms) -> None:
    """ValueError for terms that cannot be joined head by head."""
    others = (terms.bias, terms.carry, terms.sink, terms.gain, terms.of_sinks)
    if any(term is not None for term in others):
        raise ValueError(
            f"{type(part).__name__} has more than lanes and a table: it cannot have a group of "
            "heads"
        )


def _join_lanes(groups: Sequence[tuple[int, Tensor | None]]) -> Tensor | None:
    """Lanes of all heads, from (heads, lanes) of each group; a group's lanes are in the first
    columns, and 0 fills the others."""
    present = [lanes for _, lanes in groups if lanes is not None]
    if not present:
        return None
    width = max(lanes.shape[-1] for lanes in present)
    batch = max(lanes.shape[0] for lanes in present)
    length = present[0].shape[2]
    columns = []
    for heads, lanes in groups:
        if lanes is None:
            columns.append(present[0].new_zeros(batch, heads, length, width))
            continue
        padded = F.pad(lanes, (0, width - lanes.shape[-1]))
        columns.append(padded.expand(batch, heads, length, width))
    return torch.cat(columns, dim=1)


def _join_tables(groups: Sequence[tuple[int, PriorTerms]]) -> RelativeTable | None:
    """One table of all heads; a group without one has zeros."""
    present = [terms.table for _, terms in groups if terms.table is not None]
    if not present:
        return None
    like = present[0]
    rows = []
    for heads, terms in groups:
        table = terms.table
        if table is None:
            rows.append(like.table.new_zeros(heads, like.table.shape[1]))
        else:
            rows.append(table.table)
    return RelativeTable(
        torch.cat(rows),
        like.q_code,
        like.k_code,
        like.center,
        num_prefix=like.num_prefix,
        origin=like.origin,
        shape=like.shape,
    )
