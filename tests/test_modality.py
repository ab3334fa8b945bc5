"""Modalities: one in a folder of its own trains, resumes and is measured; how they are found; what
saved models name."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

import zoo
from modalities.contract import Modality, find_modality, modality_names
from modalities.text import MODALITY as TEXT
from modalities.text import CausalLM
from recipes.run_folder import RunFolder
from tests.launching import ROOT, command
from tests.refusals import refuses
from zoo import catalog, plugins

SMALL = dict(dim=16, num_layers=1, num_heads=2, hidden_dim=16)
NAMES = ("text_ggd_tiny", "dna_ggd_tiny", "vision_alibi_tiny_patch8")
# Two runs of 8 steps, one of them resumed after 4, with an evaluator on the way; then the command
# that evaluates.
COMMANDS = """
import json, sys
from recipes import evaluate, train
for name, *words in json.loads(sys.argv[1]):
    assert {"train": train, "evaluate": evaluate}[name].main(words) == 0, words
"""


def test_contributing_shows_the_toy():
    """Contributing shows the toy word for word."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    [shown] = re.findall(r"```python\n# toy/__init__\.py\n(.*?)```", page, flags=re.DOTALL)
    source = (ROOT / "tests" / "toy_modality" / "toy" / "__init__.py").read_text()
    assert "MODALITY = Modality(" in shown
    assert source.endswith(shown)


@pytest.mark.slow
def test_new_modality_trains(tmp_path):
    """The toy is installed as a package would be, by a folder that holds it and its entry point."""
    toy = shutil.copytree(ROOT / "tests" / "toy_modality", tmp_path / "site")
    during = 'evaluate.during={"copyrate": {"every": 4, "lengths": [16, 32]}}'
    common = [
        "--set",
        "optim.schedule=constant",
        "--set",
        during,
    ]  # whose rate does not depend on where a run ends
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    out = tmp_path / "out"
    lines = [
        [
            "train",
            "toy.tiny",
            "--run-dir",
            str(folder),
            *common,
            "--set",
            f"train.steps={steps}",
            "--resume",
            "auto",
        ]
        for folder, steps in ((whole, 8), (parts, 4), (parts, 8))
    ]
    options = ["--lengths", "16,32", "--repeats", "2", "--out", str(out)]
    lines.append(["evaluate", str(whole), str(whole / "model"), "copyrate", *options])
    command([sys.executable, "-c", COMMANDS, json.dumps(lines)], folder=ROOT, PYTHONPATH=str(toy))

    def records(folder):
        timed = ("seconds", "symbols_per_s")
        return [{k: v for k, v in r.items() if k not in timed} for r in RunFolder(folder).metrics()]

    metrics = records(whole)
    assert [r["step"] for r in metrics if "loss" in r] == list(range(1, 9))
    assert metrics == records(parts)
    assert [r["step"] for r in metrics if "copyrate/copied@16" in r] == [4, 8]
    files = [folder / "model" / "model.safetensors" for folder in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((whole / "model" / "config.json").read_text())["modality"] == "toy"
    with open(out / "copyrate.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "toy.tiny (whole)"]
    last = {f"copyrate/copied@{row['length']}": float(row["copied"]) for row in rows}
    assert last.items() <= metrics[-1].items()  # what was measured on the way, at the end
    assert (out / "copyrate.png").read_bytes().startswith(b"\x89PNG")


def test_modalities_are_found(tmp_path, monkeypatch):
    """Entry points of installed packages; what one lacks is said, and the others work."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, line in {
        "needy": "import no_such_package.part",
        "torn": "from torn.missing import MODALITY",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    values = dict(text="json:loads", zeta="json:loads", alpha="modalities.text:MODALITY")
    values |= dict(needy="needy:MODALITY", torn="torn:MODALITY")
    installed = {name: EntryPoint(name, value, plugins.GROUP) for name, value in values.items()}
    monkeypatch.setattr(plugins, "_modalities", lambda: installed | plugins.shipped_modalities())
    plugins.load_modality.cache_clear()
    # those that ship win
    assert find_modality("text") is TEXT
    assert find_modality("alpha") is TEXT
    refuses(r"'zeta'.*Modality", find_modality, "zeta")
    refuses(r"'txt'.*'text'", find_modality, "txt")
    refuses(r"needy.*no_such_package", find_modality, "needy", error=ImportError)
    refuses(
        r"torn\.missing", find_modality, "torn", error=ModuleNotFoundError
    )  # its own fault, with its own traceback
    assert "text_ggd_tiny" in zoo.list_models("text_ggd_*")
    refuses("no_such_package", zoo.create_model, "needy_tiny")  # a name that it might have
    monkeypatch.undo()
    plugins.load_modality.cache_clear()


def test_every_modality_keeps_the_contract():
    for name in modality_names():
        modality = find_modality(name)
        assert isinstance(modality, Modality)
        assert modality.name == modality.model.modality == name
        assert all(
            kind.name == key and kind.summary and kind.version >= 1
            for key, kind in modality.evaluators.items()
        )


def test_saved_models_name_their_modality(tmp_path):
    for name in NAMES:
        options = {
            key: value for key, value in SMALL.items() if key in catalog.model_entry(name).config
        }
        model = zoo.create_model(name, **options)
        folder = tmp_path / name
        model.save_pretrained(folder / "model")
        again = zoo.load_model(folder)  # the folder of a run stands for the model in it
        assert type(again) is type(model)
        assert again.config == model.config
        assert all(
            torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
        )
        assert catalog.saved_modality(folder / "model") == name.partition("_")[0]
    dna = tmp_path / "dna_ggd_tiny" / "model"
    refuses(r"'dna'.*'text'", CausalLM.from_pretrained, dna)
    (dna / "model.safetensors").unlink()
    refuses(r"model\.safetensors", zoo.load_model, dna, error=FileNotFoundError)
    for content, message in (
        ('{"wings": 2}', "torn"),
        ("{", "torn"),
        ('{"modality": "txt"}', "'text'"),
    ):
        (tmp_path / "torn").mkdir(exist_ok=True)
        (tmp_path / "torn" / "config.json").write_text(content)
        refuses(message, zoo.load_model, tmp_path / "torn")
