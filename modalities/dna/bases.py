"""Bases as numbers: A 0, C 1, G 2, T 3, and 4 for an unknown one.

`U` (RNA) is read as T. `N`, `X` (a hard mask, as RepeatMasker -x writes it) and the IUPAC ambiguity codes (R Y S W K M B D H V)
are UNKNOWN. Lower case is soft-masked, and the same base.
"""

from __future__ import annotations

import numpy as np

__all__ = ["BASES", "UNKNOWN", "decode", "encode", "invalid_letter", "reverse_complement", "runs"]

BASES = "ACGT"
UNKNOWN = 4
IUPAC = "RYSWKMBDHV"  # codes for two or three bases
AMBIGUITY, URACIL, NOT_A_BASE = 5, 6, 255  # in LETTERS alone: NORMAL makes the first two UNKNOWN and T
SOFT, CODE = 8, 7  # a byte is code | SOFT
NORMAL = bytes([*range(5), UNKNOWN, 3, 7, *range(8, 13), UNKNOWN | SOFT, 3 | SOFT, 15, *range(16, 256)])


def _letters() -> bytes:
    table = bytearray([NOT_A_BASE]) * 256
    for code, letters in enumerate([*BASES, "NX", IUPAC, "U"]):
        for letter in letters:
            table[ord(letter)] = code
            table[ord(letter.lower())] = code | SOFT
    return bytes(table)


LETTERS = _letters()  # for bytes.translate
_NAMES = np.frombuffer(b"ACGTN", np.uint8)
_COMPLEMENT = np.array([3, 2, 1, 0, UNKNOWN], np.uint8)


def encode(text: str | bytes) -> np.ndarray:
    """Codes (N,) uint8 of letters. ValueError names the first invalid letter, and its place from 0."""
    data = text.encode("ascii", "replace") if isinstance(text, str) else text  # one "?" per foreign letter: places stay
    codes = data.translate(LETTERS)
    if (place := codes.find(NOT_A_BASE)) >= 0:
        letter = text[place] if isinstance(text, str) else chr(text[place])
        raise ValueError(f"letter {place} of the sequence: {invalid_letter(letter)}")
    return np.frombuffer(codes.translate(NORMAL), np.uint8) & CODE


def decode(codes: np.ndarray) -> str:
    """Upper-case letters of codes; UNKNOWN is N."""
    return _NAMES[codes].tobytes().decode("ascii")


def reverse_complement(codes: np.ndarray) -> np.ndarray:
    """The other strand, read in its own direction: codes (…, N) uint8 → (…, N). UNKNOWN stays unknown."""
    return _COMPLEMENT[np.asarray(codes)[..., ::-1]]


def runs(mask: np.ndarray) -> np.ndarray:
    """[start, stop) of every run of True: (n, 2) int64."""
    padded = np.zeros(len(mask) + 2, np.int8)
    padded[1:-1] = mask
    return np.flatnonzero(np.diff(padded)).reshape(-1, 2)


def invalid_letter(letter: str) -> str:
    """An error message for a letter of a sequence that is not a nucleotide code, with the likely cause."""
    if letter.upper() in "EFIJLOPQZ":
        return f"{letter!r} is not a nucleotide code (protein sequence?); expected A, C, G, T, U, N or an IUPAC code"
    if letter in "-.*":
        return f"{letter!r} is not a nucleotide code but a gap or stop (alignment?); remove gaps first"
    if not letter.isprintable() or ord(letter) > 126:
        return f"{letter!r} (0x{ord(letter):02x}) is not a nucleotide code (binary file?)"
    return f"{letter!r} is not a nucleotide code; expected A, C, G, T, U, N or an IUPAC code ({' '.join(IUPAC)})"
