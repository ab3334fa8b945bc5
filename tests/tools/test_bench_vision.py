"""tools/bench_vision.py on images too small to mean anything: that it pairs, measures memory where there are tables, saves."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from tools import bench_vision as bench

QUICK = ["--model", "tiny", "--size", "16", "--memory-size", "32", "--seconds", "0.01"]


def invoke(*arguments: str):
    app = bench.typer.Typer()
    app.command()(bench.main)
    return CliRunner().invoke(app, [*QUICK, *arguments])


def test_the_command_saves_what_it_prints(tmp_path):
    out = tmp_path / "new" / "vision.json"
    done = invoke("--methods", "nope,goat,ggd2d", "--batch", "2", "--out", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads() and record["commit"]
    assert [(r["method"], r["what"]) for r in record["results"]] == [
        (method, what) for method in ("nope", "goat", "ggd2d") for what in ("forward", "fwd+bwd")
    ]
    for r in record["results"]:
        assert r["ratio"] > 0 and r["pairs"] >= 3 and r["batch"] == 2 and r["tokens"] == 4
        assert r["model"] == f"vision_{r['method']}_tiny_patch8"
    # Lanes need no table, so goat has no entry of its own.
    assert set(record["attention_extra_memory_mib"]) == {"nope", "ggd2d"}
    assert "ggd2d" in done.output


def test_all_methods_of_a_size_are_measured_by_default(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "measure", lambda name, method, *_: seen.append((name, method)) or [None, None])
    monkeypatch.setattr(bench, "extra_memory", lambda *_: {})
    monkeypatch.setattr(bench, "show", lambda *_: None)
    assert invoke().exit_code == 0
    assert seen[0] == ("vision_nope_tiny_patch8", "nope")
    assert [method for _, method in seen[1:]] == [m for m in bench.list_grid_positions() if m != "nope"]


@pytest.mark.skipif(bench.Meter("cpu").peak_bytes is None, reason="reads /proc")
def test_memory_sees_a_matrix(monkeypatch):
    """The same attention by the oracle, which makes the whole matrix, must show."""
    names = {"t5": "vision_t5_tiny_patch8"}
    ours = bench.extra_memory(names, 512, torch.float32)["t5"]
    attention = bench.prior_attention
    monkeypatch.setattr(bench, "prior_attention", lambda *a, **k: attention(*a, **k, kernel="reference"))
    whole = bench.extra_memory(names, 512, torch.float32)["t5"]
    assert whole > 3 * 4096**2 * 4 / 2**20 > 2 * ours


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--methods", "alibbi"], "did you mean 'alibi'"),
        (["--model", "tinny"], "did you mean 'tiny'"),
        (["--clock", "sun"], "--clock must be one of wall, cpu"),
        (["--dtype", "int8"], "--dtype must be one of float32"),
    ],
)
def test_bad_options_are_named(option, message):
    done = invoke(*option)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())
