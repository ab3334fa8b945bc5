"""Files over HTTP(S): a broken download goes on where it ended, and a file has its name only when its SHA-256 is right."""

from __future__ import annotations

import os
import shutil
import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from zoo.files import file_sha256, sync

__all__ = ["DownloadError", "download", "download_verified"]

TRIES, WAIT, TIMEOUT = 4, 2.0, 60.0  # of a download; seconds before the second try, doubled for each after it


class DownloadError(OSError):
    """Why a file did not come, in one line that names its address.

    Attributes:
        tried_again: whether it was something that may pass, such as a broken connection.
    """

    def __init__(self, message: str, *, tried_again: bool = False) -> None:
        super().__init__(message)
        self.tried_again = tried_again


def download(url: str, path: Path) -> None:
    """Fetch a file; what `path` already has of it is not fetched again.

    After a broken connection or an error of the server it goes on, TRIES times in all.

    Raises:
        DownloadError: for what fails or comes short; what came stays.
    """
    from rich.console import Console
    from rich.progress import wrap_file

    console, failure = Console(stderr=True), ""
    for number in range(TRIES):
        if number:
            time.sleep(WAIT * 2 ** (number - 1))
        have = path.stat().st_size if path.exists() else 0
        headers = {"User-Agent": "priorzoo"} | ({"Range": f"bytes={have}-"} if have else {})
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
                return
            failure = f"{path.stat().st_size:,} of {size:,} bytes came"
        except HTTPError as error:
            failure = f"HTTP status {error.code}"
            if error.code == 416:  # there is nothing from there on: what is here is no part of this file
                path.unlink(missing_ok=True)
            elif error.code < 500 and error.code != 429:
                raise DownloadError(f"{url}: {failure}") from error
        except (OSError, HTTPException) as error:
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    raise DownloadError(f"{url}: {failure}, after {TRIES} tries", tried_again=True)


def download_verified(url: str, path: Path, *, sha256: str, size: int) -> None:
    """Fetch a file whose bytes and SHA-256 are known; where `path` has them, nothing is fetched.

    Processes that want the same file wait for the one that fetches it. What one that was killed left is gone on with.

    Raises:
        DownloadError: as `download`; what came stays, to go on from.
        ValueError: for other bytes than those; nothing is left.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.is_file() and file_sha256(path) == sha256:
            return
        partial = path.with_name(f".{path.name}.partial")
        left_over = partial.exists()
        while True:
            if not partial.exists() or partial.stat().st_size < size:
                download(url, partial)
            if (found := file_sha256(partial)) == sha256:
                break
            partial.unlink()
            if not left_over:
                raise ValueError(f"{url}: its SHA-256 is {found}, expected {sha256}; nothing was kept")
            left_over = False  # the part that was there was damaged, or of another file: once more from the start
        partial.chmod(0o644)
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
