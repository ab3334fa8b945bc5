"""Processes for tests, forked from a server that imported what they need: calls, and several CPU
ranks that stay."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.launching import ROOT, free_port

PRELOAD = [
    "deepspeed",
    "matplotlib.pyplot",
    "modalities.text.hf",
    "recipes.train",
    "torch._inductor.compile_fx",
]
PRELOAD += [
    "peft",
    "priorzoo.__main__",
    "recipes.evaluate",
    "timm.data",
]  # without registrations that guides show
PATIENCE = 60  # seconds that a call may take
SERVER = multiprocessing.get_context("forkserver")


def forked(
    function: Callable[..., object], *arguments: Any, folder: Path, timeout: int = 240
) -> str:
    """Call a function of a module in a new process in `folder`, offline; returns what it printed if
    it failed."""
    SERVER.set_forkserver_preload(PRELOAD)
    log = folder.with_name(folder.name + ".log")
    process = SERVER.Process(target=_call, args=(function, arguments, folder, log))
    process.start()
    process.join(timeout)
    if process.exitcode == 0:
        return ""
    process.kill()
    return f"exit code {process.exitcode}: {log.read_text()[-5000:]}"


def _call(
    function: Callable[..., object], arguments: tuple[Any, ...], folder: Path, log: Path
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.path.insert(0, "")
    os.environ |= {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    function(*arguments)


class Ranks:
    """`ranks(function, *arguments)` calls a function of a module in every rank; returns their
    results."""

    def __init__(self, world: int) -> None:
        SERVER.set_forkserver_preload(PRELOAD)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
        self.ends = []
        self.processes = []
        for rank in range(world):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_serve, args=(theirs, address, str(rank)), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for end in self.ends:
            end.send((function, arguments))
        answers = []
        for rank, end in enumerate(self.ends):
            assert end.poll(PATIENCE), f"rank {rank} has not answered for {PATIENCE} s"
            answers.append(end.recv())
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"rank {rank}: {error}"
        return [value for value, _ in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(end: Connection, address: dict[str, str], rank: str) -> None:
    """Join the process group, then answer calls until the process is killed."""
    os.environ |= {
        **address,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    import torch

    from recipes.ranks import start

    torch.set_num_threads(1)
    start()
    while True:
        function, arguments = end.recv()
        try:
            end.send((function(*arguments), None))
        except BaseException:  # raised in the test's process
            end.send((None, traceback.format_exc()))
