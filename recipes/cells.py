"""Finished cells of evaluations on disk, so that a run that was stopped continues where it was, and runs at once share them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from pathlib import Path

import torch
from torch import nn

from modalities.evaluation import CellValue
from modalities.files import file_safe


class CellStore:
    """Finished cells of one (evaluator, model, weights, settings) in a file of JSON lines: the key, then a cell a line.

    Processes may share a file: each appends under an exclusive `flock` and first takes over what others appended. The lock
    holds among processes of a machine on every local file system; among machines on NFS where the server keeps locks (not
    with `nolock` or `local_lock`) and on Lustre and GPFS where mounted with `flock`; elsewhere give each machine its folder.

    A line that a stopped process cut off is removed by the next one that appends. The file name has a hash of the whole key
    and the file the key itself; a file whose key differs is refused.

    Attributes:
        finished: the cells by name. `add` updates it, also by those of other processes.
        damaged: numbers of the lines, from 1, that are not a cell; those cells are not in `finished`.

    Raises:
        ValueError: for a file that belongs to other settings, or whose key is damaged.
    """

    def __init__(self, folder: Path, key: dict[str, object]):
        self.key = json.loads(json.dumps(key, sort_keys=True))  # as it is when read back
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{key['evaluator']}-{file_safe(str(key['model']))}-{digest}.jsonl"
        self.finished: dict[str, CellValue] = {}
        self.damaged: list[int] = []
        self._bytes = self._lines = 0  # read so far, or written
        if self.path.exists():
            self._read()

    def add(self, name: str, value: CellValue) -> CellValue:
        """Store a cell. Returns its stored value: another process's where that was first.

        Raises:
            OSError: where the file cannot be locked or written; it is left as it was.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size != self._bytes:
                self._read()
                file.truncate(self._bytes)  # an incomplete last line
            if name not in self.finished:
                lines = [{"key": self.key}] * (self._bytes == 0) + [{"cell": name, "value": value}]
                self._append(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
                self._lines += len(lines)
                self.finished[name] = value
        return self.finished[name]

    def _append(self, file: io.FileIO, text: bytes) -> None:
        """Write all of `text`, or nothing."""
        try:
            left = memoryview(text)
            while left:
                left = left[file.write(left) :]
        except BaseException:
            file.truncate(self._bytes)
            raise
        self._bytes += len(text)

    def _read(self) -> None:
        """Take over the whole lines that follow what was read before."""
        with open(self.path, "rb") as file:
            if file.seek(0, io.SEEK_END) < self._bytes:  # another file than before
                self._bytes = self._lines = 0
            file.seek(self._bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._take(line)
                self._bytes += len(line)
                self._lines += 1

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if self._lines:
                self.finished[entry["cell"]] = entry["value"]
            elif entry["key"] != self.key:
                raise ValueError("it has other settings")
        except (ValueError, KeyError, TypeError) as error:
            if not self._lines:
                raise ValueError(
                    f"{self.path} line 1 is not this measurement's key ({error}); delete the file to measure again"
                ) from error
            self.damaged.append(self._lines + 1)


def weights_hash(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
