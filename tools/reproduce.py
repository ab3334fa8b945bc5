"""The papers' tables and figures as commands: what was published, and what this project measures.

    python tools/reproduce.py --list                   every item, with its verdict so far
    python tools/reproduce.py bam.figure5 goat.figure1    at tiny size, minutes each, on the shipped weights or short runs
    python tools/reproduce.py bam.figure5 --paper-size  the commands of the paper's set-up, for GPUs
    python tools/reproduce.py all                      one after the other; items that are there are kept
    python tools/reproduce.py --docs                   write the overview into docs/REPRODUCTION.md

Rows go to benchmarks/reproduction/ITEM.json, pictures and tables to --out/ITEM. Verdicts follow from the rows by a rule in
tools/papers: confirmed small, not confirmed, or open where nothing at this size can say.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

import tools.papers.bam
import tools.papers.cable
import tools.papers.formulas
import tools.papers.goat  # noqa: F401
from tools.papers import ITEMS, ROOT, Item
from zoo.cli import call
from zoo.files import write_json, write_text
from zoo.naming import nearest

STORED = ROOT / "benchmarks" / "reproduction"
PAGE = ROOT / "docs" / "REPRODUCTION.md"
START, END = "<!-- overview: written by tools/reproduce.py --docs -->", "<!-- end of the overview -->"
console = Console(highlight=False)


def stored(item: Item) -> dict[str, Any] | None:
    path = STORED / f"{item.key}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def verdict(item: Item) -> tuple[str, str]:
    """(holds, confirmed small, not confirmed, open, needs a GPU or not run; a sentence)."""
    if item.run is None:
        return "needs a GPU", item.judge([])[1]
    found = stored(item)
    if found is None:
        return "not run", ""
    holds, sentence = item.judge(found["rows"])
    good = "holds" if item.exact else "confirmed small"
    return {True: good, False: "not confirmed", None: "open"}[holds], sentence


def main(
    items: Annotated[
        list[str] | None, typer.Argument(metavar="[ITEM…]", help="such as bam.figure5, bam, or all")
    ] = None,
    *,
    list_: Annotated[bool, typer.Option("--list", help="every item, with its verdict so far")] = False,
    paper_size: Annotated[bool, typer.Option("--paper-size", help="print the commands of the paper's set-up")] = False,
    again: Annotated[bool, typer.Option("--again", help="run what is stored already too")] = False,
    docs: Annotated[bool, typer.Option("--docs", help="write docs/REPRODUCTION.md's overview")] = False,
    out: Annotated[Path, typer.Option(help="folder of pictures, tables and short runs")] = Path("results/reproduction"),
) -> None:
    chosen = select(items or [])
    if docs:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        write_text(PAGE, f"{before}{overview()}{rest.partition(END)[2]}")
        console.print(f"written: {PAGE}")
    elif list_ or not chosen:
        show(chosen or list(ITEMS.values()))
    elif paper_size:
        for item in chosen:
            print(f"# {item.key}: {item.title}", *item.paper, sep="\n")
    else:
        for item in chosen:
            if item.run is not None and (again or stored(item) is None):
                reproduce(item, out / item.key)
        show(chosen)


def select(words: list[str]) -> list[Item]:
    """Items by key, by paper, or all. ValueError names the nearest."""
    found: dict[str, Item] = {}
    for word in words:
        mine = {key: item for key, item in ITEMS.items() if word in ("all", key, key.partition(".")[0])}
        if not mine:
            raise ValueError(f"no item {word!r}; {nearest(word, ITEMS)}")
        found |= mine
    return list(found.values())


def reproduce(item: Item, out: Path) -> None:
    """Run one at tiny size and store its rows."""
    assert item.run is not None
    console.rule(f"{item.key}: {item.title}")
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    rows = item.run(out)
    facts = {"item": item.key, "ran": item.run.__doc__, "date": datetime.date.today().isoformat()}
    write_json(STORED / f"{item.key}.json", facts | {"seconds": round(time.perf_counter() - started, 1), "rows": rows})


def show(items: list[Item]) -> None:
    table = Table(title="the papers' tables and figures", title_justify="left")
    for column in ("item", "what", "verdict", "published", "here"):
        table.add_column(column, overflow="fold")
    for item in items:
        state, sentence = verdict(item)
        table.add_row(item.key, item.title, state, item.published, sentence)
    console.print(table)


def overview() -> str:
    """The page's part that follows from the items and what is stored of them."""
    lines = [START, "", "| item | published | here, tiny | verdict | command |", "|---|---|---|---|---|"]
    for item in ITEMS.values():
        state, sentence = verdict(item)
        ran = (item.run.__doc__ or "").strip().rstrip(".") if item.run else ""
        here = f"{sentence}. {ran}." if ran and sentence else sentence or ran
        command = f"`reproduce.py {item.key}`" + (" `--paper-size`" if item.run is None else "")
        lines.append(f"| **{item.key}** {item.title} | {item.published} | {here} | {state} | {command} |")
    return "\n".join([*lines, "", END])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
    app.command()(main)
    sys.exit(call(app, prog="tools/reproduce.py"))
