"""The store of finished cells: what a stopped run leaves, what a damaged file says, and that a cell costs what it weighs."""

from __future__ import annotations

import math

import pytest
import torch

from recipes.cells import CellStore, weights_hash
from zoo import create_model

KEY = {"evaluator": "bits", "model": "a model", "weights": "00", "settings": {"seed": 1}}


def filled(folder, count=3):
    store = CellStore(folder, KEY)
    for n in range(count):
        store.add(f"cell={n}", {"score": n / 3, "undefined": math.nan})
    return store


def test_cells_come_back_and_belong_to_their_settings(tmp_path):
    CellStore(tmp_path, KEY).add("cell", {"score": 0.1 + 0.2})
    store = CellStore(tmp_path, KEY)
    assert store.finished == {"cell": {"score": 0.1 + 0.2}}
    assert CellStore(tmp_path, KEY | {"settings": {"seed": 2}}).finished == {}
    store.path.write_text(store.path.read_text().replace('"seed": 1', '"seed": 3'))
    with pytest.raises(ValueError, match=store.path.name):
        CellStore(tmp_path, KEY)
    assert [p.name for p in tmp_path.iterdir()] == [store.path.name]


def test_a_line_that_a_stopped_run_cut_off_is_measured_again(tmp_path):
    path = filled(tmp_path).path
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) - 20, whole.index(b"\n") + 5):
        path.write_bytes(whole[:kept])
        store = CellStore(tmp_path, KEY)
        left = whole[:kept].count(b"\n") - 1  # of the lines the first is the key
        assert list(store.finished) == [f"cell={n}" for n in range(left)]
        for n in range(left, 3):
            store.add(f"cell={n}", {"score": n / 3, "undefined": math.nan})
        assert path.read_bytes() == whole
    path.write_bytes(whole[:10])  # the key itself was cut off
    filled(tmp_path)
    assert path.read_bytes() == whole


def test_two_processes_lose_nothing_to_each_other(tmp_path):
    one, other = CellStore(tmp_path, KEY), CellStore(tmp_path, KEY)
    for n, store in enumerate((one, other, one, other)):
        store.add(f"cell={n}", {"score": n})
    assert CellStore(tmp_path, KEY).finished == {f"cell={n}": {"score": n} for n in range(4)}


def test_a_damaged_line_is_named(tmp_path):
    path = filled(tmp_path).path
    lines = path.read_text().splitlines()
    for number, line in ((1, '{"other": 1}'), (2, '{"cell": "cell=0"}'), (3, "{"), (3, "[]")):
        path.write_text("\n".join([*lines[: number - 1], line, *lines[number:]]) + "\n")
        with pytest.raises(ValueError, match=rf"{path.name} line {number}\b"):
            CellStore(tmp_path, KEY)


def test_a_cell_is_appended_and_those_before_are_not_written_again(tmp_path):
    store = filled(tmp_path, 1)
    before, inode = store.path.read_bytes(), store.path.stat().st_ino
    store.add("next", {"score": 1})
    after = store.path.read_bytes()
    assert after.startswith(before) and store.path.stat().st_ino == inode
    assert after.count(b"\n") == before.count(b"\n") + 1


def test_weights_hash_sees_every_bit():
    def model():
        torch.manual_seed(1)
        return create_model("text_ggd_tiny", num_layers=2, dim=32, num_heads=2, hidden_dim=48)

    changed = model()
    before = weights_hash(changed)
    assert weights_hash(model()) == before
    with torch.no_grad():
        changed.layers[1].attention.prior.theta_beta[0] += 1e-6
    assert weights_hash(changed) != before
