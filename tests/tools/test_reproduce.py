"""`tools/reproduce.py`: every item can be listed, is judged by its rows, and the page holds what is stored."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from recipes.registry import find_recipe, list_recipes
from tools import reproduce
from tools.papers import ITEMS, at
from tools.papers.goat import FIRST, PREVIOUS, mixture

import torch  # isort: skip


def test_items_have_names_of_tables_and_figures_and_commands_that_exist() -> None:
    recipes = set(list_recipes())
    for key, item in ITEMS.items():
        assert key == item.key and key.partition(".")[0] in ("goat", "bam", "cable")
        assert item.title and item.published and item.paper
        for command in item.paper:
            words = command.split()
            for word, name in pairwise(words):
                if word == "recipes/train.py":
                    assert name in recipes and find_recipe(name).name == name
    assert {f"bam.table{n}" for n in (1, 2, 3, 4, 6, 7, 8)} <= set(ITEMS)


def test_the_page_is_what_is_stored() -> None:
    """`python tools/reproduce.py --docs` writes it."""
    assert reproduce.overview() in reproduce.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", [key for key, item in ITEMS.items() if item.run is not None])
def test_stored_rows_are_judged(key: str) -> None:
    found = reproduce.stored(ITEMS[key])
    if found is None:
        pytest.skip("has not been run")
    state, sentence = reproduce.verdict(ITEMS[key])
    assert state in ("holds", "confirmed small", "not confirmed", "open") and sentence and "nan" not in sentence
    assert found["rows"] and json.loads(json.dumps(found)) == found


def test_a_run_is_stored_and_kept(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(reproduce, "STORED", tmp_path)
    calls = []
    item = reproduce.Item(
        "bam.table1",
        "x",
        "y",
        ("z",),
        lambda out: calls.append(out) or [{"a": 1}],
        lambda rows: (True, f"a is {rows[0]['a']}"),
    )
    monkeypatch.setitem(ITEMS, "bam.table1", item)
    for _ in range(2):
        reproduce.main(["bam.table1"], paper_size=False, again=False, docs=False, out=tmp_path / "out")
    assert calls == [tmp_path / "out" / "bam.table1"] and reproduce.verdict(item) == ("confirmed small", "a is 1")
    assert "confirmed small" in capsys.readouterr().out
    reproduce.main(["bam.table1"], paper_size=True, again=False, docs=False, out=tmp_path)
    assert capsys.readouterr().out.splitlines() == ["# bam.table1: x", "z"]
    with pytest.raises(ValueError, match=r"no item 'bam\.tabel1'; did you mean 'bam\.table1'"):
        reproduce.select(["bam.tabel1"])


def test_targets_of_the_copy_mixture_are_what_they_are_said_to_be() -> None:
    tokens, targets = mixture(4000, torch.Generator().manual_seed(0))
    first, previous = (
        (targets[:, 5:] == tokens[:, :1]).double().mean(),
        (targets[:, 5:] == tokens[:, 4:-1]).double().mean(),
    )
    assert first == pytest.approx(FIRST + (1 - FIRST) / 64, abs=0.01)
    assert previous == pytest.approx(PREVIOUS + (1 - PREVIOUS) / 64, abs=0.01)


def test_scores_are_found_by_method_and_place() -> None:
    rows = [{"method": "goat", "length": 8, "x": 0.5}, {"method": "goat", "length": 16, "x": None}]
    assert at(rows, "goat", "x", length=8) == 0.5
    assert math.isnan(at(rows, "goat", "x", length=16)) and math.isnan(at(rows, "rope", "x", length=8))
