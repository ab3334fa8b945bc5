"""recipes/evaluate.py from the command line down to its files: resuming, several models, run folders, wrong requests."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from modalities.text.evals import EVALUATORS
from modalities.text.model import CausalLM, TextConfig
from recipes import evaluate as command
from recipes.targets import RequestError, override, parse_lengths, parse_overrides

SMALL = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=32, train_context=96)


def saved_run(folder, **config):
    """A run folder as training leaves it: recipe.json and model/."""
    torch.manual_seed(0)
    CausalLM(TextConfig(**(SMALL | config))).save_pretrained(folder / "model")
    (folder / "recipe.json").write_text(json.dumps({"name": "text.test", "modality": "text"}))
    return str(folder)


def invoke(*arguments):
    return CliRunner().invoke(command.app, [str(a) for a in arguments])


@pytest.fixture
def runs(tmp_path):
    return [saved_run(tmp_path / "run_a"), saved_run(tmp_path / "run_b", position="rope", ssmax=True)]


def test_two_models_give_one_set_of_files(tmp_path, runs):
    out = tmp_path / "out"
    done = invoke(*runs, "passkey,perplexity", "--lengths", "96,192", "--samples", 1, "--out", out)
    assert done.exit_code == 0, done.output
    for name in ("passkey", "perplexity"):
        content = json.loads((out / f"{name}.json").read_text())
        assert [m["method"] for m in content["models"]] == ["ggd", "rope_ssmax"]
        assert content["models"][0]["label"] == "text.test (run_a)"
        with open(out / f"{name}.csv") as file:
            rows = list(csv.DictReader(file))
        assert [(r["model"], r["length"]) for r in rows] == [
            (f"text.test (run_{m})", n) for m in "ab" for n in ("96", "192")
        ]
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "overview.png").exists()
    assert "free_generation" in done.output and "bits_per_byte" in done.output
    assert not [p for p in out.rglob("*") if "partial" in p.name or p.suffix == ".tmp"]


def test_a_stopped_run_goes_on_where_it_was(tmp_path, runs, monkeypatch):
    request = (runs[0], "passkey", "--lengths", 96, "--samples", 1, "--out")
    assert invoke(*request, tmp_path / "whole").exit_code == 0
    measured = []
    measure = type(EVALUATORS["passkey"]).measure

    def stopping(self, model, cell, settings):
        if len(measured) == 7:
            raise KeyboardInterrupt
        measured.append(cell.name)
        return measure(self, model, cell, settings)

    monkeypatch.setattr(type(EVALUATORS["passkey"]), "measure", stopping)
    assert invoke(*request, tmp_path / "parts").exit_code != 0
    assert not (tmp_path / "parts" / "passkey.json").exists()

    def recording(self, model, cell, settings):
        measured.append(cell.name)
        return measure(self, model, cell, settings)

    monkeypatch.setattr(type(EVALUATORS["passkey"]), "measure", recording)
    assert invoke(*request, tmp_path / "parts").exit_code == 0
    assert len(measured) == len(set(measured)) == 20
    whole, parts = (json.loads((tmp_path / d / "passkey.json").read_text()) for d in ("whole", "parts"))
    assert whole["models"][0]["cells"] == parts["models"][0]["cells"]
    assert whole["models"][0]["rows"] == parts["models"][0]["rows"]
    # another seed is another measurement
    measured.clear()
    assert invoke(*request, tmp_path / "parts", "--seed", 7).exit_code == 0
    assert len(measured) == 20


def test_dry_run_measures_and_writes_nothing(tmp_path, runs):
    done = invoke(*runs, "ruler", "--lengths", 1200, "--samples", 1, "--out", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0
    assert "plan" in done.output and not (tmp_path / "out").exists()


def test_heatmap_and_ruler_write_their_figures(tmp_path, runs):
    done = invoke(runs[0], "niah,ruler", "--lengths", 900, "--samples", 1, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"niah.png", "ruler.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text_ggd_tinny", "passkey"], "did you mean text_ggd_tiny"),
        (["text_ggd_tiny", "paskey"], "no evaluator 'paskey' for text models; did you mean 'passkey'?"),
        (["text_ggd_tiny"], "name at least one model"),
        (["text_ggd_tiny", "passkey", "--lengths", "1x"], "'1x' is no token count"),
        (["text_ggd_tiny", "passkey", "--lengths", "50"], "need at least 81"),
        (["text_ggd_tiny", "ruler", "--lengths", "128"], "too short for this RULER task"),
        (["text_ggd_tiny", "perplexity", "--lengths", "9000000"], "the longest has"),
        (["text_ggd_tiny", "perplexity", "--source", "sotu-exerpt"], "sotu-excerpt"),
        (["text_ggd_tiny", "passkey", "--dtype", "float23"], "did you mean 'float32'?"),
        (["runs/none", "passkey"], "no run folder 'runs/none'"),
        (["text_rope_tiny", "passkey", "--set", "position_option.scaling=yarn"], "did you mean 'position_options'?"),
        (["text_rope_tiny", "passkey", "--set", "dim=64"], "changes the model's parameters"),
        (["text_rope_tiny", "passkey", "--set", "dim"], "expected key=value"),
    ],
)
def test_wrong_requests_name_the_nearest_valid_one(arguments, message, capsys):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")


def test_override_keeps_the_weights_and_changes_the_angles():
    torch.manual_seed(0)
    model = CausalLM(TextConfig(**(SMALL | {"position": "rope"})))
    changed = override(model, parse_overrides(["position_options.scaling=linear", "position_options.factor=4"]))
    assert changed.config.position_options == {"scaling": "linear", "factor": 4}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters(), strict=True))
    tokens = torch.arange(64)[None]
    assert not torch.allclose(model(tokens), changed(tokens), atol=1e-4)


def test_parsing():
    assert parse_lengths("128,512,4k") == (128, 512, 4096)
    assert parse_lengths(None) is None
    assert parse_overrides(["a.b=1", "a.c=x", "d=true"]) == {"a": {"b": 1, "c": "x"}, "d": True}
    with pytest.raises(RequestError, match="both as a value and as a group"):
        parse_overrides(["a=1", "a.b=2"])
