"""Modalities: one in a folder of its own trains, resumes and is measured; how they are found; what saved models name."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import zoo
from modalities.contract import Modality, find_modality, modality_names
from modalities.dna import MODALITY as DNA
from modalities.text import MODALITY as TEXT
from modalities.text.model import CausalLM
from modalities.vision import MODALITY as VISION
from recipes.runs import RunFolder
from tests.launching import ROOT, command
from zoo import registry

SHAPES = {
    "text_ggd_tiny": dict(dim=16, num_layers=1, num_heads=2, hidden_dim=16),
    "dna_ggd_tiny": dict(dim=16, num_layers=1, num_heads=2, hidden_dim=16),
    "vision_alibi_tiny_patch8": dict(dim=16, num_layers=1, num_heads=2, hidden_dim=16),
}

# ------------------------------------------------------------------------------------------------ a modality in a folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The folder that holds the toy modality and its entry point, as an installed package would."""
    return Path(shutil.copytree(ROOT / "tests" / "toy_modality", tmp_path_factory.mktemp("toy") / "site"))


def test_contributing_shows_the_toy_word_for_word():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    [shown] = re.findall(r"```python\n# toy/__init__\.py\n(.*?)```", page, flags=re.DOTALL)
    source = (ROOT / "tests" / "toy_modality" / "toy" / "__init__.py").read_text()
    assert "MODALITY = Modality(" in shown and source.endswith(shown)


def python(toy, script, *words):
    return command([sys.executable, str(ROOT / script), *map(str, words)], PYTHONPATH=str(toy))


def settings(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """A run of 8 steps, and one of 4 that was resumed, both with an evaluator on the way."""
    folder = tmp_path_factory.mktemp("runs")
    on_the_way = 'evaluate.during={"copyrate": {"every": 4, "lengths": [16, 32]}}'
    common = settings("optim.schedule=constant", on_the_way)  # whose rate does not depend on where a run ends
    for name, steps, *resume in (("whole", 8), ("parts", 4), ("parts", 8, "--resume", "auto")):
        words = ["toy.tiny", "--run-dir", folder / name, *common, *settings(f"train.steps={steps}"), *resume]
        done = python(toy, "recipes/train.py", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_a_new_modality_trains_and_resumes_to_the_bit(trained):
    def records(name):
        timed = ("seconds", "symbols_per_s")
        return [{k: v for k, v in r.items() if k not in timed} for r in RunFolder(trained / name).metrics()]

    whole, parts = records("whole"), records("parts")
    assert [r["step"] for r in whole if "loss" in r] == list(range(1, 9)) and whole == parts
    assert [r["step"] for r in whole if "heldout_loss" in r] == [4, 8]
    assert [r["step"] for r in whole if "copyrate/copied@16" in r] == [4, 8]
    assert whole[7]["symbols"] < whole[-2]["symbols"] == 8 * 8 * 8  # targets of 8 steps of 8 samples
    files = [trained / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((trained / "whole" / "model" / "config.json").read_text())["modality"] == "toy"


@pytest.mark.slow
def test_a_new_modality_is_evaluated_by_the_command(toy, trained, tmp_path):
    run, out = trained / "whole", tmp_path / "out"
    words = ["copyrate", "--lengths", "16,32", "--repeats", "2", "--out", out]
    done = python(toy, "recipes/evaluate.py", run, run / "model", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in sorted((out / "copyrate").iterdir())]
    assert [model["label"] for model in found] == ["model", "toy.tiny (whole)"]
    assert found[0]["settings"]["repeats"] == 2 and found[0]["rows"] == found[1]["rows"]
    with open(out / "copyrate.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "toy.tiny (whole)"]
    last = RunFolder(run).metrics()[-1]  # what was measured on the way, at the end
    assert {f"copyrate/copied@{row['length']}": float(row["copied"]) for row in rows}.items() <= last.items()
    assert (out / "copyrate.png").read_bytes().startswith(b"\x89PNG")
    usage = python(toy, "recipes/evaluate.py", run, "copyrate", "--help").stdout
    assert "--repeats" in usage and "default 2" in " ".join(usage.split()) and "--mode" not in usage


# ------------------------------------------------------------------------------------------------ how they are found


@pytest.fixture
def points(monkeypatch):
    """Entry points of further modalities by name, as installed packages would have them."""

    def install(**values):
        found = [EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.GROUP else [])
        forget()

    def forget():
        registry._points.cache_clear()
        registry.load_modality.cache_clear()

    yield install
    monkeypatch.undo()
    forget()


def test_what_ships_is_found_without_installation(points):
    points()
    assert modality_names() == ["text", "vision", "dna"]
    assert [find_modality(name) for name in modality_names()] == [TEXT, VISION, DNA]
    points(text="json:loads", zeta="json:loads", alpha="modalities.text:MODALITY")
    assert modality_names() == ["text", "vision", "dna", "alpha", "zeta"]
    assert find_modality("text") is TEXT and find_modality("alpha") is TEXT
    with pytest.raises(ValueError, match=r"'zeta'.*Modality"):
        find_modality("zeta")
    with pytest.raises(ValueError, match=r"'txt'.*'text'.*zeta"):
        find_modality("txt")


def test_what_a_modality_lacks_is_named(points, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, line in {"needy": "import no_such_package.part", "torn": "from torn.missing import MODALITY"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    points(needy="needy:MODALITY", torn="torn:MODALITY")
    with pytest.raises(ImportError, match=r"needy.*no_such_package"):
        find_modality("needy")
    with pytest.raises(ModuleNotFoundError, match=r"torn\.missing"):  # its own fault, with its own traceback
        find_modality("torn")
    assert "text_ggd_tiny" in zoo.list_models("text_ggd_*")  # the others work
    with pytest.raises(ValueError, match="no_such_package"):  # and a name that it might have says what is missing
        zoo.create_model("needy_tiny")


def test_every_modality_keeps_the_contract():
    for name in modality_names():
        modality = find_modality(name)
        assert isinstance(modality, Modality) and modality.name == modality.model.modality == name
        assert all(kind.name == key and kind.summary and kind.version >= 1 for key, kind in modality.evaluators.items())


# ------------------------------------------------------------------------------------------------ saved models


@pytest.mark.parametrize("name", SHAPES)
def test_a_saved_model_is_loaded_by_the_modality_it_names(name, tmp_path):
    shape = SHAPES[name]
    torch.manual_seed(0)
    model = zoo.create_model(
        name, **{key: value for key, value in shape.items() if key in registry.model_entry(name).config}
    )
    model.save_pretrained(tmp_path / "m")
    again = zoo.load_model(tmp_path / "m")
    assert type(again) is type(model) and again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert registry.saved_modality(tmp_path / "m") == name.partition("_")[0]
    (tmp_path / "m").rename(tmp_path / "model")
    assert zoo.load_model(tmp_path).config == model.config  # the folder of a run stands for the model in it


def test_a_folder_of_another_modality_or_of_none_is_refused(tmp_path):
    zoo.create_model("dna_ggd_tiny", **SHAPES["dna_ggd_tiny"]).save_pretrained(tmp_path / "dna")
    with pytest.raises(ValueError, match=r"'dna'.*'text'"):
        CausalLM.from_pretrained(tmp_path / "dna")
    for name, content in {"unknown": '{"wings": 2}', "torn": "{", "empty": None}.items():
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "config.json").write_text(content)
        with pytest.raises(ValueError, match=name):
            zoo.load_model(tmp_path / name)
    (tmp_path / "unknown" / "config.json").write_text('{"modality": "txt"}')
    with pytest.raises(ValueError, match="'text'"):
        zoo.load_model(tmp_path / "unknown")
    os.unlink(tmp_path / "dna" / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        zoo.load_model(tmp_path / "dna")
