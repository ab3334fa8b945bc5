"""The samples of data.py from an endless stream: a Hugging Face dataset that is never held as a whole.

Each rank and worker reads its own shard (`split_dataset_by_node`): whole files where their number divides evenly, else
every n-th row. A shard is packed into one endless line of [BOS] + tokens, cut at stride L, and served in blocks of
`BLOCK` windows, each block in a random order. The block stands in for a shuffle buffer, whose content would be lost
on resuming: a block can be read again. The state is where its first document starts in the dataset, and is exact.

Held-out documents (by hash) are skipped, so that they can be had with split="heldout". Unlike data.py's, the order
depends on the number of ranks and workers, as shards do; a state therefore fits only the set-up that saved it.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from modalities.rows import collate
from modalities.text.sources import HFSource, document_split, open_source
from modalities.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from modalities.text.data import TextDataConfig

BLOCK = 256  # windows shuffled together

_BLOCK, _PASSKEY = 3, 4  # words of the random keys, apart from those of data.py


class _Shard:
    """The endless samples of one shard, and the state that leads back to any of them."""

    def __init__(self, source: HFSource, config: TextDataConfig, tokenizer: Tokenizer, shard: int, shards: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self.source, self.config, self.tokenizer, self.shard = source, config, tokenizer, shard
        self.dataset = split_dataset_by_node(source.load(), rank=shard, world_size=shards)
        self.epoch, self.row = 0, 0

    def samples(self, state: dict[str, Any] | None) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        """Pairs (row, state after it), from the start or from a state on."""
        length = self.config.context
        skip, block, done = (state["skip"], state["block"], state["done"]) if state else (0, 0, 0)
        # The line: documents not used up, each with the position of the dataset in front of it. `skip` tokens of the
        # first one are used up already.
        line: deque[tuple[dict[str, Any], np.ndarray]] = deque()
        held = -skip
        documents = self._documents(state["dataset"] if state else None)
        while True:
            while held < BLOCK * length + 1:
                line.append(next(documents))
                held += len(line[-1][1])
            tokens = np.concatenate([tokens for _, tokens in line])[skip:]
            starts = np.cumsum([0, *(len(tokens) for _, tokens in line)]) - skip
            order = np.random.default_rng([self.config.seed, _BLOCK, self.shard, block]).permutation(BLOCK)
            for number in range(done, BLOCK):
                done = number + 1
                after = {"dataset": line[0][0], "skip": skip, "block": block, "done": done}
                yield self._row(tokens, starts, int(order[number]) * length, block * BLOCK + number), after
            # Windows overlap by one token, so one token less than they hold is used up.
            skip += BLOCK * length
            while len(line[0][1]) <= skip:
                skip -= len(line.popleft()[1])
            held = sum(len(tokens) for _, tokens in line) - skip
            block, done = block + 1, 0

    def _row(self, tokens: np.ndarray, starts: np.ndarray, at: int, index: int) -> dict[str, torch.Tensor]:
        from modalities.text.data import passkey_row

        config = self.config
        if config.passkey_fraction > 0:
            rng = np.random.default_rng([config.seed, _PASSKEY, self.shard, index])
            if rng.random() < config.passkey_fraction:
                return passkey_row(config.context, rng, self.tokenizer, config.passkey_weight)
        where = np.arange(at, at + config.context + 1)
        document = np.searchsorted(starts, where, side="right")
        segments = np.unique(document, return_inverse=True)[1].reshape(-1).astype(np.int64)
        return {"tokens": torch.from_numpy(tokens[where]), "segments": torch.from_numpy(segments)}

    def _documents(self, position: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """(position in front of the document, [BOS] + its tokens), epoch after epoch."""
        if position is not None:
            self.epoch, self.row = position["epoch"], position["row"]
        while True:
            self.dataset.set_epoch(self.epoch)
            before = {"epoch": self.epoch, "row": self.row, "hf": None}
            if position is not None and position["hf"] is not None:
                self.dataset.load_state_dict(copy.deepcopy(position["hf"]))
                before["hf"] = position["hf"]
            found = position is not None
            for row in self.dataset:
                document = self.source.document(row, self.row)
                self.row += 1
                if document.text.strip() and document_split(document) == "train":
                    found = True
                    yield before, np.concatenate([[self.tokenizer.bos_id], self.tokenizer.encode(document.text)])
                before = {"epoch": self.epoch, "row": self.row, "hf": self.dataset.state_dict()}
            if not found:
                raise ValueError(
                    f"source {self.source.spec!r}: shard {self.shard} has no training document; "
                    "use fewer ranks or workers"
                )
            self.epoch, self.row, position = self.epoch + 1, 0, None


class StreamingDataset(IterableDataset):
    """Whole micro-batches of one rank with the state after each: (worker, batch, state). See StreamingLoader."""

    def __init__(
        self, config: TextDataConfig, tokenizer: Tokenizer, *, rank: int, world: int, workers: int, micro_batch: int
    ) -> None:
        source = open_source(config.source)
        if not isinstance(source, HFSource):
            raise ValueError(f"source {config.source!r} is no stream; those are written 'hf:NAME[:CONFIG][:SPLIT]'")
        self.source, self.config, self.tokenizer = source, config, tokenizer
        self.rank, self.world, self.workers, self.micro_batch = rank, world, workers, micro_batch
        self.states: dict[str, dict[str, Any]] = {}
        self.turn = 0  # the logical worker that the next batch comes from

    def __iter__(self) -> Iterator[tuple[int, dict[str, torch.Tensor], dict[str, Any]]]:
        info = get_worker_info()
        # A DataLoader asks its workers in turn, starting with its worker 0; after resuming that one plays the worker
        # whose turn it is.
        worker = ((info.id if info else 0) + self.turn) % self.workers
        _hide_worker()
        shard = _Shard(
            self.source, self.config, self.tokenizer, self.rank * self.workers + worker, self.world * self.workers
        )
        samples = shard.samples(self.states.get(str(worker)))
        while True:
            rows, states = zip(*itertools.islice(samples, self.micro_batch), strict=True)
            yield worker, collate(list(rows)), states[-1]


def _hide_worker() -> None:
    """Inside a worker process, make torch forget it is one.

    `datasets` splits a stream among DataLoader workers by itself, and would split our shards a second time, dropping
    rows without a word. torch has no public way to prevent it, so the private variable is cleared, and checked.
    """
    if get_worker_info() is not None:
        torch.utils.data._utils.worker._worker_info = None
        if get_worker_info() is not None:
            raise RuntimeError("this torch keeps its worker info elsewhere: stream with num_workers=0")


class StreamingLoader:
    """Batches of a streamed source for one rank, resumable exactly.

    The state is this rank's own: every rank must save and load its own. It fits the same number of ranks and workers,
    the same micro-batch and the same data options; anything else is a ValueError.
    """

    def __init__(
        self, config: TextDataConfig, tokenizer: Tokenizer, *, rank: int = 0, world: int = 1, micro_batch: int
    ) -> None:
        if micro_batch < 1:
            raise ValueError(f"micro_batch {micro_batch} must be at least 1")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        self.config, self.tokenizer = config, tokenizer
        self.rank, self.world, self.micro_batch = rank, world, micro_batch
        self.workers = max(1, config.num_workers)
        self.states: dict[str, dict[str, Any]] = {}
        self.batches = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from where the last iteration, or the loaded state, stopped; without end."""
        dataset = StreamingDataset(
            self.config,
            self.tokenizer,
            rank=self.rank,
            world=self.world,
            workers=self.workers,
            micro_batch=self.micro_batch,
        )
        dataset.states, dataset.turn = dict(self.states), self.batches % self.workers
        loader = DataLoader(dataset, batch_size=None, num_workers=self.config.num_workers)
        for worker, batch, state in loader:
            self.states[str(worker)] = state
            self.batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: per worker, where its block starts and how many rows of it are done."""
        return {"batches": self.batches, "states": copy.deepcopy(self.states), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise ValueError(f"data state has {key}={state.get(key)!r}, this loader {mine!r}: samples would differ")
        self.states, self.batches = copy.deepcopy(state["states"]), int(state["batches"])

    def _identity(self) -> dict[str, Any]:
        config = self.config
        return {
            "kind": "streaming",
            "source": config.source,
            "tokenizer": self.tokenizer.fingerprint,
            "seed": config.seed,
            "context": config.context,
            "passkey_fraction": config.passkey_fraction,
            "passkey_weight": config.passkey_weight,
            "rank": self.rank,
            "world": self.world,
            "workers": self.workers,
            "micro_batch": self.micro_batch,
        }
