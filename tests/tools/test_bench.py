"""tools/bench.py at sizes too small to mean anything: it checks, measures, records, and says what is missing."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch

from tools import bench
from tools.benches import attention
from tools.benches.timing import Record, Refused, Rounds

CPU = torch.device("cpu")
MODELS = "text_rope_tiny,text_ggd_ssmax_tiny"


def record(out: Path | None = None, minutes: float = math.inf) -> Record:
    return Record(argparse.Namespace(commit="abc", out=out, seconds=0.0, minutes=minutes), CPU)


def test_rows_are_saved_and_an_exception_is_one_contenders(tmp_path: Path) -> None:
    def refuse() -> None:
        raise Refused("too wide")

    rounds = Rounds([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 9.0}])
    assert rounds.ratio("b", "a") == 2.0 and rounds.ms("b") == 4.0  # medians over rounds
    rows = record(tmp_path / "new" / "r.json")
    calls = {"slow": lambda: sum(range(10**5)), "fast": int, "wide": refuse, "broken": lambda: {}["x"]}
    rows.compare("S", "forward", calls, ["slow", "fast"], tokens=10)
    stored = json.loads(rows.out.read_text())
    assert {row["name"]: row["baseline"] for row in stored["rows"]} == {"slow": "fast", "fast": "fast"}
    assert stored["commit"] == "abc" and stored["rows"][0]["ratio"] > 1 and stored["rows"][0]["tokens_per_s"] > 0
    assert stored["missing"] == {"wide at S, forward": "too wide"}
    assert stored["failed"] == {"broken at S, forward": "KeyError: 'x'"} and rows.finish() == 1
    late = record(minutes=0.0)  # no shape begins after the time is up
    late.compare("S", "forward", {"a": int}, ["a"])
    assert not late.rows and late.missing == {"S, forward": "no time left"}


@pytest.mark.parametrize("name", [None, "sdpa", "ggd as dense bias", "ours: goat", "ours: cable"])
def test_contenders_are_compared_with_float64(name: str | None) -> None:
    problem = attention.Problem(1, 2, 70, 32, torch.float32, CPU)
    make = attention.contenders(CPU, ["goat", "cable"])[0].get(name, attention.plain)
    run = make(problem)
    assert attention.error_of(run, problem) < 1e-5
    wrong = attention.Run(lambda: run.forward() * (torch.arange(70) < 69)[:, None], run.leaves, run.method)
    assert attention.error_of(wrong, problem) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("attention --lengths 64 --without Flex,cable", {"sdpa", "ours: ggd", "ggd as dense bias"}),
        (f"training --models {MODELS} --lengths 16 --tokens 32", {*MODELS.split(","), "transformers Llama"}),
        ("decoding --lengths 64", {"transformers Llama", "text_alibi_tiny.facts"}),
        ("images --size 48 --batch 1 --methods nope,goat", {"timm", "nope", "goat"}),
    ],
)
def test_each_benchmark_records_what_it_prints(command: str, names: set[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "rows.json"
    assert bench.main([*command.split(), "--device", "cpu", "--seconds", "0", "--out", str(out)]) == 0
    stored, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert names <= {row["name"] for row in stored["rows"]} and all(name in printed for name in names)
    assert all(row["ms"] > 0 and row["ratio"] > 0 and row["rounds"] >= 3 for row in stored["rows"])
    assert stored["torch"] == torch.__version__ and not stored["failed"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("atention", "expected one of attention"),
        ("attention --lengths 1k", "invalid numbers value: '1k'"),
        ("images --methods roper", "no model vision_roper_tiny_patch8"),
    ],
)
def test_wrong_options_are_named(command: str, message: str, capsys) -> None:
    try:
        assert bench.main(command.split()) == 2
        text = ""
    except SystemExit as error:
        text = str(error.code)
    assert message in text + capsys.readouterr().err
