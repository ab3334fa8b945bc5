"""Finished cells of evaluations on disk, so that a run that was stopped continues where it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modalities.evaluation import CellValue
from modalities.files import file_safe

__all__ = ["CellStore", "weights_hash"]


class CellStore:
    """Finished cells of one (evaluator, model, weights, settings) in a file of JSON lines: the key, then a cell a line.

    A cell is appended, so the cost of storing one does not grow with those before it; an incomplete last line, of a run that
    was stopped, is cut off. The file name has a hash of the whole key and the file the key itself; a file whose key differs
    is refused, so a hash collision or an edited file cannot pass old numbers for new ones.

    Raises:
        ValueError: for a file that is damaged, or belongs to other settings.
    """

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.key = json.loads(json.dumps(key, sort_keys=True))  # as it is when read back
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
                        f"{self.path} line {number} is not a stored cell ({error}); delete the file to measure again"
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


def weights_hash(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
