"""Text data: a config in, a resumable loader of packed batches out.

A corpus is tokenised once: one flat array of ids and where each document starts in it. A sample is
a row of L+1 tokens with the document number of each: inputs are tokens[:-1], targets tokens[1:]. A
target counts where its segment equals its input's and is not −1; −1 marks padding. Streams are in
`modalities.text.streaming`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from modalities.loading import (
    Batch,
    EpochCache,
    Heldout,
    IndexedLoader,
    RowBatches,
    State,
    StreamLoader,
    fingerprint_of,
)
from modalities.text.config import TextDataConfig
from modalities.text.rows import RowMix
from modalities.text.sources import Document, HFSource, Source, document_split, open_source
from modalities.text.tasks import TaskRows, is_task, open_task
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.encoding import Tokenizer
from zoo.files import data_folder, new_folder, read_json, seal, sealed_damage

# Held-out documents read of a source without end, and their characters together.
MOST_DOCUMENTS = 2000
MOST_CHARACTERS = 1 << 28
# First word of every random key after the seed, so that no two uses share a stream; streams have 3
# and 4.
_DOCUMENTS = 0
_WINDOWS = 1
_MIX = 2
# Raise it when the files or the rules of splitting and tokenising change.
_FORMAT = 2
_FILES = ("tokens.npy", "offsets.npy", "corpus.json")
# A smaller corpus takes a second or two and needs no progress bar.
_BAR_FROM_BYTES = 16 * 2**20
# Tokens up to which a corpus stays in memory by default.
_IN_MEMORY = 1 << 25
# Documents that are tokenised at a time.
_BATCH = 32


@dataclass(frozen=True)
class TokenCorpus:
    """tokens (N,) uint16/uint32 without BOS; document d is tokens[offsets[d]:offsets[d+1]]."""

    tokens: np.ndarray
    offsets: np.ndarray
    tokenizer: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, folder: Path) -> None:
        """Write the files to a folder, with manifest.json, their digests, unless another process is
        first."""
        facts = {"tokenizer": self.tokenizer, "fingerprint": self.fingerprint}
        with new_folder(folder, "corpus.json") as temporary:
            np.save(temporary / "tokens.npy", self.tokens)
            np.save(temporary / "offsets.npy", self.offsets)
            (temporary / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")
            seal(temporary)

    @classmethod
    def load(cls, folder: Path) -> TokenCorpus:
        """Open a saved corpus, memory-mapped. ValueError for a damaged one."""
        damage = sealed_damage(folder, _FILES)
        if damage:
            raise ValueError(f"{folder}: {damage}")
        # The file is long where version 0.5 wrote it, with the names of all documents.
        facts = read_json(folder / "corpus.json", most=2**34)
        tokens = np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False)
        offsets = np.load(folder / "offsets.npy", allow_pickle=False)
        return cls(tokens, offsets, facts["tokenizer"], facts["fingerprint"])


def tokenize_corpus(
    source: Source,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> TokenCorpus:
    """The documents of one split ("train", "heldout" or "all") of a source, its first `limit`, as
    tokens. ValueError for none.

    cache_dir: a folder that keeps the result of files. None: <data folder>/cache/text above 2²⁵
    tokens, else memory.
    """
    folder = None
    key = source.cache_key()
    if key is not None:
        content = f"{_FORMAT}|{key}|{tokenizer.fingerprint}|{split}|{limit}"
        name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        caches = data_folder() / "cache" / "text" if cache_dir is None else Path(cache_dir)
        folder = caches / name
        if folder.is_dir():
            try:
                return TokenCorpus.load(folder)
            except ValueError as error:
                warnings.warn(
                    f"damaged cache of {source.spec!r}, which is tokenised again ({error})",
                    stacklevel=2,
                )
                shutil.rmtree(folder, ignore_errors=True)
    documents = islice(_documents_of_split(source, split), limit)
    corpus = corpus_of(_with_progress(documents, source), tokenizer)
    if not len(corpus):
        if split == "train":
            advice = "'?split=train' behind it trains on all of it"
        else:
            advice = (
                "data.heldout_source names other text to hold out, "
                "evaluate.every=0 measures none on the way"
            )
        shares = f"no document in the {split!r} split (5% are held out, by hash of their text)"
        raise ValueError(f"source {source.spec!r} has {shares}; {advice}")
    if folder is None or (cache_dir is None and len(corpus.tokens) <= _IN_MEMORY):
        return corpus
    corpus.save(folder)
    return TokenCorpus.load(folder)


def _documents_of_split(source: Source, split: str) -> Iterator[Document]:
    """The documents of one split ("train", "heldout" or "all") of a source."""
    for document in source:
        if split == "all" or document_split(document) == split:
            yield document


def _with_progress(documents: Iterable[Document], source: Source) -> Iterable[Document]:
    """The documents, behind a progress bar if the source is large or a stream."""
    if source.paths and sum(path.stat().st_size for path in source.paths) < _BAR_FROM_BYTES:
        return documents
    from rich.progress import track

    return track(
        documents,
        f"tokenising {source.spec}, documents",
        transient=True,
        show_speed=True,
    )


def corpus_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenCorpus:
    """Documents as tokens, in memory."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    parts: list[np.ndarray] = []
    texts = (document.text for document in documents)
    while batch := list(islice(texts, _BATCH)):
        parts += [encoded.astype(dtype) for encoded in tokenizer.encode_many(batch)]
    tokens = np.concatenate([np.empty(0, dtype), *parts])
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    digest.update(tokens.data)
    digest.update(offsets.data)
    return TokenCorpus(tokens, offsets, tokenizer.name, digest.hexdigest())


class _Layout(NamedTuple):
    """One epoch: the order of documents, where each ends on the line, the order of windows."""

    order: np.ndarray
    ends: np.ndarray
    windows: np.ndarray


class PackedDataset(Dataset):
    """Rows of L+1 tokens cut from shuffled, concatenated documents.

    Sample n depends on (corpus, seed, n) alone.

    An epoch lays all documents out as [BOS] + tokens in random order, cuts that line into windows
    of L+1 tokens at stride L, so that every token is a target once, pads the last one, and serves
    the windows in a second random order. A document that crosses a window's end continues in
    another row, without BOS and with positions from 0. With `epochs` the dataset ends.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        context: int,
        tokenizer: Tokenizer,
        *,
        seed: int = 0,
        mix: RowMix = RowMix(),
        epochs: int | None = None,
        documents: str = "masked",
    ) -> None:
        mix.check(context, tokenizer)
        self.documents = documents
        self.corpus = corpus
        self.context = context
        self.tokenizer = tokenizer
        self.seed = seed
        self.mix = mix
        # Tokens of each document with its BOS.
        self.lengths = np.diff(corpus.offsets) + 1
        self.epoch_tokens = int(self.lengths.sum())
        # All tokens but the first are targets; the last window may be partial.
        self.epoch_windows = max(1, -(-(self.epoch_tokens - 1) // context))
        self.size = None if epochs is None else epochs * self.epoch_windows
        self._layouts = EpochCache(self._layout)

    def __getitem__(self, index: int) -> Batch:
        """{"tokens", "segments"}, both int64 (L+1,)."""
        epoch, number = divmod(index, self.epoch_windows)
        layout = self._layouts[epoch]
        row = self._window(layout, int(layout.windows[number]) * self.context)
        return self.mix(row, [self.seed, _MIX, index], self.tokenizer)

    def identity(self) -> State:
        return {
            "kind": "packed",
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "context": self.context,
            "mix": self.mix.identity(),
            "shuffle": True,
            # States of version 0.5, all of masked rows, have no such key.
            "documents": "packed" if self.documents == "packed" else None,
        }

    def padding_row(self) -> Batch:
        """A row of nothing but padding: it adds no target."""
        tokens = torch.full((self.context + 1,), self.tokenizer.pad_id, dtype=torch.int64)
        return {"tokens": tokens, "segments": torch.full_like(tokens, -1)}

    def _layout(self, epoch: int) -> _Layout:
        orders = np.random.default_rng([self.seed, _DOCUMENTS, epoch])
        order = orders.permutation(len(self.lengths))
        windows = np.random.default_rng([self.seed, _WINDOWS, epoch])
        return _Layout(
            order=order,
            ends=np.cumsum(self.lengths[order]),
            windows=windows.permutation(self.epoch_windows),
        )

    def _window(self, layout: _Layout, start: int) -> Batch:
        """The row of the tokens `start` … `start` + L of an epoch's line."""
        row = self.padding_row()
        tokens = row["tokens"].numpy()
        segments = row["segments"].numpy()
        stop = min(start + self.context + 1, self.epoch_tokens)
        rank = int(np.searchsorted(layout.ends, start, side="right"))
        position = start
        segment = 0
        while position < stop:
            document = layout.order[rank]
            document_end = int(layout.ends[rank])
            part_end = min(document_end, stop)
            segments[position - start : part_end - start] = segment
            # The token's number in its document, whose BOS has 0.
            number = position - (document_end - int(self.lengths[document]))
            if number == 0:
                tokens[position - start] = self.tokenizer.bos_id
                position += 1
                number = 1
            first = int(self.corpus.offsets[document]) + number - 1
            part = self.corpus.tokens[first : first + part_end - position]
            tokens[position - start : part_end - start] = part
            rank += 1
            position = part_end
            if self.documents == "masked":
                segment += 1
        return row


def load_corpus(config: TextDataConfig, split: str) -> TokenCorpus:
    """The tokens of one split of a config's source.

    Errors: those of open_source and tokenize_corpus.
    """
    spec = config.source
    if split == "heldout" and config.heldout_source is not None:
        spec = config.heldout_source
        split = "all"
    source = open_source(spec)
    limit = config.heldout_limit if isinstance(source, HFSource) else None
    tokenizer = load_tokenizer(config.tokenizer)
    return tokenize_corpus(source, tokenizer, split=split, cache_dir=config.cache_dir, limit=limit)


def build_loader(
    config: TextDataConfig, *, split: str = "train", rank: int = 0, world: int = 1, micro_batch: int
) -> IndexedLoader | StreamLoader:
    """The loader of one split for one rank: batches {"tokens", "segments"}, int64 (B, L+1).

    "train" is endless and shuffled, with rows of facts and copies. "heldout" is one pass over plain
    rows, in one order for all seeds, with equally many batches on every rank. A "hf:" source
    streams in training.
    """
    share = {"rank": rank, "world": world, "num_workers": config.num_workers}
    if is_task(config.source):
        heldout = split == "heldout"
        # Held-out rows are the same for all seeds.
        seed = 0 if heldout else config.seed
        rows = TaskRows(open_task(config.source), config.context, seed, heldout=heldout)
        return IndexedLoader(RowBatches(rows), micro_batch, **share)
    tokenizer = load_tokenizer(config.tokenizer)
    if split == "train" and config.source.startswith("hf:"):
        from modalities.text.streaming import TextStream

        return StreamLoader(TextStream(config, tokenizer, micro_batch), micro_batch, **share)
    corpus = load_corpus(config, split)
    if split == "train":
        dataset = PackedDataset(
            corpus,
            config.context,
            tokenizer,
            seed=config.seed,
            mix=config.row_mix,
            documents=config.documents,
        )
    else:
        # Held-out rows are shuffled too: the first few batches represent all documents.
        dataset = PackedDataset(
            corpus,
            config.context,
            tokenizer,
            epochs=1,
            documents=config.documents,
        )
    return IndexedLoader(RowBatches(dataset), micro_batch, **share)


@dataclass(frozen=True, eq=False)
class EncodedDocument:
    """A document, its ids without BOS or EOS, and the UTF-8 bytes that they encode."""

    text: str
    tokens: np.ndarray
    bytes: int

    def byte_lengths(self, tokenizer: Tokenizer) -> np.ndarray:
        """(N,) UTF-8 bytes of each token, a character's with its first; the mean where a tokenizer
        does not tell ends."""
        ends = tokenizer.ends(self.text)
        if not ends:
            return np.full(len(self.tokens), self.bytes / max(1, len(self.tokens)))
        codes = np.frombuffer(self.text.encode("utf-32-le"), "<u4")
        # UTF-8 takes one byte of a code point, and one more from each of these on.
        sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
        bytes_before = np.append(0, sizes.cumsum())
        # A token that ends no later than the one before it has no bytes.
        byte_ends = np.maximum.accumulate(bytes_before[ends])
        byte_ends[-1] = self.bytes
        return np.diff(byte_ends, prepend=0)


@lru_cache(maxsize=4)
def open_heldout(
    spec: str, tokenizer_spec: str, split: str = "heldout"
) -> Heldout[tuple[EncodedDocument, ...]]:
    """The first held-out documents of a source, at most `MOST_DOCUMENTS` with `MOST_CHARACTERS`,
    read once per process; with split="all" of every document. ValueError for an empty split."""
    tokenizer = load_tokenizer(tokenizer_spec)
    texts = []
    characters = 0
    heldout = _documents_of_split(open_source(spec), split)
    for document in islice(heldout, MOST_DOCUMENTS):
        characters += len(document.text)
        if characters > MOST_CHARACTERS:
            break
        texts.append(document.text)
    if not texts:
        advice = "'?split=heldout' behind it holds out all of it"
        raise ValueError(f"source {spec!r} has no held-out document; {advice}")
    documents = tuple(
        EncodedDocument(text, tokens, len(text.encode("utf-8")))
        for text, tokens in zip(texts, tokenizer.encode_many(texts), strict=True)
    )
    content = [tokenizer.fingerprint.encode()]
    for encoded in documents:
        content.append(len(encoded.tokens).to_bytes(8, "little"))
        content.append(encoded.tokens.tobytes())
        # A tokenizer that normalises gives equal tokens for texts of other bytes.
        content.append(encoded.text.encode("utf-8"))
    return Heldout(spec, fingerprint_of(content), documents)
