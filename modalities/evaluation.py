"""What every evaluator shares: its settings, its cells, and the store that lets an interrupted run go on.

An evaluator is a set of *cells* (one length and depth, one stretch of text, one task), each computed on its own and
deterministic given the settings, so that a run stopped at any moment loses one cell at most. In the manner of
big_vision an evaluator yields ``(name, value)`` pairs; unlike there, a value is a small dictionary of numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

CellValue = dict[str, Any]  # numbers, or lists of numbers: whatever JSON carries


@dataclass(frozen=True)
class EvalSettings:
    """How to measure. Every field here either enters ``Evaluator.identity`` or cannot change a number.

    Args:
        lengths: sequence lengths in tokens, ascending once built; None takes 1, 2, ... 32 times the training length.
        samples: how many samples in each cell; None takes the evaluator's own default.
        seed: everything drawn at random follows from it.
        source: where held-out text comes from, in the words of ``open_source``.
        batch_tokens: most tokens in one forward pass; the batch size is this over the length, at least 1.
    """

    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    seed: int = 42
    source: str | None = None
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.lengths is not None:
            bad = [length for length in self.lengths if length < 2]
            if bad or not self.lengths:
                raise ValueError(f"lengths must be token counts of at least 2, got {list(self.lengths)}")
            object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {self.batch_tokens}")

    def resolved_lengths(self, train_context: int) -> tuple[int, ...]:
        return self.lengths or tuple(train_context * 2**k for k in range(6))

    def batch_size(self, length: int) -> int:
        return max(1, self.batch_tokens // length)


@dataclass(frozen=True)
class Cell:
    """One unit of work: ``name`` keys its result, ``cost`` (tokens to read) drives the progress bar."""

    name: str
    cost: int
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ModelResult:
    """All that one evaluator found about one model: what tables, files and figures are made from."""

    label: str
    train_context: int
    rows: list[dict[str, Any]]
    cells: dict[str, CellValue]
    method: str = ""  # "ggd_ssmax": gives the model its colour
    weights: str = ""
    seconds: float = 0.0


class Evaluator(ABC):
    """Base of all evaluators. A modality lists its own in ``modalities.<modality>.evals.EVALUATORS``."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line, for --help and error texts
    version: ClassVar[int] = 1  # raised when prompts or scoring change, so that cells of before are not reused
    headline: ClassVar[tuple[str, ...]]  # the columns of a row that a person looks at first

    @abstractmethod
    def identity(self, model: nn.Module, settings: EvalSettings) -> dict[str, Any]:
        """The settings that change a cell's number (lengths only where cells of one length depend on the others)."""

    @abstractmethod
    def cells(self, model: nn.Module, settings: EvalSettings) -> list[Cell]:
        """Every cell, in order, with its samples made. Raises ValueError for what cannot be measured."""

    @abstractmethod
    def measure(self, model: nn.Module, cell: Cell, settings: EvalSettings) -> CellValue:
        """The numbers of one cell."""

    @abstractmethod
    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """Cells gathered into table rows: what is printed and written as CSV."""

    @abstractmethod
    def draw(self, results: list[ModelResult], path: Path) -> None:
        """All models in one figure, written to ``path``."""

    def run(
        self, model: nn.Module, settings: EvalSettings, *, finished: Mapping[str, CellValue] | None = None
    ) -> Iterator[tuple[str, CellValue]]:
        """Yield ``(cell name, value)`` for every cell, in order; those in ``finished`` are handed on, not computed."""
        finished = finished or {}
        for cell in self.cells(model, settings):
            value = finished.get(cell.name)
            yield cell.name, self.measure(model, cell, settings) if value is None else value


class CellStore:
    """Finished cells of one (evaluator, model, weights, settings) in one JSON file, replaced atomically.

    The file name carries a hash of the whole key and the file the key itself; a file whose key differs is refused
    rather than reused, so a hash collision or an edited file cannot pass old numbers for new ones.
    """

    def __init__(self, folder: Path, key: dict[str, Any]):
        self.key = json.loads(json.dumps(key, sort_keys=True))  # what it will look like when read back
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = Path(folder) / f"{key['evaluator']}-{_file_safe(key['model'])}-{digest}.json"
        self.finished: dict[str, CellValue] = {}
        if self.path.exists():
            try:
                stored = json.loads(self.path.read_text())
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.path} is not valid JSON ({error}); delete it to measure again") from error
            if stored.get("key") != self.key:
                raise ValueError(f"{self.path} belongs to other settings; delete it to measure again")
            self.finished = stored["cells"]

    def add(self, name: str, value: CellValue) -> None:
        self.finished[name] = value
        write_json(self.path, {"key": self.key, "cells": self.finished})


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary neighbour, then rename: a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes private files; results are for reading
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def weights_hash(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def batches(count: int, size: int) -> Iterable[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _file_safe(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
