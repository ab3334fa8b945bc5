"""The command of `make docs` ends with an error where a page links to what does not exist."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="needs the extra docs")

ROOT = Path(__file__).parent.parent


def build(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """The Makefile's command, with the project's validation, for a site of two pages."""
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(text)
    (docs / "other.md").write_text("# Other\n\n## A section\n")
    config = f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md, other.md]\nhooks: []\nplugins: []\n"
    (folder / "mkdocs.yml").write_text(f"{config}docs_dir: docs\nsite_dir: site\n")
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line)
    words = shlex.split(line)
    command = words[words.index("build") :]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *command], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_site_of_good_links_is_built(tmp_path):
    found = build(tmp_path, "[a page](other.md), [a section](other.md#a-section)\n")
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "site" / "other.html").exists()


@pytest.mark.parametrize("link", ["[page](none.md)", "[section](other.md#nowhere)", "![picture](none.png)"])
def test_a_broken_link_is_an_error(link, tmp_path):
    found = build(tmp_path, f"{link}\n")
    assert found.returncode == 1
    assert "none" in found.stderr or "nowhere" in found.stderr
