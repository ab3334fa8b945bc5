"""Files that appear whole: written beside their place under another name, then renamed."""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["remove_abandoned", "replacing", "replacing_path", "write_json", "write_text"]

ABANDONED = 3600.0  # seconds without a write, after which a temporary file is one of a process that was killed


def remove_abandoned(path: Path) -> None:
    """Remove temporary files and folders, made by `tempfile` for `path`, whose processes were killed before they could."""
    oldest = time.time() - ABANDONED
    for left in path.parent.glob(f".{glob.escape(path.name)}-????????{glob.escape(path.suffix)}"):
        with suppress(OSError):  # another process removed it
            if max(part.stat().st_mtime for part in (left, *left.glob("**/*"))) < oldest:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def replacing_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """As `replacing`, for libraries that write to a path of their own."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)  # mkstemp creates private files
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """A temporary file in the folder of `path` that is renamed to it when the block ends, and removed when it fails.

    Readers see the old file or the new one, never a part. `mode` is "w" (UTF-8) or "wb".
    """
    options: dict[str, Any] = {} if "b" in mode else {"newline": "", "encoding": "utf-8"}
    with replacing_path(path) as temporary, open(temporary, mode, **options) as file:
        yield file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Indented JSON; NaN and infinities as Python writes them, values JSON does not know as strings."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")
