"""What pages show is true: code runs, commands and links name what exists. (Links inside docs/ are
`make docs`'s.)"""

from __future__ import annotations

import fnmatch
import re
import shlex
import sys
from pathlib import Path

import pytest

from modalities.contract import find_modality
from priorzoo.__main__ import main
from recipes import list_recipes, train
from tests.launching import ROOT, command
from tests.ranks import forked
from zoo import list_models, priors

OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = {page: page.read_text() for page in [*OUTSIDE, *(ROOT / "docs").rglob("*.md")]}
README, CONTRIBUTING = (PAGES[page] for page in OUTSIDE)
GUIDES = [ROOT / "docs/CONCEPTS.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
SHORTER = {  # of the guides, for the test
    '"*.py"': '"[a-c]*.py"',
    "train.steps=300": "train.steps=2",
    "train.steps=500": "train.steps=2",
    "text.alibi_tiny --import logarithm.py --seeds 0,1,2": "--import logarithm.py --seeds 0",
    "--lengths 256,1024,4096": "--lengths 256,512 --samples 2",
}


@pytest.mark.slow
def test_the_readme_s_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        priors.PRIORS, "data", dict(priors.PRIORS.data)
    )  # its registration ends with the test
    for example in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(compile(example, "README.md", "exec"), {})


def test_readme_begins_with_make() -> None:
    """`make demo` and `make test` stand before `pip install`; CI types the second as it is
    printed."""
    shell = re.search(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    assert shell is not None
    typed = [line.partition("  #")[0] for line in shell[1].splitlines()]
    assert typed[:2] == ["make demo", "make test"]
    assert typed[2].startswith("pip install")
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == typed[1]


def test_links_and_folders_exist() -> None:
    links = [
        (page, link) for page in OUTSIDE for link in re.findall(r"\]\(([^)#:]+)\)", PAGES[page])
    ]
    assert len(links) > 5
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]
    folders = re.findall(r"`(\w+)/`: ", README)
    assert len(folders) == 5
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_python_blocks_import_names(tmp_path: Path) -> None:
    """Each runs in a new process, but for the part of a file that CONTRIBUTING adds."""
    for page, text in PAGES.items():
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)):
            if "at its end" not in block.partition("\n")[0]:
                (tmp_path / f"{page.stem}_{number}.py").write_text(block)
    command(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "."],
        folder=tmp_path,
    )


def commands() -> list[str]:
    """Every command line of the pages, in blocks, in tables and in text."""
    lines: list[str] = []
    for text in PAGES.values():
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, flags=re.DOTALL):
            lines += block.replace("\\\n", " ").splitlines()
        lines += re.findall(r"`((?:\.venv/bin/|python |deepspeed |priorzoo )[^`]+)`", text)
    programs = r"(\.venv/bin/|python |deepspeed |priorzoo )"
    return [line.partition(" #")[0].strip() for line in lines if re.match(rf"\s*{programs}", line)]


def test_commands_name_existing_things() -> None:
    """Commands name files recipes and models that exist."""
    assert len(commands()) > 30
    wrong = []
    recipes = set(list_recipes())
    models = [*list_models(), *list_models(pretrained=True)]
    for line in commands():
        if (
            "…" in line or "tools/" in line or "--import" in line
        ):  # a file of the user's registers names
            continue
        for word in shlex.split(line):
            if word.endswith(".py") and "/" in word:
                known = (
                    ROOT / word
                ).is_file() or f"\n# {word}\n" in CONTRIBUTING  # an example's own file
            elif re.fullmatch(r"(text|vision|dna)\.\w+", word):
                known = word in recipes
            elif (
                re.match(r"(text|vision|dna)_", word) and "gaussian" not in word and "/" not in word
            ):
                known = bool(fnmatch.filter(models, word))
            else:
                continue
            wrong += [] if known else [f"{line}: {word}"]
    assert not wrong


PAPERS = PAGES[ROOT / "docs/PAPERS.md"]
PLACES = {"GOAT": r"Figures? |Tables? |Theorems", "BAM": r"\(pp?\. \d+|\(sec\."}
PLACES["CABLE"] = r"\(p\. 30366\)|page not at hand"
PUBLISHED = r"\d|no (number|count|accuracy)|drawing|formula|not quoted"
SPREAD = r"±|\[[\d.]+, [\d.]+\]|\b(\d[\d,]*) of [\d,]+\b|has no spread|not measured"


def paper_rows(paper: str) -> list[list[str]]:
    """The four cells of each row of a paper's table."""
    table = PAPERS.partition(f"\n## {paper}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][
        2:
    ]


def lacks(paper: str, row: list[str]) -> list[str]:
    """Which of place, published number, command and measurement with spread a row lacks."""
    item, published, command, measured = row
    if link := re.fullmatch(r"\[below\]\(#(.+)\)", published):
        heading = link[1].replace("bam-b-", "BAM B, ").replace("-", " ")
        published = PAPERS.partition(f"\n### {heading}\n\nPage")[2].partition("\n#")[0]
    cells = {"place": (PLACES[paper], item), "published": (PUBLISHED, published)}
    cells |= {"command": (r"`|^–$|^as ", command), "measured": (SPREAD, measured)}
    return [name for name, (pattern, cell) in cells.items() if not re.search(pattern, cell)]


def test_paper_rows_have_spread() -> None:
    """Every row of the papers has numbers and a spread."""
    assert not {
        row[0]: wrong
        for paper in PLACES
        for row in paper_rows(paper)
        if (wrong := lacks(paper, row))
    }
    good = next(row for row in paper_rows("BAM") if row[0].startswith("Figure 3 / 2"))
    for n, cell, name in (
        (0, "Figure 3: passkey", "place"),
        (1, "better", "published"),
        (3, "0.97", "measured"),
    ):
        assert lacks("BAM", [*good[:n], cell, *good[n + 1 :]]) == [name]


def test_paper_tables_have_rows() -> None:
    """Every table and figure of the papers has a row."""
    goat, bam = (
        [row[0].partition(":")[0] for row in paper_rows(paper)] for paper in ("GOAT", "BAM")
    )
    assert [sum(item.startswith(kind) for item in goat) for kind in ("Figure", "Table")] == [12, 2]
    for kind, older, newer in (("Figure", 13, 18), ("Table", 1, 8)):
        items = [item.partition(" (p")[0].partition(" / ") for item in bam if kind in item]
        first, second = (" ".join(item[n] for item in items) for n in (0, 2))
        assert set(re.findall(r"\d+", first)) == {str(n + 1) for n in range(older)}
        assert set(re.findall(r"\d+", second)) == {str(n + 1) for n in range(newer)}


def test_evaluators_of_the_table_exist() -> None:
    """`priorzoo evaluate --list` shows all; the page has a table of those that ship."""
    _, _, section = PAGES[ROOT / "docs/COMMANDS.md"].partition("### Evaluators")
    rows = re.findall(r"(?m)^\| (`\w+`.*?) \|", section)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    evaluators = set()
    for modality in ("text", "vision", "dna"):
        evaluators |= set(find_modality(modality).evaluators)
    assert len(named) > 10
    assert named <= evaluators


def test_evaluators_have_a_summary() -> None:
    """What `priorzoo evaluate --list` prints of an evaluator, so that no page has to name it."""
    for modality in ("text", "vision", "dna"):
        for name, evaluator in find_modality(modality).evaluators.items():
            assert evaluator.summary, name


@pytest.mark.slow
def test_options_of_commands_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "run", train.main)
    helps: dict[str, str] = {}
    wrong = []
    for line in commands():
        name, _, rest = (
            re.sub(r"^.*--module priorzoo\.", "priorzoo ", line)
            .removeprefix("priorzoo ")
            .partition(" ")
        )
        if (
            line.startswith("python ")
            or name in ("lm-eval", "COMMAND")
            or "…" in line
            or " repeat " in line
        ):
            continue  # `repeat`: an example's own evaluator
        words = [(name, word) for word in shlex.split(rest)]
        words += [
            ("evaluate", word) for _, quoted in words if " " in quoted for word in quoted.split()
        ]
        for called, option in words:
            if not re.fullmatch(r"--[a-z][\w-]*", option):
                continue
            if called not in helps:
                assert main([called, "--help"]) == 0, line
                assert (
                    called != "evaluate" or main([called, "--list"]) == 0
                )  # options of evaluators
                helps[called] = (
                    " ".join(capsys.readouterr().out.replace(",", " ").replace("│", " ").split())
                    + " "
                )
            wrong += [] if f" {option} " in helps[called] else [f"{line}: {option}"]
    assert not wrong
    assert len(helps) > 8


def run_code(code: str) -> None:
    exec(compile(code, "guide", "exec"), {"__name__": "__main__"})


def run_commands(lines: list[list[str]]) -> None:
    """Command lines of a guide, in one process, which training would end."""
    train.run = train.main
    for program, *words in lines:
        assert Path(words[0]).read_text() if program == "cat" else main(words) == 0, words


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide_runs(page: Path, tmp_path: Path) -> None:
    """Its blocks in order in one folder, but for `sh`: each in a process that imported only
    libraries and the commands.

    A block that begins with a file's name is that file too, from the start.
    """
    text = PAGES[page]
    assert all(any(long in PAGES[guide] for guide in GUIDES) for long in SHORTER)
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    blocks = re.findall(r"```(python|bash)\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for _, code in blocks:
        if name := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / name[1]).write_text(code)
    for kind, code in blocks:
        lines = (
            [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
            if kind == "bash"
            else None
        )
        failure = forked(run_commands if lines else run_code, lines or code, folder=tmp_path)
        assert not failure, failure
