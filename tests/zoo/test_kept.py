"""A prior's terms on a grid, kept from call to call, against those made anew."""

from __future__ import annotations

import pytest
import torch

import zoo
from tests.zoo.priors_table import GRID, make, positions_for
from tests.zoo.test_layer_terms import tensors
from zoo import Positions
from zoo.priors import Prior
from zoo.priors.kept import GRIDS, kept_terms

X = torch.zeros(1, 1, 1)


@pytest.mark.parametrize("name", GRID)
@torch.inference_mode()
def test_terms_are_made_once_a_grid_and_again_for_other_values(name: str) -> None:
    prior, at = make(name), positions_for(name)
    first = kept_terms(prior, at, X, causal=False)
    assert kept_terms(prior, positions_for(name), X, causal=False) is first is not None
    for parameter in prior.parameters():
        parameter.data.add_(0.25)  # which no version counts
    again, anew = kept_terms(prior, at, X, causal=False), prior(at, at, causal=False)
    assert again is not None
    for own, wanted in zip(tensors(again, causal=False), tensors(anew, causal=False), strict=True):
        assert torch.equal(own, wanted)
    prior.float()
    single = kept_terms(prior, at, X, causal=False)
    assert single is not None
    assert all(own.dtype == torch.float32 for own in tensors(single, causal=False))


@torch.inference_mode()
def test_the_last_grids_are_kept() -> None:
    prior, grids = make("ggd2d"), [Positions.grid(2 + n, 3) for n in range(GRIDS + 1)]
    found = [kept_terms(prior, at, X, causal=False) for at in grids]
    assert kept_terms(prior, grids[-1], X, causal=False) is found[-1]
    assert kept_terms(prior, grids[0], X, causal=False) is not found[0]


def test_nothing_is_kept_where_gradients_may_be_asked_for_or_values_cannot_be_told() -> None:
    prior, at = make("ggd2d"), positions_for("ggd2d")
    assert kept_terms(prior, at, X, causal=False) is None
    with torch.no_grad():
        assert kept_terms(prior, at, X, causal=False) is None
    with torch.inference_mode():
        assert kept_terms(prior, at, X.to("meta"), causal=False) is None
        assert kept_terms(make("ggd"), Positions.line(5), X, causal=True) is None
        handle = prior.register_forward_pre_hook(lambda *_: None)  # as of engines that gather parameters there
        assert kept_terms(prior, at, X, causal=False) is None
        handle.remove()
        next(prior.parameters()).data.fill_(float("nan"))
        assert kept_terms(prior, at, X, causal=False) is None


def test_an_image_size_that_comes_again_makes_no_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.create_model("vision_ggd_goat_ssmax_tiny_patch8").eval()
    images = torch.randn(1, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(images)
    calls, forward = [], Prior.__call__
    monkeypatch.setattr(
        Prior, "__call__", lambda self, *args, **more: calls.append(self) or forward(self, *args, **more)
    )
    with torch.inference_mode():
        assert torch.equal(model(images), wanted)
        assert calls
        calls.clear()
        assert torch.equal(model(images), wanted)
        assert not calls
        next(model.layers[0].attention.prior.parameters()).data.add_(0.5)
        assert not torch.equal(model(images), wanted)
        assert {id(one) for one in calls} >= {id(model.layers[0].attention.prior)}
