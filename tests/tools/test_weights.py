"""tools/weights.py: the table names what exists, and the three commands ask for what it says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator

import pytest
import typer

from modalities.contract import find_modality
from recipes.registry import find_recipe
from tools import gpu, weights
from zoo.adapters import find_folder
from zoo.catalog import create_model, list_models
from zoo.pretrained import manifest


def test_table_names_existing_things() -> None:
    """The table names recipes models and evaluators that exist."""
    shipped = set()
    for group in weights.GROUPS.values():
        evaluators = find_modality(group.recipe.partition(".")[0]).evaluators
        assert set(group.columns) <= set(evaluators)
        assert group.against in ("", *group.methods)
        for table in group.tables:
            assert set(table.evaluators.split(",")) <= set(evaluators)
            assert set(table.methods) <= set(group.methods)
        for method in group.methods:
            name = group.weights.format(method)
            assert find_recipe(group.recipe.format(method)).model.name == name.partition(".")[0]
            shipped.add(name)
    assert set(list_models(pretrained=True)) <= shipped
    assert all(
        __import__(f"{step.split()[1]}.__main__")
        for _, step, _ in gpu.STEPS.values()
        if step.startswith("-m")
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[list[str]]:
    """The commands that run, with all folders below tmp_path."""
    commands: list[str] = []
    monkeypatch.setattr(weights, "execute", lambda *words: commands.append(" ".join(words)))
    for name in ("RUNS", "BENCHMARKS", "WEIGHTS", "RELEASE"):
        monkeypatch.setattr(weights, name, tmp_path / name.lower())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "manifest.json").write_text(json.dumps(manifest()))
    return commands


def test_weights_by_project_commands(asked: list[str], tmp_path) -> None:
    """Training and measuring are commands of the project."""
    weights.train("text", methods="goat,rope", jobs=1)
    words = f"text.goat_tiny text.rope_tiny --seeds 0,1,2 --out {tmp_path}/runs/text --jobs 1"
    assert asked == [f"train-seeds {words}"]
    run = tmp_path / "runs/vision/vision.goat_ssmax_tiny-s2"
    out = tmp_path / "benchmarks/vision_tiny"
    (run / "model").mkdir(parents=True)
    out.mkdir(parents=True)
    name = "vision_goat_ssmax_tiny_patch8.glyphs"
    (out / "resolution.csv").write_text(f"model,size,top1,top5\n{name},48,0.77777,\nother,48,0,0\n")
    weights.measure("vision", methods="goat_ssmax")
    weights.train("vision", methods="goat_ssmax")
    assert "vision.goat_ssmax_tiny --set data.source=glyphs --seeds" in asked.pop()
    assert asked[1:] == [f"evaluate {name} {run} resolution --sizes 48,72,96,144,192 --out {out}"]
    entry = json.loads((tmp_path / "weights/manifest.json").read_text())[name]
    assert entry["measured"] == [{"size": 48, "top1": 0.7778}]
    card = (tmp_path / f"weights/{name}.md").read_text()
    assert "0.7778" in card
    assert f"priorzoo evaluate {name} resolution --sizes 48" in card
    with pytest.raises(typer.BadParameter, match="methods roper: expected some of"):
        weights.measure("text", methods="roper")


def test_published_weights_have_entry(asked, tmp_path) -> None:
    """Published weights have an entry like those that ship."""
    name = "text_alibi_tiny.facts"
    run = tmp_path / "runs/text/text.alibi_tiny-s0"
    create_model(name).save_pretrained(run / "model")
    (run / "recipe.json").write_text(json.dumps(dataclasses.asdict(find_recipe("text.alibi_tiny"))))
    (run / "environment.json").write_text('{"commit": "abc"}')
    weights.publish("text", methods="alibi")
    entry = json.loads((tmp_path / "weights/manifest.json").read_text())[name]
    shipped = manifest()[name]
    assert set(entry) == set(shipped) - {"measured"}
    assert entry["commit"] == "abc"
    equal = {key for key in entry if entry[key] == shipped[key]}
    assert equal >= {"sha256", "bytes", "steps", "position", "tokens", "data"}
    assert (tmp_path / f"weights/{name}.safetensors").stat().st_size == entry["bytes"]


def test_cards_have_recipe_data() -> None:
    """Commands read it from the card, so that naming an image needs no recipe."""
    for name, entry in manifest().items():
        section = weights.data_section(entry["recipe"])
        assert entry["data_section"] == json.loads(json.dumps(section)), name


def test_adapter_enters_package(asked, tmp_path) -> None:
    """An adapter goes into the package with its scores."""
    made = tmp_path / "made"
    rows = [{"length": 64, "bits_per_byte": 1.23456, "seconds": 2.0}]
    rows.append({"length": 128, "tokens_right_beyond": 0.5, "bits_per_byte": 1.5})
    shutil.copytree(find_folder("smollm2.soft"), made)
    (tmp_path / "recall.json").write_text(json.dumps({"rows": rows}))
    weights.adapter("smollm2.mine", made, tmp_path / "recall.json")
    record = json.loads((tmp_path / "weights/smollm2.mine/adapter.json").read_text())
    assert record["measured"][0] == {"length": 64, "bits_per_byte": 1.2346}
    assert record["base"]["name"] == "smollm2"
    card = (tmp_path / "weights/smollm2.mine/README.md").read_text()
    assert "| 64 | 1.2346 | – |" in card
    assert "| 128 | 1.5 | 0.5 |" in card
