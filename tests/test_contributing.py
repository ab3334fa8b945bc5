"""The worked examples of CONTRIBUTING.md, carried out on a copy of the project."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, command

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
# Command lines, in one process.
COMMANDS = """
import json, sys
from recipes import train
from recipes.cli import main
train.run = train.main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""
# Tests of a prior and of a kernel that take their names from the registries.
TESTS = ["tests/zoo/test_priors.py", "tests/zoo/test_attention.py", "tests/text/test_model.py"]

pytestmark = pytest.mark.slow


def section(title: str) -> list[tuple[str, str]]:
    """(language, content) of the code blocks under a heading."""
    (body,) = (
        part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(title)
    )
    return re.findall(r"```(\w+)\n(.*?)```", body, flags=re.DOTALL)


def test_every_example(tmp_path: Path) -> None:
    """A prior, a kernel, a prior from outside, an evaluator and a recipe."""
    for folder in ("zoo", "modalities", "recipes", "priorzoo", "tests", "docs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path)

    def run(*words: str) -> str:
        # PYTHONPATH puts the copy before the installed package.
        return command([sys.executable, *words], folder=tmp_path, PYTHONPATH=str(tmp_path))

    (_, hyperbola), (_, commands) = section("A prior from outside")
    blocks = section("Adding a prior") + section("Adding a kernel")
    sources = [source for kind, source in blocks if kind == "python"]
    for source in [*sources, hyperbola, section("Adding an evaluator")[0][1]]:
        (tmp_path / source.splitlines()[0].removeprefix("# ")).write_text(source)
    for kind, diff in blocks:
        if kind == "diff":
            subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    [(_, recipe)] = section("Adding a recipe")
    with open(tmp_path / "recipes" / "text.py", "a") as file:
        file.write("\n\n" + recipe.partition("\n")[2])

    chosen = ("-k", "gaussian or every_prior_has_a_row or blockwise", "-rA")
    passed = [
        line
        for line in run("-m", "pytest", "-n0", *TESTS, *chosen).splitlines()
        if line.startswith("PASSED")
    ]
    assert sum("blockwise" in line for line in passed) >= 30
    assert sum("blockwise" not in line for line in passed) >= 6
    # Nothing else names an evaluator: tests of the pages pass with one more.
    run("-m", "pytest", "-n0", "tests/test_docs.py", "-k", "evaluators")

    def with_settings(words: list[str], *pairs: str) -> list[str]:
        pairs = ("train.steps=2", "train.batch=2", "evaluate.every=0", *pairs)
        return [*words, *(word for pair in pairs for word in ("--set", pair))]

    train, evaluate, plot = (shlex.split(line)[1:] for line in commands.splitlines())
    options = ["--letters", "10", "--lengths", "64,128", "--samples", "2", "--out", "out"]
    during = 'evaluate.during={"repeat": {"every": 2, "lengths": [16], "samples": 1}}'
    lines = [
        with_settings(train, "data.facts_fraction=0", "data.copies_fraction=0"),
        [*evaluate, "--lengths", "128", "--samples", "1"],
        plot,
        ["evaluate", "text_ggd_tiny.facts", "text_rope_tiny.facts", "repeat", *options],
        with_settings(["train", "text.ggd_tiny", "--run-dir", "run"], during),
        ["train", "text.ggd_long_tiny", "--dry-run", "--json"],
    ]
    assert "256" in run("-c", COMMANDS, json.dumps(lines))
    written = ("results/passkey.csv", "hyperbola.prior.png", "out/repeat.png")
    assert all((tmp_path / name).exists() for name in written)
    with open(tmp_path / "out" / "repeat.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    assert '"repeat/accuracy@16"' in (tmp_path / "run" / "metrics.jsonl").read_text()
