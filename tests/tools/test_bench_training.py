"""tools/bench_training.py on the smallest model and contexts: both engines, operations counted right, nothing hidden."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from tools import bench_training as bench
from zoo import create_model


def invoke(*arguments: str):
    app = bench.typer.Typer()
    app.command()(bench.main)
    return CliRunner().invoke(app, ["--seconds", "0.01", "--tokens", "32", *arguments])


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_the_command_saves_what_it_prints(tmp_path, engine):
    out = tmp_path / "training.json"
    methods = "rope,ggd_ssmax"
    done = invoke(
        "--engine", engine, "--methods", methods, "--contexts", "16,8", "--datasheet-tflops", "2", "--out", str(out)
    )
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["engine"] == {"torch": "plain torch", "deepspeed": "DeepSpeed ZeRO-0"}[engine]
    assert record["model"] == "tiny" and record["device"] == "cpu" and "says nothing about a GPU" in record["notes"][0]
    found = [(r["context"], r["batch"], r["method"]) for r in record["results"]]
    assert found == [(c, 32 // c, m) for c in (8, 16) for m in methods.split(",")]
    for row in record["results"]:
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"]) and row["rounds"] >= 3
        assert row["mfu"] == pytest.approx(
            row["tokens_per_s"] * row["flops_per_token"] / 1e12 / record["matmul_tflops"]
        )
        assert row["datasheet_mfu"] == pytest.approx(row["tflops"] / 2)
    assert record["results"][0]["speed_ratio"] == 1.0


def test_operations_are_those_torch_counts():
    """All matrix products of a forward pass as torch sees them, three times, with attention's cut to the visible pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    context, model = 32, create_model("text_rope_tiny")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, context, dtype=torch.long), kernel="reference")
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op))  # the oracle's products; layers are no batches
    assert attention > 0
    visible = attention * (context + 1) / (2 * context)
    expected = 3 * (counter.get_total_flops() - attention + visible) / context
    assert bench.flops_per_token(model, context) == pytest.approx(expected, rel=1e-6)


def test_a_method_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    def build(name, *rest):
        if "goat" in name:
            raise RuntimeError("no room")
        return made(name, *rest)

    made = bench.build
    monkeypatch.setattr(bench, "build", build)
    rows, failed = bench.measure(
        {"rope": "text_rope_tiny", "goat": "text_goat_tiny"}, 8, 2, torch.device("cpu"), None,
        seconds=0.01, compiled=False, report=lambda line: None,
    )  # fmt: skip
    assert [r["method"] for r in rows] == ["rope"] and failed == {"goat": "RuntimeError: no room"}


def test_without_deepspeed_the_record_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "training.json"
    done = invoke("--methods", "rope", "--contexts", "8", "--out", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["engine"] == "plain torch" and any("deepspeed is not installed" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--model", "tinny"), "did you mean 'tiny'"),
        (("--methods", "roper"), "did you mean 'rope'"),
        (("--engine", "jax"), "--engine must be auto, deepspeed or torch"),
        (("--contexts", "long"), "expected at least one of each"),
    ],
)
def test_bad_options_are_named(option, message):
    done = invoke(*option)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())
