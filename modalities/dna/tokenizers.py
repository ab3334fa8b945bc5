"""Tokenizers of DNA behind one small interface: codes of bases in, int64 ids out.

`load_tokenizer(spec)` knows four kinds:

    "bases"      one token a base: A, C, G, T are 0, 1, 2, 3
    "kmer:K"     K bases a token, 1 to 8, not overlapping: the number in base 4, first base most significant
    "FILE.json"  BPE saved by the `tokenizers` library whose tokens are strings of A, C, G and T (`train_bpe` makes one)
    "hf:NAME"    the tokenizer of a folder or repository of `transformers`, over bases, k-mers or BPE

Targets come first: ids below `num_targets` can be predicted. Then come UNKNOWN, start and padding, which cannot. A k-mer with
an unknown base is UNKNOWN as a whole; BPE keeps the bases around it.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from modalities.decoder.tokenizers import fingerprint_of_tokenizer, no_panic, open_tokenizer, read_backend, start_id
from modalities.dna.bases import BASES, UNKNOWN, decode, encode, runs
from modalities.files import near_file
from zoo.files import write_text
from zoo.naming import did_you_mean

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase as Inner

    from modalities.dna.genome import Genome
    from modalities.dna.splits import Region

__all__ = ["BpeTokenizer", "DnaTokenizer", "Encoded", "KmerTokenizer", "load_tokenizer", "train_bpe"]

LONGEST_KMER = 8  # 65,536 targets
PIECE = 4096  # bases that BPE merges at once; memory and time grow faster than linearly
WORD = 512  # most bases in a training word of BPE
SPECIALS = 3  # unknown, start, padding


@dataclass(frozen=True)
class Encoded:
    """Tokens of a sequence: ids and spans (N,) int64, the bases of each; left_over: bases at the end that make no token."""

    ids: np.ndarray
    spans: np.ndarray
    left_over: int


class DnaTokenizer(ABC):
    """A tokenizer of base codes.

    Attributes:
        name: the spec.
        num_targets, unknown_id, bos_id, pad_id, vocab_size: T, T, T + 1, T + 2 and T + 3.
        widths: (vocab_size,) int64, bases each id stands for; 0 for start and padding.
        bases_per_token: mean number of bases a token.
        complements: (vocab_size,) int64, the id of each token's reverse complement, where every token has one; else None.
        fingerprint: hex; equal fingerprints give equal ids for every sequence.
    """

    complements: np.ndarray | None = None
    bases_per_token = 1.0

    def __init__(self, name: str, widths: np.ndarray, unknown_width: int, fingerprint: str) -> None:
        self.name = name
        self.num_targets = self.unknown_id = len(widths)
        self.bos_id, self.pad_id, self.vocab_size = len(widths) + 1, len(widths) + 2, len(widths) + SPECIALS
        self.widths = np.concatenate([widths, [unknown_width, 0, 0]]).astype(np.int64)
        self._beginning: dict[bytes, np.ndarray] = {}
        self.fingerprint = hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()

    @abstractmethod
    def encode(self, codes: np.ndarray) -> Encoded:
        """Tokens of codes (T,) uint8, 0..4. No start or padding is added."""

    def decode(self, ids: Iterable[int]) -> np.ndarray:
        """Codes (T,) uint8 of ids; start and padding are left out. ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"ids {ids.min()}..{ids.max()} are outside 0..{self.vocab_size - 1} of {self.name!r}")
        return self._codes_of(ids[ids <= self.unknown_id])

    def beginning_with(self, codes: np.ndarray) -> np.ndarray:
        """(n,) int64, the targets whose bases begin with these."""
        key = codes.tobytes()
        if key not in self._beginning:
            every = ((n, self._codes_of(np.array([n])).tobytes()) for n in range(self.num_targets))
            self._beginning[key] = np.array([n for n, target in every if target.startswith(key)], np.int64)
        return self._beginning[key]

    @abstractmethod
    def _codes_of(self, ids: np.ndarray) -> np.ndarray: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, vocab_size={self.vocab_size})"


class KmerTokenizer(DnaTokenizer):
    """K bases a token; K = 1 is "bases". `left_over` is what is left of a sequence after its last whole k-mer."""

    def __init__(self, k: int, name: str) -> None:
        super().__init__(name, np.full(4**k, k), k, f"kmer-{k}")
        self.k, self.bases_per_token = k, float(k)
        self._powers = 4 ** np.arange(k - 1, -1, -1)
        codes = (np.arange(4**k)[:, None] // self._powers % 4).astype(np.uint8)  # (4^K, K)
        self._table = np.concatenate([codes, np.full((1, k), UNKNOWN, np.uint8)])
        turned = (3 - codes[:, ::-1].astype(np.int64)) @ self._powers
        self.complements = np.concatenate([turned, np.arange(4**k, 4**k + SPECIALS)])

    def encode(self, codes: np.ndarray) -> Encoded:
        count = len(codes) // self.k
        whole = codes[: count * self.k].reshape(count, self.k)
        ids = whole @ self._powers
        ids[(whole == UNKNOWN).any(1)] = self.unknown_id
        return Encoded(ids, np.full(count, self.k, np.int64), len(codes) - count * self.k)

    def beginning_with(self, codes: np.ndarray) -> np.ndarray:
        room = 4 ** (self.k - len(codes))  # they are consecutive
        return int(codes @ self._powers[: len(codes)]) + np.arange(room)

    def _codes_of(self, ids: np.ndarray) -> np.ndarray:
        return self._table[ids].reshape(-1)


class _VocabularyTokenizer(DnaTokenizer):
    """A tokenizer of a library, whose targets are entries of A, C, G and T alone, in the order of its ids."""

    def __init__(self, name: str, library: Backend | Inner, entries: Sequence[str], fingerprint: str) -> None:
        widths, vocabulary = np.array([len(entry) for entry in entries]), library.get_vocab()
        self.width = int(widths[0]) if (widths == widths[0]).all() else None  # of every target
        super().__init__(name, widths, self.width or 1, fingerprint)
        self._codes = [encode(entry) for entry in entries] + [np.full(1, UNKNOWN, np.uint8)]
        self._ids = np.full(max(vocabulary.values()) + 1, self.unknown_id, np.int64)  # by those of the library
        self._ids[[vocabulary[entry] for entry in entries]] = np.arange(len(entries))

    def _codes_of(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint8), *(self._codes[number] for number in ids)])

    def _random_ids(self) -> np.ndarray:
        """Ids of random bases, from which `bases_per_token` follows."""
        codes = np.random.default_rng(0).integers(0, 4, 16 * PIECE).astype(np.uint8)
        ids = self.encode(codes).ids
        self.bases_per_token = len(codes) / max(1, len(ids))
        return ids


def _targets(vocabulary: Mapping[str, int], special: Collection[int] = ()) -> list[str]:
    """The entries of A, C, G and T alone, in the order of their ids."""
    entries = (entry for entry, n in vocabulary.items() if n not in special and re.fullmatch(f"[{BASES}]+", entry))
    return sorted(entries, key=vocabulary.__getitem__)


class BpeTokenizer(_VocabularyTokenizer):
    """Byte-pair encoding of bases by the `tokenizers` library. Each unknown base is a token of its own.

    No token spans two pieces of `PIECE` bases. `bases_per_token` is measured on random bases, where it is some percent lower
    than on a genome, so that a window of that many bases rarely has too many tokens.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        targets = _targets(backend.get_vocab())
        if missing := set(BASES).difference(targets):
            raise ValueError(f"tokenizer {name!r}: no token {min(missing)!r}; expected a tokenizer of upper-case DNA")
        super().__init__(name, backend, targets, backend.to_str())
        self.backend = backend
        self._ids[self._ids == self.unknown_id] = -1  # which `encode` refuses
        self._random_ids()

    def encode(self, codes: np.ndarray) -> Encoded:
        parts, done = [], 0
        for start, stop in runs(codes != UNKNOWN).tolist():
            parts.append(np.full(start - done, self.unknown_id))
            for at in range(start, stop, PIECE):
                text = decode(codes[at : min(at + PIECE, stop)])
                with no_panic(self.name):
                    parts.append(self._ids[self.backend.encode(text, add_special_tokens=False).ids])
            done = stop
        ids = np.concatenate([*parts, np.full(len(codes) - done, self.unknown_id)])
        spans = self.widths[ids]
        if len(ids) and (ids.min() < 0 or int(spans.sum()) != len(codes)):
            raise ValueError(
                f"tokenizer {self.name!r} does not keep every base as it is; expected BPE over the letters {BASES} alone"
            )
        return Encoded(ids, spans, 0)


class OutsideTokenizer(_VocabularyTokenizer):
    """A fast tokenizer of `transformers`, `inner`. Every token but the targets (N, a k-mer with N, unknown) is UNKNOWN.
    Bases at the end that make no token are left over.

    library_ids: (vocab_size,) int64, the library's id of each; of UNKNOWN that of N or of the unknown token.
    """

    def __init__(self, inner: Inner, name: str) -> None:
        spec = f"hf:{name}"
        targets = _targets(inner.get_vocab(), set(inner.all_special_ids))
        if not targets:
            raise ValueError(f"tokenizer {spec!r} has no token of upper-case A, C, G and T")
        if not inner.is_fast:
            raise ValueError(
                f"tokenizer {spec!r} does not tell where its tokens are; expected one with a tokenizer.json"
            )
        super().__init__(spec, inner, targets, fingerprint_of_tokenizer(inner))
        self.inner = inner
        start = start_id(inner, name)
        unknown = inner("N" * int(self.widths.max()), add_special_tokens=False)["input_ids"] or [inner.unk_token_id]
        pad = start if inner.pad_token_id is None else inner.pad_token_id
        ids = [*map(inner.get_vocab().__getitem__, targets), start if unknown[0] is None else unknown[0], start, pad]
        self.library_ids = np.array(ids, np.int64)
        random_ids = self._random_ids()
        if not len(random_ids) or (random_ids == self.unknown_id).any():
            raise ValueError(f"tokenizer {spec!r} does not read upper-case DNA: random bases have unknown tokens")
        if self.width is not None:
            self.bases_per_token = float(self.width)
            place = {entry: n for n, entry in enumerate(targets)}
            turned = [place.get(entry.translate(str.maketrans(BASES, BASES[::-1]))[::-1]) for entry in targets]
            if None not in turned:
                self.complements = np.array([*turned, *range(len(targets), self.vocab_size)], np.int64)

    def encode(self, codes: np.ndarray) -> Encoded:
        with no_panic(self.name):
            tokens = self.inner(decode(codes), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = self._ids[np.asarray(tokens["input_ids"], np.int64)]
        ends = np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2)
        spans = ends[:, 1] - ends[:, 0]
        known = ids < self.num_targets
        end = int(ends[-1, 1]) if len(ends) else 0
        if int(spans.sum()) != end or (spans[known] != self.widths[ids[known]]).any():
            raise ValueError(f"tokenizer {self.name!r} does not keep every base in one token; expected one that does")
        return Encoded(ids, spans, len(codes) - end)


@lru_cache(maxsize=8)
def _outside(name: str) -> OutsideTokenizer:
    return OutsideTokenizer(open_tokenizer(name), name)


def load_tokenizer(spec: str = "bases") -> DnaTokenizer:
    """The tokenizer of a spec string (see the module's docstring); the same object for the same spec.

    ValueError for an unknown spec, naming the nearest, and for a file that is not BPE of DNA; FileNotFoundError; ImportError
    where `tokenizers` is needed and not installed.
    """
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"tokenizer must be a non-empty string such as 'bases', got {spec!r}")
    if spec == "bases":
        return _kmers(1, spec)
    kind, _, name = spec.partition(":")
    if kind == "hf":
        return _outside(name)
    if kind == "kmer":
        if not name.isdecimal() or not 1 <= int(name) <= LONGEST_KMER:
            raise ValueError(f"tokenizer {spec!r}: K must be a whole number from 1 to {LONGEST_KMER}, as in 'kmer:6'")
        return _kmers(int(name), spec)
    if spec.endswith(".json"):
        path = Path(spec)
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer {spec!r}: no such file; {near_file(path)}".rstrip("; "))
        return _bpe(spec, path.stat().st_mtime_ns, path.stat().st_size)
    hint = did_you_mean(spec, ["bases", "kmer:6", "tokenizer.json"])
    raise ValueError(f"unknown tokenizer {spec!r}; {hint}expected 'bases', 'kmer:K' or 'FILE.json'")


_kmers = lru_cache(KmerTokenizer)


@lru_cache(maxsize=8)
def _bpe(spec: str, *version: int) -> BpeTokenizer:
    """`version`: the file's time and size, so that a changed file is another tokenizer."""
    backend = read_backend(spec, Path(spec), _library(spec))
    backend.no_padding()
    backend.no_truncation()
    return BpeTokenizer(backend, spec)


def train_bpe(
    genome: Genome,
    regions: Sequence[Region],
    vocab_size: int,
    path: str | os.PathLike[str],
    *,
    most_bases: int = 10_000_000,
) -> None:
    """Train BPE on regions of a genome and save it as JSON of the `tokenizers` library.

    Words are at most `WORD` known bases of one strand; of more than `most_bases`, evenly spread words are taken, because
    memory grows with them (ten million bases: 1 GB). vocab_size includes unknown, start and padding; a small genome may
    give fewer. ValueError for a vocabulary without room for the four bases, or regions without a known base.
    """
    least = len(BASES) + SPECIALS
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size} must be at least {least}: four bases and {SPECIALS} special ids")
    library = _library(str(path))
    every = max(1, -(-sum(map(len, regions)) // most_bases))
    backend = library.Tokenizer(library.models.BPE())
    options = {"initial_alphabet": list(BASES), "show_progress": False}
    trainer = library.trainers.BpeTrainer(vocab_size=vocab_size - SPECIALS, **options)
    words = _words(genome, regions, every)
    first = next(words, None)
    if first is None:
        raise ValueError(f"no known base in {len(regions)} regions to train BPE on")
    backend.train_from_iterator(chain([first], words), trainer)
    write_text(Path(path), backend.to_str())


def _words(genome: Genome, regions: Sequence[Region], every: int) -> Iterator[str]:
    """One in `every` stretches of `WORD` bases, cut at unknown ones."""
    starts = ((region, start) for region in regions for start in range(region.start, region.stop, WORD))
    for region, start in islice(starts, 0, None, every):
        codes = genome.codes(region.contig, start, min(start + WORD, region.stop))
        yield from (decode(codes[start:stop]) for start, stop in runs(codes != UNKNOWN))


def _library(spec: str) -> ModuleType:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(f"tokenizer {spec!r} needs the package `tokenizers`: pip install tokenizers") from error
    return tokenizers
