"""Two loaders for every modality: of samples with numbers (`IndexedLoader`) and of streams
(`StreamLoader`); held-out data.

Both loaders run in one process a rank, with `num_workers` worker processes each, and resume with
the next sample. Workers fetch ahead; a state counts batches yielded, so nothing is lost or
repeated. (The state of torchdata's StatefulDataLoader holds one entry per worker, so it cannot
resume with another number of workers or ranks.)
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from zoo.attention.masks import single_documents

Batch = dict[str, torch.Tensor]
# A batch as it comes from a worker.
Arrays = Mapping[str, torch.Tensor | np.ndarray]
# JSON values.
State = dict[str, Any]
# Conversions, skips and replacements of samples, for the loader's report.
Events = list[Any]
# Processes that fetch for one rank.
MOST_WORKERS = 1024
# 2^64 divided by the golden ratio: the increment of splitmix64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Of the Feistel network in `permuted`.
_ROUNDS = 4


class Source(Protocol):
    @property
    def report(self) -> object:
        """str() of it says what was converted or skipped; where batches come with events, it has
        `extend(events)`."""

    def identity(self) -> State:
        """Everything that decides what a sample is, kept in saved states.

        "kind" names the class of data.
        """


class Samples(Source, Protocol):
    """Samples with numbers, read a batch at a time."""

    # Samples of one pass; None where there is no end.
    size: int | None

    def __getitem__(self, numbers: list[int], /) -> tuple[Arrays, Events]:
        """The batch of these samples; numbers beyond `size` give entries without targets."""


class Stream(Source, Protocol):
    """Endless batches read in order, one independent sequence per (rank, worker)."""

    def batches(
        self, slot: int, slots: int, done: int, state: Any
    ) -> Iterator[tuple[Arrays, Events, Any]]:
        """(batch, events, state after it) of one of `slots` sequences, after its first `done`
        batches. state: that of the batch before, or None at the start; a stream that can seek may
        ignore it and give None."""


S = TypeVar("S", bound=Source)
Items = TypeVar("Items", covariant=True)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Heldout(Generic[Items]):
    """The part of a source that training excludes.

    name: in tables and files, such as "all of folder:photos".
    fingerprint: 16 hex digits, the key of stored cells.
    items: the data: documents, images, or a genome with its held-out regions.
    """

    name: str
    fingerprint: str
    items: Items


class EpochCache(Generic[Value]):
    """What `make(epoch)` gives, such as an epoch's order, cached for the last two epochs read:
    batches around the end of one read both."""

    def __init__(self, make: Callable[[int], Value]) -> None:
        self._make = make
        self._values: dict[int, Value] = {}

    def __getitem__(self, epoch: int) -> Value:
        if epoch not in self._values:
            if len(self._values) == 2:
                oldest = next(iter(self._values))
                del self._values[oldest]
            self._values[epoch] = self._make(epoch)
        return self._values[epoch]


def fingerprint_of(parts: Iterable[bytes]) -> str:
    """16 hex digits of SHA-256 over all parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


class _Loader(Generic[S]):
    """The share of a rank, the identity of its data, the report."""

    def __init__(
        self, source: S, micro_batch: int, *, rank: int = 0, world: int = 1, num_workers: int = 0
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch {micro_batch} must be at least 1")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        self.source = source
        self.micro_batch = micro_batch
        self.rank = rank
        self.world = world
        self.num_workers = num_workers

    @property
    def report(self) -> object:
        return self.source.report

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names by label, of a model that learns from the data; () where they have none."""
        return getattr(self.source, "class_names", ())

    def identity(self) -> State:
        return self.source.identity()

    def check_state(self, state: State) -> None:
        for key, value in self.identity().items():
            if state.get(key) != value:
                difference = f"{key}={state.get(key)!r}, the loader {value!r}"
                raise ValueError(f"data state has {difference}: samples would differ")

    def fetch(self, data: Any, numbers: Iterator[list[int]] | None = None) -> DataLoader:
        """What `data` gives, tuples from worker processes, without torch's conversion of arrays."""
        return DataLoader(
            data,
            batch_size=None,
            sampler=numbers,
            num_workers=self.num_workers,
            collate_fn=tuple,
        )

    def received(self, batch: Arrays, events: Events) -> Batch:
        if events:
            cast(Events, self.report).extend(events)
        return {name: torch.as_tensor(value) for name, value in batch.items()}


class IndexedLoader(_Loader[Samples]):
    """Batches of samples with numbers for one rank: micro-batch k of rank r holds samples
    start + (k·B + b)·world + r, b < B.

    So the global batch of any step is one run of consecutive samples, and the world size, the
    micro-batch and the number of workers may change between saving and resuming; the state is the
    same on all ranks. A finite pass ends with equally many batches on all ranks, and starts over
    when it is iterated again, but for the first time after a state was loaded.
    """

    def __init__(self, source: Samples, micro_batch: int, **share: int) -> None:
        super().__init__(source, micro_batch, **share)
        self.next_sample = 0
        self._loaded = False

    def __len__(self) -> int:
        """Batches of a pass. TypeError for endless samples."""
        if self.source.size is None:
            raise TypeError("the loader of an endless dataset has no length")
        return -(-self.source.size // (self.micro_batch * self.world))

    def __iter__(self) -> Iterator[Batch]:
        if self.source.size is not None and not self._loaded:
            self.next_sample = 0
        self._loaded = False
        for batch, events in self.fetch(self.source, self._numbers(self.next_sample)):
            self.next_sample += self.micro_batch * self.world
            yield self.received(batch, events)

    def _numbers(self, start: int) -> Iterator[list[int]]:
        step = self.micro_batch * self.world
        size = self.source.size
        starts = itertools.count(start, step) if size is None else range(start, size, step)
        for first in starts:
            yield list(range(first + self.rank, first + step, self.world))

    def state_dict(self) -> State:
        """The next global sample, and the identity of the samples."""
        return {**self.identity(), "next_sample": self.next_sample}

    def load_state_dict(self, state: State) -> None:
        self.check_state(state)
        self.next_sample = int(state["next_sample"])
        self._loaded = True


class StreamLoader(_Loader[Stream]):
    """Endless batches of a stream for one rank; worker w of W makes the rank's batches w, w + W, …

    The state fits the same number of ranks and workers and the same micro-batch. Where batches
    carry states of their own it is this rank's alone: every rank saves and loads its own.
    """

    def __init__(self, source: Stream, micro_batch: int, **share: int) -> None:
        super().__init__(source, micro_batch, **share)
        self.workers = max(1, self.num_workers)
        # How many were yielded.
        self.batches = 0
        # Of each worker's sequence after its last batch.
        self.states: State = {}

    def __iter__(self) -> Iterator[Batch]:
        for worker, batch, events, state in self.fetch(_StreamBatches(self)):
            if state is not None:
                self.states[str(worker)] = state
            self.batches += 1
            yield self.received(batch, events)

    def identity(self) -> State:
        return {
            **self.source.identity(),
            "world": self.world,
            "workers": self.workers,
            "micro_batch": self.micro_batch,
        }

    def state_dict(self) -> State:
        """Batches yielded, and per worker the state of its sequence where the stream has one."""
        state: State = {"batches": self.batches}
        if self.states:
            state["states"] = copy.deepcopy(self.states)
            state["rank"] = self.rank
        return state | self.identity()

    def load_state_dict(self, state: State) -> None:
        self.check_state(state)
        if state.get("rank", self.rank) != self.rank:
            difference = f"rank={state['rank']}, this loader {self.rank}"
            raise ValueError(f"data state has {difference}: samples would differ")
        self.batches = int(state["batches"])
        self.states = copy.deepcopy(state.get("states", {}))


class _StreamBatches(IterableDataset):
    """(worker, batch, events, state) of one rank from its batch number `batches` on."""

    def __init__(self, loader: StreamLoader) -> None:
        self.source = loader.source
        self.batches = loader.batches
        self.states = dict(loader.states)
        self.rank = loader.rank
        self.world = loader.world
        self.workers = loader.workers

    def __iter__(self) -> Iterator[tuple[int, Arrays, Events, Any]]:
        # A DataLoader reads its workers round-robin from worker 0. After a resume, worker 0 takes
        # the sequence that is next, and the others those after it.
        info = get_worker_info()
        place = info.id if info else 0
        worker = (place + self.batches) % self.workers
        # Batches of this worker's sequence: (batches − worker) / workers, rounded up.
        done = -(-(self.batches - worker) // self.workers)
        slot = self.rank * self.workers + worker
        slots = self.world * self.workers
        last_state = self.states.get(str(worker))
        for batch, events, state in self.source.batches(slot, slots, done, last_state):
            yield worker, batch, events, state


class FirstBatches:
    """The first `samples` samples of a loader of one pass (on all ranks together), read anew at
    every iteration."""

    def __init__(self, loader: IndexedLoader, samples: int) -> None:
        self.loader = loader
        self.count = -(-samples // (loader.micro_batch * loader.world))

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(self.loader, self.count)


def first_heldout(
    build_loader: Callable[..., object],
    data: object,
    *,
    samples: int,
    rank: int,
    world: int,
    micro_batch: int,
) -> FirstBatches:
    """The batches of this rank among the first held-out samples, in micro-batches no larger than a
    rank's share."""
    micro = min(micro_batch, -(-samples // world))
    loader = build_loader(data, split="heldout", rank=rank, world=world, micro_batch=micro)
    return FirstBatches(cast(IndexedLoader, loader), samples)


class Rows(Protocol):
    """A dataset of rows: "tokens" and "segments", int64 (L+1,), perhaps "weights", float32 (L+1,),
    and other entries. Where it has torch's `__getitems__(numbers)`, the rows of a batch are read in
    one call."""

    size: int | None

    def __getitem__(self, index: int, /) -> Batch: ...

    def identity(self) -> State: ...

    def padding_row(self) -> Batch:
        """A row without a target, with the keys of every row."""


class RowBatches(Dataset):
    """Rows as `Samples`: stacked, with padding rows beyond the end so that all ranks get equally
    many batches."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.size = rows.size

    @property
    def report(self) -> str:
        return str(getattr(self.rows, "report", ""))

    def identity(self) -> State:
        return self.rows.identity()

    def __getitem__(self, numbers: Sequence[int]) -> tuple[Arrays, Events]:
        inside = [number for number in numbers if self.size is None or number < self.size]
        rows = self._read(inside) if inside else []
        for _ in range(len(numbers) - len(inside)):
            rows.append(self.rows.padding_row())
        batch = collate(rows)
        if get_worker_info() is None:
            return batch, []
        # From a worker, torch would move each tensor into a shared memory of its own, which costs
        # several times what a batch of short rows takes to make; arrays go through a pipe.
        return {name: tensor.numpy() for name, tensor in batch.items()}, []

    def _read(self, numbers: list[int]) -> list[Batch]:
        read_all = getattr(self.rows, "__getitems__", None)
        if read_all is not None:
            return list(read_all(numbers))
        return [self.rows[number] for number in numbers]


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """The batch where its model is; to CUDA from pinned memory, which nothing waits for.

    Of rows "packed" says whether any has several documents, or one and padding: a loss would have
    to wait for the device to read it off the segments there.
    """
    on_cuda = torch.device(device).type == "cuda"
    moved: dict[str, Any] = {}
    for name, tensor in batch.items():
        if on_cuda:
            tensor = tensor.pin_memory()
        moved[name] = tensor.to(device, non_blocking=True)
    if "segments" in batch:
        moved["packed"] = not bool(single_documents(batch["segments"]).all())
    return moved


def collate(rows: list[Batch]) -> Batch:
    """Rows to a batch: each tensor stacked, (B, …).

    "weights" are 1 in rows that have none, if another row has them.
    """
    if any("weights" in row for row in rows):
        rows = [_with_weights(row) for row in rows]
    batch = {}
    for key in rows[0]:
        batch[key] = torch.stack([row[key] for row in rows])
    return batch


def _with_weights(row: Batch) -> Batch:
    if "weights" in row:
        return row
    return row | {"weights": torch.ones(len(row["tokens"]))}


def hash64(*words: int | np.ndarray) -> np.ndarray:
    """64 pseudo-random bits (N,) of integers, some of them arrays (N,): splitmix64's finalizer
    after each word."""
    # Arrays, because numpy warns when scalars overflow, as they do here by design.
    state = np.zeros(1, np.uint64)
    for word in words:
        if isinstance(word, np.ndarray):
            bits = word.astype(np.uint64)
        else:
            bits = np.array([word % 2**64], np.uint64)
        state = (state ^ bits) + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def permuted(index: np.ndarray, size: int, *key: int | np.ndarray) -> np.ndarray:
    """Where a random permutation of 0..size−1, chosen by `key`, sends each index: (N,) int64 → (N,)
    int64, in O(1) memory. A Feistel network permutes the next even power of two; results outside go
    through it again (cycle walking)."""
    # Bits of each half of a number: those of size − 1, in two halves, rounded up.
    half = np.uint64(max(1, (int(size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.broadcast_to(hash64(*key, round_), index.shape) for round_ in range(_ROUNDS)]
    images = index.astype(np.uint64)
    outside = np.arange(len(images))
    while len(outside):
        left = images[outside] >> half
        right = images[outside] & mask
        for round_key in keys:
            hashed = hash64(round_key[outside] ^ right) & mask
            left, right = right, left ^ hashed
        images[outside] = (left << half) | right
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)
