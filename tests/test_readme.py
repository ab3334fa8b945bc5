"""The README's code runs, its commands name what exists, and links of every page lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch

from recipes import list_recipes
from zoo import list_models

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "README.md").read_text()


def test_the_python_example_runs() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict = {}
    with torch.no_grad():
        exec(compile(source, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape and names["out"].isfinite().all()
    assert names["model"](torch.tensor([[256, 65, 66]])).shape == (1, 3, 264)


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    links = [
        (page, target) for page in pages for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 10
    broken = [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()]
    assert not broken, broken


def test_commands_name_files_recipes_and_models_that_exist() -> None:
    commands = re.findall(r"`(\.venv/bin/[^`]+)`", PAGE) + re.findall(
        r"^(\.venv/bin/[^#\n]+)", PAGE, flags=re.MULTILINE
    )
    words = [word for command in commands for word in shlex.split(command)]
    known = list_recipes()
    files = [word for word in words if word.endswith(".py")]
    recipes = [word for word in words if word.startswith(("text.", "vision.", "dna."))]
    models = [word for word in words if word.startswith(("text_", "vision_", "dna_"))]
    assert files and recipes and models
    missing = [word for word in files if not (ROOT / word).is_file()]
    missing += [word for word in recipes if word not in known]
    missing += [word for word in models if not list_models(word, pretrained=True)]
    assert not missing, missing
