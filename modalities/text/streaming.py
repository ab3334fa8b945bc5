"""Endless packed batches of a Hugging Face dataset that is streamed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from modalities.loading import Batch, Events, State, collate
from modalities.text.config import TextDataConfig
from modalities.text.sources import HFSource, document_split, open_source
from modalities.tokenizers.encoding import Tokenizer

# Windows that are shuffled together.
BLOCK = 256
# first words of random keys after the seed; `modalities.text.data` has the others
_BLOCK = 3
_MIX = 4


class _Shard:
    """The endless samples of one shard of a Hugging Face dataset: packed into one line of [BOS]
    + tokens, cut at stride L, and served in blocks of `BLOCK` windows, each in random order. The
    state is the place of a block's first document: a block can be read again, where the content of
    a shuffle buffer would be lost."""

    def __init__(
        self,
        source: HFSource,
        config: TextDataConfig,
        tokenizer: Tokenizer,
        shard: int,
        shards: int,
    ) -> None:
        from datasets.distributed import split_dataset_by_node

        self.source = source
        self.config = config
        self.tokenizer = tokenizer
        self.shard = shard
        self.dataset = split_dataset_by_node(source.load(), rank=shard, world_size=shards)
        self.epoch = 0
        self.row = 0

    def samples(self, state: State | None) -> Iterator[tuple[Batch, State]]:
        """Pairs (row, state after it), from the start or from a state on."""
        length = self.config.context
        skip, block, done = (state["skip"], state["block"], state["done"]) if state else (0, 0, 0)
        # Documents not used up, each with the position of the dataset before it; of the first
        # `skip` tokens are used up.
        line: deque[tuple[State, np.ndarray]] = deque()
        held = -skip
        documents = self._documents(state["dataset"] if state else None)
        while True:
            while held < BLOCK * length + 1:
                line.append(next(documents))
                held += len(line[-1][1])
            tokens = np.concatenate([tokens for _, tokens in line])[skip:]
            starts = np.cumsum([0, *(len(tokens) for _, tokens in line)]) - skip
            order = np.random.default_rng(
                [self.config.seed, _BLOCK, self.shard, block]
            ).permutation(BLOCK)
            for number in range(done, BLOCK):
                done = number + 1
                after = {"dataset": line[0][0], "skip": skip, "block": block, "done": done}
                yield (
                    self._row(tokens, starts, int(order[number]) * length, block * BLOCK + number),
                    after,
                )
            # Windows overlap by one token, so one token less than they hold is used up.
            skip += BLOCK * length
            while len(line[0][1]) <= skip:
                skip -= len(line.popleft()[1])
            held = sum(len(tokens) for _, tokens in line) - skip
            block = block + 1
            done = 0

    def _row(self, tokens: np.ndarray, starts: np.ndarray, at: int, index: int) -> Batch:
        config = self.config
        where = np.arange(at, at + config.context + 1)
        document = np.searchsorted(starts, where, side="right")
        segments = np.unique(document, return_inverse=True)[1].reshape(-1).astype(np.int64)
        segments *= config.documents == "masked"
        row = {"tokens": torch.from_numpy(tokens[where]), "segments": torch.from_numpy(segments)}
        return config.row_mix(row, [config.seed, _MIX, self.shard, index], self.tokenizer)

    def _documents(self, position: State | None) -> Iterator[tuple[State, np.ndarray]]:
        """(position in front of the document, [BOS] + its tokens), epoch after epoch."""
        if position is not None:
            self.epoch = position["epoch"]
            self.row = position["row"]
        while True:
            self.dataset.set_epoch(self.epoch)
            before = {"epoch": self.epoch, "row": self.row, "hf": None}
            if position is not None and position["hf"] is not None:
                self.dataset.load_state_dict(copy.deepcopy(position["hf"]))
                before["hf"] = position["hf"]
            any_documents = position is not None
            for row in self.dataset:
                document = self.source.document(row, self.row)
                self.row += 1
                if document.text.strip() and document_split(document) == "train":
                    any_documents = True
                    yield (
                        before,
                        np.concatenate(
                            [[self.tokenizer.bos_id], self.tokenizer.encode(document.text)]
                        ),
                    )
                before = {"epoch": self.epoch, "row": self.row, "hf": self.dataset.state_dict()}
            if not any_documents:
                place = f"source {self.source.spec!r}: shard {self.shard}"
                raise ValueError(f"{place} has no training document; use fewer ranks or workers")
            self.epoch = self.epoch + 1
            self.row = 0
            position = None


class TextStream:
    """Packed micro-batches of a streamed source, for a `StreamLoader`."""

    report = ""

    def __init__(self, config: TextDataConfig, tokenizer: Tokenizer, micro_batch: int) -> None:
        source = cast(HFSource, open_source(config.source))
        config.row_mix.check(config.context, tokenizer)
        self.source = source
        self.config = config
        self.tokenizer = tokenizer
        self.micro_batch = micro_batch

    def batches(
        self, slot: int, slots: int, done: int, state: State | None
    ) -> Iterator[tuple[Batch, Events, State]]:
        # Torch forgets that this is a worker process: `datasets` would split our shards a second
        # time and drop rows.
        torch.utils.data._utils.worker._worker_info = None
        if get_worker_info() is not None:
            raise RuntimeError(
                "this torch keeps its worker info elsewhere: stream with num_workers=0"
            )
        samples = _Shard(self.source, self.config, self.tokenizer, slot, slots).samples(state)
        while True:
            rows, states = zip(*islice(samples, self.micro_batch), strict=True)
            yield collate(list(rows)), [], states[-1]

    def identity(self) -> dict[str, object]:
        config = self.config
        key: dict[str, object] = {"kind": "streaming", "source": config.source}
        key |= {"tokenizer": self.tokenizer.fingerprint}
        key |= {"seed": config.seed, "context": config.context, "mix": config.row_mix.identity()}
        return key | {"documents": "packed" if config.documents == "packed" else None}
