"""Text data: a config in, a resumable loader of packed batches out.

A sample is a row of L+1 tokens with the document number of each: inputs are tokens[:-1], targets tokens[1:]. A target
counts where its segment equals its input's and is not −1; −1 marks padding.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from modalities.heldout import Heldout, fingerprint_of
from modalities.loading import IndexedLoader, RowBatches, StreamLoader, collate
from modalities.text.config import TextDataConfig
from modalities.text.corpus import TokenCorpus, tokenize_corpus
from modalities.text.rows import RowMix
from modalities.text.sources import HFSource, document_split, open_source
from modalities.text.tokenizers import Tokenizer, load_tokenizer

__all__ = ["DEFAULT_SOURCE", "EncodedDocument", "PackedDataset", "build_loader", "load_corpus", "open_heldout"]

DEFAULT_SOURCE = "sotu-excerpt"
MOST_DOCUMENTS = 2000  # held-out documents read of a source without end
MOST_CHARACTERS = 1 << 28  # of them together
BLOCK = 256  # windows of a stream that are shuffled together
# First word of every random key after the seed, so that no two uses share a stream.
_DOCUMENTS, _WINDOWS, _MIX, _BLOCK, _STREAM_MIX = range(5)


class PackedDataset(Dataset):
    """Rows of L+1 tokens cut from shuffled, concatenated documents. Sample n depends on (corpus, seed, n) alone.

    An epoch lays all documents out as [BOS] + tokens in random order, cuts that line into windows of L+1 tokens at stride L, so
    that every token is a target once, pads the last one, and serves the windows in a second random order. A document that
    crosses a window's end continues in another row, without BOS and with positions from 0. With `epochs` the dataset ends.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        context: int,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        mix: RowMix = RowMix(),
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if corpus.tokenizer != tokenizer.name:
            raise ValueError(f"the corpus was tokenised with {corpus.tokenizer!r}, not {tokenizer.name!r}")
        if not len(corpus):
            raise ValueError("the corpus has no document")
        mix.check(context, tokenizer)
        self.corpus, self.context, self.tokenizer = corpus, context, tokenizer
        self.seed, self.shuffle, self.mix = seed, shuffle, mix
        self.lengths = np.diff(corpus.offsets) + 1  # with BOS
        self.epoch_tokens = int(self.lengths.sum())
        self.epoch_windows = max(1, -(-(self.epoch_tokens - 1) // context))
        self.size = None if epochs is None else epochs * self.epoch_windows
        self._laid_out: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # of the last two epochs read

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("an endless PackedDataset has no length; epoch_windows is that of one epoch")
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """{"tokens", "segments"}, both int64 (L+1,). Past the end of a finite set: IndexError."""
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"sample {index} is outside 0..{'' if self.size is None else self.size - 1}")
        epoch, position = divmod(index, self.epoch_windows)
        if epoch not in self._laid_out:
            self._laid_out = dict([*self._laid_out.items()][-1:]) | {epoch: self._lay_out(epoch)}
        order, ends, windows = self._laid_out[epoch]
        row = self._window(order, ends, int(windows[position]) * self.context)
        return self.mix(row, [self.seed, _MIX, index], self.tokenizer)

    def identity(self) -> dict[str, object]:
        """What decides a sample besides its number; see `modalities.loading`."""
        key = {"kind": "packed", "fingerprint": self.corpus.fingerprint, "seed": self.seed, "context": self.context}
        return key | {"mix": self.mix.identity(), "shuffle": self.shuffle}

    def padding_row(self) -> dict[str, torch.Tensor]:
        """A row of nothing but padding: it adds no target."""
        tokens = torch.full((self.context + 1,), self.tokenizer.pad_id, dtype=torch.int64)
        return {"tokens": tokens, "segments": torch.full_like(tokens, -1)}

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document order, where each ends on the line, window order) of one epoch."""
        if self.shuffle:
            order = np.random.default_rng([self.seed, _DOCUMENTS, epoch]).permutation(len(self.lengths))
            windows = np.random.default_rng([self.seed, _WINDOWS, epoch]).permutation(self.epoch_windows)
        else:
            order, windows = np.arange(len(self.lengths)), np.arange(self.epoch_windows)
        return order, np.cumsum(self.lengths[order]), windows

    def _window(self, order: np.ndarray, ends: np.ndarray, start: int) -> dict[str, torch.Tensor]:
        row = self.padding_row()
        tokens, segments = row["tokens"].numpy(), row["segments"].numpy()
        stop = min(start + self.context + 1, self.epoch_tokens)
        rank, at, segment = int(np.searchsorted(ends, start, side="right")), start, 0
        while at < stop:
            document, upto = order[rank], min(int(ends[rank]), stop)
            inside = at - (int(ends[rank]) - int(self.lengths[document]))  # 0 is the BOS
            filled = at - start
            if inside == 0:
                tokens[filled] = self.tokenizer.bos_id
                filled += 1
            first = int(self.corpus.offsets[document]) + max(inside - 1, 0)
            count = upto - start - filled
            tokens[filled : filled + count] = self.corpus.tokens[first : first + count]
            segments[at - start : upto - start] = segment
            rank, at, segment = rank + 1, upto, segment + 1
        return row


def load_corpus(config: TextDataConfig, split: str, tokenizer: Tokenizer | None = None) -> TokenCorpus:
    """The tokens of one split of a config's source. Errors: those of open_source and tokenize_corpus."""
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    spec = config.source
    if split == "heldout" and config.heldout_source is not None:
        spec, split = config.heldout_source, "all"
    source = open_source(spec)
    limit = config.heldout_limit if isinstance(source, HFSource) else None
    return tokenize_corpus(source, tokenizer, split=split, cache_dir=config.cache_dir, limit=limit)


def build_loader(
    config: TextDataConfig,
    *,
    split: str = "train",
    rank: int = 0,
    world: int = 1,
    micro_batch: int,
    tokenizer: Tokenizer | None = None,
) -> Any:
    """The loader of one split for one rank: batches {"tokens", "segments"}, int64 (B, L+1).

    "train" is endless and shuffled, with rows of facts and copies. "heldout" is one pass over plain rows, in one order for all
    seeds, with equally many batches on every rank. A "hf:" source streams in training.
    """
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    share: dict[str, Any] = {"rank": rank, "world": world, "num_workers": config.num_workers}
    if split == "train" and config.source.startswith("hf:"):
        return StreamLoader(TextStream(config, tokenizer, micro_batch), micro_batch, **share)
    corpus = load_corpus(config, split, tokenizer)
    if split == "train":
        dataset = PackedDataset(corpus, config.context, tokenizer, seed=config.seed, mix=config.row_mix)
    else:  # shuffled: the first few batches represent all documents
        dataset = PackedDataset(corpus, config.context, tokenizer, epochs=1)
    return IndexedLoader(RowBatches(dataset), micro_batch, **share)


@dataclass(frozen=True, eq=False)
class EncodedDocument:
    """A document, its ids without BOS or EOS, and the UTF-8 bytes that they encode."""

    text: str
    tokens: np.ndarray
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / len(self.tokens)


@lru_cache(maxsize=4)
def open_heldout(spec: str, tokenizer_spec: str, split: str = "heldout") -> Heldout[tuple[EncodedDocument, ...]]:
    """The first held-out documents of a source, at most `MOST_DOCUMENTS` with `MOST_CHARACTERS`, read once per process.

    split="all" takes every document. ValueError for an empty split.
    """
    tokenizer = load_tokenizer(tokenizer_spec)
    texts, size = [], 0
    heldout = (d for d in open_source(spec) if split == "all" or document_split(d) == split)
    for document in islice(heldout, MOST_DOCUMENTS):
        size += len(document.text)
        if size > MOST_CHARACTERS:
            break
        texts.append(document.text)
    if not texts:
        raise ValueError(f"source {spec!r} has no held-out document; '?split=heldout' behind it holds out all of it")
    documents = tuple(
        EncodedDocument(text, tokens, tokenizer.count_bytes(text))
        for text, tokens in zip(texts, tokenizer.encode_many(texts), strict=True)
    )
    parts = [part for d in documents for part in (len(d.tokens).to_bytes(8, "little"), np.ascontiguousarray(d.tokens))]
    return Heldout(spec, fingerprint_of([tokenizer.fingerprint.encode(), *map(bytes, parts)]), documents)


class _Shard:
    """The endless samples of one shard of a Hugging Face dataset, and the state that leads back to any of them.

    A shard is packed into one line of [BOS] + tokens, cut at stride L, and served in blocks of `BLOCK` windows, each in random
    order. The state is the place of a block's first document in the dataset: a block can be read again, where the content of a
    shuffle buffer would be lost. Order and state depend on the number of ranks and workers.
    """

    def __init__(self, source: HFSource, config: TextDataConfig, tokenizer: Tokenizer, shard: int, shards: int) -> None:
        from datasets.distributed import split_dataset_by_node

        self.source, self.config, self.tokenizer, self.shard = source, config, tokenizer, shard
        self.dataset = split_dataset_by_node(source.load(), rank=shard, world_size=shards)
        self.epoch, self.row = 0, 0

    def samples(self, state: dict[str, Any] | None) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        """Pairs (row, state after it), from the start or from a state on."""
        length = self.config.context
        skip, block, done = (state["skip"], state["block"], state["done"]) if state else (0, 0, 0)
        # Documents not used up, each with the position of the dataset before it; of the first `skip` tokens are used up.
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
        config = self.config
        where = np.arange(at, at + config.context + 1)
        document = np.searchsorted(starts, where, side="right")
        segments = np.unique(document, return_inverse=True)[1].reshape(-1).astype(np.int64)
        row = {"tokens": torch.from_numpy(tokens[where]), "segments": torch.from_numpy(segments)}
        return config.row_mix(row, [config.seed, _STREAM_MIX, self.shard, index], self.tokenizer)

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
            any_documents = position is not None
            for row in self.dataset:
                document = self.source.document(row, self.row)
                self.row += 1
                if document.text.strip() and document_split(document) == "train":
                    any_documents = True
                    yield before, np.concatenate([[self.tokenizer.bos_id], self.tokenizer.encode(document.text)])
                before = {"epoch": self.epoch, "row": self.row, "hf": self.dataset.state_dict()}
            if not any_documents:
                place = f"source {self.source.spec!r}: shard {self.shard}"
                raise ValueError(f"{place} has no training document; use fewer ranks or workers")
            self.epoch, self.row, position = self.epoch + 1, 0, None


def _hide_worker() -> None:
    """Make torch forget that this is a worker process: `datasets` would split our shards a second time and drop rows."""
    if get_worker_info() is not None:
        torch.utils.data._utils.worker._worker_info = None
        if get_worker_info() is not None:
            raise RuntimeError("this torch keeps its worker info elsewhere: stream with num_workers=0")


class TextStream:
    """Packed micro-batches of a streamed source, for a `StreamLoader`."""

    report = ""

    def __init__(self, config: TextDataConfig, tokenizer: Tokenizer, micro_batch: int) -> None:
        source = open_source(config.source)
        if not isinstance(source, HFSource):
            raise ValueError(f"source {config.source!r} is not a stream; those are written 'hf:NAME[:CONFIG][:SPLIT]'")
        config.row_mix.check(config.context, tokenizer)
        self.source, self.config, self.tokenizer, self.micro_batch = source, config, tokenizer, micro_batch

    def batches(self, slot: int, slots: int, done: int, state: Any) -> Iterator[tuple[Any, list[Any], Any]]:
        _hide_worker()
        samples = _Shard(self.source, self.config, self.tokenizer, slot, slots).samples(state)
        while True:
            rows, states = zip(*islice(samples, self.micro_batch), strict=True)
            yield collate(list(rows)), [], states[-1]

    def identity(self) -> dict[str, object]:
        config = self.config
        key = {"kind": "streaming", "source": config.source, "tokenizer": self.tokenizer.fingerprint}
        return key | {"seed": config.seed, "context": config.context, "mix": config.row_mix.identity()}
