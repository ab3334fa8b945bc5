"""What evaluations keep on disk: finished cells, and files that are there whole or not at all."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

CellValue = dict[str, Any]  # numbers, or lists of numbers: whatever JSON carries


class CellStore:
    """Finished cells of one (evaluator, model, weights, settings) in a file of JSON lines: the key, then a cell a line.

    A cell is appended, so that the cost of storing one does not grow with those before it; of a run that was stopped, a
    last line that is not whole is cut off. The file name carries a hash of the whole key and the file the key itself; a
    file whose key differs is refused rather than reused, so a hash collision or an edited file cannot pass old numbers for
    new ones.

    Raises:
        ValueError: for a file that is damaged, or belongs to other settings.
    """

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.key = json.loads(json.dumps(key, sort_keys=True))  # what it will look like when read back
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = Path(folder) / f"{key['evaluator']}-{file_safe(key['model'])}-{digest}.jsonl"
        self.finished: dict[str, CellValue] = {}
        self._opened = False  # for writing
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    if "key" in entry or number == 1:
                        if entry["key"] != self.key:
                            raise ValueError(f"{self.path} belongs to other settings; delete it to measure again")
                    else:
                        self.finished[entry["cell"]] = entry["value"]
                except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{self.path} line {number} is no stored cell ({error}); delete the file to measure again"
                    ) from error

    def add(self, name: str, value: CellValue) -> None:
        lines = [json.dumps({"cell": name, "value": value}, allow_nan=True)]
        if not self._opened:
            self._opened = True
            if not _cut_to_whole_lines(self.path):
                lines.insert(0, json.dumps({"key": self.key}))
        with open(self.path, "ab") as file:
            file.write("".join(line + "\n" for line in lines).encode())
        self.finished[name] = value


def _cut_to_whole_lines(path: Path) -> bool:
    """Make a file that may not be there end where a line does. Whether anything is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        whole = file.tell()
        while whole:
            start = max(0, whole - (1 << 16))
            file.seek(start)
            ends = file.read(whole - start).rfind(b"\n") + 1
            whole = start + ends
            if ends:
                break
        file.truncate(whole)
    return whole > 0


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=True) + "\n")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], *, delimiter: str = ",") -> None:
    """Rows under a header of all their columns, in the order in which they appear; lists are left out."""
    columns = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list))
    with replacing(path) as file:
        table = csv.DictWriter(file, list(columns), delimiter=delimiter, lineterminator="\n", extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file beside ``path`` that takes its place when all is written: a reader sees the old one or the new one, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, mode, **({} if "b" in mode else {"newline": "", "encoding": "utf-8"})) as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp makes private files; results are for reading
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def new_folder(folder: Path, mark: str) -> Iterator[Path]:
    """A temporary neighbour to fill, which then takes the name ``folder`` in one step, or is gone.

    Where another process was first, and its folder holds the file ``mark``, that one stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's 0700 would lock out a shared cache
        try:
            os.rename(temporary, folder)  # atomic; fails when another process was first
        except OSError:
            if not (folder / mark).is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def weights_hash(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def file_safe(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
