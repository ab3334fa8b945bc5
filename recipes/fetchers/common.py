"""What every fetcher shares: downloads over HTTPS, and output that is complete or absent."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from rich.progress import track

from zoo.console import Console
from zoo.files import file_sha256, make_folder, make_temporary, replacing

T = TypeVar("T")
console = Console(stderr=True)
# Seconds before each try of a download.
WAITS = (0.0, 2.0, 4.0, 8.0)
# Seconds without a byte that end a try.
SILENCE = 60.0
# Bytes a second that a whole download has to reach.
SLOWEST = 1e3
# Bytes of a file whose size the server does not say.
LARGEST = 1 << 32
CHUNK = 1 << 16
# Seconds between two lines of progress where no terminal shows it.
EVERY = 15.0


class FetchError(RuntimeError):
    """Why something was not fetched, and what to do about it; shown without a traceback."""


# (data folder, scratch folder) → a line about what was written
Fetch = Callable[[Path, Path], str]


@dataclass(frozen=True)
class Corpus:
    """One thing to fetch.

    files: paths below the data folder that exist once it is fetched. size: of the download.
    """

    title: str
    files: tuple[str, ...]
    size: str
    fetch: Fetch


# ---- progress

_last_report = -EVERY


def report(text: str) -> None:
    """Print a line of progress where there is no terminal, at most one every `EVERY` seconds."""
    global _last_report
    now = time.monotonic()
    if not console.is_terminal and now - _last_report >= EVERY:
        _last_report = now
        console.print(text, soft_wrap=True)


def tracked(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, behind a bar on a terminal and with lines of progress elsewhere."""
    if console.is_terminal:
        items = track(items, what, total, console=console)
    for count, item in enumerate(items):
        report(f"{what}: {count:,} of {total:,}")
        yield item


# ---- downloads


class HttpAlone(HTTPRedirectHandler):
    """Follows no redirection to another scheme, such as ftp."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if not newurl.startswith(("http://", "https://")):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


urlopen = build_opener(HttpAlone).open


def download(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch one file into a folder, in several tries."""
    path = folder / url.rsplit("/", 1)[-1]
    reason = ""
    for wait in WAITS:
        time.sleep(wait)
        try:
            _receive(url, path)
            return verified(path, sha256) if sha256 else path
        except HTTPError as error:
            reason = f"HTTP status {error.code}"
            if error.code < 500 and error.code != 429:
                raise FetchError(f"{url}: {reason}") from error
        except (OSError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
    raise FetchError(f"{url}: {reason}, after {len(WAITS)} tries")


def _receive(url: str, path: Path) -> None:
    """One try. OSError where the answer is shorter or longer than announced, or too slow."""
    request = Request(url, headers={"User-Agent": "priorzoo"})
    with urlopen(request, timeout=SILENCE) as response:
        # A shorter answer is no error to the library.
        announced = response.length
        most = LARGEST if announced is None else announced
        end = time.monotonic() + SILENCE + most / SLOWEST
        with replacing(path, "wb") as file, console.status(f"downloading {url}"):
            while chunk := response.read1(CHUNK):
                if file.tell() + len(chunk) > most or time.monotonic() > end:
                    raise OSError(f"more than {most:,} bytes came, or too slowly")
                file.write(chunk)
                report(f"{url}: {file.tell() / 1e6:,.1f} MB")
            if announced is not None and file.tell() != announced:
                raise OSError(f"{file.tell():,} of {announced:,} bytes came")


def verified(path: Path, sha256: str) -> Path:
    """The path of a file with this SHA-256."""
    digest = file_sha256(path)
    if digest != sha256:
        raise FetchError(f"{path.name}: SHA-256 is {digest}, expected {sha256}; nothing was kept")
    return path


# ---- what is written


@contextmanager
def scratch_folder(data: Path) -> Iterator[Path]:
    """A folder in `data`, removed at the end of the block. Folders of killed processes, which hold
    no lock, are removed at its start.

    A file system without locks keeps these until an hour after the last write.
    """
    for lock in data.glob(".fetch-*/lock"):
        with suppress(OSError), lock.open("r+") as file:
            # BlockingIOError where its process still runs.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    folder = make_temporary(data / "fetch", folder=True)
    try:
        with (folder / "lock").open("w") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Resolved, because programs run in other working directories.
            yield folder.resolve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, place: Path, scratch: Path) -> None:
    """Put a finished folder in its place; the earlier one goes with the scratch folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        os.replace(place, scratch / f"replaced-{place.name}")
    os.replace(new, place)


def write_jsonl(
    path: Path, rows: Iterable[Mapping[str, object]], total: int, source: str, scratch: Path
) -> str:
    """Write rows as JSONL; the file appears only when it is complete. Returns a line about it.

    source: where rows come from and which parts are taken. scratch: a folder on the same disk.
    FetchError where there are no rows.
    """
    count = 0
    size = 0
    with replacing(scratch / path.name) as stream:
        for row in tracked(rows, f"writing {path.name}", total):
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
            size += len(str(row["text"]).encode("utf-8"))
        if not count:
            raise FetchError(f"{path.name}: {source} gave no document; nothing was kept")
    make_folder(path.parent)
    os.replace(scratch / path.name, path)
    return f"{path}: {count:,} documents, {size / 1e6:,.1f} MB of text"
