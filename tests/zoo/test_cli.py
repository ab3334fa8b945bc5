"""python -m zoo: list, show, plot-prior, and what its figures draw."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zoo import Positions, create_model
from zoo.__main__ import app
from zoo.cli import call
from zoo.layers import Attention
from zoo.methods import create_grid_position
from zoo.prior_plot import centre_log_prior, layer_priors, log_prior_curve, retrieval_heads


def invoke(*arguments: object) -> SimpleNamespace:
    """Run a command as `python -m zoo` does, which says on one line what cannot be carried out."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = call(app, [str(a) for a in arguments], prog="python -m zoo")
    stdout, stderr = out.getvalue(), err.getvalue()
    return SimpleNamespace(exit_code=code, stdout=stdout, stderr=stderr, output=stdout + stderr)


def test_list_takes_a_pattern() -> None:
    done = invoke("list", "text_kerple*_tiny")
    assert done.exit_code == 0 and done.output.split() == ["text_kerple_ssmax_tiny", "text_kerple_tiny"]
    done = invoke("list", "text_ggd*.facts", "--pretrained")
    assert done.exit_code == 0 and "text_ggd_ssmax_tiny.facts" in done.output and "0.92M" in done.output
    assert invoke("list", "nothing*").exit_code == 2


@pytest.mark.slow
def test_a_reader_that_goes_away_is_141() -> None:
    words = [sys.executable, "-m", "zoo", "show", "text_alibi_tiny"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a[red]\x1b]0;t\x07 $x_{$"  # and in figures no formula
    create_model("text_alibi_tiny", num_layers=1, tokenizer="[/b]\x1b[31m.json").save_pretrained(folder)
    shown, drawn = invoke("show", folder), invoke("plot-prior", folder, "--out", tmp_path / "[red]p.png")
    assert shown.exit_code == drawn.exit_code == 0 and "\x1b" not in shown.output
    assert r"a[red]\x1b]0;t\x07 $x_{$" in shown.output and r"[/b]\x1b[31m.json" in shown.output
    assert "[red]p.png" in drawn.output


def test_show_prints_parameters_of_any_size_and_the_card() -> None:
    done = invoke("show", "text_ggd_ssmax_tiny.facts")
    total = sum(p.numel() for p in create_model("text_ggd_ssmax_tiny").parameters())
    assert done.exit_code == 0 and f"{total:,} parameters" in done.output and "32 of 32" in done.output
    assert "train_context" in done.output and "bits_per_byte" in done.output and "State of the Union" in done.output
    assert "1,1" in invoke("show", "text_ggd_ssmax_1100m").output  # built on the meta device: no memory
    images = invoke("show", "vision_goat_small_patch16").output
    assert "patch_embed" in images and "other" not in images and "none ship" in images


def test_plot_prior_reads_saved_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model("dna_ggd_tiny", dim=32, num_layers=2, num_heads=2, hidden_dim=32)
    model.save_pretrained(tmp_path / "run" / "model")
    drawn = []
    draw = "zoo.prior_plot.draw_priors"
    monkeypatch.setattr(draw, lambda model, title, path, length: drawn.append((title, model.config)))
    assert invoke("plot-prior", tmp_path / "run", "--out", tmp_path / "prior.png").exit_code == 0
    (tmp_path / "run" / "recipe.json").write_text('{"name": "text.ggd_tiny"}')
    for folder in ("run", "run/model"):
        assert invoke("plot-prior", tmp_path / folder).exit_code == 0
    titles = ["run", "text.ggd_tiny (run)", "text.ggd_tiny (run)"]  # never the path
    assert drawn == [(title, model.config) for title in titles]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["text_goat_tiny", "vision_ggd2d_separable_small_patch16", "vision_fire_small_patch16"]
)
def test_plot_prior_draws(tmp_path: Path, name: str) -> None:
    small = dict(num_layers=2, num_heads=2, dim=128, hidden_dim=32)
    create_model(name, **small).save_pretrained(tmp_path / "saved")
    place = ("--length", 600) if name.startswith("text") else ("--size", 320)
    done = invoke("plot-prior", tmp_path / "saved", "--out", tmp_path / "prior.png", *place)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "prior.png").read_bytes().startswith(b"\x89PNG")


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
def test_plot_prior_says_what_is_wrong(tmp_path: Path, name: str, options: list[object], why: str) -> None:
    done = invoke("plot-prior", name, "--out", tmp_path / "prior.png", *options)
    assert done.exit_code == 2 and why in done.stderr and not list(tmp_path.iterdir())


def test_curves_and_names_of_heads_follow_the_sign_of_ssmax() -> None:
    """s·ln n·K, not K: of the shipped model four heads have s < 0."""
    model = create_model("text_ggd_ssmax_tiny.facts")
    attention, drawn = model.layers[0].attention, layer_priors(model)[0]
    s = attention.ssmax.s.detach().double()
    expected = attention.prior.log_prior(Positions.line(1, offset=99), Positions.line(100), causal=True)[0, :, 0]
    expected = (s[:, None] * math.log(100) * expected).flip(-1)
    torch.testing.assert_close(log_prior_curve(drawn, 100), expected - expected.max(-1, keepdim=True).values)
    signs = [layer.attention.ssmax.s < 0 for layer in model.layers]
    assert sum(int(sign.sum()) for sign in signs) == 4
    for layer, sign in zip(layer_priors(model), signs, strict=True):
        assert retrieval_heads(layer) == ((layer.prior.theta_beta < 0) != sign).tolist()


@pytest.mark.parametrize(("position", "num_prefix"), [("goat", 2), ("ggd2d_separable", 0), ("t5", 2)])
def test_the_centre_row_is_the_oracles(position: str, num_prefix: int) -> None:
    torch.manual_seed(0)
    prior = create_grid_position(position, dim=64, num_heads=2, train_grid=(3, 3)).prior
    for parameter in prior.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    positions = Positions.grid(5, 6, num_prefix=num_prefix)
    patches, prefix = centre_log_prior(Attention(64, 2, prior=prior, causal=False, lanes="beside"), positions)
    assert patches.shape == (2, 5, 6) and prefix.shape == (2, num_prefix)
    with torch.no_grad():
        row = prior.log_prior(positions, positions, causal=False)[0, :, num_prefix + 2 * 6 + 3]
    highest = row[:, num_prefix:].max(-1, keepdim=True).values
    torch.testing.assert_close(torch.cat([prefix, patches.flatten(1)], -1), row - highest, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_text_needs_no_vision_package() -> None:
    """Without timm, text models are made and listed, and what vision lacks is said."""
    code = """
import sys
sys.modules["timm"] = None
import zoo
assert zoo.create_model("text_ggd_tiny").config.dim == 128 and zoo.list_models("text_*")
assert "vision_goat_tiny_patch8" in zoo.list_models() and len(zoo.list_models("*glyphs*", pretrained=True)) > 3
try:
    zoo.create_model("vision_goat_tiny_patch8")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pip install 'priorzoo[vision]'" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("first", ["timm", "from transformers import LlamaConfig, ViTModel", "peft"])
def test_libraries_are_imported_after_zoo(first: str) -> None:
    line = first if first.startswith("from") else f"import {first}"
    subprocess.run([sys.executable, "-c", f"import zoo\n{line}"], check=True, timeout=120)
