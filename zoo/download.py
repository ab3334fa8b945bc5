"""Files over HTTP(S): a broken download is tried again and goes on where it ended."""

from __future__ import annotations

import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from zoo.errors import printable

__all__ = ["DownloadError", "download"]

TRIES, WAIT = 4, 2.0  # and seconds before the second one, doubled for each after it
TIMEOUT = 60.0  # seconds of silence, and in which LEAST bytes must come
LEAST = 60_000
LARGEST = 1 << 36  # bytes of a file whose size nobody said
CHUNK = 1 << 16


class DownloadError(OSError):
    """Why a file did not come, in one line that names its address; `tried_again`: after several tries."""

    def __init__(self, message: str, *, tried_again: bool = False) -> None:
        super().__init__(printable(message))
        self.tried_again = tried_again


def download(url: str, path: Path, *, size: int | None = None) -> None:
    """Fetch a file of `size` bytes, where that is known; what `path` already has of it is not fetched again.

    Never more is written than `size`, or than the server announced. What `path` has stays until other bytes come.

    Raises:
        DownloadError: for what the server does not have, a file of another size, and after TRIES broken or slow connections or
            errors of the server; what came stays.
    """
    failure = ""
    for number in range(TRIES):
        if number:
            time.sleep(WAIT * 2 ** (number - 1))
        have = path.stat().st_size if path.exists() else 0
        headers = {"User-Agent": "priorzoo"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with _opener().open(Request(url, headers=headers), timeout=TIMEOUT) as response:
                have *= response.status == 206  # or the server sends all of it again
                announced = response.headers.get("Content-Length")
                if announced is not None and not announced.isdecimal():
                    raise DownloadError(f"{url}: Content-Length is {announced!r}; expected a number of bytes")
                total = None if announced is None else int(announced) + have
                if size is not None and total is not None and total != size:
                    raise DownloadError(f"{url}: the server has {total:,} bytes; expected {size:,}")
                expected = size if total is None else total
                _store(response, path, have, LARGEST if expected is None else expected)
            if expected is None or path.stat().st_size >= expected:
                return
            failure = f"{path.stat().st_size:,} of {expected:,} bytes came"
        except HTTPError as error:
            failure = f"HTTP status {error.code}"
            if error.code == 416:
                # Nothing follows what is there: it is no part of this file.
                path.unlink(missing_ok=True)
            elif error.code < 500 and error.code != 429:
                raise DownloadError(f"{url}: {failure}") from error
        except DownloadError:
            raise
        except (OSError, HTTPException, ValueError) as error:
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    raise DownloadError(f"{url}: {failure}, after {TRIES} tries", tried_again=True)


def _opener() -> OpenerDirector:
    """Of http and https alone: a redirection elsewhere, as to ftp, is not followed."""
    opener = OpenerDirector()
    handlers = (
        ProxyHandler,
        HTTPHandler,
        HTTPSHandler,
        HTTPRedirectHandler,
        HTTPDefaultErrorHandler,
        HTTPErrorProcessor,
    )
    for handler in handlers:
        opener.add_handler(handler())
    return opener


def _store(response: HTTPResponse, path: Path, have: int, most: int) -> None:
    """Write a response behind the first `have` bytes of a file, up to `most` in all.

    Raises:
        DownloadError: where the server sends more.
        OSError: where fewer than LEAST bytes came in TIMEOUT seconds.
    """
    from rich.console import Console
    from rich.progress import Progress

    first = response.read1(CHUNK)
    if not first:
        return
    with Progress(console=Console(stderr=True), transient=True) as progress, open(path, "ab" if have else "wb") as file:
        task = progress.add_task(path.name, total=most if most < LARGEST else None, completed=have)
        since, came, chunk = time.monotonic(), 0, first
        while chunk:
            if have + len(chunk) > most:
                raise DownloadError(f"{response.url}: more than the {most:,} bytes of the file came")
            have, came = have + file.write(chunk), came + len(chunk)
            progress.update(task, completed=have)
            if time.monotonic() - since > TIMEOUT:
                if came < LEAST:
                    raise OSError(f"{came:,} bytes came in {TIMEOUT:.0f} s")
                since, came = time.monotonic(), 0
            chunk = response.read1(CHUNK)
