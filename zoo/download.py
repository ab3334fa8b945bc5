"""Files over HTTP(S): a broken download is tried again and goes on where it ended."""

from __future__ import annotations

import shutil
import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

__all__ = ["DownloadError", "download"]

TRIES, WAIT, TIMEOUT = (
    4,
    2.0,
    60.0,
)  # tries; seconds before the second one, doubled for each after it; seconds of silence


class DownloadError(OSError):
    """Why a file did not come, in one line that names its address; `tried_again`: after several tries."""

    def __init__(self, message: str, *, tried_again: bool = False) -> None:
        super().__init__(message)
        self.tried_again = tried_again


def download(url: str, path: Path) -> None:
    """Fetch a file; what `path` already has of it is not fetched again.

    Raises:
        DownloadError: for what the server does not have, and after TRIES broken connections or errors of the server; what came
            stays.
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
            with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as response:
                # Or the server sends all of it again.
                resumed = response.status == 206
                size = int(response.headers.get("Content-Length") or 0) + have * resumed
                with (
                    wrap_file(response, size, description=path.name, console=console, transient=True) as reader,
                    open(path, "ab" if resumed else "wb") as file,
                ):
                    shutil.copyfileobj(reader, file)
            if path.stat().st_size >= size:
                return
            failure = f"{path.stat().st_size:,} of {size:,} bytes came"
        except HTTPError as error:
            failure = f"HTTP status {error.code}"
            if error.code == 416:
                # Nothing follows what is there: it is no part of this file.
                path.unlink(missing_ok=True)
            elif error.code < 500 and error.code != 429:
                raise DownloadError(f"{url}: {failure}") from error
        except (OSError, HTTPException) as error:
            failure = str(getattr(error, "reason", error)) or type(error).__name__
    raise DownloadError(f"{url}: {failure}, after {TRIES} tries", tried_again=True)
