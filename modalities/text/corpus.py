"""A corpus tokenised once: one flat array of ids and where each document starts in it.

`tokenize_corpus` walks a source, keeps one split, and returns a `TokenCorpus`. With a cache folder the result is
written there (`tokens.npy` as uint16 or uint32, `offsets.npy`, `corpus.json`) and memory-mapped the next time; a
folder is complete or absent, never half-written. Such a folder can be moved to a machine that has neither the text
nor the tokenizer's package, and opened there with `TokenCorpus.load`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modalities.files import new_folder
from modalities.text.sources import SPLITS, Document, Source, document_split
from modalities.text.tokenizers import Tokenizer

_FORMAT = 1  # raise when the files or the rules of splitting and tokenising change
_BAR_FROM_BYTES = 16 * 2**20  # a smaller corpus takes a second or two and needs no bar


@dataclass(frozen=True)
class TokenCorpus:
    """tokens (N,) uint16/uint32 without BOS; document d is tokens[offsets[d]:offsets[d+1]]; ids[d] names it.

    num_bytes: UTF-8 bytes of all its text (bits per byte = nats per token · N / num_bytes / ln 2).
    fingerprint: hash of the tokens, the document bounds and the tokenizer. Equal fingerprints give equal samples.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    ids: list[str]
    num_bytes: int
    tokenizer: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, int64, without BOS."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the corpus to a new folder. An existing one is an error (FileExistsError)."""
        folder = Path(folder)
        if folder.exists():
            raise FileExistsError(f"{folder} exists; a saved corpus is never overwritten")
        with new_folder(folder, "corpus.json") as temporary:
            np.save(temporary / "tokens.npy", self.tokens)
            np.save(temporary / "offsets.npy", self.offsets)
            facts = {"format": _FORMAT, "tokenizer": self.tokenizer, "fingerprint": self.fingerprint}
            facts |= {"num_bytes": self.num_bytes, "num_tokens": len(self.tokens), "ids": self.ids}
            (temporary / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TokenCorpus:
        """Open a saved corpus, its arrays memory-mapped. Errors: FileNotFoundError; ValueError for a wrong format."""
        folder = Path(folder)
        if not (folder / "corpus.json").is_file():
            raise FileNotFoundError(f"{folder} holds no saved corpus (no corpus.json)")
        facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        if facts.get("format") != _FORMAT:
            raise ValueError(f"{folder}: format {facts.get('format')!r}, this version reads {_FORMAT}; delete it")
        tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        if len(tokens) != facts["num_tokens"]:
            raise ValueError(f"{folder}: {len(tokens)} tokens, corpus.json says {facts['num_tokens']}; delete it")
        offsets = np.load(folder / "offsets.npy")
        return cls(tokens, offsets, facts["ids"], facts["num_bytes"], facts["tokenizer"], facts["fingerprint"])


def tokenize_corpus(
    source: Source,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> TokenCorpus:
    """The documents of one split ("train", "heldout" or "all") of a source, as tokens.

    cache_dir: where to keep the result, under a name made of the files' names, sizes and times, the tokenizer and the
        split. Streams (hf) have no such name and are tokenised anew.
    limit: take the first `limit` documents of the split only.
    progress: show a bar when the source's files hold 16 MiB or more.
    Errors: ValueError when the split is unknown, or has no document at all.
    """
    if split not in (*SPLITS, "all"):
        raise ValueError(f"split {split!r} is none of 'train', 'heldout', 'all'")
    folder = None
    key = source.cache_key()
    if cache_dir is not None and key is not None:
        content = f"{_FORMAT}|{key}|{tokenizer.fingerprint}|{split}|{limit}"
        folder = Path(cache_dir) / hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        if folder.is_dir():
            return TokenCorpus.load(folder)
    documents = (d for d in source if split == "all" or document_split(d) == split)
    corpus = corpus_of(_bar(source, itertools.islice(documents, limit), progress), tokenizer)
    if not len(corpus):
        raise ValueError(_why_empty(source, split))
    if folder is not None:
        corpus.save(folder)
        return TokenCorpus.load(folder)
    return corpus


def corpus_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenCorpus:
    """A TokenCorpus in memory. Documents are tokenised 256 at a time, so BPE tokenizers use every core."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    pieces: list[np.ndarray] = []
    ids: list[str] = []
    num_bytes = 0
    walk = iter(documents)
    while chunk := list(itertools.islice(walk, 256)):
        texts = [document.text for document in chunk]
        pieces += [encoded.astype(dtype) for encoded in tokenizer.encode_many(texts)]
        ids += [document.id for document in chunk]
        num_bytes += sum(tokenizer.count_bytes(text) for text in texts)
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    for array in (tokens, offsets):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return TokenCorpus(tokens, offsets, ids, num_bytes, tokenizer.name, digest.hexdigest())


def _why_empty(source: Source, split: str) -> str:
    total = sum(1 for _ in itertools.islice(source, 1000))
    if total == 0:
        return f"source {source.spec!r} has no document: every file or row is empty"
    counted = f"{total} document{'s' * (total > 1)}" if total < 1000 else "many documents"
    return (
        f"source {source.spec!r} has {counted} and none in the {split!r} split "
        "(5% are held out, by hash of their text); use more documents, or split='all'"
    )


def _bar(source: Source, documents: Iterable[Document], progress: bool) -> Iterable[Document]:
    """The documents, with a progress bar when the files behind the source are big."""
    paths = getattr(source, "paths", ())
    big = not paths or sum(path.stat().st_size for path in paths) >= _BAR_FROM_BYTES
    if not (progress and big):
        return documents
    from rich.progress import track

    return track(documents, f"tokenising {source.spec}, documents", transient=True, show_speed=True)
