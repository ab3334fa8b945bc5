"""`priorzoo plot-prior` and what its figures draw."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from modalities import prior_plot
from modalities.prior_plot import (
    centre_log_prior,
    layers_with_priors,
    log_prior_curve,
    retrieval_heads,
)
from tests.zoo.test_cli import invoke
from zoo import Positions, create_model
from zoo.layers import Attention
from zoo.methods import create_grid_position


def test_plot_prior_reads_saved_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model("dna_ggd_tiny", dim=32, num_layers=2, num_heads=2, hidden_dim=32)
    model.save_pretrained(tmp_path / "run" / "model")
    drawn = []
    monkeypatch.setattr(
        prior_plot, "draw_priors", lambda m, title, path, length: drawn.append((title, m.config))
    )
    assert (
        invoke(tmp_path / "run", "--out", tmp_path / "prior.png", app=prior_plot.app).exit_code == 0
    )
    (tmp_path / "run" / "recipe.json").write_text('{"name": "text.ggd_tiny"}')
    for folder in ("run", "run/model"):
        assert invoke(tmp_path / folder, app=prior_plot.app).exit_code == 0
    # never the path
    assert drawn == [
        (title, model.config) for title in ["run", "text.ggd_tiny (run)", "text.ggd_tiny (run)"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["text_goat_tiny", "vision_ggd2d_separable_tiny_patch8", "vision_fire_small_patch16"]
)
def test_plot_prior_draws(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a[red]\x1b $x_{$"  # no formula
    create_model(name, num_layers=2, num_heads=2, dim=128, hidden_dim=32).save_pretrained(folder)
    place = ("--length", 600) if name.startswith("text") else ("--size", 320)
    done = invoke(folder, "--out", tmp_path / "[red].png", *place, app=prior_plot.app)
    assert done.exit_code == 0, done.output
    assert "[red].png" in done.output, done.output
    assert (tmp_path / "[red].png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("text_gdg_tiny", [], "text_ggd_tiny"),
        ("text_rope_tiny", [], "is 0"),
        ("text_cable_tiny", [], "input"),
        ("vision_ggd2d_small_patch16", ["--size", 100], "nearest sizes are 96 and 112"),
        ("vision_ggd2d_small_patch16", ["--length", 128], "use --size"),
        ("text_ggd_tiny", ["--size", 96], "use --length"),
        ("text_ggd_tiny", ["--length", 1], "at least 2"),
    ],
)
def test_plot_prior_errors(tmp_path: Path, name: str, options: list[object], why: str) -> None:
    """Plot prior says what is wrong."""
    done = invoke(name, "--out", tmp_path / "prior.png", *options, app=prior_plot.app)
    assert done.exit_code == 2
    assert why in done.stderr
    assert not list(tmp_path.iterdir())


def test_heads_follow_ssmax_sign() -> None:
    """s·ln n·K, not K: of the shipped model four heads have s < 0."""
    model = create_model("text_ggd_ssmax_tiny.facts")
    attention = model.layers[0].attention
    drawn = layers_with_priors(model)[0]
    expected = attention.prior.log_prior(
        Positions.line(1, offset=99), Positions.line(100), causal=True
    )[0, :, 0]
    expected = (attention.ssmax.s.detach().double()[:, None] * math.log(100) * expected).flip(-1)
    torch.testing.assert_close(
        log_prior_curve(drawn, 100), expected - expected.max(-1, keepdim=True).values
    )
    signs = [layer.attention.ssmax.s < 0 for layer in model.layers]
    assert sum(int(sign.sum()) for sign in signs) == 4
    for layer, sign in zip(layers_with_priors(model), signs, strict=True):
        assert retrieval_heads(layer) == ((layer.prior.theta_beta < 0) != sign).tolist()


@pytest.mark.parametrize(
    ("position", "num_prefix"), [("goat", 2), ("ggd2d_separable", 0), ("t5", 2)]
)
def test_centre_row_equals_oracle(position: str, num_prefix: int) -> None:
    """The centre row is the oracles."""
    torch.manual_seed(0)
    prior = create_grid_position(position, dim=64, num_heads=2, train_grid=(3, 3)).prior
    for parameter in prior.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    positions = Positions.grid(5, 6, num_prefix=num_prefix)
    patches, prefix = centre_log_prior(
        Attention(64, 2, prior=prior, causal=False, lanes="beside"), positions
    )
    assert patches.shape == (2, 5, 6)
    assert prefix.shape == (2, num_prefix)
    with torch.no_grad():
        row = prior.log_prior(positions, positions, causal=False)[0, :, num_prefix + 2 * 6 + 3]
    highest = row[:, num_prefix:].max(-1, keepdim=True).values
    torch.testing.assert_close(
        torch.cat([prefix, patches.flatten(1)], -1), row - highest, atol=1e-5, rtol=1e-5
    )
