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

from tests.launching import command

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()

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
    """A block whose first line names its file, which is linted; returns that path."""
    path = source.splitlines()[0].removeprefix("# ")
    (project / path).write_text(source)
    run(project, "-m", "ruff", "check", path)
    return path


def run(project: Path, *words: str) -> str:
    # PYTHONPATH puts the copy before the installed package.
    result = command([sys.executable, *words], folder=project, PYTHONPATH=str(project))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    return result.stdout


def apply(project: Path, diff: str) -> None:
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=project, check=True)


def passed(output: str) -> int:
    (count,) = re.findall(r"(\d+) passed", output)
    return int(count)


def test_a_prior(project: Path) -> None:
    (_, source), *diffs = section("Adding a prior")
    write(project, source)
    for kind, diff in diffs:
        assert kind == "diff"
        apply(project, diff)
    tests = ["tests/zoo/test_priors.py", "tests/zoo/test_attention.py", "tests/text/test_model.py"]
    assert passed(run(project, "-m", "pytest", "-n0", *tests, "-k", "gaussian or every_prior_has_a_row")) >= 6
    code = "import zoo; print(zoo.create_model('vision_gaussian_tiny_patch8').config.position)"
    assert run(project, "-c", code).split()[-1] == "gaussian"


def test_a_prior_from_outside(project: Path) -> None:
    (_, source), (_, commands), _ = section("A prior from outside")
    write(project, source)
    train, evaluate, plot = (shlex.split(line)[1:] for line in commands.splitlines())
    few = ("train.steps=2", "train.batch=2", "evaluate.every=0", "data.facts_fraction=0", "data.copies_fraction=0")
    run(project, *train, *(word for setting in few for word in ("--set", setting)))
    run(project, *evaluate, "--lengths", "128", "--samples", "1")
    run(project, *plot)
    assert (project / "results" / "passkey.csv").exists() and (project / "hyperbola.prior.png").exists()


def test_an_evaluator(project: Path) -> None:
    blocks = section("Adding an evaluator")
    write(project, blocks[0][1])
    models = ("text_ggd_tiny.facts", "text_rope_tiny.facts")
    options = ("--letters", "10", "--lengths", "64,128", "--samples", "2", "--out", "out")
    run(project, "recipes/evaluate.py", *models, "repeat", *options)
    with open(project / "out" / "repeat.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    (stored, _) = (json.loads(path.read_text()) for path in (project / "out" / "repeat").iterdir())
    assert stored["settings"]["letters"] == 10
    assert (project / "out" / "repeat.png").stat().st_size > 10_000
    during = 'evaluate.during={"repeat": {"every": 2, "lengths": [16], "samples": 1}}'
    sets = ("train.steps=2", "train.batch=2", "evaluate.every=0", during)
    run(project, "recipes/train.py", "text.ggd_tiny", "--run-dir", "run", *(w for s in sets for w in ("--set", s)))
    assert '"repeat/accuracy@16"' in (project / "run" / "metrics.jsonl").read_text()


def test_a_kernel(project: Path) -> None:
    (_, source), (_, diff) = section("Adding a kernel")
    write(project, source)
    apply(project, diff)
    assert passed(run(project, "-m", "pytest", "-n0", "tests/zoo/test_attention.py", "-k", "blockwise")) >= 30


def test_a_recipe(project: Path) -> None:
    [(_, source)] = section("Adding a recipe")
    file = project / "recipes" / "text.py"
    file.write_text(file.read_text() + "\n\n" + source.partition("\n")[2])
    run(project, "-m", "ruff", "check", "recipes/text.py")
    assert "text.ggd_long_tiny" in run(project, "recipes/train.py", "--list").split()
    assert "256" in run(project, "recipes/train.py", "text.ggd_long_tiny", "--dry-run")
