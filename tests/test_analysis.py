"""A window into attention: each measure against its definition on dense matrices, for every form of
prior and modality."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modalities import analysis
from modalities.analysis import analyse, analyse_call
from tests.zoo.priors_table import GRID, WIDTH, inputs, make, positions_for
from zoo import Positions, create_model
from zoo.attention import AttentionCall
from zoo.attention.reference import ReferenceKernel

SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
SPANS = [(0, 3), (2, 11)]
CALLS: dict[str, dict[str, Any]] = {
    "ggd": {"groups": 1, "queries": 5, "ssmax": True},
    "goat": {"documents": True, "ssmax": True},
    "fire": {"documents": True, "window": 3},
    **{name: {} for name in ("cable", "goat2d", "ggd2d", "lookhere2d")},
}


def built(
    name: str,
    *,
    groups: int = 3,
    queries: int | None = None,
    ssmax: bool = False,
    window: int | None = None,
    **of: bool,
) -> tuple[AttentionCall, Tensor, Tensor]:
    """A call, and its content and log-prior logits (2, 3, T, S), −∞ where hidden, by the
    definitions."""
    prior = make(name)
    generator = torch.Generator().manual_seed(5)
    causal = name not in GRID
    segments = SEGMENTS if of else None
    keys = positions_for(name) if segments is None else Positions.documents(segments)
    length = keys.length
    count = queries or keys.length
    q_pos = keys if count == length else keys.tail(count)
    options: dict[str, Any] = dict(generator=generator, dtype=torch.float64)
    q = torch.randn(2, 3, count, WIDTH, **options)
    k, v = (torch.randn(2, groups, length, WIDTH, **options) for _ in range(2))
    scale = torch.rand(1, 3, count, **options) + 0.5 if ssmax else None
    x = inputs(length)
    call = AttentionCall(
        q, k, v, prior(q_pos, keys, causal=causal, x=x), causal, scale, segments, window
    )

    content = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(3 // groups, 1)) / math.sqrt(
        WIDTH
    )
    log_prior = prior.log_prior(q_pos, keys, causal=causal, x=x).expand_as(content)
    if scale is not None:
        content = content * scale[..., None]
        log_prior = log_prior * scale[..., None]
    i = torch.arange(length - count, length)[:, None]
    j = torch.arange(length)
    shown = ((i >= j if causal else i == i) & (abs(i - j) < (window or length))).expand_as(content)
    if segments is not None:
        shown = shown & (segments[:, None, i[:, 0], None] == segments[:, None, None])
    return call, *(logits.masked_fill(~shown, -math.inf) for logits in (content, log_prior))


def by_definition(s: Tensor, k: Tensor, sinks: Tensor) -> dict[str, Tensor]:
    """(2, 3, T) each from logits (2, 3, T, S) and the sink's key (2, 3, T, 1)."""
    p, prior, content = (logits.softmax(-1) for logits in (s + k, k, s))
    seen = s > -math.inf
    query = torch.arange(s.shape[3] - s.shape[2], s.shape[3])[:, None]
    best = (s + k).scatter(-1, sinks, -math.inf).argmax(-1, keepdim=True)
    of_sink = {"sink_mass": p.gather(-1, sinks)}
    for name, logits in (("content_margin", s), ("prior_margin", k)):
        margin = logits.gather(-1, sinks) - logits.gather(-1, best)
        of_sink[name] = margin.where(seen.sum(-1, keepdim=True) > 1, math.inf)
    return {
        "seen": seen.sum(-1).double(),
        "entropy": -(p * p.log()).nan_to_num(0).sum(-1),
        "divergence": (p * (p / prior).log()).nan_to_num(0).sum(-1),
        "content_range": s.amax(-1) - s.masked_fill(~seen, math.inf).amin(-1),
        "log_z": -(content * prior).sum(-1).log(),
        "mass": torch.stack([p[..., start:stop].sum(-1) for start, stop in SPANS], dim=-1),
        "distance": (p * (torch.arange(s.shape[3]) - query).abs()).sum(-1),
        "weights": p,
    } | {
        name: value.where(seen.gather(-1, sinks), math.nan)[..., 0]
        for name, value in of_sink.items()
    }


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_measures_are_their_definitions(name: str, monkeypatch) -> None:
    call, content, log_prior = built(name, **CALLS[name])
    monkeypatch.setattr(analysis, "LOGITS", 2 * 3 * 2 * call.num_keys)  # two rows at a time
    measures = analyse_call(call, spans=SPANS, full=True)
    sinks = torch.zeros(2, 3, call.num_queries, 1, dtype=torch.int64)
    if call.segments is not None:
        sinks[0, :, 4:] = 4
    for measure, value in by_definition(content, log_prior, sinks).items():
        close = dict(rtol=1e-6, atol=1e-6, equal_nan=True, msg=measure)
        torch.testing.assert_close(getattr(measures, measure), value, **close)


@pytest.mark.parametrize(
    "name", ["text_ggd_goat_ssmax_tiny", "text_local_tiny", "vision_rope2d_axial_ssmax_tiny_patch8"]
)
@torch.no_grad()
def test_weights_of_every_model(name: str) -> None:
    """p·v is what attention puts out, in every layer."""
    torch.manual_seed(0)
    model = create_model(name).eval()
    data = torch.randn(2, 3, 48, 48) if name.startswith("vision") else torch.randint(0, 4, (2, 40))
    calls: list[AttentionCall] = []

    class Keep(ReferenceKernel):
        def run(self, call: AttentionCall) -> Tensor:
            calls.append(call)
            return super().run(call)

    model.forward_features(data, kernel=Keep())
    for n, (one, call) in enumerate(zip(analyse(model, data, full=True), calls, strict=True)):
        assert one.layer == n
        assert one.weights is not None
        values = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1).double()
        torch.testing.assert_close(
            (one.weights @ values).float(), ReferenceKernel().run(call), atol=2e-5, rtol=1e-4
        )
    assert len(calls) == len(model.layers)


def test_missing_part_is_named() -> None:
    """What is not there is named."""
    model = create_model("text_goat_tiny")
    data = torch.zeros(1, 40, dtype=torch.int64)
    for options, message in [
        ({"rows": [40]}, r"rows \[40\]: expected some of 0 to 39"),
        ({"rows": []}, r"rows \[\]"),
        ({"spans": [(3, 41)]}, r"span \(3, 41\) is not within the 40 keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            analyse(model.train(), data, **options)
        assert model.training
