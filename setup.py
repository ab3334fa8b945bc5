"""What pyproject.toml cannot say: where the wheel has `recipes` (see priorzoo/__init__.py), and
what an index page shows.

PRIORZOO_URL, the address of the repository, becomes the base of README's links and pictures on the
index page. Without it they lead nowhere there, and the page has the text alone.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

RECIPES = "priorzoo.packages.recipes"
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def index_page(readme: str, url: str) -> str:
    """README with links that hold outside the repository."""

    def absolute(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if not url:
            return "" if picture else text
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return re.sub(r"\n{3,}", "\n\n", RELATIVE.sub(absolute, readme))


URL = os.environ.get("PRIORZOO_URL", "").rstrip("/")
setup(
    packages=[
        *find_packages(include=["zoo*", "modalities*", "priorzoo*"]),
        *(name.replace("recipes", RECIPES, 1) for name in find_packages(include=["recipes*"])),
    ],
    package_dir={RECIPES: "recipes"},
    long_description=index_page(
        Path(__file__).with_name("README.md").read_text(encoding="utf-8"), URL
    ),
    long_description_content_type="text/markdown",
    project_urls={"Repository": URL} if URL else {},
)
