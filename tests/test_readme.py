"""The README's and the docs' code runs, their commands exist, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {
    path: path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
}
README = PAGES[ROOT / "README.md"]


def test_the_python_example_runs() -> None:
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    assert names["model"].config.position == "ggd_goat" and names["piece"]


def test_links_lead_somewhere() -> None:
    found = [(page, target) for page, text in PAGES.items() for target in re.findall(r"\]\(([^)#:]+)\)", text)]
    assert len(found) > 20
    assert not [f"{page.name}: {target}" for page, target in found if not (page.parent / target).exists()]


def test_the_tree_names_what_exists() -> None:
    trees = [
        re.findall(r"```\n(zoo/.*?)```", text, flags=re.DOTALL) for text in (README, PAGES[ROOT / "docs/LAYOUT.md"])
    ]
    top, missing = "", []
    for line in "\n".join(tree for [tree] in trees).splitlines():
        top = line.split("/")[0] if not line.startswith(" ") else top
        for word in re.findall(r"(?<!\S)[\w/]+(?:/|\.py)(?!\S)", line):
            places = [ROOT, ROOT / top, *(ROOT / top).iterdir()]
            missing += [] if any((place / word).exists() for place in places) else [word]
    assert not missing


def commands() -> list[str]:
    """Every command line of the pages, in blocks, in tables and in text."""
    found = []
    for text in PAGES.values():
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
            found += block.splitlines()
        found += re.findall(r"`((?:\.venv/bin/|python |deepspeed )[^`]+)`", text)
    return [line.partition("#")[0].strip() for line in found if re.match(r"\s*(\.venv/bin/|python |deepspeed )", line)]


@pytest.mark.parametrize("command", dict.fromkeys(commands()))
def test_commands_name_files_recipes_and_models_that_exist(command: str) -> None:
    from recipes import list_recipes
    from tools.weights import GROUPS
    from zoo import list_models

    for word in shlex.split(command):
        if word.endswith(".py"):
            assert (ROOT / word).is_file() or f"\n# {word}\n" in PAGES[
                ROOT / "CONTRIBUTING.md"
            ]  # an example's own file
        elif re.match(r"(text|vision|dna)\.\w", word):
            assert word in list_recipes()
        elif re.match(r"(text|vision|dna)_", word) and "gaussian" not in word and word not in GROUPS:
            assert list_models(word, pretrained=True)
