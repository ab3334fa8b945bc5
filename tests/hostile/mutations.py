"""Seeded damage to files, and running a reader over it in a child process that may die."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
from collections import Counter

EDGES = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\n",
    b">",
    b"\x80",
    b"9" * 20,
)
VALUES = (
    None,
    True,
    -1,
    0,
    10**6,
    10**18,
    10**400,
    0.5,
    -1e308,
    float("nan"),
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    {"x": 1},
    "9" * 50,
)
MEMORY = 4 << 30  # bytes of address space that a child may take beyond what it has
SECONDS = 20  # for one file


def damaged(data: bytes, seed: str) -> bytes:
    """`data` with one to four changes: bytes flipped, cut out, doubled, put in, moved, or the end cut off."""
    rng = random.Random(seed)
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, size = rng.randrange(len(found) + 1), rng.choice((1, 1, 2, 4, 16, 512))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = found[at : at + size]
        elif kind == 3:
            edge = rng.choice(EDGES)
            found[at : at + rng.choice((0, len(edge)))] = edge
        elif kind == 4:
            place = rng.randrange(len(found) + 1)
            found[place : place + size] = found[at : at + size]
        else:
            del found[rng.choice((at, -size)) :]
    return bytes(found)


def damaged_json(data: bytes, seed: str) -> bytes:
    """As `damaged`, or, every second time, with another value at a random place."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return damaged(data, seed)
    tree = copy.deepcopy(json.loads(data))
    for _ in range(rng.choice((1, 1, 2))):
        place = tree
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            if rng.random() < 0.2 and isinstance(place, dict):
                place[rng.choice(("x", key))] = place.pop(key)
            else:
                place[key] = copy.deepcopy(rng.choice(VALUES))
            break
    return json.dumps(tree).encode()


def outcome(read, file, number, allowed):
    """Whether `read(file)` succeeded or was refused. Raises AssertionError for another error; it names the number."""
    try:
        read(file)
    except allowed as error:
        assert str(error).strip(), f"number {number}: {type(error).__name__} without words"
        return Counter(refused=1)
    except Exception as error:
        raise AssertionError(f"number {number}: {type(error).__name__}: {error}") from error
    return Counter(read=1)


def in_child(numbers, trial, path):
    """The sum of `trial(number)`, in a child of limited memory and time; what kills the child is an AssertionError.

    The child writes the number it is at to `path`.
    """
    child = os.fork()
    if not child:
        _run_child(numbers, trial, path)
    status = os.waitpid(child, 0)[1]
    last = path.read_text(encoding="utf-8")
    assert not os.WIFSIGNALED(status), f"number {last}: signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 0, last
    return Counter(json.loads(last))


def _run_child(numbers, trial, path):
    status = 1
    try:
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        found = Counter()
        with open(path, "w", encoding="utf-8") as file:
            for number in numbers:
                file.seek(0)
                file.write(str(number))
                file.truncate()
                file.flush()
                signal.alarm(SECONDS)
                try:
                    found += trial(number)
                except AssertionError as error:
                    file.seek(0)
                    file.write(str(error))
                    file.truncate()
                    return
                finally:
                    signal.alarm(0)
            file.seek(0)
            file.write(json.dumps(found))
            file.truncate()
        status = 0
    finally:
        os._exit(status)
