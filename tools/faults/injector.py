"""Processes in which the n-th file operation below a folder kills them or fails: a preloaded library, and a server that forks.

The server has imported what trials need, so that each of many begins in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from modalities.native import compile_library

SOURCE = Path(__file__).with_name("inject.c")
KINDS = ("count", "kill", "half", "no space", "fail once")  # as inject.c numbers them


@dataclass(frozen=True)
class Fault:
    """The `at`-th file operation below `folder`, from 0, is of this kind."""

    folder: Path
    kind: str = "count"
    at: int = -1


@contextmanager
def server(folder: Path, imports: list[str]) -> Iterator[Server]:
    """A server of trials; the library is compiled into `folder`."""
    library = folder / "inject.so"
    compile_library(SOURCE, library, "-ldl")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(imports)
    changed = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    _forkserver._stop()  # a process has one: a server that runs already, of other tests, was begun without the library
    try:
        yield Server(context, folder)
    finally:
        _forkserver._stop()  # nor are others' processes to have it
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@dataclass
class Server:
    context: Any
    folder: Path
    trials: int = 0

    def start(self, call: Callable[..., Any], *arguments: Any, fault: Fault | None = None, **environment: str) -> Trial:
        """Call a function of a module in a process of its own; its return value, an int, is the exit code."""
        self.trials += 1
        output = self.folder / f"trial{self.trials}.txt"
        process = self.context.Process(target=_run, args=(call, arguments, fault, environment, output))
        process.start()
        return Trial(process, output)

    def run(self, call: Callable[..., Any], *arguments: Any, fault: Fault | None = None, **environment: str) -> Trial:
        return self.start(call, *arguments, fault=fault, **environment).wait()


@dataclass
class Trial:
    """A process; `code` is negative where a signal killed it."""

    process: BaseProcess
    output: Path
    hung: bool = False

    def wait(self, seconds: float = 120.0) -> Trial:
        """Until it ends; killed where that takes longer."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.hung = True
            self.process.kill()
            self.process.join()
        return self

    @property
    def code(self) -> int:
        assert self.process.exitcode is not None
        return self.process.exitcode

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    @property
    def operations(self) -> int:
        """How many file operations a process with a fault of kind "count" did."""
        return int(self.said.rpartition("file operations: ")[2])


def _run(
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    fault: Fault | None,
    environment: Mapping[str, str],
    output: Path,
) -> None:
    os.environ.update(environment)
    with contextlib.suppress(OSError):
        os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    library = ctypes.CDLL(None)
    if fault is not None:
        library.fault_arm(os.fsencode(fault.folder), KINDS.index(fault.kind), ctypes.c_long(fault.at))
    code = call(*arguments)
    if fault is not None and fault.kind == "count":
        library.fault_operations.restype = ctypes.c_long
        print("file operations:", library.fault_operations())
    sys.stdout.flush()
    os._exit(code)
