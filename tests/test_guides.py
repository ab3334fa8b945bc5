"""Concepts and guides do what they show: the code blocks of a page, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHORTER = {  # of the first page, for the test
    '"*.py"': '"[a-c]*.py"',
    "train.steps=300": "train.steps=2",
    "--lengths 256,1024,4096": "--lengths 256,512 --samples 2",
}
PAGES = [ROOT / "docs/CONCEPTS.md", *sorted((ROOT / "docs/guides").glob("*.md"))]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    assert page.stem != "first" or all(long in text for long in SHORTER)
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)
    assert {kind for kind, _ in blocks} <= {"python", "bash"}
    scripts = Path(sys.executable).parent
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # The blocks of one language that follow each other share a process: importing the libraries is what takes long.
    joined: list[tuple[str, str]] = []
    for kind, code in blocks:
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + code)
        else:
            joined.append((kind, code))
    assert joined
    for kind, code in joined:
        command = [sys.executable, "-c", code] if kind == "python" else ["bash", "-euo", "pipefail", "-c", code]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
