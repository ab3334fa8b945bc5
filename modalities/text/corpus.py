"""A corpus tokenised once: one flat array of ids and where each document starts in it.

A cached corpus is a folder of `tokens.npy` (uint16 or uint32), `offsets.npy`, `corpus.json` and `manifest.json`, the digests by
which the others are verified when it is opened.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from modalities.files import data_folder, new_folder, seal, sealed_damage
from modalities.text.sources import SPLITS, Document, Source, document_split
from modalities.text.tokenizers import Tokenizer
from zoo.files import read_json

_FORMAT = 2  # raise when the files or the rules of splitting and tokenising change
_FILES = ("tokens.npy", "offsets.npy", "corpus.json")
_BAR_FROM_BYTES = 16 * 2**20  # a smaller corpus takes a second or two and needs no bar
_IN_MEMORY = 1 << 25  # tokens
_PART = 1 << 18  # characters of a document that are tokenised at once
_BATCH = (256, 1 << 20)  # documents or parts, and characters, at a time
_CUTS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\n)(?=[^\W\d_])")  # before a word, or at a line's start


@dataclass(frozen=True)
class TokenCorpus:
    """tokens (N,) uint16/uint32 without BOS; document d is tokens[offsets[d]:offsets[d+1]]; ids[d] names it.

    num_bytes: UTF-8 bytes of all its text.  fingerprint: hash of the tokens, the document bounds and the tokenizer.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    ids: list[str]
    num_bytes: int
    tokenizer: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, folder: Path) -> None:
        """Write the corpus to a folder, unless another process is first."""
        facts: dict[str, object] = {"tokenizer": self.tokenizer, "fingerprint": self.fingerprint}
        facts |= {"num_bytes": self.num_bytes, "ids": self.ids}
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
        facts = read_json(folder / "corpus.json", most=2**34)
        tokens, offsets = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in _FILES[:2])
        fields = ("ids", "num_bytes", "tokenizer", "fingerprint")
        return cls(tokens, np.array(offsets), **{name: facts[name] for name in fields})


def tokenize_corpus(
    source: Source,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> TokenCorpus:
    """The documents of one split ("train", "heldout" or "all") of a source, as tokens.

    Args:
        cache_dir: a folder that keeps the result of files. None: <data folder>/cache/text above 2²⁵ tokens, else memory.
        limit: the first documents of the split only.

    Raises:
        ValueError: for an unknown split or one without documents.
    """
    if split not in (*SPLITS, "all"):
        raise ValueError(f"split {split!r} is none of 'train', 'heldout', 'all'")
    folder = None
    if (key := source.cache_key()) is not None:
        content = f"{_FORMAT}|{key}|{tokenizer.fingerprint}|{split}|{limit}"
        name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        folder = Path(data_folder() / "cache" / "text" if cache_dir is None else cache_dir) / name
        if folder.is_dir():
            try:
                return TokenCorpus.load(folder)
            except ValueError as error:
                warnings.warn(f"damaged cache of {source.spec!r}, which is tokenised again ({error})", stacklevel=2)
                shutil.rmtree(folder, ignore_errors=True)
    documents = (document for document in source if split == "all" or document_split(document) == split)
    corpus = corpus_of(_with_bar(source, itertools.islice(documents, limit)), tokenizer)
    if not len(corpus):
        raise ValueError(_why_empty(source, split))
    if folder is None or (cache_dir is None and len(corpus.tokens) <= _IN_MEMORY):
        return corpus
    corpus.save(folder)
    return TokenCorpus.load(folder)


def corpus_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenCorpus:
    """Documents as tokens: in memory, or, where they are many, in a temporary file."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    ids: list[str] = []
    lengths: list[int] = []
    num_bytes = 0

    def parts() -> Iterator[tuple[int, str]]:
        for number, document in enumerate(documents):
            ids.append(document.id)
            lengths.append(0)
            yield from ((number, part) for part in _parts(document.text, tokenizer))

    with tempfile.SpooledTemporaryFile(_IN_MEMORY * dtype.itemsize) as file:
        for batch in _batches(parts()):
            for (number, part), encoded in zip(batch, tokenizer.encode_many([p for _, p in batch]), strict=True):
                data = encoded.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                lengths[number] += len(encoded)
                num_bytes += tokenizer.count_bytes(part)
        offsets = np.cumsum([0, *lengths], dtype=np.int64)
        digest.update(offsets.tobytes())
        file.seek(0)
        many = offsets[-1] > _IN_MEMORY
        tokens = np.memmap(file, dtype, "r") if many else np.frombuffer(file.read(), dtype)
    return TokenCorpus(tokens, offsets, ids, num_bytes, tokenizer.name, digest.hexdigest())


def _batches(parts: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    most, characters = _BATCH
    batch: list[tuple[int, str]] = []
    size = 0
    for part in parts:
        if batch and (len(batch) == most or size + len(part[1]) > characters):
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part[1])
    if batch:
        yield batch


def _parts(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """A text in parts of at most `_PART` characters that have the tokens of the whole; longer where none would."""
    start = 0
    while len(text) - start > _PART:
        for cut in [*_CUTS.finditer(text, start + max(1, _PART - 4096), start + _PART)][-8:][::-1]:
            left, right = text[max(start, cut.start() - 256) : cut.start()], text[cut.start() : cut.start() + 256]
            whole = tokenizer.encode(left + right).tolist()
            if [*tokenizer.encode(left).tolist(), *tokenizer.encode(right).tolist()] == whole:
                yield text[start : cut.start()]
                start = cut.start()
                break
        else:
            break
    yield text[start:]


def _why_empty(source: Source, split: str) -> str:
    if next(iter(source), None) is None:
        return f"source {source.spec!r} has no document: every file or row is empty"
    count = sum(1 for _ in itertools.islice(source, 1000))
    advice = "data.heldout_source names other text to hold out, evaluate.every=0 measures none on the way"
    if split == "train":
        advice = "'?split=train' behind it trains on all of it"
    counted = f"{count} document{'s' * (count > 1)} and none in the {split!r} split"
    return f"source {source.spec!r} has {counted} (5% are held out, by hash of their text); {advice}"


def _with_bar(source: Source, documents: Iterable[Document]) -> Iterable[Document]:
    """The documents, with a progress bar for big files and for streams."""
    if source.paths and sum(path.stat().st_size for path in source.paths) < _BAR_FROM_BYTES:
        return documents
    from rich.progress import track

    return track(documents, f"tokenising {source.spec}, documents", transient=True, show_speed=True)
