"""Python's commands in forks of a process that has imported other people's packages, which takes long, and none of ours.

    python tests/forked.py

A line of JSON asks for one: its "words" behind `python`, "folder", "environment", "seconds" at most, how many "ranks", and the
files "out" and "err". The exit status is the answer, the largest of the ranks'.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn

PRELOAD = (
    "deepspeed",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "matplotlib.pyplot",
    "safetensors.torch",
    "typer",
    "rich.table",
)


def main() -> None:
    paths = sys.path[1:]  # without this folder
    for name in PRELOAD:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        children = []
        for rank in range(asked["ranks"]):
            if not (child := os.fork()):
                if asked["ranks"] > 1:
                    asked["environment"] |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                run(asked, paths)
            children.append(child)
        print(max((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), key=abs), flush=True)


def run(asked: dict[str, Any], paths: list[str]) -> NoReturn:
    """As `python WORDS…` would, in this process; SIGALRM ends it where it takes longer than `seconds`."""
    signal.alarm(asked["seconds"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    first, *words = asked["words"]
    extra = asked["environment"].get("PYTHONPATH", "")
    where = "" if first == "-c" else os.getcwd() if first == "-m" else os.path.dirname(os.path.abspath(first))
    sys.path[:] = [where, *(extra.split(os.pathsep) if extra else []), *paths]
    code = 0
    try:
        if first == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *words]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # Python would print it too
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
