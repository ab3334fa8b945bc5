"""tools/bench_attention.py at lengths too short to mean anything: that it measures, judges and saves."""

from __future__ import annotations

import json
import time

import torch
from typer.testing import CliRunner

from tools import bench_attention as bench


def test_a_ratio_is_measured_for_both_passes():
    results = bench.measure(bench.Shape(1, 2, 64, 16), "ggd+ssmax", torch.float32, 0.01, time.perf_counter)
    assert [r.what for r in results] == ["forward", "fwd+bwd"]
    assert all(r.ratio > 0 and r.pairs >= 3 and r.kernel == "toeplitz" and r.target is None for r in results)


def test_targets_are_those_of_long_sequences():
    assert bench.target_of(bench.Shape(1, 2, 8192, 64), "ggd", "forward") == 1.35
    assert bench.target_of(bench.Shape(1, 2, 4096, 64), "ggd", "fwd+bwd") == 2.0
    assert bench.target_of(bench.Shape(32, 4, 128, 32), "goat", "forward") is None


def test_the_command_saves_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TRAINING", bench.Shape(1, 2, 32, 16))
    monkeypatch.setattr(bench, "QUICK_LENGTHS", "48")
    out = tmp_path / "bench.json"
    app = bench.typer.Typer()
    app.command()(bench.main)
    done = CliRunner().invoke(app, ["--quick", "--seconds", "0.01", "--out", str(out)])
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["torch"] == torch.__version__ and len(record["results"]) == 10
    assert CliRunner().invoke(app, ["--clock", "sun"]).exit_code == 2
