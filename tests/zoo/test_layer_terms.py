"""What layers take from positions, made for all of them together, against what each makes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.priors_table import GRID, make, positions_for
from zoo import Positions, layer_terms
from zoo.priors import Prior
from zoo.sequence import SequenceGroup


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(layer_terms, "costs_launches", lambda x: True)


def tensors(terms: zoo.PriorTerms, *, causal: bool) -> list[Tensor]:
    table = [] if terms.table is None else [terms.table.table, *vars(terms.table.fused(causal=causal)).values()]
    found = [terms.q_lanes, terms.k_lanes, terms.bias, *table]
    return [x for x in found if x is not None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["alibi", "ggd", "goat", "kerple", "matrix", "t5", "ggd2d", "goat2d"])
def test_terms_and_gradients_of_every_prior(name: str, packed: bool) -> None:
    at = positions_for(name)
    if packed and name not in GRID:
        at = Positions.documents(torch.tensor([[0] * 5 + [1] * 6, [0] * 2 + [1] * 9]))
    priors = [make(name, seed=n) for n in range(3)]
    causal, x = name not in GRID, torch.zeros(2, 11, 12, dtype=torch.float64)
    found = layer_terms.stacked_terms([*priors, priors[0]], at, at, causal=causal, x=x)
    assert found[3] is found[0]
    for prior, terms in zip(priors, found, strict=False):
        alone = prior(at, at, causal=causal, x=x)
        assert terms is not None and (terms.causal, terms.offset) == (alone.causal, alone.offset)
        trained = [p for p in prior.parameters() if p.requires_grad]
        for own, wanted in zip(tensors(terms, causal=causal), tensors(alone, causal=causal), strict=True):
            torch.testing.assert_close(own.expand_as(wanted), wanted, rtol=1e-12, atol=1e-12)
            if wanted.requires_grad:
                weights = torch.randn(wanted.shape, dtype=wanted.dtype)
                options: dict[str, Any] = dict(retain_graph=True, materialize_grads=True, allow_unused=True)
                torch.testing.assert_close(
                    torch.autograd.grad((own * weights).sum(), trained, **options),
                    torch.autograd.grad((wanted * weights).sum(), trained, **options),
                )


def test_what_cannot_be_read_outside_its_own_forward_is_not_stacked() -> None:
    def found(*priors: Prior) -> list[bool]:
        at = Positions.line(5)
        return [t is not None for t in layer_terms.stacked_terms(priors, at, at, causal=True, x=torch.zeros(1))]

    hooked, empty = make("ggd"), make("ggd")
    hooked.register_forward_pre_hook(lambda *_: None)  # as ZeRO-3 gathers
    empty.theta_alpha = nn.Parameter(torch.empty(0))
    others = make("kerple"), make("ggd", train_alpha=False), make("ggd", train_mu=False)
    assert found(make("ggd"), hooked, make("ggd"), empty, *others) == [True, False, True, *[False] * 4]
    adapted = make("goat")
    adapted.key_bias.mlp[0] = Adapted(18, 4).double()  # type: ignore[operator, union-attr]
    assert found(make("goat"), make("goat", rank=3), adapted, make("goat")) == [True, False, False, True]


class Adapted(nn.Linear):
    """A layer in another's place."""


def outcome(model: Any, x: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    out = model(x, **options)
    out.clamp(min=-100).square().mean().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "name, options",
    [
        ("text_ggd_goat_ssmax_tiny", {"activation_checkpointing": True}),
        ("text_goat_tiny", {"share_prior": True, "num_kv_heads": 2}),
        ("text_ggd_tiny", {"position": ["ggd", "alibi+kerple", "cable"], "num_layers": 6, "ssmax": True}),
        ("vision_ggd2d_tiny_patch8", {"ssmax": True}),
        ("vision_goat_tiny_patch8", {}),
    ],
)
def test_a_model_computes_the_same(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = zoo.create_model(name, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    calls: list[dict[str, Any]] = [{}]
    x = torch.randn(2, 3, *getattr(model.config, "train_size", (0, 0))).double()
    if name.startswith("text"):
        x, documents = torch.randint(0, 1000, (2, 24)), torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 21])
        calls.append({"segments": documents})
    for call in calls:
        wanted = outcome(model, x, **call)
        with monkeypatch.context() as gpu:
            gpu.setattr(layer_terms, "costs_launches", lambda x: True)
            torch.testing.assert_close(outcome(model, x, **call), wanted, rtol=1e-9, atol=1e-12)
    if name.startswith("text"):  # the last layer for its last token alone, and with a cache
        wanted = model.forward_features(x, last=1)
        monkeypatch.setattr(layer_terms, "costs_launches", lambda x: True)
        torch.testing.assert_close(model.forward_features(x, last=1), wanted)
        torch.testing.assert_close(model.forward_features(x, cache=model.new_cache())[:, -1:], wanted)


def test_ranks_that_share_lines_make_the_terms_of_their_heads(together: None) -> None:
    model = zoo.create_model("text_ggd_goat_ssmax_tiny", num_heads=4).double()
    whole = Positions.line(8)
    attentions = [layer.attention for layer in model.layers]
    group = SequenceGroup(1, 2, lambda x, cut, joined: x)
    made = layer_terms.layer_terms(attentions, whole, torch.zeros(1), sequence=group)
    for attention, found in zip(attentions, made, strict=True):
        assert found.terms is not None and found.row_scale is not None
        alone = attention.prior.of_heads(slice(2, 4))(whole, whole, causal=True)
        for own, wanted in zip(tensors(found.terms, causal=True), tensors(alone, causal=True), strict=True):
            torch.testing.assert_close(own.expand_as(wanted), wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.row_scale, attention.ssmax(whole.slice(4, 8), causal=True))
