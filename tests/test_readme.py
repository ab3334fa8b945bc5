"""The README's code runs, and the files it links to exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text()


def test_the_python_example_runs(capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", PAGE))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("command", re.findall(r"`(\.venv/bin/[^`]+)`", PAGE))
def test_commands_name_files_and_recipes_that_exist(command: str) -> None:
    from recipes import list_recipes
    from zoo import list_models

    words = shlex.split(command)
    for word in words:
        if word.endswith(".py"):
            assert (ROOT / word).is_file()
        elif word.startswith("text."):
            assert word in list_recipes()
        elif word.startswith("text_"):
            assert list_models(word, pretrained=True)
