"""Fetch the data that the recipes name, into the data folder ($PRIORZOO_DATA, ./data in a checkout,
or the user's).

    priorzoo fetch-data text             the corpora of a modality, and which are there already
    priorzoo fetch-data text sotu gpt2   fetch these
    priorzoo fetch-data dna all

Data come from where they are published, over HTTPS. What is complete appears under its name. An
interrupted run leaves nothing; after SIGKILL the next run cleans up. One corpus that fails does not
keep the others back; the exit code is 1 then.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from recipes.commands import STOPS, call, handled_signals
from recipes.fetchers.common import Corpus, FetchError, console, scratch_folder
from zoo.errors import did_you_mean
from zoo.files import data_folder

MODALITIES = {"text": "recipes.fetchers.text", "dna": "recipes.fetchers.dna"}


def fetch_command(
    modality: Annotated[str, typer.Argument(help=", ".join(MODALITIES))],
    names: Annotated[
        list[str] | None, typer.Argument(help="of corpora, or all; none lists them")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder; default: $PRIORZOO_DATA, ./data, or the user's")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="fetch again what is there already")
    ] = False,
) -> int:
    corpora = _corpora(modality)
    place = data or data_folder()
    names = names or []
    choices = [*corpora, "all"]
    for name in names:
        if name not in choices:
            hint = did_you_mean(name, choices)
            raise typer.BadParameter(f"{name!r}: {hint}known: {', '.join(choices)}")
    present = [name for name, corpus in corpora.items() if _is_present(corpus, place)]
    if not names:
        table = Table(
            "name", "what", "download", "in the data folder", title=f"data folder: {place}"
        )
        for name, corpus in corpora.items():
            table.add_row(name, corpus.title, corpus.size, "yes" if name in present else "no")
        console.print(table)
        return 0
    code = 0
    for name in corpora if "all" in names else dict.fromkeys(names):
        if name in present and not force:
            console.print(f"{name}: already in {place} (--force fetches it again)")
        elif not _fetch(name, corpora[name], place):
            code = 1
    return code


def _corpora(modality: str) -> dict[str, Corpus]:
    """The corpora of a modality; text needs no other modality's packages."""
    if modality not in MODALITIES:
        hint = did_you_mean(modality, MODALITIES)
        raise typer.BadParameter(f"{modality!r}: {hint}known: {', '.join(MODALITIES)}")
    try:
        return importlib.import_module(MODALITIES[modality]).CORPORA
    except ImportError as error:
        raise ImportError(
            f"{modality} needs its extra ({error}): pip install 'priorzoo[{modality}]'"
        ) from error


def _is_present(corpus: Corpus, data: Path) -> bool:
    return all((data / file).is_file() for file in corpus.files)


def _fetch(name: str, corpus: Corpus, data: Path) -> bool:
    """Fetch a corpus, in a scratch folder on the data folder's disk; False where that fails."""
    try:
        with handled_signals(_stop), scratch_folder(data) as folder:
            console.print(f"{name}: {corpus.fetch(data, folder)}")
    except FetchError as error:
        console.print(Text(f"{name} was not fetched.", "red"), str(error))
        return False
    return True


def _stop(number: int, _: object) -> None:
    # A second signal does not disturb the removal of files.
    for signal_number in STOPS:
        signal.signal(signal_number, signal.SIG_IGN)
    console.print(f"stopped by signal {number}; nothing of this corpus was kept")
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo fetch-data") -> int:
    return call(fetch_command, argv, prog=prog)
