"""Order, ranks and workers of data whose samples can be had by number: batches of rows, resumable to the sample.

A row is a dict of tensors: "tokens" and "segments", int64 (L+1,), perhaps "weights", float32 (L+1,), and whatever else
the dataset says of it. Text packs documents into such rows, DNA cuts windows of a genome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["RowLoader", "Rows", "collate"]

Row = dict[str, torch.Tensor]


class Rows(Protocol):
    """A dataset for a RowLoader. With `__getitems__(numbers)`, as torch knows it, it is asked for many rows at once."""

    size: int | None  # samples there are; None for endless

    def __getitem__(self, index: int, /) -> Row: ...

    def identity(self) -> dict[str, Any]:
        """Everything that decides what sample n is: plain JSON values, kept in saved states. "kind" names the dataset's."""
        ...

    def padding_row(self) -> Row:
        """A row that has no target, with the keys of every row."""
        ...


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Rows to a batch: each tensor stacked, (B, …). "weights" are 1 in rows that have none, if another row has them."""
    if any("weights" in row for row in rows):
        rows = [row if "weights" in row else row | {"weights": torch.ones(len(row["tokens"]))} for row in rows]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class _PaddedRows(Dataset):
    """A finite dataset that answers with padding beyond its end, so that all ranks get equally many batches."""

    def __init__(self, dataset: Rows) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        size = self.dataset.size
        inside = [index for index in indices if size is None or index < size]
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(inside) if inside else []
        else:
            rows = [self.dataset[index] for index in inside]
        return rows + [self.dataset.padding_row() for _ in range(len(indices) - len(inside))]


class RowLoader:
    """Batches of a dataset's rows for one rank, resumable to the sample.

    Micro-batch k of rank r holds samples start + (k·B + b)·world + r, b < B. So any step's global batch is one run of
    consecutive samples, whatever the world size, the micro-batch and the number of workers; those may change between
    saving and resuming. A finite dataset is padded with rows that have no target until all ranks have equally many
    batches.

    `state_dict()` counts batches handed out, not those that workers have fetched ahead. It is the same on all ranks.
    """

    def __init__(self, dataset: Rows, micro_batch: int, *, rank: int = 0, world: int = 1, num_workers: int = 0) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch {micro_batch} must be at least 1")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        self.dataset, self.micro_batch, self.rank, self.world = dataset, micro_batch, rank, world
        self.num_workers = num_workers
        self.next_sample = 0

    @property
    def report(self) -> str:
        """What the dataset converted or left out; empty where there is nothing to say."""
        return str(getattr(self.dataset, "report", ""))

    def __len__(self) -> int:
        """Batches of a finite dataset, counted from its start. TypeError for an endless one."""
        if self.dataset.size is None:
            raise TypeError("the loader of an endless dataset has no length")
        return -(-self.dataset.size // (self.micro_batch * self.world))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from `next_sample` on. A finite dataset starts over when it is iterated again after its end."""
        size = self.dataset.size
        if size is not None and self.next_sample >= size:
            self.next_sample = 0
        loader = DataLoader(
            _PaddedRows(self.dataset),
            batch_sampler=self._indices(self.next_sample),
            num_workers=self.num_workers,
            collate_fn=collate,
        )
        for batch in loader:
            self.next_sample += self.micro_batch * self.world
            yield batch

    def _indices(self, start: int) -> Iterator[list[int]]:
        step = self.micro_batch * self.world
        while self.dataset.size is None or start < self.dataset.size:
            yield list(range(start + self.rank, start + step, self.world))
            start += step

    def state_dict(self) -> dict[str, Any]:
        """The next global sample and what makes its number meaningful; plain JSON values."""
        return {**self.dataset.identity(), "next_sample": self.next_sample}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Other data or another setting of it (`Rows.identity`) is a ValueError."""
        for key, mine in self.dataset.identity().items():
            if state.get(key) != mine:
                raise ValueError(f"data state has {key}={state.get(key)!r}, this loader {mine!r}: samples would differ")
        self.next_sample = int(state["next_sample"])
