"""Bases as numbers: A 0, C 1, G 2, T 3, and 4 for what is not known.

`U` (RNA) is read as T. `N` and every IUPAC ambiguity code (R Y S W K M B D H V) is UNKNOWN: none of them says which base
is there. Lower case means soft-masked, and is the same base.
"""

from __future__ import annotations

import numpy as np

__all__ = ["AMBIGUOUS", "BASES", "UNKNOWN", "decode", "encode", "reverse_complement", "why_not_a_base"]

BASES = "ACGT"
UNKNOWN = 4
AMBIGUOUS = "RYSWKMBDHV"  # IUPAC codes for two or three bases
_NOT_A_BASE = 255


def _table() -> np.ndarray:
    table = np.full(256, _NOT_A_BASE, np.uint8)
    for letters, code in ((BASES, range(4)), ("U", [3]), ("N" + AMBIGUOUS, [UNKNOWN] * 11)):
        for letter, number in zip(letters, code, strict=True):
            table[[ord(letter), ord(letter.lower())]] = number
    return table


_CODES = _table()
_LETTERS = np.frombuffer(b"ACGTN", np.uint8)
_COMPLEMENT = np.array([3, 2, 1, 0, UNKNOWN], np.uint8)


def encode(text: str | bytes) -> np.ndarray:
    """Codes (N,) uint8 of letters. ValueError names the first letter that is no base, and its place from 0."""
    data = text.encode("ascii", "replace") if isinstance(text, str) else text  # one "?" per foreign letter: places stay
    codes = _CODES[np.frombuffer(data, np.uint8)]
    if len(codes) and codes.max() == _NOT_A_BASE:
        place = int(np.argmax(codes))
        letter = text[place] if isinstance(text, str) else text[place : place + 1].decode("latin-1")
        raise ValueError(f"letter {place} of the sequence, {why_not_a_base(letter)}")
    return codes


def decode(codes: np.ndarray) -> str:
    """Upper-case letters of codes; UNKNOWN is N. ValueError for a code above 4."""
    codes = np.asarray(codes)
    if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) <= UNKNOWN:
        raise ValueError(f"codes {int(codes.min())}..{int(codes.max())} are outside 0..4 (A, C, G, T, unknown)")
    return _LETTERS[codes].tobytes().decode("ascii")


def reverse_complement(codes: np.ndarray) -> np.ndarray:
    """The other strand, read in its own direction: (N,) uint8 -> (N,) uint8. UNKNOWN stays unknown."""
    return _COMPLEMENT[np.asarray(codes)[::-1]]


def why_not_a_base(letter: str) -> str:
    """The letter, and what it may mean that it stands in a sequence of DNA."""
    if letter.upper() in "EFIJLOPQXZ":
        return f"{letter!r}, is no base: is this protein? Expected A, C, G, T, U, N or an IUPAC code"
    if letter in "-.*":
        return f"{letter!r}, is no base but a gap or a stop: an alignment? Take such letters out first"
    if not letter.isprintable() or ord(letter) > 126:
        return f"{letter!r} (0x{ord(letter):02x}), is no letter of a sequence: is this a binary file?"
    return f"{letter!r}, is no base: expected A, C, G, T, U, N or an IUPAC code ({' '.join(AMBIGUOUS)})"
