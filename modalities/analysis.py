"""Exact attention weights of chosen rows, and how prior and content share in them.

With content logits s = ⟨q_i, k_j⟩/√d_c and the log-prior K, both times the row scale (SSMax), over
the keys that row i sees:

    p = softmax(s + K)        π = softmax(K), the prior        c = softmax(s)        p_j = Z·c_j·π_j

`analyse` runs a model and reads its attention calls, whatever the method: priors as lanes or
tables, rotations (they are in q and k), sums, grids, documents, windows. All arithmetic is float64;
memory is O(S) a row, a block of rows at a time. Sources: GOAT (arXiv 2601.15380) §5, BAM
(2505.22842) on Z.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from zoo.attention.call import AttentionCall, exempt_sinks
from zoo.attention.dispatch import Observer
from zoo.attention.heads import repeat_heads
from zoo.attention.masks import visible
from zoo.model import ZooModel
from zoo.priors.tables import bias_block

__all__ = ["Analysis", "analyse", "analyse_call"]

# Logits of a block of rows: 32 MiB each of content, prior and weights.
LOGITS = 1 << 22


@dataclass(frozen=True)
class Analysis:
    """One layer's attention at some rows.

    Measures are (B, H, R) float64, of the asked heads and rows, in nats or logits.

    Attributes:
        layer: its number.
        rows: (R,) int64, those that were asked for.
        seen: how many keys the row sees.
        entropy: −Σ p ln p.
        divergence: KL(p‖π) = Σ p ln(p/π), what the content adds to the prior.
        content_range: ω = max s − min s over the keys seen; π·e^−ω ≤ p ≤ π·e^ω (GOAT th. 5.1).
        log_z: ln Z = −ln Σ_j c_j·π_j, how far content and prior disagree; BAM's pointwise mutual
            information, row by row.
        sink_mass: p_j* of the sink j*, the first key of the row's document.
        content_margin, prior_margin: s and K at the sink, less theirs at the other key whose s + K
            is greatest (def. 5.2).
        mass: (B, H, R, spans) Σ p over each marked span.
        distance: Σ p·|i − j|, in tokens of a line.
        weights: (B, H, R, S) p, where asked for.

    A row that does not see the sink has NaN for its mass and margins, one that sees nothing else
    infinite margins. A row that sees no key at all, as a mask may have it, has weights and masses 0
    and NaN for the rest.
    """

    layer: int
    rows: Tensor
    seen: Tensor
    entropy: Tensor
    divergence: Tensor
    content_range: Tensor
    log_z: Tensor
    sink_mass: Tensor
    content_margin: Tensor
    prior_margin: Tensor
    mass: Tensor
    distance: Tensor
    weights: Tensor | None = None


class _Features(Protocol):
    def forward_features(self, *inputs: Tensor, kernel: Observer, **options: object) -> Tensor: ...


@torch.no_grad()
def analyse(
    model: ZooModel,
    *inputs: Tensor,
    rows: Sequence[int] | None = None,
    spans: Sequence[tuple[int, int]] = (),
    full: bool = False,
    **options: object,
) -> list[Analysis]:
    """Run `model.forward_features` and look into its attention.

    Args:
        inputs: of the model: tokens (B, T), images (B, C, height, width).
        rows: queries, by their position; default all. Negative ones count from the last.
        spans: (start, stop) of keys.
        full: keep p as well, (B, H, R, S).
        options: of `forward_features`, such as segments.

    Returns:
        an `Analysis` for each layer, in order.

    Raises:
        ValueError: for rows or spans that the model or its input does not have.
    """
    # Layers attend in order.
    layers: list[Analysis] = []

    def see(call: AttentionCall) -> None:
        layer = len(layers)
        layers.append(analyse_call(call, layer=layer, rows=rows, spans=spans, full=full))

    training = model.training
    try:
        cast(_Features, model.eval()).forward_features(*inputs, kernel=Observer(see), **options)
    finally:
        model.train(training)
    return layers


@torch.no_grad()
def analyse_call(
    call: AttentionCall,
    *,
    layer: int = 0,
    rows: Sequence[int] | None = None,
    spans: Sequence[tuple[int, int]] = (),
    full: bool = False,
) -> Analysis:
    """The same of one call of `prior_attention`.

    Arguments as in `analyse`; rows are counted from the first query.
    """
    num_heads = call.q.shape[1]
    queries = call.num_queries
    keys = call.num_keys
    numbers = list(range(queries))
    if rows is not None:
        numbers = [n + queries if n < 0 else n for n in rows]
    if not numbers or any(not 0 <= n < queries for n in numbers):
        raise ValueError(f"rows {list(rows or [])}: expected some of 0 to {queries - 1}")
    marked = torch.zeros(len(spans), keys, dtype=torch.float64, device=call.q.device)
    for n, (start, stop) in enumerate(spans):
        if not 0 <= start < stop <= keys:
            raise ValueError(f"span ({start}, {stop}) is not within the {keys} keys")
        marked[n, start:stop] = 1
    key_positions = torch.arange(keys, dtype=torch.float64, device=call.q.device)
    blocks: dict[str, list[Tensor]] = {}
    rows_at_once = max(1, LOGITS // (len(call.q) * num_heads * keys))
    for start, stop in _runs(numbers, rows_at_once):
        content, prior = _logits(call, start, stop)
        mask = visible(call, start, stop)
        if mask is not None:
            content = content.masked_fill(~mask, -math.inf)
            prior = prior.masked_fill(~mask, -math.inf)
        block = slice(call.offset + start, call.offset + stop)
        distance = (key_positions[block, None] - key_positions).abs()
        measures = _measure(content, prior, _sinks(call, block), marked, distance)
        if full:
            empty = measures["seen"][..., None] == 0
            measures["weights"] = (content + prior).softmax(-1).masked_fill(empty, 0.0)
        for name, value in measures.items():
            blocks.setdefault(name, []).append(value.cpu())
    fields = {name: torch.cat(values, dim=2) for name, values in blocks.items()}
    return Analysis(layer, torch.tensor(numbers), **fields)


def _sinks(call: AttentionCall, block: slice) -> Tensor:
    """(B or 1, 1, r, 1) int64, the first key of the document of each position in `block`."""
    if call.segments is None:
        rows = block.stop - block.start
        return torch.zeros(1, 1, rows, 1, dtype=torch.int64, device=call.q.device)
    same_document = call.segments[:, block, None] == call.segments[:, None]
    # Of equal values argmax takes the first.
    return same_document.int().argmax(-1)[:, None, :, None]


def _runs(rows: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of neighbouring rows, at most `size` at a time, in the order asked for."""
    start = 0
    for n in range(1, len(rows) + 1):
        run_ends = n == len(rows) or rows[n] != rows[n - 1] + 1
        if run_ends or n - start == size:
            yield rows[start], rows[n - 1] + 1
            start = n


def _logits(call: AttentionCall, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(B, H, r, S) float64 content and prior logits of queries [start, stop), times the row scale,
    nothing hidden."""
    num_heads = call.q.shape[1]
    width = call.q.shape[-1]
    rows = slice(start, stop)
    # A cache may hold lanes before the columns of the content.
    k = repeat_heads(call.k, num_heads).double()
    k_lanes = k[..., :-width]
    k_content = k[..., -width:]
    content = call.q[:, :, rows].double() @ k_content.transpose(-1, -2) / math.sqrt(width)
    prior = torch.zeros_like(content)
    terms = call.terms
    if terms.q_lanes is not None:
        if terms.k_lanes is not None:
            k_lanes = terms.k_lanes.double()
        prior = prior + terms.q_lanes[:, :, rows].double() @ k_lanes.transpose(-1, -2)
    if call.table is not None:
        prior = prior + call.table.unroll().rows(start, stop, call.num_keys).double()
    if terms.bias is not None:
        prior = prior + bias_block(terms.bias, slice(None), rows, call.num_keys).double()
    if call.sinks:
        prior = exempt_sinks(call, prior, slice(None), rows)
    if call.query_scale is not None:
        scale = call.query_scale[:, :, rows, None].double()
        content = content * scale
        prior = prior * scale
    return content, prior


def _measure(
    content: Tensor, prior: Tensor, sinks: Tensor, marked: Tensor, distance: Tensor
) -> dict[str, Tensor]:
    """The measures of `Analysis` from logits (B, H, r, S), hidden keys at −∞; sinks (B or 1, 1, r,
    1), marked spans (n, S) and distances (r, S)."""
    logits = content + prior
    log_p = logits.log_softmax(-1)
    log_prior = prior.log_softmax(-1)
    log_content = content.log_softmax(-1)
    seen = logits > -math.inf
    empty = ~seen.any(-1)
    p = log_p.exp().masked_fill(~seen, 0.0)
    gain = (log_p - log_prior).masked_fill(~seen, 0.0)
    lowest_content = content.masked_fill(~seen, math.inf).amin(-1)
    log_products = (log_content + log_prior).masked_fill(~seen, -math.inf)

    sink = sinks.expand(*logits.shape[:3], 1)
    sink_seen = seen.gather(-1, sink)
    other = logits.scatter(-1, sink, -math.inf).max(-1, keepdim=True)
    other_seen = other.values > -math.inf

    def margin(values: Tensor) -> Tensor:
        difference = values.gather(-1, sink) - values.gather(-1, other.indices)
        return difference.where(other_seen, math.inf)

    row_measures = {
        "entropy": -(p * log_p.masked_fill(~seen, 0.0)).sum(-1),
        "divergence": (p * gain).sum(-1),
        "content_range": content.amax(-1) - lowest_content,
        "log_z": -log_products.logsumexp(-1),
        "distance": (p * distance).sum(-1),
    }
    sink_measures = {
        "sink_mass": p.gather(-1, sink),
        "content_margin": margin(content),
        "prior_margin": margin(prior),
    }
    measures = {"seen": seen.sum(-1).double(), "mass": p @ marked.T}
    for name, value in row_measures.items():
        measures[name] = value.masked_fill(empty, math.nan)
    for name, value in sink_measures.items():
        measures[name] = value.where(sink_seen, math.nan)[..., 0]
    return measures
