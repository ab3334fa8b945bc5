"""The worked examples of CONTRIBUTING.md, carried out on a copy of the project."""

from __future__ import annotations

import csv
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
    body = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    found = [part for part in body if part.startswith(title)]
    assert len(found) == 1, title
    return re.findall(r"```(\w+)\n(.*?)```", found[0], flags=re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("zoo", "modalities", "recipes", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def write(project: Path, source: str) -> str:
    """A block whose first line names its file; returns that path."""
    path = re.match(r"# (\S+)\n", source)
    assert path
    (project / path[1]).write_text(source)
    return path[1]


def run(project: Path, *words: str) -> str:
    # PYTHONPATH puts the copy before the installed package.
    result = command([sys.executable, *words], folder=project, PYTHONPATH=str(project))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    return result.stdout


def apply(project: Path, diff: str) -> None:
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=project, check=True)


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    assert found, output[-2000:]
    return int(found[1])


def test_a_prior(project: Path) -> None:
    (_, source), *diffs = section("Adding a prior")
    path = write(project, source)
    for kind, diff in diffs:
        assert kind == "diff"
        apply(project, diff)
    run(project, "-m", "ruff", "check", path)
    tests = ["tests/zoo/test_priors.py", "tests/zoo/test_attention.py", "tests/text/test_model.py"]
    assert passed(run(project, "-m", "pytest", "-n0", *tests, "-k", "gaussian or every_prior_has_a_row")) >= 12
    code = "import zoo; print(zoo.create_model('vision_gaussian_tiny_patch8').config.position)"
    assert run(project, "-c", code).split()[-1] == "gaussian"


def test_a_prior_from_outside(project: Path) -> None:
    (_, source), (_, commands), _ = section("A prior from outside")
    path = write(project, source)
    run(project, "-m", "ruff", "check", path)
    train, evaluate, plot = (shlex.split(line)[1:] for line in commands.splitlines())
    few = ("train.steps=2", "train.batch=2", "evaluate.every=0", "data.facts_fraction=0", "data.copies_fraction=0")
    run(project, *train, *(word for setting in few for word in ("--set", setting)))
    run(project, *evaluate, "--lengths", "128", "--samples", "1")
    run(project, *plot)
    assert (project / "results" / "passkey.csv").exists() and (project / "hyperbola.prior.png").exists()


def test_an_evaluator(project: Path) -> None:
    blocks = section("Adding an evaluator")
    path = write(project, blocks[0][1])
    run(project, "-m", "ruff", "check", path)
    models = ("text_ggd_tiny.facts", "text_rope_tiny.facts")
    options = ("--letters", "10", "--lengths", "64,128", "--samples", "2", "--out", "out")
    run(project, "recipes/evaluate.py", *models, "repeat", *options)
    with open(project / "out" / "repeat.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    assert (project / "out" / "repeat.png").stat().st_size > 10_000
    during = 'evaluate.during={"repeat": {"every": 2, "lengths": [16], "samples": 1}}'
    sets = ("train.steps=2", "train.batch=2", "evaluate.every=0", during)
    run(project, "recipes/train.py", "text.ggd_tiny", "--run-dir", "run", *(w for s in sets for w in ("--set", s)))
    assert '"repeat/accuracy@16"' in (project / "run" / "metrics.jsonl").read_text()


def test_a_kernel(project: Path) -> None:
    (_, source), (_, diff) = section("Adding a kernel")
    path = write(project, source)
    apply(project, diff)
    run(project, "-m", "ruff", "check", path)
    assert passed(run(project, "-m", "pytest", "-n0", "tests/zoo/test_attention.py", "-k", "blockwise")) >= 30


def test_a_recipe(project: Path) -> None:
    [(_, source)] = section("Adding a recipe")
    file = project / "recipes" / "text.py"
    file.write_text(file.read_text() + "\n\n" + source.partition("\n")[2])
    run(project, "-m", "ruff", "check", "recipes/text.py")
    assert "text.ggd_long_tiny" in run(project, "recipes/train.py", "--list").split()
    assert "256" in run(project, "recipes/train.py", "text.ggd_long_tiny", "--dry-run")
