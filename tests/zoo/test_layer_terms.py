"""What layers take from positions, made for all of them together, against what each makes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.priors_table import make
from zoo import Positions, layer_terms
from zoo.priors import Prior
from zoo.sequence import SequenceGroup


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
        ("text_ggd_tiny", {"position": ["ggd", "alibi+kerple", "t5", "cable"], "num_layers": 8, "ssmax": True}),
        ("vision_ggd2d_tiny_patch8", {"ssmax": True}),
        ("vision_goat_tiny_patch8", {}),
    ],
)
def test_a_model_computes_the_same(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients with what layers take from positions made together, as on a GPU, or by each."""
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
        expected = outcome(model, x, **call)
        with monkeypatch.context() as gpu:
            gpu.setattr(layer_terms, "costs_launches", lambda x: True)
            torch.testing.assert_close(outcome(model, x, **call), expected, rtol=1e-9, atol=1e-12)
    if name.startswith("text"):  # the last layer for its last token alone
        expected = model.forward_features(x, last=1)
        monkeypatch.setattr(layer_terms, "costs_launches", lambda x: True)
        torch.testing.assert_close(model.forward_features(x, last=1), expected)


def test_ranks_that_share_lines_make_the_terms_of_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_terms, "costs_launches", lambda x: True)
    model, whole = zoo.create_model("text_ggd_goat_ssmax_tiny", num_heads=4).double(), Positions.line(8)
    attentions, group = [layer.attention for layer in model.layers], SequenceGroup(1, 2, lambda x, cut, joined: x)
    together = layer_terms.layer_terms(attentions, whole, torch.zeros(1), sequence=group)
    for attention, terms in zip(attentions, together, strict=True):
        assert terms.terms is not None and terms.row_scale is not None
        alone = attention.prior.of_heads(slice(2, 4))(whole, whole, causal=True)
        torch.testing.assert_close(terms.terms.dense(), alone.dense(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(terms.row_scale, attention.ssmax(whole.slice(4, 8), causal=True))
