"""Letters of DNA as numbers, and tokenizers behind one small interface: codes of bases in, int64
ids out.

A, C, G, T are 0, 1, 2, 3. `U` (RNA) is read as T; `N`, `X` (a hard mask, as RepeatMasker -x writes
it) and the IUPAC ambiguity codes are UNKNOWN, 4. Lower case is soft-masked, and the same base.

`load_tokenizer(spec)` knows three kinds:

    "bases"      one token a base: A, C, G, T are 0, 1, 2, 3
    "kmer:K"     K bases a token, 1 to 8, not overlapping: the number in base 4, first base most
                 significant
    "hf:NAME"    the tokenizer of a folder or repository of `transformers`, over bases, k-mers or
                 BPE

Targets come first: ids below `num_targets` can be predicted. Then come UNKNOWN, start and padding,
which cannot. A k-mer with an unknown base is UNKNOWN as a whole.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from modalities.tokenizers.copies import load_outside
from modalities.tokenizers.files import no_panic
from modalities.tokenizers.outside import fingerprint_of_tokenizer, start_id
from zoo.errors import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASES = "ACGT"
UNKNOWN = 4
NOT_A_BASE = 255
# A byte is code | SOFT.
SOFT = 8
CODE = 7

# A k-mer of 8 bases has 65,536 targets.
LONGEST_KMER = 8
# Unknown, start and padding.
SPECIALS = 3


def _code_table() -> bytes:
    """The code of each of the 256 bytes, for `bytes.translate`."""
    table = bytearray([NOT_A_BASE]) * 256
    for code, letters in enumerate(("A", "C", "G", "TU", "NXRYSWKMBDHV")):
        for letter in letters:
            table[ord(letter)] = code
            table[ord(letter.lower())] = code | SOFT
    return bytes(table)


LETTERS = _code_table()
_BASES = np.frombuffer(b"ACGTN", np.uint8)
_COMPLEMENT = np.array([3, 2, 1, 0, UNKNOWN], np.uint8)


def encode(text: str | bytes) -> np.ndarray:
    """Codes (N,) uint8 of letters. ValueError names the first invalid letter, and its place from
    0."""
    # One "?" per foreign letter: places stay.
    data = text.encode("ascii", "replace") if isinstance(text, str) else text
    codes = data.translate(LETTERS)
    place = codes.find(NOT_A_BASE)
    if place >= 0:
        letter = text[place] if isinstance(text, str) else chr(text[place])
        raise ValueError(f"letter {place} of the sequence: {invalid_letter(letter)}")
    return np.frombuffer(codes, np.uint8) & CODE


def decode(codes: np.ndarray) -> str:
    """Upper-case letters of codes; UNKNOWN is N."""
    return _BASES[codes].tobytes().decode("ascii")


def reverse_complement(codes: np.ndarray) -> np.ndarray:
    """The other strand, read in its own direction: codes (…, N) uint8 → (…, N). UNKNOWN stays
    unknown."""
    return _COMPLEMENT[np.asarray(codes)[..., ::-1]]


def invalid_letter(letter: str) -> str:
    """An error message for a letter that is no nucleotide code, with the likely cause."""
    cause = ""
    if letter.upper() in "EFIJLOPQZ":
        cause = " (protein sequence?)"
    elif letter in "-.*":
        cause = " but a gap or stop (alignment?)"
    return f"{letter!r} is not a nucleotide code{cause}; expected A, C, G, T, U, N or an IUPAC code"


@dataclass(frozen=True)
class Encoded:
    """Tokens of a sequence: ids and spans (N,) int64, the bases of each; left_over: bases at the
    end that make no token."""

    ids: np.ndarray
    spans: np.ndarray
    left_over: int


class DnaTokenizer(ABC):
    """A tokenizer of base codes; equal fingerprints (hex) give equal ids for every sequence.

    num_targets, unknown_id, bos_id, pad_id, vocab_size: T, T, T + 1, T + 2 and T + 3.
    widths: (vocab_size,) int64, bases each id stands for; 0 for start and padding.
    bases_per_token: their mean.
    step: K where every target has K bases, else 1, as for BPE: windows are multiples of it.
    """

    bases_per_token = 1.0

    def __init__(self, name: str, widths: np.ndarray, fingerprint: str) -> None:
        self.name = name
        self.step = int(widths[0]) if (widths == widths[0]).all() else 1
        self.num_targets = len(widths)
        self.unknown_id = len(widths)
        self.bos_id = len(widths) + 1
        self.pad_id = len(widths) + 2
        self.vocab_size = len(widths) + SPECIALS
        self.widths = np.concatenate([widths, [self.step, 0, 0]]).astype(np.int64)
        self.fingerprint = hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()

    @abstractmethod
    def encode(self, codes: np.ndarray) -> Encoded:
        """Tokens of codes (T,) uint8, 0..4. No start or padding is added."""

    def decode(self, ids: Iterable[int]) -> np.ndarray:
        """Codes (T,) uint8 of ids; start and padding are left out. ValueError for an id outside the
        vocabulary."""
        if not isinstance(ids, np.ndarray):
            ids = list(ids)
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            valid = f"0..{self.vocab_size - 1} of {self.name!r}"
            raise ValueError(f"ids {ids.min()}..{ids.max()} are outside {valid}")
        return self._codes_of(ids[ids <= self.unknown_id])

    @abstractmethod
    def _codes_of(self, ids: np.ndarray) -> np.ndarray: ...


class KmerTokenizer(DnaTokenizer):
    """K bases a token; K = 1 is "bases". `left_over` is what is left of a sequence after its last
    whole k-mer."""

    def __init__(self, k: int, name: str) -> None:
        super().__init__(name, np.full(4**k, k), f"kmer-{k}")
        self.k = k
        self.bases_per_token = float(k)
        self._powers = 4 ** np.arange(k - 1, -1, -1)
        # (4^K, K): the digits of each number.
        codes = (np.arange(4**k)[:, None] // self._powers % 4).astype(np.uint8)
        self._table = np.concatenate([codes, np.full((1, k), UNKNOWN, np.uint8)])

    def encode(self, codes: np.ndarray) -> Encoded:
        count = len(codes) // self.k
        whole = codes[: count * self.k].reshape(count, self.k)
        ids = whole @ self._powers
        ids[(whole == UNKNOWN).any(1)] = self.unknown_id
        return Encoded(ids, np.full(count, self.k, np.int64), len(codes) - count * self.k)

    def _codes_of(self, ids: np.ndarray) -> np.ndarray:
        return self._table[ids].reshape(-1)


class OutsideDnaTokenizer(DnaTokenizer):
    """A fast tokenizer of `transformers`, `inner`. Its targets are entries of A, C, G and T alone,
    in the order of their ids; every other token (N, a k-mer with N, unknown) is UNKNOWN. Bases at
    the end that make no token are left over.

    library_ids: (vocab_size,) int64, the library's id of each; of UNKNOWN that of N or of the
    unknown token.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, name: str) -> None:
        spec = f"hf:{name}"
        vocabulary = inner.get_vocab()
        special = set(inner.all_special_ids)
        targets = []
        for entry in sorted(vocabulary, key=vocabulary.__getitem__):
            if vocabulary[entry] not in special and re.fullmatch(f"[{BASES}]+", entry):
                targets.append(entry)
        if not targets:
            raise ValueError(f"tokenizer {spec!r} has no token of upper-case A, C, G and T")
        if not inner.is_fast:
            raise ValueError(
                f"tokenizer {spec!r} does not tell where its tokens are; "
                "expected one with tokenizer.json"
            )
        widths = np.array([len(entry) for entry in targets])
        super().__init__(spec, widths, fingerprint_of_tokenizer(inner))
        self.inner = inner
        self._codes = [encode(entry) for entry in targets]
        self._codes.append(np.full(1, UNKNOWN, np.uint8))
        target_ids = [vocabulary[entry] for entry in targets]
        # Our ids, by those of the library.
        self._ids = np.full(max(vocabulary.values()) + 1, self.unknown_id, np.int64)
        self._ids[target_ids] = np.arange(len(targets))
        start = start_id(inner, name)
        pad = start if inner.pad_token_id is None else inner.pad_token_id
        library_ids = [*target_ids, self._library_unknown(start), start, pad]
        self.library_ids = np.array(library_ids, np.int64)
        codes = np.random.default_rng(0).integers(0, 4, 1 << 16).astype(np.uint8)
        random_ids = self.encode(codes).ids
        if not len(random_ids) or (random_ids == self.unknown_id).any():
            raise ValueError(
                f"tokenizer {spec!r} does not read upper-case DNA: random bases have unknown tokens"
            )
        if (widths == widths[0]).all():
            self.bases_per_token = float(self.step)
        else:
            self.bases_per_token = len(codes) / len(random_ids)

    def _library_unknown(self, start: int) -> int:
        """The library's id of N, or of its unknown token; the start where it has neither."""
        unknown = self.inner("N" * int(self.widths.max()), add_special_tokens=False)["input_ids"]
        if unknown:
            return unknown[0]
        return start if self.inner.unk_token_id is None else self.inner.unk_token_id

    def encode(self, codes: np.ndarray) -> Encoded:
        with no_panic(self.name):
            tokens = self.inner(
                decode(codes), add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        ids = self._ids[np.asarray(tokens["input_ids"], np.int64)]
        ends = np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2)
        spans = ends[:, 1] - ends[:, 0]
        known = ids < self.num_targets
        end = int(ends[-1, 1]) if len(ends) else 0
        if int(spans.sum()) != end or (spans[known] != self.widths[ids[known]]).any():
            raise ValueError(
                f"tokenizer {self.name!r} does not keep every base in one token; "
                "expected one that does"
            )
        return Encoded(ids, spans, len(codes) - end)

    def _codes_of(self, ids: np.ndarray) -> np.ndarray:
        pieces = [self._codes[number] for number in ids]
        return np.concatenate([np.empty(0, np.uint8), *pieces])


_kmers = lru_cache(KmerTokenizer)


def load_tokenizer(spec: str = "bases") -> DnaTokenizer:
    """The tokenizer of a spec string; the same object for the same spec. ValueError for an unknown
    one, naming the nearest, and for a tokenizer that is none of DNA."""
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"tokenizer must be a non-empty string such as 'bases', got {spec!r}")
    if spec == "bases":
        return _kmers(1, spec)
    kind, _, name = spec.partition(":")
    if kind == "hf":
        return load_outside(name, OutsideDnaTokenizer)
    if kind == "kmer":
        if not name.isdecimal() or not 1 <= int(name) <= LONGEST_KMER:
            expected = f"a whole number from 1 to {LONGEST_KMER}, as in 'kmer:6'"
            raise ValueError(f"tokenizer {spec!r}: K must be {expected}")
        return _kmers(int(name), spec)
    hint = did_you_mean(spec, ["bases", "kmer:6"])
    raise ValueError(f"unknown tokenizer {spec!r}; {hint}expected 'bases', 'kmer:K' or 'hf:FOLDER'")
