"""MkDocs hook: README, CONTRIBUTING and whatever pages link to outside docs/ become part of the
site, and so does the gallery.

Links stay as they are in the sources, where a reader of the repository follows them; the site gets
the same files at other places, so they are rewritten here. A link to a file that does not exist is
left alone, and MkDocs, strict, refuses it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Pages outside docs/ and their places in the site's sources.
PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "CONTRIBUTING.md": "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md": "CHANGELOG.md",
}
# Text, path and anchor of a link that is no URL.
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
CODE = re.compile(r"<code>[^<\n]*</code>")
OPTION = re.compile(r"(?<![\w-])(?:--?[A-Za-z]|\w+-)[\w-]{1,30}(?![\w-])")


def linked(source: Path) -> dict[str, Path]:
    """Files and folders of the project that a page links to, by the link."""
    targets = {}
    for link in LINK.finditer(source.read_text()):
        path = (source.parent / link[2]).resolve()
        if path.is_relative_to(ROOT) and path.exists():
            targets[link[2]] = path
    return targets


def place(path: Path) -> str:
    """Where a file of the project lies in the site's sources."""
    if path in PAGES:
        return PAGES[path]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return "files/" + path.relative_to(ROOT).as_posix()


def on_files(files: Any, *, config: Any) -> Any:
    todo = [*PAGES, *DOCS.rglob("*.md")]
    seen = set()
    while todo:
        path = todo.pop()
        if path in seen or path.is_dir():
            continue
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            todo += linked(path).values()
    gallery = ROOT / "build/gallery.html"
    words = ["gallery", "--out", gallery, "--home", "index.html"]
    subprocess.run([sys.executable, "-m", "priorzoo", *words], cwd=ROOT, check=True)
    files.append(File.generated(config, "gallery.html", abs_src_path=str(gallery)))
    models = ROOT / "build/MODELS.md"
    models.write_text(models_page())
    files.append(File.generated(config, "MODELS.md", abs_src_path=str(models)))
    return files


def models_page() -> str:
    """What `priorzoo list --pretrained` prints, as Markdown."""
    sys.path.insert(0, str(ROOT))
    from zoo.catalog import list_models
    from zoo.tables import pretrained_tables

    lines = [
        "# Weights by name",
        "",
        "`priorzoo list --pretrained` prints these tables; scores are those of the cards.",
    ]
    for title, columns, rows in pretrained_tables(list_models(pretrained=True)):
        name, measured = title.split("\n")
        heading, _, subject = name.partition(": ")
        lines += ["", f"## {heading}", "", f"{subject}; {measured}.", ""]
        rule = ["---"] + ["---:"] * (len(columns) - 1)
        for row in (columns, rule, *rows):
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    source = Path(page.file.abs_src_path)
    targets = linked(source)
    here = PurePosixPath(page.file.src_uri).parent

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = targets.get(target)
        if path is None:
            return link[0]
        # A folder has no page.
        if path.is_dir():
            return text
        return f"[{text}]({os.path.relpath(place(path), here)}{anchor})"

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Figures open at full size; options such as --against and numbers with their deviation are not
    broken."""

    def keep_options(code: re.Match[str]) -> str:
        return OPTION.sub(r'<span class="whole">\g<0></span>', code[0])

    html = CODE.sub(keep_options, html)
    html = html.replace(" ± ", "&nbsp;±&nbsp;")
    return re.sub(r'<img [^>]*?src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
