"""python -m zoo: list, show, plot-prior."""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

from zoo import create_model, create_prior
from zoo.__main__ import app
from zoo.prior_plot import head_parameters, is_retrieval_head, layer_priors, log_prior_curve


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_list_takes_a_pattern():
    done = invoke("list", "text_ggd*_tiny")
    assert done.exit_code == 0
    assert done.output.split() == ["text_ggd_ssmax_tiny", "text_ggd_tiny"]
    assert invoke("list", "nothing*").exit_code == 2


def test_show_counts_the_parameters_of_any_size():
    done = invoke("show", "text_ggd_ssmax_tiny")
    total = sum(p.numel() for p in create_model("text_ggd_ssmax_tiny").parameters())
    assert done.exit_code == 0 and f"{total:,} parameters" in done.output
    assert "train_context" in done.output
    assert "1,1" in invoke("show", "text_ggd_ssmax_1100m").output  # built on the meta device: no memory


def test_unknown_names_are_one_line():
    for command in ("show", "plot-prior"):
        done = invoke(command, "text_gdg_tiny")
        assert done.exit_code == 2
        assert "did you mean text_ggd_tiny" in done.stderr


@pytest.mark.parametrize("position", ["ggd", "goat", "alibi", "t5", "kerple"])
def test_plot_prior_draws(tmp_path, position):
    path = tmp_path / "prior.png"
    done = invoke("plot-prior", f"text_{position}_tiny", "--out", path, "--length", 600)
    assert done.exit_code == 0, done.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["prior.png"]


@pytest.mark.parametrize(
    ("position", "why"), [("rope", "0 everywhere"), ("nope", "0 everywhere"), ("cable", "the text")]
)
def test_plot_prior_says_why_there_is_nothing_to_draw(tmp_path, position, why):
    done = invoke("plot-prior", f"text_{position}_tiny", "--out", tmp_path / "prior.png")
    assert done.exit_code == 2 and why in done.stderr
    assert not list(tmp_path.iterdir())


def test_plot_prior_reads_saved_models(tmp_path):
    model = create_model("text_ggd_tiny", dim=32, num_layers=2, num_heads=2, hidden_dim=32)
    model.save_pretrained(tmp_path / "run" / "model")
    done = invoke("plot-prior", tmp_path / "run", "--out", tmp_path / "prior.png")
    assert done.exit_code == 0, done.output
    assert invoke("plot-prior", tmp_path).exit_code == 2


def test_curve_is_the_prior_against_distance():
    prior = create_prior("ggd", num_heads=2)
    with torch.no_grad():
        prior.theta_beta.copy_(torch.tensor([1.0, -0.5]))
        prior.theta_alpha.copy_(torch.tensor([math.log(0.25), 0.0]))
    curve = log_prior_curve(prior, 64)
    distance = torch.arange(64).double() + 1e-5
    expected = torch.stack([-0.25 * distance, -(distance**-0.5)])
    torch.testing.assert_close(curve, expected - expected.max(-1, keepdim=True).values, rtol=1e-6, atol=1e-6)
    assert is_retrieval_head(prior) == [False, True]
    assert head_parameters(prior)["α = exp θα"] == pytest.approx([0.25, 1.0])


def test_curve_needs_no_square_of_the_length():
    """A million tokens: a T × S matrix would be 8 TB."""
    prior = create_prior("alibi", num_heads=1)
    curve = log_prior_curve(prior, 1 << 20)
    assert curve.shape == (1, 1 << 20)
    assert float(curve[0, -1]) == pytest.approx(-((1 << 20) - 1) * 2.0**-8)


def test_composed_priors_show_the_numbers_of_their_parts():
    model = create_model("text_goat_tiny")
    numbers = head_parameters(layer_priors(model)[0])
    assert set(numbers) == {"slope", "bump at key 0", "amplitude √Σ(α²+β²)"}
    assert numbers["slope"] == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625], rel=1e-4)
