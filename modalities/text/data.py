"""Text data: a config in, a resumable loader of packed batches out. (`modalities.text.streaming`
has that of streams.)

A corpus is tokenised once: one flat array of ids and where each document starts in it. A sample is
a row of L+1 tokens with
the document number of each: inputs are tokens[:-1], targets tokens[1:]. A target counts where its
segment equals its input's and is not −1; −1 marks padding.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from modalities.loading import (
    MOST_WORKERS,
    Batch,
    Heldout,
    IndexedLoader,
    RowBatches,
    State,
    StreamLoader,
    fingerprint_of,
)
from modalities.text.facts import TRAINING, copies_row, facts_row, tokens_of_a_fact
from modalities.text.sources import Document, HFSource, Source, document_split, open_source
from modalities.text.tokenizers import Tokenizer, load_tokenizer
from zoo.errors import LARGEST_SEED, LONGEST_CONTEXT, bounded, check_fields, nearest
from zoo.files import data_folder, new_folder, read_json, seal, sealed_damage

DEFAULT_SOURCE = "sotu-excerpt"
DOCUMENTS = ("masked", "packed")  # in a row
MOST_DOCUMENTS = 2000  # held-out documents read of a source without end
MOST_CHARACTERS = 1 << 28  # of them together
# First word of every random key after the seed, so that no two uses share a stream; 3 and 4 are
# those of streams.
_DOCUMENTS, _WINDOWS, _MIX = range(3)


@dataclass(frozen=True)
class RowMix:
    """Shares of training rows: those of facts (whose answers count `weight` in the loss) and of
    copies; the rest is plain."""

    facts: float = 0.0
    copies: float = 0.0
    weight: float = 1.0
    wordings: str = "train"

    def __call__(self, row: Batch, key: list[int], tokenizer: Tokenizer) -> Batch:
        """The row itself, or one made of its text; `key` seeds the draw."""
        if not self.facts and not self.copies:
            return row
        rng = np.random.default_rng(key)
        drawn = rng.random()
        if drawn < self.facts:
            return facts_row(row, rng, tokenizer, self.weight, TRAINING[self.wordings])
        return copies_row(row, rng, tokenizer) if drawn < self.facts + self.copies else row

    def identity(self) -> State | None:
        """What decides the rows it makes; None where it makes none, as in states saved before there
        were such rows."""
        if not self.facts and not self.copies:
            return None
        shares = {"facts": self.facts, "copies": self.copies, "weight": self.weight}
        return shares | ({"grammar": TRAINING[self.wordings].fingerprint} if self.facts else {})

    def check(self, context: int, tokenizer: Tokenizer) -> None:
        """ValueError for a context in which facts with their question do not fit."""
        if self.facts and context < (
            needed := tokens_of_a_fact(tokenizer, TRAINING[self.wordings])
        ):
            needs = f"tokenizer {tokenizer.name!r} needs at least {needed}"
            raise ValueError(
                f"context {context} is too short for facts and their questions: {needs}"
            )


@dataclass(frozen=True)
class TextDataConfig:
    """What to train on.

    source, tokenizer: spec strings (sources.py, tokenizers.py).  context: L, tokens a model sees at
    once.
    facts_fraction: share of training rows that state facts and ask for them (facts.py).
    facts_weight: what each token of an answer counts in the loss; other tokens count 1.
    facts_wordings: "train" or "wide": more wordings, some of whose questions use other words, and
    further kinds of value.
    copies_fraction: share of training rows in which a stretch of text comes again.
    cache_dir: see `tokenize_corpus`.  heldout_limit: documents of the held-out split of a stream.
    heldout_source: a source that is held out as a whole, instead of a split of `source`.
    documents: "masked": tokens of a row see their own document alone, with positions from its first
    token in the row;
        "packed": a row is one text, whose documents BOS parts.
    """

    source: str = DEFAULT_SOURCE
    tokenizer: str = "bytes"
    context: int = bounded(128, 1, LONGEST_CONTEXT)
    seed: int = bounded(0, 0, LARGEST_SEED)
    facts_fraction: float = bounded(0.0, 0, 1)
    facts_weight: float = 1.0
    facts_wordings: str = "train"
    copies_fraction: float = bounded(0.0, 0, 1)
    cache_dir: str | None = None
    num_workers: int = bounded(0, 0, MOST_WORKERS)
    heldout_source: str | None = None
    heldout_limit: int = bounded(256, 1, 2**24)
    documents: str = "masked"

    def __post_init__(self) -> None:
        check_fields(self)
        for field, choices in (("documents", DOCUMENTS), ("facts_wordings", TRAINING)):
            if (value := getattr(self, field)) not in choices:
                raise ValueError(f"{field}={value!r}: {nearest(value, choices)}")
        if self.facts_fraction + self.copies_fraction > 1.0:
            shares = (
                f"facts_fraction {self.facts_fraction} and copies_fraction {self.copies_fraction}"
            )
            raise ValueError(f"{shares} are shares of the rows: together at most 1")
        if not self.facts_weight > 0:
            raise ValueError(f"facts_weight {self.facts_weight} must be positive")

    @property
    def row_mix(self) -> RowMix:
        return RowMix(
            self.facts_fraction, self.copies_fraction, self.facts_weight, self.facts_wordings
        )


_FORMAT = 2  # raise when the files or the rules of splitting and tokenising change
_FILES = ("tokens.npy", "offsets.npy", "corpus.json")
_BAR_FROM_BYTES = 16 * 2**20  # a smaller corpus takes a second or two and needs no bar
_IN_MEMORY = 1 << 25  # tokens
_BATCH = 32  # documents that are tokenised at a time


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
        if damage := sealed_damage(folder, _FILES):
            raise ValueError(f"{folder}: {damage}")
        facts = read_json(
            folder / "corpus.json", most=2**34
        )  # version 0.5 wrote the names of all documents
        tokens, offsets = (
            np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _FILES[:2]
        )
        return cls(tokens, np.array(offsets), facts["tokenizer"], facts["fingerprint"])


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
    if (key := source.cache_key()) is not None:
        content = f"{_FORMAT}|{key}|{tokenizer.fingerprint}|{split}|{limit}"
        name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        folder = Path(data_folder() / "cache" / "text" if cache_dir is None else cache_dir) / name
        if folder.is_dir():
            try:
                return TokenCorpus.load(folder)
            except ValueError as error:
                warnings.warn(
                    f"damaged cache of {source.spec!r}, which is tokenised again ({error})",
                    stacklevel=2,
                )
                shutil.rmtree(folder, ignore_errors=True)
    selected = (
        document for document in source if split == "all" or document_split(document) == split
    )
    documents: Iterable[Document] = islice(selected, limit)
    if not source.paths or sum(path.stat().st_size for path in source.paths) >= _BAR_FROM_BYTES:
        from rich.progress import track

        documents = track(
            documents, f"tokenising {source.spec}, documents", transient=True, show_speed=True
        )
    corpus = corpus_of(documents, tokenizer)
    if not len(corpus):
        advice = "data.heldout_source names other text to hold out, evaluate.every=0 measures none on the way"
        advice = "'?split=train' behind it trains on all of it" if split == "train" else advice
        shares = f"no document in the {split!r} split (5% are held out, by hash of their text)"
        raise ValueError(f"source {source.spec!r} has {shares}; {advice}")
    if folder is None or (cache_dir is None and len(corpus.tokens) <= _IN_MEMORY):
        return corpus
    corpus.save(folder)
    return TokenCorpus.load(folder)


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


class PackedDataset(Dataset):
    """Rows of L+1 tokens cut from shuffled, concatenated documents. Sample n depends on (corpus,
    seed, n) alone.

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
        self.lengths = np.diff(corpus.offsets) + 1  # with BOS
        self.epoch_tokens = int(self.lengths.sum())
        self.epoch_windows = max(1, -(-(self.epoch_tokens - 1) // context))
        self.size = None if epochs is None else epochs * self.epoch_windows
        self._laid_out: dict[
            int, tuple[np.ndarray, np.ndarray, np.ndarray]
        ] = {}  # of the last two epochs read

    def __getitem__(self, index: int) -> Batch:
        """{"tokens", "segments"}, both int64 (L+1,)."""
        epoch, position = divmod(index, self.epoch_windows)
        if epoch not in self._laid_out:
            self._laid_out = dict([*self._laid_out.items()][-1:]) | {epoch: self._lay_out(epoch)}
        order, ends, windows = self._laid_out[epoch]
        row = self._window(order, ends, int(windows[position]) * self.context)
        return self.mix(row, [self.seed, _MIX, index], self.tokenizer)

    def identity(self) -> State:
        key = {
            "kind": "packed",
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "context": self.context,
        }
        packed = "packed" if self.documents == "packed" else None  # states of version 0.5 name none
        return key | {"mix": self.mix.identity(), "shuffle": True, "documents": packed}

    def padding_row(self) -> Batch:
        """A row of nothing but padding: it adds no target."""
        tokens = torch.full((self.context + 1,), self.tokenizer.pad_id, dtype=torch.int64)
        return {"tokens": tokens, "segments": torch.full_like(tokens, -1)}

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document order, where each ends on the line, window order) of one epoch."""
        order = np.random.default_rng([self.seed, _DOCUMENTS, epoch]).permutation(len(self.lengths))
        windows = np.random.default_rng([self.seed, _WINDOWS, epoch]).permutation(
            self.epoch_windows
        )
        return order, np.cumsum(self.lengths[order]), windows

    def _window(self, order: np.ndarray, ends: np.ndarray, start: int) -> Batch:
        row = self.padding_row()
        tokens = row["tokens"].numpy()
        segments = row["segments"].numpy()
        stop = min(start + self.context + 1, self.epoch_tokens)
        rank = int(np.searchsorted(ends, start, side="right"))
        at = start
        segment = 0
        while at < stop:
            document = order[rank]
            upto = min(int(ends[rank]), stop)
            inside = at - (int(ends[rank]) - int(self.lengths[document]))  # 0 is the BOS
            filled = at - start
            if inside == 0:
                tokens[filled] = self.tokenizer.bos_id
                filled += 1
            first = int(self.corpus.offsets[document]) + max(inside - 1, 0)
            count = upto - start - filled
            tokens[filled : filled + count] = self.corpus.tokens[first : first + count]
            segments[at - start : upto - start] = segment
            rank = rank + 1
            at = upto
            segment = segment + (self.documents == "masked")
        return row


def load_corpus(config: TextDataConfig, split: str) -> TokenCorpus:
    """The tokens of one split of a config's source. Errors: those of open_source and
    tokenize_corpus."""
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
    tokenizer = load_tokenizer(config.tokenizer)
    share = {"rank": rank, "world": world, "num_workers": config.num_workers}
    if split == "train" and config.source.startswith("hf:"):
        from modalities.text.streaming import TextStream

        return StreamLoader(TextStream(config, tokenizer, micro_batch), micro_batch, **share)
    corpus = load_corpus(config, split)
    if split == "train":
        options: dict[str, Any] = dict(
            seed=config.seed, mix=config.row_mix, documents=config.documents
        )
        dataset = PackedDataset(corpus, config.context, tokenizer, **options)
    else:  # shuffled: the first few batches represent all documents
        dataset = PackedDataset(
            corpus, config.context, tokenizer, epochs=1, documents=config.documents
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
        upto = np.append(0, (1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)).cumsum())
        return np.diff(np.append(np.maximum.accumulate(upto[ends])[:-1], self.bytes), prepend=0)


@lru_cache(maxsize=4)
def open_heldout(
    spec: str, tokenizer_spec: str, split: str = "heldout"
) -> Heldout[tuple[EncodedDocument, ...]]:
    """The first held-out documents of a source, at most `MOST_DOCUMENTS` with `MOST_CHARACTERS`,
    read once per process; with split="all" of every document. ValueError for an empty split."""
    tokenizer = load_tokenizer(tokenizer_spec)
    texts = []
    size = 0
    heldout = (d for d in open_source(spec) if split == "all" or document_split(d) == split)
    for document in islice(heldout, MOST_DOCUMENTS):
        size += len(document.text)
        if size > MOST_CHARACTERS:
            break
        texts.append(document.text)
    if not texts:
        raise ValueError(
            f"source {spec!r} has no held-out document; '?split=heldout' behind it holds out all of it"
        )
    documents = tuple(
        EncodedDocument(text, tokens, len(text.encode("utf-8")))
        for text, tokens in zip(texts, tokenizer.encode_many(texts), strict=True)
    )
    parts = [
        part
        for d in documents
        for part in (len(d.tokens).to_bytes(8, "little"), np.ascontiguousarray(d.tokens))
    ]
    return Heldout(
        spec, fingerprint_of([tokenizer.fingerprint.encode(), *map(bytes, parts)]), documents
    )
