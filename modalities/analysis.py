"""A window into attention: weights, and what of them is the prior's and what the content's, for
asked rows, exactly.

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

LOGITS = 1 << 22  # of a block of rows: 32 MiB each of content, prior and weights


@dataclass(frozen=True)
class Analysis:
    """One layer's attention at some rows. Measures are (B, H, R) float64, of the asked heads and
    rows, in nats or logits.

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
    layers: list[Analysis] = []  # which attend in order

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
    """The same of one call of `prior_attention`. Arguments as in `analyse`; rows are counted from
    the first query."""
    num_heads = call.q.shape[1]
    queries = call.num_queries
    keys = call.num_keys
    chosen = list(range(queries)) if rows is None else [n + queries if n < 0 else n for n in rows]
    if not chosen or any(not 0 <= n < queries for n in chosen):
        raise ValueError(f"rows {list(rows or [])}: expected some of 0 to {queries - 1}")
    marked = torch.zeros(len(spans), keys, dtype=torch.float64, device=call.q.device)
    for n, (start, stop) in enumerate(spans):
        if not 0 <= start < stop <= keys:
            raise ValueError(f"span ({start}, {stop}) is not within the {keys} keys")
        marked[n, start:stop] = 1
    at = torch.arange(keys, dtype=torch.float64, device=call.q.device)
    parts: dict[str, list[Tensor]] = {}
    for start, stop in _runs(chosen, max(1, LOGITS // (len(call.q) * num_heads * keys))):
        content, prior = _logits(call, start, stop)
        if (mask := visible(call, start, stop)) is not None:
            content, prior = (x.masked_fill(~mask, -math.inf) for x in (content, prior))
        away = (at[call.offset + start : call.offset + stop, None] - at).abs()
        # the first key of a row's document
        sinks = torch.zeros(1, stop - start, dtype=torch.int64, device=call.q.device)
        if call.segments is not None:
            documents = call.segments[:, call.offset + start : call.offset + stop, None]
            sinks = (documents == call.segments[:, None]).int().argmax(-1)
        measured = _measure(content, prior, sinks[:, None, :, None], marked, away)
        if full:
            measured["weights"] = (
                (content + prior).softmax(-1).masked_fill(measured["seen"][..., None] == 0, 0.0)
            )
        for name, value in measured.items():
            parts.setdefault(name, []).append(value.cpu())
    return Analysis(
        layer,
        torch.tensor(chosen),
        **{name: torch.cat(values, dim=2) for name, values in parts.items()},
    )


def _runs(rows: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of neighbouring rows, at most `size` at a time, in the order asked for."""
    start = 0
    for n in range(1, len(rows) + 1):
        if n == len(rows) or rows[n] != rows[n - 1] + 1 or n - start == size:
            yield rows[start], rows[n - 1] + 1
            start = n


def _logits(call: AttentionCall, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(B, H, r, S) float64 content and prior logits of queries [start, stop), times the row scale,
    nothing hidden."""
    num_heads = call.q.shape[1]
    width = call.q.shape[-1]
    k = repeat_heads(call.k, num_heads).double()
    content = (
        call.q[:, :, start:stop].double() @ k[..., -width:].transpose(-1, -2) / math.sqrt(width)
    )
    prior = torch.zeros_like(content)
    if call.terms.q_lanes is not None:
        k_lanes = k[..., :-width] if call.terms.k_lanes is None else call.terms.k_lanes.double()
        prior = prior + call.terms.q_lanes[:, :, start:stop].double() @ k_lanes.transpose(-1, -2)
    if call.table is not None:
        prior = prior + call.table.unroll().rows(start, stop, call.num_keys).double()
    if call.terms.bias is not None:
        prior = (
            prior
            + bias_block(call.terms.bias, slice(None), slice(start, stop), call.num_keys).double()
        )
    if call.sinks:
        prior = exempt_sinks(call, prior, slice(None), slice(start, stop))
    if call.query_scale is not None:
        scale = call.query_scale[:, :, start:stop, None].double()
        content = content * scale
        prior = prior * scale
    return content, prior


def _measure(
    content: Tensor, prior: Tensor, sinks: Tensor, marked: Tensor, away: Tensor
) -> dict[str, Tensor]:
    """The measures of `Analysis` from logits (B, H, r, S), hidden keys at −∞, marked spans (n, S)
    and distances (r, S)."""
    logits = content + prior
    log_p, log_prior, log_content = (x.log_softmax(-1) for x in (logits, prior, content))
    seen = logits > -math.inf
    p = log_p.exp().masked_fill(~seen, 0.0)
    empty = ~seen.any(-1)
    gain = (log_p - log_prior).masked_fill(~seen, 0.0)
    at = sinks.expand(*logits.shape[:3], 1)
    shown = seen.gather(-1, at)
    other = logits.scatter(-1, at, -math.inf).max(-1, keepdim=True)

    def margin(values: Tensor) -> Tensor:
        return (values.gather(-1, at) - values.gather(-1, other.indices)).where(
            other.values > -math.inf, math.inf
        )

    of_sink = {
        "sink_mass": p.gather(-1, at),
        "content_margin": margin(content),
        "prior_margin": margin(prior),
    }
    of_row = {
        "entropy": -(p * log_p.masked_fill(~seen, 0.0)).sum(-1),
        "divergence": (p * gain).sum(-1),
        "content_range": content.amax(-1) - content.masked_fill(~seen, math.inf).amin(-1),
        "log_z": -(log_content + log_prior).masked_fill(~seen, -math.inf).logsumexp(-1),
    }
    return {
        "seen": seen.sum(-1).double(),
        **{name: value.masked_fill(empty, math.nan) for name, value in of_row.items()},
        **{name: value.where(shown, math.nan)[..., 0] for name, value in of_sink.items()},
        "mass": p @ marked.T,
        "distance": (p * away).sum(-1).masked_fill(empty, math.nan),
    }
