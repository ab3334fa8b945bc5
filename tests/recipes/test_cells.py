"""The store of finished cells: what a stopped run leaves, what a damaged file says, and that a cell costs what it weighs."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import random
import resource
import signal

import pytest
import torch
from torch import nn

import zoo
from recipes.evaluate import CellStore, outside_hash, weights_hash

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


def test_a_line_that_a_stopped_run_cut_off_is_measured_again(tmp_path):
    path = filled(tmp_path).path
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 20, whole.index(b"\n") + 5, 10):  # the last cuts the key itself
        path.write_bytes(whole[:size])
        left = max(whole[:size].count(b"\n") - 1, 0)
        assert list(CellStore(tmp_path, KEY).finished) == [f"cell={n}" for n in range(left)]
        filled(tmp_path)
        assert path.read_bytes() == whole


def test_processes_share_a_file_and_lose_nothing(tmp_path):
    """Five append the same cells in orders of their own, and two of them are killed meanwhile."""

    def append(seed):
        store = CellStore(tmp_path, KEY)
        for n in random.Random(seed).sample(range(300), 300):
            store.add(f"cell={n}", {"score": n / 3, "of": [n] * 200})

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=append, args=(seed,)) for seed in range(5)]
    for process in processes:
        process.start()
    path = CellStore(tmp_path, KEY).path
    for process, lines in zip(processes[:2], (40, 120), strict=True):
        while not path.exists() or path.read_bytes().count(b"\n") < lines:
            pass
        process.kill()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes[2:]] == [0, 0, 0]
    names = [json.loads(line).get("cell") for line in path.read_text().splitlines()]
    assert names[0] is None and sorted(names[1:]) == sorted(f"cell={n}" for n in range(300))
    assert CellStore(tmp_path, KEY).damaged == [] and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    store = filled(tmp_path)
    before = store.path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond the limit fails with EFBIG, after half of it
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limit[1]))
        with pytest.raises(OSError):
            store.add("next", {"score": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.path.read_bytes() == before and "next" not in store.finished
    store.add("next", {"score": 1})
    assert list(CellStore(tmp_path, KEY).finished) == ["cell=0", "cell=1", "cell=2", "next"]


@pytest.mark.parametrize("line", ["{", "[]", '{"cell": "cell=1"}', '{"cell": "cell=1", "va', "\x00\x00", ""])
def test_a_damaged_line_costs_its_cell_alone(tmp_path, line):
    path = filled(tmp_path).path
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    store = CellStore(tmp_path, KEY)
    assert list(store.finished) == ["cell=0", "cell=2"] and store.damaged == [3]
    store.add("cell=1", {"score": 1 / 3})
    again = CellStore(tmp_path, KEY)
    assert sorted(again.finished) == ["cell=0", "cell=1", "cell=2"] and again.damaged == [3]
    path.write_text("\n".join([line, *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=rf"{path.name} line 1\b"):
        CellStore(tmp_path, KEY)


def test_weights_hash_sees_every_bit():
    model = nn.Linear(3, 2)
    before = weights_hash(model)
    assert weights_hash(copy.deepcopy(model)) == before
    with torch.no_grad():
        model.bias[0] += 1e-6
    assert weights_hash(model) != before


def test_models_of_others_are_keyed_by_all_that_they_compute_by():
    """Another rotary base changes buffers that are not saved, another epsilon nothing but the configuration."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)

    def hashes(theta: float = 1e4, **options):
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": theta}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope, **options))
        return weights_hash(model), outside_hash(model)

    assert hashes() == hashes()
    for other in (hashes(3.0), hashes(rms_norm_eps=0.5), hashes(sliding_window=4)):
        assert other[0] == hashes()[0] and other[1] != hashes()[1]
    assert outside_hash(zoo.create_model("vision_goat_tiny_patch8")) is None
