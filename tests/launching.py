"""Commands of the project for tests, in this process and in processes of their own."""

from __future__ import annotations

import io
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)  # what training in this process sets


class Done(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def call(main: Callable[[list[str]], int], *words: object) -> Done:
    """Run a command's function in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())


def free_port() -> str:
    """A port without a listener, below those that the system gives to connections, so that tests
    hardly ever draw the same."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return str(port)


def environment(**more: str) -> dict[str, str]:
    """Variables for a process on the CPU with one thread, in no process group."""
    settings = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | more
    return {name: value for name, value in settings.items() if name not in RANKS}


def command(
    words: list[str], *, timeout: int = 240, folder: str | Path | None = None, **more: str
) -> str:
    """Run a command, which must succeed, in `folder`; returns its standard output. `more`:
    environment variables."""
    done = subprocess.run(
        words, env=environment(**more), cwd=folder, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def deepspeed_launcher(ranks: int = 2) -> list[str]:
    return [
        str(Path(sys.executable).with_name("deepspeed")),
        "--num_gpus",
        str(ranks),
        "--master_port",
        free_port(),
    ]
