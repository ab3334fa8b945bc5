"""The worked example of CONTRIBUTING.md, done to a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_three_files_of_a_new_prior(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"```(python|diff)\n(.*?)```", page, flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "diff", "diff"]
    for folder in ("zoo", "modalities", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    source = blocks[0][1]
    path = re.match(r"# (\S+)\n", source)
    assert path
    (tmp_path / path[1]).write_text(source)
    for _, diff in blocks[1:]:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)

    subprocess.run([sys.executable, "-m", "ruff", "check", path[1]], cwd=tmp_path, check=True)
    # PYTHONPATH puts the copy before the installed package.
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    tests = ["tests/zoo/test_priors.py", "tests/zoo/test_attention.py", "tests/text/test_model.py"]
    command = [sys.executable, "-m", "pytest", *tests, "-k", "gaussian or every_prior_has_a_row"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    found = re.search(r"(\d+) passed", result.stdout)
    assert found and int(found[1]) >= 8, result.stdout[-2000:]
