"""A lock on a run folder: one process writes in it at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

from recipes.commands import ConfigError, warn
from recipes.run_folder import utc_now
from zoo.files import make_folder, read_object


class RunLock:
    """An exclusive lock on `<run>/run.lock`, which says who writes.

    It is held until `release` or the end of the process. A file system without locks is reported.
    ConfigError where another process holds the lock.
    """

    def __init__(self, folder: Path):
        path = folder / "run.lock"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(
                f"{path} is a link or no regular file, and is not followed: remove it"
            )
        make_folder(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file: int | None = os.open(path, flags, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"{folder} is in use: {_holder(path)}, trains in it; wait for it or stop it"
            ) from None
        except OSError as error:
            warn(
                f"note: {folder} is on a file system without locks ({error}): "
                "start no other process in it"
            )
        # A data worker must not keep the lock alive.
        os.register_at_fork(after_in_child=self.release)
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, (json.dumps(facts) + "\n").encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _holder(path: Path) -> str:
    """Who holds a lock, by its file."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts = read_object(path)
        return f"process {facts['pid']} on {facts['host']}, started {facts['started']}"
    return "another process"
