"""A window into attention: each measure against its definition on dense matrices, for every prior and every modality."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.priors_table import CASES, GRID, WIDTH, inputs, make, positions_for
from zoo import Positions, analysis, create_model
from zoo.analysis import analyse, analyse_call
from zoo.attention import AttentionCall
from zoo.attention.reference import ReferenceKernel

SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])


@dataclass(frozen=True)
class Setup:
    groups: int = 3
    queries: int | None = None  # the last ones; None: all
    ssmax: bool = False
    window: int | None = None
    documents: bool = False


SETUPS = {
    "plain": Setup(),
    "grouped, the last queries, ssmax": Setup(groups=1, queries=5, ssmax=True),
    "documents, ssmax": Setup(documents=True, ssmax=True),
    "documents, window": Setup(documents=True, window=3),
}


def built(name: str, causal: bool, setup: Setup) -> tuple[AttentionCall, Tensor, Tensor]:
    """A call, and its content and log-prior logits (2, 3, T, S), −∞ where hidden, by the definitions."""
    prior, generator = make(name), torch.Generator().manual_seed(5)
    keys = positions_for(name)
    documents = setup.documents and name not in GRID
    if documents:
        keys = Positions.documents(SEGMENTS)
    length = keys.length
    count = length if setup.queries is None or name in GRID else setup.queries
    queries = keys if count == length else keys.tail(count)
    x = inputs(length)
    q = torch.randn(2, 3, count, WIDTH, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, setup.groups, length, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    scale = torch.rand(1, 3, count, generator=generator, dtype=torch.float64) + 0.5 if setup.ssmax else None
    terms, segments = prior(queries, keys, causal=causal, x=x), SEGMENTS if documents else None
    call = AttentionCall(q, k, v, terms, causal, scale, segments, setup.window)

    content = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(3 // setup.groups, 1)) / math.sqrt(WIDTH)
    log_prior = prior.log_prior(queries, keys, causal=causal, x=x).expand_as(content)
    if scale is not None:
        content, log_prior = content * scale[..., None], log_prior * scale[..., None]
    i, j = torch.arange(length - count, length)[:, None], torch.arange(length)
    shown = (i >= j if causal else i == i) & (abs(i - j) < (setup.window or length))
    shown = shown.expand_as(content)
    if documents:
        shown = shown & (SEGMENTS[:, None, i[:, 0], None] == SEGMENTS[:, None, None])
    return call, *(x.masked_fill(~shown, -math.inf) for x in (content, log_prior))


def by_definition(s: Tensor, k: Tensor, sink: int, spans: list[tuple[int, int]]) -> dict[str, Any]:
    """Of one row's logits over the keys it sees, which are finite."""
    seen = [j for j in range(len(s)) if s[j] > -math.inf]
    exp = {name: {j: math.exp(x[j]) for j in seen} for name, x in (("p", s + k), ("π", k), ("c", s))}
    p, prior, content = ({j: e / sum(found.values()) for j, e in found.items()} for found in exp.values())
    found: dict[str, Any] = {
        "seen": len(seen),
        "entropy": -sum(w * math.log(w) for w in p.values() if w),  # 0 outside a field of view
        "divergence": sum(w * math.log(w / prior[j]) for j, w in p.items() if w),
        "content_range": float(max(s[j] for j in seen) - min(s[j] for j in seen)),
        "log_z": -math.log(sum(content[j] * prior[j] for j in seen)),
        "mass": [sum(p[j] for j in seen if a <= j < b) for a, b in spans],
    }
    if sink in seen:
        found["sink_mass"] = p[sink]
        if len(seen) > 1:
            best = max((j for j in seen if j != sink), key=lambda j: s[j] + k[j])
            found |= {"content_margin": float(s[sink] - s[best]), "prior_margin": float(k[sink] - k[best])}
    return found


def by_distance(logits: Tensor, places: Tensor, query: int) -> float:
    """Mean distance to the keys with a place, by weight."""
    there = [j for j in range(len(logits)) if logits[j] > -math.inf and not places[j].isnan().any()]
    p = {j: math.exp(logits[j]) for j in there}
    if places[query].isnan().any() or not there:
        return math.nan
    return sum(p[j] * math.dist(places[query].tolist(), places[j].tolist()) for j in there) / sum(p.values())


@pytest.mark.parametrize(
    ("name", "causal", "setup"), [(*case, list(SETUPS)[n % len(SETUPS)]) for n, case in enumerate(CASES[::2])]
)
@torch.no_grad()
def test_measures_are_their_definitions(name: str, causal: bool, setup: str, monkeypatch) -> None:
    if setup != "plain" and name in GRID:
        return  # a grid has neither documents nor later queries
    call, content, log_prior = built(name, causal, SETUPS[setup])
    monkeypatch.setattr(analysis, "LOGITS", 2 * 3 * 2 * call.num_keys)  # two rows at a time
    spans = [(0, 3), (2, call.num_keys)]
    places = torch.randn(call.num_keys, 2, generator=torch.Generator().manual_seed(0)).index_fill(
        0, torch.tensor([2]), math.nan
    )
    found = analyse_call(call, sink=1, spans=spans, places=places, full=True)
    for b in range(2):
        first = 4 if SETUPS[setup].documents and name not in GRID else 0
        for h in range(3):
            for r in range(call.num_queries):
                start = first if b == 0 and r + call.offset >= 4 else 0
                expected = by_definition(content[b, h, r], log_prior[b, h, r], start + 1, spans)
                expected["distance"] = by_distance(content[b, h, r] + log_prior[b, h, r], places, r + call.offset)
                for measure, value in expected.items():
                    here = getattr(found, measure)[b, h, r]
                    assert here.tolist() == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), (measure, b, h, r)
                if "sink_mass" not in expected:
                    assert all(getattr(found, m)[b, h, r].isnan() for m in ("sink_mass", "content_margin"))
                elif "content_margin" not in expected:
                    assert found.content_margin[b, h, r] == math.inf
    assert found.weights is not None and found.prior is not None and found.content is not None
    same = dict(rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.weights, (content + log_prior).softmax(-1), **same)
    torch.testing.assert_close(found.prior, log_prior.softmax(-1), **same)
    z = found.log_z.exp()[..., None]
    torch.testing.assert_close(found.weights, z * found.prior * found.content, **same)  # BAM: p = Z·c·π


MODELS = [
    "text_ggd_goat_ssmax_tiny",
    "text_rope_ssmax_tiny",
    "text_cable_tiny",
    "text_fire_tiny",
    "text_local_tiny",
    "dna_goat_tiny",
    "vision_goat_ssmax_tiny_patch8",
    "vision_ggd2d_separable_ssmax_tiny_patch8",
    "vision_rope2d_axial_ssmax_tiny_patch8",
    "vision_learned_ssmax_tiny_patch8",
]


def model_and_input(name: str):
    torch.manual_seed(0)
    model = create_model(name).eval()
    generator = torch.Generator().manual_seed(1)
    if name.startswith("vision"):
        return model, torch.randn(2, 3, 48, 48, generator=generator)
    return model, torch.randint(0, 4, (2, 40), generator=generator)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_weights_are_those_of_every_kind_of_model(name: str) -> None:
    """p·v is what attention puts out, in every layer."""
    model, data = model_and_input(name)
    calls: list[AttentionCall] = []

    class Keep(ReferenceKernel):
        def run(self, call: AttentionCall) -> Tensor:
            calls.append(call)
            return super().run(call)

    model.forward_features(data, kernel=Keep())
    found = analyse(model, data, full=True)
    assert [one.layer for one in found] == list(range(len(model.layers))) == list(range(len(calls)))
    for one, call in zip(found, calls, strict=True):
        assert one.weights is not None
        values = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1).double()
        torch.testing.assert_close((one.weights @ values).float(), ReferenceKernel().run(call), atol=2e-5, rtol=1e-4)
    assert model.training is False


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layers": [4]}, r"layers \[4\]: expected some of 0 to 3"),
        ({"heads": [-5]}, r"heads \[-5\]: expected some of 0 to 3"),
        ({"rows": [40]}, r"rows \[40\]: expected some of 0 to 39"),
        ({"rows": []}, r"rows \[\]"),
        ({"spans": [(3, 41)]}, r"span \(3, 41\) is not within the 40 keys"),
        ({"spans": [(3, 3)]}, r"span \(3, 3\)"),
        ({"places": torch.zeros(39, 1)}, "places are of 39 keys, the call has 40"),
    ],
)
def test_what_is_not_there_is_named(asked: dict, message: str) -> None:
    model, data = model_and_input("text_goat_tiny")
    with pytest.raises(ValueError, match=message):
        analyse(model.train(), data, **asked)
    assert model.training
