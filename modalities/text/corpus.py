"""A corpus tokenised once: one flat array of ids and where each document starts in it.

`tokenize_corpus` walks a source, keeps one split, and returns a `TokenCorpus`. With a cache folder, or where there are many
tokens, the result is written to disk (`tokens.npy` as uint16 or uint32, `offsets.npy`, `corpus.json`) and memory-mapped; a
folder is complete or absent, never half-written. Such a folder can be moved to a machine that has neither the text
nor the tokenizer's package, and opened there with `TokenCorpus.load`.

Text streams through, however long: documents are tokenised some at a time, long ones in parts. They are cut before a space
between two letters, where tokenizers cut words anyway, so that the parts have the tokens of the whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from modalities.files import data_folder, new_folder
from modalities.text.sources import LONGEST_TEXT, SPLITS, Document, LongDocument, Source, document_split
from modalities.text.tokenizers import Tokenizer
from zoo.inputs import parse_json

_FORMAT = 1  # raise when the files or the rules of splitting and tokenising change
_BAR_FROM_BYTES = 16 * 2**20  # a smaller corpus takes a second or two and needs no bar
_IN_MEMORY = 1 << 25  # tokens
_PART = 1 << 18  # characters of a document that are tokenised at once
_BATCH = (256, 1 << 20)  # documents or parts, and characters, at a time
_BETWEEN_LETTERS = re.compile(r"[^\W\d_] (?=[^\W\d_])")
_LINE = re.compile(r"\n(?=[^\W\d_])")
_HEADER = 128  # bytes before the numbers of a one-dimensional .npy


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
        self.save_once(folder)

    def save_once(self, folder: Path) -> None:
        """Write the corpus to a folder, unless another process is first."""
        with new_folder(folder, "corpus.json") as temporary:
            np.save(temporary / "tokens.npy", self.tokens)
            self.write_table(temporary)

    def write_table(self, folder: Path) -> None:
        """All of a saved corpus but its tokens."""
        np.save(folder / "offsets.npy", self.offsets)
        facts: dict[str, Any] = {"format": _FORMAT, "tokenizer": self.tokenizer, "fingerprint": self.fingerprint}
        facts |= {"num_bytes": self.num_bytes, "num_tokens": len(self.tokens), "ids": self.ids}
        (folder / "corpus.json").write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TokenCorpus:
        """Open a saved corpus, its arrays memory-mapped. Errors: FileNotFoundError; ValueError for a wrong format."""
        folder = Path(folder)
        if not (folder / "corpus.json").is_file():
            raise FileNotFoundError(f"{folder} holds no saved corpus (no corpus.json)")
        facts = parse_json((folder / "corpus.json").read_bytes(), str(folder / "corpus.json"))
        if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
            found = facts.get("format") if isinstance(facts, dict) else facts
            raise ValueError(f"{folder}: format {found!r:.80}, this version reads {_FORMAT}; delete it")
        tokens, offsets = (_array(folder / f"{name}.npy") for name in ("tokens", "offsets"))
        try:
            ids, counts = facts["ids"], (facts["num_bytes"], facts["num_tokens"])
            names = facts["tokenizer"], facts["fingerprint"]
        except KeyError as error:
            raise ValueError(f"{folder}: corpus.json has no {error}; delete it") from None
        if len(tokens) != counts[1]:
            raise ValueError(f"{folder}: {len(tokens)} tokens, corpus.json says {counts[1]!r:.80}; delete it")
        ends = [0, *offsets[-1:].tolist()]
        if not isinstance(ids, list) or len(offsets) != len(ids) + 1 or ends != [*offsets[:1].tolist(), len(tokens)]:
            raise ValueError(
                f"{folder}: offsets.npy does not divide {len(tokens)} tokens among its documents; delete it"
            )
        if (np.diff(offsets) < 0).any() or type(counts[0]) is not int or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{folder}: offsets.npy or corpus.json is damaged; delete it")
        return cls(tokens, offsets, ids, counts[0], *names)


def _array(path: Path) -> np.ndarray:
    """A line of whole numbers; tokens, memory-mapped. ValueError for anything else, which is never unpickled."""
    tokens = path.name == "tokens.npy"
    try:
        found = np.load(path, mmap_mode="r" if tokens else None, allow_pickle=False)
    except Exception as error:  # numpy's parser of headers can raise nearly anything
        raise ValueError(f"{path}: damaged ({error}); delete {path.parent}") from error
    kinds = ("uint16", "uint32") if tokens else ("int64",)
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.name not in kinds:
        raise ValueError(f"{path}: expected one line of {' or '.join(kinds)}; delete {path.parent}")
    return found


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
        split. None: in memory where it has 2²⁵ tokens or fewer, else in <data folder>/cache/text. Streams (hf) have no such
        name, stay in memory and are tokenised anew.
    limit: take the first `limit` documents of the split only.
    progress: show a bar when the source's files hold 16 MiB or more.
    Errors: ValueError when the split is unknown, or has no document at all.
    """
    if split not in (*SPLITS, "all"):
        raise ValueError(f"split {split!r} is none of 'train', 'heldout', 'all'")
    folder = None
    key = source.cache_key()
    if key is not None:
        content = f"{_FORMAT}|{key}|{tokenizer.fingerprint}|{split}|{limit}"
        name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        folder = Path(data_folder() / "cache" / "text" if cache_dir is None else cache_dir) / name
        if folder.is_dir():
            return TokenCorpus.load(folder)
    documents = itertools.islice((d for d in source if split == "all" or document_split(d) == split), limit)
    with ExitStack() as stack:
        writer = _Writer(tokenizer, None if folder is None else new_folder(folder, "corpus.json"), stack)
        corpus = _tokenize(_bar(source, documents, progress), tokenizer, writer)
        if not len(corpus):
            raise ValueError(_why_empty(source, split))
    if folder is not None and (cache_dir is not None or writer.file is not None):
        if writer.file is None:
            corpus.save_once(folder)
        return TokenCorpus.load(folder)
    return corpus


def corpus_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenCorpus:
    """A TokenCorpus in memory."""
    with ExitStack() as stack:
        return _tokenize(documents, tokenizer, _Writer(tokenizer, None, stack))


class _Writer:
    """Tokens in the order of their documents: in memory, or, where they are many, in a folder for them.

    Args:
        place: makes that folder, when it is needed; `stack` closes it. None: they stay in memory.
    """

    def __init__(self, tokenizer: Tokenizer, place: AbstractContextManager[Path] | None, stack: ExitStack) -> None:
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        self.place, self.stack = place, stack
        self.pieces: list[np.ndarray] = []
        self.count = 0
        self.digest = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
        self.folder: Path | None = None
        self.file: BinaryIO | None = None

    def add(self, ids: np.ndarray) -> None:
        tokens = np.ascontiguousarray(ids.astype(self.dtype))
        self.digest.update(tokens.view(np.uint8).data)
        self.count += len(tokens)
        if self.file is not None:
            self.file.write(tokens.data)
            return
        self.pieces.append(tokens)
        if self.place is not None and self.count > _IN_MEMORY:
            self.folder = self.stack.enter_context(self.place)
            self.file = self.stack.enter_context(open(self.folder / "tokens.npy", "wb"))  # noqa: SIM115  # the stack closes it
            self.file.write(bytes(_HEADER))
            for piece in self.pieces:
                self.file.write(piece.data)
            self.pieces = []

    def tokens(self) -> np.ndarray:
        if self.file is None:
            return np.concatenate(self.pieces) if self.pieces else np.empty(0, self.dtype)
        assert self.folder is not None
        self.file.seek(0)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self.file, header)
        if self.file.tell() != _HEADER:
            raise RuntimeError(f"this numpy writes a header of {self.file.tell()} bytes, expected {_HEADER}")
        self.file.flush()
        return np.load(self.folder / "tokens.npy", mmap_mode="r")


def _tokenize(documents: Iterable[Document], tokenizer: Tokenizer, writer: _Writer) -> TokenCorpus:
    """Documents are tokenised some at a time, so BPE tokenizers use every core."""
    ids: list[str] = []
    lengths: list[int] = []
    num_bytes = 0
    space: list[str | None] = []  # of `_space`, asked for by the first long document

    def parts() -> Iterator[tuple[int, str, int]]:
        """(document, part of its text, bytes of the text that it stands for)."""
        for number, document in enumerate(documents):
            ids.append(document.id)
            lengths.append(0)
            if len(document.text) <= _PART and not isinstance(document, LongDocument):
                yield number, document.text, tokenizer.count_bytes(document.text)
                continue
            space[:] = space or [_space(tokenizer)]
            for part, size in _parts(document, tokenizer, space[0]):
                yield number, part, size

    for batch in _batches(parts()):
        for (number, _, size), encoded in zip(batch, tokenizer.encode_many([p for _, p, _ in batch]), strict=True):
            writer.add(encoded)
            lengths[number] += len(encoded)
            num_bytes += size
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    writer.digest.update(offsets.view(np.uint8).data)
    corpus = TokenCorpus(writer.tokens(), offsets, ids, num_bytes, tokenizer.name, writer.digest.hexdigest())
    if writer.folder is not None:
        corpus.write_table(writer.folder)
    return corpus


def _batches(parts: Iterable[tuple[int, str, int]]) -> Iterator[list[tuple[int, str, int]]]:
    most, characters = _BATCH
    batch: list[tuple[int, str, int]] = []
    size = 0
    for part in parts:
        if batch and (len(batch) == most or size + len(part[1]) > characters):
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part[1])
    if batch:
        yield batch


def _parts(document: Document, tokenizer: Tokenizer, space: str | None) -> Iterator[tuple[str, int]]:
    """A long document in parts, and the bytes of text that each stands for.

    A part that has no space between letters, as in Chinese, ends with a line, or else where it is full: there alone the tokens
    may not be those of the whole.
    """
    if space is None:
        if isinstance(document, LongDocument):
            raise ValueError(
                f"{document.id}: more than {LONGEST_TEXT:,} characters, and tokenizer {tokenizer.name!r} cannot read a text "
                "in parts: it gives words behind a space other tokens at the start of a text; cut the file into several"
            )
        yield document.text, tokenizer.count_bytes(document.text)
        return
    held = ""
    for piece in document.pieces():
        held += piece
        while len(held) > _PART:
            tail = max(0, _PART - 4096)
            found = [*_BETWEEN_LETTERS.finditer(held, tail, _PART)] or [*_BETWEEN_LETTERS.finditer(held, 0, _PART)]
            at = found[-1].end() - 1 if found else _line_end(held, tokenizer)
            upto = at if not found or space else at + 1
            yield held[:at], tokenizer.count_bytes(held[:upto])
            held = held[upto:]
    if held:
        yield held, tokenizer.count_bytes(held)


def _line_end(held: str, tokenizer: Tokenizer) -> int:
    """Where a part without spaces ends: behind the last of a few lines around which its parts have the tokens of the whole."""
    for line in [*_LINE.finditer(held, 0, _PART)][-8:][::-1]:
        left, right = held[max(0, line.end() - 256) : line.end()], held[line.end() : line.end() + 256]
        whole = tokenizer.encode(left + right).tolist()
        if [*tokenizer.encode(left).tolist(), *tokenizer.encode(right).tolist()] == whole:
            return line.end()
    return _PART


def _space(tokenizer: Tokenizer) -> str | None:
    """What the second part of a text begins with where it is cut at a space: that space, or nothing for tokenizers that put
    one before every text; None where neither gives the tokens of the whole."""
    left, right = "It was the best of times", "it was the worst of times"
    whole = tokenizer.encode(f"{left} {right}").tolist()
    for space in (" ", ""):
        if [*tokenizer.encode(left).tolist(), *tokenizer.encode(space + right).tolist()] == whole:
            return space
    return None


def _why_empty(source: Source, split: str) -> str:
    total = sum(1 for _ in itertools.islice(source, 1000))
    if total == 0:
        return f"source {source.spec!r} has no document: every file or row is empty"
    counted = f"{total} document{'s' * (total > 1)}" if total < 1000 else "many documents"
    advice = "data.heldout_source names other text to hold out, evaluate.every=0 measures none on the way"
    if split == "train":
        advice = "'?split=train' behind it trains on all of it"
    return (
        f"source {source.spec!r} has {counted} and none in the {split!r} split "
        f"(5% are held out, by hash of their text); {advice}"
    )


def _bar(source: Source, documents: Iterable[Document], progress: bool) -> Iterable[Document]:
    """The documents, with a progress bar when the files behind the source are big."""
    paths = getattr(source, "paths", ())
    big = not paths or sum(path.stat().st_size for path in paths) >= _BAR_FROM_BYTES
    if not (progress and big):
        return documents
    from rich.progress import track

    return track(documents, f"tokenising {source.spec}, documents", transient=True, show_speed=True)
