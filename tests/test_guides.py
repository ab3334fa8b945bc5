"""Concepts and guides do what they show: the code blocks of a page, in order, in one folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.launching import command

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
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    # The blocks of one language that follow each other share a process: importing the libraries is what takes long.
    joined: list[tuple[str, str]] = []
    for kind, code in blocks:
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + code)
        else:
            joined.append((kind, code))
    assert joined
    for kind, code in joined:
        for words in [["-c", code]] if kind == "python" else commands(code):
            done = command([sys.executable, *words], folder=tmp_path, **environment)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def commands(code: str) -> list[list[str]]:
    """Words behind `python` of each line of a block: of the console command, and of files that are looked at."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        look = "import pathlib, sys; assert pathlib.Path(sys.argv[1]).read_text()"
        assert program in ("priorzoo", "cat"), line
        found.append([str(ROOT / "priorzoo/__main__.py"), *words] if program == "priorzoo" else ["-c", look, *words])
    return found
