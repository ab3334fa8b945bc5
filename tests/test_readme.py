"""The README's code runs, and the files it links to exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text()


def test_the_python_examples_run(capsys) -> None:
    vision, dna, text = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    exec(compile(vision, "README.md", "exec"), names)
    assert names["model"].num_classes == 26 and "torch.Size([1, 26])" in capsys.readouterr().out
    exec(compile(dna, "README.md", "exec"), names)
    assert 1.5 < names["scores"].bits / names["scores"].counted < 2.5 and len(names["written"]) == 60
    capsys.readouterr()
    exec(compile(text, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", PAGE))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


COMMANDS = re.findall(r"`(\.venv/bin/[^`]+)`", PAGE) + re.findall(r"^(\.venv/bin/[^#\n]+)", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_files_and_recipes_that_exist(command: str) -> None:
    from recipes import list_recipes
    from zoo import list_models

    words = shlex.split(command)
    for word in words:
        if word.endswith(".py"):
            assert (ROOT / word).is_file()
        elif word.startswith(("text.", "vision.", "dna.")):
            assert word in list_recipes()
        elif word.startswith(("text_", "vision_", "dna_")):
            assert list_models(word, pretrained=True)
