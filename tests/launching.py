"""Commands of the project in processes of their own, for tests."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
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


def command(words: list[str], *, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the CPU with one thread; returns the finished process."""
    settings = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} | environment
    for name in RANKS:
        settings.pop(name, None)
    return subprocess.run(words, env=settings, capture_output=True, text=True, timeout=timeout)


def deepspeed_launcher(ranks: int = 2) -> list[str]:
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [program, "--num_gpus", str(ranks), "--master_port", free_port()]


def torchrun_launcher(ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, "--master-port", free_port()]
