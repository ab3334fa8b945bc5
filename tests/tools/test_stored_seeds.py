"""`train_zoo.py measure` without the runs of further seeds: their stored results stay, or nothing is overwritten."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import typer

from recipes.targets import find_evaluators
from tools import train_zoo
from tools.train_zoo import FAMILIES

CELLS = {"a": {"length": 64, "depth": 0.0, "trials": 1, "teacher_forced": 1, "free_generation": 1}}


def model(evaluator, label, method, value, group="", weights="w0"):
    """An entry of a results file with what figures need: two rows, every number in them `value`."""
    numbers = {name: value for name in (*evaluator.headline, "nll", "accuracy") if name not in evaluator.exceptions}
    numbers |= {"position_to": [32, 64], "position_nll": [value] * 2, "position_bits": [value] * 2}
    rows = [{evaluator.axis: place} | numbers for place in (64, 128)]
    entry = {"label": label, evaluator.trained: 64, "rows": rows, "cells": CELLS, "method": method}
    return entry | {"weights": weights, "seconds": 1.0, "group": group, "source": "here"}


def content(evaluator, models):
    settings = json.loads(json.dumps(dataclasses.asdict(evaluator.settings())))
    return {"evaluator": evaluator.name, "settings": settings, "models": models}


class Fake:
    """A family of two methods, the second with one seed; `evaluate.py` writes `fresh[evaluator]`."""

    def __init__(self, modality, folder, monkeypatch):
        methods = {"text": ("goat", "rope"), "dna": ("goat", "rope"), "vision": ("goat_ssmax", "nope_ssmax")}[modality]
        evaluators = FAMILIES[modality].evaluators
        self.kind = dataclasses.replace(
            FAMILIES[modality], methods=methods, seeds=(0, 1, 2), calls=(((), ",".join(evaluators), ()),)
        )
        self.folder, self.asked, self.fresh = folder / "benchmarks", [], {}
        (folder / "weights").mkdir()
        names = [self.kind.weights(method) for method in methods]
        (folder / "weights" / "manifest.json").write_text(json.dumps({name: {} for name in names}))
        monkeypatch.setattr(train_zoo, "WEIGHTS", folder / "weights")
        monkeypatch.setattr(train_zoo, "RUNS", folder / "runs")
        monkeypatch.setattr(train_zoo.Family, "measured", self.folder)
        monkeypatch.setitem(FAMILIES, modality, self.kind)
        monkeypatch.setattr(train_zoo.subprocess, "run", self.evaluate)
        self.folder.mkdir()
        for name in evaluators:
            evaluator = find_evaluators(name, modality)[0]
            shipped = [model(evaluator, n, m, 0.5) for n, m in zip(names, methods, strict=True)]
            self.fresh[name] = content(evaluator, shipped)
            stored = copy.deepcopy(shipped)
            stored[0]["group"] = names[0]
            stored += [
                model(evaluator, self.kind.label(methods[0], seed), methods[0], 0.5 + 0.1 * seed, names[0], f"w{seed}")
                for seed in (1, 2)
            ]
            (self.folder / f"{name}.json").write_text(json.dumps(content(evaluator, stored)))

    def evaluate(self, command, *, check):
        self.asked, out = command, Path(command[command.index("--out") + 1])
        assert check and out != self.folder and (out / "cells").resolve() == (self.folder / "cells").resolve()
        for name, fresh in self.fresh.items():
            (out / f"{name}.json").write_text(json.dumps(fresh))

    def files(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}

    def stored(self, name):
        return json.loads((self.folder / f"{name}.json").read_text())["models"]


@pytest.mark.parametrize("modality", ["text", "vision", "dna"])
def test_seeds_without_a_run_are_kept(modality, tmp_path, monkeypatch, capsys):
    fake = Fake(modality, tmp_path, monkeypatch)
    first, second = (fake.kind.weights(method) for method in fake.kind.methods)
    further = [fake.kind.label(fake.kind.methods[0], seed) for seed in (1, 2)]
    for fresh in fake.fresh.values():  # measured again, a number comes out a little different
        fresh["models"][0]["rows"][1][next(iter(fake.kind.evaluators[fresh["evaluator"]]))] = 0.25
    train_zoo.measure(modality)
    for name, columns in fake.kind.evaluators.items():
        models = {entry["label"]: entry for entry in fake.stored(name)}
        assert list(models) == [first, second, *further]
        assert [models[label]["group"] for label in models] == [first, "", first, first]
        assert models[first]["rows"][1][columns[0]] == 0.25 and models[further[1]]["rows"][1][columns[0]] == 0.7
        assert models[further[0]]["weights"] == "w1" and models[further[0]]["cells"] == CELLS
        rows = (fake.folder / f"{name}.csv").read_text().splitlines()
        assert len(rows) == 9 and sum(row.startswith(further[0]) for row in rows) == 2
        assert (fake.folder / f"{name}.png").stat().st_size > 1000
    assert (fake.folder / "overview.png").exists() == (modality == "text")
    assert not list(fake.folder.glob(".measuring*"))
    said = " ".join(capsys.readouterr().out.split())
    name, goat = next(iter(fake.kind.evaluators)), fake.kind.methods[0]
    assert f"{name}, seed 0, measured: {', '.join(fake.kind.methods)}" in said
    assert f"{name}, seed 2, kept from the stored results (no run here): {goat}" in said
    assert f"differs from the stored results by at most {fake.kind.evaluators[name][0]} 0.25" in said
    assert "(3 seeds)" in said
    table = json.loads((tmp_path / "weights" / "manifest.json").read_text())[first]["measured"]
    assert table[1][fake.kind.evaluators[name][0]] == 0.25  # cards are of the shipped seed


def test_a_finished_run_is_measured_and_replaces_its_stored_results(tmp_path, monkeypatch, capsys):
    fake = Fake("dna", tmp_path, monkeypatch)
    for seed, finished in ((1, True), (2, False)):
        folder = fake.kind.run("goat", seed) / "model"
        folder.mkdir(parents=True)
        if finished:
            (folder / "config.json").write_text("{}")
    evaluator, fresh = find_evaluators("bits", "dna")[0], fake.fresh["bits"]["models"]
    fresh[0]["group"] = fresh[0]["label"]
    fresh.append(model(evaluator, fake.kind.label("goat", 1), "goat", 0.9, fresh[0]["label"], "new"))
    train_zoo.measure("dna")
    assert str(fake.kind.run("goat", 1)) in fake.asked and str(fake.kind.run("goat", 2)) not in fake.asked
    assert [entry["weights"] for entry in fake.stored("bits")] == ["w0", "w0", "new", "w2"]
    said = capsys.readouterr().out
    assert "bits, seed 1, measured: goat" in said and "bits, seed 2, kept" in said and "seed 1, kept" not in said


@pytest.mark.parametrize("other", ["weights", "source", "cells", "settings"])
def test_what_was_measured_otherwise_is_not_overwritten(other, tmp_path, monkeypatch, capsys):
    fake = Fake("vision", tmp_path, monkeypatch)
    fresh = fake.fresh["resolution"]
    if other == "settings":
        fresh["settings"]["mode"] = "resized"
    else:
        fresh["models"][0][other] = {"b": {"x": 1}} if other == "cells" else "another"
    before = fake.files()
    with pytest.raises(typer.Exit) as left:
        train_zoo.measure("vision")
    said = capsys.readouterr().out
    assert left.value.exit_code == 1 and fake.files() == before
    assert "2 models of further seeds" in said and "--seeds 1,2" in said and "--force" in said
    assert ("mode was 'native' and is 'resized'" if other == "settings" else other) in said
    train_zoo.measure("vision", force=True)
    assert len(fake.stored("resolution")) == 2 and "--force leaves out 2" in capsys.readouterr().out


def test_an_evaluation_that_fails_leaves_the_stored_results(tmp_path, monkeypatch):
    fake = Fake("vision", tmp_path, monkeypatch)
    before = fake.files()

    def fail(command, *, check):
        raise train_zoo.subprocess.CalledProcessError(2, command)

    monkeypatch.setattr(train_zoo.subprocess, "run", fail)
    with pytest.raises(train_zoo.subprocess.CalledProcessError):
        train_zoo.measure("vision")
    assert fake.files() == before and not list(fake.folder.glob(".measuring*"))


def test_labels_are_those_of_the_shipped_results():
    """What is looked for in the files is what recipes/evaluate.py writes there."""
    for family, name in (("vision", "resolution"), ("dna", "bits")):
        kind = FAMILIES[family]
        labels = [entry["label"] for entry in json.loads((kind.measured / f"{name}.json").read_text())["models"]]
        known = [kind.label(method, seed) for seed in kind.seeds for method in kind.methods]
        assert {label for label in labels if "(" in label} <= set(known[len(kind.methods) :])
        assert set(known[: len(kind.methods)]) <= set(labels) and any("(" in label for label in labels)
