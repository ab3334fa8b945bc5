"""What every fetcher shares: a download over HTTPS, verification, and output that appears only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
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
from rich.progress import track, wrap_file

from zoo.files import file_sha256, replacing

console = Console(stderr=True)

TRIES, WAIT, TIMEOUT = 4, 2.0, 60.0  # of a download; seconds before the second try, doubled for each after it


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
    """Fetch one file into a folder; after a broken connection or an error of the server it goes on, TRIES times in all.

    FetchError: for what fails, comes short or has another SHA-256.
    """
    path, failure = folder / url.rsplit("/", 1)[-1], ""
    for number in range(TRIES):
        if number:
            time.sleep(WAIT * 2 ** (number - 1))
        have = path.stat().st_size if path.exists() else 0
        headers = {"User-Agent": "priorzoo-fetch"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as answer:
                resumed = answer.status == 206  # else the server sends all of it again
                size = int(answer.headers.get("Content-Length") or 0) + have * resumed
                with (
                    wrap_file(answer, size, description=path.name, console=console, transient=True) as reader,
                    open(path, "ab" if resumed else "wb") as stream,
                ):
                    shutil.copyfileobj(reader, stream)
            if path.stat().st_size >= size:
                break
            failure = f"{path.stat().st_size:,} of {size:,} bytes came"
        except HTTPError as error:
            failure = f"HTTP status {error.code}"
            if error.code < 500 and error.code != 429:
                raise FetchError(f"{url}: {failure}") from error
        except (OSError, HTTPException) as error:
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    else:
        raise FetchError(f"{url}: {failure}, after {TRIES} tries. Try --offline: packages of apt, npm, pip")
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
