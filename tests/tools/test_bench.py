"""tools/bench.py at sizes too small to mean anything: it checks, measures, records, and says what
is missing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from tools import bench
from tools.benches import attention
from tools.benches.timing import Record, Refused

CPU = torch.device("cpu")


def test_exception_costs_one_contender(tmp_path: Path) -> None:
    """Rows are saved and an exception is one contenders."""

    def refuse() -> None:
        raise Refused("too wide")

    rows = Record(argparse.Namespace(out=tmp_path / "r.json", seconds=0.0), CPU)
    calls = {
        "slow": lambda: sum(range(10**5)),
        "fast": int,
        "wide": refuse,
        "broken": lambda: {}["x"],
    }
    rows.compare("S", "forward", calls, ["slow", "fast"], tokens=10)
    stored = json.loads((tmp_path / "r.json").read_text())
    assert {row["name"]: row["baseline"] for row in stored["rows"]} == {
        "slow": "fast",
        "fast": "fast",
    }
    assert stored["rows"][0]["ratio"] > 1
    assert stored["missing"] == {"wide at S, forward": "too wide"}
    assert stored["failed"] == {"broken at S, forward": "KeyError: 'x'"}
    assert rows.finish() == 1


def test_contenders_are_compared_with_float64() -> None:
    problem = attention.Problem(1, 2, 70, 32, torch.float32, CPU)
    run = attention.ours(problem, "goat")
    assert attention.error_of(run, problem) < 1e-5
    wrong = attention.Run(
        lambda: run.forward() * (torch.arange(70) < 69)[:, None], run.leaves, run.method
    )
    assert attention.error_of(wrong, problem) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("attention --lengths 64 --without Flex,cable", {"sdpa", "ours: ggd", "ggd as dense bias"}),
        (
            "training --models text_rope_tiny --lengths 16 --tokens 32",
            {"text_rope_tiny", "transformers Llama"},
        ),
        ("decoding --lengths 64", {"transformers Llama", "text_alibi_tiny.facts"}),
    ],
)
def test_benchmarks_record_output(command: str, names: set[str], tmp_path: Path, capsys) -> None:
    """Each benchmark records what it prints."""
    out = tmp_path / "rows.json"
    assert (
        bench.main([*command.split(), "--device", "cpu", "--seconds", "0", "--out", str(out)]) == 0
    )
    stored = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert names <= {row["name"] for row in stored["rows"]}
    assert all(name in printed for name in names)
    assert not stored["failed"]
