"""Order, ranks and workers of data whose samples can be had by number: batches of rows, resumable to the sample.

`permuted` is an order of N samples that takes no memory, for data with too many of them to lay one out.

A row is a dict of tensors: "tokens" and "segments", int64 (L+1,), perhaps "weights", float32 (L+1,), and whatever else
the dataset says of it, its integers int64. Text packs documents into such rows, DNA cuts windows of a genome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["RowLoader", "Rows", "collate", "hash64", "permuted"]

Row = dict[str, torch.Tensor]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4


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


def _sent(rows: list[Row]) -> dict[str, np.ndarray]:
    """`collate` in a worker, as arrays with integers in the narrowest type that holds them.

    torch would move each tensor into a shared memory of its own, which costs several times what a batch of short rows takes
    to make; arrays go through a pipe, so that few bytes count.
    """
    return {name: _narrowed(tensor.numpy()) for name, tensor in collate(rows).items()}


def _narrowed(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.int64:
        return array
    low, high = array.min(), array.max()
    fits = (kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return array.astype(next(fits, np.int64), copy=False)


def _received(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """What `_sent` was given, in this process."""
    return {name: torch.tensor(a, dtype=torch.int64 if a.dtype.kind == "i" else None) for name, a in batch.items()}


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
            collate_fn=_sent if self.num_workers else collate,
        )
        for batch in loader:
            self.next_sample += self.micro_batch * self.world
            yield _received(batch) if self.num_workers else batch

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


def hash64(*words: int | np.ndarray) -> np.ndarray:
    """64 random-looking bits (N,) of integers, some of them arrays (N,): splitmix64's finalizer after each word."""
    state = np.zeros(1, np.uint64)  # arrays, because numpy warns when scalars overflow, as they are meant to here
    for word in words:
        bits = word.astype(np.uint64) if isinstance(word, np.ndarray) else np.array([word % 2**64], np.uint64)
        state = (state ^ bits) + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permuted(index: np.ndarray, size: int, *key: int | np.ndarray) -> np.ndarray:
    """Where a random permutation of 0..size−1 puts each index: (N,) int64 -> (N,) int64, in O(1) memory.

    A Feistel network permutes the next even power of two; what falls outside goes through it again (cycle walking),
    four times on average at worst. `key` chooses the permutation; its words may be arrays (N,).
    """
    half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.broadcast_to(hash64(*key, round_), index.shape) for round_ in range(_ROUNDS)]
    found = index.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (hash64(round_key[outside] ^ right) & mask)
        found[outside] = (left << half) | right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)
