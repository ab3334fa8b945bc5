"""What models may set of attention beside its prior: temperature, scale and gate of the prior, one prior for all layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import pairs
from tests.zoo.priors_table import WIDTH, inputs, make
from zoo import Positions, create_model
from zoo.layers import Attention, LogitOptions, SSMax

HEADS, LENGTH = 3, 11


def attention(prior: str, ssmax: bool, scale_prior: bool = True, **options: Any) -> Attention:
    torch.manual_seed(3)
    row_scale = SSMax(HEADS, train_context=16) if ssmax else None
    made = Attention(
        WIDTH,
        HEADS,
        prior=make(prior),
        ssmax=row_scale,
        lanes="beside",
        logits=LogitOptions.of(options, scale_prior=scale_prior),
    )
    return made.double()


def by_definition(layer: Attention, x: Tensor) -> Tensor:
    """The layer's output from dense logits."""
    at, width = Positions.line(LENGTH), layer.content_dim
    q, k, v = (made(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for made in (layer.query, layer.key, layer.value))
    log_prior = layer.prior_scale * layer.prior.log_prior(at, at, causal=True, x=x)
    if layer.prior_gate is not None:
        gate = layer.prior_gate
        norm = q.square().sum(-1).sqrt()
        weight = 1 / (1 + (-(gate.bias[:, None] - (1 + gate.slope.exp()).log()[:, None] * norm)).exp())
        log_prior = log_prior * weight[..., None]
    content = q @ k.transpose(-1, -2) / (layer.temperature * math.sqrt(width))
    rows = (
        1.0
        if layer.ssmax is None
        else layer.ssmax.s[:, None, None] * torch.arange(1, LENGTH + 1).double().log()[:, None]
    )
    logits = (content + log_prior) * rows if layer.scale_prior else content * rows + log_prior
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return layer.out((logits.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"prior_scale": 3.0},
    {"prior_gate": True},
    {"temperature": 2.0, "prior_scale": 0.25, "prior_gate": True},
]


@pytest.mark.parametrize(
    ("prior", "number", "ssmax", "scale_prior"),
    pairs(["ggd", "goat", "cable", "fire"], range(len(OPTIONS)), [True, False], [True, False]),
)
def test_temperature_scale_and_gate_by_definition(prior: str, number: int, ssmax: bool, scale_prior: bool) -> None:
    """Outputs and every gradient, with gates that open and close."""
    layer, x = attention(prior, ssmax, scale_prior, **OPTIONS[number]), inputs(LENGTH)
    if layer.prior_gate is not None:
        with torch.no_grad():
            layer.prior_gate.slope.copy_(torch.tensor([0.5, 1.0, -1.0]))
            layer.prior_gate.bias.copy_(torch.tensor([1.0, 0.0, 0.5]))
    parameters = [p for p in layer.parameters() if p.requires_grad]
    found, expected = layer(x, Positions.line(LENGTH)), by_definition(layer, x)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-9)
    mine, theirs = (torch.autograd.grad(y.square().sum(), parameters, allow_unused=True) for y in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(0 if one is None else one, 0 if other is None else other, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]])
def test_decoding_with_a_cache_equals_prefill(options: dict) -> None:
    torch.manual_seed(0)
    model = create_model("text_ggd_goat_ssmax_tiny", num_layers=2, logit_options=options, lanes="beside").eval()
    tokens = torch.randint(256, (1, 40))
    cache = model.new_cache(40)
    with torch.no_grad():
        decoded = torch.cat([model(tokens[:, n : n + 8], cache=cache) for n in range(0, 40, 8)], dim=1)
        torch.testing.assert_close(decoded, model(tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["text_ggd_goat_tiny", "vision_goat_tiny_patch8", "dna_rope_tiny"])
def test_one_prior_for_all_layers(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = create_model(name, share_prior=True)
    priors = {id(layer.attention.prior) for layer in model.layers}
    assert len(priors) == 1
    assert not any(".prior." in key and not key.startswith("layers.0.") for key in model.state_dict())
    own = create_model(name)
    gone = sum(p.numel() for layer in own.layers[1:] for p in layer.attention.prior.parameters())
    assert sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in model.parameters()) == gone
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    x = torch.randn(1, 3, 64, 64) if name.startswith("vision") else torch.randint(4, (1, 12))
    torch.testing.assert_close(model.eval()(x), again.eval()(x))
    with pytest.raises(ValueError, match="one position method for all layers"):
        create_model("text_ggd_tiny", position=["ggd", "goat"], share_prior=True)


def test_bad_logit_options() -> None:
    for options, message in [
        ({"temprature": 2.0}, "did you mean 'temperature'"),
        ({"temperature": 0.0}, "temperature of the logits must be a finite number above 0, got 0"),
        ({"prior_scale": -1.0}, "prior_scale .* got -1"),
        ({"lanes": "beside"}, "no option 'lanes'"),
    ]:
        with pytest.raises(ValueError, match=message):
            create_model("text_ggd_tiny", logit_options=options)
