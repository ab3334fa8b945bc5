"""tools/bench_dna_data.py on a few bases: that it parses anew, reads what it was asked for, and saves."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("Bio")

from tools import bench_dna_data as bench


def invoke(*arguments: str):
    app = bench.typer.Typer()
    app.command()(bench.main)
    return CliRunner().invoke(app, ["--seconds", "0", "--micro-batch", "2", *arguments])


def test_the_command_saves_what_it_prints(tmp_path):
    (tmp_path / "g.fa").write_text(">a\n" + "ACGTTgca" * 100 + "\n>b\n" + "CCGA" * 50 + "\n")
    out = tmp_path / "new" / "dna.json"
    done = invoke(
        "--source", str(tmp_path / "g.fa"), "--tokenizers", "bases,kmer:3", "--contexts", "8,16", "--clock", "cpu",
        "--out", str(out),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["torch"] == torch.__version__ and record["commit"] and record["clock"] == "cpu"
    assert record["parsed"]["bases"] == 1000 and record["parsed"]["seconds"] > 0
    assert [(r["tokenizer"], r["context"], r["window"], r["soft_mask_weight"]) for r in record["read"]] == [
        (name, context, context * width, weight)
        for name, width in (("bases", 1), ("kmer:3", 3))
        for context in (8, 16)
        for weight in (1.0, 0.1)
    ]
    assert all(r["batches"] >= 1 and r["bases_per_s"] > 0 for r in record["read"])
    assert "kmer:3" in done.output and "1,000 bases" in done.output


def test_the_rate_is_bases_over_time():
    ticks = iter(range(100))
    config = bench.DnaDataConfig(context=50)
    found = bench.read(config, 4, 10.0, lambda: float(next(ticks)))
    # The clock is read once before, after each batch, and at the end: 10 batches and 11 ticks.
    assert found.batches == 10 and found.bases_per_s == pytest.approx(10 * 4 * 50 / 11)


def test_the_processor_time_of_workers_counts(monkeypatch):
    ended = iter([3.0, 5.0])
    monkeypatch.setattr(bench, "processor_of_ended_children", lambda: next(ended))
    found = bench.read(bench.DnaDataConfig(context=50, num_workers=2), 4, 0.0, bench.time.process_time)
    assert found.batches == 1 and found.bases_per_s == pytest.approx(4 * 50 / 2.0 / 2)


def test_wrong_values_are_refused():
    for arguments, message in (
        (("--clock", "sun"), "must be one of wall, cpu"),
        (("--source", "yeast-chr1"), "did you mean 'yeast-chr01'"),
        (("--tokenizers", "base"), "did you mean 'bases'"),
        (("--contexts", "0"), "context 0 must be at least 1"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split()), done.output
