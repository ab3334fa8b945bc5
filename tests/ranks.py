"""Several CPU ranks for tests: processes that stay, forked from a server that imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

from tests.launching import free_port

PRELOAD = ["deepspeed", "matplotlib.pyplot", "modalities.text", "recipes.train", "torch._inductor.compile_fx"]
PATIENCE = 60  # seconds that a call may take


class Ranks:
    """`ranks(function, *arguments)` calls a function of a module in every rank; returns their results."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
        self.ends, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, address, str(rank)), daemon=True)
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
    os.environ |= {**address, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    import torch

    from recipes.engine import start

    torch.set_num_threads(1)
    start()
    while True:
        function, arguments = end.recv()
        try:
            end.send((function(*arguments), None))
        except BaseException:  # raised in the test's process
            end.send((None, traceback.format_exc()))
