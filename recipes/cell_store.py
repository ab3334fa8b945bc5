"""Finished cells of an evaluation in a file, keyed by all that their numbers depend on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import zlib
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import IO

import torch
from torch import nn

from modalities.results import CellValue, Row, file_safe
from zoo.model import ZooModel


class CellStore:
    """Finished cells of one (evaluator, model, weights, settings) in a file of JSON lines: the key,
    then a cell a line.

    A stopped run continues from it, and processes may share it: each appends under an exclusive
    `flock` and first takes over what others appended. On file systems without locks among machines
    give each machine its folder. A line that a stopped process cut off is removed by the next one
    that appends.

    Attributes:
        finished: the cells by name. `add` updates it, also by those of other processes.
        damaged: numbers of the lines, from 1, that are not a cell or whose checksum differs; those
            cells are not in `finished`.

    Raises:
        ValueError: for a file that belongs to other settings, or whose key is damaged.
    """

    def __init__(self, folder: Path, key: dict[str, object]):
        # As it is when read back.
        self.key = json.loads(json.dumps(key, sort_keys=True))
        content = json.dumps(self.key, sort_keys=True).encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        self.path = folder / f"{key['evaluator']}-{file_safe(str(key['model']))}-{digest}.jsonl"
        self.finished: dict[str, CellValue] = {}
        self.damaged: list[int] = []
        # Of the whole lines read so far.
        self._bytes = 0
        self._lines = 0
        if self.path.exists():
            with open(self.path, "rb") as file:
                self._read(file)

    def add(self, name: str, value: CellValue) -> CellValue:
        """Store a cell. Returns its stored value: another process's where that was first.

        Raises:
            OSError: where the file cannot be locked or written; it is left as it was.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read(file)
            if name not in self.finished:
                self._append(file, {"cell": name, "value": value, "crc": _crc(name, value)})
                self._read(file)
        return self.finished[name]

    def _append(self, file: FileIO, cell: Row) -> None:
        """Append a cell, and remove an incomplete last line before it."""
        records = [cell]
        if self._bytes == 0:
            # A new file begins with its key.
            records.insert(0, {"key": self.key})
        text = "".join(json.dumps(record) + "\n" for record in records).encode()
        file.truncate(self._bytes)
        if file.write(text) != len(text):
            file.truncate(self._bytes)
            raise OSError(f"{self.path} cannot be written: is the disk full?")

    def _read(self, file: IO[bytes]) -> None:
        """Take over the whole lines that follow what was read before."""
        file.seek(self._bytes)
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._take(line)
            self._bytes += len(line)
            self._lines += 1

    def _take(self, line: bytes) -> None:
        """Take over a whole line: the key where it is the first one, else a cell."""
        try:
            record = json.loads(line)
            if self._lines == 0:
                if record["key"] != self.key:
                    raise ValueError("it has other settings")
                return
            name = record["cell"]
            value = record["value"]
            # Cells of version 0.5 have no checksum.
            if record.get("crc", "") not in ("", _crc(name, value)):
                raise ValueError("its checksum differs")
            self.finished.setdefault(name, value)
        except (ValueError, KeyError, TypeError) as error:
            if self._lines == 0:
                raise ValueError(
                    f"{self.path} line 1 is not this measurement's key ({error}); "
                    "delete the file to measure again"
                ) from error
            self.damaged.append(self._lines + 1)


def _crc(name: str, value: CellValue) -> str:
    content = json.dumps([name, value], sort_keys=True).encode()
    return f"{zlib.crc32(content):08x}"


def weights_hash(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer that is saved: name, dtype, shape and bytes."""
    return _tensors_digest(model.state_dict()).hexdigest()[:16]


def outside_hash(model: nn.Module) -> str | None:
    """16 hex digits over what a model of another library computes with besides its weights.

    These are configurations, modules, and buffers that are not saved, such as RoPE's frequencies.
    None for the zoo's models, whose own configuration says all.
    """
    if isinstance(model, ZooModel):
        return None
    saved = model.state_dict().keys()
    unsaved = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
    digest = _tensors_digest(unsaved)
    # By identity: modules share configurations.
    configs = {}
    for module in model.modules():
        for name in ("config", "pretrained_cfg"):
            if hasattr(module, name):
                config = getattr(module, name)
                configs[id(config)] = config
    texts = [str(model), *map(str, configs.values())]
    digest.update("".join(texts).encode())
    return digest.hexdigest()[:16]


def _tensors_digest(tensors: Mapping[str, torch.Tensor]) -> hashlib._Hash:
    """A digest of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest
