"""Scripts of the project in forks of a process that has imported other people's packages, which takes long, and none of ours.

    python tests/forked.py

A line of JSON asks for a script: "words", "folder", "environment", "seconds" at most, and the files "out" and "err". Its exit
status is the answer.
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
        child = os.fork()
        if not child:
            run(asked, paths)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(asked: dict[str, Any], paths: list[str]) -> NoReturn:
    """As `python SCRIPT WORDS…` would, in this process; SIGALRM ends it where it takes longer than `seconds`."""
    signal.alarm(asked["seconds"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    script, *_ = sys.argv = asked["words"]
    extra = asked["environment"].get("PYTHONPATH", "")
    sys.path[:] = [os.path.dirname(os.path.abspath(script)), *(extra.split(os.pathsep) if extra else []), *paths]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
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
