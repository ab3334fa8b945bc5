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
    (body,) = (part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(title))
    return re.findall(r"```(\w+)\n(.*?)```", body, flags=re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("zoo", "modalities", "recipes", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def write(project: Path, source: str) -> str:
    """Write a block into the file that its first line names; returns that path."""
    path = source.splitlines()[0].removeprefix("# ")
    (project / path).write_text(source)
    return path


def run(project: Path, *words: str) -> str:
    # PYTHONPATH puts the copy before the installed package.
    result = command([sys.executable, *words], folder=project, PYTHONPATH=str(project))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    return result.stdout


def test_a_prior_and_a_kernel(project: Path) -> None:
    blocks = section("Adding a prior") + section("Adding a kernel")
    files = [write(project, source) for kind, source in blocks if kind == "python"]
    for kind, diff in blocks:
        if kind == "diff":
            subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=project, check=True)
    run(project, "-m", "ruff", "check", *files)
    chosen = ("-k", "gaussian or every_prior_has_a_row or blockwise", "-rA")
    lines = run(project, "-m", "pytest", "-n0", *TESTS, *chosen).splitlines()
    passed = [line for line in lines if line.startswith("PASSED")]
    assert sum("blockwise" in line for line in passed) >= 30 and sum("blockwise" not in line for line in passed) >= 6
    code = "import zoo; print(zoo.create_model('vision_gaussian_tiny_patch8').config.position)"
    assert run(project, "-c", code).split()[-1] == "gaussian"


def test_a_prior_from_outside_an_evaluator_and_a_recipe(project: Path) -> None:
    (_, hyperbola), (_, commands) = section("A prior from outside")
    files = [write(project, source) for source in (hyperbola, section("Adding an evaluator")[0][1])]
    [(_, recipe)] = section("Adding a recipe")
    with open(project / "recipes" / "text.py", "a") as file:
        file.write("\n\n" + recipe.partition("\n")[2])
    run(project, "-m", "ruff", "check", *files, "recipes/text.py")

    def with_settings(words: list[str], *pairs: str) -> list[str]:
        pairs = ("train.steps=2", "train.batch=2", "evaluate.every=0", *pairs)
        return [*words, *(word for pair in pairs for word in ("--set", pair))]

    train, evaluate, plot = (shlex.split(line)[1:] for line in commands.splitlines())
    models = ["text_ggd_tiny.facts", "text_rope_tiny.facts"]
    options = ["--letters", "10", "--lengths", "64,128", "--samples", "2", "--out", "out"]
    during = 'evaluate.during={"repeat": {"every": 2, "lengths": [16], "samples": 1}}'
    lines = [
        with_settings(train, "data.facts_fraction=0", "data.copies_fraction=0"),
        [*evaluate, "--lengths", "128", "--samples", "1"],
        plot,
        ["evaluate", *models, "repeat", *options],
        with_settings(["train", "text.ggd_tiny", "--run-dir", "run"], during),
        ["train", "text.ggd_long_tiny", "--dry-run", "--json"],
    ]
    assert "256" in run(project, "-c", COMMANDS, json.dumps(lines))
    assert (project / "results" / "passkey.csv").exists() and (project / "hyperbola.prior.png").exists()
    with open(project / "out" / "repeat.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    (stored, _) = (json.loads(path.read_text()) for path in (project / "out" / "repeat").iterdir())
    assert stored["settings"]["letters"] == 10 and (project / "out" / "repeat.png").stat().st_size > 10_000
    assert '"repeat/accuracy@16"' in (project / "run" / "metrics.jsonl").read_text()
