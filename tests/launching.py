"""Commands of the project in processes of their own, for tests."""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what training in this process sets


def free_port() -> str:
    """A port that nobody listens at, drawn below those that the system gives to connections, so that tests which run at the
    same time hardly ever draw the same."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return str(port)


def command(
    words: list[str], *, ranks: int = 1, timeout: int = 240, folder: str | Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on the CPU with one thread, in `folder`; returns the finished process. Python's scripts, modules and code
    start in a fork that has the packages they import (tests/forked.py), or in one for each of several `ranks`."""
    settings = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | environment
    for name in RANKS:
        settings.pop(name, None)
    if ranks > 1:
        settings |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if words[0] != sys.executable:
        return subprocess.run(words, env=settings, cwd=folder, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        asked = {"words": words[1:], "folder": str(folder or Path.cwd()), "environment": settings, "seconds": timeout}
        asked |= {"ranks": ranks}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(asked | {"out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(p.read_text() if p.exists() else "" for p in (out, err)))


@functools.cache
def _server() -> subprocess.Popen[str]:
    settings = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    for name in RANKS:
        settings.pop(name, None)
    program = [sys.executable, str(ROOT / "tests" / "forked.py")]
    return subprocess.Popen(program, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def deepspeed_launcher(ranks: int = 2) -> list[str]:
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [program, "--num_gpus", str(ranks), "--master_port", free_port()]


def torchrun_launcher(ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, "--master-port", free_port()]
