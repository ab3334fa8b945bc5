"""Sums of methods by name, a method per layer, and priors from outside. Decoding with sums:
tests/text/test_model.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.refusals import refuses
from tests.zoo.priors_table import decoded
from zoo import Positions, create_model, list_models, load_model, priors
from zoo.methods import (
    create_grid_position,
    create_position,
    grid_methods,
    line_methods,
    list_grid_positions,
    list_positions,
    pinned_context,
)
from zoo.priors import GridPrior, TablePrior

LINE = dict(dim=64, num_heads=2, train_context=32)
GRID = dict(dim=64, num_heads=2, train_grid=(3, 4))
SHAPE = dict(num_layers=2, dim=64, num_heads=2, num_kv_heads=1, hidden_dim=32)


def seeded(name: str, **overrides) -> nn.Module:
    torch.manual_seed(0)
    return create_model(name, **overrides)


def same_states(a: nn.Module, b: nn.Module) -> bool:
    ours = a.state_dict()
    theirs = b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("text_ggd_goat_tiny", "text_ggd+spectral+key_bias_tiny"),
        (
            "vision_ggd_goat_ssmax_tiny_patch8",
            "vision_ggd2d_separable+spectral2d+key_bias2d_ssmax_tiny_patch8",
        ),
    ],
)
@torch.no_grad()
def test_ggd_goat_is_a_sum(short: str, name: str) -> None:
    """Ggd goat is the sum it names."""
    one = seeded(short).eval()
    other = seeded(name).eval()
    assert same_states(one, other)
    assert short in list_models(short)
    assert name not in list_models(name)
    example = (
        torch.randn(1, 3, 48, 48) if short.startswith("vision") else torch.randint(0, 4, (1, 20))
    )
    assert torch.equal(one(example), other(example))
    assert list(dict(one.layers[0].attention.prior.named_children())) == [
        "ggd",
        "spectral",
        "key_bias",
    ]
    prior = create_position("ggd_goat", **LINE).prior
    # The key bias without a slope, the spectral part seeded at rank 2.
    assert prior.key_bias.slopes().max() < 1e-15
    assert prior.spectral.rank == 2
    assert prior.spectral.alpha.any()


def test_rotation_leaves_lanes() -> None:
    """A rotation in a sum turns the columns that lanes leave."""
    line = create_position("rope+key_bias", **LINE)
    x = torch.randn(1, 2, 4, 27)
    assert line.prior.num_lanes == 5
    assert create_position("rope+key_bias", **LINE, lanes="beside").rotary.head_dim == 32
    turned = line.rotary(x, Positions.line(4))  # pairs of 27 columns
    assert torch.equal(turned[..., 26], x[..., 26])
    assert not torch.equal(turned[..., :26], x[..., :26])
    assert create_grid_position("rope+key_bias", **GRID).rotary.head_dim == 28


def test_bad_sums_are_named() -> None:
    for name, options, words in [
        ("ggd+spectrl", {}, "unknown part 'spectrl'.*did you mean 'spectral'"),
        ("ggd+ggd", {}, "the part 'ggd' twice"),
        ("rope+local", {}, "the rotations rope and local"),
        ("learned+sinusoidal", {}, "the embeddings learned and sinusoidal"),
        ("ggd+alibi", {"aliby": {}}, "no part 'aliby'; did you mean 'alibi'"),
        (
            "ggd+alibi",
            {"alibi": {"learnble": True}},
            "part 'alibi' of 'ggd.alibi' has no option 'learnble'; did you",
        ),
    ]:
        refuses(words, create_position, name, **LINE, options=options)


@pytest.mark.parametrize("position", [["ggd", "rope", "ggd_goat", "nope"], ("cable", "learned")])
@torch.no_grad()
def test_a_method_per_layer(position, tmp_path) -> None:
    model = seeded("text_ggd_tiny", position=list(position), train_context=40).eval()
    made = [type(layer.attention.prior).__name__ for layer in model.layers]
    assert made == [type(create_position(name, **LINE).prior).__name__ for name in position] * (
        4 // len(position)
    )
    assert (model.position_embedding is not None) == ("learned" in position)
    tokens = torch.randint(0, 256, (2, 33))
    full = model(tokens)
    torch.testing.assert_close(decoded(model, tokens), full, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path).eval()(tokens), full)


def test_vision_method_per_layer() -> None:
    """A method per layer of a vision model."""
    options = {"goat": {"rank": 1}}
    position = ["goat", "rope2d_axial", "ggd+key_bias", "learned"]
    model = seeded("vision_nope_tiny_patch8", position=position, position_options=options)
    assert [layer.attention.prior.num_lanes for layer in model.layers] == [5, 0, 1, 0]
    assert model.config.position_options == options
    assert model(torch.randn(1, 3, 48, 72)).shape == (
        1,
        26,
    )


def test_bad_lists_are_named() -> None:
    for position, options, words in [
        (["ggd"] * 3, {}, "divides 4"),
        (["ggd", 3], {}, "each a string"),
        (["ggd", "alibi"], {"ggdd": {}}, "'ggdd'.*did you mean 'ggd'"),
        (["ggd", "alibi"], {"ggd": 3}, "got 3"),
        (["learned", "sinusoidal"], {}, "learned and sinusoidal"),
    ]:
        refuses(words, create_model, "text_ggd_tiny", position=position, position_options=options)


class Fading(TablePrior):
    """K = −rate_h·√|d|, of a file outside the project."""

    def __init__(self, num_heads: int, *, rate: float = 0.5) -> None:
        super().__init__(num_heads)
        self.rate = nn.Parameter(torch.full((num_heads,), rate))

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        return -self.rate.to(distance.dtype).view(-1, *[1] * distance.ndim) * distance.abs().sqrt()


class FadingGrid(GridPrior):
    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        return -torch.hypot(dy, dx).expand(self.num_heads, *dy.shape)


@pytest.fixture
def registry(monkeypatch):
    """Registrations end with the test."""
    monkeypatch.setattr(priors.PRIORS, "data", dict(priors.PRIORS.data))


def test_a_registered_prior_has_models(registry, tmp_path) -> None:
    assert "text_fading_tiny" not in list_models("text_f*")
    zoo.register_prior("fading", Fading)
    zoo.register_prior("fading2d", FadingGrid)
    zoo.register_prior("fading2d", FadingGrid)  # a module that is imported twice
    assert {"text_fading_tiny", "text_fading_ssmax_small"} <= set(list_models("text_fading*"))
    assert "fading" in list_positions()
    assert "fading" in list_grid_positions()
    assert create_model("vision_fading+key_bias_tiny_patch8")(torch.randn(1, 3, 48, 48)).shape == (
        1,
        26,
    )
    model = seeded("text_fading+spectral_tiny", **SHAPE, position_options={"fading": {"rate": 2.0}})
    assert model.layers[1].attention.prior.fading.rate.tolist() == [2.0, 2.0]
    model.save_pretrained(tmp_path)
    assert same_states(load_model(tmp_path), model)
    del priors.PRIORS["fading"]
    refuses(r"unknown part 'fading'.*--import FILE\.py", load_model, tmp_path)


def test_grid_prior_is_grid_method(registry) -> None:
    """A grid prior is a method of grids whatever its name."""
    zoo.register_prior("ripples", FadingGrid)
    assert "ripples" in grid_methods()
    assert "ripples" not in line_methods()
    refuses("'ripples2d' is taken", zoo.register_prior, "ripples2d", FadingGrid)


def test_bad_registrations_are_named(registry) -> None:
    for name, made, words in [
        ("ggd", Fading, "'ggd' is taken"),
        ("rope", Fading, "'rope' is taken"),
        ("my+own", Fading, "cannot name a prior"),
        ("own_ssmax", Fading, "cannot name a prior"),
        ("own", nn.Linear, "derived from zoo.Prior"),
        ("own", Fading(2), "derived from zoo.Prior"),
    ]:
        refuses(words, zoo.register_prior, name, made)


def test_unknown_methods_get_hints() -> None:
    """What is meant by names of no method is said."""
    for position in (["rope", "nope"], "rope"):
        with pytest.raises(
            ValueError, match=r"did you mean 'rope2d_axial', 'rope2d_mixed', 'rope2d_normalised'\?"
        ):
            zoo.create_model("vision_goat_tiny_patch8", position=position, position_options={})
    for position in (["ggd_ssmax", "nope"], "ggd_ssmax+key_bias"):
        with pytest.raises(
            ValueError, match=r"expected 'ggd': '_ssmax' ends the name of a model, .*ssmax=True"
        ):
            zoo.create_model("text_ggd_tiny", position=position)


def test_longer_model_keeps_method():
    """With pinned_context a key bias divides positions by the context of training, whatever the
    model's own is."""
    assert pinned_context("ggd", 64) == {}
    assert pinned_context("alibi+ggd", 64) == {}
    assert pinned_context("goat", 64) == {"train_context": 64}
    for name in ("goat", "ggd_goat", "alibi+key_bias"):
        torch.manual_seed(0)
        short = create_position(name, dim=64, num_heads=2, train_context=64).prior
        torch.manual_seed(0)
        longer = create_position(
            name, dim=64, num_heads=2, train_context=256, options=pinned_context(name, 64)
        ).prior
        line = Positions.line(100)
        assert torch.equal(*(prior.log_prior(line, line, causal=True) for prior in (short, longer)))
    for name in ("learned", "local"):
        refuses(f"'{name}'", pinned_context, name, 64)


@torch.no_grad()
def test_hybrids_and_windows_per_layer(tmp_path) -> None:
    options = {"local": {"window": 0.5, "sinks": 2}, "rope": {"theta": 500.0}}
    model = seeded("text_swa_rope_tiny", train_context=16, position_options=options).eval()
    layers = [layer.attention for layer in model.layers]
    assert [(x.window, x.sinks, x.rotary.theta) for x in layers] == [
        (8, 2, 10000.0),
        (None, 0, 500.0),
    ] * 2
    tokens = torch.randint(0, 256, (2, 33))
    full = model(tokens)
    torch.testing.assert_close(decoded(model, tokens), full, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path).eval()
    assert again.config == model.config
    assert torch.equal(again(tokens), full)
    rnope = create_model("text_rnope_tiny", num_layers=6)
    assert [layer.attention.rotary is None for layer in rnope.layers] == [n == 3 for n in range(6)]
    assert pinned_context("rnope_swa", 64) == {"local": {"window": 16}}
    assert create_position("alibi", options={"window": 5}, **LINE).window == 5
    for name, window, words in [
        ("rnope", 4, "a method for each layer"),
        ("alibi", 0, "window of 'alibi' must be"),
    ]:
        refuses(words, create_position, name, options={"window": window}, **LINE)


def test_local_window_follows_option():
    """The window of local follows its option."""
    assert create_position("local", **LINE).window == 32
    assert (
        create_position("local+alibi", options={"local": {"train_context": 8}}, **LINE).window == 8
    )
