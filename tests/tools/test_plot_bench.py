"""tools/plot_bench.py: a PNG of the committed benchmark and of a record with several widths, passes and contenders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from tools import plot_bench

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "cpu" / "attention.json"
PNG = b"\x89PNG"


def invoke(*arguments: str):
    app = plot_bench.typer.Typer()
    app.command()(plot_bench.main)
    return CliRunner().invoke(app, list(arguments))


def record(lengths=(1024, 8192)) -> dict:
    rows = [
        {
            "shape": {"batch": 1, "heads": 2, "length": length, "width": width, "queries": 0},
            "method": method, "kernel": kernel, "what": what, "ratio": ratio, "tflops": 100 / ratio, "extra_mib": None,
        }
        for width in (64, 128)
        for what in ("forward", "fwd+bwd", "decode")
        for length in lengths
        for method, kernel, ratio in (("none", "sdpa flash", 1.0), ("ggd", "triton", 1.2), ("ggd", "flex table", 9.0))
    ]  # fmt: skip
    return {
        "results": rows,
        "device": "a GPU",
        "dtype": "bfloat16",
        "torch": "2",
        "threads": 1,
        "baseline": "sdpa flash",
    }


def test_the_committed_benchmark_is_drawn(tmp_path):
    out = tmp_path / "new" / "attention.png"
    done = invoke(str(COMMITTED), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert out.read_bytes().startswith(PNG)


@pytest.mark.parametrize("show", ["ratio", "tflops"])
def test_panels_are_widths_by_passes(tmp_path, monkeypatch, show):
    seen = []
    monkeypatch.setattr(plot_bench, "save_figure", lambda figure, path: seen.append((figure, path)))
    source = tmp_path / "attention.json"
    source.write_text(json.dumps(record()))
    assert invoke(str(source), "--show", show).exit_code == 0
    figure, path = seen[0]
    assert path.name == {"ratio": "attention.png", "tflops": "attention_tflops.png"}[show]
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[:2] == ["forward, D = 64", "forward and backward, D = 64"] and len(titles) == 6
    names = {line.get_label() for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}
    # The baseline is the line at 1 of a ratio, and a curve of its own as a rate.
    assert names == {"ggd, triton", "ggd, flex table"} | ({"sdpa flash"} if show == "tflops" else set())


def test_ours_are_told_from_peers():
    for key in (
        ("ggd", "triton skipping"),
        ("goat", "flash"),
        ("goat", "sdpa"),
        ("ggd", "toeplitz"),
        ("ggd", "triton paged"),
    ):
        assert plot_bench.is_ours(*key), key
    for key in (("none", "sdpa"), ("ggd", "sdpa dense bias"), ("ggd", "flex law"), ("alibi", "flash-attn"),
                ("goat", "goat-attention"), ("cable", "fla forgetting")):  # fmt: skip
        assert not plot_bench.is_ours(*key), key


def test_what_cannot_be_drawn_is_refused(tmp_path):
    source = tmp_path / "attention.json"
    source.write_text(json.dumps(record(lengths=(1024,))))
    for arguments, message in (
        ((str(source),), "nothing to draw"),
        ((str(source), "--show", "speed"), "--show must be one of ratio, tflops, memory"),
        ((str(tmp_path / "none.json"),), "No such file"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split()), done.output
